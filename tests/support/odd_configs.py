"""Random models of odd sizes on random meshes: each trains and generates like one device, or is
refused. tests/by_hand/odd_shapes.py counts many.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from recipes.common import entries
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import Layout, make_layout, shardings
from recipes.common.sharding.rules import used_axes
from recipes.common.train.checks import check_stages
from recipes.common.train.step import gradients
from tests.support.models import random_values
from tests.support.quick import QUICK
from zoo.options import cache as zoo_cache

# Entries whose Configs are drawn: language models, and three others with fields of their own.
ENTRIES = [
    name
    for name, entry in entries.ENTRIES.items()
    if entry.data == "data.text" or name in ("dot_relu_dot", "mlp", "vit")
]
ORDER = ("data", "fsdp", "pipe", "seq", "expert", "model")
LOSS = 1e-5  # relative; a wrong part of a product is off by more than 1e-3
GRADIENT = 1e-4  # |difference| / |gradients of one device|
LOGITS = 1e-4  # of the largest one


@dataclasses.dataclass(frozen=True)
class Case:
    entry: str
    config: Any
    strategy: str
    mesh: str
    rows: int
    seq_len: int
    whole: str = ""  # a logical axis that the strategy splits and these rules don't

    @property
    def rules(self):
        if not self.whole:
            return self.strategy
        return entries.zoo_file(self.entry).RULES[self.strategy] | {self.whole: None}


class Draw:
    """Random choices of a seed."""

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)

    def of(self, *values):
        return values[self.random.integers(len(values))]

    def divisor(self, number: int) -> int:
        return self.of(*(n for n in range(1, number + 1) if number % n == 0))


def draw_case(entry: str, seed: int) -> Case:
    """A random config of an entry, one of its strategies, and a mesh of up to eight devices."""
    draw = Draw(seed)
    while True:
        try:
            config = _config(entry, draw)
        except ValueError:  # a Config of its own says why it is invalid
            continue
        strategy = draw.of(*entries.zoo_file(entry).RULES)
        used = used_axes(entries.zoo_file(entry).RULES[strategy])
        sizes = {axis: draw.of(1, 2, 2, 2, 3, 3, 4) for axis in ORDER if axis in used}
        if 1 < math.prod(sizes.values()) <= 8:
            break
    mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    rows = math.prod(size for axis, size in sizes.items() if axis in ("data", "fsdp", "expert"))
    seq_len = sizes.get("seq", 1) * sizes.get("model", 1) * draw.of(2, 3, 4, 5, 8)
    rules = entries.zoo_file(entry).RULES[strategy]
    split = [axis for axis in rules if rules[axis] and axis != "batch"]
    whole = draw.of("", "", *split)
    return Case(entry, config, strategy, mesh, rows * draw.of(1, 2, 3), seq_len, whole)


def _config(entry: str, draw: Draw):
    """A random Config; raises ValueError if it is invalid."""
    zoo = entries.zoo_file(entry)
    width = (24, 24, 48, 16, 40)  # mostly divisible by 2, 3, 4, 6 and 8
    tiny = zoo.Config.tiny()
    if entry == "dot_relu_dot":
        return zoo.Config(embed=draw.of(*width), hidden=draw.of(*width, 18))
    if entry == "mlp":
        sizes = {"inputs": draw.of(7, 12, 64), "classes": draw.of(2, 5, 6, 10)}
        return zoo.Config(embed=draw.of(*width), hidden=draw.of(*width, 18), depth=2, **sizes)
    heads = draw.of(1, 2, 3, 4, 5, 6, 6, 8, 12)
    if entry == "vit":
        return zoo.Config(
            image_size=draw.of(4, 6, 8), patch=2, embed=heads * draw.of(4, 8, 6), num_layers=1,
            num_heads=heads, mlp=draw.of(*width), channels=draw.of(1, 2, 3), classes=draw.of(3, 6, 10),
            norm_eps=1e-3,
        )  # fmt: skip
    sizes: dict[str, Any] = {
        "vocab_size": draw.of(31, 32, 36, 37, 48),
        "embed": draw.of(*width),
        "num_heads": heads,
        "num_layers": draw.of(1, 2, 2, 3, 4),
        "mlp": draw.of(*width),
        "attention": draw.of("auto", "flash", "xla"),
        "context": draw.of("auto", "auto", "ring", "all-to-all"),
        "pipeline": draw.of("1f1b", "gpipe"),
        "remat": draw.of("full", "none", "dots", "sublayers"),
    }
    if entry == "gpt2":
        sizes["embed"] = heads * draw.of(4, 8, 6)
        return dataclasses.replace(tiny, **sizes, max_positions=draw.of(48, 64))
    if entry != "deepseek":
        sizes |= {"num_kv_heads": draw.divisor(heads), "head_dim": draw.of(2, 4, 6, 8)}
    if hasattr(tiny, "tie_embeddings"):
        sizes["tie_embeddings"] = draw.of(True, False)
    if hasattr(tiny, "num_experts"):
        sizes["num_experts"] = draw.of(2, 3, 4, 6, 8)
        sizes["experts_per_token"] = min(draw.of(1, 2, 3), sizes["num_experts"])
        sizes["capacity"] = draw.of(None, 1.0, 1.5)
    if entry in ("transformer", "moe"):
        sizes |= {
            "qkv_bias": draw.of(True, False),
            "qk_norm": True,
            "joint_qk_norm": draw.of(True, False),
            "rotary_dims": draw.of(0, 2),
            "sliding_window": draw.of(None, None, 3),
        }
    if entry == "moe":
        sizes["shared_mlp"] = draw.of(0, 0, *width)
        sizes["dense_layers"] = min(draw.of(0, 1), sizes["num_layers"] - 1)
        sizes["dense_mlp"] = draw.of(*width)
    if entry == "transformer":
        sizes["lora_rank"] = draw.of(0, 0, 3)
    if entry == "deepseek":
        sizes |= {
            "nope_dim": draw.of(2, 4, 6), "rope_dim": draw.of(2, 4), "value_dim": draw.of(2, 3, 6),
            "kv_latent": draw.of(*width), "q_latent": draw.of(0, *width), "groups": 1, "top_groups": 1,
            "shared_experts": draw.of(1, 2), "dense_mlp": draw.of(*width),
            "dense_layers": min(draw.of(0, 1), sizes["num_layers"] - 1), "mtp_depth": draw.of(0, 0, 1),
        }  # fmt: skip
    if entry == "qwen3_next":
        groups = draw.of(1, 2, 2, 3, 4)
        experts = draw.of(0, 0, sizes["num_experts"])
        sizes |= {
            "delta_key_heads": groups, "delta_heads": groups * draw.of(1, 2, 3), "rotary_dims": 2,
            "delta_key_dim": draw.of(4, 6, 8), "delta_value_dim": draw.of(4, 6, 8),
            "num_layers": draw.of(2, 2, 3, 4), "attention_every": 2, "conv_width": draw.of(2, 3, 4),
            "num_experts": experts, "shared_mlp": draw.of(0, *width), "mtp_depth": draw.of(0, 0, 1),
        }  # fmt: skip
    if entry == "hybrid":
        groups = draw.of(1, 2, 2, 3, 4)
        pattern = draw.of("M*CE", "P-", "PE", "M-*E", "EMP", "C*E", "K*E", "K-*", "D*+")
        experts = draw.of(True, False) if "E" in pattern else False
        sizes |= {
            "pattern": pattern, "num_layers": len(pattern) * draw.of(1, 2),
            "mamba_heads": groups * draw.of(1, 2, 3), "mamba_groups": groups,
            "delta_heads": groups * draw.of(1, 2, 3), "delta_key_heads": groups,
            "delta_key_dim": draw.of(3, 4, 6), "delta_value_dim": draw.of(4, 6, 8),
            "mamba_head_dim": draw.of(3, 4, 6), "mamba_state_dim": draw.of(4, 6, 8),
            "conv_width": draw.of(2, 3, 4), "mamba_norm": draw.of(True, False),
            "mamba_scales": draw.of((), (0.9, 1.1, 0.8, 1.2, 0.7)), "key_scale": draw.of(1.0, 1.3),
            "activation": draw.of("swiglu", "relu2"), "sigmoid": experts,
            "shared_mlp": draw.of(0, *width) if "E" in pattern else 0,
        }  # fmt: skip
        if "E" not in pattern:
            sizes |= {"num_experts": 0, "experts_per_token": 0}
    return dataclasses.replace(tiny, **sizes)


def make(case: Case, mesh: str, rules) -> Layout:
    """The layout of a case, after the checks of a recipe. Raises UserError."""
    decoder = hasattr(case.config, "vocab_size")
    layout = make_layout(
        entries.model(case.entry), case.config, make_mesh(mesh), rules,
        batch_size=case.rows, seq_len=case.seq_len if decoder else 0,
    )  # fmt: skip
    if decoder:
        check_stages(layout, 1)
    return layout


def make_batch(case: Case) -> dict[str, np.ndarray]:
    """Random rows; those of tokens have two documents and padding."""
    random = np.random.default_rng(0)
    if not hasattr(case.config, "vocab_size"):
        example = entries.example(case.entry, case.config)
        draw = {"float32": random.standard_normal, "int32": lambda s: random.integers(0, 2, s)}
        return {
            n: draw[str(x.dtype)]((case.rows, *x.shape)).astype(x.dtype)
            for n, x in example.items()
            if n != "weight"  # of rows: all count
        }
    shape = case.rows, case.seq_len
    tokens, targets = random.integers(0, case.config.vocab_size, (2, *shape), np.int32)
    targets = np.where(random.random(shape) < 0.1, -1, targets)
    border = (case.seq_len + 1) // 3  # not one of shards, so that a document's state has to travel
    ids = np.tile(np.arange(case.seq_len) >= border, (case.rows, 1)).astype(np.int32)
    return {"tokens": tokens, "targets": targets, "segment_ids": ids}


def compute(case: Case, layout: Layout, *, logits_only: bool):
    """(mean loss, gradients by path, logits by name)."""
    batch = make_batch(case)
    lengths_B = np.arange(case.rows, dtype=np.int32) % case.seq_len + 1  # also a token of each row

    def all_logits(variables, batch):
        model = layout.model.merge(variables)
        outputs = {"logits": model(batch["tokens"], batch["segment_ids"])}
        if not logits_only:
            outputs["prefill"], cache = zoo_cache.prefill(
                model, batch["tokens"], lengths_B, slots=72
            )
            outputs["decode"], _ = zoo_cache.decode(model, lengths_B, cache)
        return outputs

    def run(variables, batch):
        logits = all_logits(variables, batch) if "tokens" in batch and layout.stages == 1 else {}
        if logits_only:
            return 0.0, {}, logits
        grads, _, means = gradients(layout, variables, batch)
        return means["loss"], grads, logits

    arguments = (
        jax.device_put(random_values(layout.model.shapes), shardings(layout.variables())),
        jax.device_put(batch, layout.batch_shardings(batch)),
    )
    outputs = jax.device_get(layout.compile(run, *arguments, compiler_options=QUICK)(*arguments))
    return float(outputs[0]), paths(outputs[1]), outputs[2]


def check(case: Case, *, logits_only: bool = False) -> str:
    """Returns "refused: …", or "equal". Raises AssertionError if a mesh computes something else.

    Args:
      logits_only: compiles in a quarter of the time.
    """
    try:
        layout = make(case, case.mesh, case.rules)
    except UserError as error:
        return f"refused: {error}"
    found, wanted = (
        compute(case, x, logits_only=logits_only) for x in (layout, make(case, "1x1", "dp"))
    )
    assert abs(found[0] - wanted[0]) <= LOSS * abs(wanted[0]), f"loss {found[0]}, not {wanted[0]}"
    norm = math.hypot(*(np.linalg.norm(x) for x in wanted[1].values()))
    for path, want in wanted[1].items():
        off = np.linalg.norm(found[1][path] - want) / max(np.linalg.norm(want), 1e-4 * norm)
        assert off <= GRADIENT, f"gradient of {path} differs by {off:.1e}"
    for name, logits in found[2].items():
        off = np.abs(logits - wanted[2][name]).max() / np.abs(wanted[2][name]).max()
        assert off <= LOGITS, f"{name} differ by {off:.1e}"
    return "equal"
