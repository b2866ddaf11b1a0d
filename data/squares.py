"""Pictures as grids of squares of pixels, with their aspect ratio kept, as Gemma 4's processor makes them.

A picture is resized to the largest R × C squares, at most K of them, that its aspect ratio allows, each
rounded down. Each square becomes a token of the model.

Shapes: K squares, S height and width of a square, C channels, R rows of squares, M slots for pictures.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import PIL.Image

from data import images


class SquareForm(NamedTuple):
    """The form into which pictures are brought."""

    side: int  # S, pixels
    most: int  # K
    channels: int  # 1 (grey) or 3 (RGB)
    resample: str = "bicubic"  # filter to resize with, one of images.FILTERS
    # Whether columns are resized before rows, as 12B's processor does. Both are rounded, and Pillow itself
    # begins with rows where that is less work.
    columns_first: bool = False

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of squares of a picture of so many pixels."""
        scale = math.sqrt(self.most * self.side**2 / (width * height))
        rows, columns = (int(scale * pixels / self.side) for pixels in (height, width))
        if not rows:  # as narrow as that, a picture does not keep its aspect ratio
            return 1, min(max(width // height, 1), self.most)
        if not columns:
            return min(height // width, self.most), 1
        return rows, columns

    def resized(self, picture: PIL.Image.Image) -> np.ndarray:
        """The pixels of a picture: uint8 [R · S, columns · S, channels]."""
        picture = images.upright(picture, self.channels)
        rows, columns = self.grid(*picture.size)
        size = (columns * self.side, rows * self.side)
        if picture.size != size:
            if self.columns_first:
                picture = picture.resize((size[0], picture.height), images.FILTERS[self.resample])
            picture = picture.resize(size, images.FILTERS[self.resample])
        return np.asarray(picture).reshape(*size[::-1], self.channels)

    def tokens(self, width: int, height: int) -> int:
        """The tokens of a picture of so many pixels."""
        rows, columns = self.grid(width, height)
        return rows * columns

    def arrays(self, pictures: Sequence[np.ndarray], slots: int) -> dict[str, np.ndarray]:
        """{"images": uint8 [M, K, S, S, C], "grids": int32 [M, 2]} of pixels from `resized`."""
        S = self.side
        images_MKSSC = np.zeros((slots, self.most, S, S, self.channels), np.uint8)
        grids_M2 = np.zeros((slots, 2), np.int32)
        for slot, pixels in enumerate(pictures):
            rows, columns = (length // S for length in pixels.shape[:2])
            parts = pixels.reshape(rows, S, columns, S, self.channels).swapaxes(1, 2)
            images_MKSSC[slot, : rows * columns] = parts.reshape(-1, S, S, self.channels)
            grids_M2[slot] = rows, columns
        return {"images": images_MKSSC, "grids": grids_M2}


def joined(squares_KSSC: np.ndarray, grid: Sequence[int]) -> np.ndarray:
    """The pixels of a picture, [R · S, columns · S, C], from its squares."""
    rows, columns = map(int, grid)
    _, S, _, C = squares_KSSC.shape
    parts = squares_KSSC[: rows * columns].reshape(rows, columns, S, S, C)
    return parts.swapaxes(1, 2).reshape(rows * S, columns * S, C)
