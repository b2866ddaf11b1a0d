"""Flags and meshes: a user error is one line, raised before anything is created."""

import dataclasses
import os

import jax
import pytest

import recipes
from recipes import generate, transformer
from recipes.common.runtime import accelerators, mesh
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import GROUPS, SYNONYMS, Run, flag, parse, usage
from recipes.common.runtime.mesh import describe, make_mesh

pytestmark = pytest.mark.promise("user-errors")


@dataclasses.dataclass(frozen=True)
class Flags:
    fast: bool = flag(False, "Go fast.", group="model")
    kind: str = flag("a", "Which kind.", group="data", choices=["a", "b"])
    long: str = flag("", "Which, or none.", group="data", choices=["", "WarmUps", "other"])
    set: tuple[str, ...] = flag((), "Some; may be repeated.", group="data")


def test_flags_become_fields_of_their_types():
    run, flags = parse(
        ["--steps=7", "--learning_rate=1e-2", "--fast", "--set=a=1", "--kind", "b", "--set=c"],
        Run(), Flags(),
    )  # fmt: skip
    assert flags.set == ("a=1", "c")
    assert (run.steps, run.learning_rate, flags.fast, flags.kind) == (7, 0.01, True, "b")
    assert run == dataclasses.replace(Run(), steps=7, learning_rate=0.01)
    assert parse([], Run(steps=3), Flags()) == [Run(steps=3), Flags()]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-m recipes.transformer", True),
        ("-X dev -m recipes.dpo --mesh=1x1 --steps=3", True),
        ("-m recipes.bench cpu", True),
        ("-m recipes.transformer --mesh=data=1,model=2", False),
        ("-m recipes.transformer --mesh 1x1", False),  # not read
        ("-m recipes.bench meshes", False),
        ("-m recipes.prove", False),
        ("-m pytest recipes.dpo", False),
        ("recipes/dpo.py -m", False),
    ],
)
def test_recipes_on_one_cpu_device_start_again_with_huge_pages(words, expected, monkeypatch):
    """Once; other programs don't, nor where the variable, or a number of devices, is set."""
    argv = ["python", *words.split()]
    read = monkeypatch.setattr
    read(recipes.pathlib.Path, "exists", lambda path: True)
    read(recipes.pathlib.Path, "read_text", lambda path: "always [madvise] never")
    read(recipes.pathlib.Path, "glob", lambda path, pattern: [])
    read(recipes.os, "confstr", lambda name: "glibc 2.36")
    read(recipes.sys, "platform", "linux")
    wanted = {"A": "b", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if expected else {}
    assert recipes.huge_pages(argv, {"A": "b"}) == wanted
    for name in ("GLIBC_TUNABLES", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):
        assert recipes.huge_pages(argv, {name: "x"}) == {}
    read(recipes.os, "confstr", lambda name: "glibc 2.31")
    assert recipes.huge_pages(argv, {}) == {}


def test_choices_may_be_in_any_case():
    flags = parse(["--kind=B", "--long=WARMUPS"], Flags())[0]
    assert (flags.kind, flags.long) == ("b", "WarmUps")
    assert parse(["--long="], Flags())[0].long == ""


def test_synonyms_name_flags_that_exist():
    """Flags of the training recipes and of recipes.generate."""
    groups = (*transformer.NEW, generate.Generate())
    fields = {field.name for group in groups for field in dataclasses.fields(group)}
    assert {*SYNONYMS.values()} <= fields
    assert not SYNONYMS.keys() & fields


def test_help_shows_every_flag_with_its_default_and_unit():
    text = usage("Doc.", Run(steps=9), Flags())
    for group in (Run(), Flags()):
        for field in dataclasses.fields(group):
            assert f"--{field.name}=" in text
            assert field.metadata["help"] in text
    assert "--steps=9" in text
    assert parse(["--help"], Run()) is None


def test_help_is_in_groups_each_line_a_phrase():
    text = usage("Doc.", Run(), Flags())
    headings = [line[:-1] for line in text.splitlines() if line.endswith(":")]
    assert headings == list(GROUPS)
    assert text.index("data:") < text.index("--kind=a") < text.index("model:")
    assert text.index("model:") < text.index("--fast=False") < text.index("optimizer:")
    for field in dataclasses.fields(Run):
        help = field.metadata["help"]
        assert help[0].isupper(), field.name
        assert help.endswith("."), field.name


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--step=7"], "--step is not a flag; did you mean --steps?"),
        (["--lr=3"], "--lr is not a flag; did you mean --learning_rate?"),
        (["--LR=3"], "--LR is not a flag; did you mean --learning_rate?"),
        (["--batch-size=3"], "--batch-size is not a flag; did you mean --batch_size?"),
        (["--bs=3"], "--bs is not a flag; did you mean --batch_size?"),
        (["--output_dir=x"], "--output_dir is not a flag; did you mean --workdir?"),
        (["--rate=3"], "--rate is not a flag; did you mean --learning_rate?"),
        (["--ce=3"], "--ce is not a flag; did you mean --checkpoint_every?"),
        (["--vocab_size=3"], "--vocab_size is not a flag; --help lists the flags"),  # batch_size
        (["--zzz=7"], "--zzz is not a flag; --help lists the flags"),
        (["seven"], "'seven' is not a flag; write flags as --name=value"),
        (["--steps=x"], "--steps=x is not a whole number; try 100"),
        (["--steps=1.5"], "--steps=1.5 is not a whole number; try 100"),
        (["--steps=-1"], "--steps=-1 must be ≥ 0; try 100"),
        (["--batch_size=0"], "--batch_size=0 must be ≥ 1; try 32"),
        (["--learning_rate=fast"], "--learning_rate=fast is not a number; try 0.001"),
        (["--learning_rate=nan"], "--learning_rate=nan is not a finite number; try 0.001"),
        (["--seed=9999999999"], "--seed=9999999999 must be ≤ 2147483647; try 0"),
        (["--kind=c"], "--kind=c is not one of a, b"),
        (["--long=warm2ups"], "--long=warm2ups is not one of WarmUps, other"),  # another number
        (["--long=warmup"], "--long=warmup is not one of WarmUps, other; did you mean WarmUps?"),
        (["--steps"], "Missing value for flag --steps; --help lists the flags"),
        (["--steps=" + "9" * 5000], f"--steps={'9' * 50} is not a whole number; try 100"),
        (["--fast=perhaps"], "--fast=perhaps is not a boolean; use true or false"),
        (["--", "--steps=3"], "'--steps=3' is not a flag; write flags as --name=value"),
    ],
)
def test_bad_flags(argv, message):
    with pytest.raises(UserError) as caught:
        parse(argv, Run(), Flags())
    assert str(caught.value) == message


# ---- accelerators --------------------------------------------------------------------------------

GPU = 'this machine has an NVIDIA GPU ({}) that JAX can\'t use; run pip install -U "jax[cuda13]" (with a driver older than 580: "jax[cuda12]"); or add --platform=cpu to use simulated CPU devices'
TPU = 'this machine has a TPU ({}) that JAX can\'t use; run pip install -U "jax[tpu]"; or add --platform=cpu to use simulated CPU devices'
PCI = {"sys/bus/pci/devices/0000:00:04.0/vendor": "0x1ae0\n"}  # of Google


@pytest.mark.parametrize(
    ("files", "environment", "message"),
    [
        ({}, {}, ""),
        ({"dev/nvidiactl": ""}, {}, GPU.format("/dev/nvidiactl")),
        ({"dev/nvidia0": ""}, {"CUDA_VISIBLE_DEVICES": "0,1"}, GPU.format("/dev/nvidia0")),
        ({"proc/driver/nvidia/version": "NVRM"}, {}, GPU.format("/proc/driver/nvidia/version")),
        ({"usr/lib/wsl/lib/libcuda.so.1": ""}, {}, GPU.format("/usr/lib/wsl/lib/libcuda.so.1")),
        ({"dev/nvidiactl": ""}, {"CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"dev/nvidiactl": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}, ""),
        ({"dev/nvidiactl": ""}, {"NVIDIA_VISIBLE_DEVICES": "void"}, ""),
        ({"dev/accel0": "", "dev/accel1": ""}, {}, TPU.format("/dev/accel0")),
        ({"dev/vfio/0": "", "dev/vfio/vfio": ""} | PCI, {}, TPU.format("/dev/vfio/0")),
        ({"dev/vfio/0": ""}, {}, ""),  # another device that is passed through
        ({"dev/vfio/vfio": ""} | PCI, {}, ""),
        ({"dev/accel/accel0": ""}, {}, ""),  # the neural processor of a laptop
        ({"dev/dri/card0": ""}, {}, ""),
    ],
)  # fmt: skip
def test_an_accelerator_that_jax_cannot_use_is_found(files, environment, message, tmp_path):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert accelerators.unused(tmp_path, environment, lambda _: False) == message


@pytest.mark.parametrize(
    ("sign", "package", "what"),
    [
        ("nvidiactl", "jax-cuda13-plugin", "check the driver with nvidia-smi: CUDA 13 needs 580 or"),
        ("nvidiactl", "jax-cuda12-plugin", "check the driver with nvidia-smi"),
        ("accel0", "libtpu", "check that no other process holds it"),
    ],
)  # fmt: skip
def test_what_is_installed_already_is_not_advised_again(sign, package, what, tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / sign).touch()
    message = accelerators.unused(tmp_path, {}, lambda name: name == package)
    assert f"; {package} is installed, so {what}" in message
    assert "pip install" not in message


@pytest.fixture
def with_gpu(monkeypatch):
    """A machine with a GPU, whose JAX has only CPUs and was not asked for them."""
    monkeypatch.setattr(accelerators, "unused", lambda: "this machine has a GPU")
    monkeypatch.setattr(accelerators, "_must_use", False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    jax.config.update("jax_platforms", None)
    yield
    jax.config.update("jax_platforms", "cpu")


RECIPES = ["transformer", "mlp", "vit", "dot_relu_dot", "generate", "evaluate"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_recipe_ignores_an_accelerator(recipe, with_gpu, inside, tmp_path):
    workdir = [] if recipe in ("generate", "evaluate") else [f"--workdir={tmp_path / 'w'}"]
    done = inside(f"recipes.{recipe}", "--mesh=4x2", *workdir)
    assert (done.code, done.out, done.err) == (2, "", "error: this machine has a GPU\n")
    assert not (tmp_path / "w").exists()


def test_cpus_are_used_if_they_are_asked_for(with_gpu, inside, tmp_path):
    flags = ("--mesh=4x2", f"--workdir={tmp_path / 'w'}", "--plan")
    assert inside("recipes.dot_relu_dot", *flags, "--platform=cpu").code == 0
    jax.config.update("jax_platforms", "cpu,cuda")  # as by JAX_PLATFORMS
    assert inside("recipes.dot_relu_dot", *flags).code == 0


def test_python_code_and_other_commands_may_use_cpus(with_gpu):
    assert make_mesh("4x2").size == 8


# ---- meshes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("8", {"data": 8}),
        ("4x2", {"data": 4, "model": 2}),
        ("1x1", {"data": 1, "model": 1}),
        ("2x2x2", {"data": 2, "fsdp": 2, "model": 2}),
        ("data=2,model=4", {"data": 2, "model": 4}),
        ("fsdp=8", {"fsdp": 8}),
        ("data=4,expert=2", {"data": 4, "expert": 2}),
    ],
)
def test_a_mesh_is_what_it_says(text, axes):
    made = make_mesh(text)
    assert dict(made.shape) == axes
    assert set(made.axis_types) == {jax.sharding.AxisType.Explicit}
    assert mesh.parse(describe(axes)) == axes


@pytest.mark.parametrize(
    "text", ["model=2,data=2,fsdp=2", "fsdp=2,model=2,data=2", "data=2,fsdp=2,model=2"]
)
def test_order_of_names_does_not_matter(text):
    assert make_mesh(text) == make_mesh("2x2x2")


def test_axes_are_ordered_outermost_first_and_other_names_follow():
    axes = mesh.parse("model=2,mine=3,expert=2,seq=2,pipe=2,fsdp=2,data=2,b=1")
    assert list(axes) == ["data", "fsdp", "pipe", "seq", "expert", "model", "mine", "b"]
    assert axes["mine"] == 3


def test_stages_are_outermost_if_written_first():
    assert list(mesh.parse("pipe=2,model=2,data=2")) == ["pipe", "data", "model"]
    assert list(mesh.parse("model=2,pipe=2,data=2")) == ["data", "pipe", "model"]


def test_axes_may_share_a_ring_of_a_tpu_slice(monkeypatch):
    """Arranges meshes that jax.make_mesh refuses, such as 16x16 on chips wired 4x8x8."""
    axes = {"data": 2, "fsdp": 2, "model": 2}
    plain = mesh.arrange(axes, jax.devices())

    def refuse(*_, **__):
        raise NotImplementedError("the size of each axis must be a product of some physical ones")

    monkeypatch.setattr(jax, "make_mesh", refuse)
    assert mesh.arrange(axes, jax.devices()) == plain


def test_no_mesh_puts_all_devices_on_data():
    assert dict(make_mesh().shape) == {"data": 8}
