"""Prompts and evaluates a real Hugging Face model on five meshes by the commands; compares them.

    python -m tests.by_hand.real_model hf:DIR      # SmolLM2-135M-Instruct's folder, or ORG/NAME on the Hub

A chat question is answered greedily and README.md is evaluated. Prints a row a mesh; a difference in
the answer, or of more than 1e-5 in bits per byte, is an AssertionError. SmolLM2 has 9 heads and 3 kv
heads, so that 4x2 and 1x8 divide neither; it takes some five minutes on two cores.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
MESHES = [("1x1", "dp"), ("1x3", "tp"), ("4x2", "fsdp_tp"), ("1x8", "tp"), ("8", "fsdp")]
QUESTION = "What is the capital of France?"
TOLERANCE = 1e-5  # of bits per byte


def run(command: str, *flags: str) -> list[str]:
    """Returns the lines that a recipe prints; exits if it fails."""
    process = [sys.executable, "-m", f"recipes.{command}", *flags]
    return subprocess.run(process, cwd=ROOT, check=True, stdout=-1, text=True).stdout.splitlines()


def answer(*given: str) -> str:
    """Returns the answer to QUESTION, without the command's lines about mesh and speed."""
    lines = run("generate", *given, "--chat", f"--prompt={QUESTION}", "--temperature=0")
    notes = ("mesh ", "Not divisible: ", "Read ", "A step reads ")
    return "\n".join(line for line in lines if not line.startswith(notes)).strip()


def bits_per_byte(*given: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "figures.json"
        text = ("--dataset=README.md", "--seq_len=512", "--batch_size=8", f"--out={out}")
        run("evaluate", *given, *text)
        return json.loads(out.read_text())["datasets"]["README.md"]["bits_per_byte"]


def main(source: str) -> None:
    answers, figures = [], []
    print("| mesh | rules | bits/byte of README.md | answer |\n|---|---|---:|---|")
    for mesh, rules in MESHES:
        given = (f"--restore_from={source}", f"--mesh={mesh}", f"--rules={rules}")
        answers.append(answer(*given))
        figures.append(bits_per_byte(*given))
        print(f"| {mesh} | {rules} | {figures[-1]:.7f} | {answers[-1]} |", flush=True)
    assert len(set(answers)) == 1, "the answers differ"
    assert max(figures) - min(figures) <= TOLERANCE, "bits per byte differ"


if __name__ == "__main__":
    main(sys.argv[1])
