"""A compiled step sends between devices what its strategy promises, and nothing else.

The textbook counts array elements that a device receives: `dp` all-reduces each gradient once;
`fsdp` all-gathers weights (again for the backward pass where a layer is rematerialised) and
reduce-scatters gradients; `tp` all-reduces activations. XLA's CPU backend makes reduce-scatters of
those in shard_map alone, which are gradients of experts; of others it makes an all-reduce and a slice.
TPUs have one (recipes/instruments/results/tpu.md).
"""

import dataclasses
import itertools
import json
import math
import types
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr

from recipes.common.entries import model as model_of
from recipes.common.report.hlo import Collective, collectives, group_size
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding import compiler_options
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import Layout, make_layout
from recipes.common.sharding.rules import count_shards, partition_spec, used_axes
from recipes.common.train.step import gradients
from tests.conftest import full_except
from tests.support.entries import (
    BATCH,
    CASES,
    ENTRIES,
    FAST_CASES,
    FULL_CASES,
    compile_step,
    parallelisms,
    step_text,
    with_case,
)
from tests.support.proof import BYTES
from zoo import dot_relu_dot, mlp
from zoo.core import attention, config, decoder, layers, sharding, stack, vocabulary
from zoo.core.sharding import optimizer_axes
from zoo.kernels import choice as kernels  # fmt: skip
from zoo.options import cache, weights
from zoo.parallel import context

pytestmark = pytest.mark.promise("strategies-send")

# All-reduces of a whole activation where a matmul's inner dim is split: Megatron's count, and the
# most that XLA's CPU backend makes of it. The backend reduces the cotangents of matmuls that read the
# same input one by one. Any other entry has at most MOST for each weight that is split.
ACTIVATIONS = {
    "dot_relu_dot": (1, 1),  # forward; x needs no gradient
    "mlp": (4, 4),  # two blocks, forward and backward
    # Each of two layers has 2 in the forward pass and 1 of them again in the backward pass. Then it
    # has 2, which the backend makes 5: q, k and v; gate and up. The table of embeddings, split over
    # `vocab`, has 2.
    "transformer": (12, 18),
    # 4 forward, 2 for attention again, 2 for the experts, 2 to 6 for attention, 2 for the embeddings.
    "moe": (12, 16),
    "gpt2": (12, 18),
    "bert": (12, 18),
    # As the Transformer, for four layers. The norm after the MLP needs its output, so that each layer
    # has 2 again.
    "gemma3": (26, 38),
    # Each of two layers: 2 forward, 1 again, then 2, which the backend makes 4: q, k and v; up.
    "vit": (10, 14),
    "gpt_oss": (12, 16),
    # 12 forward; 8 again, of the mixers and of the shared experts, whose gates need their output; 4
    # for the experts, 4 to 8 for the shared ones, 1 to 6 for a gated delta network (q, k, v, gate,
    # decay, write), 1 to 3 for attention, 2 for the embeddings.
    "qwen3_next": (34, 52),
    # Two periods: 5 forward, of which experts and the shared ones have 2; nothing again, because a layer
    # is one sublayer. Then 1 to 5 for Mamba-2 (gate, x, B, C, step), 1 to 3 each for attention and a short
    # convolution, 1 to 2 for the shared experts, 1 for the experts. The embeddings have 2.
    "hybrid": (22, 40),
}
MOST = 4


def of_latent_attention(config) -> tuple[int, int]:
    """DeepSeek's least and most numbers for each position.

    Each layer: attention's output forward and again, the MLP's (in layers with experts, the shared
    experts'), and that of the experts; then the gradients of both latents and of the rotary key, of
    the MLP's input, which the backend makes two, and of the experts'. The embeddings have two.
    """
    D, L, routed = config.embed, config.num_layers, config.num_layers - config.dense_layers
    latents = config.q_latent + config.kv_latent + config.rope_dim
    least = L * (4 * D + latents) + routed * 2 * D + 2 * D
    return least, least + L * D


# All-reduces of single numbers for each position, where a matmul's inner dim is split. A loss over a
# split vocabulary has a maximum, a sum of exponentials and the target's logit, and the first two again
# in the backward pass. MoE adds gradients of expert weights, two for each position in both layers.
NUMBERS = {"dot_relu_dot": 0, "mlp": 0, "vit": 0, "siglip": 0}
NUMBERS |= dict.fromkeys(("moe", "gpt_oss", "deepseek"), 5 + 2 * 2)
NUMBERS |= {"qwen3_next": 5 + 2 * 4}  # in four layers
NUMBERS |= {"hybrid": 5 + 2 * 2}  # in two of eight
LOSS = 5  # the Transformer and any other entry


def to_experts(entry_name: str, layout: Layout) -> int:
    """Numbers that a mixture of experts exchanges: D for each slot there and back, and both again for gradients, and
    the slot's weight once each way. The tiny model saves no activations, so the way there is repeated.
    """
    config, (batch, length) = layout.config, ENTRIES[entry_name].batches[0]["tokens"].shape
    share = config.capacity * config.experts_per_token * length / config.num_experts
    slots = batch // layout.batch_shards * config.num_experts * math.ceil(share)
    layers = sum(count for _, count in layout.shape.trained_experts)
    return layers * slots * (5 * config.embed + 3)


# Entry → the mesh axis over which it exchanges activations, and how many numbers a device then
# receives from all devices, itself included.
WITH_EXPERTS = ("moe", "gpt_oss", "deepseek", "qwen3_next", "hybrid")
EXCHANGES = dict.fromkeys(WITH_EXPERTS, ("expert", to_experts))


# Entry → norms of queries and keys. Where the rules split heads, the gradients of these are summed over
# the heads' devices too, on their own.
HEAD_NORMS = {"gemma3": ("q_norm", "k_norm"), "qwen3_next": ("q_norm", "k_norm", "mixer/norm/")}
# Positions of an example whose arrays have no dim for them: the class token and the patches.
POSITIONS = {
    "vit": lambda config: config.num_positions,
    "siglip": lambda config: config.num_patches,
}


# Parameters that a model does not compute with; see zoo/vit.py.
UNUSED = {"vit": {"params/layers/attention/k_bias"}, "siglip": {"params/pooling/k_bias"}}


class Sent(NamedTuple):
    """Array elements that collectives return on one device in a step, by purpose."""

    weights: int = 0  # gathered
    gradients: int = 0  # reduced; and new values of buffers
    activations: int = 0  # all-reduced, each a whole [rows, width]
    numbers: int = 0  # all-reduced, one or two for each row
    exchanged: int = 0  # in all-to-alls
    unknown: tuple[Collective, ...] = ()  # collectives that serve none of these purposes

    @property
    def bytes(self) -> int:
        """Bytes of all elements, which are float32."""
        return 4 * sum(self[:-1])


class Variable(NamedTuple):
    """One parameter or buffer, and what one device holds of one layer of it."""

    trained: bool
    axes: tuple[str, ...]  # without the axis of stacked layers
    layers: int
    stacked: bool
    rest: tuple[int, ...]
    use: tuple[int, ...]
    state: tuple[int, ...]  # of the optimizer


def variables(entry_name: str, layout: Layout) -> dict[str, Variable]:
    """Returns path → Variable for all parameters and buffers."""
    found = {}
    unused = UNUSED.get(entry_name, ())
    every = {
        f"{kind}/{path}": (axes, paths(layout.model.shapes[kind])[path].shape)
        for kind, tree in layout.model.axes.items()
        for path, axes in paths(tree).items()
    }
    for path, (axes, shape) in every.items():
        stacked = [i for i, axis in enumerate(axes) if axis in _stacks(layout)]
        kept = [i for i in range(len(axes)) if i not in stacked]
        names = tuple(axes[i] for i in kept)
        rest, use, state = (
            tuple(shape[i] // count_shards(layout.rules, axis, layout.mesh.shape)
                  for i, axis in zip(kept, as_named, strict=True))
            for as_named in (
                names,
                tuple(layout.names.in_use.get(axis, axis) for axis in names),
                optimizer_axes(names, layout.rules),
            )
        )  # fmt: skip
        layers = math.prod(shape[i] for i in stacked)
        trained = path.startswith("params/") and path not in unused
        found[path] = Variable(trained, names, layers, bool(stacked), rest, use, state)
    return found


def _stacks(layout: Layout) -> set[str]:
    return layout.names.stacks


def _dims(shape) -> tuple[int, ...]:
    """Sorts dims and drops those of size 1, because the compiler transposes freely."""
    return tuple(sorted(d for d in shape if d > 1))


def _whole(variable: Variable) -> tuple[int, ...]:
    """The dims of a weight at rest, of all its layers."""
    return _dims((variable.layers, *variable.rest))


def split(layout: Layout) -> list[str]:
    """Logical axes of weights in use that the rules split; a matmul over one ends in a sum."""
    return [
        axis
        for axis, on in layout.names.logical_axes.items()
        if on == "both" and count_shards(layout.rules, axis, layout.mesh.shape) > 1
    ]


def activations(entry_name: str, layout: Layout) -> tuple[int, set[int]]:
    """Positions of a batch on one device, and possible sizes of a whole activation."""
    names = layout.names
    outer = [
        axis
        for axis, on in names.logical_axes.items()
        if on == "activations" and axis not in names.in_use.values()
    ]
    example = next(iter(ENTRIES[entry_name].batches[0].values()))
    shape = example.shape[: len(outer)]
    if entry_name in POSITIONS:
        shape = len(example), POSITIONS[entry_name](layout.config)
    rows = math.prod(shape) // layout.batch_shards
    widths = {
        n
        for kind, tree in layout.model.axes.items()
        for path, axes in paths(tree).items()
        for axis, n in zip(axes, paths(layout.model.shapes[kind])[path].shape, strict=True)
        if axis in names.in_use
    }
    widths |= {getattr(layout.config, "rope_dim", 0)} - {0}  # a rotary key that heads share
    sizes = {rows * width for width in widths}
    if entry_name == "siglip":  # the pooling has one position
        sizes |= {len(example) // layout.batch_shards * width for width in widths}
    return rows, sizes


def activation_bounds(entry_name: str, layout: Layout, weights: int) -> tuple[int, int]:
    """The least and most elements that are all-reduced where matmuls' inner dims are split.

    Args:
      weights: how many are split, of all layers.
    """
    rows, whole = activations(entry_name, layout)
    if entry_name == "deepseek":
        least, most = of_latent_attention(layout.config)
        return rows * least, rows * most
    if entry_name == "siglip":
        # Each of four layers as in ViT; the pooling's keys and values; and its own position: two forward,
        # two backward.
        whole, one = (n * layout.config.embed for n in (rows, BATCH // layout.batch_shards))
        return 21 * whole + 4 * one, 30 * whole + 6 * one
    least, most = ACTIVATIONS.get(entry_name, (1, MOST * weights))
    return least * min(whole), most * max(whole)


def classify(entry_name: str, layout: Layout, text: str) -> Sent:
    held = variables(entry_name, layout).values()
    gathered = {_dims(variable.use) for variable in held if variable.rest != variable.use}
    gathered |= {_whole(variable) for variable in held if variable.state != variable.rest}
    gathered_later = [v for v in held if "expert_embed" in v.axes and v.rest != v.use]  # of experts
    scattered = {_dims(variable.rest) for variable in gathered_later}
    reduced = {_dims(variable.use) for variable in held if variable not in gathered_later}
    rows, whole = activations(entry_name, layout)
    experts = layout.shape.trained_experts
    loads = [(shape.number,) for shape, _ in experts]  # of each expert, metrics

    counts, unknown = Counter(), []
    for found in collectives(text):
        if group_size(found.groups, layout.mesh.size) == 1:
            continue  # with itself: nothing is sent
        if entry_name == "siglip" and found.shapes == ((BATCH,),):
            continue  # which rows count, a byte each
        assert found.bytes == 4 * sum(map(math.prod, found.shapes)), found
        for shape in found.shapes:
            size, dims = math.prod(shape), _dims(shape)
            if size == 1 and found.kind == "all-reduce":
                continue  # the loss, the number of targets, the gradient's norm
            if found.kind == "all-gather" and dims in gathered:
                counts["weights"] += found.times * size
            elif found.kind == "reduce-scatter" and dims in scattered:
                parts = group_size(found.groups, layout.mesh.size)
                counts["gradients"] += found.times * size * parts
            elif found.kind == "all-reduce" and dims in scattered and dims not in reduced:
                counts["gradients"] += found.times * size  # of replicas
            elif found.kind == "all-reduce" and split(layout) and math.prod(dims) in whole:
                counts["activations"] += found.times * size
            elif found.kind == "all-reduce" and split(layout) and size in (rows, 2 * rows):
                counts["numbers"] += found.times * size
            elif found.kind == "all-to-all":
                counts["exchanged"] += found.times * size
            elif entry_name == "siglip" and found.kind != "all-reduce":
                # Embeddings of all texts; a part of their gradient.
                parts = layout.batch_shards if found.kind == "reduce-scatter" else 1
                if shape[-1:] == (layout.config.embed,):
                    counts["exchanged"] += found.times * size * parts
            elif found.kind == "all-reduce" and dims in reduced:
                counts["gradients"] += found.times * size
            elif found.kind == "all-reduce" and dims in loads:
                continue
            else:
                unknown.append(found)
    if layout.batch_shards > 1 and not any(
        path.startswith("buffers/") for path in variables(entry_name, layout)
    ):
        # Their shape may be that of a gradient. Biases that balance experts are updated by them.
        same = [shape.number * count for shape, count in experts if (shape.number,) in reduced]
        counts["gradients"] -= sum(same)
    return Sent(**counts, unknown=tuple(unknown))


def of_replicas(variable: Variable, layout: Layout) -> int:
    """Elements of a gradient of experts that replicas sum after it was scattered."""
    if variable.rest == variable.use or "expert_embed" not in variable.axes:
        return 0
    parts = math.prod(variable.use) // math.prod(variable.rest)
    parts *= count_shards(layout.rules, "expert", layout.mesh.shape)
    if parts == layout.batch_shards:
        return 0
    return math.prod(variable.rest) * variable.layers


def textbook(entry_name: str, layout: Layout) -> Sent:
    """The elements that the strategy has to send, computed from shapes alone."""
    held, book = variables(entry_name, layout).values(), Sent()
    # Each split weight is gathered for the forward pass, and again where a layer is rematerialised.
    weights = sum(
        math.prod(v.use) * v.layers * (2 if v.stacked else 1) for v in held if v.rest != v.use
    )
    # Updated parts are gathered once, of all layers.
    weights += sum(math.prod(v.rest) * v.layers for v in held if v.trained and v.state != v.rest)
    # Each gradient is reduced once over the devices that have other rows of the batch; `classify` leaves
    # single numbers out.
    gradients = sum(math.prod(v.use) * v.layers for v in held if v.trained and math.prod(v.use) > 1)
    gradients += sum(map(of_replicas, held, itertools.repeat(layout)))
    book = Sent(weights=weights, gradients=gradients if layout.batch_shards > 1 else 0)
    if split(layout):
        rows, _ = activations(entry_name, layout)
        least, _ = activation_bounds(entry_name, layout, 1)
        numbers = NUMBERS.get(entry_name, LOSS)
        book = book._replace(activations=least, numbers=numbers * rows)
    if entry_name == "siglip" and layout.batch_shards > 1:
        book = book._replace(exchanged=2 * BATCH * layout.config.embed)
    axis, exchanged = EXCHANGES.get(entry_name, ("", None))
    if exchanged and axis in used_axes(layout.rules) and layout.mesh.shape[axis] > 1:
        book = book._replace(exchanged=exchanged(entry_name, layout))
    return book


def check_promise(entry_name: str, layout: Layout, text: str) -> Sent:
    """Asserts that the step sends what the rules in force promise; returns what it sends."""
    sent, book = classify(entry_name, layout, text), textbook(entry_name, layout)
    held = variables(entry_name, layout)
    assert sent.unknown == ()
    if layout.mesh.size == 1:
        assert not any(sent)
    assert sent.weights == book.weights
    assert sent.exchanged == book.exchanged

    # Each gradient once, and new values of buffers.
    norms = HEAD_NORMS.get(entry_name, ()) if split(layout) else ()
    most = sum(
        math.prod(v.use) * v.layers * times + of_replicas(v, layout)
        for path, v in held.items()
        for times in [(layout.batch_shards > 1) + any(name in path for name in norms)]
    )
    assert book.gradients <= sent.gradients <= most

    # Activations: only where the rules split a matmul's inner dim.
    if axes := split(layout):
        over = [v for v in held.values() if v.trained and set(axes) & set(v.axes)]
        _, most = activation_bounds(entry_name, layout, sum(v.layers for v in over))
        assert book.activations <= sent.activations <= most
        assert sent.numbers <= book.numbers
    else:
        assert sent.activations == 0
    return sent


# Strategies that keep all layers and all positions of a row on each device. The others:
# test_pipeline.py and test_context.py.
WHOLE_ROWS = [
    (entry, strategy, mesh)
    for entry, strategy, mesh in CASES
    if not {"cp", "sp", "pp"} & parallelisms(strategy, mesh)
]


RELEASE_CASES = [case for case in WHOLE_ROWS if case not in FULL_CASES]


@pytest.mark.parametrize(
    ("entry", "strategy", "mesh"), full_except(WHOLE_ROWS, FAST_CASES, RELEASE_CASES)
)
def test_a_step_sends_what_its_strategy_promises(entry, strategy, mesh, golden):
    layout = ENTRIES[entry].layout(mesh, strategy)
    sent = check_promise(entry, layout, step_text(entry, strategy, mesh))
    record = {"sent": sent.bytes, "textbook": textbook(entry, layout).bytes}
    case = (entry, strategy, mesh)
    reviewed = golden.rewrite(BYTES, lambda text: with_case(text, case, record))
    assert json.loads(reviewed or "{}").get(" ".join(case)) == record, (
        f"tests/golden/{BYTES} has other bytes. If the change is meant, run the test again with "
        "--update-golden and review the file's diff."
    )


@pytest.mark.full
@pytest.mark.parametrize(("entry", "strategy", "mesh"), RELEASE_CASES)
def test_a_traced_step_gathers_weights_and_scatters_gradients(entry, strategy, mesh):
    """Before XLA partitions the step: of the cases that are compiled for a release alone.

    Weights of experts are gathered where each device computes for itself, which is not read here.
    """
    layout = ENTRIES[entry].layout(mesh, strategy)
    split_at_rest = [
        v
        for v in variables(entry, layout).values()
        if v.rest != v.use and "expert_embed" not in v.axes
    ]
    pairs = {(_dims(v.rest), _dims(v.use)) for v in split_at_rest}
    gathered = scattered = 0
    for equation, times in equations(traced_gradients(entry, layout), 1):
        if equation.primitive.name == "reshard":
            before, after = (
                x.aval.sharding.shard_shape(x.aval.shape)
                for x in (equation.invars[0], equation.outvars[0])
            )
            if (_dims(before), _dims(after)) in pairs:
                gathered += times * math.prod(after)
            elif (_dims(after), _dims(before)) in pairs:
                scattered += times * math.prod(before)
    # Again for the backward pass where a layer is rematerialised.
    assert gathered == sum(
        math.prod(v.use) * v.layers * (2 if v.stacked else 1) for v in split_at_rest
    )
    assert scattered == sum(math.prod(v.use) * v.layers for v in split_at_rest if v.trained)


def traced_gradients(entry_name: str, layout: Layout):
    row = {name: x[0] for name, x in ENTRIES[entry_name].batches[0].items()}
    with layout.trace():
        step = jax.jit(lambda state, batch: gradients(layout, state, batch))
        return step.trace(layout.variables(), layout.abstract_batch(row)).jaxpr.jaxpr


def equations(jaxpr, times: int) -> Iterator[tuple]:
    """Each equation, also of inner programs, and how often it runs."""
    for equation in jaxpr.eqns:
        yield equation, times
        inner_times = times
        if equation.primitive.name == "scan":
            inner_times *= equation.params["length"]
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from equations(
                    inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner, inner_times
                )


def _is_jaxpr(x) -> bool:
    return isinstance(x, Jaxpr | ClosedJaxpr)


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_recorded_bytes_are_of_every_case(entry, golden):
    """Those of the textbook are computed anew, also of cases that only a release compiles."""
    text = golden.rewrite(BYTES, lambda text: text)
    record = {k: v for k, v in json.loads(text or "{}").items() if k.split()[0] == entry}
    cases = [case for case in WHOLE_ROWS if case[0] == entry]
    if golden.update:  # other workers are still compiling some
        cases = [case for case in cases if " ".join(case) in record]
    assert list(record) == [" ".join(case) for case in cases], "run with --release --update-golden"
    for _, strategy, mesh in cases:
        recorded = record[f"{entry} {strategy} {mesh}"]
        assert recorded["textbook"] == textbook(entry, ENTRIES[entry].layout(mesh, strategy)).bytes


@pytest.mark.parametrize("entry_name", ENTRIES)
def test_a_gradient_is_sharded_like_its_weight_at_rest(entry_name):
    """A TPU can scatter the sums then, where laid out as in use it would sum all on each device.
    The CPU backend does that anyway, so this looks at the gradient's type.
    """
    entry, layout = ENTRIES[entry_name], ENTRIES[entry_name].layout("8")
    held = {
        path: v
        for path, v in variables(entry_name, layout).items()
        if v.trained and v.rest != v.use
    }
    assert held, "on the mesh 8, the rules that suit it gather weights"

    def total(params, rest, batch):
        return layout.model.merge(rest | {"params": params}).loss(**batch)[0]

    row = {name: x[0] for name, x in entry.batches[0].items()}
    state, batch = layout.variables(), layout.abstract_batch(row)
    with layout.trace():
        made = jax.eval_shape(jax.grad(total), state["params"], state, batch)
    gradient = paths({"params": made})
    for path, variable in held.items():
        rest = tuple(partition_spec(variable.axes, layout.rules))
        assert tuple(gradient[path].sharding.spec)[-len(rest) :] == rest, path  # after layers


def test_weights_in_use_are_cast_before_they_are_gathered():
    """Rounded once, at rest; the gradient comes back in float32; norms stay as they are."""
    w = np.random.default_rng(0).standard_normal((16, 8), np.float32)
    weights = nnx.Dict(
        matrix=nnx.Param(jnp.asarray(w), out_sharding=("embed", "mlp"), eager_sharding=False),
        norm=nnx.Param(jnp.asarray(w[0]), out_sharding=("norm",), eager_sharding=False),
    )
    used = sharding.in_use(weights, {"embed": "act_embed"}, "bfloat16")
    assert used.matrix[...].dtype == jnp.bfloat16
    np.testing.assert_array_equal(used.matrix[...], w.astype(jnp.bfloat16))
    assert used.matrix.out_sharding == ("act_embed", "mlp")
    assert used.norm[...].dtype == jnp.float32
    np.testing.assert_array_equal(used.norm[...], w[0])
    as_they_are = sharding.in_use(weights, {"embed": "act_embed"})
    assert as_they_are.matrix[...].dtype == jnp.float32


@pytest.mark.parametrize(
    ("entry_name", "mesh", "strategy"),
    [
        ("transformer", "8", "fsdp"),
        ("moe", "data=2,expert=4", "fsdp_ep"),
        ("gpt2", "8", "fsdp"),
        ("gemma3", "8", "fsdp"),
        ("gpt_oss", "8", "fsdp"),
        ("deepseek", "8", "fsdp"),
        ("qwen3_next", "8", "fsdp"),
        ("vit", "8", "fsdp"),
        ("transformer", "data=2,pipe=2,model=2", "fsdp_pp_tp"),
    ],
)
def test_weights_are_gathered_in_the_compute_dtype(entry_name, mesh, strategy):
    """Half of float32's bytes. The CPU's compiler would hide it, so this looks at the trace."""
    entry = ENTRIES[entry_name]
    changes = {"mtp_depth": 1} if entry_name in ("deepseek", "qwen3_next") else {}
    config = dataclasses.replace(entry.config, dtype="bfloat16", **changes)
    layout = make_layout(model_of(entry_name), config, make_mesh(mesh), strategy, batch_size=BATCH)
    row = {name: x[0] for name, x in entry.batches[0].items()}

    def total(variables, batch):
        return layout.model.merge(variables).loss(**batch)[0]

    with layout.trace():
        traced = jax.make_jaxpr(total)(layout.variables(), layout.abstract_batch(row))
    resting = {leaf.shape[-2:] for leaf in jax.tree.leaves(layout.variables())}
    gathered = Counter(
        (x.shape, str(x.dtype))
        for x in whole_along("data", traced.jaxpr)
        if x.shape[-2:] in resting
    )
    if entry_name == "vit":
        assert gathered.pop(((config.embed, config.classes), "float32")) == 1, "logits are float32"
    assert len(gathered) >= 3
    assert {dtype for _, dtype in gathered} == {"bfloat16"}, gathered


def whole_along(axis: str, jaxpr) -> list:
    """Floating-point results of gathers along a mesh axis, in all parts of a program."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "all_gather" and axis in equation.params["axis_name"]:
            found += [
                x.aval for x in equation.outvars if jnp.issubdtype(x.aval.dtype, jnp.floating)
            ]
        if equation.primitive.name == "reshard":
            (before,), (after,) = equation.invars, equation.outvars
            split, left = (axis in used_by(x.aval.sharding.spec) for x in (before, after))
            if split and not left and jnp.issubdtype(after.aval.dtype, jnp.floating):
                found.append(after.aval)
        parts = jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        )
        for part in parts:
            part = getattr(part, "jaxpr", part)
            found += whole_along(axis, part) if hasattr(part, "eqns") else []
    return found


def used_by(spec) -> set[str]:
    return {name for part in spec for name in ((part,) if isinstance(part, str) else part or ())}


def test_a_platform_s_options_reach_its_compiler(monkeypatch):
    """The TPU's make reduce-scatters; no TPU is here to refuse what it does not know, so the CPU is."""
    monkeypatch.setitem(compiler_options.COMPILER_OPTIONS, "cpu", {"xla_no_such_option": "true"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        compile_step("dot_relu_dot", ENTRIES["dot_relu_dot"].layout("8"))


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ({"platform": "gpu", "compute_capability": "9.0"}, "cuda"),
        ({"platform": "gpu", "compute_capability": "gfx942"}, "gpu"),
        ({"platform": "gpu"}, "gpu"),
        ({"platform": "tpu"}, "tpu"),
    ],
)
def test_nvidia_s_options_are_for_nvidia(device, name):
    assert compiler_options.platform(types.SimpleNamespace(**device)) == name
    assert "gpu" not in compiler_options.COMPILER_OPTIONS, (
        "AMD's compiler would refuse NVIDIA's options"
    )


@pytest.mark.parametrize(
    ("kind", "mebibytes"),  # of a core's vector memory
    [("TPU v4", 16), ("TPU v5 lite", 128), ("TPU v5", 64), ("TPU v6 lite", 128), ("TPU7x", 64)],
)
def test_a_kind_of_tpu_has_its_own_options_and_those_of_all_tpus(kind, mebibytes):
    device = types.SimpleNamespace(platform="tpu", device_kind=kind)
    mesh = types.SimpleNamespace(devices=np.array([device, device]), size=2)
    options = compiler_options.compiler_options(mesh)
    assert options.items() >= compiler_options.COMPILER_OPTIONS["tpu"].items()
    limit = int(options.get("xla_tpu_scoped_vmem_limit_kib", 0))
    assert (limit > 0) == (kind != "TPU v4")
    assert limit < mebibytes * 1_024, "a core has no more"


# ---- the check can fail ----------------------------------------------------------------------------


def on_auto_axes(layout):
    mesh = layout.mesh
    kinds = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    return dataclasses.replace(layout, mesh=mesh)


@pytest.fixture
def replace(monkeypatch):
    """Returns a function that replaces a helper of zoo/core/sharding.py wherever the zoo uses it."""

    def everywhere(name, function):
        users = [
            module
            for module in (
                sharding,
                layers,
                stack,
                vocabulary,
                kernels,
                attention,
                context,
                cache,
                config,
                decoder,
                weights,
                dot_relu_dot,
                mlp,
            )
            if hasattr(module, name)
        ]
        assert sharding in users
        for module in users:
            monkeypatch.setattr(module, name, function)

    return everywhere


@pytest.mark.full
def test_rules_alone_are_not_fsdp(replace):
    """Weights laid out by the table, and no word on where they are used: the partitioner moves
    activations or partial sums in their place, and the check sees it.
    """
    layout = ENTRIES["transformer"].layout("8", "fsdp")
    check_promise("transformer", layout, step_text("transformer", "fsdp", "8"))
    layout = on_auto_axes(layout)  # Explicit ones refuse most of this
    replace("in_use", lambda weights, names, dtype=None: weights)
    replace("constrain", lambda x, *axes: x)
    with pytest.raises(AssertionError):
        check_promise("transformer", layout, compile_step("transformer", layout).as_text())


def test_partial_sums_instead_of_gathers_are_caught(replace):
    """`fsdp` without gathers: each device multiplies only its part of a weight."""
    layout = ENTRIES["dot_relu_dot"].layout("8", "fsdp")
    check_promise("dot_relu_dot", layout, step_text("dot_relu_dot", "fsdp", "8"))
    layout, parts = on_auto_axes(layout), jax.sharding.PartitionSpec(None, "data")
    replace("in_use", lambda weight, names: weight)
    replace("constrain", lambda x, *axes: jax.lax.with_sharding_constraint(x, parts))
    with pytest.raises(AssertionError):
        check_promise("dot_relu_dot", layout, compile_step("dot_relu_dot", layout).as_text())


in_use, constrain, NOWHERE = sharding.in_use, sharding.constrain, jax.P()


def gathered_whole(weight, names):
    return weight.replace(jax.sharding.reshard(in_use(weight, names)[...], NOWHERE))


def passed_on(weight, names):
    where, ring = jax.typeof(weight[...]).sharding.spec, [(i, (i + 1) % 8) for i in range(8)]
    shift = lambda w: jax.lax.ppermute(w, "data", ring)  # noqa: E731
    moved = jax.shard_map(shift, in_specs=where, out_specs=where)(weight[...])
    return in_use(weight.replace(moved), names)


def summed(x, *axes):
    x = constrain(x, *axes)
    return x + x.sum(1, keepdims=True) if axes == ("batch", "hidden") else x


def with_whole_gradients(x, *axes):
    where = jax.typeof(x).sharding.spec
    laid_out = jax.custom_vjp(lambda x: constrain(x, *axes))

    def backward(_, gradient):
        return (jax.sharding.reshard(jax.sharding.reshard(gradient, NOWHERE), where),)

    laid_out.defvjp(lambda x: (constrain(x, *axes), None), backward)
    return laid_out(x)


@pytest.mark.parametrize(
    ("helper", "wrong", "strategy", "mesh"),
    [
        pytest.param("in_use", gathered_whole, "tp", "4x2", id="a weight gathered for nothing"),
        pytest.param("in_use", passed_on, "fsdp", "8", id="weights sent to a neighbour"),
        pytest.param("constrain", summed, "tp", "4x2", id="one more sum of each position"),
        pytest.param(
            "constrain", lambda x, *axes: x, "hsdp_tp", "2x2x2", id="a constraint dropped"
        ),
        pytest.param("constrain", with_whole_gradients, "hsdp_tp", "2x2x2", id="a wrong transpose"),
    ],
)
def test_a_wrong_helper_is_caught(replace, helper, wrong, strategy, mesh):
    replace(helper, wrong)
    layout = ENTRIES["dot_relu_dot"].layout(mesh, strategy)
    step = compile_step(
        "dot_relu_dot", layout
    ).as_text()  # it compiles: no type on Explicit axes forbids it
    with pytest.raises(AssertionError):
        check_promise("dot_relu_dot", layout, step)


@pytest.mark.parametrize(
    ("promised", "compiled"),
    full_except(
        itertools.permutations(("dp", "fsdp", "tp"), 2), itertools.permutations(("dp", "fsdp"))
    ),
)
def test_one_strategy_is_not_taken_for_another(promised, compiled):
    entry = ENTRIES["mlp"]
    step = step_text("mlp", compiled, "4x2")
    with pytest.raises(AssertionError):
        check_promise("mlp", entry.layout("4x2", promised), step)
