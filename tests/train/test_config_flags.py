"""Flags made from the fields of a Config, and --set."""

import dataclasses
import json
import math
import types

import jax
import pytest

from recipes import deepseek, dot_relu_dot, mlp, transformer, vit
from recipes.common import checkpoint
from recipes.common.flags.config_flags import changed_setting, comment, configure, read
from tests.support.quick import quick as quick
from tests.support.runs import TINY, records
from zoo.core.layers import AttentionType
from zoo.gpt_oss import Config as GptOss
from zoo.llama_relatives import Config
from zoo.options.rope_scaling import Linear, Yarn

pytestmark = pytest.mark.promise("user-errors")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
ATTENTION = {
    **{"dtype": "", "matmul": "", "matmul_backward": "", "matmul_emulate": False},
    **{"reduce_dtype": "", "remat": ""},
    **{"lora_rank": 0, "lora_alpha": 0.0, "lora_targets": "all", "base": "", "set": ()},
}
DECODER = ATTENTION | {"size": "", "context": "auto", "pipeline": "1f1b", "pipe_microbatches": 0}
DECODER |= {"pipe_rounds": 2}
EXPERTS = {
    **{"num_experts": 0, "experts_per_token": 0, "capacity": "", "balance_weight": -1.0},
    **{"balance_rate": -1.0, "mtp_depth": -1, "mtp_weight": -1.0},
}


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        (transformer, DECODER),
        (deepseek, DECODER | EXPERTS),
        (vit, ATTENTION | {"size": "", "image_size": 0, "patch": 0}),
        (mlp, {"embed": 0, "hidden": 0, "depth": 0, "set": ()}),
        (dot_relu_dot, {"embed": 0, "hidden": 0, "set": ()}),
    ],
)
def test_names_defaults_and_types(recipe, flags):
    """Users and saved runs rely on them."""
    assert vars(recipe.MODEL) == flags
    for name, default in flags.items():
        assert type(getattr(recipe.MODEL, name)) is type(default), name


@dataclasses.dataclass(frozen=True)
class Commented:
    """A Config whose fields have comments in all the places where ruff puts them."""

    first: int  # D, width of "x"
    # Two lines
    # above.
    second: int
    third: tuple[str, ...] = (
        "a long value",
        "that is wrapped",
    )  # after; "": none


def test_comments_become_help_texts():
    assert comment(Commented, "first") == "Width of x"
    assert comment(Commented, "second") == "Two lines above"
    assert comment(Commented, "third") == "After; empty: none"
    assert comment(GptOss, "num_experts") == "Experts of a layer", "as moe.Config says"
    assert comment(GptOss, "unroll").startswith("Layers per scan iteration"), "as Compute says"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("loss_chunk", "64", 64),
        ("pipe_microbatches", "0", 0),
        ("norm_eps", "1e-6", 1e-6),
        ("qk_norm", "True", True),
        ("attention", "xla", "xla"),
        ("sliding_window", "5", 5),
        ("sliding_window", "none", None),
        ("rope_scaling", '["linear", 8]', ("linear", 8)),
        ("layer_kinds", "[[5, 1e4, null]]", ((5, 1e4, None),)),
        # As in a config.json.
        ("rope_scaling", json.dumps(YARN), Yarn(4.0, 32.0, 1.0, 16, True, 0.1 * math.log(4) + 1)),
        ("rope_scaling", '{"type": "linear", "factor": 8}', Linear(8.0)),
        (
            "layer_kinds",
            f"[[null, 1e4, {json.dumps(YARN | {'beta_fast': 8})}]]",
            ((None, 1e4, Yarn(4.0, 8.0, 1.0, 16, True, 0.1 * math.log(4) + 1)),),
        ),
    ],
)
def test_values_have_the_type_of_their_field(name, text, value):
    found = read(Config, name, text)
    assert (found, type(found)) == (value, type(value))


def test_structured_fields_become_what_the_model_computes_with():
    texts = ('layer_kinds=[[5, 1e4, null], [null, 1e4, ["linear", 4]]]', "unroll=2")
    flags = dataclasses.replace(transformer.MODEL, set=texts)
    config = configure(Config.tiny(), flags, jax.devices()[0])
    assert config.layer_kinds == (AttentionType(5, 1e4), AttentionType(None, 1e4, Linear(4)))
    assert config.unroll == 2


def test_a_setting_that_a_resumed_run_leaves_out_has_changed():
    """Or adds, or gives another value; what only says how to compute the model may change."""
    eps = ["norm_eps=0.01"]
    assert changed_setting(eps, []) == ("set=norm_eps=", "0.01")
    assert changed_setting([], eps) == ("set=norm_eps=0.01", "")
    assert changed_setting(eps, ["norm_eps=0.1"]) == ("set=norm_eps=0.1", "0.01")
    assert changed_setting([*eps, "loss_chunk=8"], [*eps, "unroll=2"]) is None


@pytest.mark.full
def test_a_run_with_fields_that_are_set(inside, quick, book, tmp_path):
    """They are reported, saved and resumed; only those of Compute may change."""
    run = [*TINY, book, "--mesh=2", f"--workdir={tmp_path / 'run'}", "--set=norm_eps=0.01"]
    done = inside("recipes.transformer", *run, "--set=loss_chunk=16", "--steps=2")
    assert done.code == 0, done.err
    assert done.out.startswith("set: norm_eps=0.01, loss_chunk=16\n")
    source = checkpoint.find(str(tmp_path / "run"))
    assert source.metadata["flags"]["set"] == ["norm_eps=0.01", "loss_chunk=16"]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["flags"]["set"] == ["norm_eps=0.01", "loss_chunk=16"]
    assert checkpoint.config_of(source).norm_eps == 0.01

    again = inside("recipes.transformer", *run, "--set=loss_chunk=32", "--steps=3")
    assert again.code == 0, again.err
    config = checkpoint.config_of(checkpoint.find(str(tmp_path / "run")))
    assert (config.norm_eps, config.loss_chunk) == (0.01, 32)
    assert [step for (step,) in records(tmp_path / "run", "step")][-1] == 3

    other = inside("recipes.transformer", *run[:-1], "--set=norm_eps=0.1", "--steps=4")
    assert (other.code, other.out) == (2, "")
    assert "--set=norm_eps=0.1 must match the original run, 0.01" in other.err

    flags = (
        f"--restore_from={tmp_path / 'run'}",
        "--mesh=1",
        "--max_new_tokens=2",
        "--temperature=0",
    )
    plain = inside("recipes.generate", *flags, "--prompt=def ")
    changed = inside("recipes.generate", *flags, "--prompt=def ", "--set=norm_eps=1e9")
    assert (plain.code, changed.code) == (0, 0), changed.err
    assert "set: norm_eps=1e9" in changed.out
    wrong = inside("recipes.generate", *flags, "--prompt=def ", "--set=num_kv_heads=3")
    assert wrong.code == 2
    assert "num_heads=16 is not divisible by num_kv_heads=3" in wrong.err


@pytest.mark.parametrize(
    ("platform", "changes", "setting", "unroll"),
    [
        ("gpu", {"remat": "none", "num_layers": 12}, (), 12),
        ("gpu", {"remat": "none", "num_layers": 80}, (), 1),  # compiles for minutes
        ("gpu", {"remat": "full", "num_layers": 12}, (), 1),  # XLA would keep what remat drops
        ("gpu", {"remat": "none", "num_layers": 12}, ("unroll=1",), 1),
        ("gpu", {"remat": "none", "num_layers": 12, "unroll": 4}, (), 4),  # a checkpoint's
        ("tpu", {"remat": "none", "num_layers": 12}, (), 1),
        ("cpu", {"remat": "none", "num_layers": 12}, (), 1),
    ],
)
def test_gpus_unroll_layers_without_remat(platform, changes, setting, unroll):
    device = types.SimpleNamespace(platform=platform, device_kind=platform)
    flags = types.SimpleNamespace(set=setting)
    config = dataclasses.replace(Config.tiny(), **changes)
    assert configure(config, flags, device).unroll == unroll
