"""Steps compiled for NVIDIA GPUs without one; needs the extra gpu-aot, which takes gigabytes.

pip install -e '.[gpu-aot]' && pytest --full tests/bench/test_gpu_programs.py
"""

import dataclasses
import re
from collections import Counter

import numpy as np
import pytest

from data.text import example
from data.tokenizer import BYTES
from recipes.common.language import model_config
from recipes.common.report import hlo, program
from recipes.common.sharding.compiler_options import COMPILER_OPTIONS
from recipes.common.sharding.layout import make_layout
from recipes.common.train.optimizer import LearningRate, adamw
from recipes.common.train.step import TrainStep
from recipes.instruments.bench.common import Step, make_step, version
from recipes.instruments.plan.compilers import topology
from recipes.transformer import MODEL
from zoo.gemma3 import Config as Gemma3Config
from zoo.gemma3 import Gemma3
from zoo.llama_relatives import Config, Transformer

pytestmark = [
    pytest.mark.promise("attention"),
    pytest.mark.full,
    pytest.mark.skipif(
        not version("jax-cuda13-plugin"), reason="the extra gpu-aot is not installed"
    ),
]
KERNELS = {"_attention", "_attention_dq", "_attention_dkv"}  # of zoo/kernels/triton.py
# Narrow, so that what grows with T² would be most of the memory.
NARROW = Config(384, 128, 2, num_heads=4, num_kv_heads=2, head_dim=64, mlp=256, dtype="bfloat16")


def step(T: int, attention: str) -> Step:
    config = dataclasses.replace(NARROW, attention=attention)
    return make_step(config, "fsdp", topology("h100", {"data": 2}), 2, T, segments=True)


def held(T: int, attention: str) -> tuple[int, int]:
    """Bytes of a step's temporary memory, and of the largest array in it."""
    compiled = step(T, attention).compile()
    text = compiled.as_text()
    computations, _ = program.computations(text)
    inside = set(re.findall(r" fusion\(.*calls=%([\w.\-]+)", text))  # its arrays are in registers
    lines = [line for name, lines in computations.items() if name not in inside for line in lines]
    results = (re.match(r"(?:ROOT )?%?[\w.\-]+ = (\S+\]\S*) ", line) for line in lines)
    largest = max(program.size(result[1])[0] for result in results if result)
    return compiled.memory_analysis().temp_size_in_bytes, largest


def test_no_buffer_grows_with_the_square_of_a_row():
    """Four times the positions take at most four times the memory, with segments."""
    growth = {}
    for attention, T in (("auto", 8_192), ("xla", 2_048)):
        short, long = held(T, attention), held(4 * T, attention)
        growth[attention] = [b / a for a, b in zip(short, long, strict=True)]
    assert max(growth["auto"]) < 4.1, growth
    assert min(growth["xla"]) > 10, "the check would not see scores in memory"


def test_bench_and_recipe_call_the_same_kernels():
    """Compares kernels and branches in the programs given to NVIDIA's compiler."""
    mesh, lr = topology("h100", {"data": 8}), LearningRate(1e-3, 10, 100)
    flags = dataclasses.replace(MODEL, size="tiny")
    config = model_config("transformer", flags, None, BYTES, mesh.devices.flat[0])
    layout = make_layout(Transformer, config, mesh, "fsdp", batch_size=8)
    recipe = TrainStep(layout, adamw(lr, weight_decay=0.1, clip_norm=1.0), lr)
    row = example(np.zeros(257, np.int32))
    texts = [
        recipe.lower(recipe.abstract_state(), row).as_text(),
        make_step(config, "fsdp", mesh, 8, 256, segments=True).lower().as_text(),
    ]
    # cuDNN is a custom call; flash branches on whether a tile is seen.
    part = re.compile(r"custom_call @([\w$.]+)|stablehlo\.(case|if)")
    texts.append(make_step(config, "fsdp", mesh, 8, 256).lower().as_text())  # without segments
    called = [Counter(part.findall(text)) for text in texts]
    assert called[0] == called[1]
    for counts in called:
        assert ("__cudnn$fmhaSoftmaxBackward", "") in counts
        assert not any(branch for _, branch in counts), counts


@pytest.mark.parametrize(
    ("model", "changes", "mesh", "rules"),
    [
        (Gemma3, {"soft_cap": 50.0}, {"data": 2}, "fsdp"),
        (Gemma3, {"soft_cap": 50.0, "head_dim": 256}, {"data": 2}, "fsdp"),
        (Transformer, {"dtype": "float32"}, {"data": 2}, "fsdp"),
        (Transformer, {"context": "ring"}, {"data": 2, "seq": 2}, "fsdp_cp"),
    ],
)
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_where_cudnn_has_no_kernel_triton_has_one(model, changes, mesh, rules):
    """It compiles, and no tile of `flash` is left in the program."""
    config = NARROW if model is Transformer else Gemma3Config.tiny()
    config = dataclasses.replace(config, **{"dtype": "bfloat16"} | changes)
    step = make_step(config, rules, topology("h100", mesh), 4, 512, segments=True, model=model)
    text = step.lower().as_text()
    assert {name for name in KERNELS if f'name = "{name}"' in text} == KERNELS
    assert not re.search(r"stablehlo\.(case|if)", text)
    step.compile()


@pytest.mark.parametrize("kind", ["h100", "h200"])
def test_the_compiler_knows_our_options(kind):
    """The compiler refuses unknown options; programs for one GPU send nothing."""
    assert COMPILER_OPTIONS["cuda"]
    compiled = make_step(Config.tiny(), "fsdp", topology(kind, {"data": 1}), 1, 128).compile()
    assert hlo.sent_by_kind(compiled.as_text(), 1) == {}
