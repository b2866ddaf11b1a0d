"""Flags without effect are refused, in every command that takes them."""

import dataclasses
import json

import pytest

from data import DataError, pairs
from data.tokenizer import BYTES
from recipes import distill, evaluate, generate, meshes, transformer
from recipes.common.distillation.student_loss import Distillation
from recipes.common.language import messages
from recipes.common.language.sample import Sample
from recipes.common.preference.losses import Loss
from recipes.common.runtime import Run, UserError, make_mesh
from recipes.common.sharding import make_layout
from recipes.evaluate import Evaluate, check_used
from recipes.generate import Generate
from recipes.instruments.explore import command as explore
from recipes.instruments.plan import command as plan
from zoo.llama_relatives import Config, Transformer

pytestmark = pytest.mark.promise("user-errors")

TASKS, TEXTS = {"tasks": "arc_easy"}, {"dataset": "a.txt"}
PICTURES = {"labels": "cat,dog", "dataset": "pets"}
UNUSED = [  # entry, task, flags of which the last has no effect
    ("transformer", "", TEXTS | {"limit": 3.0}),
    ("transformer", "", TEXTS | {"num_fewshot": 2}),
    ("transformer", "", TEXTS | {"apply_chat_template": True}),
    ("transformer", "", TEXTS | {"include_path": "mine"}),
    ("transformer", "", TEXTS | {"templates": "a {}"}),
    ("transformer", "", TEXTS | {"image_column": "picture"}),
    ("transformer", "", TEXTS | {"label_column": "class"}),
    ("transformer", "", TASKS | {"part": "held_out"}),
    ("transformer", "", TASKS | {"pack": False}),
    ("bert", "fill", TEXTS | {"pair_column": "second"}),
    ("bert", "classify", TEXTS | {"pack": False}),
    ("siglip", "", PICTURES | {"text_column": "caption"}),
    ("siglip", "", PICTURES | {"seq_len": 8}),
]
USED = [
    ("transformer", "", TEXTS | {"part": "held_out", "pack": False, "text_column": "body"}),
    ("transformer", "", TASKS | {"limit": 3.0, "num_fewshot": 0, "seq_len": 64}),
    ("bert", "classify", TEXTS | {"label_column": "class", "pair_column": "second"}),
    ("siglip", "", PICTURES | {"templates": "a {}", "label_column": "class"}),
]


@pytest.mark.parametrize(("entry", "task", "flags"), UNUSED, ids=str)
def test_evaluate_names_the_flag_that_has_no_effect(entry, task, flags):
    *_, (name, _) = flags.items()
    with pytest.raises(UserError, match=rf"^--{name}="):
        check_used(Evaluate(**flags), entry, task)


@pytest.mark.parametrize(("entry", "task", "flags"), USED, ids=str)
def test_evaluate_takes_flags_that_have_one(entry, task, flags):
    check_used(Evaluate(**flags), entry, task)


@pytest.mark.parametrize("flags", [{"top_k": 5}, {"top_p": 0.9}, {"seed": 3}], ids=str)
def test_the_likeliest_token_takes_no_flags_of_samples(flags):
    (name,) = flags
    with pytest.raises(UserError, match=rf"^--{name}="):
        generate.sampling(Generate(temperature=0.0, **flags), BYTES)
    assert generate.sampling(Generate(**flags), BYTES).temperature > 0


def test_generate_batches_prompts_of_a_file_alone():
    with pytest.raises(UserError, match=r"^--batch_size=4"):
        generate.rows_to_answer(Generate(prompt="def", batch_size=4))


def test_generate_makes_messages_of_prompts_alone(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    with pytest.raises(UserError, match=r"^--chat=true is for prompts"):
        generate.rows_to_answer(Generate(prompts=str(file), chat=True))


def test_distill_makes_no_new_student_beside_a_trained_one():
    with pytest.raises(UserError, match=r"^--student="):
        distill.entry_and_size(Run(restore_from="x"), Distillation(student="moe.tiny"))


def test_evaluate_names_columns_that_nothing_uses(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a text of several words", "author": "me"}\n' * 8)
    evaluate.load(str(file), Evaluate(dataset=str(file)), 16, BYTES)
    assert "'author'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("group", "flags"),
    [
        *((Sample(sample_bytes=0), {name: value}) for name, value in
          {"prompt": "a", "chat": True, "temperature": 0.0, "sample_rules": "tp"}.items()),
        *((Distillation(alpha=0.0), {name: value}) for name, value in
          {"tau": 2.0, "divergence": "js", "top_k": 4, "teacher_rules": "tp", "teacher_dtype": "bfloat16"}.items()),
        *((Loss(loss=kind), {"target_margin": 0.5}) for kind in ("dpo", "ipo", "orpo", "kto")),
    ],
    ids=str,
)  # fmt: skip
def test_flags_of_what_is_left_out_are_refused(group, flags):
    (name,) = flags
    check(group)
    with pytest.raises(UserError, match=rf"^--{name}="):
        check(dataclasses.replace(group, **flags))


def check(group):
    """What a recipe asks of a group before it begins."""
    if isinstance(group, Sample):
        mesh = make_mesh("1")
        group.check(Transformer, make_layout(Transformer, Config.tiny(), mesh), BYTES)


def test_as_chat_is_for_texts(tmp_path):
    file = tmp_path / "pairs.jsonl"
    answers = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    row = {"prompt": [{"role": "user", "content": "Hi"}], **answers}
    file.write_text(json.dumps(row) + "\n")
    for dataset in (str(file), "stdlib"):
        with pytest.raises(DataError, match=r"^--as_chat is for texts"):
            pairs.load(dataset, as_chat=True)


@pytest.mark.parametrize(
    ("main", "flags", "name"),
    [
        (explore.main, explore.Flags(from_="runs/x", entry="moe"), "entry"),
        (explore.main, explore.Flags(from_="runs/x", mesh="8"), "mesh"),
        (meshes.main, meshes.Flags(entry="mlp", meshes="1", seq_len=64), "seq_len"),
        (plan.main, plan.Flags(entry="vit", seq_len=64), "seq_len"),
    ],
    ids=["explore entry", "explore mesh", "meshes", "plan"],
)
def test_instruments_refuse_what_they_would_not_use(main, flags, name):
    with pytest.raises(UserError, match=rf"^--{name}="):
        main(flags)


@pytest.mark.parametrize(
    ("mesh", "named"),
    [
        ("1", ["context", "pipeline"]),
        ("data=1,seq=2", ["pipeline"]),
        ("data=1,pipe=2", ["context"]),
    ],
)
def test_flags_of_what_a_mesh_does_not_split_are_named(mesh, named):
    flags = dataclasses.replace(transformer.MODEL, context="ring", pipeline="gpipe")
    layout = make_layout(Transformer, Config.tiny(), make_mesh(mesh))
    lines = messages.without_effect(layout, flags)
    assert [line.partition("=")[0] for line in lines] == [f"--{name}" for name in named]
    assert not messages.without_effect(layout, transformer.MODEL)
