"""Reads MXFP4 tensors, the format in which GPT-OSS' experts are published.

NAME_blocks is uint8 [E, R, G, 16]: each of E · R rows has G blocks of 32 values, two in a byte, the
first in the low bits. A value is e2m1: a sign, two bits of exponent, one of mantissa. NAME_scales is
uint8 [E, R, G]: each block is multiplied by 2^(scale - 127). The tensor NAME is [E, G · 32, R].
"""

import pathlib
from typing import Any, NamedTuple

import numpy as np

from recipes.common.hf.tensors import Stored
from recipes.common.runtime.errors import UserError

BLOCK = 32
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([VALUES, -VALUES])  # indexed by four bits


class Quantized(NamedTuple):
    """A tensor like tensors.Stored that is dequantized while it is read."""

    blocks: Stored
    scales: Stored

    @property
    def name(self) -> str:
        return self.blocks.name.removesuffix("_blocks")

    @property
    def file(self) -> pathlib.Path:
        return self.blocks.file

    @property
    def shape(self) -> tuple[int, ...]:
        E, R, G, _ = self.blocks.shape
        return E, G * BLOCK, R

    @property
    def dtype(self) -> str:
        return "BF16"  # holds all values exactly, unless a scale is tiny

    def read(self, where: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of [E, G · 32, R] as float32, one expert at a time."""
        expert, column, row = where
        blocks = slice(column.start // BLOCK, -(-column.stop // BLOCK))
        cut = slice(column.start - blocks.start * BLOCK, column.stop - blocks.start * BLOCK)
        lengths = [part.stop - part.start for part in where]
        out = np.empty(lengths, np.float32)
        for i in range(lengths[0]):
            one = slice(expert.start + i, expert.start + i + 1)
            quantized = (self.blocks.read((one, row, blocks)), self.scales.read((one, row, blocks)))
            out[i] = dequantize(*quantized)[0].T[cut]
        return out


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 [..., G, 16] and [..., G] → float32 [..., G · 32]. A scale of 255 means NaN."""
    pairs = np.stack([VALUES[blocks & 15], VALUES[blocks >> 4]], axis=-1)
    exponents = scales.astype(np.int32)[..., None, None] - 127
    with np.errstate(over="ignore"):  # the largest scales overflow
        values = np.where(exponents == 128, np.float32("nan"), np.ldexp(pairs, exponents))
    return values.reshape(*scales.shape[:-1], -1)


def unpack(stored: dict[str, Stored]) -> dict[str, Any]:
    """Replaces NAME_blocks and NAME_scales by a Quantized NAME.

    Raises UserError if one of them is missing or wrong, or the folder also has an unquantized NAME.
    """
    tensors: dict[str, Any] = dict(stored)
    for name, blocks in stored.items():
        if not name.endswith("_blocks"):
            continue
        stem = name.removesuffix("_blocks")
        scales = stored.get(f"{stem}_scales")
        shapes = len(blocks.shape) == 4 and blocks.shape[-1] * 2 == BLOCK
        if not scales or not shapes or scales.shape != blocks.shape[:-1]:
            raise UserError(
                f"{name} in {blocks.file} has no {stem}_scales that fits it; download the folder again"
            )
        for tensor in (blocks, scales):
            if tensor.dtype != "U8":
                raise UserError(
                    f"{tensor.name} in {tensor.file} has dtype {tensor.dtype}, and MXFP4 is in U8; "
                    "download the folder again"
                )
            del tensors[tensor.name]
        if stem in stored:
            raise UserError(
                f"{stem} is in {stored[stem].file}, and in MXFP4 ({name}) in {blocks.file.name}; "
                "remove the file that does not belong to this model"
            )
        tensors[stem] = Quantized(blocks, scales)
    return tensors
