"""Each key of config.json, adapter_config.json and generation_config.json is read as `transformers` and PEFT do, refused or named.

The golden says which keys change what those libraries compute: python -m tests.by_hand.config_keys compares live.
"""

import json

import pytest

from recipes.common.runtime.errors import UserError
from tests.support.config_keys import (
    ADAPTER,
    FILE,
    FOLDERS,
    NAMED,
    READ,
    REFUSED,
    SAME,
    WRONG,
    adapter_fields,
    adapter_with,
    changed,
    fields,
    generation_outcome,
)
from tests.support.golden_folders import GOLDEN, config_of, keys_of

pytestmark = pytest.mark.promise("hugging-face")

OUTCOMES = json.loads(FILE.read_text())
GENERATION = "generation_config.json"
HERE = [name for name in FOLDERS if (GOLDEN / name).exists()]  # others are made by hand


def test_the_golden_has_every_file_and_nothing_is_wrong():
    assert OUTCOMES.keys() == {*FOLDERS, ADAPTER, GENERATION}
    assert not any(outcomes[WRONG] for outcomes in OUTCOMES.values())
    assert all(outcomes[SAME] for name, outcomes in OUTCOMES.items() if name != GENERATION)


@pytest.mark.parametrize("name", HERE)
def test_keys_of_a_config_json(name):
    keys, file = keys_of(name), GOLDEN / name / "config.json"
    plain = config_of(keys, file)
    for case, differs in OUTCOMES[name][SAME].items():
        assert fields(config_of(changed(keys, case), file), plain) == differs, case
    for case in OUTCOMES[name][REFUSED]:
        with pytest.raises(UserError):
            config_of(changed(keys, case), file)


def test_keys_of_an_adapter(tmp_path):
    outcomes = OUTCOMES[ADAPTER]
    for number, (case, differs) in enumerate((outcomes[SAME] | outcomes[REFUSED]).items()):
        (tmp_path / str(number)).mkdir()
        folder = adapter_with(case, tmp_path / str(number))
        if case in outcomes[SAME]:
            assert adapter_fields(folder) == differs, case
        else:
            with pytest.raises(UserError):
                adapter_fields(folder)


@pytest.mark.parametrize("outcome", [READ, NAMED])
def test_keys_of_a_generation_config(outcome):
    assert OUTCOMES[GENERATION][outcome]
    for case in OUTCOMES[GENERATION][outcome]:
        assert generation_outcome(case) == outcome, case
