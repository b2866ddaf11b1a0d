"""recipes.explore: its page computes what Python computes, with no server and no network."""

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
from collections.abc import Iterable

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from recipes.common import entries
from recipes.common.runtime import UserError, describe, make_mesh
from recipes.common.runtime.mesh import parse
from recipes.common.sharding import make_layout, paths
from recipes.common.sharding.rules import partition_spec, target_axes
from recipes.instruments.explore import command as explore
from recipes.instruments.explore import export as explorer
from recipes.instruments.explore import portable
from recipes.instruments.plan import memory, textbook
from recipes.instruments.plan.estimate import abstract_mesh
from recipes.instruments.plan.hardware import HARDWARE, Devices
from recipes.instruments.plan.search import meshes
from tests.conftest import ROOT
from zoo.strategies import DECODER, EXPERT_DECODER

pytestmark = pytest.mark.promise("bench")

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(not BROWSER, reason="needs Chromium, which .ci/run installs")
MOST_BYTES = 600_000


FEW = ("dot_relu_dot", "transformer")
FIGURES = """
  function figures(choice) {
    try {
      const layout = layoutOf(choice), arrays = {};
      for (const { id, group, axes, shape } of arraysOf(choice)) {
        for (const how of group === "weight" ? ["rest", "use"] : []) {
          const spec = specOf(layout, axes, how);
          (arrays[id] ??= {})[how] = { spec, slices: slicesOf(layout.mesh, spec, shape) };
        }
      }
      return { transfers: sentBy(layout), memory: memoryOf(layout), arrays };
    } catch (error) {
      if (error instanceof PythonError) return { error: error.message };
      throw error;
    }
  }
"""


@functools.cache
def page(*names: str) -> str:
    """A page of these entries, whose links to rules begin with "clone/"."""
    return explorer.page({name: entries.model(name) for name in names}, None, "clone/")


def data(text: str) -> dict:
    """The tables in a page."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


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


# A vocabulary and heads that the mesh does not divide, and numbers that the formulas round.
UNEVEN = {"entry": "transformer", "size": "124m", "strategy": "tp", "mesh": "1x256", "chip": "v5e"}
ROUNDED = {"entry": "transformer", "size": "tiny", "strategy": "dp", "mesh": "8", "chip": "cpu"}


def choices(names: Iterable[str], count: int) -> list[dict]:
    """Choices of a page, of its entries in turn."""
    rng, sizes = random.Random(0), {}
    for name in names:
        all_sizes = [*entries.sizes(name)]
        sizes[name] = {all_sizes[0], all_sizes[-1]}
    found = [each | {"batch": 64, "seq": 1_000} for each in (UNEVEN, ROUNDED)]
    for name in itertools.islice(itertools.cycle(names), count):
        devices, strategy = rng.choice((8, 8, 12, 32, 64)), rng.choice([*zoo_rules(name)])
        mesh = rng.choice([*meshes(devices, zoo_rules(name)[strategy])])
        found.append(
            {
                "entry": name,
                "size": rng.choice(sorted(sizes[name])),
                "strategy": strategy,
                "mesh": describe(mesh),
                "chip": rng.choice([*HARDWARE]),
                "batch": rng.choice((64, 192, 192, 10)),
                "seq": rng.choice((768, 768, 8_192 * 3)),
            }
        )
    return found


def zoo_rules(name: str) -> dict:
    return entries.zoo_file(name).RULES


def expected(choice: dict) -> dict:
    """Python's figures for a choice."""
    axes = parse(choice["mesh"])
    config, chip = entries.sizes(choice["entry"])[choice["size"]](), choice["chip"]
    if hasattr(config, "dtype"):
        dtype = "float32" if chip == "cpu" else "bfloat16"
        config = dataclasses.replace(config, dtype=dtype)
    mesh = abstract_mesh(axes, Devices(chip, 1))
    try:
        layout = make_layout(
            entries.model(choice["entry"]), config, mesh, choice["strategy"],
            batch_size=choice["batch"],
            seq_len=choice["seq"] if hasattr(config, "vocab_size") else 0,
        )  # fmt: skip
    except UserError as error:
        return {"error": str(error)}
    sent = [
        {"purpose": x.purpose, "kind": x.kind, "axes": [a for a in axes if a in x.axes],
         "bytes": x.bytes}
        for x in textbook.transfers(layout)
    ]  # fmt: skip
    arrays = {}
    for kind in layout.model.axes:
        leaves, rest = paths(layout.model.shapes[kind]), paths(layout.variables()[kind])
        for path, names in paths(layout.model.axes[kind]).items():
            in_use = tuple(layout.names.in_use.get(name, name) for name in names)
            specs = {"rest": rest[path].sharding.spec, "use": partition_spec(in_use, layout.rules)}
            arrays[path] = {
                how: {"spec": [[*target_axes(target)] for target in spec],
                      "slices": slices(choice["mesh"], spec, leaves[path].shape)}
                for how, spec in specs.items()
            }  # fmt: skip
    return {"transfers": sent, "memory": memory.memory_parts(layout), "arrays": arrays}


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
@pytest.mark.parametrize(
    ("names", "count", "least"),
    [(FEW, 40, 20), pytest.param((*entries.ENTRIES,), 180, 100, marks=pytest.mark.full)],
    ids=["few", "all"],
)
def test_the_page_computes_what_python_does(names, count, least, browse):
    """Exactly: bytes, memory, specs and each device's slices, or the same error."""
    chosen, works = choices(names, count), 0
    for choice, figures in zip(
        chosen, browse(page(*names), f"{json.dumps(chosen)}.map(figures)"), strict=True
    ):
        wanted = expected(choice)
        if "error" in wanted:
            assert figures == wanted, choice
            continue
        works += 1
        assert figures["transfers"] == wanted["transfers"], choice
        assert figures["memory"] == wanted["memory"], choice
        for path, ways in wanted["arrays"].items():
            for how, array in ways.items():
                computed = figures["arrays"][path][how]
                assert computed["spec"] == array["spec"], (choice, path, how)
                assert array["slices"] in (None, computed["slices"]), (choice, path, how)
    assert works >= least


def test_only_functions_that_the_page_can_run_are_exported():
    assert {"max", "prod", "get_abstract_mesh", "trace"} <= portable.NATIVE
    with pytest.raises(TypeError, match=r"python.js has no 'gamma'"):
        portable.Library().add(math.gamma)


@needs_browser
def test_steps_of_sublayers_add_up_to_the_step(browse):
    """Bytes of the layers' weights and of those outside of them add up to all bytes."""
    expression = """(() => { const layout = layoutOf({ entry: "transformer", size: "8b", strategy: "fsdp_tp",
      mesh: "8x2", chip: "v5p", batch: 32, seq: 4096 });
      const sums = (sent, of) => sent.filter(({ purpose }) => purpose === of).reduce((n, { bytes }) => n + bytes, 0);
      const inside = sentBy(restricted(layout, (path) => path.startsWith("layers/")));
      const outside = sentBy(restricted(layout, (path) => !path.startsWith("layers/")));
      return ["weights", "gradients", "activations"].map((of) => [sums(sentBy(layout), of), sums(inside, of) + sums(outside, of)]);
    })()"""
    for whole, parts in browse(page(*FEW), expression):
        assert 0 < whole == pytest.approx(parts, rel=1e-12)


# ---- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", entries.ENTRIES)
def test_each_rule_links_to_its_line(name):
    zoo = entries.zoo_file(name)
    found = explorer.causes(zoo, entries.model(name).axes)
    assert found["strategies"].keys() == zoo.RULES.keys()
    for strategy, rules in zoo.RULES.items():
        causes = found["strategies"][strategy]
        assert causes.keys() == {axis for axis, target in rules.items() if target}, strategy
        for axis, row in causes.items():
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
    found = explorer.causes(entries.zoo_file("transformer"), DECODER)
    tables = {
        s: {found["rows"][row][0] for row in rows.values()}
        for s, rows in found["strategies"].items()
    }
    assert tables["fsdp_tp"] == {"DP", "FSDP", "TP"}
    assert tables["hsdp_tp"] == {"HSDP", "TP"}
    assert tables["fsdp_cp"] == {"DP", "CP", "FSDP_CP"}
    experts = explorer.causes(entries.zoo_file("moe"), EXPERT_DECODER)
    linked = {experts["rows"][row][0] for row in experts["strategies"]["fsdp_ep"].values()}
    assert {"EP", "FSDP_EP"} <= linked <= {"EP", "FSDP_EP", "EXPERT_FSDP"}


def test_rules_bring_their_comments():
    rows = {row[4] for row in explorer.causes(entries.zoo_file("transformer"), DECODER)["rows"]}
    assert any("W[D_data, F] → W[D, F] is the all-gather" in comment for comment in rows)
    abouts = {
        row[0]: row[1] for row in explorer.causes(entries.zoo_file("transformer"), DECODER)["rows"]
    }
    assert abouts["FSDP"].startswith("ZeRO-3: weights, gradients and optimizer state are split; ")


def test_activations_are_those_that_the_model_shards():
    config = entries.zoo_file("transformer").SIZES["tiny"]()
    of_tiny = explorer.arrays(entries.model("transformer"), config, portable.Library())
    assert (("batch", "residual_seq", "act_embed"), (0, -1, 64)) in of_tiny["activations"]
    assert (("batch", "seq", "heads", "head_dim"), (0, -1, 16, 8)) in of_tiny["activations"]
    assert (("batch", "seq", "mlp"), (0, -1, 128)) in of_tiny["activations"]


@pytest.mark.parametrize(
    ("name", "strategy", "mesh"),
    [("transformer", "fsdp_tp", "4x2"), ("deepseek", "tp", "4x2"), ("moe", "fsdp_ep", "data=2,expert=4"),
     ("transformer", "cp", "data=4,seq=2")],
)  # fmt: skip
def test_the_cache_has_the_sharding_that_generation_gives_it(name, strategy, mesh):
    model, config = entries.model(name), entries.zoo_file(name).SIZES["tiny"]()
    layout = make_layout(model, config, make_mesh(mesh), strategy)
    for index, (axes, shape) in enumerate(
        explorer.arrays(model, config, portable.Library())["cache"]
    ):

        def prefill(variables, tokens, lengths):
            return layout.model.merge(variables).prefill(tokens, lengths, 32)[1][index]  # noqa: B023

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
    text = page(*FEW)
    assert len(text.encode()) <= MOST_BYTES
    assert set(re.findall(r"\w+://[^\"'`\s]+", text)) == {"http://www.w3.org/2000/svg"}
    elsewhere = r"fetch\(|import\(|<script src|<link (?!rel=\"icon\" href=\"data:)|@import|url\("
    assert not re.search(elsewhere, text)


@needs_browser
def test_it_shows_the_layout_of_a_run(browse, tmp_path):
    run = ROOT / "tests" / "golden" / "checkpoints" / "transformer-v0.1-jax0.10.2"
    path = tmp_path / "explore.html"
    explore.write_page(path, FEW, explore.of_run(explore.Flags(from_=str(run))))
    saved, found = json.loads((run / "metadata" / "metadata").read_text()), data(path.read_text())
    assert found["start"] == {
        "entry": "transformer", "size": "run", "device": "cpu", "rules": saved["rules"]["name"],
        "devices": str(math.prod(saved["mesh"].values())), "mesh": describe(saved["mesh"]),
        "batch_size": "32", "seq_len": "4096",
    }  # fmt: skip
    weights = found["entries"]["transformer"]["sizes"]["run"]["weights"]["params"]
    assert {path: axes for path, _, axes, _ in weights} == saved["logical_axes"]
    shown = browse(path.read_text(), "[figures(choice(state, '')), state]")
    figures, state = shown
    assert state.items() >= found["start"].items()
    (count,) = {len(ways["rest"]["slices"]) for ways in figures["arrays"].values()}
    assert count == 4
    assert figures["arrays"]["layers/mlp/up"]["rest"]["spec"] == [[], ["data"], ["model"]]
    assert figures["memory"]["parameters"] > 0


@needs_browser
def test_every_state_has_an_address(browse):
    state = "entry=transformer&size=124m&device=h100&devices=32&batch_size=64&seq_len=512&rules=tp&rules_2=fsdp_tp&mesh_2=4x8&way=use"
    there = browse(page(*FEW), "[location.hash.slice(1), state, settled(state)]", state)
    address, now, again = there
    assert now == again
    wanted = dict(pair.split("=", 1) for pair in state.split("&"))
    assert wanted.items() <= now.items()
    assert dict(urllib.parse.parse_qsl(address, keep_blank_values=True)) == now
    wrong = "entry=nothing&size=1&device=x&devices=7000&batch_size=-3&seq_len=x&rules=?&rules_2=no&mesh=9&array=z&way=q&at=99"
    now, errors = browse(page(*FEW), "[state, document.querySelectorAll('.error').length]", wrong)
    assert (now["entry"], now["batch_size"], errors) == ("dot_relu_dot", "1", 0)


@needs_browser
def test_pointing_at_a_device_lights_its_parts_on_both_sides(browse):
    expression = """(() => { document.querySelector('.cells [data-holders="5"]').dispatchEvent(new Event("mouseenter"));
      return [...document.querySelectorAll(".side")].map((side) => [".cells .lit", ".cells .twin", ".array .lit"].map(
        (which) => [...side.querySelectorAll(which)].map((each) => each.dataset.holders))); })()"""
    first, second = browse(
        page(*FEW),
        expression,
        "size=tiny&devices=8&rules=tp&mesh=4x2&rules_2=hsdp_tp&mesh_2=2x2x2&array=layers/mlp/up",
    )
    assert first == [["5"], ["1", "3", "5", "7"], ["1 3 5 7"]]
    assert second == [["5"], ["1", "5"], ["1 5"]]


@pytest.mark.full
@needs_browser
@pytest.mark.parametrize("width", [360, 768, 1600])
def test_nothing_is_wider_than_the_window(width, browse):
    """Except tables that scroll."""
    expression = f"""(() => {{ document.body.style.width = "{width}px";
      const outside = [...document.querySelectorAll("body *")].filter((each) => !each.closest(".scroll, pre, svg, .hidden"));
      return outside.filter((each) => each.getBoundingClientRect().right > {width} + 0.5).map((each) => each.outerHTML.slice(0, 200)); }})()"""
    for state in (
        "size=70b&devices=256&device=v5e&rules=fsdp_tp&rules_2=dp",
        "size=8b&devices=64&rules=fsdp_cp_tp&rules_2=none",
    ):
        assert browse(page(*FEW), expression, state) == []


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
        (["--seq_len=200000"], "--seq_len=200000 must be ≤ 131072"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(flags, sentence, inside):
    done = inside("recipes.explore", *flags, "--open=false")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {sentence}")
    assert done.err.count("\n") == 1
