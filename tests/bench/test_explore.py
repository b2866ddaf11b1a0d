"""recipes.explore: its page shows what Python computes, with no server and no network."""

import base64
import collections
import contextlib
import dataclasses
import functools
import html
import itertools
import json
import math
import random
import re
import shutil
import subprocess
import urllib.parse
import zlib
from collections.abc import Iterator
from unittest import mock

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from recipes.common import entries
from recipes.common.runtime import UserError, describe, make_mesh
from recipes.common.runtime.mesh import parse
from recipes.common.sharding import make_layout, paths
from recipes.common.sharding.abstract import AbstractModel, abstract_model
from recipes.common.sharding.rules import partition_spec, target_axes
from recipes.common.sharding.shape import shape_of
from recipes.instruments.explore import arrays
from recipes.instruments.explore import command as explore
from recipes.instruments.explore import export as explorer
from recipes.instruments.explore.causes import causes
from recipes.instruments.plan import step_memory, textbook
from recipes.instruments.plan.estimate import abstract_mesh
from recipes.instruments.plan.hardware import Devices
from recipes.instruments.plan.search import meshes
from tests.conftest import ROOT
from zoo.core.strategies import DECODER
from zoo.experts.expert_strategies import EXPERT_DECODER
from zoo.options import cache as zoo_cache

pytestmark = pytest.mark.promise("bench")

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(not BROWSER, reason="needs Chromium, which .ci/run installs")
MOST_BYTES = 600_000


# Entry → sizes; no mesh divides the vocabulary of GPT-2.
FEW = {"dot_relu_dot": ["small"], "transformer": ["tiny", "124m"], "gpt2": ["124m"]}
COUNTS = (8, 32)  # devices
FIGURES = """
  function figures(choice) {
    const layout = layoutOf(choice), arrays = {};
    for (const { id, group, axes, shape } of arraysOf(choice)) {
      for (const how of group === "weight" ? ["rest", "use"] : []) {
        const spec = specOf(choice, layout, axes, how);
        (arrays[id] ??= {})[how] = { spec, slices: slicesOf(layout.mesh, spec, shape) };
      }
    }
    return { ...layout, arrays };
  }
"""


@functools.cache
def page(batch_size: int = 64) -> str:
    """A page of few entries, sizes and numbers of devices; its links to rules begin with "clone/"."""
    return page_of(BEGINS._replace(batch_size=batch_size))


def page_of(shown: explorer.Shown) -> str:
    sizes = {"default_size": lambda entry: FEW[entry][-1], "SIZES": FEW}
    with mock.patch.multiple(explorer, DEVICES=COUNTS, **sizes):
        return explorer.page(FEW, shown, "clone/")


BEGINS = explore.shown_by_flags(
    explore.Flags(size="tiny", mesh="8", device="v5e", batch_size=64, seq_len=512)
)


def data(text: str) -> dict:
    """The data in a page."""
    found = re.search(r'<script id="data" type="text/plain">(.*?)</script>', text, re.S)
    assert found
    return json.loads(zlib.decompress(base64.b64decode(found[1])))


@pytest.fixture
def browse(tmp_path):
    """Evaluates a JavaScript expression in a page, with a state in its address."""

    def evaluate(text: str, expression: str, state: str = ""):
        script = f"{FIGURES} document.body.textContent = JSON.stringify(({expression}));"
        assert text.count("</script>\n</body>") == 1
        path = tmp_path / "explore.html"
        path.write_text(text.replace("</script>\n</body>", f"\n{script}</script>\n</body>"))
        done = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--dump-dom",
             "--disable-background-networking", "--disable-component-update", "--disable-sync",
             "--virtual-time-budget=60000", f"--user-data-dir={tmp_path / 'browser'}",
             f"{path.as_uri()}#{state}"],
            check=True, capture_output=True, timeout=120, text=True,
        )  # fmt: skip
        body = re.search(r"<body[^>]*>(.*)</body>", done.stdout, re.S)
        assert body
        assert "<header>" not in body[1], f"the page's script failed: {done.stderr}"
        return json.loads(html.unescape(body[1]))

    return evaluate


# ---- the same figures ----------------------------------------------------------------------------


def every_choice(tables: dict) -> Iterator[dict]:
    """All choices of a page."""
    for entry, of_entry in tables["entries"].items():
        for size, of_size in of_entry["sizes"].items():
            batches = [*itertools.product(tables["rows"], of_size["lengths"])]
            for count, strategies in of_size["layouts"].items():
                for strategy, there in strategies.items():
                    for mesh, (rows, length) in itertools.product(there, batches):
                        yield {"entry": entry, "size": size, "devices": count, "strategy": strategy,
                               "mesh": mesh, "rows": rows, "length": length}  # fmt: skip


def expected(choice: dict, kind: str) -> dict | None:
    """Python's figures for a choice; None if the mesh can't divide the batch."""
    axes = parse(choice["mesh"])
    config = entries.sizes(choice["entry"])[choice["size"]]()
    if hasattr(config, "dtype"):
        config = dataclasses.replace(config, dtype="bfloat16")
    mesh = abstract_mesh(axes, Devices(kind, 1))
    try:
        layout = make_layout(
            entries.model(choice["entry"]), config, mesh, choice["strategy"],
            batch_size=choice["rows"], seq_len=choice["length"],
        )  # fmt: skip
    except UserError:
        return None
    shapes, axes_of, rest = (
        paths(tree["params"])
        for tree in (layout.model.shapes, layout.model.axes, layout.variables())
    )
    found = {}
    for path, names in axes_of.items():
        in_use = tuple(layout.names.in_use.get(name, name) for name in names)
        specs = {"rest": rest[path].sharding.spec, "use": partition_spec(in_use, layout.rules)}
        found[path] = {
            how: {"spec": [[*target_axes(target)] for target in spec],
                  "slices": slices(choice["mesh"], spec, shapes[path].shape)}
            for how, spec in specs.items()
        }  # fmt: skip
    kept = {purpose: round(count) for purpose, count in step_memory.memory_parts(layout).items()}
    return {"sent": textbook.transfers(layout), "memory": kept, "arrays": found}


def slices(mesh: str, spec, shape) -> list | None:
    """Each device's part of an array, by JAX; None if the devices can't be simulated here."""
    if math.prod(parse(mesh).values()) != 8:
        return None
    sharding = NamedSharding(make_mesh(mesh), spec)
    try:
        parts = sharding.devices_indices_map(shape)
    except ValueError:  # an uneven dim, which models pad
        return None
    devices = sharding.mesh.devices.flat
    return [[[*x.indices(n)[:2]] for x, n in zip(parts[d], shape, strict=True)] for d in devices]


@needs_browser
def test_the_page_shows_what_python_computes(browse):
    """Bytes, memory, specs and each device's slices."""
    text = page()
    chosen = random.Random(0).sample([*every_choice(data(text))], 80)
    divisible = 0
    for choice, figures in zip(
        chosen, browse(text, f"{json.dumps(chosen)}.map(figures)"), strict=True
    ):
        wanted = expected(choice, "v5e")
        assert figures["divides"] == (wanted is not None), choice
        if wanted is None:
            assert (figures["sent"], figures["memory"]) == ([], {})
            continue
        divisible += 1
        assert figures["memory"] == wanted["memory"], choice
        sent, exact = collections.Counter(), collections.Counter()
        for each in figures["sent"]:
            sent[each["purpose"], each["kind"], frozenset(each["axes"])] += each["bytes"]
        for each in wanted["sent"]:
            exact[each.purpose, each.kind, each.axes] += each.bytes
        assert sent == pytest.approx(exact, abs=5), choice  # each sublayer's are whole bytes
        for path, ways in wanted["arrays"].items():
            for how, array in ways.items():
                shown = figures["arrays"][path][how]
                assert shown["spec"] == array["spec"], (choice, path, how)
                assert array["slices"] in (None, shown["slices"]), (choice, path, how)
    assert divisible > 30


@pytest.mark.full
@pytest.mark.parametrize("name", entries.ENTRIES)
def test_the_data_of_every_entry_is_what_python_computes(name):
    size = explorer.default_size(name)
    with mock.patch.object(explorer, "SIZES", {}):
        of_entry = explorer.tables(name, BEGINS._replace(entry=""), [16])
    of_size, tables = of_entry["sizes"][size], {"rows": [64, 512], "entries": {name: of_entry}}
    batches = [*itertools.product(tables["rows"], of_size["lengths"])]
    for choice in random.Random(0).sample([*every_choice(tables)], 20):
        layout = of_size["layouts"][16][choice["strategy"]][choice["mesh"]]
        index, wanted = batches.index((choice["rows"], choice["length"])), expected(choice, "v5e")
        of_batch = lambda column: column[index] if isinstance(column, list) else column  # noqa: B023, E731
        kept = {purpose: of_batch(column) for purpose, column in layout["memory"].items()}
        assert kept == (wanted["memory"] if wanted else dict.fromkeys(kept)), choice
        if wanted:
            sent = sum(of_batch(column) for column in layout["sent"].values())
            assert sent == pytest.approx(sum(x.bytes for x in wanted["sent"]), rel=1e-6, abs=20)


def test_all_meshes_that_fit_are_there():
    of_size = data(page())["entries"]["transformer"]["sizes"]["124m"]
    model, config = entries.model("transformer"), entries.sizes("transformer")["124m"]()
    fitting: dict[str, list[str]] = {}
    for strategy, rules in entries.zoo_file("transformer").RULES.items():
        for axes in meshes(8, rules):
            with contextlib.suppress(UserError):
                make_layout(model, config, abstract_mesh(axes, Devices("v5e", 1)), strategy)
                fitting.setdefault(strategy, []).append(describe(axes))
    assert {s: [*shown] for s, shown in of_size["layouts"]["8"].items()} == fitting


def test_a_sublayers_bytes_by_hand():
    """fsdp_tp on 16x2: two gathers over 16 of the half of the MLP's weights that a device uses."""
    of_size = data(page())["entries"]["transformer"]["sizes"]["124m"]
    layout = of_size["layouts"]["32"]["fsdp_tp"]["16x2"]
    sent = {
        (name, purpose, kind, *axes): layout["sent"][str(i)]
        for i, (name, purpose, kind, axes) in enumerate(of_size["transfers"])
        if str(i) in layout["sent"]
    }
    matrices = 12 * 3 * 768 * 2_048
    gathered = 2 * 15 / 16 * matrices / 2 * 2  # bytes, bfloat16
    assert sent["layers/mlp", "weights", "all-gather", "data"] == gathered
    reduced = 2 * 12 * (2 * 1 / 2) * 768 * 2  # of a token: an all-reduce forward and one backward
    tokens = [rows * length / 16 for rows in (64, 512) for length in (512, 4_096)]
    by_batch = sent["layers/mlp", "activations", "all-reduce", "model"]
    assert by_batch == [reduced * count for count in tokens]
    assert of_size["sublayers"] == [
        {"name": "layers/attention", "reads": "k, q, v", "writes": "o", "attends": True, "routes": False},
        {"name": "layers/mlp", "reads": "gate, up", "writes": "down", "attends": False, "routes": False},
    ]  # fmt: skip


# ---- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", entries.ENTRIES)
def test_each_rule_links_to_its_line(name):
    zoo = entries.zoo_file(name)
    found = causes(zoo, entries.model(name).axes)
    assert found["strategies"].keys() == zoo.RULES.keys()
    for strategy, rules in zoo.RULES.items():
        split = found["strategies"][strategy]
        assert split.keys() == {axis for axis, target in rules.items() if target}, strategy
        for axis, row in split.items():
            table, _, file, line, _ = found["rows"][row]
            lines = (ROOT / file).read_text().splitlines()
            key = re.search(rf'"({axis})": ', lines[line - 1]) or re.search(
                r'"(\w+)": ', lines[line - 1]
            )
            assert key
            assert rules[key[1]] == rules[axis], "an axis that is split alike"
            opened = [re.match(r"(\w+) = ", each) for each in lines[:line]]
            assert table == [match[1] for match in opened if match][-1], (strategy, axis)


def test_strategies_are_unions_of_the_tables_that_are_linked():
    found = causes(entries.zoo_file("transformer"), DECODER)
    tables = {
        s: {found["rows"][row][0] for row in rows.values()}
        for s, rows in found["strategies"].items()
    }
    assert tables["fsdp_tp"] == {"DP", "FSDP", "TP"}
    assert tables["hsdp_tp"] == {"HSDP", "TP"}
    assert tables["fsdp_cp"] == {"DP", "CP", "FSDP_CP"}
    experts = causes(entries.zoo_file("moe"), EXPERT_DECODER)
    linked = {experts["rows"][row][0] for row in experts["strategies"]["fsdp_ep"].values()}
    assert {"EP", "FSDP_EP"} <= linked <= {"EP", "FSDP_EP", "EXPERT_FSDP"}


def test_rules_bring_their_comments():
    rows = {row[4] for row in causes(entries.zoo_file("transformer"), DECODER)["rows"]}
    assert any("W[D_data, F] → W[D, F] is the all-gather" in comment for comment in rows)
    abouts = {row[0]: row[1] for row in causes(entries.zoo_file("transformer"), DECODER)["rows"]}
    assert abouts["FSDP"].startswith("ZeRO-3: weights, gradients and optimizer state are split; ")


def test_activations_are_those_that_the_model_shards():
    config = entries.zoo_file("transformer").SIZES["tiny"]()
    abstract = abstract_of("transformer", config)
    batch = arrays.loss_batch("transformer", config, shape_of(abstract, config))
    of_tiny = arrays.activations(abstract, batch)
    assert (("batch", "residual_seq", "act_embed"), (0, -1, 64)) in of_tiny
    assert (("batch", "seq", "heads", "head_dim"), (0, -1, 16, 8)) in of_tiny
    assert (("batch", "seq", "mlp"), (0, -1, 128)) in of_tiny


def abstract_of(name: str, config) -> AbstractModel:
    return abstract_model(lambda: entries.model(name)(config, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("name", "strategy", "mesh"),
    [("transformer", "fsdp_tp", "4x2"), ("deepseek", "tp", "4x2"), ("moe", "fsdp_ep", "data=2,expert=4"),
     ("transformer", "cp", "data=4,seq=2")],
)  # fmt: skip
def test_the_cache_has_the_sharding_that_generation_gives_it(name, strategy, mesh):
    model, config = entries.model(name), entries.zoo_file(name).SIZES["tiny"]()
    layout = make_layout(model, config, make_mesh(mesh), strategy)
    for index, (axes, shape) in enumerate(arrays.cache(abstract_of(name, config))):

        def prefill(variables, tokens, lengths):
            return zoo_cache.prefill(layout.model.merge(variables), tokens, lengths, 32)[1][index]  # noqa: B023

        whole = jax.ShapeDtypeStruct((8, 32), np.int32), jax.ShapeDtypeStruct((8,), np.int32)
        batch = jax.tree.map(
            lambda x, s: x.update(sharding=s), whole, layout.batch_shardings(whole)
        )
        with layout.trace():
            kept = jax.eval_shape(prefill, layout.variables(), *batch)
        assert kept.shape == tuple({0: 8, -1: 32}.get(dim, dim) for dim in shape)
        wanted = [target_axes(axis and layout.rules[axis]) for axis in axes]
        assert [target_axes(target) for target in kept.sharding.spec] == wanted


# ---- the page ------------------------------------------------------------------------------------


@pytest.mark.full
def test_it_is_one_small_file(inside, tmp_path):
    path = tmp_path / "explore.html"
    done = inside("recipes.explore", f"--html={path}", "--open=false")
    assert (done.code, done.out) == (0, f"The explorer: {path}\n")
    text = path.read_text()
    assert len(text.encode()) <= MOST_BYTES
    assert data(text)["entries"].keys() == entries.ENTRIES.keys()
    start = data(text)["start"]
    assert [start[key] for key in ("entry", "size", "rules", "mesh")] == [
        "transformer",
        "8b",
        "fsdp",
        "16",
    ]


def test_it_needs_nothing_else():
    text = page()
    assert len(text.encode()) <= MOST_BYTES
    assert set(re.findall(r"\w+://[^\"'`\s]+", text)) == {"http://www.w3.org/2000/svg"}
    elsewhere = r"fetch\(|import\(|<script src|<link (?!rel=\"icon\" href=\"data:)|@import|url\("
    assert not re.search(elsewhere, text)


@needs_browser
def test_it_shows_the_layout_of_a_run(browse):
    run = ROOT / "tests" / "golden" / "checkpoints" / "transformer-v0.1-jax0.10.2"
    text = page_of(explore.shown_from_run(explore.Flags(from_=str(run))))
    saved, found = json.loads((run / "metadata" / "metadata").read_text()), data(text)
    assert found["start"] == {
        "entry": "transformer", "size": "run", "device": "cpu", "rules": saved["rules"]["name"],
        "devices": str(math.prod(saved["mesh"].values())), "mesh": describe(saved["mesh"]),
        "batch_size": "32", "seq_len": "4096",
    }  # fmt: skip
    weights = found["entries"]["transformer"]["sizes"]["run"]["weights"]
    assert {path: axes for path, _, axes in weights} == saved["logical_axes"]
    figures, state = browse(text, "[figures(choice(state, '')), state]")
    assert state.items() >= found["start"].items()
    (count,) = {len(ways["rest"]["slices"]) for ways in figures["arrays"].values()}
    assert count == 4
    assert figures["arrays"]["layers/mlp/up"]["rest"]["spec"] == [[], ["data"], ["model"]]
    assert figures["memory"]["parameters"] > 0


@needs_browser
def test_every_state_has_an_address(browse):
    state = "entry=transformer&size=124m&device=v5p&devices=32&batch_size=512&seq_len=4096&rules=tp&mesh=16x2&rules_2=fsdp_tp&mesh_2=8x4&way=use"
    there = browse(page(), "[location.hash.slice(1), state, settled(state)]", state)
    address, now, again = there
    assert now == again
    wanted = dict(pair.split("=", 1) for pair in state.split("&"))
    assert wanted.items() <= now.items()
    assert dict(urllib.parse.parse_qsl(address, keep_blank_values=True)) == now
    wrong = "entry=nothing&size=1&device=x&devices=7000&batch_size=-3&seq_len=x&rules=?&rules_2=no&mesh=9&array=z&way=q&at=99"
    now, drawn = browse(page(), "[state, document.querySelectorAll('.side h2').length]", wrong)
    nearest = {"entry": "dot_relu_dot", "size": "small", "devices": "32", "batch_size": "64"}
    assert nearest.items() <= now.items()
    assert drawn > 0


@needs_browser
def test_a_batch_that_the_mesh_cant_divide_is_named(browse):
    expression = """[...document.querySelectorAll(".side")].map((side) => [side.querySelector(".error")?.textContent ?? "",
      side.querySelectorAll(".array .part").length])"""
    state = "size=tiny&batch_size=4&devices=8&rules=dp&rules_2=tp&mesh_2=4x2&array=layers/mlp/up"
    first, second = browse(page(batch_size=4), expression, state)
    assert first == ["8 can't divide these rows: choose another batch or mesh.", 1]
    assert second == ["", 2]


@needs_browser
def test_pointing_at_a_device_lights_its_parts_on_both_sides(browse):
    expression = """(() => { document.querySelector('.cells [data-holders="5"]').dispatchEvent(new Event("mouseenter"));
      return [...document.querySelectorAll(".side")].map((side) => [".cells .lit", ".cells .twin", ".array .lit"].map(
        (which) => [...side.querySelectorAll(which)].map((each) => each.dataset.holders))); })()"""
    first, second = browse(
        page(),
        expression,
        "size=tiny&devices=8&rules=tp&mesh=4x2&rules_2=hsdp_tp&mesh_2=2x2x2&array=layers/mlp/up",
    )
    assert first == [["5"], ["1", "3", "5", "7"], ["1 3 5 7"]]
    assert second == [["5"], ["1", "5"], ["1 5"]]


@needs_browser
def test_no_arrow_crosses_a_label(browse):
    """Between any two of 32 devices in four rows; the end of an arrow touches its own cell's edge."""
    expression = """(() => { const centers = [...Array(32).keys()].map((i) => [(i % 8) + 0.5, Math.floor(i / 8) + 0.5]), crossed = [];
      const inside = ([x, y]) => Math.hypot(x % 1 - 0.5, y % 1 - 0.5) < 0.35 && x > 0 && y > 0 && x < 8 && y < 4;
      centers.forEach((from, i) => centers.forEach((to, j) => { if (i === j) return;
        const corners = route(from, to, j < i);
        corners.slice(1).forEach(([x, y], k) => { for (let t = 0; t <= 1; t += 0.01) {
          const [u, v] = corners[k];
          if (inside([u + (x - u) * t, v + (y - v) * t])) { crossed.push([i, j]); break; } } }); }));
      return crossed; })()"""
    assert browse(page(), expression) == []


@pytest.mark.full
@needs_browser
@pytest.mark.parametrize("width", [360, 768, 1600])
def test_nothing_is_wider_than_the_window(width, browse):
    """Except tables that scroll."""
    expression = f"""(() => {{ document.body.style.width = "{width}px";
      const outside = [...document.querySelectorAll("body *")].filter((each) => !each.closest(".scroll, pre, svg, .hidden"));
      return outside.filter((each) => each.getBoundingClientRect().right > {width} + 0.5).map((each) => each.outerHTML.slice(0, 200)); }})()"""
    for state in (
        "size=124m&devices=32&device=v5e&rules=fsdp_tp&rules_2=dp",
        "size=124m&devices=8&rules=fsdp_cp_tp&rules_2=none",
    ):
        assert browse(page(), expression, state) == []


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--size=9b"], "--size=9b is not one of tiny, small, medium"),
        (["--mesh=1024"], "--mesh=1024 has 1024 devices, and the page draws at most 512; try --mesh=512"),
        (["--rules=fsdq"], "--rules=fsdq is not a strategy of this entry; did you mean 'fsdp'?"),
        (["--html=/nowhere/page.html"], "--html=/nowhere/page.html: there is no folder /nowhere"),
        (["--from=/nowhere"], "--from=/nowhere does not exist; use a run's workdir"),
        (["--device=v5q"], "--device=v5q is not one of v4, v5e"),
        (["--mesh=5x3"], "rules 'fsdp_tp' split dim "),
        (["--mesh=data=2,expert=4"], "rules 'fsdp' use no mesh axis 'expert'"),
        (["--seq_len=0"], "--seq_len=0 must be ≥ 1"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(flags, sentence, inside):
    done = inside("recipes.explore", *flags, "--open=false")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {sentence}")
    assert done.err.count("\n") == 1
