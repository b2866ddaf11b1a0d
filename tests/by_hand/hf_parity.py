"""Compares our models with those of `transformers`, live. Needs the extra `hf`.

    python -m tests.by_hand.hf_parity                      # the comparison
    python -m tests.by_hand.hf_parity mixtral odd_qwen3    # of these families
    python -m tests.by_hand.hf_parity --update-golden      # and tests/golden/hf anew, which needs no torch

For each family: a small random model of theirs, read by us, gives their logits on one device and on
2x4, 4x2 and 1x8, which some of their sizes are not divisible by, or on meshes for experts; what we
write is bit-equal to what we read, and gives their logits in `transformers` again. The same for adapters that PEFT made.
"""

import dataclasses
import json
import pathlib
import shutil
import sys
import tempfile

import jax
import numpy as np
import safetensors.numpy
from flax import nnx

import tests.conftest  # noqa: F401, simulates the devices
from recipes.common import checkpoint, hf
from recipes.common.hf.folder import UNIMPORTANT
from recipes.common.sharding.abstract import paths
from tests.support.golden_folders import GOLDEN
from tests.support.hf_families import (
    ADAPTED_EXPERTS,
    ADAPTERS,
    FAMILIES,
    FULL,
    KEYS,
    NOT_GOLDEN,
    TOKENS_BT,
    TOLERANCE,
    TWO_TOWERS,
    Family,
)
from tests.support.hf_models import export, inputs, our_logits, pairs, params_of

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=64,
)  # fmt: skip


def make(family: Family, folder: pathlib.Path) -> None:
    """Writes a `transformers` model whose parameters are all random, norms and biases included."""
    import torch
    import transformers

    torch.manual_seed(0)
    options = SIZES | family.options
    if "layers_block_type" in options:  # which says their number
        del options["num_hidden_layers"]
    if family.config == "ViTConfig":
        options = {
            k: v for k, v in options.items() if k[:3] not in ("voc", "max") and "key" not in k
        }
    if "BertConfig" in family.config or "RobertaConfig" in family.config:
        del options["num_key_value_heads"]
    if family.config in TWO_TOWERS:
        options = family.options
    elif "text_config" in options:  # a model that reads text and images
        options = family.options | {"text_config": SIZES | family.options["text_config"]}
    config = getattr(transformers, family.config)(**options)
    model = loader(config).from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            norm = "norm" in name.lower() or (".ln_" in name and name.endswith("weight"))
            mean = 1.0 if name.endswith("linear_attn.norm.weight") else family.norms * norm
            size = 0.3 if family.config in TWO_TOWERS else 0.15
            mean += 2.0 * (name == "logit_scale")  # scores matter
            weight.copy_(size * torch.randn(weight.shape) + mean)
        for name, buffer in model.named_buffers():
            if name.endswith(
                ("e_score_correction_bias", "expert_bias")
            ):  # large enough to change choices
                buffer.copy_(0.1 * torch.randn(buffer.shape))
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.15 * torch.randn(buffer.shape))
    model.to(getattr(torch, family.dtype)).save_pretrained(folder, max_shard_size=family.shard)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if family.config in TWO_TOWERS:
        write_processor(config, folder)
    if family.config == "ViTConfig":
        colors = {
            name: [0.4, 0.5, 0.6][: config.num_channels] for name in ("image_mean", "image_std")
        }
        size = {"height": config.image_size, "width": config.image_size}
        transformers.ViTImageProcessor(size=size, resample=3, **colors).save_pretrained(folder)


def write_processor(config, folder: pathlib.Path) -> None:
    """Says how pictures become the inputs of two towers; CLIP's are cut to a square."""
    import transformers

    W = config.vision_config.image_size
    square = {"height": W, "width": W}
    colors = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4], "resample": 3}
    if config.model_type == "clip":
        colors |= {"size": {"shortest_edge": W}, "crop_size": square}
        transformers.CLIPImageProcessor(**colors).save_pretrained(folder)
    else:
        transformers.SiglipImageProcessor(size=square, **colors).save_pretrained(folder)


def loader(config):
    """The class of `transformers` that loads a model with this config."""
    import transformers

    if config.model_type == "vit":
        return transformers.AutoModelForImageClassification
    if "bert" in config.model_type:
        return transformers.AutoModelForMaskedLM
    if config.model_type in ("siglip", "clip"):
        return transformers.AutoModel
    if hasattr(config, "vision_config"):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def make_adapter(
    base: pathlib.Path,
    modules: list[str] | str,
    folder: pathlib.Path,
    stddev: float = 0.3,
    **options,
) -> None:
    """Writes a random PEFT adapter for a `transformers` model. `options`: of PEFT's LoraConfig."""
    import peft
    import torch
    import transformers

    torch.manual_seed(1)
    theirs, classes = transformers.AutoConfig.from_pretrained(base), {}
    if images := theirs.model_type == "vit":
        classes = {"num_labels": 3, "ignore_mismatched_sizes": True}
    model = loader(theirs).from_pretrained(base, dtype=torch.float32, **classes)
    kind = {"modules_to_save": ["classifier"]} if images else {"task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(r=3, lora_alpha=4, target_modules=modules, **kind | options)
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.copy_(stddev * torch.randn(weight.shape))
    model.peft_config["default"].base_model_name_or_path = base.name  # not where it was today
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)


def their_logits(
    folder: pathlib.Path, adapter: pathlib.Path | None = None, dtype: str = "float32"
) -> np.ndarray:
    """[B, T, V] in `dtype`, as `transformers` computes them, with an adapter as PEFT does."""
    import torch
    import transformers

    config, classes = transformers.AutoConfig.from_pretrained(folder), {}
    if adapter and config.model_type == "vit":
        classes = {"num_labels": 3, "ignore_mismatched_sizes": True}
    model, loading = loader(config).from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager", output_loading_info=True,
        **classes,
    )  # fmt: skip
    assert classes or not any(loading.values()), loading
    if adapter:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapter)
    if config.model_type in ("siglip", "clip"):
        texts = config.text_config
        sizes = config.vision_config.image_size, texts.max_position_embeddings, texts.vocab_size
        image, tokens = map(torch.tensor, pairs(*sizes))
        with torch.no_grad():
            out = model(input_ids=tokens, pixel_values=image.permute(0, 3, 1, 2))
        return torch.cat([out.image_embeds, out.text_embeds, out.logits_per_image], 1).numpy()
    given = torch.tensor(inputs(config))
    with torch.no_grad():
        return model(given.permute(0, 3, 1, 2) if given.ndim == 4 else given).logits.numpy()


def compare(name: str, work: pathlib.Path) -> None:
    """Prints the comparison; raises AssertionError where our logits and theirs differ."""
    theirs, back, meshes = work / name, work / f"{name}_back", FAMILIES[name].meshes
    make(FAMILIES[name], theirs)
    wanted = their_logits(theirs)
    found = [np.abs(our_logits(f"hf:{theirs}", *on) - wanted).max() for on in meshes]
    export(f"hf:{theirs}", back)
    again = np.abs(their_logits(back) - wanted).max()
    here = [f"{mesh} {error:.1e}" for (mesh, _), error in zip(meshes, found, strict=True)]
    print(f"{name:<14} logits to {np.abs(wanted).max():.1f}; ours differ by", *here, end="; ")
    print(f"exported, theirs differ by {again:.1e}")
    assert max(*found, again) < TOLERANCE, name
    a, b = params_of(f"hf:{theirs}"), params_of(f"hf:{back}")
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], err_msg=path)


def compare_adapter(name: str, work: pathlib.Path) -> None:
    """Compares an adapter of a golden model: PEFT's merged by us, and ours loaded by PEFT."""
    base, theirs, back = GOLDEN / name, work / f"{name}_lora", work / f"{name}_lora_back"
    experts = {"target_parameters": ADAPTED_EXPERTS[name]} if name in ADAPTED_EXPERTS else {}
    make_adapter(base, ADAPTERS[name], theirs, **experts)
    wanted, without = their_logits(base, theirs), their_logits(base)
    meshes = FAMILIES[name].meshes
    found = [np.abs(our_logits(theirs, *on, f"hf:{base}") - wanted).max() for on in meshes]
    adapter = checkpoint.find(theirs, base=f"hf:{base}").adapter
    entry, factors = adapter.metadata["entry"], params_of_adapter(adapter)
    hf.write_adapter(
        back, entry, adapter.config, str(base), lambda path: factors[path],
        architecture=checkpoint.find(f"hf:{base}").metadata["architecture"],
    )  # fmt: skip
    again = np.abs(their_logits(base, back) - wanted).max()
    change = np.abs(wanted).max() if name == "vit" else np.abs(wanted - without).max()
    print(
        f"{name}_lora: the adapter changes logits by {change:.1f}; merged, ours differ by "
        f"{max(found):.1e}; exported, PEFT's by {again:.1e}"
    )
    assert max(*found, again) < TOLERANCE, name
    ours, own = (
        safetensors.numpy.load_file(f / "adapter_model.safetensors") for f in (back, theirs)
    )
    assert ours.keys() == own.keys()
    for tensor in own:
        np.testing.assert_array_equal(ours[tensor], own[tensor], err_msg=tensor)


def compare_some_layers(work: pathlib.Path) -> None:
    """Compares PEFT's adapter of one layer of two with ours, merged."""
    base, theirs = GOLDEN / "llama3", work / "some_layers"
    for only in ({"layers_to_transform": [1]}, {"exclude_modules": r"model\.layers\.0\..*"}):
        make_adapter(base, ["q_proj", "down_proj"], theirs, **only)
        wanted = their_logits(base, theirs)
        error = np.abs(our_logits(theirs, "1x1", "dp", f"hf:{base}") - wanted).max()
        change = np.abs(wanted - their_logits(base)).max()
        print(f"llama3_lora of a layer changes logits by {change:.1f}; ours differ by {error:.1e}")
        assert error < TOLERANCE
        shutil.rmtree(theirs)


def compare_side_by_side(work: pathlib.Path) -> None:
    """Compares our adapter of GPT-2, whose q, k and v each have an A, with what PEFT makes of it."""
    base, out, merged = GOLDEN / "gpt2", work / "side_by_side", work / "merged"
    plain = checkpoint.find(f"hf:{base}").config
    config, random = (
        dataclasses.replace(plain, lora_rank=2, lora_alpha=6.0),
        np.random.default_rng(2),
    )
    factors = {
        path: random.normal(0, 0.3, leaf.shape).astype(np.float32)
        for path, leaf in paths(hf.folder.shapes_of("gpt2", config)["params"]).items()
    }
    hf.write_adapter(out, "gpt2", config, str(base), lambda path: factors[path])

    def added(path: str):
        module, _, name = path.rpartition("/")
        pair = [factors.get(f"{module}/lora/{name}/{factor}") for factor in "ab"]
        found = params[path]
        if pair[0] is not None:
            found = found + np.stack([np.tensordot(*ab, 1) for ab in zip(*pair, strict=True)]) * 3
        return found

    params = params_of(f"hf:{base}")
    hf.write(merged, "gpt2", plain, 64, added)
    wanted = our_logits(f"hf:{merged}", "1x1", "dp")
    error = np.abs(their_logits(base, out) - wanted).max()
    print(f"gpt2, an A for each of q, k and v: PEFT's logits differ by {error:.1e}")
    assert error < TOLERANCE


def compare_further(work: pathlib.Path) -> None:
    """Compares the logits of the layer that predicts the token after the next one."""
    import torch
    import transformers
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    from tests.support.further_token import further_logits
    from zoo.deepseek import Config, DeepSeek

    config = dataclasses.replace(Config.tiny(), mtp_depth=1, capacity=None, balance_rate=0.0)
    graph, state = nnx.split(DeepSeek(config, rngs=nnx.Rngs(0)))
    random, folder = np.random.default_rng(0), work / "further"
    state = jax.tree.map(lambda x: 0.2 * random.normal(size=x.shape).astype(np.float32), state)
    of_tokens = jax.jit(lambda state: further_logits(nnx.merge(graph, state), TOKENS_BT))
    ours = np.asarray(of_tokens(state))[:, :-1]
    params = paths(nnx.to_pure_dict(state))
    hf.write(folder, "deepseek", config, 64, lambda path: params[path])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    # By default it finds these tensors in layer 61 alone.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{config.num_layers}.*"]
    further = MtpModel.from_pretrained(model)
    cache = MtpCache(config=model.config.get_mtp_config())
    tokens, places = torch.tensor(TOKENS_BT), torch.arange(1, TOKENS_BT.shape[1])[None]
    with torch.no_grad():
        hidden = model.model(tokens).last_hidden_state[:, :-1]
        hidden = further.forward_layer(0, hidden, places, cache, input_ids=tokens[:, 1:])
        theirs = model.lm_head(hidden).numpy()
    error = np.abs(ours - theirs).max()
    print(
        f"deepseek       the further token's logits to {np.abs(theirs).max():.1f}; ours differ by {error:.1e}"
    )
    assert error < TOLERANCE
    again = params_of(f"hf:{folder}")
    assert again.keys() == params.keys()
    for path, array in params.items():
        np.testing.assert_array_equal(again[path], array, err_msg=path)


HEADS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # models with a head for the token after the next


def compare_head(name: str, work: pathlib.Path) -> None:
    """Compares the logits of a head that `transformers` leaves out, built here from its own parts."""
    import torch
    import transformers
    from transformers.masking_utils import create_causal_mask

    from tests.support.further_token import further_logits
    from zoo.qwen3_next import Qwen3Next

    folder, back = work / f"{name}_head", work / f"{name}_head_back"
    make(FAMILIES[name], folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    config = model.config
    module = sys.modules[type(model).__module__]
    prefix = type(model).__name__.removesuffix("ForCausalLM")
    norm = getattr(module, f"{prefix}RMSNorm")
    layer = getattr(module, f"{prefix}DecoderLayer")
    D = config.hidden_size
    head = torch.nn.ModuleDict({
        "pre_fc_norm_embedding": norm(D, eps=config.rms_norm_eps),
        "pre_fc_norm_hidden": norm(D, eps=config.rms_norm_eps),
        "fc": torch.nn.Linear(2 * D, D, bias=False),
        "layers": torch.nn.ModuleList([layer(config, config.layer_types.index(FULL))]),
        "norm": norm(D, eps=config.rms_norm_eps),
    })  # fmt: skip
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(0.15 * torch.randn(weight.shape))
        tokens = torch.tensor(TOKENS_BT)
        hidden = model.model(tokens).last_hidden_state[:, :-1]
        places = torch.arange(hidden.shape[1])[None]
        read = head["pre_fc_norm_embedding"](model.get_input_embeddings()(tokens[:, 1:]))
        joined = head["fc"](torch.cat([read, head["pre_fc_norm_hidden"](hidden)], dim=-1))
        mask = create_causal_mask(
            config=config, inputs_embeds=joined, attention_mask=None, cache=None,
            position_ids=places,
        )  # fmt: skip
        out = head["layers"][0](
            joined, position_embeddings=model.model.rotary_emb(joined, places), attention_mask=mask
        )
        theirs = model.lm_head(head["norm"](out)).numpy()
    (file,) = folder.glob("*.safetensors")
    stored = safetensors.numpy.load_file(file)
    stored |= {f"mtp.{key}": weight.numpy() for key, weight in head.state_dict().items()}
    safetensors.numpy.save_file(stored, file)

    params = params_of(f"hf:{folder}")
    graph, state = nnx.split(Qwen3Next(hf.Folder(folder).config, rngs=nnx.Rngs(0)))
    state = jax.tree.map_with_path(
        lambda path, _: params["/".join(str(part.key) for part in path[:-1])], state
    )
    of_tokens = jax.jit(lambda state: further_logits(nnx.merge(graph, state), TOKENS_BT))
    error = np.abs(np.asarray(of_tokens(state))[:, :-1] - theirs).max()
    print(
        f"{name:<14} the further token's logits to {np.abs(theirs).max():.1f}; ours differ by {error:.1e}"
    )
    assert error < TOLERANCE
    export(f"hf:{folder}", back)
    again = params_of(f"hf:{back}")
    assert again.keys() == params.keys()
    for path, array in params.items():
        np.testing.assert_array_equal(again[path], array, err_msg=path)


def params_of_adapter(adapter: hf.Adapter) -> dict[str, np.ndarray]:
    """Factor's path → array."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda s: s.update(sharding=one), adapter.shapes())
    return {path: np.asarray(x) for path, x in paths(adapter.read(abstract)["params"]).items()}


def declared_keys() -> dict[str, dict]:
    """Architecture → key that its config class declares → default, without those of all classes."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    of_all = {field.name for field in dataclasses.fields(transformers.PretrainedConfig)}
    of_all -= {"tie_word_embeddings"}
    keys = {}
    for family in hf.folder.FAMILIES:
        for name, kind in family.architectures.items():
            default = CONFIG_MAPPING[kind]()
            keys[name] = own_keys(default, of_all)
            for tower in ("text_config", "vision_config") if family.entry == "siglip" else ():
                inner = own_keys(getattr(default, tower), of_all)
                keys[name] |= {f"{tower}.{key}": value for key, value in inner.items()}
            if keys[name].get("rope_parameters", ...) is None:  # its default is made by code
                keys[name]["rope_parameters"] = default.rope_parameters
    return keys


def own_keys(config, of_all: set[str]) -> dict:
    """Key that a config class declares → default, without those of all classes."""
    return {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(config)
        if field.name not in of_all and not any(part in field.name for part in UNIMPORTANT)
    }


def main() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    asked = [word for word in sys.argv[1:] if not word.startswith("--")]
    if "--update-golden" in sys.argv and "keys" in (asked or ["keys"]):
        rows = (f"{json.dumps(name)}: {json.dumps(keys)}" for name, keys in declared_keys().items())
        KEYS.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    with tempfile.TemporaryDirectory() as work:
        for name in [name for name in asked if name in FAMILIES] if asked else FAMILIES:
            compare(name, pathlib.Path(work))
            if "--update-golden" in sys.argv and name not in NOT_GOLDEN:
                target = GOLDEN / name
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(pathlib.Path(work) / name, target)
                np.save(target / "logits.npy", their_logits(pathlib.Path(work) / name))
        if not asked or "further" in asked:
            compare_further(pathlib.Path(work))
            for name in HEADS:
                compare_head(name, pathlib.Path(work))
        for name in asked or ADAPTERS:
            if name not in ADAPTERS:
                continue
            compare_adapter(name, pathlib.Path(work))
            if "--update-golden" in sys.argv:
                target = GOLDEN / f"{name}_lora"
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(pathlib.Path(work) / f"{name}_lora", target)
                logits = their_logits(GOLDEN / name, pathlib.Path(work) / f"{name}_lora")
                np.save(GOLDEN / f"{name}_lora" / "logits.npy", logits)
        if "some_layers" in (asked or ["some_layers"]):
            compare_some_layers(pathlib.Path(work))
        if "gpt2" in (asked or FAMILIES):
            compare_side_by_side(pathlib.Path(work))
    print(f"transformers {transformers.__version__}: all within {TOLERANCE}, all bit-equal back.")


if __name__ == "__main__":
    main()
