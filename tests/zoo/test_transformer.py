"""The Transformer, its attention and its loss match their definitions."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.common.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from tests.conftest import full_except
from tests.support.models import built, packed_batch
from tests.support.quick import QUICK
from zoo import llama_relatives
from zoo import transformer as llama
from zoo.core.attention import attend, make_inputs
from zoo.core.layers import Llama3
from zoo.core.vocabulary import cross_entropy
from zoo.kernels import gpu_loss
from zoo.llama_relatives import SIZES, Config, Transformer
from zoo.sizes import TRANSFORMER

pytestmark = [pytest.mark.promise("definitions"), pytest.mark.usefixtures("strict")]
TINY = Config.tiny()


def abstract_model(**changes) -> tuple[nnx.GraphDef, nnx.State]:
    config = dataclasses.replace(TINY, **changes)
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))


INITIAL = {}  # structure → values


def model_of(**changes) -> Transformer:
    """Returns a new tiny model. Models with the same parameters are initialized once."""
    graph, shapes = abstract_model(**changes)
    key, config = jax.tree.structure(shapes), dataclasses.replace(TINY, **changes)
    if key not in INITIAL:
        make = lambda: nnx.split(Transformer(config, rngs=nnx.Rngs(0)))[1]  # noqa: E731
        INITIAL[key] = jax.jit(make, compiler_options=QUICK)()
    return nnx.merge(graph, jax.tree.map(jnp.copy, INITIAL[key]))


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def _logits(graph, state, *arguments):
    return nnx.merge(graph, state)(*arguments)


def logits_of(model: Transformer, *arguments) -> jax.Array:
    return _logits(*nnx.split(model), *arguments)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def _loss_and_gradient(graph, state, *arguments):
    def objective(state):
        total, count, aux = nnx.merge(graph, state).loss(*arguments)
        return total, (total, count, aux)

    gradient, loss = jax.grad(objective, has_aux=True)(state)
    return loss, gradient


def loss_and_gradient(model: Transformer, *arguments) -> tuple[tuple, nnx.State]:
    """Returns the results of `loss`, and the gradient of its sum."""
    return _loss_and_gradient(*nnx.split(model), *arguments)


def assert_close(a: nnx.State, b: nnx.State, rtol: float) -> None:
    """Compares every leaf, with a tolerance relative to its largest number."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * np.abs(y).max() + 1e-7)


def tokens_of(batch=2, length=32, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 257, (batch, length), np.int32)


def normal(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def test_every_named_size_can_be_chosen():
    methods = [name for name, value in vars(llama.Config).items() if isinstance(value, classmethod)]
    llama3 = ["llama_1b", "llama_8b", "llama_70b"]
    llama31 = ["llama31_8b", "llama31_70b", "llama31_405b"]
    assert methods == ["tiny", "small", "medium", "gpt2_124m", *llama3, *llama31]
    assert [size.__name__ for size in SIZES.values()] == methods
    relatives = [name for name in TRANSFORMER if name not in SIZES]
    assert relatives == [TRANSFORMER[name].__name__ for name in relatives]
    assert "mistral_small_24b" in relatives


def test_a_llama_alone_is_the_model_that_recipes_use():
    """Same variables, initial values and loss: llama_relatives adds only what is turned on."""
    batch = packed_batch()
    losses = []
    for zoo in (llama, llama_relatives):
        model = built(zoo.Transformer, zoo.Config.tiny())
        state = nnx.to_pure_dict(nnx.state(model))
        total, count, _ = jax.jit(lambda m: m.loss(**batch), compiler_options=QUICK)(model)
        losses.append((paths(state), total / count))
    (plain, plain_loss), (full, full_loss) = losses
    assert list(plain) == list(full)
    for path, value in plain.items():
        np.testing.assert_array_equal(value, full[path])
    assert plain_loss == full_loss


@pytest.mark.parametrize(
    ("mesh", "strategy", "message"),
    [
        ("data=2,seq=4", "cp", "the rules split positions over 4 devices; use a Config that"),
        ("data=4,pipe=2", "pp", "the rules split the layers into stages"),
    ],
)
def test_a_llama_alone_says_what_its_config_lacks(mesh, strategy, message):
    model = nnx.eval_shape(lambda: llama.Transformer(llama.Config.tiny(), rngs=nnx.Rngs(0)))
    tokens = np.zeros((8, 24), np.int32)
    rules = tuple(llama.RULES[strategy].items())
    with jax.set_mesh(make_mesh(mesh)), nnx.logical_axis_rules(rules):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda m: m.loss(tokens, tokens), model)


def test_tiny_is_divisible_by_eight():
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


@pytest.mark.parametrize(
    ("T", "N", "K", "segments", "window"),
    full_except(
        [
            (*sizes, segments, window)
            for sizes in ((300, 4, 2), (128, 2, 2), (129, 4, 1), (1100, 2, 1))
            for segments in (False, True)
            for window in (None, 1, 50, 1000)
        ],
        fast=[(300, 4, 2, True, 50), (129, 4, 1, False, None), (1100, 2, 1, True, 1000)],
    ),
)
def test_attention_matches_its_definition(T, N, K, segments, window):
    q, k, v = normal((2, T, N, 16), (2, T, K, 16), (2, T, K, 16))
    ids = np.sort(np.random.default_rng(0).integers(0, 4, (2, T))) if segments else None
    attend_jit = jax.jit(attend, static_argnames="window", compiler_options=QUICK)
    ours = attend_jit(q, k, v, ids, window=window)
    np.testing.assert_allclose(ours, plain_attention(q, k, v, ids, window), atol=2e-6)


def test_attention_agrees_with_jax():
    def both(q, k, v):
        theirs = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return attend(q, k, v), theirs

    arrays = normal((2, 200, 8, 16), (2, 200, 4, 16), (2, 200, 4, 16))
    np.testing.assert_allclose(*jax.jit(both, compiler_options=QUICK)(*arrays), atol=1e-6)


def test_a_position_depends_on_nothing_after_it():
    model, tokens = model_of(), tokens_of(batch=1)
    embedded = model.embed[...][tokens]

    def logits_at(x_BTD, t):  # the trunk again, from embeddings
        positions = make_inputs(TINY, tokens)
        (kind,) = TINY.kinds
        for i in range(TINY.num_layers):
            layer = jax.tree.map(lambda w, i=i: w[i], model.layers)
            x_BTD, *_ = layer(x_BTD, positions, kind)
        return model.final_norm(x_BTD)[0, t].sum()

    gradient_of = jax.jit(jax.grad(logits_at), compiler_options=QUICK)
    for t in (0, 13, 31):
        gradient = gradient_of(embedded, t)[0]
        touched = np.abs(gradient).sum(-1) > 0
        assert touched[: t + 1].all(), "a position sees all that is before it"
        assert not touched[t + 1 :].any(), "a position sees nothing that is after it"


def test_documents_do_not_see_each_other():
    model, tokens = model_of(), tokens_of()
    segment_ids = np.tile(np.repeat(np.arange(4, dtype=np.int32), 8), (2, 1))
    both = logits_of(model, tokens, segment_ids)
    # Another document's content changes nothing, to the last bit.
    other = np.concatenate([np.full_like(tokens[:, :16], 7), tokens[:, 16:]], axis=1)
    np.testing.assert_array_equal(logits_of(model, other, segment_ids)[:, 16:], both[:, 16:])
    without = [logits_of(model, x)[:, 16:] for x in (other, tokens)]
    assert (without[0] != without[1]).any(), "without segments it does"
    # A document's logits are those it has alone, wherever it is: rotary positions are relative.
    alone = logits_of(model, tokens[:, 16:24])
    np.testing.assert_allclose(both[:, 16:24], alone, atol=2e-5)


def test_the_gradient_of_one_document_reaches_no_other():
    # Untied, so that the embedding is only looked up: a softmax touches every row.
    model, tokens = model_of(tie_embeddings=False), tokens_of(batch=1)
    segment_ids = np.repeat(np.arange(2, dtype=np.int32), 16)[None]
    targets = np.where(segment_ids == 0, -1, tokens)  # only the second document counts
    _, gradient = loss_and_gradient(model, tokens, targets, segment_ids)
    touched = np.abs(np.asarray(gradient["embed"][...])).sum(-1) > 0
    first, second = set(tokens[0, :16]), set(tokens[0, 16:])
    assert touched[sorted(second)].all()
    assert not touched[sorted(first - second)].any()


# ---- loss ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "tied"),
    full_except(
        [(chunk, tied) for tied in (True, False) for chunk in (1, 8, 12, 32, 1000)],
        fast=[(12, True)],
    ),
)
def test_chunked_loss_equals_the_plain_loss_gradients_included(chunk, tied):
    model, tokens = model_of(loss_chunk=chunk, tie_embeddings=tied), tokens_of()
    targets = np.where(tokens % 5 == 0, -1, np.roll(tokens, -1, axis=1))
    graph, state = nnx.split(model)

    def plain(state):
        log_p = jax.nn.log_softmax(nnx.merge(graph, state)(tokens))
        picked = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        return -jnp.where(targets < 0, 0, picked).sum()

    want = jax.jit(jax.value_and_grad(plain), compiler_options=QUICK)(state)
    (total, count, aux), gradient = loss_and_gradient(model, tokens, targets)
    np.testing.assert_allclose(total, want[0], rtol=1e-6)
    assert_close(gradient, want[1], 2e-6)
    assert float(count) == int((targets >= 0).sum()) < targets.size
    assert aux == {"loss": (total, count)}


def test_a_bias_of_logits_has_the_plain_loss_s_gradient():
    """In three chunks. Meshes can't tell: they share the rule for gradients."""
    config = dataclasses.replace(TINY, loss_chunk=4)
    random = np.random.default_rng(0)
    x_BTD = random.normal(size=(2, 12, 8)).astype(np.float32)
    table_RVD = random.normal(size=(1, TINY.vocab_size, 8)).astype(np.float32)
    bias_RV = random.normal(size=(1, TINY.vocab_size)).astype(np.float32)
    targets_BT = random.integers(-1, TINY.vocab_size, (2, 12))

    def chunked(*weights):
        return cross_entropy(weights[0], weights[1], targets_BT, config, weights[2])[0]

    def plain(x_BTD, table_RVD, bias_RV):
        log_p_BTV = jax.nn.log_softmax(x_BTD @ table_RVD[0].T + bias_RV[:, None])
        is_target_BTV = jnp.arange(TINY.vocab_size)[None, None] == targets_BT[..., None]
        return -jnp.where(is_target_BTV, log_p_BTV, 0).sum()

    def both(*weights):
        return [jax.value_and_grad(loss, (0, 1, 2))(*weights) for loss in (chunked, plain)]

    found, wanted = jax.jit(both, compiler_options=QUICK)(x_BTD, table_RVD, bias_RV)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), found, wanted)


def test_no_array_holds_all_logits():
    """The compiled step has no buffer of tokens × vocabulary, forward or backward."""
    graph, state = abstract_model(vocab_size=4096, loss_chunk=16)
    tokens = jax.ShapeDtypeStruct((4, 128), jnp.int32)

    text = _loss_and_gradient.lower(graph, state, tokens, tokens).compile().as_text()
    sizes = [np.prod([int(d) for d in m.split(",")]) for m in re.findall(r"f32\[([\d,]+)\]", text)]
    assert max(sizes) < 4 * 128 * 4096
    assert 4 * 16 * 4096 in sizes, "the chunks are there"


def test_logits_are_computed_once():
    """One loop over chunks computes the loss with its gradients: three products, of bfloat16."""
    graph, state = nnx.split(model_of(dtype="bfloat16"))
    tokens = tokens_of()
    loss = lambda s: nnx.merge(graph, s).loss(tokens, tokens)[0]  # noqa: E731
    steps = jax.make_jaxpr(jax.grad(loss))(state).jaxpr.eqns
    loops = [e.params["jaxpr"].eqns for e in steps if e.primitive.name == "scan"]
    products = [
        [e for e in loop if e.primitive.name == "dot_general" and _has_vocab(e)] for loop in loops
    ]
    assert [len(p) for p in products] == [0, 3, 0], "layers, chunks, layers backward"
    assert {str(v.aval.dtype) for p in products[1] for v in p.invars} == {"bfloat16"}


def _has_vocab(product) -> bool:
    return any(TINY.vocab_size in v.aval.shape for v in (*product.invars, *product.outvars))


def test_a_gpu_s_loss_reads_logits_once():
    """Its value and gradient by their definition, with a padded vocabulary and large logits."""
    logits_RMV = np.random.default_rng(0).normal(scale=30, size=(2, 5, 11)).astype(np.float32)
    logits_RMV[0, 0] += 1e4
    logits_RMV[..., 9:] = -np.inf
    targets_RM = np.array([[3, -1, 0, 8, 5], [1, 2, -1, 4, 8]], np.int32)
    weights_RM = np.linspace(-1, 2, 10).reshape(2, 5)
    nats_RM, pull = jax.vjp(gpu_loss.nats_in_one_pass, jnp.asarray(logits_RMV), targets_RM)
    grad_RMV, _ = pull(jnp.asarray(weights_RM, jnp.float32))

    exact_RMV = logits_RMV.astype(np.float64)
    top_RM1 = exact_RMV.max(-1, keepdims=True)
    shares_RMV = np.exp(exact_RMV - top_RM1)
    total_RM1 = shares_RMV.sum(-1, keepdims=True)
    one_hot_RMV = np.arange(11) == targets_RM[..., None]
    wanted_RM = (np.log(total_RM1) + top_RM1)[..., 0] - np.where(one_hot_RMV, exact_RMV, 0).sum(-1)
    np.testing.assert_allclose(nats_RM, wanted_RM, atol=2e-3)  # float32 near 1e4
    np.testing.assert_allclose(nats_RM[1], wanted_RM[1], atol=1e-5)
    wanted_RMV = weights_RM[..., None] * (shares_RMV / total_RM1 - one_hot_RMV)
    np.testing.assert_allclose(grad_RMV, wanted_RMV, atol=2e-3)
    np.testing.assert_allclose(grad_RMV[1], wanted_RMV[1], atol=2e-6)


@pytest.mark.full
def test_a_mean_of_the_loss_has_the_gradient_of_its_sum_in_bfloat16():
    """The sum's gradients are multiplied by 1 / count without a rounded factor."""
    tokens = tokens_of()
    norms = {}
    for divisor in (1.0, 3.0):
        graph, state = nnx.split(model_of(dtype="bfloat16"))
        loss = lambda s, d=divisor: nnx.merge(graph, s).loss(tokens, tokens)[0] / d  # noqa: B023, E731
        gradient = jax.jit(jax.grad(loss), compiler_options=QUICK)(state)
        norms[divisor] = (
            divisor * sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(gradient)) ** 0.5
        )
    np.testing.assert_allclose(norms[3.0], norms[1.0], rtol=5e-4)


def test_loss_of_a_new_model_is_near_uniform():
    (nats, count, _), _ = loss_and_gradient(model_of(), tokens_of(), tokens_of(seed=1))
    assert abs(nats / count - np.log(TINY.vocab_size)) < 0.7


# ---- how it is computed changes nothing ------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_gradient():
    """Gradient with all activations saved, and the layers in one loop."""
    with jax.numpy_rank_promotion("raise"):
        return loss_and_gradient(model_of(remat="none"), tokens_of(), tokens_of())[1]


@pytest.mark.parametrize(
    "remat", full_except([name for name in Config.REMAT if name != "none"], ["full"])
)
def test_rematerialization_changes_no_gradient(remat, plain_gradient):
    _, gradient = loss_and_gradient(model_of(remat=remat), tokens_of(), tokens_of())
    assert_close(gradient, plain_gradient, 1e-5)


@pytest.mark.full
def test_unrolled_layers_change_no_gradient(plain_gradient):
    model, tokens = model_of(remat="none", unroll=TINY.num_layers), tokens_of()
    graph, state = nnx.split(model)
    trace = jax.make_jaxpr(lambda state: nnx.merge(graph, state).loss(tokens, tokens)[0])(state)
    assert f"unroll={TINY.num_layers}\n" in str(trace)
    assert_close(loss_and_gradient(model, tokens, tokens)[1], plain_gradient, 1e-5)


@functools.cache
def temporary_bytes(remat: str) -> int:
    graph, state = abstract_model(remat=remat, num_layers=16)
    tokens = jax.ShapeDtypeStruct((8, 128), jnp.int32)
    compiled = _loss_and_gradient.lower(graph, state, tokens, tokens).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("more", "less"),
    # "gathered" is "full" where nothing is gathered, "offload" where the host has the only memory.
    [*itertools.pairwise(name for name in Config.REMAT if name not in ("gathered", "offload"))],
)
@pytest.mark.full
def test_rematerialization_needs_less_memory(more, less):
    assert temporary_bytes(more) > temporary_bytes(less)


def test_bfloat16_is_near_float32_and_keeps_parameters():
    tokens = tokens_of()
    half, full = model_of(dtype="bfloat16"), model_of()
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(half)))
    logits, want = logits_of(half, tokens), logits_of(full, tokens)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, want, atol=0.1)
    assert (logits != want).any(), "bfloat16 was used"


@pytest.mark.parametrize(
    "changes",
    full_except(
        [
            dict(qkv_bias=True),
            dict(qk_norm=True),
            dict(tie_embeddings=False),
            dict(sliding_window=4),
            dict(rope_scaling=Llama3(8.0, 1.0, 4.0, 16)),
            dict(rope_theta=1e6),
        ],
        fast=[dict(qk_norm=True)],
    ),
)
def test_an_option_has_an_effect_and_trains(changes):
    model, tokens = model_of(**changes), tokens_of()
    if changes.get("qkv_bias"):
        model.layers.attention.q_bias[...] += 0.1
    if changes.get("qk_norm"):
        model.layers.attention.q_norm.scale[...] *= 2
    difference = np.abs(logits_of(model, tokens) - logits_of(model_of(), tokens))
    assert (difference.max(axis=(0, 2)) > 0)[-1]
    _, gradient = loss_and_gradient(model, tokens, tokens)
    for path, leaf in nnx.to_flat_state(gradient):
        # A key's bias adds the same to all logits of a query: softmax does not see it.
        assert np.abs(leaf[...]).max() > 0 or path[-1] == "k_bias", path


@pytest.mark.full
def test_qkv_biases_are_matrices_of_their_heads_and_start_at_zero():
    attention = model_of(qkv_bias=True).layers.attention
    assert attention.q_bias.shape == (TINY.num_layers, TINY.num_heads, TINY.head_dim)
    assert not attention.q_bias[...].any()


def test_compile_time_does_not_grow_with_depth():
    """The program is as long for 12 layers as for 3: layers are one loop."""

    def length(layers):
        graph, state = abstract_model(num_layers=layers)
        tokens = jax.ShapeDtypeStruct((2, 32), jnp.int32)
        return _loss_and_gradient.lower(graph, state, tokens, tokens).as_text().count("\n")

    assert length(12) == length(3)
