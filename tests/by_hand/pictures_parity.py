"""Compares what a model that sees is given and tuned to with `transformers` and PEFT, live. Needs the extra `hf`.

    python -m tests.by_hand.pictures_parity

- Pixels: pictures of many sizes and modes, as Gemma 3's processor of pictures resizes and normalizes them.
- Tokens: prompts and a conversation with pictures, as its processor makes them.
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
import tokenizers
from flax import nnx
from tokenizers import AddedToken, models

import tests.conftest  # noqa: F401, simulates the devices
from data import images, picture_rows, tokenizer
from recipes.common import checkpoint
from recipes.common.mesh import make_mesh
from tests.conftest import ROOT
from tests.support.hf_families import TOLERANCE
from tests.support.pictured_folder import GOLDEN, write_folder

SIZES = [(896, 896), (37, 91), (1_200, 700), (301, 2_048), (5, 3), (900, 895)]
MODES = ("RGB", "L", "RGBA", "P", "CMYK")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text | trim }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
CONTROL = ["<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>"]
CONTROL += ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]


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


def gemma_like() -> tokenizers.Tokenizer:
    """A tokenizer of Gemma's kind: no pre-tokenizer, spaces are ▁, line breaks merge, bytes are the rest."""
    words = [
        "\n",
        "\n\n",
        "\n\n\n",
        "▁",
        *"abcdefghijklmnopqrstuvwxyzWT?.",
        *(f"<0x{i:02X}>" for i in range(256)),
    ]
    vocab = {word: i for i, word in enumerate(["<unk>", *words])}
    merges = [("\n", "\n"), ("\n\n", "\n")]
    made = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    made.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in CONTROL])
    return made


def compare_tokens(folder: pathlib.Path) -> None:
    import transformers
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    made = gemma_like()
    made.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>",
        extra_special_tokens={
            "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    )  # fmt: skip
    theirs = Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": 28, "width": 28}), fast, TEMPLATE, 4
    )
    begin, end, placeholder = (made.token_to_id(name) for name in CONTROL[-3:])
    around = picture_rows.PictureTokens(begin, placeholder, end, 4, "\n\n")
    ours = picture_rows.for_pictures(tokenizer.find(str(folder / "tokenizer.json")), around)
    picture = PIL.Image.new("RGB", (9, 9))
    for text in ("<image>What is it?", "Is <image> or\n<image>a cat?\n", "a\n\n<image>\n\nb"):
        shown = [picture] * text.count("<image>")
        wanted = theirs(text=text.replace("<image>", "<start_of_image>"), images=shown)["input_ids"]
        marked = {"prompt": text.replace("<image>", picture_rows.MARK)}
        found = picture_rows.asked(marked, shown, "", ours, around).tokens
        without = found[len(ours.start) :].tolist()
        assert without == np.ravel(wanted).tolist(), (text, without, wanted)
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "a cat."},
        {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    ]
    text = theirs.apply_chat_template(messages, add_generation_prompt=True, bos_token="<bos>")
    wanted = theirs(text=text, images=[picture])["input_ids"]
    row, shown = picture_rows.with_marks({"messages": messages, "image": b"x"}, folder, "")
    found = picture_rows.asked(row, shown, "", ours, around).tokens.tolist()
    assert found == np.ravel(wanted).tolist(), (found, wanted)
    print("tokens: 3 prompts and a conversation are equal")


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
