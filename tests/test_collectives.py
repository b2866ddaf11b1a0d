"""What a compiled step sends between devices is what its strategy promises, and nothing else.

The textbook, in array elements a device receives: `dp` all-reduces each gradient once; `fsdp`
all-gathers weights (again for the backward pass where a layer is rematerialised) and reduce-scatters
gradients; `tp` all-reduces activations. XLA's CPU backend has no reduce-scatter: there it is an
all-reduce and then a slice. On TPU it is the real thing (README, Speed).
"""

import itertools
import math
import re
from collections import Counter
from typing import NamedTuple

import jax
import pytest

from recipes.common import report
from recipes.common.sharding import COMPILER_OPTIONS, Layout, mesh_axes, partition_spec, paths
from tests.entries import BATCH, CASES, ENTRIES, compile_step, compiled_step
from zoo import dot_relu_dot, transformer

# All-reduces of a [rows, embed] activation in `tp`: Megatron's count, and what XLA's CPU backend
# makes of it, which reduces the cotangents of matmuls that read the same input one by one.
ACTIVATIONS = {
    "dot_relu_dot": (1, 1),  # forward; x needs no gradient
    "mlp": (4, 4),  # two blocks, forward and backward
    # two layers: 2 forward, 1 of the 2 again in the backward pass, then 2 as 2 + 3; and the table of
    # embeddings twice, as it is split over `vocab`
    "transformer": (10, 18),
}


class Sent(NamedTuple):
    """Elements by what they are part of; and what is part of nothing that we know."""

    weights: int  # gathered
    gradients: int  # reduced
    activations: int  # all-reduces of a whole [rows, embed]
    strangers: list[report.Collective]


def _dims(shape) -> tuple[int, ...]:
    """Without dims of size 1 and in no order: the compiler transposes as it likes."""
    return tuple(sorted(d for d in shape if d > 1))


def shards(layout: Layout) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Parameter → the shape on one device (at rest, in use), of one layer where they are stacked."""
    found = {}
    for path, axes in paths(layout.plan.axes).items():
        shape = paths(layout.plan.shapes)[path].shape
        in_use = tuple("act_embed" if axis == "embed" else axis for axis in axes)
        found[path] = tuple(
            tuple(
                n // math.prod(layout.mesh.shape[a] for a in mesh_axes(part))
                for axis, n, part in zip(
                    axes, shape, partition_spec(names, layout.table), strict=True
                )
                if axis != "layers"
            )
            for names in (axes, in_use)
        )
    return found


def classify(entry_name: str, layout: Layout, compiled: jax.stages.Compiled) -> Sent:
    gathered = {_dims(use) for rest, use in shards(layout).values() if rest != use}
    # XLA may share out a gradient's matmul over a mesh axis that the weight does not use: then it
    # reduces parts of the gradient, and permutes them to where they belong.
    reduced = {
        _dims(part)
        for rest, use in shards(layout).values()
        for part in itertools.product(
            *(sorted({n // d for d in (1, 2, 4, 8) if n % d == 0 and n // d >= r} | {n})
              for r, n in zip(rest, use, strict=True))
        )
    }  # fmt: skip
    example = jax.tree.leaves(ENTRIES[entry_name].batches[0])[0]
    length = example.shape[1] - 1 if entry_name == "transformer" else 1
    rows = BATCH // layout.batch_shards * length
    embed = {"dot_relu_dot": 16, "mlp": 16, "transformer": 64}[entry_name]
    splits_activations = layout.mesh.shape.get("model", 1) > 1 and "model" in layout.table.values()

    counts, strangers = Counter(), []
    for found in report.collectives(compiled.as_text()):
        for shape in found.shapes:
            size, dims = math.prod(shape), _dims(shape)
            if size == 1 and found.kind == "all-reduce":
                continue  # the loss, the number of targets, the gradient's norm
            if found.kind == "all-gather" and dims in gathered:
                counts["weights"] += found.times * size
            elif (
                found.kind == "all-reduce"
                and splits_activations
                and math.prod(dims) == rows * embed
            ):
                counts["activations"] += found.times
            elif found.kind == "all-reduce" and splits_activations and dims == (rows,):
                pass  # the loss: a number or two a position
            elif found.kind in ("all-reduce", "reduce-scatter") and dims in reduced:
                counts["gradients"] += found.times * size
            elif found.kind == "collective-permute" and dims in reduced:
                pass  # see above
            else:
                strangers.append(found)
    return Sent(counts["weights"], counts["gradients"], counts["activations"], strangers)


def check_promise(entry_name: str, layout: Layout, compiled: jax.stages.Compiled) -> None:
    """Asserts that the step sends what the table in force promises."""
    sent = classify(entry_name, layout, compiled)
    assert sent.strangers == []
    table, mesh = layout.table, layout.mesh.shape
    layers = {
        path: paths(layout.plan.shapes)[path].shape[0] if axes[0] == "layers" else 1
        for path, axes in paths(layout.plan.axes).items()
    }
    sizes = {path: (math.prod(r), math.prod(u)) for path, (r, u) in shards(layout).items()}

    # Weights: each gathered once for the forward pass, and again where a layer is rematerialised.
    gathers = sum(
        u * layers[path] * (2 if layers[path] > 1 else 1)
        for path, (r, u) in sizes.items()
        if r != u
    )
    assert sent.weights == gathers
    if mesh.get("data", 1) == 1 or layout.strategy in ("dp", "tp"):
        assert gathers == 0 or mesh.get("fsdp", 1) > 1

    # Gradients: each reduced once over the devices that have other rows of the batch.
    held = sum(u * layers[path] for path, (_, u) in sizes.items())
    if layout.batch_shards == 1:
        assert sent.gradients == 0
    elif len([size for size in mesh.values() if size > 1]) == 1:
        assert sent.gradients == held
    else:  # in parts; `hsdp_tp` reduces over `fsdp`, and then shards of the sums over `data`
        assert held / layout.mesh.size < sent.gradients <= 1.5 * held

    # Activations: only where the table splits a matmul's inner dim.
    if "model" in table.values() and mesh["model"] > 1:
        least, most = ACTIVATIONS[entry_name]
        assert least <= sent.activations <= most
    else:
        assert sent.activations == 0
    if layout.mesh.size == 1:
        assert report.collectives(compiled.as_text()) == []


@pytest.mark.parametrize(("entry", "strategy", "mesh"), CASES)
def test_a_step_sends_what_its_strategy_promises(entry, strategy, mesh):
    layout = ENTRIES[entry].layout(mesh, strategy)
    check_promise(entry, layout, compiled_step(entry, strategy, mesh))


@pytest.mark.parametrize("entry_name", ENTRIES)
def test_a_gradient_is_laid_out_as_its_weight_rests(entry_name):
    """A TPU can scatter the sums then, where laid out as in use it would sum all on each device.
    The CPU backend does that anyway, so this looks at what is asked of the compiler.
    """
    entry, layout = ENTRIES[entry_name], ENTRIES[entry_name].layout("8", "fsdp")

    def mean(params, batch):
        return entry.loss(layout.plan.bind(params), batch)[0]

    batch = jax.tree.map(lambda x: x[:BATCH], entry.batches[0])
    with layout.trace():
        text = str(jax.make_jaxpr(jax.grad(mean))(layout.plan.shapes, batch))
    constraint = r":f32\[([\d,]+)\] = sharding_constraint\[.*?spec=P\((.*?)\)\)"
    found = re.findall(constraint, text, re.DOTALL)
    asked = {(dims, spec.removesuffix(",")) for dims, spec in found}  # P('data',): of one dim
    shapes = {path: leaf.shape for path, leaf in paths(layout.plan.shapes).items()}
    weights = {path: axes for path, axes in paths(layout.plan.axes).items() if "embed" in axes}
    assert weights
    for path, axes in weights.items():
        dims = [(n, a) for n, a in zip(shapes[path], axes, strict=True) if a != "layers"]
        shape = ",".join(str(n) for n, _ in dims)
        rest = ", ".join("'data'" if axis == "embed" else "None" for _, axis in dims)
        assert (shape, rest) in asked, path


def test_a_platform_s_options_reach_its_compiler(monkeypatch):
    """The TPU's make reduce-scatters; no TPU is here to refuse what it does not know, so the CPU is."""
    monkeypatch.setitem(COMPILER_OPTIONS, "cpu", {"xla_no_such_option": "true"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        compile_step("dot_relu_dot", ENTRIES["dot_relu_dot"].layout("8", "fsdp"))


# ---- the check can fail ----------------------------------------------------------------------------


def test_rules_alone_are_not_fsdp(monkeypatch):
    """Weights laid out by the table, and no word on where they are used: the partitioner moves
    activations or partial sums in their place, and the check sees it.
    """
    layout = ENTRIES["transformer"].layout("8", "fsdp")
    check_promise("transformer", layout, compile_step("transformer", layout))
    monkeypatch.setattr(transformer, "in_use", lambda module, dtype: module)
    monkeypatch.setattr(transformer, "constrain", lambda x, *axes: x)
    with pytest.raises(AssertionError):
        check_promise("transformer", layout, compile_step("transformer", layout))


def test_partial_sums_in_place_of_weights_are_seen(monkeypatch):
    """`fsdp` that never gathers a weight: each device multiplies the part that it has."""
    layout = ENTRIES["dot_relu_dot"].layout("8", "fsdp")
    check_promise("dot_relu_dot", layout, compile_step("dot_relu_dot", layout))
    parts = jax.sharding.PartitionSpec(None, "data")
    monkeypatch.setattr(dot_relu_dot, "in_use", lambda weight: weight[...])
    monkeypatch.setattr(
        dot_relu_dot, "constrain", lambda x, *axes: jax.lax.with_sharding_constraint(x, parts)
    )
    with pytest.raises(AssertionError):
        check_promise("dot_relu_dot", layout, compile_step("dot_relu_dot", layout))


def test_a_weight_gathered_for_nothing_is_seen(monkeypatch):
    """`tp` whose first weight is gathered over `model` before its matmul."""
    whole = jax.sharding.PartitionSpec()
    in_use = dot_relu_dot.in_use
    monkeypatch.setattr(
        dot_relu_dot, "in_use", lambda w: jax.lax.with_sharding_constraint(in_use(w), whole)
    )
    layout = ENTRIES["dot_relu_dot"].layout("4x2", "tp")
    with pytest.raises(AssertionError):
        check_promise("dot_relu_dot", layout, compile_step("dot_relu_dot", layout))


@pytest.mark.parametrize(
    ("promised", "compiled"), [*itertools.permutations(("dp", "fsdp", "tp"), 2)]
)
def test_one_strategy_is_not_taken_for_another(promised, compiled):
    entry = ENTRIES["mlp"]
    step = compiled_step("mlp", compiled, "4x2")
    with pytest.raises(AssertionError):
        check_promise("mlp", entry.layout("4x2", promised), step)
