"""Compares what a model that sees is given and tuned to with `transformers` and PEFT, live. Needs the extra `hf`.

    python -m tests.by_hand.pictures_parity                  # the comparison
    python -m tests.by_hand.pictures_parity --update-golden  # and tests/golden/pictures/dialogues.json anew

- Pixels: pictures of many sizes and modes, as Gemma 3's processor of pictures resizes and normalizes them.
- Tokens: prompts with pictures, as its processor makes them, and dialogues, whose texts and tokens
  tests/golden/pictures/dialogues.json keeps.
- Tuning: an adapter of the golden folder that recipes.gemma3_vision trained, exported for PEFT and merged:
  logits of rows with pictures.
"""

import io
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import PIL.Image
from flax import nnx

import tests.conftest  # noqa: F401, simulates the devices
from data import images, picture_rows, tokenizer
from recipes.common import checkpoint
from recipes.common.mesh import make_mesh
from tests.conftest import ROOT
from tests.support import gemma_like
from tests.support.hf_families import TOLERANCE
from tests.support.pictured_folder import GOLDEN, write_folder

SIZES = [(896, 896), (37, 91), (1_200, 700), (301, 2_048), (5, 3), (900, 895)]
MODES = ("RGB", "L", "RGBA", "P", "CMYK")
GOLDEN_DIALOGUES = GOLDEN.parent / "dialogues.json"
IMAGE = {"type": "image"}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


# Pictures first, between and behind texts, in several turns; white space at the borders of parts.
DIALOGUES = [
    [
        {"role": "user", "content": [IMAGE, part("What is it?")]},
        {"role": "assistant", "content": "a cat."},
        {"role": "user", "content": [part(" Is "), IMAGE, part(" a cat\n"), part(" too? ")]},
        {"role": "assistant", "content": [part("no.\n")]},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": " it is a dog."},
    ],
    [
        {"role": "user", "content": "Tell what follows."},
        {"role": "assistant", "content": "go on."},
        {"role": "user", "content": [part("\n\n"), IMAGE, IMAGE]},
        {"role": "assistant", "content": "a dog and a cat."},
    ],
]


def compare_pixels() -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    random = np.random.default_rng(0)
    theirs = Gemma3ImageProcessorPil(size={"height": 896, "width": 896})
    form = images.Form(896, 3, "bilinear")
    for width, height in SIZES:
        for mode in MODES:
            picture = PIL.Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
            picture = picture.convert(mode)
            kind = "TIFF" if mode == "CMYK" else "PNG"
            file = io.BytesIO()
            picture.save(file, kind)
            wanted = theirs(PIL.Image.open(file), return_tensors="np")["pixel_values"][0]
            ours = images.decode(file, form, "", "").astype(np.float32)
            found = ((ours / 255 - 0.5) / 0.5).transpose(2, 0, 1)
            assert np.abs(found - wanted).max() < 1e-6, (width, height, mode)
    print(f"pixels: {len(SIZES) * len(MODES)} pictures are equal")


def compare_tokens(folder: pathlib.Path) -> None:
    import transformers
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    for name, content in gemma_like.files("gemma3").items():
        (folder / name).write_bytes(content)
    made, names = gemma_like.made(), gemma_like.PICTURES["gemma3"]
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
        extra_special_tokens=dict(zip(("boi_token", "image_token", "eoi_token"), names, strict=True)),
    )  # fmt: skip
    theirs = Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": 28, "width": 28}), fast, gemma_like.GEMMA3, 4
    )
    around = picture_rows.PictureTokens(*map(made.token_to_id, names), 4, "\n\n")
    ours = picture_rows.for_pictures(tokenizer.find(str(folder / "tokenizer.json")), around)
    picture = PIL.Image.new("RGB", (9, 9))
    for text in ("<image>What is it?", "Is <image> or\n<image>a cat?\n", "a\n\n<image>\n\nb"):
        shown = [picture] * text.count("<image>")
        wanted = theirs(text=text.replace("<image>", "<start_of_image>"), images=shown)["input_ids"]
        marked = {"prompt": text.replace("<image>", picture_rows.MARK)}
        found = picture_rows.asked(marked, shown, "", ours, around).tokens
        without = found[len(ours.start) :].tolist()
        assert without == np.ravel(wanted).tolist(), (text, without, wanted)
    print("tokens: 3 prompts are equal")
    golden = []
    for messages in DIALOGUES:
        pictures = json.dumps(messages).count(json.dumps(IMAGE))
        text = theirs.apply_chat_template(messages)
        tokens = np.ravel(theirs(text=text, images=[picture] * pictures)["input_ids"]).tolist()
        golden.append({"family": "gemma3", "messages": messages, "text": text, "tokens": tokens})
        text = theirs.apply_chat_template(messages, chat_template=gemma_like.GEMMA4)
        golden.append({"family": "gemma4", "messages": messages, "text": text})
    if "--update-golden" in sys.argv:
        lines = ",\n".join(map(json.dumps, golden))
        GOLDEN_DIALOGUES.write_text(f"[\n{lines}\n]\n")
    assert json.loads(GOLDEN_DIALOGUES.read_text()) == golden
    print(f"dialogues: {len(golden)} are those of {GOLDEN_DIALOGUES.name}, which a test reads")


def tune(entry: str, theirs: pathlib.Path, seq_len: int) -> pathlib.Path:
    """Trains an adapter of a folder that `write_folder` wrote, and exports it as `merged` and `adapter` beside it.

    Returns: the run's folder.
    """
    folder = theirs.parent
    run = [sys.executable, "-m"]
    tuned, base = folder / "run", f"--restore_from=hf:{theirs}"
    flags = [f"--dataset={folder / 'rows.jsonl'}", f"--seq_len={seq_len}", "--batch_size=4"]
    flags += ["--steps=3", "--questions=0", "--lora_rank=2", "--mesh=2x1", "--learning_rate=0.01"]
    flags += ["--warmup_steps=0", base, f"--workdir={tuned}"]
    subprocess.run([*run, f"recipes.{entry}", *flags], cwd=ROOT, check=True)
    export = [*run, "recipes.hf", "export", f"--source={tuned}"]
    subprocess.run([*export, f"--target={folder / 'merged'}"], cwd=ROOT, check=True)
    subprocess.run([*export, f"--target={folder / 'adapter'}", "--adapter"], cwd=ROOT, check=True)
    return tuned


def compare_tuning(folder: pathlib.Path) -> None:
    import peft
    import torch
    import transformers

    theirs = write_folder(folder)
    tuned = tune("gemma3_vision", theirs, seq_len=24)
    source = checkpoint.find(tuned)
    layout = checkpoint.layout_of(source, make_mesh("1x1"), "dp")
    model = layout.model.merge(checkpoint.restore_variables(source, layout))
    stored = np.load(GOLDEN / "outputs.npz")
    run_model = nnx.jit(lambda model, tokens, images: model(tokens, None, images))
    ours = np.asarray(run_model(model, stored["tokens"], stored["images"]))
    keys = json.loads((theirs / "config.json").read_text())
    pictures = (stored["tokens"] == keys["image_token_index"]).sum(axis=1) // keys[
        "mm_tokens_per_image"
    ]
    pixels = np.concatenate([x[:n] for x, n in zip(stored["images"], pictures, strict=True)])
    pixel_values = torch.tensor((pixels / 255 - 0.5) / 0.5, dtype=torch.float32).permute(0, 3, 1, 2)
    tokens = torch.tensor(stored["tokens"].astype(np.int64))
    is_picture = (tokens == keys["image_token_index"]).long()
    merged = transformers.Gemma3ForConditionalGeneration.from_pretrained(folder / "merged")
    begin = transformers.Gemma3ForConditionalGeneration.from_pretrained(theirs)
    adapted = peft.PeftModel.from_pretrained(begin, folder / "adapter")
    for name, one in (("merged", merged), ("PEFT's adapter", adapted)):
        with torch.no_grad():
            wanted = one.eval()(
                input_ids=tokens, pixel_values=pixel_values, token_type_ids=is_picture
            ).logits.numpy()
        error = np.abs(ours - wanted).max()
        print(f"{name}: logits up to {np.abs(wanted).max():.2f} differ by at most {error:.1e}")
        assert error < TOLERANCE


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        compare_pixels()
        compare_tokens(pathlib.Path(place))
        compare_tuning(pathlib.Path(place))
