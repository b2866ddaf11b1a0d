"""MXFP4 folders are read as another implementation of the format reads them.

The reference dequantizes value by value from the definition of e2m1 and e8m0 (OCP Microscaling 1.0).
"""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

from recipes.common import checkpoint, hf
from recipes.common.hf import mxfp4
from recipes.common.mesh import make_mesh
from recipes.common.runtime.errors import UserError
from tests.conftest import ROOT
from tests.support.hf_models import params_of

pytestmark = pytest.mark.promise("hugging-face")
GOLDEN = ROOT / "tests" / "golden" / "hf" / "gpt_oss"


def value(bits: int) -> float:
    """e2m1: sign, two bits of exponent with bias 1, one of mantissa."""
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def plainly(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[E, R, G, 16] and [E, R, G] → [E, G · 32, R]."""
    E, R, G, _ = blocks.shape
    out = np.zeros((E, G * 32, R), np.float32)
    for e, r, g in np.ndindex(E, R, G):
        for i, byte in enumerate(blocks[e, r, g].tolist()):
            power = 2.0 ** (int(scales[e, r, g]) - 127)
            out[e, g * 32 + 2 * i, r] = value(byte % 16) * power
            out[e, g * 32 + 2 * i + 1, r] = value(byte // 16) * power
    return out


@pytest.fixture
def quantized(tmp_path):
    """A copy of the golden folder whose experts are random MXFP4; and name → reference."""
    folder, wanted, random = tmp_path / "mxfp4", {}, np.random.default_rng(0)
    shutil.copytree(GOLDEN, folder)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    kept = {}
    for file in sorted(folder.glob("*.safetensors")):
        kept |= safetensors.numpy.load_file(file)
        file.unlink()
    for name in [n for n in kept if n.endswith(("gate_up_proj", "down_proj"))]:
        E, columns, rows = kept.pop(name).shape
        blocks = random.integers(0, 256, (E, rows, columns // 32, 16), np.uint8)
        scales = random.integers(118, 126, (E, rows, columns // 32), np.uint8)
        kept |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wanted[name] = plainly(blocks, scales)
    # The published folders have blocks and scales in different files.
    for number, end in enumerate(("_blocks", "_scales", "")):
        part = {n: x for n, x in kept.items() if n.endswith(end)}
        kept = {n: x for n, x in kept.items() if n not in part}
        safetensors.numpy.save_file(part, folder / f"model-{number}.safetensors")
    keys = json.loads((folder / "config.json").read_text())
    keys["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(keys))
    return folder, wanted


def test_experts_are_dequantized_exactly(quantized):
    folder, wanted = quantized
    params = params_of(f"hf:{folder}")
    for layer in range(3):
        where = f"model.layers.{layer}.mlp.experts"
        both = wanted[f"{where}.gate_up_proj"]
        for name, array in {
            "gate": both[..., 0::2],
            "up": both[..., 1::2],
            "down": wanted[f"{where}.down_proj"],
        }.items():
            np.testing.assert_array_equal(params[f"layers/experts/{name}"][layer], array)


def test_each_shard_is_its_part_and_an_export_is_bit_equal(quantized, tmp_path):
    """D and F are cut inside of blocks of 32."""
    folder, _ = quantized
    whole = params_of(f"hf:{folder}")
    model, _ = checkpoint.restore(f"hf:{folder}", make_mesh("data=2,expert=2,model=2"))
    experts = model.layers.experts
    for name in ("gate", "up", "down"):
        for shard in getattr(experts, name)[...].addressable_shards:
            wanted = whole[f"layers/experts/{name}"][shard.index]
            np.testing.assert_array_equal(shard.data, wanted, err_msg=name)
    source = checkpoint.find(f"hf:{folder}")
    hf.write(tmp_path / "out", "gpt_oss", source.config, 64, lambda path: whole[path])
    again = params_of(f"hf:{tmp_path / 'out'}")
    for path, array in whole.items():
        np.testing.assert_array_equal(again[path], array, err_msg=path)


def test_extreme_scales():
    blocks = np.full((1, 16), 0x7F, np.uint8)  # 6 in the high bits after -6 in the low ones
    for scale, size in {0: 6 * 2.0**-127, 127: 6.0, 251: 6 * 2.0**124}.items():
        found = mxfp4.dequantize(blocks, np.array([scale], np.uint8))
        np.testing.assert_array_equal(found, np.tile([-size, size], 16).astype(np.float32))
    assert np.isnan(mxfp4.dequantize(blocks, np.array([255], np.uint8))).all()


@pytest.mark.parametrize("method", ["fp8", "gptq"])
def test_other_formats_are_refused_by_name(quantized, method):
    folder, _ = quantized
    keys = json.loads((folder / "config.json").read_text())
    keys["quantization_config"]["quant_method"] = method
    (folder / "config.json").write_text(json.dumps(keys))
    with pytest.raises(UserError, match=f"has weights in {method}, which the zoo does not read"):
        hf.Folder(folder)


def test_a_tensor_in_two_formats_is_refused(quantized):
    folder, _ = quantized
    name = "model.layers.0.mlp.experts.down_proj"
    extra = {name: np.zeros((2, 3, 4), np.float32)}
    safetensors.numpy.save_file(extra, folder / "model-plain.safetensors")
    said = rf"{name} is in .*model-plain.safetensors, and in MXFP4 \({name}_blocks\) in model-"
    with pytest.raises(UserError, match=said):
        hf.Folder(folder)


def test_blocks_without_scales_are_refused(quantized):
    folder, _ = quantized
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"_blocks in .* has no .*_scales that fits it"):
        hf.Folder(folder)
