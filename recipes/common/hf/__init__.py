"""Hugging Face model folders, read as parameters of the zoo's models and written back.

A folder is config.json with one or more *.safetensors. Loading never executes code (no pickle).
"""

from recipes.common.hf.folder import ENTRIES, Folder, locate, write

__all__ = ["ENTRIES", "Folder", "locate", "write"]
