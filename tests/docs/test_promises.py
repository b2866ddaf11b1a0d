"""tests/README.md and tests/PROOF.md: promises have tests, and measurements are those of goldens."""

import doctest

import pytest

from tests.support import proof
from tests.support.promises import documented, listing, marked_tests

pytestmark = pytest.mark.promise("readmes")


def test_every_promise_has_tests_in_the_files_it_links():
    assert {promise.name for promise in documented()} == {test.promise for test in marked_tests()}
    for promise in documented():
        tests = [test for test in marked_tests() if test.promise == promise.name]
        assert 1 <= len(promise.files) <= 2, promise.name
        assert set(promise.files) <= {test.file for test in tests}, promise.name
        assert promise.full == all(test.full for test in tests), promise.name


def test_each_promise_is_listed_once_with_its_tests():
    lines = listing().splitlines()
    assert [x for x in lines if not x.startswith(" ")] == [x.name for x in documented()]
    assert sum(line.startswith(" ") for line in lines) == len(marked_tests())


def test_the_proof_page_shows_the_goldens(golden):
    assert doctest.testmod(proof).failed == 0
    if golden.update:
        return  # conftest.py writes the page when all workers have measured
    assert proof.PAGE.read_text() == proof.page(), (
        "run pytest --full tests/sharding --update-golden"
    )
