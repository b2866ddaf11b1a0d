"""recipes.dpo: the objective of pairs on every mesh, whatever computes the reference; whole runs."""

import dataclasses
import functools
import json
import re
import shutil

import jax
import numpy as np
import pytest

from recipes import dpo, publish
from recipes.common import checkpoint, entries
from recipes.common.preference.losses import Loss
from recipes.common.preference.objective import Objective
from recipes.common.report import report
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import parse
from recipes.common.runtime.mesh import make_mesh
from recipes.common.runtime.start import show_plan
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.host_memory import on_host
from recipes.common.sharding.layout import make_layout, shardings
from recipes.common.train import offload
from recipes.common.train.step import TrainStep, gradients
from recipes.instruments.plan import answer
from tests.conftest import full_except
from tests.support.entries import LR, OPTIMIZER
from tests.support.models import random_values
from tests.support.quick import QUICK
from tests.support.quick import quick as quick
from tests.support.runs import assert_bit_equal, records, state_of, talker
from zoo.core.decoder import Decoder
from zoo.llama_relatives import Transformer
from zoo.moe import MoE

pytestmark = pytest.mark.promise("preferences")

PAIRS, LENGTH = 8, 16
LOSS = Loss("dpo", 0.5)
TOLERANCE = 1e-5


def batch_of_pairs() -> dict[str, np.ndarray]:
    """Answers of unequal lengths after a shared prompt; the last row is padding."""
    random, batch = np.random.default_rng(0), {}
    tokens = random.integers(0, 257, (2, PAIRS, LENGTH + 1), np.int32)
    tokens[1, :, :6] = tokens[0, :, :6]
    for side, prefix in enumerate(("", "rejected_")):
        targets = tokens[side, :, 1:].copy()
        targets[:, :5] = -1
        for row in range(PAIRS):
            targets[row, LENGTH - (row + side) % 4 :] = -1
        targets[-1] = -1
        batch |= {f"{prefix}tokens": tokens[side, :, :-1], f"{prefix}targets": targets}
    return batch


BATCH = batch_of_pairs()
KTO, LABELS = Loss("kto", 0.5), np.array([1, 0, 0, 1, 1, 0, 1, 0], np.float32)


def config_of(entry: str, **changes):
    config = entries.sizes(entry)["tiny"]()
    return dataclasses.replace(config, loss_chunk=8, **changes)


def layout_on(mesh: str, strategy: str, config, model=Transformer, rows=PAIRS):
    return make_layout(model, config, make_mesh(mesh), strategy, batch_size=rows, seq_len=LENGTH)


def values(layout, seed: int):
    variables = layout.variables()
    return jax.device_put(random_values(layout.model.shapes, seed), shardings(variables))


@functools.cache
def figures(
    mesh: str = "1x1", strategy: str = "", reference: str = "copy", rules: str = "",
    lora: int = 0, microbatches: int = 1, entry: str = "transformer", loss: Loss = LOSS,
):  # fmt: skip
    """(metrics, gradients) of a policy with random weights, and another random model as reference.

    With kto, they change places, or else z would be 0.
    """
    policy_seed, reference_seed = (1, 0) if loss is KTO else (0, 1)
    model = entries.model(entry)
    layout = layout_on(mesh, strategy, config_of(entry, lora_rank=lora), model)
    its = layout_on(mesh, rules or strategy, config_of(entry), model, rows=0)
    layout = dataclasses.replace(layout, model=layout.model._replace(loss=Objective(loss, its)))
    state, batch = values(layout, policy_seed), BATCH | ({"label": LABELS} if loss is KTO else {})
    frozen = values(its, reference_seed if not lora else 0)
    if lora:  # the adapter's base is the reference's weights, so both references are the same
        state = state | {"base": frozen["params"]}
    if reference == "host":
        there = jax.tree.map(lambda x: on_host(x.sharding), frozen)
        frozen = jax.device_put(frozen, there)
    if reference in ("copy", "host"):
        state = state | {"frozen": frozen}
    elif reference == "stored":
        pair_B2 = its.compile(
            Objective(LOSS, its).reference_pair, frozen,
            jax.device_put(BATCH, its.batch_shardings(BATCH)), compiler_options=QUICK,
        )(frozen, jax.device_put(BATCH, its.batch_shardings(BATCH)))  # fmt: skip
        chosen_B, rejected_B = np.asarray(pair_B2).T
        batch = BATCH | {"reference_chosen": chosen_B, "reference_rejected": rejected_B}
    placed = jax.device_put(batch, layout.batch_shardings(batch))

    def both(state, batch):
        grads, _, means = gradients(layout, state, batch, microbatches)
        return means, grads

    means, grads = layout.compile(both, state, placed, compiler_options=QUICK)(state, placed)
    return (
        {name: float(mean) for name, mean in means.items()},
        {path: np.asarray(x) for path, x in paths(grads).items()},
    )


def assert_equal(found, expected):
    means, grads = found
    assert {*means} <= {*expected[0]}, "stored numbers give no kl"
    for name, mean in means.items():
        # A reward is a difference of sums of a dozen numbers.
        np.testing.assert_allclose(mean, expected[0][name], rtol=TOLERANCE, atol=2e-5, err_msg=name)
    whole = np.sqrt(sum(np.sum(gradient**2) for gradient in expected[1].values()))
    for path, gradient in expected[1].items():  # of a key's bias, zero but for rounding
        size = max(np.linalg.norm(gradient), 1e-3 * whole)
        error = np.linalg.norm(grads[path] - gradient) / size
        assert error < TOLERANCE, (path, error)


def log_ratios() -> list[np.ndarray]:
    """Policy's less reference's log-probabilities of both answers' tokens, from all logits in float64."""
    layout = layout_on("1x1", "", config_of("transformer"))
    forward = layout.compile(
        lambda variables, tokens_BT: layout.model.merge(variables)(tokens_BT),
        layout.variables(), BATCH["tokens"], compiler_options=QUICK,
    )  # fmt: skip

    def log_probs(seed: int, prefix: str) -> np.ndarray:
        logits_BTV = np.asarray(forward(values(layout, seed), BATCH[f"{prefix}tokens"]), np.float64)
        targets_BT = BATCH[f"{prefix}targets"]
        log_sum_BT = np.log(np.exp(logits_BTV).sum(axis=-1))
        picked_BT = np.take_along_axis(logits_BTV, np.maximum(targets_BT, 0)[..., None], 2)[..., 0]
        return np.where(targets_BT < 0, 0, picked_BT - log_sum_BT)

    return [log_probs(0, prefix) - log_probs(1, prefix) for prefix in ("", "rejected_")]


def test_the_objective_is_the_definition_on_logits():
    of_tokens = log_ratios()
    chosen, rejected = (LOSS.beta * ratios.sum(axis=1)[:-1] for ratios in of_tokens)
    margin, ratios = chosen - rejected, np.concatenate(of_tokens)
    count = sum((BATCH[f"{p}targets"] >= 0).sum() for p in ("", "rejected_"))
    kl = (np.exp(ratios) - 1 - ratios).sum() / count
    z = max(0, -rejected.mean())
    assert z > 0
    distance = np.where(LABELS[:-1] > 0, 1, -1) * (-chosen - z)
    expected = {
        LOSS: {
            "loss": np.log1p(np.exp(-margin)).mean(), "margin": margin.mean(),
            "accuracy": (margin > 0).mean(), "reward_chosen": chosen.mean(),
            "reward_rejected": rejected.mean(), "kl": kl,
        },
        KTO: {
            "loss": (1 - 1 / (1 + np.exp(-distance))).mean(), "margin": distance.mean(),
            "accuracy": (distance > 0).mean(), "kl": (np.exp(-ratios) - 1 + ratios).sum() / count,
        },
    }  # fmt: skip
    for loss, means in expected.items():
        found, _ = figures(loss=loss)
        assert found.keys() == means.keys()
        for name, mean in means.items():
            np.testing.assert_allclose(found[name], mean, rtol=1e-5, atol=1e-6, err_msg=name)


CASES = {
    "stored": {"reference": "stored"},
    "in the host's memory": {"reference": "host"},
    "fsdp_tp, reference dp in the host's memory": {
        "mesh": "4x2", "strategy": "fsdp_tp", "rules": "dp", "reference": "host",
    },
    "microbatches": {"microbatches": 2},
    "fsdp_tp": {"mesh": "4x2", "strategy": "fsdp_tp"},
    "fsdp_tp, reference dp": {"mesh": "4x2", "strategy": "fsdp_tp", "rules": "dp"},
    "fsdp_tp, reference fsdp": {"mesh": "4x2", "strategy": "fsdp_tp", "rules": "fsdp"},
    "dp, reference tp": {"mesh": "4x2", "strategy": "dp", "rules": "tp"},
    "fsdp_tp, stored by fsdp": {
        "mesh": "4x2", "strategy": "fsdp_tp", "rules": "fsdp", "reference": "stored",
    },
    "fsdp_tp_sp": {"mesh": "4x2", "strategy": "fsdp_tp_sp"},
    "tp": {"mesh": "1x8", "strategy": "tp"},
    "fsdp": {"mesh": "8", "strategy": "fsdp"},
    "zero1": {"mesh": "8", "strategy": "zero1"},
    "hsdp_tp": {"mesh": "2x2x2", "strategy": "hsdp_tp"},
    "hsdp_tp_sp": {"mesh": "2x2x2", "strategy": "hsdp_tp_sp"},
    "fsdp_cp": {"mesh": "data=2,seq=4", "strategy": "fsdp_cp"},
    "fsdp_cp_tp": {"mesh": "data=2,seq=2,model=2", "strategy": "fsdp_cp_tp"},
    "fsdp_pp": {"mesh": "data=4,pipe=2", "strategy": "fsdp_pp"},
    "pp_zero1, stored by pp": {
        "mesh": "data=4,pipe=2", "strategy": "pp_zero1", "rules": "pp", "reference": "stored",
    },
    "fsdp_pp_tp, kto": {
        "mesh": "data=2,pipe=2,model=2", "strategy": "fsdp_pp_tp", "loss": KTO,
    },
    "fsdp_cp_tp, reference tp": {
        "mesh": "data=2,seq=2,model=2", "strategy": "fsdp_cp_tp", "rules": "fsdp_tp",
    },
    "kto, fsdp_tp, reference fsdp": {
        "mesh": "4x2", "strategy": "fsdp_tp", "rules": "fsdp", "loss": KTO,
    },
}  # fmt: skip
FAST = ["fsdp_tp, reference fsdp"]


@pytest.mark.parametrize("name", full_except(CASES, FAST))
def test_every_mesh_and_reference_give_the_same(name):
    assert_equal(figures(**CASES[name]), figures(loss=CASES[name].get("loss", LOSS)))


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["1x1", "4x2"])
def test_without_its_adapter_a_model_is_its_base(mesh):
    assert_equal(figures(mesh, reference="policy", lora=2), figures(lora=2))


OTHERS = {
    "moe": ("data=2,expert=4", {}), "gpt2": ("4x2", {}), "gemma3": ("4x2", {}),
    "gemma4": ("data=2,expert=4", {}), "gpt_oss": ("data=2,expert=4", {}), "deepseek": ("data=2,expert=4", {}),
    "qwen3_next": ("4x2", {}), "hybrid": ("4x2", {}),
}  # fmt: skip


def test_no_decoder_is_left_out():
    decoders = {name for name in entries.ENTRIES if issubclass(entries.model(name), Decoder)}
    others = {*OTHERS, "transformer", "bert", "gemma3_vision", "gemma4_vision"}
    assert others == decoders, (
        "Bert fills masks; of models that see, gemma3 and gemma4 stand for the decoder"
    )


@pytest.mark.full
@pytest.mark.parametrize("entry", OTHERS)
def test_every_decoder_can_be_tuned(entry):
    mesh, _ = OTHERS[entry]
    assert_equal(figures(mesh, entry=entry), figures(entry=entry))


@pytest.mark.full
def test_experts_are_balanced_as_in_training():
    """The objective has the model's own costs, per pair, and its biases move as after Decoder.loss."""
    rows = {
        name: np.stack([BATCH[name], BATCH[f"rejected_{name}"]], axis=1).reshape(-1, LENGTH)
        for name in ("tokens", "targets")
    }
    weights = {"balance_weight": 0.5, "router_z_weight": 0.25, "balance_rate": 0.125}

    def after(objective, config, **batch):
        layout = layout_on("1x1", "", config, MoE)

        def run(variables, batch):
            model = layout.model.merge(variables)
            result = objective(model, **batch)
            return result, layout.model.buffers(model)

        variables = values(layout, 0)
        program = layout.compile(run, variables, batch, compiler_options=QUICK)
        return program(variables, batch)

    config = config_of("moe", balance_rate=0.125)
    simpo = Objective(Loss("simpo"))
    plain = dataclasses.replace(config, balance_weight=0.0, router_z_weight=0.0)
    (total, pairs, aux), moved = after(simpo, dataclasses.replace(config, **weights), **BATCH)
    (without, _, _), _ = after(simpo, plain, **BATCH)
    (_, _, expected), moved_in_training = after(MoE.loss, plain, **rows)
    means = {name: float(a / b) for name, (a, b) in expected.items()}
    cost = 0.5 * means["balance"] + 0.25 * means["router_z"]
    np.testing.assert_allclose((total - without) / pairs, cost, rtol=1e-4)
    for name in expected.keys() - {"loss"}:
        np.testing.assert_allclose(
            aux[name][0] / aux[name][1], means[name], rtol=1e-5, err_msg=name
        )
    for path, x in paths(moved).items():
        assert np.abs(x).max() > 0
        np.testing.assert_array_equal(x, paths(moved_in_training)[path])


# ---- whole runs ----------------------------------------------------------------------------------

STEPS = 4
FLAGS = (
    "--seq_len=48", f"--steps={STEPS}", "--checkpoint_every=2", "--batch_size=4", "--log_every=1",
    "--learning_rate=0.003", "--warmup_steps=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A model with a chat template, and chats whose chosen answers are in capitals."""
    folder = tmp_path_factory.mktemp("start")
    talker(folder / "model", 48)
    rows = []
    for n in range(24):
        prompt = [{"role": "user", "content": f"What is {n}?"}]
        answers = [
            [{"role": "assistant", "content": text}] for text in (f"IT IS {n}", f"it is {n}")
        ]
        rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def tune(start, monkeypatch, capsys):
    """Runs recipes.dpo in this process; returns its output."""
    monkeypatch.setenv("ZOO_CACHE", str(start / "cache"))

    def run(*flags: str) -> str:
        first = (f"--restore_from={start / 'model'}", f"--dataset={start / 'pairs.jsonl'}")
        argv = [*first, *FLAGS, *flags]
        first_groups = parse(argv, *dpo.NEW) or []
        planned = dpo.main(*(parse(argv, *dpo.defaults(*first_groups)) or []))
        if planned:
            show_plan(planned)
        return capsys.readouterr().out

    return run


def held_out(workdir) -> dict[str, float]:
    *_, last = (workdir / "metrics.jsonl").read_text().splitlines()
    return {k: v for k, v in json.loads(last).items() if k.startswith("held_out_")}


def test_a_run_learns_and_resumes_bit_equal(tune, tmp_path, quick):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    out = tune("--mesh=4x2", f"--workdir={whole}")
    assert "Reference: a frozen copy of model, rules fsdp_tp, " in out
    (copy,) = re.findall(r"rules fsdp_tp, ([\d.]+ kB) per device\.", out)
    assert re.search(rf"gradients .*, optimizer state .*, frozen model {copy}\.", out)
    assert "Training data: 23 pairs, " in out
    ((loss,), *_) = records(whole, "loss")
    assert loss == pytest.approx(np.log(2), rel=1e-6), "the policy is the reference at first"
    shutil.copytree(whole, killed)  # as if it was killed after its first checkpoint
    shutil.rmtree(killed / "checkpoints" / "4")
    out = tune("--mesh=4x2", f"--workdir={killed}")
    assert "Resumes at step 2, from " in out
    assert_bit_equal(state_of(killed, 4), state_of(whole, 4))
    assert records(killed, "loss", "margin", "accuracy") == records(
        whole, "loss", "margin", "accuracy"
    )
    assert held_out(killed) == held_out(whole)
    assert not [path for path in state_of(whole, 4) if path.startswith("frozen")]
    margins = [margin for (margin,) in records(whole, "margin")]
    assert margins[0] == pytest.approx(0, abs=1e-6)
    assert margins[-1] > 0.1
    assert held_out(whole)["held_out_accuracy"] == 1


@pytest.mark.full
def test_stored_numbers_train_the_same_model(tune, tmp_path, quick):
    copy, stored, again = (tmp_path / name for name in ("copy", "stored", "again"))
    tune("--mesh=4x2", f"--workdir={copy}")
    flags = ("--mesh=4x2", "--reference=stored", "--reference_rules=fsdp")
    assert "computes its log-probabilities of 24 pairs once" in tune(*flags, f"--workdir={stored}")
    assert "its log-probabilities are read from" in tune(*flags, f"--workdir={again}")
    assert_bit_equal(state_of(stored, 4), state_of(again, 4))
    for name, value in held_out(stored).items():
        assert value == pytest.approx(held_out(copy)[name], rel=1e-4, abs=1e-5), name
    host = tmp_path / "host"
    out = tune("--mesh=4x2", "--reference=host", f"--workdir={host}")
    assert re.search(r"frozen model [\d.]+ kB \(in the host's memory\)\.", out)
    assert_bit_equal(state_of(host, 4), state_of(copy, 4))
    expected = state_of(copy, 4)
    for path, x in state_of(stored, 4).items():
        if path.startswith("params"):
            np.testing.assert_allclose(x, expected[path], atol=1e-5, err_msg=path)


@pytest.mark.full
def test_labelled_answers_train(tune, start, tmp_path, quick):
    """As many good and bad ones as there are pairs; good answers get likelier."""
    rows = [json.loads(line) for line in (start / "pairs.jsonl").read_text().splitlines()]
    labelled = [
        {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
        for row in rows for name in ("chosen", "rejected")
    ]  # fmt: skip
    file = tmp_path / "labelled.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in labelled))
    flags = ("--mesh=1", "--loss=kto", f"--dataset={file}", f"--workdir={tmp_path / 'w'}")
    assert "Training data: 46 pairs, " in tune(*flags)
    assert held_out(tmp_path / "w")["held_out_margin"] > 0.1
    source = checkpoint.find(str(tmp_path / "w"))
    kept = checkpoint.probe.batch(source.metadata, checkpoint.tokenizer_for("", source))
    assert {*kept} == {"tokens", "targets"}, "it can be published"


@pytest.mark.full
def test_the_reference_of_an_adapter_takes_no_memory_for_weights():
    layout = layout_on("4x2", "fsdp_tp", config_of("transformer", lora_rank=2))
    its = layout_on("4x2", "fsdp_tp", config_of("transformer"))
    layout = dataclasses.replace(layout, model=layout.model._replace(loss=Objective(LOSS, its)))
    step = TrainStep(layout, OPTIMIZER, LR)
    state, example = step.abstract_state(), {name: rows[0] for name, rows in BATCH.items()}
    lowered = step.lower(state, example)
    held = report.bytes_per_device((state, layout.abstract_batch(example)))
    compiled = lowered.compile(compiler_options=dict(QUICK))  # pyright: ignore
    used = report.memory(compiled).argument_size_in_bytes
    base = report.bytes_per_device(its.variables())
    assert held <= used < held + 0.01 * base


@pytest.mark.full
def test_no_logits_of_all_positions_exist():
    """Neither the policy's nor the reference's, by the compiler's memory."""
    temporary = {}
    for words in (4096, 8192):
        config = config_of("transformer", vocab_size=words)
        layout = make_layout(
            Transformer, config, make_mesh("4x2"), "fsdp_tp", batch_size=4, seq_len=512
        )
        its = layout_on("4x2", "fsdp", config)
        layout = dataclasses.replace(layout, model=layout.model._replace(loss=Objective(LOSS, its)))
        example = {name: np.zeros(512, np.int32) for name in BATCH}
        state = layout.variables() | {"frozen": its.variables()}
        program = layout.compile(
            lambda state, batch, layout=layout: gradients(layout, state, batch),
            state, layout.abstract_batch(example), compiler_options=QUICK,
        )  # fmt: skip
        temporary[words] = report.memory(program).temp_size_in_bytes
    more = temporary[8192] - temporary[4096]
    answers, positions, words = 2, 512, 4096  # of a device; more words
    assert more < 0.5 * answers * positions * words / 2 * 4


@pytest.mark.full
def test_a_tuned_model_is_published_with_its_own_command(tune, tmp_path, quick):
    tune("--mesh=1", "--steps=1", f"--workdir={tmp_path / 'w'}")
    source, target = tmp_path / "w", tmp_path / "published"
    flags = [f"--source={source}", f"--target={target}", "--licence=mit", "--mesh=1"]
    publish.main(*(parse(flags, publish.Publish()) or []))
    card = (target / "README.md").read_text()
    assert re.search("`python -m recipes.dpo --mesh=1 .*--restore_from=path/to/model", card)
    assert re.search(r"Held out \| accuracy [\d.]+, kl .*reward_rejected [-\d.e]+ \|", card)
    kept = json.loads((target / "probe.json").read_text())
    assert {*kept["batch"]} == {"tokens", "targets"}


@pytest.fixture
def planned(tune, monkeypatch, tmp_path):
    """Returns what --plan has estimated."""
    estimates, frozen = [], answer.with_frozen
    own = answer.estimate

    def keep(function):
        return lambda *arguments: estimates.append(function(*arguments)) or estimates[-1]

    monkeypatch.setattr(answer, "estimate", keep(own))
    monkeypatch.setattr(answer, "with_frozen", keep(frozen))

    def run(*flags: str):
        out = tune("--mesh=4x2", "--plan", f"--workdir={tmp_path / 'w'}", *flags)
        assert not (tmp_path / "w").exists()
        return out, estimates[-1]

    return run


def test_a_reference_needs_a_host_with_memory(tune, monkeypatch, tmp_path):
    monkeypatch.setattr(offload, "has_host_memory", lambda _: False)
    message = (
        "--reference=host needs devices with the memory kind 'pinned_host'.*; use --reference=copy"
    )
    with pytest.raises(UserError, match=message):
        tune("--mesh=1", "--reference=host", f"--workdir={tmp_path / 'w'}")


def test_a_plan_counts_both_models(planned):
    """By value: a whole copy of the weights on each device, under rules of its own, and its FLOPs."""
    _, alone = planned("--loss=simpo")
    assert "frozen model" not in alone.memory
    out, both = planned("--reference_rules=dp")
    parameters = sum(x.size for x in jax.tree.leaves(alone.layout.model.shapes["params"]))
    assert both.memory["frozen model"] == 4 * parameters
    assert f"frozen model {report.size(4 * parameters)}; this fits in" in out
    assert both.peak - alone.peak >= 4 * parameters
    assert both.memory["parameters"] == alone.memory["parameters"] < 4 * parameters
    assert both.useful == pytest.approx(4 / 3 * alone.useful)
    out, _ = planned("--reference_rules=dp", "--reference_dtype=bfloat16")
    assert "Reference: a frozen copy of model, rules dp, " in out
    _, halves = planned("--reference_rules=fsdp")
    assert halves.memory["frozen model"] == pytest.approx(parameters, rel=0.05), "split in four"
    out, host = planned("--reference_rules=dp", "--reference=host")
    assert "frozen copy of model in the host's memory, rules dp, " in out
    assert host.host == {"frozen model": 4 * parameters}
    assert "frozen model" not in host.memory
    _, stored = planned("--reference=stored")
    assert stored.memory == alone.memory, "the step has no reference"
    _, adapter = planned("--lora_rank=2")
    assert "frozen model" not in adapter.memory, "it shares the weights"
    assert adapter.useful > 1.4 * planned("--lora_rank=2", "--loss=simpo")[1].useful


MISTAKES = {
    "--beta=0": "--beta=0 must be ≥ 1e-06",
    "--loss=orpo --reference=copy": "--reference=copy is for a reference, which --loss=orpo lacks",
    "--loss=ipo --label_smoothing=0.1": "--label_smoothing=0.1 is for dpo and simpo, not --loss=ipo",
    "--loss=orpo --length_normalized=false": "--length_normalized=false gives --loss=orpo odds of",
    "--restore_from=mlp.digits": "--restore_from=mlp.digits is a 'mlp' model, which writes no answers",
    "--bad_weight=2": "--good_weight and --bad_weight are for kto, not --loss=dpo",
    "--reference_rules=no": "--reference_rules=no is not a strategy of this entry",
    "--mesh=data=4,pipe=2 --pipe_microbatches=3": "--pipe_microbatches=3 does not divide the",
    "--dataset=missing.jsonl": "--dataset=missing.jsonl does not exist",
    "--tokenizer=bytes": "must be the tokenizer of",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes_are_one_line(flags, tune, tmp_path):
    with pytest.raises((UserError, ValueError)) as error:
        tune("--mesh=1", *flags.split(), f"--workdir={tmp_path / 'w'}")
    assert MISTAKES[flags] in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "w").exists()
