"""Compares our adapter for lm-evaluation-harness with its own model for Hugging Face's folders, live.

    pip install -e '.[eval,hf]' accelerate
    python -m tests.by_hand.harness_parity FOLDER    # a model folder with its tokenizer, or "small", made here

The same requests to both: log-likelihoods, whole texts and answers, some longer than the context. They
are equal within 1e-4 of a nat a token, a greedy answer to the last character; and so are the tasks' results.
"""

import contextlib
import json
import os
import pathlib
import sys
import tempfile

os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np

import tests.conftest  # noqa: F401, simulates the devices
from data import tokenizer
from recipes.common import checkpoint, hf
from recipes.common.mesh import make_mesh
from recipes.instruments.harness import tasks
from tests.support import small_tasks, small_tokenizers

TOLERANCE = 1e-4  # of a nat, for each token
PAIRS = [  # context, continuation
    ("The capital of France is", " Paris"),
    ("The capital of France is ", "Paris"),  # the space goes to the continuation
    ("The capital of France is \n ", "Paris, and that of Spain is Madrid."),
    ("", "Paris"),
    ("Once upon a time", " there was"),
    ("def", "ine something"),  # a token may end elsewhere once the two are one text
    ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "Hello"),
    ("日本", "語"),
    ("word " * 400, "word"),  # longer than the context of a small model
]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello. "}]
TEXTS = [row["text"] for row in small_tasks.TEXTS] + ["many words " * 300]
ASKED = [("Once upon a time", {"until": ["."], "max_gen_toks": 20}),
         ("Once upon a time, in a land far, far away, ", {"until": ["\n\n", ","], "max_gen_toks": 20}),
         ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", {"until": [], "max_gen_toks": 20}),
         ("word " * 400, {"until": ["zzz"], "max_gen_toks": 9})]  # fmt: skip


def requests(kind: str, arguments: list[tuple]) -> list:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def small(folder: pathlib.Path) -> pathlib.Path:
    """A random model of the Llama family, with a tokenizer that puts a token in front of texts."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.from_files(small_tokenizers.metaspace()).size, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=100,
        bos_token_id=1, eos_token_id=2, initializer_range=0.5,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name, content in small_tokenizers.metaspace().items():
        (folder / name).write_bytes(content)
    plain = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(plain))
    return folder


def ours(folder: pathlib.Path, mesh: str, rules: str):
    from recipes.instruments.harness.model import Model

    source = hf.Folder(folder)
    layout = checkpoint.layout_of(source, make_mesh(mesh), rules)
    variables = checkpoint.restore_variables(source, layout)
    return Model(layout, variables, source.tokenizer(), 4, checkpoint.context(source), {})


def compare(folder: pathlib.Path, meshes: list[tuple[str, str]]) -> None:
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=4)
    assert theirs.max_length == checkpoint.context(hf.Folder(folder))
    kinds = {"loglikelihood": PAIRS, "loglikelihood_rolling": [(text,) for text in TEXTS],
             "generate_until": ASKED}  # fmt: skip
    wanted = {kind: getattr(theirs, kind)(requests(kind, given)) for kind, given in kinds.items()}
    with tempfile.TemporaryDirectory() as place:
        of = small_tasks.write(pathlib.Path(place))
        names = ",".join(small_tasks.TASKS)
        scores = tasks.run(theirs, tasks.load(names, str(of)), -1, 0, False)["results"]
        for mesh, rules in meshes:
            model = ours(folder, mesh, rules)
            assert model.prefix_token_id == theirs.prefix_token_id
            for prompts in (True, False) if theirs.tokenizer.chat_template else ():
                want = theirs.apply_chat_template(CHAT, add_generation_prompt=prompts)
                assert model.apply_chat_template(CHAT, prompts) == want
            found = {k: getattr(model, k)(requests(k, given)) for k, given in kinds.items()}
            worst = 0.0
            for (text, more), (nats, greedy), want in zip(
                PAIRS, found["loglikelihood"], wanted["loglikelihood"], strict=True
            ):
                count = len(theirs.tok_encode(more))
                worst = max(worst, abs(nats - want[0]) / count)
                assert greedy == want[1], (text, more)
            for text, nats, want in zip(
                TEXTS, found["loglikelihood_rolling"], wanted["loglikelihood_rolling"], strict=True
            ):
                worst = max(worst, abs(nats - want) / len(theirs.tok_encode(text)))
            assert found["generate_until"] == wanted["generate_until"], (found, wanted)
            results = tasks.run(model, tasks.load(names, str(of)), -1, 0, False)["results"]
            for name, metrics in scores.items():
                for metric, value in metrics.items():
                    mine = results[name][metric]
                    if isinstance(value, float):
                        np.testing.assert_allclose(
                            mine, value, rtol=1e-4, err_msg=f"{name} {metric}"
                        )
            assert worst < TOLERANCE, worst
            print(f"{folder.name} on {mesh}, {rules}: within {worst:.1e} of a nat a token; "
                  f"acc {results['zoo_choice']['acc,none']:.4f}, theirs "
                  f"{scores['zoo_choice']['acc,none']:.4f}")  # fmt: skip
        print("Answers:", *wanted["generate_until"], sep="\n  ")


def main() -> None:
    meshes = [("1x1", "dp"), ("2x4", "fsdp_tp"), ("8", "fsdp")]
    with contextlib.ExitStack() as stack:
        if sys.argv[1:] == ["small"]:
            place = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) / "small"
            compare(small(place), meshes)
        else:
            compare(pathlib.Path(sys.argv[1]), meshes[:1])


if __name__ == "__main__":
    main()
