"""Generation with a cache gives the tokens and logits of the whole model on any mesh."""

import dataclasses
import functools
import io
import itertools
import json
import math
import signal
import subprocess
import sys
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data import tokenizer
from recipes.common import checkpoint, hf
from recipes.common.checkpoint import integrity
from recipes.common.generation.generator import Generator, Sampling, kept_logits
from recipes.common.mesh import make_mesh
from recipes.common.runtime.errors import UserError
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout
from tests.conftest import ROOT, full_except
from tests.support import runs, small_tokenizers
from tests.support.golden_folders import GOLDEN
from tests.support.models import random_variables
from tests.support.quick import quick as quick
from zoo import gpt_oss
from zoo.core.strategies import DECODER
from zoo.llama_relatives import Config, Transformer
from zoo.options import cache as zoo_cache
from zoo.options.rope_scaling import Dynamic, LongRope

pytestmark = pytest.mark.promise("generation")

FAMILIES = ["llama2", "llama3", "mistral", "qwen2", "qwen3", "smollm"]
MESHES = [("1x1", "dp"), ("1x8", "tp"), ("2x4", "fsdp_tp")]
FAST = [("mistral", "2x4", "fsdp_tp")]
NEW = 8  # tokens to write: more than mistral's window of 5
PROMPTS = [[5, 9, 33, 2, 7, 60, 11], [1], [8, 3, 3, 40]]


@functools.cache
def restored(family: str, mesh: str, rules: str):
    source = checkpoint.find(f"hf:{GOLDEN / family}")
    layout = checkpoint.layout_of(source, make_mesh(mesh), rules)
    return layout, checkpoint.restore_variables(source, layout)


@functools.cache
def uncached(family: str) -> tuple[list[list[int]], list[np.ndarray]]:
    """(greedy tokens of each prompt, their logits), with a whole forward pass for each token.

    What is behind a position changes nothing before it, so that one shape does for all.
    """
    layout, variables = restored(family, "1x1", "dp")
    tokens_BT, ends = np.zeros((len(PROMPTS), 16), np.int32), [len(p) for p in PROMPTS]
    for row, prompt in zip(tokens_BT, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    model = layout.compile(lambda v, t: layout.model.merge(v)(t), variables, tokens_BT)
    logits = [[] for _ in PROMPTS]
    for step in range(NEW):
        found_BTV = np.asarray(model(variables, tokens_BT))
        for b, end in enumerate(ends):
            logits[b].append(found_BTV[b, end + step - 1])
            tokens_BT[b, end + step] = logits[b][-1].argmax()
    written = [row[end : end + NEW].tolist() for row, end in zip(tokens_BT, ends, strict=True)]
    return written, [np.stack(rows) for rows in logits]


CASES = [(family, *mesh) for family in FAMILIES for mesh in MESHES] + [
    ("smollm", "8", "fsdp"),
    ("gpt2", "2x4", "fsdp_tp"),
    ("gemma3_vision", "2x4", "fsdp_tp"),
    ("gemma2", "1x8", "tp"),
    ("mixtral", "data=2,expert=4", "fsdp_ep"),
    ("qwen3_moe", "data=2,expert=2,model=2", "fsdp_ep_tp"),
    ("gpt_oss", "data=2,expert=2,model=2", "fsdp_ep_tp"),
    ("deepseek_v3", "data=2,expert=2,model=2", "fsdp_ep_tp"),
    ("glm4_moe", "data=2,expert=2,model=2", "fsdp_ep_tp"),  # a dense layer before the others
]


@pytest.mark.parametrize(("family", "mesh", "rules"), full_except(CASES, FAST))
def test_greedy_tokens_and_logits_are_those_without_a_cache(family, mesh, rules, quick):
    """Three prompts of different lengths at once, on meshes that divide the heads and that don't."""
    wanted, wanted_logits = uncached(family)
    layout, variables = restored(family, mesh, rules)
    ahead = Generator(layout, layout.variables(), Sampling(), (), layout.config.vocab_size)
    ahead.compile([len(p) for p in PROMPTS], NEW)
    generator = ahead.with_variables(variables)
    found = np.stack(list(generator([np.array(p) for p in PROMPTS], NEW)), axis=1)
    assert found.tolist() == wanted
    assert len(generator._compiled) == 2, "each program once, before there are variables"
    found_logits = logits_of(layout, variables, wanted)
    for ours, theirs in zip(found_logits, wanted_logits, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def logits_of(layout, variables, written) -> np.ndarray:
    """Logits [prompts, NEW, V] by prefill and decode, given the tokens written."""
    rows, T = -(-len(PROMPTS) // layout.batch_shards) * layout.batch_shards, 8
    tokens_BT, lengths_B = np.zeros((rows, T), np.int32), np.ones(rows, np.int32)
    for b, prompt in enumerate(PROMPTS):
        tokens_BT[b, T - len(prompt) :], lengths_B[b] = prompt, len(prompt)
    more = np.zeros((NEW, rows), np.int32)
    more[:, : len(PROMPTS)] = np.transpose(written)

    def run(variables, tokens_BT, lengths_B, more):
        model = layout.model.merge(variables)
        first_BV, cache = zoo_cache.prefill(model, tokens_BT, lengths_B, T + NEW)

        def step(cache, tokens_B):
            logits_BV, cache = zoo_cache.decode(model, tokens_B, cache)
            return cache, logits_BV

        _, logits = jax.lax.scan(step, cache, more[:-1])
        whole = [jax.sharding.reshard(x, jax.P()) for x in (first_BV[None], logits)]
        return jnp.concatenate(whole).swapaxes(0, 1)

    given = jax.device_put((tokens_BT, lengths_B, more), layout.replicated)
    return np.asarray(layout.compile(run, variables, *given)(variables, *given))[: len(PROMPTS)]


# ---- rotary scalings that depend on a row's length -----------------------------------------------

SCALINGS = {
    "longrope": LongRope((1.0, 1.5, 2.0, 3.0), (2.0, 9.0, 5.0, 30.0), 20, 1.2),
    "dynamic": Dynamic(4.0, 20),
}


@pytest.mark.parametrize("scaling", full_except(SCALINGS, ["dynamic"]))
def test_a_row_is_scaled_by_its_own_length(scaling, quick):
    """Not by its neighbours', by the padding or by the room for new tokens."""
    config = dataclasses.replace(Config.tiny(), num_layers=1, rope_scaling=SCALINGS[scaling])
    layout = make_layout(Transformer, config, make_mesh("1x1"))
    variables = random_variables(layout)
    for weight in ("q", "v", "o"):
        variables["params"]["layers"]["attention"][weight] *= 8  # positions matter
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 384, n).astype(np.int32) for n in (3, 18, 25)]

    generator = Generator(layout, variables, Sampling(), (), 384)

    def generate(prompts, new) -> list[list[int]]:
        return np.stack(list(generator(prompts, new)), axis=1).tolist()

    together = generate(prompts, 6)
    for prompt, row in zip(prompts, together, strict=True):
        (alone,) = generate([prompt], 10)
        assert alone[:6] == row
    if scaling == "longrope":  # the row of 18 is read again with the long factors at 21
        read = jax.jit(lambda t, n: zoo_cache.prefill(layout.model.merge(variables), t, n, 32)[0])
        tokens = [*prompts[1], *together[1]]
        for length in range(18, 24):
            padded_BT = np.array([[0] * (32 - length) + tokens[:length]], np.int32)
            logits_BV = read(padded_BT, np.array([length]))
            assert tokens[length] == logits_BV[0].argmax(), length


@pytest.mark.parametrize("scaling", full_except(SCALINGS, ["dynamic"]))
def test_logits_of_padded_prompts_are_those_of_their_own_length(scaling):
    config = dataclasses.replace(Config.tiny(), num_layers=1, rope_scaling=SCALINGS[scaling])
    layout = make_layout(Transformer, config, make_mesh("1x1"))
    model = layout.model.merge(random_variables(layout))
    forward = jax.jit(model)
    random = np.random.default_rng(0)
    tokens_BT = random.integers(0, 384, (3, 32)).astype(np.int32)
    lengths_B = np.array([3, 20, 25], np.int32)
    found_BV, cache = jax.jit(lambda t, n: zoo_cache.prefill(model, t, n, 40))(tokens_BT, lengths_B)
    more_BV, _ = jax.jit(lambda t, c: zoo_cache.decode(model, t, c))(tokens_BT[:, 0], cache)
    for b, length in enumerate(lengths_B):
        row = tokens_BT[b, 32 - length :]
        wanted_V = forward(row[None])[0, -1]
        np.testing.assert_allclose(found_BV[b], wanted_V, rtol=0, atol=1e-5)
        if (
            b != 1
        ):  # that row grows beyond the original length, and its cached keys stay as they are
            row = np.append(row, tokens_BT[b, 0])
            wanted_V = forward(row[None])[0, -1]
            if scaling == "longrope" or b == 0:
                np.testing.assert_allclose(more_BV[b], wanted_V, rtol=0, atol=1e-5)


# ---- meshes that split positions -----------------------------------------------------------------


class Slots(NamedTuple):
    k: jax.Array
    v: jax.Array
    states: None = None


class Successor:
    """A model that always continues n by n + 1, and notes what it is given."""

    shapes: ClassVar = {"params": {}}
    axes: ClassVar = {"params": {}}
    names: ClassVar = DECODER
    batch_axes: ClassVar = ()

    def merge(self, variables):
        return self

    def prefill(self, tokens_BT, lengths_B, slots: int):
        self.tokens, self.slots = jax.typeof(tokens_BT), slots
        split = jax.P(None, None, self.tokens.sharding.spec[1])
        kv = jnp.zeros((1, len(tokens_BT), slots, 1, 1), out_sharding=split)
        return self.decode(jax.sharding.reshard(tokens_BT, jax.P())[:, -1], Slots(kv, kv + 1))

    def decode(self, tokens_B, cache):
        return jax.nn.one_hot(tokens_B + 1, 64), cache


@pytest.mark.parametrize(
    ("mesh", "T", "S"), [("data=2,seq=4", 16, 28), ("data=2,seq=3", 18, 27), ("8", 16, 25)]
)
def test_prompts_and_cache_are_padded_to_what_the_mesh_divides(mesh, T, S, quick, monkeypatch):
    for name in ("prefill", "decode"):
        monkeypatch.setattr(zoo_cache, name, vars(Successor)[name])
    rules = {"batch": "data", "seq": "seq" if "seq" in mesh else None}
    layout, model = make_layout(Transformer, Config.tiny(), make_mesh(mesh), rules), Successor()
    generator = Generator(
        dataclasses.replace(layout, model=model), {"params": {}}, Sampling(), (), 64
    )
    written = np.stack(list(generator([np.array(p) for p in PROMPTS], 9)), axis=1)
    assert written.tolist() == [[prompt[-1] + 1 + i for i in range(9)] for prompt in PROMPTS]
    assert (model.tokens.shape[1], model.slots) == (T, S)
    assert model.tokens.sharding.spec == jax.P(None, layout.rules["seq"])
    assert generator.cache_bytes == 2 * 4 * model.tokens.shape[0] * S // layout.seq_shards


# ---- what a step costs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "rules"), full_except([("1x1", "dp"), ("1x8", "tp")], [("1x8", "tp")])
)
def test_a_step_writes_one_slot_of_the_cache_in_place(mesh, rules, quick):
    config = dataclasses.replace(Config.tiny(), num_layers=8)
    layout = make_layout(Transformer, config, make_mesh(mesh), rules)
    variables = jax.tree.map(
        lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), layout.variables()
    )
    generator = Generator(layout, variables, Sampling(), (), 384)
    assert len(list(itertools.islice(generator([np.array([1, 2])], 16_384 - 16), 2))) == 2
    decode = next(p for key, p in generator._compiled.items() if key[0] == "_decode")
    memory, cache = decode.memory_analysis(), generator.cache_bytes
    shape = (8, 1, 16_384, 8 // layout.mesh.shape["model"], 8)
    assert cache == 2 * 4 * math.prod(shape)
    assert memory.alias_size_in_bytes >= cache, "it comes out where it went in"
    # At most one of the eight layers' caches is held a second time, to be multiplied.
    assert memory.temp_size_in_bytes < 0.3 * cache
    whole = "f32[" + ",".join(map(str, shape)) + "]"
    copies = [line for line in decode.as_text().splitlines() if "copy" in line.split("(")[0]]
    assert not [line for line in copies if whole in line.split("=")[1][:60]]


def test_a_generator_reports_the_bytes_that_a_step_reads(quick):
    layout, variables = restored("smollm", "1x1", "dp")
    generator = Generator(layout, variables, Sampling(), (), 64)
    list(generator([np.array([1])], 3))
    weights, cache = generator.bytes_a_token()
    assert weights == sum(x.nbytes for x in jax.tree.leaves(variables))
    config = layout.config
    wanted = 2 * config.num_layers * (16 + 3) * config.num_kv_heads * config.head_dim * 4
    assert cache == wanted
    assert (generator.read, generator.written, generator.steps) == (1, 3, 3)


# ---- sampling ------------------------------------------------------------------------------------


def kept(logits: np.ndarray, **options) -> np.ndarray:
    """Which tokens may be chosen."""
    options = {"top_k": 0, "top_p": 1.0} | options
    return np.isfinite(np.asarray(kept_logits(jnp.array(logits), **options)))


def test_top_k_and_top_p_leave_the_tokens_they_should():
    logits = np.log(np.array([[0.1, 0.4, 0.05, 0.2, 0.25], [0.96, 0.01, 0.01, 0.01, 0.01]]))
    assert kept(logits, top_k=2).tolist() == [[0, 1, 0, 0, 1], [1, 1, 1, 1, 1]]  # ties stay
    assert kept(logits, top_p=0.64).tolist() == [[0, 1, 0, 0, 1], [1, 0, 0, 0, 0]]
    assert kept(logits, top_p=0.66).tolist() == [[0, 1, 0, 1, 1], [1, 0, 0, 0, 0]]
    # The first of the two tokens that top_k leaves has 0.4 / 0.65 of their probability.
    assert kept(logits[:1], top_k=2, top_p=0.6).tolist() == [[0, 1, 0, 0, 0]]
    for least in (1e-9, 0.0):
        assert kept(logits, top_p=least).tolist() == [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0]]


def test_top_p_0_and_a_temperature_near_0_take_the_likeliest_token():
    """Not token 0, which is what logits that are all -inf or inf would give."""
    logits = np.array([[1.0, 30.0, 90.0, 89.0, 2.0], [-9.0, -8.0, -9.0, -7.5, -9.0]], np.float32)
    keys = Sampling(seed=5).keys(jnp.arange(2))
    for sampling in (
        Sampling(1.0, top_p=0.0),
        *(Sampling(t) for t in (0.0, 1e-45, 1e-38, 1e-7, 1e-5)),
    ):
        assert sampling(jnp.array(logits), keys, 0).tolist() == [2, 3], sampling
    assert kept(logits).all()


def test_tokens_are_drawn_as_often_as_they_are_likely():
    share = np.array([0.5, 0.3, 0.2])
    rows = np.arange(4_000)
    logits = jnp.log(jnp.broadcast_to(share, (len(rows), 3)))
    for temperature in (1.0, 2.0):
        wanted = share ** (1 / temperature) / (share ** (1 / temperature)).sum()
        sampling = Sampling(temperature)
        drawn = jax.jit(sampling)(logits, sampling.keys(rows), 3)
        found = np.bincount(drawn, minlength=3) / len(rows)
        np.testing.assert_allclose(found, wanted, atol=0.03)
    assert (Sampling(0.0)(logits, None, 3) == 0).all()


def test_a_sample_depends_on_seed_and_row_alone(quick):
    """The mesh and the other prompts of the batch don't matter."""
    prompts, found = [np.array(p) for p in PROMPTS], {}
    for mesh, rules in (("1x1", "dp"), ("2x4", "fsdp_tp")):
        layout, variables = restored("smollm", mesh, rules)
        generator = Generator(layout, variables, Sampling(1.0, 20, 0.9, seed=7), (), 64, rows=4)
        found[mesh] = np.stack(list(generator(prompts, 6)), axis=1).tolist()
    assert found["1x1"] == found["2x4"]
    (alone,) = np.stack(list(generator(prompts[2:], 6, first=2)), axis=1).tolist()
    assert alone == found["1x1"][2]
    layout, variables = restored("smollm", "1x1", "dp")
    other = Generator(layout, variables, Sampling(1.0, 20, 0.9, seed=8), (), 64, rows=4)
    assert np.stack(list(other(prompts, 6)), axis=1).tolist() != found["1x1"]


def test_a_row_ends_and_the_others_go_on(quick):
    wanted, _ = uncached("smollm")
    layout, variables = restored("smollm", "1x1", "dp")
    end = wanted[0][2]
    generator = Generator(layout, variables, Sampling(), (end,), 64, rows=4)
    found = np.stack(list(generator([np.array(p) for p in PROMPTS], NEW)), axis=1)
    for row, tokens in zip(found.tolist(), wanted, strict=True):
        stop = tokens.index(end) + 1 if end in tokens else len(tokens)
        assert row == (tokens[:stop] + [-1] * len(row))[: len(row)]
    assert generator.written == (found >= 0).sum()
    alone = list(generator([np.array(PROMPTS[0])], NEW))
    assert [int(t) for (t,) in alone] == wanted[0][: wanted[0].index(end) + 1], "and stops there"


# ---- the command ---------------------------------------------------------------------------------


CONTEXT = 96


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("talker") / "model"
    return f"--restore_from={runs.talker(folder, CONTEXT, num_kv_heads=1)}"


PUBLISHED = "--restore_from=transformer.stdlib_3m"


def test_text_after_a_prompt(inside, quick):
    shown = set()
    for mesh in ("4x2", "8"):
        done = inside(
            "recipes.generate", PUBLISHED, "--prompt=import ", "--max_new_tokens=12",
            "--temperature=0", f"--mesh={mesh}",
        )  # fmt: skip
        assert (done.code, done.err) == (0, "")
        head, text, *speed = done.out.splitlines()
        assert head.startswith("mesh ")
        assert text.startswith("import ")
        shown.add(text)
        assert speed[0].startswith("Read 8 tokens at ")
        assert " wrote 12 at " in speed[0]
        assert speed[1].startswith("A step reads ")
    assert len(shown) == 1, "the same text on every mesh"


@pytest.mark.full
def test_prompts_of_a_file_are_answered_whatever_the_batch(inside, quick, talker, tmp_path):
    rows = [{"prompt": "one"}, {"messages": [{"role": "user", "content": "two"}], "id": 7}]
    rows += [{"prompt": "three and more"}]
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for batch, mesh in (("2", "1x1"), ("8", "4x2")):
        out = tmp_path / f"{batch}.jsonl"
        done = inside(
            "recipes.generate", talker, f"--prompts={asked}", f"--out={out}", f"--mesh={mesh}",
            f"--batch_size={batch}", "--max_new_tokens=9", "--temperature=1", "--top_k=40",
        )  # fmt: skip
        assert (done.code, done.err) == (0, "")
        assert ("Not divisible: kv_heads 1 by model 2 (" in done.out) == (mesh == "4x2")
        found.append([json.loads(line) for line in out.read_text().splitlines()])
    assert found[0] == found[1]
    for row, answered in zip(rows, found[0], strict=True):
        assert row.items() <= answered.items()
        assert answered["ended"] or answered["tokens"] == 9
    done = inside("recipes.generate", talker, f"--prompts={asked}", "--max_new_tokens=9",
                  "--temperature=1", "--top_k=40", "--mesh=4x2", "--batch_size=8")  # fmt: skip
    shown = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert shown == found[0], "to the terminal, too"


def test_no_row_of_answers_is_lost(inside, quick, talker, tmp_path, monkeypatch):
    """A lone surrogate can't be written as UTF-8; U+2028 and U+0085 end no row; a BOM is no text."""
    prompts = ["one", "two \ud83d", "a\u2028b\x85c", "vier: ü"]
    quoted = [json.dumps({"prompt": one}, ensure_ascii="\ud83d" in one) for one in prompts]
    asked, out = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    asked.write_text("\ufeff" + "\r\n".join(quoted), encoding="utf-8", newline="")
    flags = (talker, f"--prompts={asked}", "--max_new_tokens=3", "--mesh=1x1", "--batch_size=1")
    done = inside("recipes.generate", *flags, f"--out={out}")
    assert (done.code, done.err) == (0, "")
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n") if line]
    assert [row["prompt"] for row in rows] == prompts
    done = inside("recipes.generate", *flags)
    assert (done.code, done.err) == (0, "")
    shown = [json.loads(line) for line in done.out.split("\n") if line.startswith("{")]
    assert shown == rows


def test_a_line_of_answers_is_ascii_where_the_encoding_lacks_a_character():
    from recipes.generate import as_line

    row = {"prompt": "ü 漢", "answer": "a\u2028"}
    assert as_line(row, "utf-8") == '{"prompt": "ü 漢", "answer": "a\u2028"}'
    for encoding in ("latin-1", "ascii"):
        assert json.loads(as_line(row, encoding)) == row
        assert as_line(row, encoding).isascii()
    assert as_line({"prompt": "\ud83d ü"}, "utf-8") == '{"prompt": "\\ud83d \\u00fc"}'


def test_tools_of_a_row_are_shown_to_the_model():
    from recipes.common.generation.questions import question

    template = "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}{{ messages[0].content }}"
    files = small_tokenizers.with_template(small_tokenizers.byte_level(), template)
    tokens = tokenizer.from_files(files, "it")
    messages = [{"role": "user", "content": "Hi"}]
    for row in ({"messages": messages}, {"prompt": "Hi"}):
        asked = question(row | {"tools": [{"name": "weather "}]}, True, tokens)
        assert tokens.decode(asked.tokens) == "weather Hi"


PAIRS = [("The capital is", " Paris 🦊"), ("def f():\n", "    return x"), ("🦊", " a"), ("", "a b")]


@pytest.mark.parametrize("files", [dict, small_tokenizers.byte_level, small_tokenizers.metaspace])
def test_text_goes_on_from_its_prompt(files, capfd, tmp_path):
    """Decoders like Llama 2's drop a leading space, but a continuation keeps its space."""
    from recipes.common.generation.questions import question
    from recipes.generate import Generate, Limit, answer, answer_all

    tokens = tokenizer.from_files(files())
    limit, out = Limit(100, Generate(max_new_tokens=50), tokens), tmp_path / "out.jsonl"
    for begins, wanted in PAIRS:
        asked = question({"prompt": begins}, False, tokens)
        whole = tokens.prompt(begins + wanted)
        assert begins == "" or whole[: len(asked.tokens)].tolist() == asked.tokens.tolist()
        rest = whole[len(asked.tokens) :] if begins else tokens.encode([wanted])[0]
        generator = lambda *_, rest=rest, **__: iter(rest[:, None])  # noqa: E731, always writes this
        generator.end = ()
        assert answer(generator, asked, limit) == wanted
        assert capfd.readouterr().out == f"{begins}{wanted}\n"
        answer_all(generator, [asked], limit, Generate(), out)
        assert json.loads(out.read_text().splitlines()[-1])["answer"] == wanted


def test_the_last_part_of_a_harmony_answer_is_the_answer(capfd, tmp_path):
    """GPT-OSS writes channels; the next turn of a dialogue gets the last one only."""
    from recipes.common.generation.questions import question
    from recipes.generate import Generate, Limit, answer, answer_all

    tokens = tokenizer.from_files(small_tokenizers.harmony())
    limit, out = Limit(200, Generate(max_new_tokens=99), tokens), tmp_path / "out.jsonl"
    asked = question({"prompt": "Hi"}, True, tokens)
    shown = tokens._library.decode(asked.tokens.tolist(), skip_special_tokens=False)
    assert shown.endswith("<|start|>user<|message|>Hi<|end|><|start|>assistant")
    parts = "<|channel|>analysis<|message|>A 🦊?<|end|><|start|>assistant"
    parts += "<|channel|>final<|message|> Yes 🦊<|return|>"
    written = tokens.encode_rendered(parts)
    generator = lambda *_, **__: iter(written[:, None])  # noqa: E731, always writes this
    generator.end = tokens.end
    assert answer(generator, asked, limit) == " Yes 🦊"
    assert capfd.readouterr().out == "[analysis] A 🦊?\nassistant[final]  Yes 🦊\n"
    answer_all(generator, [asked], limit, Generate(), out)
    found = json.loads(out.read_text())
    assert (found["answer"], found["ended"]) == (" Yes 🦊", True)


def test_a_gpt_oss_folder_s_own_template_asks_it(inside, tmp_path, monkeypatch):
    """The command reads a folder like the published ones; what the model writes is made up here."""
    config = dataclasses.replace(
        gpt_oss.Config.tiny(), vocab_size=576, num_layers=1, num_experts=2, capacity=None
    )
    shapes = paths(hf.folder.shapes_of("gpt_oss", config)["params"])
    read = lambda path: np.zeros(shapes[path].shape, np.float32)  # noqa: E731
    tokens, asked = tokenizer.from_files(small_tokenizers.harmony()), []
    hf.write(tmp_path / "oss", "gpt_oss", config, 128, read, tokens)
    assert (tmp_path / "oss" / "chat_template.jinja").read_text() == small_tokenizers.HARMONY

    def write(self, prompts, max_new_tokens, first=0, pictures=None):
        asked.extend(prompts)
        yield from tokens.encode_rendered("<|channel|>final<|message|>Hello.<|return|>")[:, None]

    monkeypatch.setattr(Generator, "__call__", write)
    flags = (f"--restore_from=hf:{tmp_path / 'oss'}", "--chat", "--prompt=Hi", "--mesh=1x1")
    done = inside("recipes.generate", *flags)
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith("\n[final] Hello.\n")
    np.testing.assert_array_equal(asked[0], tokens.ask([{"role": "user", "content": "Hi"}]))


def test_a_dialogue_reads_the_whole_conversation(inside, quick, talker, monkeypatch):
    """The second answer follows from both turns; a conversation that is too long starts over."""
    said = ["Hi", "And then?", "x" * 400, "Hi"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(said) + "\n"))
    flags = ("--chat", "--max_new_tokens=6", "--temperature=0", "--mesh=1x1")
    done = inside("recipes.generate", talker, *flags)
    assert (done.code, done.err) == (0, "")
    _, first, second, over, again, *_ = done.out.split("> ")
    assert again.splitlines()[0] == first.splitlines()[0] != second.splitlines()[0]
    assert "The conversation is over: a prompt has " in over
    assert f"context is {CONTEXT}" in over
    alone = inside("recipes.generate", talker, *flags, "--prompt=Hi")
    assert alone.out.splitlines()[1] == first.splitlines()[0]


def test_generation_config_gives_the_defaults():
    from recipes.generate import Generate, sampling

    def tokens(**said):
        files = small_tokenizers.byte_level()
        return tokenizer.from_files(files | {"generation_config.json": json.dumps(said).encode()})

    llama = tokens(do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=2)
    assert sampling(Generate(), llama) == Sampling(0.6, 50, 0.9, 0), "as in transformers"
    assert sampling(Generate(top_k=0), llama) == Sampling(0.6, 0, 0.9, 0)
    whole = tokens(do_sample=True, top_k=0, top_p=None, temperature=None)
    assert sampling(Generate(), whole) == Sampling(1.0, 0, 1.0, 0)
    assert sampling(Generate(), tokens(do_sample=True, top_p=0)).top_p == 0, "the likeliest token"
    assert sampling(Generate(temperature=0.5, top_k=5, seed=3), llama) == Sampling(0.5, 5, 0.9, 3)
    assert sampling(Generate(temperature=0.0), llama).temperature == 0
    assert sampling(Generate(), tokens(eos_token_id=2)).temperature == 0, "as in transformers"
    assert sampling(Generate(), tokens(do_sample=True, top_k=20)) == Sampling(1.0, 20, 1.0, 0)
    assert sampling(Generate(), tokenizer.BYTES) == Sampling(0.8, 0, 1.0, 0)


@pytest.mark.parametrize("key", ["temperature", "top_k", "top_p", "max_new_tokens"])
@pytest.mark.parametrize("value", ["0.5", -1, True, [1]])
def test_a_setting_that_is_no_number_is_refused(key, value):
    from recipes.generate import Generate, Limit, Question, sampling

    said = {"do_sample": True, key: value}
    files = small_tokenizers.byte_level()
    tokens = tokenizer.from_files(files | {"generation_config.json": json.dumps(said).encode()})
    question = Question({}, np.zeros(3, np.int32))
    with pytest.raises(UserError) as caught:
        print(sampling(Generate(), tokens), Limit(64, Generate(), tokens).new_tokens(question))
    assert str(caught.value).endswith(
        f" has {key} {json.dumps(value)}, which must be a number ≥ 0; use --{key}=…"
    )


@pytest.mark.full
def test_settings_that_are_not_applied_are_named(inside, quick, tmp_path):
    said = {"repetition_penalty": 1.05, "num_beams": 1, "min_p": 0.1, "suppress_tokens": []}
    said |= {"no_repeat_ngram_size": 3, "max_new_tokens": 4, "transformers_version": "4.0"}
    folder = runs.talker(tmp_path / "model", 64)
    file = folder / "tokenizer" / "generation_config.json"
    file.write_text(json.dumps(said))
    integrity.hash_before_commit(folder)
    flags = (f"--restore_from={folder}", "--prompt=a", "--mesh=1x1")
    greedy = inside("recipes.generate", *flags).out
    line = (
        "generation_config.json has repetition_penalty 1.05, {}no_repeat_ngram_size 3, which the "
    )
    assert line.format("") + "zoo does not apply.\n" in greedy
    sampled = inside("recipes.generate", *flags, "--temperature=1").out
    assert line.format("min_p 0.1, ") + "zoo does not apply.\n" in sampled
    file.write_text('{"repetition_penalty": 1.0}')
    integrity.hash_before_commit(folder)
    assert "does not apply" not in inside("recipes.generate", *flags).out


LONG_PROMPT = "x" * 300
# Flags → the sentence. {file}: a file of prompts, of the text that follows.
MISTAKES = [
    ([], "--restore_from is missing; use --restore_from=RUN, or hf:DIR"),
    (["--restore_from=nothing"], "--restore_from=nothing does not exist; use a run's workdir"),
    (["--restore_from=mlp.digits", "--tokenizer=bytes"], "--restore_from=mlp.digits is a 'mlp' model, which generates no text; use a language model"),
    ([PUBLISHED, "--chat"], "the tokenizer bytes has no chat template"),
    ([PUBLISHED, f"--prompt={LONG_PROMPT}"], "a prompt has 301 tokens, but the model's context is 256, answer included; use a shorter prompt"),
    ([PUBLISHED, "--prompt=abc", "--max_new_tokens=300"], "a prompt has 4 tokens, and with --max_new_tokens=300 exceeds the model's context of 256; try --max_new_tokens=252"),
    ([PUBLISHED, "--prompt=a", "--prompts=b"], "--prompt and --prompts=b are both given; leave one out"),
    ([PUBLISHED, "--prompt=a", "--out=b"], "--out=b is for the answers to --prompts; add it"),
    ([PUBLISHED, "--prompts=nothing.jsonl"], "--prompts=nothing.jsonl can't be read (No such file or directory); use a .jsonl file"),
    ([PUBLISHED, "--prompts={file}", ""], "--prompts={file} is empty; add a line like"),
    ([PUBLISHED, "--prompts={file}", '{"prompt": "a"}\n{"prompt"'], "line 2 of {file} is not JSON ("),
    ([PUBLISHED, "--prompts={file}", '{"prompt": "a"}\n\n{"text": "b"}'], "line 3 of {file} is not a prompt; write"),
    ([PUBLISHED, "--prompts={file}", '{"messages": [{"role": "user"}]}'], "line 1 of {file}: the content of message 1 is missing, not a string; write it as text"),
    ([PUBLISHED, "--prompts={file}", '{"messages": [{"role": "me", "content": "a"}]}'], 'line 1 of {file}: message 1 has the role "me"; use one of system'),
    ([PUBLISHED, "--prompts={file}", '{"messages": []}'], "line 1 of {file} is not a prompt; write"),
    ([PUBLISHED, "--prompts={file}", '{"prompt": "a"}\n{"prompt": "b", "messages": null}'], "line 2 of {file} has a prompt, and messages that are null; leave these out"),
    ([PUBLISHED, "--prompts={file}", '\n{"messages": null}'], "line 2 of {file} is not a prompt; write"),
    ([PUBLISHED, "--prompts={file}", '{"messages": 3}'], "line 1 of {file}: 'messages' is a number, not a list of messages; write"),
    ([PUBLISHED, "--prompts={file}", '{"prompt": "a"}\n{"messages": [{"role": "user", "content": "a"}]}'], "line 2 of {file}: the tokenizer bytes has no chat template"),
    ([PUBLISHED, "--prompts={file}", '{"messages": [{"role": "user", "content": "a"}], "tools": 3}'], "line 1 of {file}: 'tools' is a number, not a list of objects; write"),
    ([PUBLISHED, "--prompts={file}", f'{{"prompt": "a"}}\n{{"prompt": "{LONG_PROMPT}"}}'], "line 2 of {file}: a prompt has 301 tokens, but the model's context is 256"),
    ([PUBLISHED, "--prompts={file}", "--out={file}", '{"prompt": "a"}'], "--out={file} already exists; use a new name"),
    ([PUBLISHED, "--top_p=2"], "--top_p=2 must be ≤ 1.0"),
    ([PUBLISHED, "--top_p=-0.5"], "--top_p=-0.5 must be ≥ 0, or -1 for the model's own; try 0.9"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "sentence"), MISTAKES, ids=lambda x: " ".join(x)[:60] if isinstance(x, list) else ""
)
def test_a_mistake_is_one_line_before_anything_is_computed(
    flags, sentence, inside, tmp_path, monkeypatch
):
    file = tmp_path / "asked.jsonl"
    if any("{file}" in flag for flag in flags):
        file.write_text(flags[-1])
        flags = flags[:-1]
    monkeypatch.setattr(Generator, "__init__", None)
    done = inside(
        "recipes.generate", "--mesh=1x1", *(f.replace("{file}", str(file)) for f in flags)
    )
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert sentence.replace("{file}", str(file)) in done.err


@pytest.mark.full
def test_ctrl_c_ends_cleanly_and_text_streams(tmp_path):
    """Text appears while the model writes; Ctrl-C prints the counts so far."""
    command = [sys.executable, "-u", "-m", "recipes.generate", PUBLISHED, "--prompt=def "]
    process = subprocess.Popen(
        [*command, "--max_new_tokens=250"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.readline()  # the mesh
    assert process.stdout.read(8)[:4] == b"def "
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert b"\nStopped by SIGINT.\nRead 5 tokens at " in out
