"""The head for the second-next token: its loss is its definition, on any mesh."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from recipes.common.mesh import make_mesh
from recipes.common.sharding.layout import make_layout
from tests.conftest import full_except
from tests.support.further_token import further_logits
from tests.support.models import loss_and_gradients, packed_batch, random_decoder, worst
from tests.support.quick import QUICK
from zoo import deepseek, qwen3_next
from zoo.core.decoder import Decoder
from zoo.deepseek import DeepSeek
from zoo.options.compute_options import ComputeOptions
from zoo.qwen3_next import Qwen3Next

pytestmark = [pytest.mark.promise("definitions"), pytest.mark.usefixtures("strict")]

DEEP = dataclasses.replace(deepseek.Config.tiny(), mtp_depth=1)
DEEPSEEK = dataclasses.replace(DEEP, num_layers=1, dense_layers=0)
QWEN = dataclasses.replace(qwen3_next.Config.tiny(), num_layers=2, mtp_depth=1)
QWEN_DENSE = dataclasses.replace(
    QWEN, num_experts=0, experts_per_token=0, shared_mlp=0, tie_embeddings=True
)


def model_of(config: ComputeOptions) -> type[Decoder]:
    return DeepSeek if isinstance(config, deepseek.Config) else Qwen3Next


@pytest.mark.parametrize(
    ("config", "packed"),
    full_except(
        [(DEEP, True), (DEEPSEEK, True), (DEEPSEEK, False), (QWEN, True), (QWEN_DENSE, False)],
        fast=[(DEEPSEEK, True), (DEEPSEEK, False), (QWEN, True)],
    ),
)
def test_the_loss_is_its_definition(config, packed):
    """Position t reads the model's output there and token t + 1, and predicts token t + 2.

    The last position of a row or of a document predicts nothing.
    """
    config = dataclasses.replace(config, capacity=None, mtp_weight=0.5)
    model = random_decoder(model_of(config), config)
    rows = packed_batch() if packed else packed_batch() | {"segment_ids": None}
    total, count, aux = jax.jit(lambda m: m.loss(**rows), compiler_options=QUICK)(model)
    (loss, _), (further, further_count) = aux["loss"], aux["mtp"]
    tokens_BT, targets_BT, ids_BT = rows.values()
    last = tokens_BT.shape[1] - 1
    logits = functools.partial(further_logits, tokens_BT=tokens_BT, ids_BT=ids_BT)
    logits_BTV = np.asarray(jax.jit(logits, compiler_options=QUICK)(model), np.float64)
    counted_BT = targets_BT[:, 1:] >= 0
    if packed:
        counted_BT &= ids_BT[:, 1:] == ids_BT[:, :-1]
    of_target = np.take_along_axis(logits_BTV[:, :last], targets_BT[:, 1:, None], axis=-1)[..., 0]
    largest = logits_BTV[:, :last].max(axis=-1)
    sums = np.exp(logits_BTV[:, :last] - largest[..., None]).sum(axis=-1)
    wanted = np.where(counted_BT, np.log(sums) + largest - of_target, 0).sum()
    assert float(further_count) == counted_BT.sum() < float(count)
    assert float(further) == pytest.approx(wanted, rel=1e-5)
    costs = sum(aux[name][0] * weight for name, weight in model.costs.items())
    assert float(total) == pytest.approx(float(loss + 0.5 * further + costs), rel=1e-6)


def test_low_precision_rounds_the_head_s_product_too():
    def rounded(depth: int) -> int:
        config = dataclasses.replace(DEEPSEEK, matmul="int8", mtp_depth=depth)
        model = random_decoder(DeepSeek, config)
        program = jax.make_jaxpr(lambda m: m.loss(**packed_batch())[0])(model)
        return str(program).count(" round[")

    # Traces print equal layers once; only the product that joins the two inputs is new.
    assert rounded(1) > rounded(0)


@pytest.mark.parametrize(
    ("config", "mesh", "strategy", "context", "tolerance"),
    full_except(
        [
            (DEEPSEEK, "4x2", "fsdp_tp_sp", "auto", 4e-6),
            (DEEPSEEK, "data=2,seq=2,model=2", "fsdp_cp_tp", "ring", 4e-6),
            # On one device, parameters that differ by one unit in the last place change gradients of
            # the head's attention by 5e-6.
            (QWEN, "4x2", "fsdp_tp_sp", "auto", 2e-5),
            (QWEN, "data=2,seq=2,expert=2", "fsdp_ep_cp", "auto", 2e-5),
        ],
        fast=[],
    ),
)
def test_losses_and_gradients_agree_on_meshes(config, mesh, strategy, context, tolerance):
    """Also where the next token is on another device, in stripes, and with split norms."""
    model = model_of(config)
    figures, wanted = loss_and_gradients(model, config, "1x1", "dp")
    config = dataclasses.replace(config, context=context)
    found_figures, found = loss_and_gradients(model, config, mesh, strategy)
    assert found_figures == pytest.approx(figures, rel=3e-6)
    assert worst(found, wanted) < tolerance


@pytest.mark.parametrize("config", [DEEPSEEK, QWEN], ids=["deepseek", "qwen3_next"])
def test_stages_have_no_place_for_the_head(config):
    config = dataclasses.replace(config, num_layers=2 * len(config.kinds))
    layout = make_layout(model_of(config), config, make_mesh("data=4,pipe=2"), "pp", batch_size=8)
    rows = layout.abstract_batch(
        dict.fromkeys(packed_batch(), jax.ShapeDtypeStruct((24,), np.int32))
    )
    with pytest.raises(ValueError, match="no stage for the layer of mtp_depth=1"):
        layout.compile(lambda v, b: layout.model.merge(v).loss(**b)[0], layout.variables(), rows)


@pytest.mark.parametrize("config", [DEEPSEEK, QWEN], ids=["deepseek", "qwen3_next"])
def test_one_layer_at_most(config):
    with pytest.raises(ValueError, match="mtp_depth=2 is not one of 0, 1"):
        dataclasses.replace(config, mtp_depth=2)
