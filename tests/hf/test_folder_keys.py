"""Every key of a folder's files means here what it means to `transformers` and sentence-transformers, or is refused.

The golden has what those libraries make of each folder: python -m tests.by_hand.folder_keys compares live.
"""

import json

import pytest

from tests.support.folder_keys import FILE, REFUSED, WRONG, cases, make, outcome
from tests.support.quick import quick as quick

pytestmark = pytest.mark.promise("hugging-face")

GOLDEN = json.loads(FILE.read_text())
PLAIN = {case.kind: GOLDEN[case.name]["theirs"] for case in cases() if not case.keys}
CASES = {case.name: case for case in cases()}
VECTORS = [name for name, case in CASES.items() if case.kind == "sentences"]


def check(name, tmp_path):
    case, facts = CASES[name], GOLDEN[name]
    folder = tmp_path / "folder"
    folder.mkdir()
    make(case, folder)
    found = outcome(case, facts["theirs"], PLAIN[case.kind], folder)
    assert found == facts["outcome"]
    assert found != WRONG


def test_the_golden_has_every_case_and_none_is_wrong():
    assert GOLDEN.keys() == CASES.keys()
    assert all(facts["outcome"] != WRONG for facts in GOLDEN.values())


@pytest.mark.parametrize("kind", sorted({case.kind for case in CASES.values()} - {"sentences"}))
def test_ids_and_pixels_are_theirs(kind, tmp_path):
    for number, (name, case) in enumerate(CASES.items()):
        if case.kind == kind:
            (tmp_path / str(number)).mkdir()
            check(name, tmp_path / str(number))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if GOLDEN[name]["outcome"] == REFUSED else pytest.mark.full)
        for name in VECTORS
    ],
)
def test_vectors_are_theirs(name, tmp_path, quick):
    check(name, tmp_path)
