"""Compares Gemma 4 that sees with `transformers`, live. Needs the extra `hf`.

    python -m tests.by_hand.squares_parity                  # the comparison
    python -m tests.by_hand.squares_parity --update-golden  # and tests/golden/pictures anew

- Pixels: pictures of many sizes and modes, as Gemma 4's processor with Pillow resizes and cuts them; and as 12B's,
  which needs torchvision and whose weights of a filter have 16 bits: up to LEVELS of 255 differ.
- Logits: small random models of each kind, read by us, on rows with pictures of several aspect ratios, two,
  none and one; what we write gives the same logits in `transformers` again.
- Adapters of each kind: one that recipes.gemma4_vision trained, exported, in PEFT; one that PEFT made, here.
- Keys of vision_config with other values: each is refused, or means the same.

`transformers` 5.24 lets positions of 12B's pictures see each other in all layers when it is called, and in
sliding layers alone when it generates, as in the other models. We do the latter.
"""

import io
import json
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import PIL.Image
from flax import nnx

import tests.conftest  # noqa: F401, simulates the devices
from data import images
from data.squares import SquareForm
from recipes.common import checkpoint, hf
from recipes.common.mesh import make_mesh
from recipes.common.runtime.errors import UserError
from recipes.common.sharding.abstract import paths
from tests.by_hand.hf_parity import make_adapter, params_of_adapter
from tests.by_hand.pictures_parity import tune
from tests.conftest import ROOT
from tests.support.hf_families import FULL, GEMMA4, SLIDING, TOLERANCE
from tests.support.pictured_folder import write_folder

GOLDEN = ROOT / "tests" / "golden" / "pictures"
SIZES = [
    (896, 896),
    (37, 91),
    (1_200, 700),
    (301, 2_048),
    (5, 3),
    (900, 895),
    (10, 1_400),
    (4_000, 9),
]
MODES = ("RGB", "L", "RGBA", "P", "CMYK")
TEXT = GEMMA4 | {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "layer_types": [SLIDING, FULL] * 2,
    "rms_norm_eps": 0.05,
}  # fmt: skip
TOWER = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "head_dim": 12,
    "num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 144,
    "patch_size": 2, "pooling_kernel_size": 2, "rms_norm_eps": 0.05,
}  # fmt: skip
IDS = {"image_token_id": 63, "boi_token_id": 61, "eoi_token_id": 62}
KINDS = {  # name → config's class, text, vision
    "gemma4": (  # as E2B, with bounds
        "Gemma4Config",
        TEXT | {"hidden_size_per_layer_input": 6, "num_kv_shared_layers": 2, "pad_token_id": 1},
        TOWER | {"use_clipped_linears": True},
    ),
    "gemma4_large": (  # as 31B
        "Gemma4Config",
        TEXT | {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "use_bidirectional_attention": "vision"},
        TOWER | {"standardize": True, "pooling_kernel_size": 3, "position_embedding_size": 210},
    ),
    "gemma4_unified": (  # as 12B
        "Gemma4UnifiedConfig",
        TEXT | {"attention_k_eq_v": True, "num_global_key_value_heads": 2},
        {"mm_embed_dim": 24, "mm_posemb_size": 70, "patch_size": 2, "pooling_kernel_size": 2, "output_proj_dims": 24, "rms_norm_eps": 0.05},
    ),
}  # fmt: skip
UNIFIED = "gemma4_unified"
MOST = 70  # tokens of a picture
SHAPES = [(30, 22), (5, 40), (200, 2)]  # (width, height) of the rows' pictures: two, none and one
T = 160


def compare_pixels() -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    random = np.random.default_rng(0)
    count = 0
    for most in (70, 280, 1_120):
        theirs = Gemma4ImageProcessorPil(max_soft_tokens=most)
        form = SquareForm(48, most, 3, "bicubic")
        for width, height in SIZES:
            for mode in MODES:
                picture = PIL.Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
                file = io.BytesIO()
                picture.convert(mode).save(file, "TIFF" if mode == "CMYK" else "PNG")
                wanted = theirs(PIL.Image.open(file), return_tensors="np")
                ours = form.arrays([images.decode(file, form, "", "")], 1)
                compare_squares(ours, wanted, 16, 3)
                count += 1
    print(f"pixels: {count} pictures are equal")


LEVELS = 2


def compare_torch_pixels() -> None:
    """Raises AssertionError if a pixel differs from 12B's processor by more than LEVELS of 255."""
    from transformers.models.gemma4_unified.image_processing_gemma4_unified import (
        Gemma4UnifiedImageProcessor,
    )

    random = np.random.default_rng(0)
    differences = []
    for most in (70, 280):
        theirs = Gemma4UnifiedImageProcessor(max_soft_tokens=most)
        form = SquareForm(48, most, 3, "bicubic", columns_first=True)
        for width, height in SIZES:
            noise = PIL.Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
            small = noise.crop((0, 0, width // 8 + 1, height // 8 + 1))
            smooth = small.resize((width, height), PIL.Image.Resampling.BICUBIC)
            for picture in (noise, smooth):
                wanted = theirs(picture, return_tensors="np")
                ours = form.arrays([form.resized(picture)], 1)
                rows, columns = ours["grids"][0]
                count = rows * columns
                assert count == wanted["num_soft_tokens_per_image"][0]
                places = np.stack(np.divmod(np.arange(count), columns)[::-1], axis=1)
                np.testing.assert_array_equal(wanted["image_position_ids"][0, :count], places)
                pixels = 255 * wanted["pixel_values"][0, :count]
                own = ours["images"][0, :count].reshape(count, -1)
                differences.append(np.abs(own - pixels))
    most = max(x.max() for x in differences)
    share = max((x > 0.5).mean() for x in differences)
    print(
        f"12B's pixels: of {len(differences)} pictures, up to {share:.2%} differ, by at most {most:.1f} of 255"
    )
    assert most < LEVELS + 0.5


def compare_squares(ours: dict[str, np.ndarray], wanted, patch: int, pooling: int) -> None:
    """Raises AssertionError if one picture's squares have other patches than theirs."""
    (rows, columns), squares = ours["grids"][0], ours["images"][0]
    tokens = rows * columns
    assert tokens == wanted["num_soft_tokens_per_image"][0]
    by_place = {
        tuple(place): pixels
        for place, pixels in zip(wanted["image_position_ids"][0].tolist(), wanted["pixel_values"][0], strict=True)
        if place != [-1, -1]
    }  # fmt: skip
    assert len(by_place) == tokens * pooling**2
    for (x, y), pixels in by_place.items():
        square = squares[y // pooling * columns + x // pooling]
        top, left = y % pooling * patch, x % pooling * patch
        own = square[top : top + patch, left : left + patch].reshape(-1) / 255
        assert np.abs(own - pixels).max() < 1e-6


def make(kind: str, folder: pathlib.Path, **changes):
    """Writes a `transformers` model whose parameters and buffers are all random.

    Args:
      changes: keys of its vision_config with other values.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    name, text, seeing = KINDS[kind]
    seeing = seeing | changes
    config = getattr(transformers, name)(
        text_config=text, vision_config=seeing, audio_config=None, **IDS
    )
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            norm = "norm" in path.lower() or "patch_ln" in path
            weight.copy_(0.15 * torch.randn(weight.shape) + 1.0 * (norm and "bias" not in path))
        for path, buffer in model.named_buffers():
            if path.endswith(("layer_scalar", "std_scale")):
                buffer.copy_(1 + 0.15 * torch.randn(buffer.shape))
            elif path.endswith("std_bias"):
                buffer.copy_(0.15 * torch.randn(buffer.shape))
            elif path.endswith(("_min", "_max")):  # bounds that some numbers exceed
                size = 0.8 + 0.3 * torch.rand(buffer.shape)
                buffer.copy_(-size if path.endswith("_min") else size)
    model.to(torch.float32).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"max_soft_tokens": MOST, "patch_size": 2, "pooling_kernel_size": seeing["pooling_kernel_size"]})
    )  # fmt: skip
    return model.eval()


def rows_of(form: SquareForm) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(tokens, pictures) of three rows with two pictures, none and one."""
    random = np.random.default_rng(0)
    pictures = [
        form.resized(PIL.Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)))
        for width, height in SHAPES
    ]
    by_row = [form.arrays(shown, 2) for shown in (pictures[:2], (), pictures[2:])]
    arrays = {name: np.stack([row[name] for row in by_row]) for name in by_row[0]}
    tokens = random.integers(2, 60, (3, T), np.int32)
    for row, place, slot in ((0, 3, 0), (0, 76, 1), (2, 50, 0)):
        count = int(arrays["grids"][row, slot].prod())
        tokens[row, place : place + count + 2] = [61, *[63] * count, 62]
    return tokens, arrays


def their_logits(kind: str, model, tokens: np.ndarray, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """In float64: in float32, theirs differ from these as much as ours do."""
    import torch

    pooling, patch = KINDS[kind][2]["pooling_kernel_size"], 2
    pixels, places = [], []
    for row, slots in enumerate(arrays["grids"]):
        for slot, (rows, columns) in enumerate(slots.tolist()):
            if rows:
                values, where = patches_of(
                    arrays["images"][row, slot], rows, columns, patch, pooling, kind
                )
                pixels.append(values)
                places.append(where)  # fmt: skip
    input_ids = torch.tensor(tokens.astype(np.int64))
    kinds = (input_ids == 63).long()
    given = {"mm_token_type_ids": kinds, "attention_mask": torch.ones_like(input_ids)}
    if kind == UNIFIED:
        masks = model.create_masks_for_generate(
            model.config, torch.zeros((*input_ids.shape, 1), dtype=torch.float64), None, None, None, mm_token_type_ids=kinds
        )  # fmt: skip
        given["attention_mask"] = masks
    with torch.no_grad():
        return model.double()(
            input_ids=input_ids,
            pixel_values=torch.tensor(np.stack(pixels)),
            image_position_ids=torch.tensor(np.stack(places)),
            use_cache=False,
            **given,
        ).logits.numpy()


def patches_of(squares, rows: int, columns: int, patch: int, pooling: int, kind: str):
    """A picture as their processor gives it: row by row, then padding."""
    side = 1 if kind == UNIFIED else pooling
    size = patch * pooling // side
    most = MOST * side**2
    values, places = np.zeros((most, size * size * 3)), np.full((most, 2), -1)
    number = 0
    for y in range(rows * side):
        for x in range(columns * side):
            square = squares[y // side * columns + x // side]
            top, left = y % side * size, x % side * size
            values[number] = square[top : top + size, left : left + size].reshape(-1) / 255
            places[number] = x, y
            number += 1
    return values, places


KEYS = [  # of vision_config, with other values
    *({"hidden_activation": "gelu"}, {"attention_bias": True}, {"num_key_value_heads": 1}),
    *({"rope_parameters": {"rope_type": "axial", "rope_theta": 7.0}}, {"rms_norm_eps": 0.5}),
    *({"standardize": True}, {"use_clipped_linears": False}, {"attention_dropout": 0.5}),
    *(
        {"max_position_embeddings": 7},
        {"initializer_range": 0.5},
        {"head_dim": 8},
        {"head_dim": 10},
    ),
    *({"position_embedding_size": 150}, {"num_hidden_layers": 1}, {"intermediate_size": 12}),
]


def compare_keys() -> None:
    """Each key is refused, or means here what it means in `transformers`."""
    for changes in KEYS:
        (key,) = changes
        with tempfile.TemporaryDirectory() as place:
            theirs = pathlib.Path(place) / "theirs"
            try:
                model = make("gemma4", theirs, **changes)
            except Exception as error:  # transformers has no such model
                print(f"{key}={changes[key]}: not made, {type(error).__name__}")
                continue
            try:
                source = hf.open_folder(theirs, "gemma4_vision")
            except UserError as error:
                print(f"{key}={changes[key]}: refused: {str(error).partition(' has ')[2][:60]}")
                continue
            ours, wanted = both_logits("gemma4", model, source)[:2]
            error = np.abs(ours - wanted).max()
            print(f"{key}={changes[key]}: the same here, {error:.1e}")
            assert error < 5 * TOLERANCE  # rounding; another meaning changes hundreds of times that


def both_logits(kind: str, model, source):
    """(our logits, theirs, tokens, pictures, our variables)."""
    layout = checkpoint.layout_of(source, make_mesh("1x1"), "dp")
    config = layout.config
    form = SquareForm(config.square, config.picture_tokens, 3, config.resample)
    tokens, arrays = rows_of(form)
    wanted = their_logits(kind, model, tokens, arrays)
    variables = checkpoint.restore_variables(source, layout)
    run = nnx.jit(lambda model, tokens, arrays: model(tokens, None, **arrays))
    ours = np.asarray(run(layout.model.merge(variables), tokens, arrays))
    return ours, wanted, tokens, arrays, variables


def compare_logits(kind: str, folder: pathlib.Path, update_golden: bool) -> None:
    import transformers

    theirs = folder / "theirs"
    model = make(kind, theirs)
    source = hf.open_folder(theirs, "gemma4_vision")
    config = source.config
    ours, wanted, tokens, arrays, variables = both_logits(kind, model, source)
    error = np.abs(ours - wanted).max()
    read = {path: np.asarray(x) for tree in variables.values() for path, x in paths(tree).items()}
    hf.write(
        folder / "back", "gemma4_vision", config, 128, read.__getitem__,
        architecture=source.metadata["architecture"],
    )  # fmt: skip
    back = transformers.AutoModelForImageTextToText.from_pretrained(folder / "back").eval()
    again = np.abs(their_logits(kind, back, tokens, arrays) - wanted).max()
    print(f"{kind}: grids {arrays['grids'].reshape(-1, 2).tolist()}; logits up to {np.abs(wanted).max():.2f} "
          f"differ by at most {error:.1e}, written back and read by transformers {again:.1e}")  # fmt: skip
    assert error < TOLERANCE, error
    assert again == 0
    if update_golden:
        target = GOLDEN / kind
        target.mkdir(parents=True, exist_ok=True)
        for file in ("config.json", "model.safetensors", "preprocessor_config.json"):
            (target / file).write_bytes((theirs / file).read_bytes())
        np.savez_compressed(
            target / "outputs.npz", tokens=tokens, logits=wanted.astype(np.float32),
            images=arrays["images"], grids=arrays["grids"],
        )  # fmt: skip


ADAPTED = r"model\.language_model\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj"
LORA = "gemma4_lora"  # in GOLDEN, of the first kind


def compare_adapters(kind: str, folder: pathlib.Path, update_golden: bool) -> None:
    import peft
    import transformers

    theirs, entry = write_folder(folder, GOLDEN / kind), "gemma4_vision"
    base = f"hf:{theirs}"

    def with_peft(adapter: pathlib.Path):
        model = transformers.AutoModelForImageTextToText.from_pretrained(theirs)
        return peft.PeftModel.from_pretrained(model, adapter).eval()

    run = tune(entry, theirs, seq_len=T)
    plain = both_logits(kind, with_peft(folder / "adapter").unload(), hf.open_folder(theirs, entry))
    ours, wanted = both_logits(kind, with_peft(folder / "adapter"), checkpoint.find(run))[:2]
    trained = np.abs(ours - wanted).max()
    assert np.abs(wanted - plain[1]).max() > 100 * TOLERANCE, "the adapter changes nothing"
    made, back = folder / LORA, folder / "back"
    make_adapter(theirs, ADAPTED, made, stddev=0.1)
    source = checkpoint.find(made, base=base, entry=entry)
    ours, wanted = both_logits(kind, with_peft(made), source)[:2]
    read = np.abs(ours - wanted).max()
    factors = params_of_adapter(source.adapter)
    hf.write_adapter(
        back, entry, source.adapter.config, None, factors.__getitem__,
        architecture=source.metadata["architecture"],
    )  # fmt: skip
    again = np.abs(both_logits(kind, with_peft(back), source)[1] - wanted).max()
    print(f"{kind}: an adapter of ours in PEFT differs by {trained:.1e}; one of PEFT's here by {read:.1e}, "
          f"exported and in PEFT by {again:.1e}")  # fmt: skip
    assert max(trained, read) < TOLERANCE
    assert again == 0
    if update_golden and LORA.startswith(f"{kind}_"):
        shutil.copytree(made, GOLDEN / LORA, dirs_exist_ok=True)
        np.save(GOLDEN / LORA / "logits.npy", wanted[:, ::8].astype(np.float32))


if __name__ == "__main__":
    update_golden = "--update-golden" in sys.argv
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as place:
            compare_logits(kind, pathlib.Path(place), update_golden)
        with tempfile.TemporaryDirectory() as place:
            compare_adapters(kind, pathlib.Path(place), update_golden)
    compare_pixels()
    compare_torch_pixels()
    compare_keys()
