"""The page of architectures that load: recipes/docs/architectures.md, made from the families.

python -m recipes.common.hf.architectures > recipes/docs/architectures.md
"""

from recipes.common import entries
from recipes.common.hf.folder import FAMILIES

HEAD = """# Architectures of `transformers` that load

`--restore_from=hf:DIR` and `python -m recipes.hf import` read folders of these architectures, by the name in
`architectures` of config.json; see [Hugging Face models](hugging_face.md). This page is made from the
tables of recipes/common/hf, by architectures.py there.

| architecture | model_type | entry |
|---|---|---|
"""
FOOT = """
An export has the architecture of the folder that was imported, or the first in this list that computes the
same. A config.json with a feature that the entry lacks is refused by its key. Any other architecture is
refused in one line, which names the nearest of these and the first key that differs.

[All pages](../README.md) · [Hugging Face models](hugging_face.md)
"""


def page() -> str:
    """The page's text."""
    rows = [
        f"| `{name}` | `{kind}` | [{entries.ENTRIES[family.entry].model}]"
        f"(../../zoo/{entries.ENTRIES[family.entry].file or family.entry}.py) |\n"
        for family in FAMILIES
        for name, kind in family.architectures.items()
    ]
    return HEAD + "".join(rows) + FOOT


if __name__ == "__main__":
    print(page(), end="")
