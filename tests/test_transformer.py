"""zoo/transformer.py computes what it says."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from zoo import transformer
from zoo.transformer import REMAT, Config, Transformer, attend

pytestmark = pytest.mark.usefixtures("strict")
TINY = Config.tiny()
SIZES = [name for name, value in vars(Config).items() if isinstance(value, classmethod)]


def model_of(**changes) -> Transformer:
    return Transformer(dataclasses.replace(TINY, **changes), rngs=nnx.Rngs(0))


def tokens_of(batch=2, length=32, seed=0):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, 257)


@pytest.mark.parametrize("name", SIZES)
def test_parameter_counts_in_docstrings_are_right(name):
    size = getattr(Config, name)
    promised = int(re.match(r"([\d,]+) parameters", inspect.getdoc(size))[1].replace(",", ""))
    state = nnx.state(nnx.eval_shape(lambda: Transformer(size(), rngs=nnx.Rngs(0))), nnx.Param)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == promised


def test_every_size_is_counted():
    assert SIZES == ["tiny", "small", "medium", "gpt2_124m", "llama_1b", "llama_8b", "llama_70b"]


def test_tiny_divides_by_eight():
    for dim in ("vocab_size", "embed", "num_heads", "num_kv_heads", "mlp"):
        assert getattr(TINY, dim) % 8 == 0, dim


# ---- attention -----------------------------------------------------------------------------------


def plain_attention(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window):
    """The definition, in float64 and one loop per head."""
    q, k, v = (np.asarray(x, np.float64) for x in (q_BTNH, k_BSKH, v_BSKH))
    B, T, N, H = q.shape
    out = np.zeros_like(q)
    for b in range(B):
        for n in range(N):
            kv = n // (N // k.shape[2])
            logits = q[b, :, n] @ k[b, :, kv].T / np.sqrt(H)
            age = np.arange(T)[:, None] - np.arange(T)[None, :]
            seen = age >= 0 if window is None else (age >= 0) & (age < window)
            if segment_ids_BT is not None:
                seen &= np.equal.outer(segment_ids_BT[b], segment_ids_BT[b])
            weights = np.where(seen, np.exp(logits - logits.max(-1, keepdims=True)), 0)
            out[b, :, n] = weights / weights.sum(-1, keepdims=True) @ v[b, :, kv]
    return out


@pytest.mark.parametrize("window", [None, 1, 50, 1000])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize(("T", "N", "K"), [(300, 4, 2), (128, 2, 2), (129, 4, 1), (1100, 2, 1)])
def test_attention_is_the_plain_one(T, N, K, segments, window):
    keys = jax.random.split(jax.random.key(T), 3)
    q = jax.random.normal(keys[0], (2, T, N, 16))
    k, v = (jax.random.normal(key, (2, T, K, 16)) for key in keys[1:])
    ids = np.sort(np.random.default_rng(0).integers(0, 4, (2, T))) if segments else None
    config = dataclasses.replace(TINY, sliding_window=window)
    ours = jax.jit(attend, static_argnums=4)(q, k, v, ids, config)
    np.testing.assert_allclose(ours, plain_attention(q, k, v, ids, window), atol=2e-6)


def test_attention_agrees_with_jax():
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, 200, 8, 16))
    k, v = (jax.random.normal(key, (2, 200, 4, 16)) for key in keys[1:])
    theirs = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(attend(q, k, v, None, TINY), theirs, atol=1e-6)


def test_a_position_depends_on_nothing_after_it():
    model, tokens = model_of(), tokens_of(batch=1)
    embedded = model.embed[...][tokens]

    def logits_at(x_BTD, t):  # the trunk again, from embeddings
        angles = transformer.rope_angles(TINY, x_BTD.shape[1])
        for i in range(TINY.num_layers):
            layer = jax.tree.map(lambda w, i=i: w[i], model.layers)
            x_BTD = layer(x_BTD, None, angles)
        return model.final_norm(x_BTD)[0, t].sum()

    gradient_of = jax.jit(jax.grad(logits_at))
    for t in (0, 13, 31):
        gradient = gradient_of(embedded, t)[0]
        touched = np.abs(gradient).sum(-1) > 0
        assert touched[: t + 1].all(), "a position sees all that is before it"
        assert not touched[t + 1 :].any(), "a position sees what is after it"


def test_documents_do_not_see_each_other():
    model, tokens = model_of(), tokens_of()
    segment_ids = jnp.repeat(jnp.array([[0, 1, 2, 3]]), 8, axis=1).repeat(2, axis=0)
    both = model(tokens, segment_ids)
    # What stands in another document changes nothing at all.
    other = tokens.at[:, :16].set(7)
    np.testing.assert_array_equal(model(other, segment_ids)[:, 16:], both[:, 16:])
    assert (model(other)[:, 16:] != model(tokens)[:, 16:]).any(), "without segments it does"
    # A document reads as it does alone, wherever it stands: rotary positions are relative.
    alone = model(tokens[:, 16:24])
    np.testing.assert_allclose(both[:, 16:24], alone, atol=2e-5)


def test_gradient_of_one_document_reaches_no_other():
    model, tokens = model_of(), tokens_of(batch=1)
    graph, state = nnx.split(model)
    segment_ids = jnp.array([[0] * 16 + [1] * 16])
    targets = jnp.where(jnp.arange(32)[None] < 16, -1, tokens)  # only the second document counts

    def loss(state):
        return nnx.merge(graph, state).loss(tokens, targets, segment_ids)[0]

    touched = np.abs(jax.grad(loss)(state)["embed"][...]).sum(-1) > 0
    state["embed"][...] = jnp.zeros_like(state["embed"][...])
    first, second = (set(np.asarray(part)) for part in (tokens[0, :16], tokens[0, 16:]))
    assert touched[sorted(second)].all()
    # Tied embeddings: the softmax touches every row, so look at rows through the lookup alone.
    untied = model_of(tie_embeddings=False)
    graph, state = nnx.split(untied)
    touched = np.abs(jax.grad(loss)(state)["embed"][...]).sum(-1) > 0
    assert touched[sorted(second)].all()
    assert not touched[sorted(first - second)].any()


# ---- loss ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 8, 12, 32, 1000])
@pytest.mark.parametrize("tied", [True, False])
def test_chunked_loss_is_the_plain_loss_gradients_included(chunk, tied):
    model, tokens = model_of(loss_chunk=chunk, tie_embeddings=tied), tokens_of()
    targets = jnp.where(tokens % 5 == 0, -1, jnp.roll(tokens, -1, axis=1))
    graph, state = nnx.split(model)

    def plain(state):
        log_p = jax.nn.log_softmax(nnx.merge(graph, state)(tokens))
        picked = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        return -jnp.where(targets < 0, 0, picked).sum()

    def chunked(state):
        return nnx.merge(graph, state).loss(tokens, targets)[0]

    want, got = jax.value_and_grad(plain)(state), jax.value_and_grad(chunked)(state)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * float(jnp.abs(b).max()) + 1e-7)
    assert float(model.loss(tokens, targets)[1]) == int((targets >= 0).sum())


def test_no_array_holds_all_logits():
    """The compiled step has no buffer of tokens × vocabulary, forward or backward."""
    config = dataclasses.replace(TINY, vocab_size=4096, loss_chunk=16)
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((4, 128), jnp.int32)

    def loss(state, tokens):
        return nnx.merge(graph, state).loss(tokens, tokens)[0]

    text = jax.jit(jax.grad(loss)).lower(state, tokens).compile().as_text()
    sizes = [np.prod([int(d) for d in m.split(",")]) for m in re.findall(r"f32\[([\d,]+)\]", text)]
    assert max(sizes) < 4 * 128 * 4096
    assert 4 * 16 * 4096 in sizes, "the chunks are there"


def test_the_gradient_waits_for_the_value():
    """So the table that the value needs is not kept through the backward pass."""
    graph, state = nnx.split(model_of())
    tokens = tokens_of()
    loss = lambda s: nnx.merge(graph, s).loss(tokens, tokens)[0]  # noqa: E731
    steps = jax.make_jaxpr(jax.grad(loss))(state).jaxpr.eqns
    loops = [e for e in steps if e.primitive.name == "scan"]
    (wait,) = [e for e in steps if e.primitive.name == "optimization_barrier"]

    def needs(later, first) -> bool:
        results = {id(v) for v in first.outvars}
        for e in steps:
            if any(id(v) in results for v in e.invars):
                results |= {id(v) for v in e.outvars}
        return any(id(v) in results for v in later.invars)

    # Layers and chunks of the loss, forward; chunks and layers, backward.
    assert [needs(wait, loop) for loop in loops] == [True, True, False, False]
    assert [needs(loop, wait) for loop in loops] == [False, False, True, True]


def test_loss_of_a_new_model_is_near_uniform():
    nats, count = model_of().loss(tokens_of(), tokens_of(seed=1))
    assert abs(nats / count - np.log(TINY.vocab_size)) < 0.7


# ---- how it is computed changes nothing ------------------------------------------------------------


@pytest.mark.parametrize("remat", REMAT)
def test_rematerialisation_changes_no_gradient(remat):
    tokens = tokens_of()

    def gradients(policy):
        graph, state = nnx.split(model_of(remat=policy))
        return jax.grad(lambda s: nnx.merge(graph, s).loss(tokens, tokens)[0])(state)

    for a, b in zip(*map(jax.tree.leaves, (gradients(remat), gradients("none"))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


def test_layers_written_out_change_no_gradient():
    tokens = tokens_of()

    def gradients(unroll):
        graph, state = nnx.split(model_of(unroll=unroll))
        loss = lambda s: nnx.merge(graph, s).loss(tokens, tokens)[0]  # noqa: E731
        assert f"unroll={unroll}\n" in str(jax.make_jaxpr(loss)(state))
        return jax.grad(loss)(state)

    both = gradients(TINY.num_layers), gradients(1)
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


def test_rematerialisation_needs_less_memory():
    def temporary(policy):
        graph, state = nnx.split(model_of(remat=policy, num_layers=16))
        loss = lambda s, t: nnx.merge(graph, s).loss(t, t)[0]  # noqa: E731
        compiled = jax.jit(jax.grad(loss)).lower(state, tokens_of(8, 128)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    none, dots, sublayers, full = map(temporary, REMAT)
    assert none > dots > sublayers > full


def test_bfloat16_is_near_float32_and_keeps_parameters():
    tokens = tokens_of()
    half, full = model_of(dtype="bfloat16"), model_of()
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(half)))
    assert half(tokens).dtype == jnp.float32
    np.testing.assert_allclose(half(tokens), full(tokens), atol=0.1)
    assert (half(tokens) != full(tokens)).any(), "bfloat16 was used"


@pytest.mark.parametrize(
    "changes",
    [
        dict(qkv_bias=True),
        dict(qk_norm=True),
        dict(tie_embeddings=False),
        dict(sliding_window=4),
        dict(rope_scaling=(8.0, 1.0, 4.0, 16)),
        dict(rope_theta=1e6),
    ],
)
def test_options_do_something_and_train(changes):
    model, tokens = model_of(**changes), tokens_of()
    if changes.get("qkv_bias"):
        model.layers.attention.q_bias[...] += 0.1
    if changes.get("qk_norm"):
        model.layers.attention.q_norm.scale[...] *= 2
    assert (np.abs(model(tokens) - model_of()(tokens)).max(axis=(0, 2)) > 0)[-1]
    graph, state = nnx.split(model)
    gradient = jax.grad(lambda s: nnx.merge(graph, s).loss(tokens, tokens)[0])(state)
    for path, leaf in nnx.to_flat_state(gradient):
        # A key's bias adds the same to all logits of a query: softmax does not see it.
        assert np.abs(leaf[...]).max() > 0 or path[-1] == "k_bias", path


def test_qkv_biases_are_matrices_of_their_heads_and_start_at_zero():
    attention = model_of(qkv_bias=True).layers.attention
    assert attention.q_bias.shape == (TINY.num_layers, TINY.num_heads, TINY.head_dim)
    assert not attention.q_bias[...].any()


def test_compile_time_does_not_grow_with_depth():
    """The compiled module is as long for 12 layers as for 3: layers are one loop."""

    def length(layers):
        config = dataclasses.replace(TINY, num_layers=layers)
        graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
        tokens = jax.ShapeDtypeStruct((2, 32), jnp.int32)
        loss = lambda s, t: nnx.merge(graph, s).loss(t, t)[0]  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(state, tokens).compile().as_text().count("\n")

    assert length(12) == length(3)
