"""Compares what each key of a folder's configs does in `transformers` and PEFT, and here. Needs the extra `hf`.

    python -m tests.by_hand.config_keys                      # the comparison
    python -m tests.by_hand.config_keys llama3 adapter_config.json     # of these folders or files
    python -m tests.by_hand.config_keys --update-golden      # and tests/golden/config_keys.json anew

The files are config.json, adapter_config.json and generation_config.json. For each architecture's small model:
every key that `transformers` asks its config for while it builds the model and runs it, with other values. Where
its outputs change, ours must become the same, or the folder must be refused. The golden holds the outcomes and
the fields of our Config, which tests/hf/test_folder_keys.py checks without torch.
"""

import contextlib
import json
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

import tests.conftest  # noqa: F401, simulates the devices
from data.tokenizer import GENERATION
from recipes.common import hf
from recipes.common.runtime.errors import UserError
from tests.by_hand import encoder_parity
from tests.by_hand.hf_parity import loader, make, their_logits
from tests.support import encoder_cases
from tests.support.config_keys import (
    ADAPTER,
    ADAPTER_CASES,
    FILE,
    FOLDERS,
    GENERATION_CASES,
    NAMED,
    PLAIN_GENERATION,
    READ,
    REFUSED,
    SAME,
    WRONG,
    adapter_fields,
    adapter_with,
    changed,
    fields,
    generation_outcome,
)
from tests.support.encoder_cases import CASES, Case
from tests.support.golden_folders import GOLDEN, config_of
from tests.support.hf_families import FAMILIES, TOLERANCE
from tests.support.hf_models import inputs, our_logits, pairs

# Keys of loading, saving and of what a call returns.
PLUMBING = {
    *("architectures", "auto_map", "dtype", "generator", "gradient_checkpointing", "model_type"),
    *("name_or_path", "return_dict", "transformers_version", "transformers_weights", "use_cache"),
    *("sub_configs", "sub_configs_defaults", "attn_implementation", "experts_implementation"),
    *("output_attentions", "output_hidden_states", "output_loading_info", "per_layer_config"),
    "tie_last_hidden_states",  # whether the hidden states of an answer end with the norm
    "causal",  # which the tests' own inputs ask for
    *("base_model_ep_plan", "base_model_fsdp_plan", "base_model_pp_plan", "base_model_tp_plan"),
    *("default_theta", "text_config", "vision_config", "is_heterogeneous", "attribute_map"),
    *("ignore_keys_at_rope_validation", "decoder", "quantization_config", "id2label", "label2id"),
}
ROPE_KEYS = (
    *("rope_theta", "rope_type", "factor", "partial_rotary_factor", "attention_factor"),
    *("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "low_freq_factor"),
    *("high_freq_factor", "original_max_position_embeddings", "llama_4_scaling_beta"),
    *("short_factor", "long_factor"),
)
LISTS = ("layer_types", "mlp_only_layers", "no_rope_layers", "mlp_layer_types")
TOWERS = ("text_config", "vision_config")
TASKS = {case.name for case in CASES.values()}  # architectures of encoders that classify or embed


@contextlib.contextmanager
def recorded() -> Iterator[set[tuple[str, str]]]:
    """Yields a set that gets (class of a config, attribute) of each attribute that is read."""
    from transformers import PreTrainedConfig

    read: set[tuple[str, str]] = set()
    plain = PreTrainedConfig.__getattribute__

    def recording(self, name: str) -> Any:
        if not name.startswith("_"):
            read.add((type(self).__name__, name))
        return plain(self, name)

    PreTrainedConfig.__getattribute__ = recording
    try:
        yield read
    finally:
        PreTrainedConfig.__getattribute__ = plain


def theirs(folder: pathlib.Path) -> np.ndarray | None:
    """Their outputs; None if the stored tensors don't fit the model."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    (architecture,) = config.architectures
    model_class = getattr(transformers, architecture, None) or loader(config)
    model, loading = model_class.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True,
        ignore_mismatched_sizes=True,
    )  # fmt: skip
    if loading["missing_keys"] or loading["mismatched_keys"] or loading["unexpected_keys"]:
        return None
    model.eval()
    if architecture in TASKS:
        return joined(encoder_parity.outputs(model, Case(architecture, {}), folder))
    with torch.no_grad():
        if config.model_type in ("siglip", "clip"):
            texts, images = config.text_config, config.vision_config
            given = pairs(images.image_size, texts.max_position_embeddings, texts.vocab_size)
            image, tokens = map(torch.tensor, given)
            out = model(input_ids=tokens, pixel_values=image.permute(0, 3, 1, 2))
            return torch.cat([out.image_embeds, out.text_embeds, out.logits_per_image], 1).numpy()
        given = torch.tensor(inputs(config))
        out = model(given.permute(0, 3, 1, 2) if given.ndim == 4 else given)
        return (out["logits"] if "logits" in out else out[0]).numpy()


def keys_read(folder: pathlib.Path) -> dict[str, Any]:
    """Key that `transformers` reads of a folder's config.json → its value there; "a.b" is inside of a."""
    import transformers

    with recorded() as read:
        theirs(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    parts = {"": config} | {tower: getattr(config, tower, None) for tower in TOWERS}
    found: dict[str, Any] = {}
    for inside, part in parts.items():
        if part is None or isinstance(part, dict):
            continue
        names = {name for kind, name in read if kind == type(part).__name__}
        names |= {*part.attribute_map}
        for name in sorted(names - PLUMBING):
            if not callable(getattr(type(part), name, None)):
                found[f"{inside}.{name}" if inside else name] = value_of(part, name)
        rope = getattr(part, "rope_parameters", None) or {}
        by_kind = {k: v for k, v in rope.items() if isinstance(v, dict)} or {"": rope}
        for kind, values in by_kind.items():
            at = ".".join(x for x in (inside, "rope_parameters", kind) if x)
            found |= {f"{at}.{key}": values.get(key) for key in ROPE_KEYS}
        if rope:  # the older key, which their configs turn into the newer one
            found[f"{inside}.rope_scaling" if inside else "rope_scaling"] = None
    return found


def value_of(config: Any, name: str) -> Any:
    """A key's value. Where layers have values of their own, that of the file: asking the config raises."""
    return vars(config).get(name) if config.is_heterogeneous else getattr(config, name, None)


def others(key: str, value: Any) -> list[Any]:
    """Other values of a key."""
    name = key.rpartition(".")[2]
    if name == "rope_scaling":
        return [{kind: "linear", "factor": 2.0} for kind in ("rope_type", "type")]
    if name == "rope_type":
        return ["default", "linear", "dynamic", "yarn"]
    if name in LISTS:
        kinds = [1, 0] if name.startswith("no_") else ["full_attention", "sliding_attention"]
        return [value[::-1], [kinds[0]] * len(value)] if value else [[0], [kinds[1]] * 2]
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, max(1, value // 2)]
        case float():
            return [2.0 * value, value / 2]
        case str():
            return ["relu", "silu", "gelu_new", "other"]
        case None:
            return [False, True, 1]
    return []


def ours(folder: pathlib.Path) -> np.ndarray:
    """Our outputs."""
    if hf.Folder(folder).metadata["architecture"] in TASKS:
        return joined(encoder_cases.ours(f"hf:{folder}", "1"))
    return our_logits(f"hf:{folder}", "1", "dp")


def joined(outputs: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([outputs[name].ravel() for name in sorted(outputs)])


def outcomes(name: str, folder: pathlib.Path, work: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Outcome → case → fields of our Config that differ; of each key, the first value that matters."""
    keys = json.loads((folder / "config.json").read_text())
    plain_config = hf.Folder(folder).config
    plain = theirs(folder)
    assert plain is not None, name
    by_outcome: dict[str, dict[str, Any]] = {SAME: {}, REFUSED: {}, WRONG: {}}
    target = work / "changed"
    target.mkdir()
    for file in folder.iterdir():
        if file.name != "config.json" and file.is_file():
            (target / file.name).symlink_to(file)
    for key, value in keys_read(folder).items():
        for other in others(key, value):
            case = f"{key}={json.dumps(other)}"
            (target / "config.json").write_text(json.dumps(changed(keys, case)))
            try:
                wanted = theirs(target)
            except Exception:  # whatever they raise
                continue
            if wanted is None:  # the stored tensors don't fit
                continue
            has_effect = not same(wanted, plain)
            try:
                config = config_of(changed(keys, case), target / "config.json")
                differs = fields(config, plain_config)
                close = not has_effect
                if differs:
                    close = same(ours(target), wanted)
            except UserError:
                if has_effect:
                    by_outcome[REFUSED][case] = {}
                    break
                continue
            if not close:
                by_outcome[WRONG][case] = differs
                print(f"  {name} {case}: WRONG, our fields {differs}", flush=True)
            elif has_effect:
                by_outcome[SAME][case] = differs
                break
    return by_outcome


def adapter_outcomes(work: pathlib.Path) -> dict[str, dict[str, Any]]:
    """As `outcomes`, for an adapter of PEFT's."""
    base = GOLDEN / "llama3"
    plain = their_logits(base, GOLDEN / "llama3_lora")
    by_outcome: dict[str, dict[str, Any]] = {SAME: {}, REFUSED: {}, WRONG: {}}
    for number, case in enumerate(ADAPTER_CASES):
        folder = work / str(number)
        folder.mkdir()
        adapter_with(case, folder)
        try:
            wanted = their_logits(base, folder)
        except Exception:  # whatever they raise
            continue
        has_effect = not same(wanted, plain)
        try:
            differs = adapter_fields(folder)
        except UserError:
            if has_effect:
                by_outcome[REFUSED][case] = {}
            continue
        close = (
            same(our_logits(folder, "1", "dp", f"hf:{base}"), wanted) if differs else not has_effect
        )
        if has_effect or not close:
            by_outcome[SAME if close else WRONG][case] = differs
    return by_outcome


def generation_outcomes() -> dict[str, list[str]]:
    """What we make of a key → cases of generation_config.json that change what they write."""
    import torch
    import transformers

    folder = GOLDEN / "llama3"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([[5, 9, 20, 33]])

    def written(keys: dict[str, Any]) -> list[list[int]]:
        torch.manual_seed(0)
        lengths = {} if {"max_length", "max_new_tokens"} & {*keys} else {"max_new_tokens": 12}
        settings = transformers.GenerationConfig(**keys | lengths)
        out = model.generate(prompt, generation_config=settings, tokenizer=None)
        return out.tolist()

    plain = written(PLAIN_GENERATION)
    by_outcome: dict[str, list[str]] = {READ: [], NAMED: [], REFUSED: [], WRONG: []}
    for case in GENERATION_CASES:
        try:
            has_effect = written(changed(PLAIN_GENERATION, case)) != plain
        except Exception as error:  # whatever they raise
            print(f"  generation {case}: theirs {str(error)[:90]!r}")
            continue
        if has_effect:
            by_outcome[generation_outcome(case)].append(case)
    return by_outcome


def as_lines(golden: dict[str, Any]) -> str:
    """JSON with a line for each folder."""
    lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in golden.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.allclose(a, b, atol=TOLERANCE, rtol=0))


def main() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    asked = [word for word in sys.argv[1:] if not word.startswith("--")]
    golden = json.loads(FILE.read_text()) if asked and FILE.exists() else {}
    for name in asked or (*FOLDERS, ADAPTER, GENERATION):
        with tempfile.TemporaryDirectory() as folder:
            work = pathlib.Path(folder)
            if name == GENERATION:
                golden[name] = generation_outcomes()
            elif name == ADAPTER:
                golden[name] = adapter_outcomes(work)
            else:
                source = GOLDEN / name
                if not source.exists():
                    source = work / name
                    make(FAMILIES[name], source)
                golden[name] = outcomes(name, source, work)
        counts = ", ".join(f"{len(cases)} {outcome}" for outcome, cases in golden[name].items())
        print(f"{name}: {counts}", flush=True)
        if "--update-golden" in sys.argv:
            FILE.write_text(as_lines(golden))
    wrong = {name: [*found[WRONG]] for name, found in golden.items() if found[WRONG]}
    assert not wrong, wrong


if __name__ == "__main__":
    main()
