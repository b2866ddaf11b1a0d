"""The golden folders of tests/golden/hf, and our Configs for keys like theirs."""

import json
import pathlib
from typing import Any

from recipes.common.hf.folder import FAMILIES, config_from
from tests.conftest import ROOT

GOLDEN = ROOT / "tests" / "golden" / "hf"


def keys_of(name: str) -> dict[str, Any]:
    """A golden folder's config.json."""
    return json.loads((GOLDEN / name / "config.json").read_text())


def config_of(keys: dict[str, Any], file: pathlib.Path = ROOT / "config.json") -> Any:
    """Our Config for the keys of a config.json. Raises UserError."""
    (name,) = keys["architectures"]
    family = next(family for family in FAMILIES if name in family.architectures)
    keys = keys | {"model_type": family.architectures[name]}
    return config_from(family, family.text_keys(keys, file), file)
