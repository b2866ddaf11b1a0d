"""Answers that take turns in the rows of a cache: each has the bits that it has anywhere else."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from recipes.common import entries
from recipes.common.generation.rollouts import Answers, Sampler, sampling_layout
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.layout import make_layout
from tests.conftest import full_except
from tests.support.models import random_variables

pytestmark = pytest.mark.promise("reinforcement")

COUNT, LONGEST = 32, 12
PROMPTS = [np.arange(1, 2 + n % 5, dtype=np.int32) for n in range(COUNT)]
IDS = np.array([(3, n // 4, n % 4) for n in range(COUNT)])
END = tuple(range(60))  # a fifth of the tokens that are written

# Entry, strategy and mesh: states, latents, positions in parts, experts on devices of their own.
CASES = [
    ("transformer", "", "1x1"), ("transformer", "fsdp_tp", "4x2"),
    ("transformer", "fsdp_cp_tp", "data=2,seq=2,model=2"), ("moe", "fsdp_ep", "data=2,expert=4"),
    ("deepseek", "fsdp_tp", "4x2"), ("qwen3_next", "fsdp_tp", "4x2"), ("hybrid", "fsdp", "4x1"),
    ("gemma3", "fsdp", "4x1"), ("gpt_oss", "fsdp_tp", "4x2"),
]  # fmt: skip


@functools.cache
def sampler_of(entry: str, strategy: str, mesh: str, slots: int, **settings) -> tuple:
    """(sampler, variables)."""
    config = entries.sizes(entry)["tiny"]()
    layout = make_layout(entries.model(entry), config, make_mesh(mesh), strategy or None)
    layout = sampling_layout(entries.model(entry), layout)
    sampler = Sampler(layout, END, 300, LONGEST, slots=slots, **settings)
    return sampler, random_variables(layout)


def answers_of(*case, order: Any = slice(None), **settings) -> Answers:
    """The answers, asked for in some order, in that of their numbers."""
    sampler, variables = sampler_of(*case, **settings)
    numbers = np.arange(COUNT)[order]
    answers = sampler(variables, [PROMPTS[n] for n in numbers], IDS[numbers])
    back = np.argsort(numbers)
    return jax.tree.map(lambda x: x[back], answers)


def assert_same_bits(found: Answers, wanted: Answers) -> None:
    for name, x, y in zip(found._fields, found, wanted, strict=True):
        if x is not None:
            np.testing.assert_array_equal(x, y, err_msg=name)


@pytest.mark.parametrize(("entry", "strategy", "mesh"), full_except(CASES, [], CASES[2:]))
def test_an_answer_has_the_same_bits_in_any_slot_at_any_time(entry, strategy, mesh):
    every = answers_of(entry, strategy, mesh, 8)
    lengths = (every.tokens_BN >= 0).sum(axis=1)
    assert len({*lengths}) > 4
    for order in (slice(None, None, -1), np.random.default_rng(0).permutation(COUNT)):
        assert_same_bits(answers_of(entry, strategy, mesh, 8, order=order), every)
    at_once = answers_of(entry, "", "1x1", 0)
    np.testing.assert_array_equal(every.tokens_BN, at_once.tokens_BN)
    np.testing.assert_allclose(every.log_probs_BN, at_once.log_probs_BN, atol=1e-5)
    np.testing.assert_allclose(every.entropies_BN, at_once.entropies_BN, atol=1e-4)


def test_a_plan_s_cache_has_the_prompts_and_the_slots():
    """On 4x2: 32 prompts of 8 positions, and 8 rows of 8 + 12 positions."""
    sampler, _ = sampler_of("transformer", "fsdp_tp", "4x2", 8)
    config = sampler.layout.config
    a_position = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert sampler.bytes_per_device(COUNT, longest=5)[1] == (32 * 8 + 8 * 20) * a_position / 8
