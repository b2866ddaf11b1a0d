"""Tokens that a sampler writes per second of CPU time, where lengths differ: at once, in turns, in slots.

    python -m tests.by_hand.rollout_speed

256 answers of transformer.stdlib_3m end with their line. All three ways write the same tokens.
"""

import time

import jax
import numpy as np

from recipes.common import checkpoint, entries, language
from recipes.common.generation.rollouts import Answers, Sampler, sampling_layout
from recipes.common.mesh import make_mesh
from recipes.common.sharding import make_layout

ANSWERS, AT_A_TIME, LONGEST, TIMES = 256, 64, 96, 3
TEXT = b"def f(self, name, value=None):\n    "
END = (ord("\n"), 256)


def main() -> None:
    source = checkpoint.find("transformer.stdlib_3m")
    config = language.for_another_loss(checkpoint.config_of(source))
    model = entries.model("transformer")
    layout = sampling_layout(model, make_layout(model, config, make_mesh("1")))
    variables = checkpoint.restore_variables(source, layout)
    text = np.frombuffer(TEXT, np.uint8).astype(np.int32)
    lengths = np.random.default_rng(0).integers(20, 32, ANSWERS)
    prompts = [text[:length] for length in lengths]
    ids = np.stack([np.zeros(ANSWERS, int), np.arange(ANSWERS)], axis=1)
    every, some, slots = (
        Sampler(layout, END, 256, LONGEST, slots=count) for count in (0, 0, AT_A_TIME)
    )

    def in_turns() -> Answers:
        parts = [slice(n, n + AT_A_TIME) for n in range(0, ANSWERS, AT_A_TIME)]
        answers = [some(variables, prompts[part], ids[part]) for part in parts]
        return jax.tree.map(lambda *x: np.concatenate(x), *answers)

    ways = {
        "all at once": lambda: every(variables, prompts, ids),
        f"{AT_A_TIME} at a time, in turns": in_turns,
        f"{AT_A_TIME} slots": lambda: slots(variables, prompts, ids),
    }
    tokens = {name: way().tokens_BN for name, way in ways.items()}
    (first, *others) = tokens.values()
    assert all((other == first).all() for other in others)
    sizes = (first >= 0).sum(axis=1)
    print(
        f"{ANSWERS} answers of {sizes.min()} to {sizes.max()} tokens, {sizes.mean():.1f} on average"
    )
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(TIMES):
        for name, way in ways.items():
            start = time.process_time()
            way()
            seconds[name] = min(seconds[name], time.process_time() - start)
    for name, best in seconds.items():
        print(f"{name}: {sizes.sum() / best:.0f} tokens a second of CPU time")


if __name__ == "__main__":
    main()
