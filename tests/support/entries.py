"""Facts about each zoo entry for the proof, derived from the table of entries."""

import contextlib
import dataclasses
import functools
import json
import os
import types
from typing import Any

import jax
from flax import nnx

import data
from data.batches import Example, train_batches
from recipes.common import entries
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.layout import Layout, elsewhere, make_layout
from recipes.common.sharding.rules import Rules, count_shards, used_axes
from recipes.instruments.prove import run
from recipes.instruments.prove.run import LR as LR
from recipes.instruments.prove.run import OPTIMIZER
from tests.conftest import ROOT
from tests.support.quick import QUICK

MESHES = ["1x1", "8", "8x1", "4x2", "2x4", "1x8", "2x2x2"]
MESHES += ["data=2,expert=4", "data=2,expert=2,model=2"]  # of tables that use `expert`
MESHES += ["data=2,seq=4", "data=1,seq=8", "data=2,seq=2,model=2", "data=2,seq=2,expert=2"]  # `seq`
MESHES += ["data=4,pipe=2", "data=2,pipe=2,model=2", "data=2,pipe=2,expert=2"]
# Entries that add a family of models to parts that other entries prove under every strategy: mesh →
# the strategies to prove on it. All have the same rows, so that one run is the reference of all.
DENSE = {
    "4x2": ["fsdp_tp", "fsdp_tp_sp"],
    "1x8": ["fsdp_tp"],
    "2x2x2": ["hsdp_tp"],
    "data=2,seq=2,model=2": ["fsdp_cp_tp"],
    "data=2,pipe=2,model=2": ["fsdp_pp_tp"],
}
FAMILY_CASES = {
    "gpt2": DENSE,
    "gemma3": DENSE,
    "gemma3_vision": {"4x2": ["fsdp_tp_sp"], "data=2,seq=2,model=2": ["fsdp_cp_tp"]},
    "gpt_oss": {
        "4x2": ["fsdp_tp", "fsdp_tp_sp"],
        "1x8": ["fsdp_tp"],
        "2x2x2": ["hsdp_tp"],
        "data=2,expert=4": ["fsdp_ep"],
        "data=2,seq=2,expert=2": ["fsdp_ep_cp"],
        "data=2,pipe=2,expert=2": ["fsdp_ep_pp"],
    },
    "gemma4": {
        "4x2": ["fsdp_tp_sp"],
        "data=2,seq=2,expert=2": ["fsdp_ep_cp"],
        "data=2,pipe=2,expert=2": ["fsdp_ep_pp"],
    },
    "gemma4_vision": {"4x2": ["fsdp_tp_sp"], "data=2,seq=2,model=2": ["fsdp_cp_tp"]},
    "deepseek": {
        "4x2": ["fsdp_tp"],
        "1x8": ["fsdp_tp"],
        "2x2x2": ["hsdp_tp"],
        "data=2,expert=4": ["fsdp_ep"],
        "data=2,seq=2,expert=2": ["fsdp_ep_cp"],
        "data=2,pipe=2,expert=2": ["fsdp_ep_pp"],
    },
    "qwen3_next": {  # also each kind of parallelism alone: only this entry has a state
        "8": ["dp", "fsdp"],
        "4x2": ["tp", "fsdp_tp", "fsdp_tp_sp"],
        "1x8": ["fsdp_tp"],
        "2x2x2": ["hsdp_tp"],
        "data=2,expert=4": ["ep", "fsdp_ep"],
        "data=2,seq=4": ["cp"],
        "data=2,seq=2,expert=2": ["fsdp_ep_cp"],
        "data=2,seq=2,model=2": ["fsdp_cp_tp"],
        "data=4,pipe=2": ["pp"],
        "data=2,pipe=2,expert=2": ["fsdp_ep_pp"],
    },
    "hybrid": {  # two more recurrences; its layers are one sublayer each
        "4x2": ["fsdp_tp_sp"],
        "data=2,expert=4": ["fsdp_ep"],
        "data=2,seq=4": ["cp"],
        "data=4,pipe=2": ["pp"],
    },
    "bert": DENSE,
    "siglip": {"8": ["fsdp"], "4x2": ["fsdp_tp"], "1x8": ["fsdp_tp"], "2x2x2": ["hsdp_tp"]},
    "vit": {"8": ["fsdp"], "4x2": ["fsdp_tp"], "1x8": ["fsdp_tp"], "2x2x2": ["hsdp_tp"]},
}
# What `--full` proves of the entries below, which `--release` proves on every mesh under every strategy:
# each pair of parallelisms, each of them alone, axes of size 1 and axes that nothing is split over.
PAIRS_OF_PARALLELISMS = {
    "1x1": ["dp"],
    "8": ["dp", "zero1", "fsdp"],
    "8x1": ["fsdp_tp"],
    "4x2": ["tp", "fsdp_tp", "fsdp_tp_sp"],
    "2x4": ["tp_sp"],
    "1x8": ["fsdp_tp"],  # by which heads don't divide
    "2x2x2": ["dp", "hsdp_tp", "hsdp_tp_sp"],
    "data=2,seq=4": ["cp", "fsdp_cp"],
    "data=1,seq=8": ["cp"],
    "data=2,seq=2,model=2": ["fsdp_cp_tp"],
    "data=4,pipe=2": ["pp", "pp_zero1", "fsdp_pp"],
    "data=2,pipe=2,model=2": ["fsdp_pp_tp"],
    "data=2,expert=4": ["ep", "fsdp_ep"],
    "data=2,expert=2,model=2": ["fsdp_ep_tp"],
    "data=2,seq=2,expert=2": ["fsdp_ep_cp"],
    "data=2,pipe=2,expert=2": ["fsdp_ep_pp"],
}
MANY_CASES = ("dot_relu_dot", "mlp", "transformer", "moe")
# Of FAMILY_CASES, `--full` leaves these to a release where another case has the same parallelism beside
# a second one; so it does with what has a case with sequence parallelism on the same mesh. `cp` stays: with it
# alone, more devices share a row.
ALONE = ("dp", "fsdp", "tp", "ep", "pp")
OF_TEXT = ("data.text", "data.masked")  # modules whose examples are rows of tokens
FAST = "2x2x2"  # with its default strategy, the other entries' case in the fast tier
BATCH = 24  # like no dim of a parameter, so that test_collectives.py can tell them apart


@dataclasses.dataclass(frozen=True)
class Entry:
    name: str
    zoo: types.ModuleType
    config: Any  # the tiny one

    @property
    def rules(self) -> dict[str, Rules]:
        return self.zoo.RULES

    def build(self) -> nnx.Module:
        return entries.model(self.name)(self.config, rngs=nnx.Rngs(0))

    @functools.cache  # noqa: B019  an entry lives as long as the process
    def layout(self, mesh: str, strategy: str = "") -> Layout:
        """Returns the layout under the mesh's default strategy, or another. Raises UserError."""
        if mesh != "1x1" and (fits := elsewhere(self.layout("1x1"), strategy, make_mesh(mesh))):
            return fits  # without tracing the model again
        model = entries.model(self.name)
        return make_layout(model, self.config, make_mesh(mesh), strategy, batch_size=BATCH)

    @functools.cached_property
    def batches(self) -> list[Example]:
        """Five batches of BATCH rows, as numpy arrays."""
        return self._batches(20)

    @functools.cached_property
    def long_batches(self) -> list[Example]:
        """For strategies that split the positions of a row; eight divides their number."""
        return self._batches(20 if self.name in FAMILY_CASES else 32)

    def is_long(self, strategy: str, mesh: str) -> bool:
        """Whether a strategy splits the positions of a row on this mesh."""
        layout = self.layouts[strategy, mesh]
        axes = layout.names.positions
        return any(count_shards(layout.rules, axis, layout.mesh.shape) > 1 for axis in axes)

    def _batches(self, seq_len: int) -> list[Example]:
        with_pictures = entries.ENTRIES[self.name].data == "data.pictured"  # rows of 62 tokens
        known = vars(self.config) | {"seed": 0, "seq_len": 64 if with_pictures else seq_len}
        if entries.ENTRIES[self.name].data in OF_TEXT:
            known["dataset"] = str(paragraphs())
        feed = iter(train_batches(entries.dataset(self.name, known), BATCH, seed=0))
        return [next(feed) for _ in range(5)]

    @functools.cached_property
    def layouts(self) -> dict[tuple[str, str], Layout]:
        """(strategy, mesh) → layout, for all that fit each other; the model is traced once."""
        found, anywhere = {}, self.layout("1x1")
        for strategy in self.rules:
            for name in MESHES:
                mesh = make_mesh(name)
                pipe = {"pipe", "model"} if "pipe" in mesh.axis_names else {}
                by_name = {"expert", "seq", *pipe} & {*mesh.axis_names}
                fits = elsewhere(anywhere, strategy, mesh)
                if fits and by_name <= used_axes(fits.rules):  # see rules.check_used
                    found[strategy, name] = fits
        return found

    @functools.cached_property
    def cases(self) -> list[tuple[str, str, str]]:
        """(name, strategy, mesh) of the pairs to prove."""
        few = FAMILY_CASES.get(self.name)
        return [
            (self.name, strategy, mesh)
            for strategy, mesh in self.layouts
            if not few or strategy in few.get(mesh, [])
        ]

    @property
    def meshes(self) -> list[str]:
        """Meshes that some strategy fits."""
        return [mesh for mesh in MESHES if any(case[::2] == (self.name, mesh) for case in CASES)]


def paragraphs():
    """Writes the licence, a text that never changes, as documents of a few windows."""
    path = data.cache_dir() / "licence.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = (ROOT / "LICENSE").read_text().split("\n\n")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    if path.exists() and path.read_text() != rows:
        path.unlink()
    if not path.exists():
        mine = path.with_suffix(f".{os.getpid()}")
        mine.write_text(rows)
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)  # unlike a write, this leaves a file that another worker reads
        mine.unlink()
    return path


ENTRIES = {
    name: Entry(name, zoo, zoo.Config.tiny())
    for name in entries.ENTRIES
    for zoo in [entries.zoo_file(name)]
}
FITS = ROOT / "tests" / "golden" / "fits.txt"


def cases() -> list[tuple[str, str, str]]:
    """(entry, strategy, mesh) to prove, as the golden lists them: finding them takes 5 s of tracing."""
    reviewed = FITS.read_text().splitlines() if "UPDATE_GOLDEN" not in os.environ else []
    by_entry = {name: [] for name in ENTRIES}
    for entry, strategy, mesh in map(str.split, reviewed):
        by_entry.get(entry, []).append((entry, strategy, mesh))
    return [case for name, listed in by_entry.items() for case in listed or ENTRIES[name].cases]


# Parallelism → the mesh axis over which it splits.
PARALLELISMS = {"dp": "data", "zero1": "data", "fsdp": "data", "hsdp": "fsdp", "tp": "model"}
PARALLELISMS |= {"sp": "model", "cp": "seq", "pp": "pipe", "ep": "expert"}


def parallelisms(strategy: str, mesh: str) -> set[str]:
    """What a strategy does on a mesh: parts of its name whose mesh axis has a size above 1."""
    sizes = dict(make_mesh(mesh).shape)
    parts = {"dp", *strategy.split("_")} & PARALLELISMS.keys()
    return {part for part in parts if sizes.get(PARALLELISMS[part], 1) > 1}


CASES = cases()


def is_of_full_tier(entry: str, strategy: str, mesh: str) -> bool:
    if entry in MANY_CASES:
        return strategy in PAIRS_OF_PARALLELISMS.get(mesh, [])
    if entry not in FAMILY_CASES:
        return True
    if (entry, f"{strategy}_sp", mesh) in CASES:
        return False
    own = parallelisms(strategy, mesh)
    is_part = any(own < parallelisms(*case) for name, *case in CASES if name == entry)
    return not is_part or strategy not in ALONE


FULL_CASES = [case for case in CASES if is_of_full_tier(*case)]


def strategy_on(entry: str, mesh: str) -> str:
    """The last strategy that the full tier proves of an entry on a mesh, or else a release."""
    *_, strategy = [case[1] for case in (*CASES, *FULL_CASES) if case[::2] == (entry, mesh)]
    return strategy


def case_of(arguments: dict) -> tuple[str, str, str] | None:
    """The case whose compiled step a test with these arguments uses."""
    match arguments:
        case {"entry": entry, "strategy": strategy, "mesh": mesh}:
            return entry, strategy, mesh
        case {"entry": entry, "source": mesh}:
            return entry, strategy_on(entry, mesh), mesh
    return None


# The MLP has nothing that the others lack.
FAST_CASES = [(name, "hsdp_tp", FAST) for name in ("dot_relu_dot", "transformer", "moe")]
# Axes of size 1 in the fast tier too, which is all that CI runs on the newest JAX.
FAST_CASES += [("dot_relu_dot", "fsdp_tp", mesh) for mesh in ("8x1", "1x8")]


def compile_step(entry_name: str, layout: Layout, is_long: bool = False) -> jax.stages.Compiled:
    """The train step of the proof with AdamW."""
    entry = ENTRIES[entry_name]
    batches = entry.long_batches if is_long else entry.batches
    return run.compile_step(layout, OPTIMIZER, jax.tree.map(lambda x: x[0], batches[0]), **QUICK)


@functools.lru_cache(maxsize=4)  # one of JAX 0.12 takes up to 900 of a process's 65,530 memory maps
def compiled_step(
    entry_name: str, strategy: str, mesh: str, is_long: bool = False
) -> jax.stages.Compiled:
    """The step that test_meshes.py runs."""
    step = compile_step(entry_name, ENTRIES[entry_name].layout(mesh, strategy), is_long)
    TEXTS[entry_name, strategy, mesh, is_long] = step.as_text()
    return step


TEXTS: dict[tuple, str] = {}  # of all steps that this process has compiled


def step_text(entry_name: str, strategy: str, mesh: str) -> str:
    """The compiled text, which test_collectives.py reads of the steps that test_meshes.py has run."""
    case = entry_name, strategy, mesh, False
    if case not in TEXTS:
        compiled_step(*case)
    return TEXTS[case]


def with_case(text: str, case: tuple[str, str, str], record: dict[str, float]) -> str:
    """Returns the JSON `text` of a golden with this case's record added, in the order of CASES."""
    found = json.loads(text or "{}") | {" ".join(case): record}
    names = [name for name in map(" ".join, CASES) if name in found]
    return json.dumps({name: found[name] for name in names}, indent=1) + "\n"
