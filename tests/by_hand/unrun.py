"""Functions of the zoo that the fast tier of tests never runs, by file, most statements first.

    pip install coverage
    python -m tests.by_hand.unrun            # of the fast tier, some minutes
    python -m tests.by_hand.unrun --full     # of another

What a test alone runs, and cheaply, belongs into tests/golden/alone_tests.txt. Processes that tests start count too.
"""

import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
MEASURED = ("zoo", "data", "recipes/common")


def measured(options: list[str], folder: pathlib.Path) -> dict:
    """Coverage's report of a run of pytest with these options."""
    sources = "".join(f"    {ROOT / source}\n" for source in MEASURED)
    settings = folder / "settings"
    settings.write_text(f"[run]\nparallel = true\ndata_file = {folder}/data\nsource =\n{sources}")
    environment = os.environ | {"COVERAGE_PROCESS_START": str(settings)}  # read by coverage's .pth
    subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, env=environment)
    coverage = [sys.executable, "-m", "coverage"]
    rc = f"--rcfile={settings}"
    subprocess.run([*coverage, "combine", rc, "--quiet", folder], cwd=ROOT, check=True)
    report = folder / "report.json"
    subprocess.run([*coverage, "json", rc, "-i", "-q", "-o", report], cwd=ROOT, check=True)
    return json.loads(report.read_text())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = measured(sys.argv[1:], pathlib.Path(folder))
    unrun = collections.defaultdict(dict)  # file → function → statements
    for file, facts in report["files"].items():
        for function, lines in facts["functions"].items():
            if function and not lines["summary"]["covered_lines"]:
                unrun[file][function] = lines["summary"]["num_statements"]
    for file, functions in sorted(unrun.items(), key=lambda item: -sum(item[1].values())):
        print(f"{sum(functions.values()):4} {file}: {', '.join(functions)}")
    print(f"{report['totals']['percent_covered']:.1f}% of the statements ran.")


if __name__ == "__main__":
    main()
