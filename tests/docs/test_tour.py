"""recipes/tour.ipynb: it runs, and computes what it shows."""

import copy
import json
import re

import numpy as np
import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.promise("readmes")

PATH = ROOT / "recipes" / "tour.ipynb"
MOST_BYTES = 300_000


def code_cells(notebook) -> list:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text(cell) -> str:
    """The text that a cell prints."""
    return "".join("".join(o["text"]) for o in cell["outputs"] if o["output_type"] == "stream")


def images(cell) -> list[str]:
    return [o["data"]["image/png"] for o in cell["outputs"] if "image/png" in o.get("data", {})]


def test_outputs_are_stored():
    assert PATH.stat().st_size < MOST_BYTES
    setup, *steps = code_cells(json.loads(PATH.read_text()))
    assert not setup["outputs"]
    assert len(steps) == 11
    assert [cell["execution_count"] for cell in steps] == list(range(2, 13))
    for cell in steps:
        assert text(cell) or images(cell), "".join(cell["source"])
        assert all(output.get("name") != "stderr" for output in cell["outputs"])
    assert sum(len(images(cell)) for cell in steps) == 3


@pytest.mark.full
def test_it_runs_and_outputs_are_as_stored(request):
    """--update-golden stores what it shows now."""
    import nbclient
    import nbformat

    notebook = nbformat.read(PATH, as_version=4)
    stored = copy.deepcopy(notebook)
    # Warnings are errors, but those of ipykernel when it starts and stops.
    first, last = "import warnings; warnings.simplefilter('error')", "warnings.resetwarnings()"
    own = notebook.cells
    notebook.cells = [nbformat.v4.new_code_cell(first), *own, nbformat.v4.new_code_cell(last)]
    nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=300,
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(PATH.parent / "docs")}},
    ).execute()
    notebook.cells = own
    if request.config.getoption("--update-golden"):
        for count, cell in enumerate(code_cells(notebook), 1):
            cell.execution_count = count
        notebook.metadata = stored.metadata
        nbformat.write(notebook, PATH)
        return
    for cell, before in zip(code_cells(notebook), code_cells(stored), strict=True):
        assert_same(text(cell), text(before))
        assert len(images(cell)) == len(images(before))
        assert all(len(image) > 5_000 for image in images(cell))


def assert_same(now: str, stored: str) -> None:
    """Equal texts, but for the last digits of losses: another JAX may round sums differently."""
    decimals = r"\d+\.\d+"
    assert re.sub(decimals, "…", now) == re.sub(decimals, "…", stored)
    found = [[float(x) for x in re.findall(decimals, t)] for t in (now, stored)]
    np.testing.assert_allclose(*found, rtol=1e-4)
