"""Compares text encoders with `transformers` and `sentence-transformers`, live. Needs both, and torch.

    python -m tests.by_hand.encoder_parity                      # the comparison
    python -m tests.by_hand.encoder_parity --update-golden      # and tests/golden/hf anew

For each case: a small random model of theirs, read by us, gives their representations, vectors of texts and
logits of classes on one device and on two meshes that their sizes are not divisible by; what we write is
bit-equal to what we read, and gives theirs in `transformers` again. Masks to fill in: hf_parity.
"""

import pathlib
import shutil
import sys
import tempfile
from typing import Any

import numpy as np

import tests.conftest  # noqa: F401, simulates the devices
from tests.support.encoder_cases import (
    CASES,
    MESHES,
    OUTPUTS,
    TEXT_BT,
    Case,
    largest_error,
    ours,
    tokens_of,
    types_of,
)
from tests.support.golden_folders import GOLDEN
from tests.support.hf_families import TOLERANCE
from tests.support.hf_models import export, params_of


def make(case: Case, folder: pathlib.Path) -> None:
    """Writes a random model of theirs in bfloat16."""
    import torch
    import transformers

    torch.manual_seed(0)
    model_class = getattr(transformers, case.name)
    options = {"num_hidden_layers": 2, "max_position_embeddings": 64} | case.options
    model = model_class(model_class.config_class(**options))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(0.15 * torch.randn(weight.shape) + ("norm" in name.lower()))
    model.to(torch.bfloat16)
    if not case.modules:
        return model.save_pretrained(folder)
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules as kinds
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    plain = folder.with_name(f"{folder.name}_plain")
    model.save_pretrained(plain)
    words = {f"w{i}": i for i in range(67)}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w3")), pad_token="w0", unk_token="w3"
    )
    fast.save_pretrained(plain)
    transformer = kinds.Transformer(str(plain))
    modules = [transformer, kinds.Pooling(24, pooling_mode=case.modules[0])]
    modules += [kinds.Normalize()] * ("normalize" in case.modules)
    SentenceTransformer(modules=modules, device="cpu").save(str(folder), create_model_card=False)


def theirs(case: Case, folder: pathlib.Path) -> dict[str, np.ndarray]:
    """What `transformers` computes of the texts: hidden, and vector or logits; float32."""
    import torch
    import transformers

    model, loading = getattr(transformers, case.name).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if case.modules:  # which use no pooler, and exports have none
        loading["missing_keys"] = {x for x in loading["missing_keys"] if "pooler" not in x}
    assert not any(loading.values()), loading
    return outputs(model, case, folder)


def outputs(model: Any, case: Case, folder: pathlib.Path) -> dict[str, np.ndarray]:
    """What their model, read of a folder, computes of the texts."""
    import torch

    config = model.config
    types_BT = types_of(getattr(config, "type_vocab_size", 0))
    given = {"input_ids": tokens_of(case.name), "attention_mask": TEXT_BT.astype(int)}
    given |= {} if types_BT is None else {"token_type_ids": types_BT}
    given = {name: torch.tensor(array) for name, array in given.items()}
    with torch.no_grad():
        out = model(**given, output_hidden_states=True)
        hidden_BTD = out.hidden_states[-1]
        found = {"hidden": hidden_BTD * torch.tensor(TEXT_BT)[:, :, None]}
        if "Classification" in case.name:
            found["logits"] = out.logits
        elif case.modules:
            from sentence_transformers import SentenceTransformer

            whole = SentenceTransformer(
                str(folder), device="cpu", model_kwargs={"dtype": "float32"}
            )
            found["vector"] = whole(given)["sentence_embedding"]
        elif "Modern" not in case.name:
            found["vector"] = out.pooler_output
    return {name: array.numpy() for name, array in found.items()}


def compare(name: str, case: Case, work: pathlib.Path) -> None:
    """Prints the comparison; raises AssertionError where ours and theirs differ."""
    folder, back = work / name, work / f"{name}_back"
    make(case, folder)
    wanted = theirs(case, folder)
    errors = [largest_error(ours(f"hf:{folder}", mesh), wanted) for mesh in MESHES]
    export(f"hf:{folder}", back)
    for file in folder.glob("*token*"):
        shutil.copy(file, back)
    again = largest_error(theirs(case, back), wanted)
    size = max(np.abs(array).max() for array in wanted.values())
    here = [f"{mesh} {error:.1e}" for mesh, error in zip(MESHES, errors, strict=True)]
    print(f"{name:<23} {', '.join(wanted)} to {size:.1f}; ours differ by", *here, end="; ")
    print(f"exported, theirs by {again:.1e}")
    a, b = params_of(f"hf:{folder}"), params_of(f"hf:{back}")
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], err_msg=path)
    assert max(*errors, again) < TOLERANCE, name
    if "--update-golden" in sys.argv and case.golden:
        target = GOLDEN / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for file in ("config.json", "model.safetensors", "modules.json", "1_Pooling/config.json"):
            if (folder / file).exists():
                (target / file).parent.mkdir(exist_ok=True)
                shutil.copy(folder / file, target / file)
        np.savez(target / OUTPUTS, **wanted)


def main() -> None:
    import sentence_transformers
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    asked = [word for word in sys.argv[1:] if not word.startswith("--")]
    with tempfile.TemporaryDirectory() as work:
        for name in asked or CASES:
            compare(name, CASES[name], pathlib.Path(work))
    print(f"transformers {transformers.__version__}, sentence-transformers "
          f"{sentence_transformers.__version__}: all within {TOLERANCE}, all bit-equal back.")  # fmt: skip


if __name__ == "__main__":
    main()
