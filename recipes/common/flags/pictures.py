"""The flags of pictures, for the recipes that read them."""

import dataclasses

from recipes.common.runtime.flags import flag

# Fields of Config that say how pictures are read: a checkpoint's stay as they were.
INPUTS = ("channels", "labels", "mean", "std", "resample")


@dataclasses.dataclass(frozen=True)
class Pictures:
    """Flags of the pictures."""

    dataset: str = flag(
        "digits",
        "Pictures: digits, a folder with one subfolder for each class, or hf:NAME.",
        "data",
    )
    image_column: str = flag("image", "Column with the images of hf: datasets.", "data")
    label_column: str = flag("label", "Column with their labels.", "data")
    crop: bool = flag(True, "Shift training pictures at random, by up to an eighth.", "data")
    flip: bool = flag(False, "Mirror half of the training pictures, left to right.", "data")


@dataclasses.dataclass(frozen=True)
class CaptionedPictures(Pictures):
    """Flags of pictures with captions."""

    dataset: str = flag(
        "digits",
        "Pictures with captions: digits, a folder, a pattern of Parquet or tar files, or hf:NAME.",
        "data",
    )
    caption_column: str = flag(
        "", "Column with captions; empty: caption or text, or for hf: datasets none.", "data"
    )
