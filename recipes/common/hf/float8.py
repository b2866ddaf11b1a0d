"""Reads float8 tensors with block scales, the format in which DeepSeek V3 is published.

NAME is float8 e4m3 [R, C]. NAME_scale_inv is float32 [R/128, C/128], rounded up: each block of
128 × 128 values is multiplied by its scale.
"""

import functools
import json
import math
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from recipes.common.hf.tensors import FLOATS, Stored
from recipes.common.runtime.errors import UserError

BLOCK = 128
SCALES = "_scale_inv"
KNOWN = {  # keys of quantization_config → values that are read
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "weight_block_size": ([BLOCK, BLOCK],),
    "activation_scheme": ("dynamic",),  # of inference, which this file does not imitate
    "scale_fmt": (None, "ue8m0"),  # powers of two, in float32 too
}


class Quantized(NamedTuple):
    """A tensor like tensors.Stored that is dequantized while it is read."""

    values: Stored
    scales: Stored

    @property
    def name(self) -> str:
        return self.values.name

    @property
    def file(self) -> pathlib.Path:
        return self.values.file

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> str:
        return "F32"

    def read(self, where: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of [R, C] as float32, one row of blocks at a time."""
        rows, columns = (slice(*s.indices(n)[:2]) for s, n in zip(where, self.shape, strict=True))
        out = np.empty((rows.stop - rows.start, columns.stop - columns.start), np.float32)
        for first in range(rows.start - rows.start % BLOCK, rows.stop, BLOCK):
            part = slice(max(first, rows.start), min(first + BLOCK, rows.stop))
            values = read_raw(self.values, part)[:, columns].view(jnp.float8_e4m3fn)
            blocks = slice(columns.start // BLOCK, -(-columns.stop // BLOCK))
            (scales,) = self.scales.read((slice(first // BLOCK, first // BLOCK + 1), blocks))
            scales = scales.astype(np.float32).repeat(BLOCK)[columns.start - blocks.start * BLOCK :]
            out_rows = out[part.start - rows.start : part.stop - rows.start]
            np.multiply(values.astype(np.float32), scales[: out.shape[1]], out=out_rows)
        return out


def read_raw(stored: Stored, rows: slice) -> np.ndarray:
    """The bytes of rows of a matrix, as uint8; NumPy has no float8, so safetensors can't."""
    count = (rows.stop - rows.start) * stored.shape[1]
    begin = begins(stored.file)[stored.name] + rows.start * stored.shape[1]
    return np.fromfile(stored.file, np.uint8, count, offset=begin).reshape(-1, stored.shape[1])


@functools.lru_cache(maxsize=4)
def begins(file: pathlib.Path) -> dict[str, int]:
    """Name → where the tensor begins in a file of safetensors, which has been checked."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    tensors = {name: x for name, x in header.items() if name != "__metadata__"}
    return {name: 8 + size + x["data_offsets"][0] for name, x in tensors.items()}


def check(quantized: dict[str, Any], file: pathlib.Path) -> None:
    """Raises UserError if a quantization_config differs from the format that is read."""
    for key, known in KNOWN.items():
        value = quantized.get(key, known[0])
        if value not in known:
            raise UserError(
                f"{file} has {key} {json.dumps(value)} in its quantization_config, and the zoo reads "
                f"float8 with {key} {json.dumps(known[0])}; use a folder in that format"
            )


def unpack(stored: dict[str, Stored]) -> dict[str, Any]:
    """Replaces float8 tensors by Quantized ones.

    Raises UserError if scales are missing or wrong, or a tensor is not a matrix.
    """
    tensors: dict[str, Any] = dict(stored)
    for name, values in stored.items():
        scales = stored.get(f"{name}{SCALES}")
        if values.dtype == "F8_E4M3":
            if len(values.shape) != 2:
                raise UserError(
                    f"{name} in {values.file} is float8 of shape {list(values.shape)}, and the zoo "
                    "reads float8 matrices; use a folder that stores it in bfloat16"
                )
            wanted = tuple(math.ceil(size / BLOCK) for size in values.shape)
            if scales is None or scales.shape != wanted or scales.dtype not in FLOATS:
                raise UserError(
                    f"{name} in {values.file} is float8 and has no {name}{SCALES} of shape "
                    f"{list(wanted)}; download the folder again"
                )
            tensors[name] = Quantized(values, scales)
            del tensors[scales.name]
    return tensors
