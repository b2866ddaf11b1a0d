"""Mamba-2 and gated short convolutions match their definitions, loops over positions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.common.mesh import make_mesh
from tests.conftest import full_except
from tests.support.models import built
from tests.support.quick import QUICK
from zoo.core.attention import make_inputs
from zoo.core.sharding import constrain, in_use
from zoo.options.compute_options import ComputeOptions
from zoo.recurrent import chunks, mamba, short_convolution, ssd, state, state_context

pytestmark = [pytest.mark.promise("recurrent-layers"), pytest.mark.usefixtures("strict")]

B, G, H, K, V, W = 2, 2, 3, 5, 4, 4
N = G * H
ROWS = 16  # two positions on each of eight devices, so the convolution reads two devices back
DECAYS = {"slow": (1e-4, 1e-2), "fast": (5.0, 40.0), "both": (1e-4, 40.0)}
compiled = functools.partial(jax.jit, compiler_options=QUICK)


# ---- the recurrence by chunks --------------------------------------------------------------------


def arrays(T: int, decay: str):
    """(q, k, v, log_decay, state) in float64, and the starts of segments."""
    random = np.random.default_rng(0)
    q, k = (random.standard_normal((B, T, G, K)) for _ in range(2))
    least, most = np.log(DECAYS[decay])
    log_decay = -np.exp(random.uniform(least, most, (B, T, N)))
    starts = random.random((B, T)) < 4 / T
    starts[0, [0, T // 2, T - 1]] = True
    starts[1, 0] = False
    v, before = random.standard_normal((B, T, N, V)), random.standard_normal((B, N, K, V))
    return [jnp.asarray(x) for x in (q, k, v, log_decay, before)], jnp.asarray(starts)


def definition(q, k, v, log_decay, before, starts):
    """(state after the last position, outputs), by a loop over positions."""

    def position(state, at):
        q, k, v, log_decay, starts = at
        q, k = (jnp.repeat(x, N // q.shape[1], axis=1) for x in (q, k))
        state = jnp.where(starts[:, None, None, None], 0, state)
        state = state * jnp.exp(log_decay)[..., None, None] + k[..., None] * v[..., None, :]
        return state, jnp.einsum("bnkv,bnk->bnv", state, q)

    by_position = [x.swapaxes(0, 1) for x in (q, k, v, log_decay, starts)]
    after, outputs = jax.lax.scan(position, before, by_position)
    return after, outputs.swapaxes(0, 1)


def worst(got, want) -> float:
    """The largest difference relative to each array's largest value."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return np.max([np.abs(np.subtract(a, b)).max() / np.abs(b).max() for a, b in pairs])


def values_and_gradients(function, operands):
    """(results, gradients of a weighted sum of them)."""

    def total(operands):
        results = function(*operands)
        weighted = [
            (x * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)).sum()
            for x in jax.tree.leaves(results)
        ]
        return sum(weighted), results

    gradients, results = compiled(jax.grad(total, has_aux=True))(operands)
    return results, gradients


SIZES = [(24, 8), (24, 7), (24, 24), (24, 64), (24, 1), (1, 64)]  # T, chunk
CASES = [(T, size, decay) for T, size in SIZES for decay in DECAYS]
CASES += [(200, 128, "both")]  # as on TPUs


@pytest.mark.parametrize(("T", "size", "decay"), full_except(CASES, [(24, 7, "both")]))
def test_chunks_match_the_definition(T, size, decay):
    """Chunk sizes that do and don't divide T; segments that begin anywhere; a state to begin with."""
    with jax.enable_x64():
        operands, starts = arrays(T, decay)
        want = values_and_gradients(functools.partial(definition, starts=starts), operands)

        def by_chunks(q, k, v, log_decay, before):
            return ssd.run(q, k, v, log_decay, starts, before, size)

        assert worst(values_and_gradients(by_chunks, operands), want) < 1e-10
        singles = [x.astype(jnp.float32) for x in operands]
        assert worst(values_and_gradients(by_chunks, singles), want) < 1e-5


# ---- with the convolution, on several devices ----------------------------------------------------


def projections(dtype=np.float64):
    """The operands of `mamba.on_device`, but ids, by name, and the ids."""
    random = np.random.default_rng(3)
    normal = random.standard_normal
    step = np.exp(random.uniform(-5, 1, (B, ROWS, N)))
    operands = {
        "x": normal((B, ROWS, N, V)),
        "b": normal((B, ROWS, G, K)),
        "c": normal((B, ROWS, G, K)),
        "log_decay": -step * np.exp(random.uniform(-2, 3, N)),
        "step": step,
        "x_kernel": normal((W, N, V)),
        "b_kernel": normal((W, G, K)),
        "c_kernel": normal((W, G, K)),
        "x_bias": normal((N, V)),
        "b_bias": normal((G, K)),
        "c_bias": normal((G, K)),
        "skip": normal(N),
    }
    ids = 1 + np.cumsum(random.random((B, ROWS)) < 3 / ROWS, axis=1, dtype=np.int32)
    return {name: jnp.asarray(x, dtype) for name, x in operands.items()}, jnp.asarray(ids)


def convolved(x, kernel, ids):
    """A convolution within segments, position by position."""
    outputs = []
    for t in range(x.shape[1]):
        seen = [(s, W - 1 - (t - s)) for s in range(max(0, t - W + 1), t + 1)]
        shape = (-1, *[1] * (x.ndim - 2))
        same = [jnp.where(ids[:, s] == ids[:, t], 1.0, 0.0).reshape(shape) for s, _ in seen]
        outputs.append(
            sum(x[:, s] * kernel[w][None] * a for (s, w), a in zip(seen, same, strict=True))
        )
    return jnp.stack(outputs, axis=1)


def plain(operands: dict, ids):
    """What `mamba.on_device` computes, by its definition."""
    x, b, c = (
        jax.nn.silu(
            convolved(operands[name], operands[f"{name}_kernel"], ids)
            + operands[f"{name}_bias"][None, None]
        )
        for name in ("x", "b", "c")
    )
    starts = jnp.concatenate((jnp.zeros((B, 1), bool), ids[:, 1:] != ids[:, :-1]), axis=1)
    before = jnp.zeros((B, N, K, V), x.dtype)
    v = operands["step"][..., None] * x
    _, out = definition(c, b, v, operands["log_decay"], before, starts)
    return out + operands["skip"][None, None, :, None] * x


def on_devices(devices: int, on_device, operands: dict, ids):
    """`on_device` of operands on several devices that share out the positions."""
    if devices == 1:
        return on_device(operands, ids, ())
    mesh = jax.make_mesh((devices,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.P(None, "seq")
    by_position = {name: x.ndim > 2 and x.shape[1] == ROWS for name, x in operands.items()}
    function = jax.shard_map(
        lambda operands, ids: on_device(operands, ids, ("seq",)),
        mesh=mesh,
        in_specs=({name: rows if by_position[name] else jax.P() for name in operands}, rows),
        out_specs=rows,
        check_vma=False,
    )
    return function(operands, ids)


def mamba_on_device(operands, ids, seq):
    return mamba.on_device(mamba.Arrays(**operands, ids=ids), seq)[0]


@functools.cache
def wanted():
    operands, ids = projections()
    return values_and_gradients(lambda operands: plain(operands, ids), [operands])


def error(devices: int, dtype=np.float64) -> float:
    operands, ids = projections(dtype)
    function = functools.partial(on_devices, devices, mamba_on_device, ids=ids)
    return worst(values_and_gradients(function, [operands]), wanted())


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.full
def test_devices_that_share_positions_match_the_definition(devices):
    """Segments begin anywhere: within a device's part, at its first position, never."""
    with jax.enable_x64():
        assert error(devices) < 1e-10
        assert error(devices, np.float32) < 1e-5


def test_groups_of_positions_match_the_definition(monkeypatch):
    """Three groups on each of two devices, one of them padded."""
    monkeypatch.setattr(state, "GROUP", 3)
    with jax.enable_x64():
        assert error(2) < 1e-10


def keep_state(monkeypatch):
    """A segment starts from the state of the segment before it."""
    run = ssd.run
    monkeypatch.setattr(ssd, "run", lambda *x: run(*x[:4], jnp.zeros_like(x[4]), x[5]))


def forget_scale(monkeypatch):
    """A device adds earlier devices' states without its own decay."""
    incoming = state_context.incoming_state
    monkeypatch.setattr(
        state_context,
        "incoming_state",
        lambda scale, *rest, **more: incoming(jnp.ones_like(scale), *rest, **more),
    )


def unscaled_read(monkeypatch):
    """Positions read an incoming state that they don't decay."""
    apply = state_context.apply_to_scalars
    monkeypatch.setattr(
        state_context,
        "apply_to_scalars",
        lambda map_, outputs, seq: apply(
            map_, outputs._replace(scale=jnp.ones_like(outputs.scale)), seq
        ),
    )


def round_decay(monkeypatch):
    """Decays are in bfloat16."""
    decays = chunks.decays
    monkeypatch.setattr(chunks, "decays", lambda x: decays(x.astype(jnp.bfloat16).astype(x.dtype)))


MUTATIONS = [keep_state, forget_scale, unscaled_read, round_decay]


@pytest.mark.parametrize("mutate", full_except(MUTATIONS, [forget_scale]))
def test_a_mistake_shows(mutate, monkeypatch):
    mutate(monkeypatch)
    with jax.enable_x64():
        assert error(8) > 1e-4


@pytest.mark.parametrize("devices", full_except([1, 2, 8], [8]))
def test_a_short_convolution_is_its_definition(devices):
    """A part of two positions is shorter than the convolution."""

    def on_device(operands, ids, seq):
        positions = short_convolution.Arrays(**operands, ids=ids)
        return short_convolution.on_device(positions, seq)[0]

    with jax.enable_x64():
        operands, ids = projections()
        operands = {"x": operands["x"][..., 0], "kernel": operands["x_kernel"][..., 0]}
        got = values_and_gradients(
            functools.partial(on_devices, devices, on_device, ids=ids), [operands]
        )
        want = values_and_gradients(lambda x: convolved(x["x"], x["kernel"], ids), [operands])
        assert worst(got, want) < 1e-12


# ---- the layers ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config(ComputeOptions):
    """What the layers read of a model's Config."""

    embed: int = 16
    num_layers: int = 1
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 4
    norm_eps: float = 1e-2
    rope_theta: float = 1e4
    mamba_heads: int = 8
    mamba_groups: int = 2
    mamba_head_dim: int = 4
    mamba_state_dim: int = 6
    conv_width: int = 4
    conv_bias: bool = True
    least_step: float = 0.0
    mamba_norm: bool = True
    mamba_scales: tuple[float, ...] = ()


LAYERS = {"mamba": mamba.Mamba2, "convolution": short_convolution.ShortConvolution}
SPLITS = {  # mesh → rules, each split as a decoder's strategy splits it
    "4x2": {"batch": "data", "embed": "data", "heads": "model", "key_heads": "model"},
    "2x4": {"batch": "data", "heads": "model"},  # more parts than groups
    "data=2,seq=4": {
        "batch": "data",
        "embed": ("data", "seq"),
        "seq": "seq",
        "residual_seq": "seq",
    },
    "data=2,seq=2,model=2": {
        "batch": "data",
        "seq": "seq",
        "residual_seq": "seq",
        "heads": "model",
    },
}
NAMES = ("batch", "embed", "act_embed", "heads", "key_heads", "head_dim", "conv_width", "norm")
EVERY = dict.fromkeys((*NAMES, "seq", "residual_seq"))
IDS_BT = np.cumsum(np.random.default_rng(0).random((8, 16)) < 0.2, axis=1, dtype=np.int32)


def random_layer(name: str, config=None):
    """A layer whose biases, scales and steps are random too, and large enough to matter."""
    layer = built(LAYERS[name], config or Config())
    random = np.random.default_rng(1)
    for _, weight in nnx.iter_graph(layer):
        if isinstance(weight, nnx.Param):
            noise = 0.3 * random.standard_normal(weight[...].shape).astype(np.float32)
            weight.set_value(weight[...] + noise)
    return layer


def layer_outputs_and_gradients(name: str, rules=None, mesh=None):
    """With packed rows: (outputs, gradients of the input and of the weights)."""
    config = Config()
    graph, params = nnx.split(random_layer(name))
    x_BTD = np.random.default_rng(0).standard_normal((8, 16, config.embed)).astype(np.float32)

    def total(params, x_BTD):
        x_BTD = constrain(x_BTD, "batch", "residual_seq", "act_embed")
        tokens_BT = constrain(jnp.zeros(x_BTD.shape[:2], jnp.int32), "batch", "seq")
        positions = make_inputs(config, tokens_BT, constrain(IDS_BT, "batch", "seq"))
        layer = nnx.merge(graph, gathered(params))
        out_BTD, _ = layer(x_BTD, positions, config.kinds[0])
        return jnp.square(out_BTD).sum(), out_BTD

    step = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True), compiler_options=QUICK)
    if mesh is None:
        grads, out = step(params, x_BTD)
    else:
        with nnx.logical_axis_rules(tuple(rules.items())), jax.set_mesh(mesh):
            params = jax.device_put(params, nnx.get_named_sharding(params, mesh))
            grads, out = step(params, x_BTD)
    return jax.device_get((out, jax.tree.leaves(grads)))


def gathered(params):
    """Weights in use: `embed` is whole."""
    return jax.tree.map(
        lambda w: in_use(w, {"embed": "act_embed"}),
        params,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


@functools.cache
def one_device(name: str):
    return layer_outputs_and_gradients(name)


ON_MESHES = [(name, mesh) for name in LAYERS for mesh in SPLITS]


@pytest.mark.parametrize(
    ("name", "mesh"), full_except(ON_MESHES, [("mamba", "2x4"), ("convolution", "data=2,seq=4")])
)
def test_a_layer_on_a_mesh_equals_one_device(name, mesh):
    results = layer_outputs_and_gradients(name, EVERY | SPLITS[mesh], make_mesh(mesh))
    assert worst(results, one_device(name)) < 2e-6


def outputs_of(layer, config, x_BTD, ids_BT):
    positions = make_inputs(config, jnp.zeros(x_BTD.shape[:2], jnp.int32), ids_BT)
    return layer(x_BTD, positions, config.kinds[0])[0]


def mamba_definition(layer, config, x_BTD, ids_BT):
    """From a layer's input to its output."""
    names = ("x", "b", "c", "gate", "step")
    x, b, c, gate, step = (jnp.tensordot(x_BTD, getattr(layer, name)[...], 1) for name in names)
    step = jax.nn.softplus(step + layer.step_bias[...][None, None])
    step = jnp.maximum(step, config.least_step)
    kernels = {
        f"{name}_{part}": getattr(layer, f"{name}_{part}")[...]
        for name in ("x", "b", "c")
        for part in ("kernel", "bias")
    }
    operands = {"x": x, "b": b, "c": c, "step": step, "skip": layer.skip[...], **kernels}
    operands["log_decay"] = -jnp.exp(layer.log_rate[...])[None, None] * step
    out = plain(operands, ids_BT) * jax.nn.silu(gate)
    by_group = out.reshape(*out.shape[:2], config.mamba_groups, -1)
    rms = jnp.sqrt(jnp.square(by_group).mean(-1, keepdims=True) + config.norm_eps)
    normed = (by_group / rms).reshape(out.shape) * layer.norm.scale[...][None, None]
    return jnp.tensordot(normed, layer.o[...], 2)


def convolution_definition(layer, config, x_BTD, ids_BT):
    b, c, x = (x_BTD @ getattr(layer, name)[...] for name in ("b", "c", "x"))
    return (c * convolved(b * x, layer.kernel[...], ids_BT)) @ layer.o[...]


DEFINITIONS = {"mamba": mamba_definition, "convolution": convolution_definition}


@pytest.mark.parametrize("name", full_except(LAYERS, ["mamba"]))
def test_a_layer_is_its_definition(name):
    """From its input to its output: projections, steps, skips and the gated norm too."""
    sizes = {"mamba_heads": N, "mamba_groups": G, "mamba_state_dim": K, "mamba_head_dim": V}
    config = Config(conv_width=W, least_step=0.3, **sizes)
    layer = random_layer(name, config)
    x_BTD = np.random.default_rng(0).standard_normal((B, ROWS, config.embed)).astype(np.float32)
    ids_BT = jnp.asarray(IDS_BT[:B, :ROWS])
    got = compiled(functools.partial(outputs_of, layer, config))(x_BTD, ids_BT)
    want = compiled(functools.partial(DEFINITIONS[name], layer, config))(x_BTD, ids_BT)
    assert worst(got, want) < 1e-5


@pytest.mark.parametrize("name", full_except(LAYERS, ["convolution"]))
def test_in_bfloat16_a_layer_is_as_exact_as_its_products(name):
    """Outputs and gradients of the input; the state, decays and their sums stay in float32."""
    config = Config()
    layer = random_layer(name)
    x_BTD = np.random.default_rng(0).standard_normal((8, 16, config.embed)).astype(np.float32)

    def total(x_BTD, dtype):
        out_BTD = outputs_of(layer, config, x_BTD.astype(dtype), jnp.asarray(IDS_BT))
        weights = jnp.cos(jnp.arange(out_BTD.size)).reshape(out_BTD.shape)
        return (out_BTD.astype(jnp.float32) * weights).sum()

    of_dtype = {
        dtype: jax.jit(jax.value_and_grad(functools.partial(total, dtype=dtype)))(x_BTD)[1]
        for dtype in (jnp.bfloat16, jnp.float32)
    }
    difference = np.linalg.norm(of_dtype[jnp.bfloat16] - of_dtype[jnp.float32])
    assert difference < 0.02 * np.linalg.norm(of_dtype[jnp.float32])


@pytest.mark.parametrize("name", LAYERS)
def test_a_packed_document_is_computed_as_alone(name):
    """Resets state and convolution: a layer's outputs for the second document don't see the first."""
    config = Config()
    layer = random_layer(name)
    x_BTD = np.random.default_rng(0).standard_normal((1, 12, config.embed)).astype(np.float32)
    outputs = compiled(functools.partial(outputs_of, layer, config))
    packed = outputs(x_BTD, jnp.asarray([[1] * 5 + [2] * 7]))
    alone = outputs(x_BTD[:, 5:], jnp.asarray([[1] * 7]))
    np.testing.assert_allclose(packed[:, 5:], alone, atol=1e-6)
