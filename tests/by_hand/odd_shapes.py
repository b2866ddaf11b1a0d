"""Random models of odd sizes on random meshes against one device: counts what happens.

    python -m tests.by_hand.odd_shapes --first=100 --seeds=60 --entries=transformer,qwen3_next

Prints a line for each case. None may differ or end in a traceback; exit code 1 if one does.
"""

import argparse
import collections
import sys

import jax

import tests.conftest  # noqa: F401, simulates the devices
from tests.support.odd_configs import ENTRIES, check, draw_case


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--entries", default=",".join(ENTRIES))
    args = parser.parse_args()
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for seed in range(args.first, args.first + args.seeds):
        for entry in args.entries.split(","):
            case = draw_case(entry, seed)
            try:
                result = check(case)
            except AssertionError as error:
                result = f"different: {error}; {case}"
            except Exception as error:  # whatever JAX raises
                result = f"failed: {type(error).__name__}: {error}; {case}"
            counts[entry, result.partition(":")[0]] += 1
            print(seed, entry, case.strategy, case.whole, case.mesh, result, flush=True)
        jax.clear_caches()
    for (entry, result), count in sorted(counts.items()):
        print(f"{entry}: {count} {result}")
    sys.exit(any(result in ("different", "failed") for _, result in counts))


if __name__ == "__main__":
    main()
