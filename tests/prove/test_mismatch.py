"""Training and generation round at the same places, and recipes.prove --generate finds what is no rounding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.common import checkpoint
from recipes.common.generation.rollouts import Sampler
from recipes.common.mesh import make_mesh
from recipes.common.sharding.compiler_options import compiler_options
from recipes.common.sharding.layout import make_layout
from recipes.instruments.prove import mismatch
from tests.support.golden_folders import GOLDEN
from zoo.kernels import choice
from zoo.llama_relatives import Config, Transformer
from zoo.options.cache import attend_to_cache

pytestmark = pytest.mark.promise("move")


def test_a_cached_position_attends_as_in_training():
    """Almost bit for bit: weights that one of them rounded would change a third of the outputs."""
    B, T, N, K, H = 2, 64, 4, 2, 16
    random = np.random.default_rng(0)

    def normal(heads: int) -> jax.Array:
        return jnp.asarray(random.normal(size=(B, T, heads, H)), jnp.bfloat16)

    q_BTNH, k_BTKH, v_BTKH = normal(N), normal(K), normal(K)
    wanted_BNH = choice.blockwise(q_BTNH, k_BTKH, v_BTKH, None, None, "kv_heads")[:, -1]
    found_B1NH = attend_to_cache(
        keys=((q_BTNH[:, -1:], k_BTKH[:, -1:], k_BTKH),),
        values=(v_BTKH[:, -1:], v_BTKH),
        seen_BS=jnp.broadcast_to(jnp.arange(T) < T - 1, (B, T)),
        root=H**0.5,
    )
    assert found_B1NH.dtype == wanted_BNH.dtype == jnp.bfloat16
    assert float((found_B1NH[:, 0] == wanted_BNH).mean()) > 0.97


def test_programs_in_16_bits_round_where_they_say_so():
    """Otherwise XLA keeps what a fusion widens again, and two programs of one model differ."""
    config = dataclasses.replace(Config.tiny(), dtype="bfloat16")
    layout = make_layout(Transformer, config, make_mesh("1x1"))
    x, square = jnp.asarray(1 + 2**-7, jnp.bfloat16), jnp.asarray(1 + 2**-6, jnp.bfloat16)
    arguments = jax.device_put((x, square), layout.replicated)
    wide = lambda x, y: (x * x).astype(jnp.float32) - y.astype(jnp.float32)  # noqa: E731
    program = layout.compile(wide, *arguments)
    assert float(program(*arguments)) == 0, "2^-14, which bfloat16 can't add to 1"
    assert compiler_options(layout.mesh, "float32") == compiler_options(layout.mesh)


# ---- the command ---------------------------------------------------------------------------------


def measure(family: str) -> mismatch.Mismatch:
    source = checkpoint.find(f"hf:{GOLDEN / family}")
    layout = checkpoint.layout_of(source, make_mesh("1x1"))
    wanted = mismatch.Wanted(
        begin=np.array([1, 5], np.int32),
        end=(),
        vocabulary=layout.config.vocab_size,
        rows=2,
        new_tokens=6,
    )
    (found,) = mismatch.compare_pairs(source, [layout], wanted)
    assert found.tokens == 12
    return found


@pytest.mark.full
def test_experts_and_log_probabilities_agree_in_float32():
    found = measure("mixtral")
    assert found.other_experts == 0
    assert 0 < found.largest < 5e-6


@pytest.mark.full
def test_what_is_no_rounding_is_found(monkeypatch):
    """A temperature that training doesn't know."""
    choose = Sampler._choose
    warm = lambda self, *arguments: choose(dataclasses.replace(self, temperature=1.5), *arguments)  # noqa: E731
    monkeypatch.setattr(Sampler, "_choose", warm)
    found = measure("llama2")
    holds, sentence = mismatch.verdict([found], "float32")
    assert not holds
    assert "does not explain" in sentence


MISTAKES = {
    "--generate=mlp.digits": "use a language model",
    "--generate=transformer.stdlib_3m --x64": "--x64=true is for a model of your own",
    "--generate=transformer.stdlib_3m --dtype=int8": "is not one of float32, bfloat16",
    "--generate=transformer.stdlib_3m --seq_len=9999": "use at most --seq_len=255",
    "--generate=transformer.stdlib_3m --meshes=8 --batch_size=9": "use a multiple",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_one_line(flags, inside):
    done = inside("recipes.prove", *flags.split())
    assert done.code == 2
    assert MISTAKES[flags] in done.err
    assert done.err.count("\n") == 1
