"""Hugging Face model folders, read as parameters of the zoo's models and written back.

A folder is config.json with one or more *.safetensors. Loading never executes code (no pickle).
"""

import pathlib

from recipes.common.hf.folder import ENTRIES, Folder, locate, write
from recipes.common.hf.peft import Adapter, is_adapter, read_adapter, write_adapter

__all__ = [
    "ENTRIES",
    "Adapter",
    "Folder",
    "is_adapter",
    "locate",
    "open_folder",
    "write",
    "write_adapter",
]


def open_folder(path: pathlib.Path) -> Folder | Adapter:
    """What a folder holds, checked. Raises UserError."""
    return read_adapter(path) if is_adapter(path) else Folder(path)
