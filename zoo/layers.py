"""Parts of a decoder: matmuls, LoRA, gated MLP, RMSNorm, rotary and token embeddings, the loss.

Shapes: B batch, T positions, D embed, F mlp, N heads, H head dim, V vocab, R shards of B and T, M
positions of one shard, C positions in one chunk of the loss.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.ad_checkpoint import checkpoint_name

from .sharding import auto, constrain, device, explicit, in_use, mesh_axes, param, reshape, shards


def multiply(x: jax.Array, weight: nnx.Param, contract: int = 1, seq: str = "seq") -> jax.Array:
    """Multiplies x[B, T, ...] by a weight in use: x's last `contract` dims with the weight's first.

    In the result, T has the logical axis `seq` and the dims after it have the weight's axes; this
    fixes the layout of every activation in a layer. B and T are merged into one dim unless T is
    split: where a gradient contracts two dims at once, XLA's CPU backend transposes its operands
    first, which made the whole training step 1.6 times slower.
    """
    if low := getattr(weight, "low", None):  # see `layer_in_use`
        return low.multiply(x, contract, seq)
    w, (B, T, *inner) = weight[...].astype(x.dtype), x.shape
    axes = weight.out_sharding[-w.ndim :]
    if shards("seq") > 1 or shards(seq) > 1:
        x, out = constrain(x, "batch", "seq", *axes[:contract]), ("batch", seq, *axes[contract:])
        return constrain(jnp.tensordot(x, w, contract, out_sharding=explicit(*out)), *out)
    x = reshape(x, (B * T, *inner), "batch", *axes[:contract])
    y = jnp.tensordot(x, w, contract, out_sharding=explicit("batch", *axes[contract:]))
    return reshape(y, (B, T, *y.shape[1:]), "batch", "seq", *axes[contract:])


def layer_in_use(weights, names: dict[str, str], config):
    """`in_use` for a layer, whose products are in config.matmul."""
    used = in_use(weights, names, config.dtype)
    if not config.matmul:
        return used
    from .low_precision import lowered

    return lowered(weights, used, names, config)


def dot(dims: str, x: jax.Array, y: jax.Array, where=None) -> jax.Array:
    """jnp.einsum with a float32 result; `where`: its out_sharding."""
    return jnp.einsum(dims, x, y, preferred_element_type=jnp.float32, out_sharding=where)


def project(module, name: str, x: jax.Array, contract: int = 1, seq: str = "seq") -> jax.Array:
    """`multiply` by the module's weight of this name, plus its adapter's output if it has one."""
    y = multiply(x, getattr(module, name), contract, seq)
    if name in module.lora:
        adapter = module.lora[name]
        exact = getattr(x, "exact", None)  # see low_precision.Rounded
        x = x if exact is None else gather(exact)
        y += multiply(multiply(x, adapter.a, contract), adapter.b, seq=seq) * adapter.scale
    return y


def add_bias(y_BT: jax.Array, bias: nnx.Param) -> jax.Array:
    """[B, T, ...] + bias [...]."""
    return y_BT + bias[...].astype(y_BT.dtype)[None, None]


def gather(x_BTD: jax.Array, weight=None) -> jax.Array:
    """The input of a sublayer: with sequence-sharded tensor parallelism, all of its positions. In
    low precision, it is rounded for the weights that multiply it, of which `weight` is one.
    """
    if low := getattr(weight, "low", None):
        return low.round(x_BTD)
    if mesh_axes("residual_seq") == mesh_axes("seq"):
        return x_BTD
    return checkpoint_name(constrain(x_BTD, "batch", "seq", "act_embed"), "gathered")


def fit_positions(method):
    """A method of a model with tokens [B, T] or [B]: T that the rules can't divide is not split."""

    @functools.wraps(method)
    def fitting(self, tokens, *args, **kwargs):
        T = tokens.shape[1] if tokens.ndim > 1 else 1
        whole = {axis: None for axis in ("seq", "residual_seq") if T % shards(axis)}
        rules = dict(get_logical_axis_rules() or ()) | whole
        with nnx.logical_axis_rules(tuple(rules.items())):
            return method(self, tokens, *args, **kwargs)

    return fitting


def stripe(config, x_BT, *axes: str, back: bool = False) -> Any:
    """Brings [B, T, ...] into the order that positions have on a ring, or `back`; see context.py."""
    if x_BT is None or shards("seq") == 1:
        return x_BT
    from .context import reorder

    return reorder(config, x_BT, *axes, back=back)


def adapters(module: nnx.Module, config, rngs: nnx.Rngs, **contract: int) -> nnx.Dict:
    """An Adapter (lora.py) for each weight of a module that config.lora_targets lists, by name.

    `contract` maps each weight that can have one to how many dims of its input are contracted.
    """
    if not config.lora_rank:
        return nnx.Dict()
    from .lora import Adapter

    names = [name for name in contract if name in config.lora_targets]
    return nnx.Dict({n: Adapter(getattr(module, n), contract[n], config, rngs=rngs) for n in names})


class GatedMLP(nnx.Module):
    """(activation(x · gate) * (x · up)) · down (Shazeer 2020); SwiGLU with silu, GeGLU with gelu.
    Tensor parallelism splits F, and then the output costs one all-reduce, or with a split residual
    stream one reduce-scatter. width: F; 0: config.mlp.
    """

    def __init__(self, config, activation=jax.nn.silu, width: int = 0, *, rngs: nnx.Rngs):
        D, F = config.embed, width or config.mlp
        self.activation = activation
        self.gate = param(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.up = param(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.down = param(rngs, (F, D), ("mlp", "embed"), (F * 2 * config.num_layers) ** -0.5)
        self.lora = adapters(self, config, rngs, gate=1, up=1, down=1)

    def __call__(self, x_BTD):
        x_BTD = gather(x_BTD, self.up)
        hidden_BTF = self.activation(project(self, "gate", x_BTD)) * project(self, "up", x_BTD)
        return project(self, "down", hidden_BTF, seq="residual_seq")


class RMSNorm(nnx.Module):
    """x / rms(x) · (scale + offset), in float32 (Zhang & Sennrich 2019); at first x / rms(x)."""

    def __init__(self, dim: int, eps: float, offset: float = 0.0):
        start = jnp.full(dim, 1.0 - offset, jnp.float32)
        self.scale = nnx.Param(start, out_sharding=("norm",), eager_sharding=False)
        self.eps, self.offset = eps, offset

    def __call__(self, x):
        x32 = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        scale = jnp.expand_dims(self.scale[...], tuple(range(x.ndim - 1)))
        scale = scale + self.offset if self.offset else scale
        return (x32 * jax.lax.rsqrt(variance + self.eps) * scale).astype(x.dtype)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """Limits x smoothly to ±cap (Bello et al. 2017); None: returns x."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rotate(x_BTNH: jax.Array, angles_BTH: jax.Array, magnitude: float = 1.0) -> jax.Array:
    """Rotary embedding (Su et al. 2021); like Hugging Face, dims i and i + H/2 rotate as a pair."""
    cos, sin = (f(angles_BTH)[:, :, None, :] for f in (jnp.cos, jnp.sin))
    if magnitude != 1:
        cos, sin = cos * magnitude, sin * magnitude
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def rope_angles(kind, head_dim: int, positions_BT: jax.Array) -> jax.Array:
    """Angles of each pair of dims for an attention.Kind: [B, T, H/2], float32 radians."""
    theta = kind.rope_theta
    frequency = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    match kind.rope_scaling:
        case None:
            keep, factor = 1, 1
        case "linear", factor:
            keep = 0
        case "yarn", factor, fast, slow, original, truncate, _:
            # Indices of the pairs of dims that make so many turns within the original length.
            lengths = fast * 2 * math.pi, slow * 2 * math.pi
            first, last = (math.log(original / n, theta) * head_dim / 2 for n in lengths)
            if truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, head_dim - 1)
            pair = jnp.arange(head_dim // 2, dtype=jnp.float32)
            keep = 1 - jnp.clip((pair - first) / (last - first or 0.001), 0, 1)
        case factor, low, high, original:
            turns = original * frequency / (2 * math.pi)  # within the original length
            keep = jnp.clip((turns - low) / (high - low), 0, 1)
    if kind.rope_scaling is not None:
        frequency = frequency * (keep + (1 - keep) / factor)
    return positions_BT.astype(jnp.float32)[:, :, None] * frequency[None, None]


# ---- token embeddings and the loss ---------------------------------------------------------------


SHARDS = ("batch", "seq")  # the logical axes of R


def by_shard(x_BT: jax.Array, *axes: str) -> jax.Array:
    """[B, T, ...] → [R, M, ...], without communication. `axes`: of the dims after T."""
    (B, T, *rest), batch, seq = x_BT.shape, shards("batch"), shards("seq")
    if seq > 1:
        parts = (batch, B // batch, seq, T // seq, *rest)
        x_BT = reshape(x_BT, parts, "batch", None, "seq", None, *axes).swapaxes(1, 2)
    return reshape(x_BT, (batch * seq, B * T // (batch * seq), *rest), SHARDS, None, *axes)


def from_shards(x_RM: jax.Array, shape: tuple[int, ...], *axes: str) -> jax.Array:
    """The inverse of `by_shard`; shape: (B, T)."""
    (B, T), rest, batch, seq = shape, x_RM.shape[2:], shards("batch"), shards("seq")
    if seq > 1:
        parts = (batch, seq, B // batch, T // seq, *rest)
        x_RM = reshape(x_RM, parts, "batch", "seq", None, None, *axes).swapaxes(1, 2)
    return reshape(x_RM, (B, T, *rest), "batch", "seq", *axes)


def vocabulary(config, *, rngs: nnx.Rngs) -> nnx.Param:
    """An embedding table [V, D], for lookup or for unembedding."""
    V, D = config.vocab_size, config.embed
    return param(rngs, (V, D), ("vocab", "embed"), D**-0.5)


def table_copies(table: nnx.Param, dtype: str) -> jax.Array:
    """Gives each shard of B and T its own copy of a table, [R, V, D]; every device holds one anyway.

    Lookups and chunks of the loss then add to their own copy's gradient, and the copies' gradients
    are summed once, in the transpose of this broadcast; otherwise they would be summed in every
    chunk. V is padded with zeros to a multiple of its own shards.
    """
    table_VD, vocab = table[...].astype(dtype), table.out_sharding[0]
    if padding := -len(table_VD) % shards(vocab):
        padded_VD = jnp.pad(table_VD, ((0, padding), (0, 0)))
        table_VD = constrain(padded_VD, None, "act_embed")  # gather before splitting
    table_VD, axes = constrain(table_VD, vocab, "act_embed"), (SHARDS, vocab, "act_embed")
    copies = (shards(SHARDS), *table_VD.shape)
    return constrain(jnp.broadcast_to(table_VD, copies, out_sharding=explicit(*axes)), *axes)


def look_up(table_RVD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Embeddings of tokens, [B, T, D]; each shard of B and T reads its own copy of the table."""
    lookup = jax.vmap(lambda table_VD, tokens_M: table_VD[tokens_M])
    lookup = auto(lookup, SHARDS, None, "act_embed")
    tokens_RM = by_shard(constrain(tokens_BT, "batch", "seq"))
    x_BTD = from_shards(lookup(table_RVD, tokens_RM), tokens_BT.shape, "act_embed")
    return constrain(x_BTD, "batch", "residual_seq", "act_embed")


def unembed(x_BTD: jax.Array, table_RVD: jax.Array, config) -> jax.Array:
    """Logits [B, T, V] in float32."""
    logits_RMV = _logits(by_shard(gather(x_BTD), "act_embed"), table_RVD, config)
    logits_BTV = from_shards(logits_RMV, x_BTD.shape[:2], "vocab")
    if logits_BTV.shape[-1] == config.vocab_size:
        return logits_BTV
    return constrain(logits_BTV, "batch", "seq", None)[..., : config.vocab_size]


def cross_entropy(x_BTD, table_RVD, targets_BT, config):
    """Returns (sum of cross entropies in nats, number of targets), float32 scalars.

    Targets below 0 are padding and don't count. Only `positions_at_once` positions of each sequence
    have logits at the same time.
    """
    targets_BT = constrain(targets_BT, "batch", "seq")
    (B, T), R = targets_BT.shape, len(table_RVD)
    rows, length = B // shards("batch"), T // shards("seq")  # of a shard
    C = positions_at_once(config.loss_chunk, rows, length)

    def chunks(x, *axes):  # [B, T, ...] → [T/C of a shard, R, B/R·C, ...]
        x = by_shard(x, *axes)
        x = reshape(x, (R, rows, length // C, C, *x.shape[2:]), SHARDS, None, None, None, *axes)
        x = jnp.moveaxis(x, 2, 0)
        return reshape(x, (length // C, R, -1, *x.shape[4:]), None, SHARDS, None, *axes)

    @jax.checkpoint  # the backward pass recomputes a chunk's logits
    def chunk(total_R, x_and_targets):
        x_RMD, targets_RM = x_and_targets
        logits_RMV = _logits(x_RMD, table_RVD, config)
        picked_RMV = jnp.arange(logits_RMV.shape[-1])[None, None] == targets_RM[..., None]
        picked_RM = jnp.where(picked_RMV, logits_RMV, 0).sum(axis=-1)
        nats_RM = jax.nn.logsumexp(logits_RMV, axis=-1) - picked_RM
        return total_R + jnp.where(targets_RM < 0, 0, nats_RM).sum(axis=1), None

    zeros_R, x_BTD = constrain(jnp.zeros(R), SHARDS), gather(x_BTD)
    total_R, _ = jax.lax.scan(chunk, zeros_R, (chunks(x_BTD, "act_embed"), chunks(targets_BT)))
    return _before_backward(total_R.sum()), (targets_BT >= 0).sum().astype(jnp.float32)


def positions_at_once(loss_chunk: int, rows: int, seq_len: int) -> int:
    """C: how many positions of each of a device's `rows` have logits at once; divides seq_len.

    At most loss_chunk, but on accelerators up to 1,024 per device: with fewer, the matrix units
    wait for the table. By the TPU compiler's estimate, the loss of a row of 32,768 takes 1.8 times
    as long with 256.
    """
    most = loss_chunk if device().platform == "cpu" else max(loss_chunk, 1_024 // rows)
    return next(c for c in range(min(seq_len, most), 0, -1) if seq_len % c == 0)


def _logits(x_RMD, table_RVD, config):
    """Logits [R, M, V] in float32; padded tokens get -inf. A config may have a logits_soft_cap."""
    axes = (SHARDS, None, "vocab")
    logits_RMV = soft_cap(
        dot("RMD,RVD->RMV", x_RMD, table_RVD, explicit(*axes)),
        getattr(config, "logits_soft_cap", None),
    )
    if logits_RMV.shape[-1] > config.vocab_size:
        padding = jnp.arange(logits_RMV.shape[-1])[None, None] >= config.vocab_size
        logits_RMV = jnp.where(padding, -jnp.inf, logits_RMV)
    return constrain(logits_RMV, *axes)


@jax.custom_vjp
def _before_backward(total):
    """Makes XLA compute the loss before the backward pass, which doesn't need its value.

    Otherwise XLA may compute it later and keep the gathered table until then: 1 GB per chip for 8b.
    """
    return total


_before_backward.defvjp(
    lambda total: (total, total),
    lambda total, grad: (jax.lax.optimization_barrier((grad, total))[0],),
)


# ---- a stack of layers ---------------------------------------------------------------------------


# What a layer's forward pass keeps for its backward pass; the rest is recomputed.
REMAT_POLICIES = {
    "none": jax.checkpoint_policies.everything_saveable,  # under FSDP, gathered weights too
    "dots": jax.checkpoint_policies.save_from_both_policies(  # products with a weight
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names("product"),  # in low precision
    ),
    # The two sublayers' outputs: tensor parallelism repeats no all-reduce.
    "sublayers": jax.checkpoint_policies.save_only_these_names("sublayer"),
    # What sublayers gather before they start: sequence-sharded tensor parallelism repeats no gather.
    "gathered": jax.checkpoint_policies.save_only_these_names("gathered"),
    "full": jax.checkpoint_policies.nothing_saveable,  # only the layer's input
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(  # the same, on the host
        names_which_can_be_saved=[], names_which_can_be_offloaded=["input"],
        offload_src="device", offload_dst="pinned_host",
    ),
}  # fmt: skip


def stack(make_layer, num_layers: int, rngs: nnx.Rngs, axis: str = "layers"):
    """Builds `num_layers` layers as one module; its variables start with L, logical axis `axis`.

    Args:
      make_layer: a function of `rngs` that returns a layer.
    """
    layers = nnx.vmap(lambda rngs: make_layer(rngs=rngs))(rngs.split(num_layers))
    # nnx.vmap's transform_metadata names the axis only in NNX's graph mode, not in tree mode.
    for _, variable in nnx.iter_graph(layers):
        if isinstance(variable, nnx.Variable) and hasattr(variable, "out_sharding"):
            variable.set_metadata(out_sharding=(axis, *variable.out_sharding))
    return layers


def scan_layers(function, x: jax.Array, layers, kinds: tuple, remat, unroll: int = 1):
    """Runs x through stacked layers, so that compile time doesn't grow with their number.

    Each iteration of the scan runs one *period* of layers: one for each kind, compiled for that
    kind. Layers that are left over at the end run after the scan.

    Args:
      function: (x, one layer of `layers`, its kind) → (x, outputs).
      layers: tree of arrays whose first dim is L.
      kinds: static settings of layers with equal shapes; layer l has kind l mod len(kinds).
      remat: one of REMAT_POLICIES' values.
      unroll: layers per iteration of the compiled loop, if there is only one kind.

    Returns: (x, outputs of all layers, stacked in a first dim L).
    """
    if shards("layers") > 1:
        raise ValueError("the rules split the layers into stages, which only `loss` runs")
    offloads = remat is REMAT_POLICIES["offload"]

    def named(x, layer, kind):
        return function(checkpoint_name(x, "input") if offloads else x, layer, kind=kind)

    if len(kinds) == 1:
        layer = functools.partial(named, kind=kinds[0])
        layer = jax.checkpoint(layer, policy=remat, prevent_cse=False)
        return jax.lax.scan(layer, x, layers, unroll=unroll)
    L, P = jax.tree.leaves(layers)[0].shape[0], len(kinds)
    whole = L - L % P if L >= 2 * P else 0  # XLA would unroll a loop with one iteration
    outputs = []

    def run(x, first, count, prevent_cse):
        """Layers `first` to `first` + count - 1."""
        found = []
        for i in range(count):
            # Layers are indexed in the whole stack: slicing it by kind would copy all parameters,
            # their gradients and the cache.
            def layer(x, layers, l=first + i, kind=kinds[i % P]):
                at = functools.partial(jax.lax.dynamic_index_in_dim, index=l, keepdims=False)
                return named(x, jax.tree.map(at, layers), kind)

            layer = jax.checkpoint(layer, policy=remat, prevent_cse=prevent_cse)
            x, output = layer(x, layers)
            found.append(output)
        return x, jax.tree.map(lambda *o: jnp.stack(o), *found)

    if whole:
        trip = functools.partial(run, count=P, prevent_cse=False)
        x, found = jax.lax.scan(trip, x, jnp.arange(0, whole, P))
        outputs.append(jax.tree.map(lambda o: o.reshape(whole, *o.shape[2:]), found))
    if whole < L:  # outside a loop, XLA may merge forward and recomputed operations
        x, found = run(x, whole, L - whole, prevent_cse=True)
        outputs.append(found)
    return x, jax.tree.map(lambda *o: jnp.concatenate(o), *outputs)


def objective(model, batch: tuple, names: dict[str, str]) -> Any:
    """The training objective of a batch. Layers that the rules split run in stages.

    Args:
      model: a decoder. Has the methods
        embed_tokens(tables, tokens, positions or None) → x [B, T, D],
        first_layers(x, *batch) → x, if some layers come before the stacked ones,
        run(x, *batch) → (x, figures: name → sums over positions [L, ...])
        and costs: figure → its weight in the objective; see `add_costs`.
      batch: tokens, targets and segment ids, arrays [B, T], or None.
      names: a weight's logical axis at rest → its name in use.

    Returns: (objective, count, {"loss": (cross entropy, count)}, figures).
    """
    if shards("layers") > 1:
        from .pipeline import in_stages

        return in_stages(model, batch, names)
    if hasattr(model, "mtp"):
        from .mtp import objective_with_mtp

        return objective_with_mtp(model, batch, names)
    batch = tuple(stripe(model.config, x) for x in batch)
    tables = vocabulary_tables(model)
    x_BTD, figures = model.run(begin(model, tables, batch), *batch)
    total, count = finish(model, tables, x_BTD, batch[1])
    return add_costs(model, total, figures), count, {"loss": (total, count)}, figures


def begin(model, tables: list[jax.Array], batch: tuple):
    """The input of the stacked layers."""
    x_BTD = model.embed_tokens(tables, batch[0])
    return model.first_layers(x_BTD, *batch) if hasattr(model, "first_layers") else x_BTD


def vocabulary_tables(model) -> list[jax.Array]:
    """Copies of the tables that embed tokens (the first) and unembed the output (the last)."""
    tables = (model.embed,) if model.config.tie_embeddings else (model.embed, model.unembed)
    return [table_copies(table, model.config.dtype) for table in tables]


def finish(model, tables: list[jax.Array], x_BTD, targets_BT):
    """The cross entropy after the layers: (sum in nats, number of targets)."""
    return cross_entropy(model.final_norm(x_BTD), tables[-1], targets_BT, model.config)


def add_costs(model, total, figures):
    """Adds the weighted means over the layers of the figures in model.costs."""
    return total + sum(w * figures[name].mean(axis=0) for name, w in model.costs.items())
