"""DeepSeek's float8 folders are read as another implementation of the format reads them.

The reference dequantizes value by value from the definition of e4m3 (OCP 8-bit Floating Point 1.0).
"""

import dataclasses
import json
import shutil
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from recipes.common import checkpoint, hf
from recipes.common.hf import deepseek, float8, tensors
from recipes.common.mesh import make_mesh
from recipes.common.runtime.errors import UserError
from recipes.common.sharding.abstract import paths
from tests.conftest import ROOT
from tests.support.hf_models import params_of
from zoo.deepseek import SIZES

pytestmark = pytest.mark.promise("hugging-face")
GOLDEN = ROOT / "tests" / "golden" / "hf" / "deepseek_v3"
CONFIG = {  # wider than a block of 128 values, and not a multiple of one
    "hidden_size": 136, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "q_lora_rank": 40, "kv_lora_rank": 160, "moe_intermediate_size": 130, "intermediate_size": 264,
    "num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 2, "head_dim": 8,
    "num_experts_per_tok": 2, "num_nextn_predict_layers": 1,
}  # fmt: skip
QUANTIZED = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
}  # fmt: skip


def value(bits: int) -> float:
    """e4m3: sign, four bits of exponent with bias 7, three of mantissa; no infinities, one NaN."""
    sign, exponent, mantissa = bits >> 7, bits >> 3 & 15, bits & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    size = float("nan") if bits & 127 == 127 else size
    return -size if sign else size


VALUES = np.array([value(bits) for bits in range(256)], np.float32)


def plainly(bits: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 [R, C] and float32 [R/128, C/128] → float32 [R, C], block by block."""
    out = np.empty(bits.shape, np.float32)
    for r, c in np.ndindex(scales.shape):
        block = slice(128 * r, 128 * r + 128), slice(128 * c, 128 * c + 128)
        out[block] = VALUES[bits[block]] * scales[r, c]
    return out


@pytest.fixture
def quantized(tmp_path):
    """A small folder of the published structure; and name → reference of each float8 tensor."""
    folder, random = tmp_path / "float8", np.random.default_rng(0)
    folder.mkdir()
    keys = json.loads((GOLDEN / "config.json").read_text()) | CONFIG
    (folder / "config.json").write_text(json.dumps(keys | {"quantization_config": QUANTIZED}))
    config = deepseek.config_from(keys, folder / "config.json")
    shapes = hf.folder.stored_paths(hf.folder.shapes_of("deepseek", config))
    stored, wanted = {}, {}
    for tensor in tensors.expand(deepseek.tensors(config), shapes):
        name, shape = tensor.name, tensor.shape
        high = any(part in name for part in ("norm", "embed", "head.w", "mlp.gate.", "eh_proj"))
        if high or len(shape) == 1:  # not quantized in the published folders
            stored[name] = random.normal(size=shape).astype(ml_dtypes.bfloat16)
            continue
        bits = random.integers(0, 256, shape, np.uint8)
        bits[bits & 127 == 127] = 0  # not a number
        scales = random.uniform(0.5, 2, [-(-n // 128) for n in shape]).astype(np.float32) * 2**-8
        stored[name] = bits.view(ml_dtypes.float8_e4m3fn)
        stored[f"{name}_scale_inv"], wanted[name] = scales, plainly(bits, scales)
    copied = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}
    copied = {f"model.layers.2.{name}.weight": stored[table] for name, table in copied.items()}
    safetensors.numpy.save_file(copied, folder / "model-tables.safetensors")
    names = sorted(stored)
    for number in range(3):  # of one layer in several files
        part = {name: stored[name] for name in names[number::3]}
        safetensors.numpy.save_file(part, folder / f"model-{number}.safetensors")
    return folder, wanted


def test_weights_are_dequantized_exactly(quantized):
    folder, wanted = quantized
    params, config = params_of(f"hf:{folder}"), hf.Folder(folder).config
    assert config.mtp_depth == 1
    found = 0
    for tensor in tensors.expand(deepseek.tensors(config), params):
        if tensor.name in wanted:
            theirs = np.empty(tensor.shape, np.float32)
            tensor.put(params[tensor.path][tensor.index], theirs)
            np.testing.assert_array_equal(theirs, wanted[tensor.name], err_msg=tensor.name)
            found += 1
    assert found == len(wanted) > 30


@pytest.mark.full
def test_each_shard_is_its_part_and_an_export_is_bit_equal(quantized, tmp_path):
    """Dims are cut inside of blocks of 128, and of rotary pairs."""
    folder, _ = quantized
    whole = params_of(f"hf:{folder}")
    rules = {
        "embed": "data",
        "expert": "expert",
        "mlp": "model",
        "head_dim": "model",
        "vocab": "model",
    }
    rules |= {"expert_embed": "data", "up_latent": "data", "batch": ("data", "expert")}
    model, _ = checkpoint.restore(f"hf:{folder}", make_mesh("data=2,expert=2,model=2"), rules)
    for path, array in paths(nnx.to_pure_dict(nnx.state(model))).items():
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[path][shard.index], err_msg=path)
    source = checkpoint.find(f"hf:{folder}")
    hf.write(tmp_path / "out", "deepseek", source.config, 64, lambda path: whole[path])
    again = params_of(f"hf:{tmp_path / 'out'}")
    assert again.keys() == whole.keys()
    for path, array in whole.items():
        np.testing.assert_array_equal(again[path], array, err_msg=path)


def test_any_part_is_cut_from_its_blocks(tmp_path):
    random, shape = np.random.default_rng(0), (300, 270)
    bits = random.integers(0, 255, shape, np.uint8)
    scales = random.normal(size=(3, 3)).astype(np.float32)
    named = {"w": bits.view(ml_dtypes.float8_e4m3fn), "w_scale_inv": scales}
    safetensors.numpy.save_file(named, tmp_path / "model.safetensors")
    (whole,) = float8.unpack(tensors.find(tmp_path)).values()
    wanted = plainly(bits, scales)
    for _ in range(50):
        rows, columns = (slice(*sorted(random.integers(0, n + 1, 2))) for n in shape)
        if rows.start < rows.stop and columns.start < columns.stop:
            np.testing.assert_array_equal(whole.read((rows, columns)), wanted[rows, columns])


def test_no_more_than_a_row_of_blocks_is_held_beside_the_part_that_is_read(tmp_path):
    """2 MB in float8; 128 rows are 64 kB, and 256 kB in float32 before and after they are scaled."""
    bits, scales = np.ones((4_096, 512), np.uint8), np.ones((32, 4), np.float32)
    named = {"w": bits.view(ml_dtypes.float8_e4m3fn), "w_scale_inv": scales}
    safetensors.numpy.save_file(named, tmp_path / "model.safetensors")
    (whole,) = float8.unpack(tensors.find(tmp_path)).values()
    for rows in (slice(0, 4_096), slice(100, 300)):
        whole.read((rows, slice(None)))  # once before, for what is imported and cached
        tracemalloc.start()
        part = whole.read((rows, slice(None)))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert part.nbytes < peak < part.nbytes + 700_000


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"weight_block_size": [64, 64]},
            "has weight_block_size \\[64, 64\\] in its quantization_config",
        ),
        ({"weight_block_size": None}, "has weight_block_size null in its"),
        (
            {"fmt": "e5m2"},
            'has fmt "e5m2" in its quantization_config, and the zoo reads float8 with fmt',
        ),
        ({"activation_scheme": "static"}, 'has activation_scheme "static" in its'),
        (
            {"quant_method": "mxfp4"},
            "has weights in mxfp4, which the zoo does not read; use a folder in fp8",
        ),
    ],
)
def test_other_formats_are_refused_by_name(changes, said, tmp_path):
    """Before any tensor is read."""
    keys = json.loads((GOLDEN / "config.json").read_text())
    keys["quantization_config"] = QUANTIZED | changes
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(UserError, match=said):
        hf.Folder(tmp_path)


def test_float8_without_scales_is_refused(tmp_path):
    named = {"w": np.zeros((129, 5), np.uint8).view(ml_dtypes.float8_e4m3fn)}
    for scales in (None, np.ones((1, 1), np.float32), np.ones((2, 1), np.int32)):
        named |= {} if scales is None else {"w_scale_inv": scales}
        safetensors.numpy.save_file(named, tmp_path / "model.safetensors")
        with pytest.raises(
            UserError, match=r"w in .* is float8 and has no w_scale_inv of .*\[2, 1\]"
        ):
            float8.unpack(tensors.find(tmp_path))


@pytest.mark.parametrize("shape", [(130,), (2, 130, 140)])
def test_float8_that_is_no_matrix_is_refused_before_it_is_read(shape, tmp_path):
    scales = np.ones([-(-size // 128) for size in shape], np.float32)
    named = {"w": np.zeros(shape, np.uint8).view(ml_dtypes.float8_e4m3fn), "w_scale_inv": scales}
    safetensors.numpy.save_file(named, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=r"w in .* is float8 of shape \[.*130.*\], and the zoo reads"
    ):
        float8.unpack(tensors.find(tmp_path))


def test_a_float8_table_is_compared_with_its_copy_dequantized(tmp_path):
    """Tied tensors must be equal; equal bits of unlike scales are not."""
    bits = np.random.default_rng(1).integers(1, 120, (300, 140), np.uint8)
    scales = np.full((3, 2), 0.5, np.float32)
    named = {}
    for name, factor in (("a", 1), ("b", 1), ("c", 2)):
        named[name] = bits.view(ml_dtypes.float8_e4m3fn)
        named[f"{name}_scale_inv"] = scales * factor
    safetensors.numpy.save_file(named, tmp_path / "model.safetensors")
    found = float8.unpack(tensors.find(tmp_path))
    assert tensors.equal(found["a"], found["b"])
    assert not tensors.equal(found["a"], found["c"])


# ---- the family's folders --------------------------------------------------------------------------


def test_layers_for_further_tokens_are_read_where_there_is_one(quantized, capfd):
    """The second of two is left out with a line; a folder that lacks them is a plain model."""
    folder, _ = quantized
    assert "mtp/join" in params_of(f"hf:{folder}")
    assert "mtp/join" not in params_of(f"hf:{GOLDEN}"), "its config.json claims one"
    more = {"model.layers.3.enorm.weight": np.ones(136, np.float32)}
    safetensors.numpy.save_file(more, folder / "model-3.safetensors")
    capfd.readouterr()
    assert hf.Folder(folder).config.mtp_depth == 1
    assert "Left out model.layers.3, for multi-token prediction" in capfd.readouterr().out


def test_tables_of_the_further_layer_must_be_the_model_s(quantized):
    folder, _ = quantized
    file, name = folder / "model-tables.safetensors", "model.layers.2.shared_head.head.weight"
    tables = safetensors.numpy.load_file(file)
    tables[name][3, 5] += 1
    safetensors.numpy.save_file(tables, file)
    with pytest.raises(UserError, match=f"a tensor {name} that differs from lm_head.weight"):
        hf.Folder(folder)


def published(**changes):
    """DeepSeek V3's config.json as published, with some keys changed; ... removes one."""
    keys = {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
        "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
        "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "seq_aux": True, "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
    }  # fmt: skip
    return {key: value for key, value in (keys | changes).items() if value is not ...}


MOONLIGHT = {
    "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264,
    "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "q_lora_rank": None,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446, "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "size"),
    [({"num_nextn_predict_layers": 0}, "671b"), (MOONLIGHT, "16b")],
    ids=["671b", "16b"],
)
def test_published_folders_are_the_named_sizes(changes, size):
    """With older and newer keys of rotary settings."""
    wanted = dataclasses.replace(SIZES[size](), capacity=None, balance_rate=0.0, remat="full")
    keys = published(**changes)
    assert deepseek.config_from(keys, ROOT) == wanted
    rope = (keys.pop("rope_scaling") or {}) | {"rope_theta": keys.pop("rope_theta")}
    rope["rope_type"] = rope.pop("type", "default")
    assert deepseek.config_from(keys | {"rope_parameters": rope}, ROOT) == wanted
    theirs = deepseek.config_json(wanted, 8_192) | {"model_type": "deepseek_v3"}
    assert deepseek.config_from(theirs, ROOT) == wanted
    if size == "671b":  # for code that knows no attention_factor
        assert (theirs["rope_scaling"]["mscale"], theirs["rope_scaling"]["mscale_all_dim"]) == (
            1,
            1,
        )


def test_only_the_rotary_part_of_a_head_must_be_even():
    """An odd head dim, which transformers computes too; tests/zoo/test_deepseek.py computes it."""
    config = deepseek.config_from(published(qk_nope_head_dim=7, qk_rope_head_dim=6), ROOT)
    assert (config.nope_dim, config.rope_dim, config.head_dim) == (7, 6, 13)
    with pytest.raises(UserError, match="makes no sense: rope_dim=7 must be even"):
        deepseek.config_from(published(qk_rope_head_dim=7), ROOT)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"index_topk": 2048}, "has index_topk 2048, which zoo/deepseek.py does not implement"),
        ({"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_topk": 2048},
         "is for DeepseekV32ForCausalLM, which the zoo does not implement; the nearest is "
         "DeepseekV3ForCausalLM, which differs in index_topk; use one of"),
        ({"attention_bias": True}, "has attention_bias true, which"),
        ({"rope_interleave": False}, "has rope_interleave false, which"),
        ({"moe_layer_freq": 2}, "has moe_layer_freq 2, which"),
        ({"scoring_func": "softmax"}, 'has scoring_func "softmax", which'),
        ({"topk_method": "greedy"}, 'has topk_method "greedy", which'),
        ({"num_key_value_heads": 4}, "has num_key_value_heads 4, which"),
        ({"head_dim": 8}, "has head_dim 8, which"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
         "has rope_scaling {"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'has rope_type "dynamic", which'),
        ({"kv_lora_rank": ...}, "has kv_lora_rank null, which must be a number > 0"),
        ({"n_group": 3}, "makes no sense: groups=3 must divide num_experts=8 into groups of"),
        ({"first_k_dense_replace": 3}, "makes no sense: dense_layers=3 must be less than num_layers=3"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "greedy", "norm_topk_prob": True},
         "has norm_topk_prob true, which"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "norm_topk_prob": False, "topk_method": "noaux_tc"},
         'has topk_method "noaux_tc", which'),
    ],
)  # fmt: skip
def test_folders_that_we_do_not_compute_are_refused_by_key(changes, said, tmp_path):
    folder = tmp_path / "theirs"
    shutil.copytree(GOLDEN, folder)
    keys = json.loads((folder / "config.json").read_text())
    keys = {k: v for k, v in (keys | changes).items() if v is not ...}
    if "rope_scaling" in changes:
        del keys["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(keys))
    with pytest.raises(UserError) as caught:
        hf.Folder(folder)
    assert said in str(caught.value)


def test_a_model_without_an_architecture_is_not_exported(tmp_path):
    config = dataclasses.replace(SIZES["tiny"](), sigmoid=False)
    with pytest.raises(
        UserError, match="no Hugging Face DeepSeek has normalized weights of a softmax"
    ):
        hf.write(tmp_path / "out", "deepseek", config, 64, None)
