"""--matmul and --weights=int8 as users run them."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from recipes.common.flags.config_flags import check_matmul
from recipes.common.generation.int8_weights import to_int8
from recipes.common.mesh import make_mesh
from recipes.common.report import kernel
from recipes.common.runtime.errors import UserError
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout
from tests.support.models import random_variables
from tests.support.quick import quick as quick
from tests.support.runs import TINY, records, state_of
from zoo.llama_relatives import Config, Transformer

pytestmark = pytest.mark.promise("low-precision")

CPU = SimpleNamespace(platform="cpu", device_kind="cpu")


def accelerator(kind: str) -> SimpleNamespace:
    return SimpleNamespace(platform="tpu" if "TPU" in kind else "gpu", device_kind=kind)


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite", "NVIDIA A100-SXM4-80GB"])
def test_a_device_without_float8_needs_leave_to_emulate(kind):
    with pytest.raises(UserError, match=f"lacks|{kind}") as error:
        check_matmul("fp8", accelerator(kind), emulate=False)
    assert kind in str(error.value)
    assert "H100" in str(error.value)
    assert "add --matmul_emulate" in str(error.value)
    with pytest.raises(UserError) as error:  # recipes.plan, which emulates nothing
        check_matmul("fp8", accelerator(kind))
    assert str(error.value).endswith("use --matmul=int8")
    check_matmul("fp8", accelerator(kind), emulate=True)
    check_matmul("int8", accelerator(kind), emulate=False)


def test_devices_with_float8_and_the_cpu_need_none():
    for device in (CPU, accelerator("NVIDIA H100 80GB HBM3"), accelerator("TPU7x")):
        check_matmul("fp8", device)


def test_the_report_says_where_numbers_are_multiplied():
    def line(matmul, device, backward=""):
        shape = SimpleNamespace(matmul=matmul, matmul_backward=backward)
        mesh = SimpleNamespace(devices=np.array([device]))
        return kernel.matmul(SimpleNamespace(shape=shape, mesh=mesh))

    assert line("", CPU) == []
    assert line("int8", accelerator("TPU v5 lite"), "bfloat16") == [
        "matmul: layers in int8, their gradients in bfloat16"
    ]
    assert line("fp8", accelerator("TPU v5 lite"))[0].endswith(
        "emulated: numbers are rounded, and multiplied in bfloat16"
    )


@pytest.mark.full
def test_checkpoints_continue_in_any_precision(inside, quick, book, tmp_path):
    """A run in fp8 goes on in float32 on another mesh; a checkpoint in fp8 has float32 arrays."""
    here, losses = f"--workdir={tmp_path}", {}
    steps = [("fp8", 1, "4x2"), ("", 2, "8")]
    for matmul, count, mesh in steps:
        given = (f"--matmul={matmul}", f"--steps={count}", f"--mesh={mesh}", "--log_every=1")
        done = inside("recipes.transformer", *TINY, book, here, *given)
        assert (done.code, done.err) == (0, "")
        emulated = f"matmul: layers in {matmul}, their gradients in {matmul}, emulated"
        assert (emulated in done.out) == bool(matmul)
        assert ("matmul:" in done.out) == bool(matmul)
        losses |= dict(records(tmp_path, "step", "loss"))
        if matmul:
            found = state_of(tmp_path, count)
            assert {str(x.dtype) for path, x in found.items() if "params" in path} == {"float32"}
            assert not [path for path in found if path.endswith("_scale")]
    assert sorted(losses) == [1, 2]


@pytest.mark.full
def test_int8_weights_keep_the_published_model_s_perplexity(inside, quick):
    """On every mesh that evaluates; and the weights take half the bytes of bfloat16's."""
    given = (
        "--restore_from=transformer.stdlib_3m",
        "--dataset=zoo/checkpoints/mlp.digits/README.md",
    )
    loss = {}
    for weights, mesh in (("", "1x1"), ("int8", "1x1"), ("int8", "4x2")):
        done = inside("recipes.evaluate", *given, f"--weights={weights}", f"--mesh={mesh}")
        assert (done.code, done.err) == (0, "")
        loss[weights, mesh] = float(re.findall(r"loss ([\d.]+)", done.out)[0])
    exact = loss["", "1x1"]
    for rounded in (loss["int8", "1x1"], loss["int8", "4x2"]):
        assert abs(np.expm1(rounded - exact)) < 0.005
    assert loss["int8", "4x2"] == pytest.approx(loss["int8", "1x1"], abs=2e-4)


def test_int8_weights_take_half_the_bytes_of_bfloat16():
    layout = make_layout(Transformer, Config.tiny(), make_mesh("4x2"), "fsdp_tp")
    variables = random_variables(layout)
    rounded, found = to_int8(Transformer, layout, variables)
    assert rounded.config.matmul == "int8_weights"
    exact, stored = paths(variables["params"]), paths(found["params"])
    matrices = [path for path in exact if f"{path}_scale" in stored]
    assert len(matrices) == 7
    for path in matrices:
        assert stored[path].nbytes == exact[path].size
        assert stored[path].sharding.spec == exact[path].sharding.spec
        assert stored[f"{path}_scale"].size <= exact[path].size / 16
    for path in exact.keys() - {*matrices}:
        np.testing.assert_array_equal(stored[path], exact[path])
