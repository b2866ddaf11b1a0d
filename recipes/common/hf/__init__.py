"""Reads Hugging Face model folders as parameters of zoo models, and writes them.

A folder is config.json with one or more *.safetensors. Loading never executes code (no pickle).
"""

import pathlib

from recipes.common.hf.folder import EXPORTABLE, Folder, locate, write
from recipes.common.hf.peft import Adapter, is_adapter, read_adapter, write_adapter


def open_folder(path: pathlib.Path, entry: str = "") -> Folder | Adapter:
    """Opens and checks a folder with a model or an adapter. Raises UserError.

    Args:
      entry: as in Folder.
    """
    return read_adapter(path) if is_adapter(path) else Folder(path, entry)
