"""Delta rules match their definition, a loop over positions, however they are computed.

Rules have a decay for each head, as gated delta networks, or for each channel, as Kimi's.
"""

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
from zoo.recurrent import (
    channel_decays,
    chunks,
    delta,
    delta_rule,
    kimi_delta,
    state,
    state_context,
)

pytestmark = [pytest.mark.promise("recurrent-layers"), pytest.mark.usefixtures("strict")]

B, N, K, V = 2, 3, 5, 4
compiled = functools.partial(jax.jit, compiler_options=QUICK)
SIZES = [(24, 8), (24, 7), (24, 24), (24, 64), (24, 1), (1, 64)]  # T, chunk
RULES = {"heads": delta_rule.chunk, "channels": channel_decays.chunk}
DECAYS = {"slow": (1e-4, 1e-2), "fast": (5.0, 40.0), "both": (1e-4, 40.0)}


def arrays(T: int, dtype, decay: str = "both", rule: str = "heads", seed: int = 0):
    """(q, k, v, log_decay, write, starts); some keys repeat, which ill-conditions a chunk."""
    random = np.random.default_rng(seed)
    q, k = (random.standard_normal((B, T, N, K)) for _ in range(2))
    k[:, 1::3] = k[:, : len(k[0, 1::3]) * 3 : 3]
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = random.standard_normal((B, T, N, V))
    least, most = np.log(DECAYS[decay])
    channels = (K,) if rule == "channels" else ()
    log_decay = -np.exp(random.uniform(least, most, (B, T, N, *channels)))
    write = random.uniform(0, 2, (B, T, N))  # above 1, a state has negative eigenvalues
    starts = random.random((B, T)) < 4 / T
    starts[0, [0, T // 2, T - 1]] = True
    starts[1, 0] = False
    return *(jnp.asarray(x, dtype) for x in (q, k, v, log_decay, write)), jnp.asarray(starts)


def definition(q, k, v, log_decay, write, starts, state):
    """(outputs, state after the last position), by a loop over positions."""

    def position(state, at):
        q, k, v, log_decay, write, starts = at
        state = jnp.where(starts[:, None, None, None], 0, state)
        decay = jnp.exp(log_decay).reshape(*state.shape[:2], -1, 1)
        state = state * decay
        new = write[..., None] * (v - jnp.einsum("bnkv,bnk->bnv", state, k))
        state = state + k[..., None] * new[..., None, :]
        return state, jnp.einsum("bnkv,bnk->bnv", state, q)

    by_position = [x.swapaxes(0, 1) for x in (q, k, v, log_decay, write, starts)]
    state, outputs = jax.lax.scan(position, state, by_position)
    return outputs.swapaxes(0, 1), state


def by_chunks(size, rule, q, k, v, log_decay, write, starts, state):
    chunks = RULES[rule](q, k, v, log_decay, write, starts, size)
    state, out = delta_rule.run(chunks, state)
    return out[:, : q.shape[1]], state


def worst(got, want) -> float:
    """The largest difference relative to each array's largest value."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return np.max([np.abs(np.subtract(a, b)).max() / np.abs(b).max() for a, b in pairs])


def values_and_gradients(function, values, starts):
    """((outputs, last state), gradients of a weighted sum of them)."""
    *operands, state = values

    def total(operands, state):
        results = function(*operands, starts, state)
        weighted = [
            (x * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)).sum() for x in results
        ]
        return sum(weighted), results

    grads, results = compiled(jax.grad(total, argnums=(0, 1), has_aux=True))(operands, state)
    return results, grads


@functools.cache
def defined(T: int, decay: str, rule: str):
    """The definition in float64, and its operands."""
    *operands, starts = arrays(T, jnp.float64, decay, rule)
    state = jnp.asarray(np.random.default_rng(1).standard_normal((B, N, K, V)))
    values = (*operands, state)
    return values, starts, values_and_gradients(definition, values, starts)


CASES = [(T, size, decay, "heads") for T, size in SIZES for decay in DECAYS]
CASES += [(T, size, "both", "channels") for T, size in SIZES]
CASES += [(53, 32, decay, "channels") for decay in DECAYS]  # blocks are joined twice
CASES += [(200, 128, "both", "heads")]  # as on TPUs
FAST = [(24, 7, "both", "heads"), (24, 24, "both", "channels")]


@pytest.mark.parametrize(("T", "size", "decay", "rule"), full_except(CASES, FAST))
def test_chunks_match_the_definition(T, size, decay, rule):
    """Chunk sizes that do and don't divide T; segments that begin anywhere; a state to begin with."""
    with jax.enable_x64():
        values, starts, want = defined(T, decay, rule)
        function = functools.partial(by_chunks, size, rule)
        assert worst(values_and_gradients(function, values, starts), want) < 1e-10
        singles = [x.astype(jnp.float32) for x in values]
        assert worst(values_and_gradients(function, singles, starts), want) < 1e-5


# ---- with the convolution, on several devices ----------------------------------------------------

G, W = 1, 4  # heads of keys, width of the convolution
ROWS = 16  # two positions on each of eight devices, so the convolution reads two devices back


def projections(dtype: type = np.float64, rule: str = "heads"):
    """The operands of `delta.on_device`: projections, decays, kernels, segment ids."""
    random = np.random.default_rng(3)
    normal = random.standard_normal
    keys = [normal((B, ROWS, G, K)) for _ in range(2)]
    channels = (K,) if rule == "channels" else ()
    log_decay = -np.exp(random.uniform(-9, 3, (B, ROWS, N, *channels)))
    write = random.uniform(0, 1, (B, ROWS, N))
    kernels = [normal((W, G, K)), normal((W, G, K)), normal((W, N, V))]
    operands = [*keys, normal((B, ROWS, N, V)), log_decay, write, *kernels]
    ids = 1 + np.cumsum(random.random((B, ROWS)) < 3 / ROWS, axis=1, dtype=np.int32)
    return [jnp.asarray(x, dtype) for x in operands], jnp.asarray(ids)


def plain(operands, ids):
    """What `delta.on_device` computes, by its definition."""
    q, k, v, log_decay, write, *kernels = operands

    def convolved(x, kernel):
        outputs = []
        for t in range(ROWS):
            seen = [(s, W - 1 - (t - s)) for s in range(max(0, t - W + 1), t + 1)]
            same = [jnp.where(ids[:, s] == ids[:, t], 1.0, 0.0)[:, None, None] for s, _ in seen]
            parts = [x[:, s] * kernel[w][None] for s, w in seen]
            outputs.append(sum(a * b for a, b in zip(parts, same, strict=True)))
        return jax.nn.silu(jnp.stack(outputs, axis=1))

    q, k, v = (convolved(*pair) for pair in zip((q, k, v), kernels, strict=True))
    q, k = (x / jnp.sqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (q, k))
    starts = jnp.concatenate((jnp.zeros((B, 1), bool), ids[:, 1:] != ids[:, :-1]), axis=1)
    state = jnp.zeros((B, N, K, V), q.dtype)
    return definition(q * K**-0.5, k, v, log_decay, write, starts, state)[0]


def split(devices: int, rule: str, operands, ids):
    """`delta.on_device` on several devices that share out the positions."""
    chunk = RULES["channels"] if rule == "channels" else None
    if devices == 1:
        return delta.on_device(delta.Arrays(*operands, ids=ids), chunk=chunk)[0]
    mesh = jax.make_mesh((devices,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.P(None, "seq")
    function = jax.shard_map(
        lambda *x: delta.on_device(delta.Arrays(*x), ("seq",), chunk=chunk)[0],
        mesh=mesh,
        in_specs=(*[rows] * 5, *[jax.P()] * 3, rows),
        out_specs=rows,
        check_vma=False,
    )
    return function(*operands, ids)


def outputs_and_gradients(function, operands, ids):
    def total(operands):
        out = function(operands, ids)
        weights = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        return (out * weights).sum(), out

    grads, out = compiled(jax.grad(total, has_aux=True))(operands)
    return out, grads


@functools.cache
def wanted(rule: str):
    return outputs_and_gradients(plain, *projections(rule=rule))


def error(devices: int, dtype: type = np.float64, rule: str = "heads") -> float:
    operands, ids = projections(dtype, rule)
    function = functools.partial(split, devices, rule)
    return worst(outputs_and_gradients(function, operands, ids), wanted(rule))


SHARED = [(devices, "heads") for devices in (1, 2, 4, 8)] + [(1, "channels"), (8, "channels")]


@pytest.mark.parametrize(("devices", "rule"), SHARED)
@pytest.mark.full
def test_devices_that_share_positions_match_the_definition(devices, rule):
    """Segments begin anywhere: within a device's part, at its first position, never."""
    with jax.enable_x64():
        assert error(devices, rule=rule) < 1e-10
        assert error(devices, np.float32, rule) < 1e-5


GROUPS = [(1, 7), (2, 3)]  # devices, and a group's most positions: three groups on each, one padded


@pytest.mark.parametrize(("devices", "group"), full_except(GROUPS, [(2, 3)]))
def test_groups_of_positions_match_the_definition(devices, group, monkeypatch):
    monkeypatch.setattr(state, "GROUP", group)
    with jax.enable_x64():
        assert error(devices) < 1e-10
        assert error(devices, np.float32) < 1e-5


def test_no_product_rounds_a_state_that_travels():
    """On TPUs, products of float32 arrays round these to bfloat16 by default."""
    devices = 4
    mesh = jax.make_mesh((devices,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.P(None, "seq")
    function = jax.shard_map(
        lambda state, out: state_context.apply_incoming("matrix", state, out, ("seq",)),
        mesh=mesh, in_specs=(jax.P("seq"), rows), out_specs=(jax.P("seq"), rows), check_vma=False,
    )  # fmt: skip
    states = jnp.zeros((devices * B, N, K, K + V))
    out = jnp.zeros((B, devices * ROWS, N, K + V))
    (on_device,) = jax.make_jaxpr(function)(states, out).eqns
    products = [x for x in on_device.params["jaxpr"].eqns if x.primitive is jax.lax.dot_general_p]
    highest = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    (read,) = [x for x in products if x.params["precision"] != highest]
    assert len(products) == 5  # three compose maps, one applies them, one reads the state
    assert out[:, :ROWS, :, :K].shape in [x.aval.shape for x in read.invars]


def keep_state(monkeypatch):
    """A segment starts from the state of the segment before it."""
    chunk = delta_rule.chunk
    monkeypatch.setattr(
        delta_rule, "chunk", lambda *x: chunk(*x[:-1], starts_BT=jnp.zeros_like(x[-1]))
    )


def shift_halo(monkeypatch):
    """The convolution reads the positions before its own one too early."""
    halo = state_context.halo
    monkeypatch.setattr(
        state_context, "halo", lambda x, *rest: [jnp.roll(y, 1, axis=1) for y in halo(x, *rest)]
    )


def swap_maps(monkeypatch):
    """Maps are composed in the wrong order."""

    def incoming(matrix, offset, seq):
        for hops in (1, 2, 4):
            offset += matrix @ state_context.send(offset, hops, seq)
            matrix = state_context.send(matrix, hops, seq) @ matrix
        return state_context.send(offset, 1, seq)

    monkeypatch.setattr(state_context, "incoming_state", incoming)


def forget_map(monkeypatch):
    """A device adds earlier devices' states without its own decay and erasures."""
    incoming = state_context.incoming_state
    monkeypatch.setattr(
        state_context,
        "incoming_state",
        lambda matrix, *rest: incoming(jnp.broadcast_to(jnp.eye(K), matrix.shape), *rest),
    )


def round_decay(monkeypatch):
    """Decays are in bfloat16."""
    decays = chunks.decays
    monkeypatch.setattr(chunks, "decays", lambda x: decays(x.astype(jnp.bfloat16).astype(x.dtype)))


def meet_late(monkeypatch):
    """Keys of a block of channels that decay are not decayed until the block's end."""
    sums = channel_decays.sums_in_blocks

    def wrong(*x, **more):
        earlier, later = sums(*x, **more)
        return earlier, jnp.zeros_like(later)

    monkeypatch.setattr(channel_decays, "sums_in_blocks", wrong)


def share_decays(monkeypatch):
    """All channels of a head decay like the first one."""
    products = channel_decays.decayed_products
    monkeypatch.setattr(
        channel_decays,
        "decayed_products",
        lambda rows, keys, x: products(rows, keys, jnp.broadcast_to(x[..., :1], x.shape)),
    )


def keep_channels(monkeypatch):
    """As keep_state, where channels decay."""
    chunk = channel_decays.chunk
    starts = {"starts_BT": jnp.zeros((B, ROWS), bool)}
    monkeypatch.setitem(RULES, "channels", lambda *x: chunk(*x[:-1], **starts))


MUTATIONS = [(x, "heads") for x in (keep_state, shift_halo, swap_maps, forget_map, round_decay)]
MUTATIONS += [(x, "channels") for x in (meet_late, share_decays, keep_channels)]


@pytest.mark.parametrize(("mutate", "rule"), full_except(MUTATIONS, [(swap_maps, "heads")]))
def test_a_mistake_shows(mutate, rule, monkeypatch):
    devices = 8 if rule == "heads" else 1
    with jax.enable_x64():
        wanted(rule)
        mutate(monkeypatch)
        assert error(devices, rule=rule) > 1e-4


# ---- the layer -----------------------------------------------------------------------------------


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
    delta_heads: int = 4
    delta_key_heads: int = 2
    delta_key_dim: int = 6
    delta_value_dim: int = 4
    conv_width: int = 4


SPLITS = {  # mesh → rules, each split as a decoder's strategy splits it
    "4x2": {"batch": "data", "embed": "data", "heads": "model", "key_heads": "model"},
    "2x4": {"batch": "data", "heads": "model"},  # more parts than heads of keys
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
NAMES += ("latent", "up_latent")
LAYERS = {
    "delta": delta.GatedDelta,
    "negative": functools.partial(delta.GatedDelta, most_write=2.0, norm_eps=2e-2),
    "kimi": kimi_delta.KimiDelta,
}
EVERY = dict.fromkeys((*NAMES, "seq", "residual_seq"))


def layer_outputs_and_gradients(name: str, rules=None, mesh=None):
    """Of a layer, with packed rows: (outputs, gradients of the input and of the weights)."""
    config = Config()
    graph, params = nnx.split(built(LAYERS[name], config))
    random = np.random.default_rng(0)
    x_BTD = random.standard_normal((8, 16, config.embed)).astype(np.float32)
    ids_BT = np.cumsum(random.random((8, 16)) < 0.2, axis=1, dtype=np.int32)

    def total(params, x_BTD):
        x_BTD = constrain(x_BTD, "batch", "residual_seq", "act_embed")
        tokens_BT = constrain(jnp.zeros(x_BTD.shape[:2], jnp.int32), "batch", "seq")
        positions = make_inputs(config, tokens_BT, constrain(ids_BT, "batch", "seq"))
        layer = nnx.merge(graph, gathered(params))
        out_BTD, _ = layer(x_BTD, positions, config.kinds[0])
        return jnp.square(out_BTD).sum(), out_BTD

    step = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True), compiler_options=QUICK)
    if mesh is None:
        grads, out = step(params, x_BTD)
    else:
        with nnx.logical_axis_rules(tuple((rules or {}).items())), jax.set_mesh(mesh):
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


ON_MESHES = [("delta", mesh) for mesh in SPLITS]
ON_MESHES += [("kimi", "4x2"), ("kimi", "data=2,seq=2,model=2")]


@pytest.mark.parametrize(
    ("name", "mesh"), full_except(ON_MESHES, [("delta", "data=2,seq=2,model=2")])
)
def test_a_layer_on_a_mesh_equals_one_device(name, mesh):
    results = layer_outputs_and_gradients(name, EVERY | SPLITS[mesh], make_mesh(mesh))
    assert worst(results, one_device(name)) < 2e-6


def gated_delta_definition(layer, x_BTD, ids_BT):
    """From a layer's input to its output."""
    q, k, v, gate, decay, write = (
        jnp.tensordot(x_BTD, getattr(layer, name)[...], 1)
        for name in ("q", "k", "v", "gate", "decay", "write")
    )
    rate_N = jnp.exp(layer.log_rate[...])
    log_decay = -rate_N[None, None] * jax.nn.softplus(decay + layer.decay_bias[...][None, None])
    kernels = layer.q_kernel[...], layer.k_kernel[...], layer.v_kernel[...]
    write = layer.most_write * jax.nn.sigmoid(write)
    out = plain((q, k, v, log_decay, write, *kernels), ids_BT)
    return jnp.tensordot(layer.norm(out) * jax.nn.silu(gate), layer.o[...], 2)


def kimi_definition(layer, x_BTD, ids_BT):
    q, k, v, write = (
        jnp.tensordot(x_BTD, getattr(layer, name)[...], 1) for name in ("q", "k", "v", "write")
    )
    gate, decay = (
        jnp.tensordot(x_BTD @ down[...], up[...], 1)
        for down, up in ((layer.gate_down, layer.gate_up), (layer.decay_down, layer.decay_up))
    )
    rate_N1 = jnp.exp(layer.log_rate[...])[:, None]
    log_decay = -rate_N1[None, None] * jax.nn.softplus(decay + layer.decay_bias[...][None, None])
    kernels = layer.q_kernel[...], layer.k_kernel[...], layer.v_kernel[...]
    out = plain((q, k, v, log_decay, jax.nn.sigmoid(write), *kernels), ids_BT)
    return jnp.tensordot(layer.norm(out) * jax.nn.sigmoid(gate), layer.o[...], 2)


def outputs_of(layer, x_BTD, ids_BT):
    positions = make_inputs(layer.config, jnp.zeros(x_BTD.shape[:2], jnp.int32), ids_BT)
    return layer(x_BTD, positions, layer.config.kinds[0])[0]


@pytest.mark.parametrize("name", full_except(LAYERS, ["negative", "kimi"]))
def test_a_layer_is_its_definition(name):
    """From its input to its output: projections, decays and the gated norm too."""
    heads = {"delta_heads": N, "delta_key_heads": G, "delta_key_dim": K, "delta_value_dim": V}
    layer = built(LAYERS[name], dataclasses.replace(Config(conv_width=W), **heads))
    x_BTD = np.random.default_rng(0).standard_normal((B, ROWS, 16)).astype(np.float32)
    _, ids_BT = projections(np.float32)
    definition_of_layer = kimi_definition if name == "kimi" else gated_delta_definition
    want = compiled(functools.partial(definition_of_layer, layer))(x_BTD, ids_BT)
    got = compiled(functools.partial(outputs_of, layer))(x_BTD, ids_BT)
    assert worst(got, want) < 1e-5


@pytest.mark.full
def test_in_bfloat16_channels_that_decay_are_as_exact_as_the_products():
    """Gradients of the input; the state, decays and their sums stay in float32."""
    layer = built(kimi_delta.KimiDelta, Config())
    x_BTD = np.random.default_rng(0).standard_normal((8, 16, 16)).astype(np.float32)
    ids_BT = np.cumsum(np.random.default_rng(0).random((8, 16)) < 0.2, axis=1, dtype=np.int32)

    def total(x_BTD, dtype):
        out_BTD = outputs_of(layer, x_BTD.astype(dtype), jnp.asarray(ids_BT))
        weights = jnp.cos(jnp.arange(out_BTD.size)).reshape(out_BTD.shape)
        return (out_BTD.astype(jnp.float32) * weights).sum()

    rounded, exact = (
        compiled(jax.grad(functools.partial(total, dtype=dtype)))(x_BTD)
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    assert np.linalg.norm(rounded - exact) < 0.02 * np.linalg.norm(exact)


@pytest.mark.parametrize("name", full_except(("delta", "kimi"), ["delta"]))
def test_a_packed_document_is_computed_as_alone(name):
    """Resets state and convolution: a layer's outputs for the second document don't see the first."""
    config = Config()
    layer = built(LAYERS[name], config)
    x_BTD = np.random.default_rng(0).standard_normal((1, 12, config.embed)).astype(np.float32)
    tokens_BT = jnp.zeros((1, 12), jnp.int32)
    ids_BT = jnp.asarray([[1] * 5 + [2] * 7])

    @jax.jit
    def outputs(x_BTD, tokens_BT, ids_BT=None):
        positions = make_inputs(config, tokens_BT, ids_BT)
        return layer(x_BTD, positions, config.kinds[0])[0]

    packed = outputs(x_BTD, tokens_BT, ids_BT)
    alone = outputs(x_BTD[:, 5:], tokens_BT[:, 5:])
    np.testing.assert_allclose(packed[:, 5:], alone, atol=1e-6)


def test_a_decay_s_bias_is_added_in_float32(monkeypatch):
    """In bfloat16 too: a decay multiplies the state over and over."""
    layer = built(delta.GatedDelta, Config())
    layer.decay.set_value(jnp.zeros_like(layer.decay[...]))
    received = []
    monkeypatch.setattr(
        delta, "on_device", lambda arrays, *_: received.append(arrays) or [arrays.v]
    )
    positions = make_inputs(layer.config, jnp.zeros((1, 4), jnp.int32))
    layer(jnp.ones((1, 4, layer.config.embed), jnp.bfloat16), positions, layer.config.kinds[0])
    rate_N = np.exp(np.asarray(layer.log_rate[...], np.float64))
    wanted_N = -rate_N * np.log1p(np.exp(np.asarray(layer.decay_bias[...], np.float64)))
    (arrays,) = received
    assert arrays.log_decay.dtype == jnp.float32
    np.testing.assert_allclose(arrays.log_decay[0, 0], wanted_N, rtol=1e-5)
