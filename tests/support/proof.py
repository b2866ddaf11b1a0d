"""The page of the proof that every mesh trains the same model, from measurements in tests/golden.

tests/PROOF.md has a row for each entry; the site shows the complete page in its place. `pytest --release
tests/sharding --update-golden` measures again, and `python -m tests.support.proof` writes the page.
"""

import json
import pathlib
from collections.abc import Callable

from recipes.common.report.report import size
from recipes.instruments.prove.comparison import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    STATE_TOLERANCE,
)

ROOT = pathlib.Path(__file__).parents[2]  # building the site needs no pytest, so no conftest.py
DIFFERENCES = "mesh_differences.json"  # under golden/
BYTES = "mesh_bytes.json"
STATES = "optimizer_differences.json"
PRECISION = "precision.json"
PAGE = ROOT / "tests" / "PROOF.md"

SUMMARY = """\
<!-- Written by tests/support/proof.py from tests/golden: pytest --release tests/sharding --update-golden -->
# The proof: every mesh trains the same model

**{pairs} pairs of strategy and mesh over {entries} entries. Largest difference from one device: {loss} of a
loss, {gradient} of a gradient. Bytes sent: exactly the textbook's in {exact} pairs, at most {ratio} times
the textbook's in the other {others}.**

Each [zoo entry](../zoo/README.md#sizes) (its `tiny` size, in float32) trains for five AdamW steps of 24 rows
on every mesh, under every strategy that fits the mesh, with the same seed and data as on one device. A CPU
simulates the eight devices. The [tests](sharding) assert that

- the whole initial state, optimizer state included, is bit-equal to that of one device (entries from gpt2 on:
  on 4x2, 1x8, 2x2x2 and data=2,expert=4 only);
- at each of the five steps, the loss is within {loss_tolerance} of one device's (relative);
- at each of the five steps, the gradient g of every parameter has |g − g₁| / |g₁| < {gradient_tolerance},
  where g₁ is one device's gradient and |·| the Euclidean norm (where g₁ is zero but for rounding, the
  difference is relative to all gradients together);
- the state after the five steps, buffers included, is within {state_tolerance} of one device's;
- the compiled step sends what its strategy promises, array by array, and nothing else.

"One device" is the entry's first strategy on 1x1. That run is itself compared with the plain module, without
any mesh. Differences are not zero because each compiled program adds the same float32 numbers in another
order, and their last digits depend on the CPU: tests assert the tolerances, and the bytes exactly.

The largest figures of each entry; bfloat16 has the largest ratio of a gradient's error to one device's error:

{entry_table}
The [site](../CONTRIBUTING.md#the-site) shows every pair here.
"""

DETAILS = """\
## Loss

The largest relative difference from one device in five steps. The tolerance is {loss_tolerance}.

{loss_table}
## Gradients

The largest |g − g₁| / |g₁| of any parameter in five steps. The tolerance is {gradient_tolerance}.

{gradient_table}
## Gradients in bfloat16

The largest error of a parameter's gradient in bfloat16, |g − g₃₂| / |g₃₂|, where g₃₂ is one device's float32
gradient, on the mesh and on one device; and the largest ratio of any parameter's error to that on one device.
16 rows of 128 tokens, as frequent as words of a text; 120 pairs of SigLIP, whose loss is over pairs. `dot_relu_dot` and
`mlp` compute in float32 alone. Rows whose entry names a low-precision format compare it with itself in float32, without
[pipelines](../recipes/docs/low_precision.md#how-exact-gradients-are), which round weights twice. The last rows have 64
rows of 256 tokens on one device, against the small batch.

- **Tolerance**: a ratio of 1.25 for each parameter. The norm of n independent errors varies by chance, and so the ratio of
  two such norms by 1/√n. As there are two thousand, each is divided by 1 + 3/√n. One device's error counts as at least
  2⁻⁸, that of one number's rounding.
- **Routers** choose all experts at each position, because a choice flips where two scores are nearly equal. In `moe,
  dropless`, biases choose the same three, and rows travel to their devices in several turns.
- **Five steps** of training: the losses of `fsdp` (Transformer) and `fsdp_ep` (MoE) are within 1e-3 of one device's.
- **Collectives**: XLA's CPU compiler widens all arithmetic in 16 bits, collectives too. What sums over devices in
  bfloat16 add on accelerators is simulated in [Precision](../recipes/docs/precision.md#sums-over-devices).

`python -m tests.by_hand.precision_table` measures all; the full tier measures every strategy of the Transformer and
some of the others again.

{precision_table}
## Optimizers

The largest |x − x₁| / |x₁| of any array x of the training state, parameters and moments, after three steps
with each optimizer. Updates are 20 times as large as those above: the learning rate is 1e-2 from the first
step on. The tolerance is {state_tolerance} for AdamW, {lion_tolerance} for Lion and {gradient_tolerance} for the others.

- **sgd**: moments are linear in gradients, so their tolerance is the gradients'.
- **lion** moves by the signs of momenta. Where one is zero but for rounding, an element moves the other way, and
  with it the gradients of later steps. A shard of eight of a matrix that no step updated would differ by 4.8e-2.
- **adamw** divides a gradient by its size, so an element that is nearly zero moves by its rounding error.
- **muon** orthogonalizes momenta by Newton-Schulz iterations, which amplify small singular values. With a
  256 × 1,024 matrix in float32, a relative difference of 5e-7 becomes 4e-6 if the matrix has full rank and
  8e-5 if its rank is 8; in bfloat16 it becomes 2e-2 and 3e-2. The iterations are therefore in float32 (a TPU's
  default matmul precision still rounds their operands to bfloat16), and a matrix is never split: in bfloat16,
  sums over eight shards of X·Xᵀ would differ from the whole's by 3e-2 and 2e-1 after five iterations.

{states_table}
## Bytes sent over the textbook's

The bytes that the collectives of one compiled step deliver to one device, divided by the textbook's; the
bytes are in parentheses. A zero means that nothing is sent, as the textbook says. Strategies that split the
positions of a row are left out; [test_context.py](sharding/test_context.py) counts what they send.

The textbook is computed from shapes alone. It has the costs that
[zoo/README.md](../zoo/README.md#strategies) lists for each strategy:

- each weight that is split at rest is gathered once, and once more where its layer is rematerialised;
- each gradient is reduced once over the devices that have other rows of the batch;
- each matmul over a split inner dim all-reduces its result (Megatron's count, forward and backward), and a
  loss over a split vocabulary all-reduces five numbers for each position;
- tokens travel to split experts and back, forward and backward.

The loss, the number of targets and the gradient's norm are single numbers and left out. XLA's CPU compiler
writes an all-reduce and a slice instead of a reduce-scatter, except for experts' weights; both sides count such
an array once.

Ratios above 1 come from that compiler too. Where matmuls read the same input (q, k and v; gate and up), it
all-reduces their gradients of that input one by one; Megatron adds them first and all-reduces the sum. The
TPU compiler adds them first: [its programs](../recipes/instruments/results/tpu.md#bytes-sent-per-step) exceed the textbook
mostly by what remat repeats, by replicas' gradients, and on 64 chips and more by gradients that it sums whole.

{bytes_table}"""


LION_TOLERANCE = 3e-2
# Optimizer → tolerance of the state after three steps. PROSE has the reasons.
TOLERANCES_OF_STATES = {
    "adamw": STATE_TOLERANCE,
    "lion": LION_TOLERANCE,
    "sgd": GRADIENT_TOLERANCE,
    "muon": GRADIENT_TOLERANCE,
}


def page() -> str:
    """The text of tests/PROOF.md, which git keeps."""
    differences, sent = _golden(DIFFERENCES), _golden(BYTES)
    ratios = [record["sent"] / record["textbook"] for record in sent.values() if record["textbook"]]
    others = sum(ratio != 1 for ratio in ratios)
    return SUMMARY.format(
        pairs=len(differences),
        entries=len({entry for entry, _, _ in differences}),
        loss=_scientific(max(record["loss"] for record in differences.values())),
        gradient=_scientific(max(record["gradient"] for record in differences.values())),
        exact=len(sent) - others,
        others=others,
        ratio=f"{max(ratios):.2f}",
        loss_tolerance=_scientific(LOSS_TOLERANCE),
        gradient_tolerance=_scientific(GRADIENT_TOLERANCE),
        state_tolerance=_scientific(STATE_TOLERANCE),
        entry_table=_entry_table(),
    )


def complete_page() -> str:
    """The page with every pair."""
    differences, sent = _golden(DIFFERENCES), _golden(BYTES)
    states = {
        (entry, f"{strategy} on {mesh}", optimizer): relative
        for (entry, strategy, mesh), record in _golden(STATES).items()
        for optimizer, relative in record.items()
    }
    losses = {case: record["loss"] for case, record in differences.items()}
    gradients = {case: record["gradient"] for case, record in differences.items()}
    _, text = page().split("-->\n", 1)
    summary, _ = text.split("The [site](")
    return summary + DETAILS.format(
        loss_tolerance=_scientific(LOSS_TOLERANCE),
        gradient_tolerance=_scientific(GRADIENT_TOLERANCE),
        state_tolerance=_scientific(STATE_TOLERANCE),
        lion_tolerance=_scientific(LION_TOLERANCE),
        precision_table=_precision_table(),
        states_table=_table(states, _scientific),
        loss_table=_table(losses, _scientific),
        gradient_table=_table(gradients, _scientific),
        bytes_table=_table(sent, _over_textbook),
    )


def _entry_table() -> str:
    differences, sent, precision = _golden(DIFFERENCES), _golden(BYTES), _golden(PRECISION)
    head = ["entry", "strategies", "meshes", "pairs", "loss", "gradient", "bfloat16"]
    head += ["sent / textbook"]
    lines = head, ["---", *["---:"] * (len(head) - 1)]
    for entry in dict.fromkeys(case[0] for case in differences):
        cases = [case for case in differences if case[0] == entry]
        rounded = [record["ratio"] for case, record in precision.items() if case[0] == entry]
        over = [
            record["sent"] / record["textbook"]
            for case, record in sent.items()
            if case[0] == entry and record["textbook"]
        ]
        lines += (
            [
                entry,
                len({case[1] for case in cases}),
                len({case[2] for case in cases}),
                len(cases),
                _scientific(max(differences[case]["loss"] for case in cases)),
                _scientific(max(differences[case]["gradient"] for case in cases)),
                f"{max(rounded):.2f}" if rounded else "–",
                f"{max(over):.2f}" if over else "–",
            ],
        )
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _golden(name: str) -> dict[tuple[str, ...], dict[str, float]]:
    """(entry, strategy, mesh) → its record."""
    text = (ROOT / "tests" / "golden" / name).read_text()
    return {tuple(case.split()): record for case, record in json.loads(text).items()}


def _table(cells: dict[tuple[str, ...], float | dict], show: Callable) -> str:
    """A row for each entry and strategy, a column for each mesh or optimizer."""
    rows = list(dict.fromkeys((entry, strategy) for entry, strategy, _ in cells))
    columns = list(dict.fromkeys(column for _, _, column in cells))
    head = [column.replace(",", ",<br>") for column in columns]
    lines = ["entry", "strategy", *head], ["---", "---", *["---:"] * len(columns)]
    for row in rows:
        shown = [show(cells[*row, x]) if (*row, x) in cells else "–" for x in columns]
        lines += ([*row, *shown],)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _precision_table() -> str:
    head = ["entry", "strategy", "mesh", "error", "one device", "ratio", "parameter"]
    lines = head, ["---", "---", "---", "---:", "---:", "---:", "---"]
    for (entry, *where), record in _golden(PRECISION).items():
        shown = f"{record['error']:.2%}", f"{record['one']:.2%}", f"{record['ratio']:.2f}"
        lines += ([entry.replace(":", ", "), *where, *shown, f"`{record['parameter']}`"],)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _scientific(value: float) -> str:
    """Two digits at most.

    >>> _scientific(5.93e-07), _scientific(2e-6), _scientific(0.0)
    ('5.9e-7', '2e-6', '0')
    """
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}" if value else "0"


def _over_textbook(record: dict[str, int]) -> str:
    sent, book = record["sent"], record["textbook"]
    ratio = f"{sent / book:.2f} " if book else ""
    return f"{ratio}({size(sent)})" if sent else "0"


if __name__ == "__main__":
    PAGE.write_text(page())
