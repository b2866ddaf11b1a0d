"""Compares what each key of a model folder's files does in `transformers` and sentence-transformers, and here.

    python -m tests.by_hand.folder_keys                      # the comparison
    python -m tests.by_hand.folder_keys --update-golden      # and tests/golden/folder_keys.json anew

For each case: a small folder in which one key of one file has another valid value. Where their output changes,
ours must become the same, or the folder must be refused. Needs torch and both libraries; the golden holds their
outputs, so that tests/hf/test_folder_keys.py needs none. The cases: tests/support/folder_keys.py.
"""

import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np
import PIL.Image

import tests.conftest  # noqa: F401, simulates the devices
from tests.support.folder_keys import (
    FILE,
    REFUSED,
    TEXTS,
    WRONG,
    Case,
    cases,
    make,
    outcome,
    picture,
    some,
)


def theirs(case: Case, folder: pathlib.Path) -> Any:
    """What their libraries make of the folder: ids of TEXTS, vectors of them, or pixels."""
    if case.kind == "sentences":
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": "float32"})
        return model.encode([*TEXTS, "AAA", TEXTS[0] * 2]).tolist()
    if case.kind.startswith("pictures"):
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained(folder, use_fast=False)
        (pixels,) = processor(PIL.Image.fromarray(picture()))["pixel_values"]
        return some(np.moveaxis(np.asarray(pixels), 0, -1))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)(TEXTS)["input_ids"]


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(x) for x in value]
    return round(value, 6) if isinstance(value, float) else value


def main() -> None:
    golden, wrong = {}, []
    before = json.loads(FILE.read_text())
    plain = {x.kind: before[x.name]["theirs"] for x in cases() if not x.keys and x.name in before}
    asked = [word for word in sys.argv[1:] if not word.startswith("--")]
    for case in cases():
        if asked and not any(word in case.name for word in asked):
            continue
        with tempfile.TemporaryDirectory() as work:
            folder = pathlib.Path(work) / "folder"
            folder.mkdir()
            make(case, folder)
            try:
                wanted, why = rounded(theirs(case, folder)), ""
            except Exception as error:  # whatever they raise
                wanted, why = None, f" (theirs: {str(error).splitlines()[0][:80]})"
            if not case.keys:
                plain[case.kind] = wanted
            found = outcome(case, wanted, plain.get(case.kind), folder)
        wrong += [case.name] * (found == WRONG)
        print(f"{case.name}: {found}{why}", wanted if found == WRONG and "-v" in sys.argv else "")
        golden[case.name] = {"outcome": found, "theirs": None if found == REFUSED else wanted}
    if "--update-golden" in sys.argv:
        golden = (before if asked else {}) | golden
        lines = (f"{json.dumps(name)}: {json.dumps(facts)}" for name, facts in golden.items())
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert not wrong, wrong


if __name__ == "__main__":
    main()
