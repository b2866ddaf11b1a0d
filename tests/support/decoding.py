"""Decoding with a cache compared with the forward pass, on any mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recipes.common.mesh import make_mesh
from recipes.common.sharding.layout import make_layout
from tests.support.quick import QUICK
from zoo.options import cache as zoo_cache


def check_decoding(model: type, config: Any, mesh: str, tokens_BT, make_variables) -> None:
    """Prefills left-padded prompts of unequal length and decodes three tokens more.

    Args:
      tokens_BT: eight rows of at least eleven tokens, [B, T].
      make_variables: layout → the model's variables, the same values on any mesh.
    """
    B = len(tokens_BT)
    lengths_B = np.array([1, 2, 5, 8, 8, 3, 7, 4])
    longest, steps, slots = 8, 3, 12
    prompts = [np.roll(tokens_BT[b, :longest], longest - n) for b, n in enumerate(lengths_B)]

    def forward(variables, tokens_BT):
        return alone.model.merge(variables)(tokens_BT)

    def generate(variables, prompts_BT, lengths_B, tokens_BT):
        model = layout.model.merge(variables)
        logits_BV, cache = zoo_cache.prefill(model, prompts_BT, lengths_B, slots)
        logits = [logits_BV]
        for step in range(steps):
            newest_B = jnp.take_along_axis(tokens_BT, lengths_B[:, None] + step, axis=1)[:, 0]
            logits_BV, cache = zoo_cache.decode(model, newest_B, cache)
            logits.append(logits_BV)
        return jnp.stack(logits)

    alone, layout = (
        make_layout(model, config, make_mesh(name), batch_size=B) for name in ("1x1", mesh)
    )
    arguments = make_variables(alone), jax.device_put(tokens_BT, alone.replicated)
    wanted_BTV = jax.device_get(
        alone.compile(forward, *arguments, compiler_options=QUICK)(*arguments)
    )
    arrays = jax.device_put((np.stack(prompts), lengths_B, tokens_BT), layout.replicated)
    arguments = make_variables(layout), *arrays
    logits = layout.compile(generate, *arguments, compiler_options=QUICK)(*arguments)
    for step, logits_BV in enumerate(jax.device_get(logits)):
        last_B = lengths_B - 1 + step
        np.testing.assert_allclose(logits_BV, wanted_BTV[np.arange(B), last_B], atol=2e-5)
