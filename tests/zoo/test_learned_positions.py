"""Learned positions count from a document's start: a packed document is computed as in a row of its own."""

import numpy as np
import pytest

from tests.support.models import built
from tests.support.quick import quick as quick
from zoo.bert import Bert
from zoo.bert import Config as BertConfig
from zoo.gpt2 import GPT2
from zoo.gpt2 import Config as GPT2Config

pytestmark = pytest.mark.promise("packing")

SIZES = dict(vocab_size=64, embed=16, num_layers=1, num_heads=4, mlp=16, max_positions=32)
MODELS = {"gpt2": (GPT2, GPT2Config(**SIZES)), "bert": (Bert, BertConfig(**SIZES))}
TOKENS_BT = np.random.default_rng(0).integers(2, 64, (2, 32)).astype(np.int32)
ENDS = (9, 25, 32)  # of a row's documents
SEGMENTS_BT = np.broadcast_to(np.searchsorted(ENDS, np.arange(32), side="right"), (2, 32))


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_document_is_computed_as_alone(name, quick):
    model_class, config = MODELS[name]
    model = built(model_class, config)
    packed_BTV = np.asarray(model(TOKENS_BT, SEGMENTS_BT))
    for start, end in zip((0, *ENDS), ENDS, strict=False):
        alone_BTV = np.asarray(model(TOKENS_BT[:, start:end]))
        np.testing.assert_allclose(packed_BTV[:, start:end], alone_BTV, atol=2e-5)
    continued_BTV = np.asarray(model(TOKENS_BT))
    assert np.abs(packed_BTV - continued_BTV)[:, -1].max() > 1e-3
