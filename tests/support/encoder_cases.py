"""Small text encoders of `transformers`, and what ours compute of the same folders.

`python -m tests.by_hand.encoder_parity` makes and compares them.
"""

import dataclasses

import numpy as np

from recipes.common import checkpoint
from recipes.common.mesh import make_mesh
from tests.support.hf_families import DISTIL, MODERN, ROBERTA
from tests.support.hf_families import ENCODER as BERT

MESHES = ("1x1", "4x2", "2x2x2")
MEAN = {"classifier_pooling": "mean"}
OUTPUTS = "outputs.npz"


@dataclasses.dataclass(frozen=True)
class Case:
    """A small model of theirs."""

    name: str  # of the class in transformers
    options: dict  # of its config
    modules: tuple[str, ...] = ()  # of sentence-transformers: the pooling, and `normalize`
    golden: bool = True


CLASSES = {"num_labels": 3}
CASES = {
    "bert_pooler": Case("BertModel", BERT, golden=False),
    "bert_classes": Case("BertForSequenceClassification", BERT | CLASSES),
    "bert_mean": Case("BertModel", BERT, ("mean", "normalize")),
    "distilbert_mean": Case("DistilBertModel", DISTIL, ("mean",)),
    "roberta_pooler": Case("RobertaModel", ROBERTA, golden=False),
    "roberta_classes": Case("RobertaForSequenceClassification", ROBERTA | CLASSES),
    "roberta_cls": Case("RobertaModel", ROBERTA | {"type_vocab_size": 1}, ("cls",)),
    "xlmr_pooler": Case("XLMRobertaModel", ROBERTA),
    "xlmr_classes": Case("XLMRobertaForSequenceClassification", ROBERTA | CLASSES),
    "xlmr_mean": Case("XLMRobertaModel", ROBERTA, ("mean",), golden=False),
    "modernbert_plain": Case("ModernBertModel", MODERN, golden=False),
    "modernbert_mean": Case("ModernBertModel", MODERN, ("mean", "normalize")),
    "modernbert_classes": Case("ModernBertForSequenceClassification", MODERN | CLASSES | MEAN),
    "modernbert_cls_classes": Case(
        "ModernBertForSequenceClassification", MODERN | CLASSES, golden=False
    ),
}  # fmt: skip
GOLDENS = [name for name, case in CASES.items() if case.golden]

# Texts of several lengths, the last ones padded; RoBERTa counts positions by what is padding.
TEXT_BT = np.arange(17) < np.array([[17], [17], [12], [5], [1]])


def tokens_of(architecture: str) -> np.ndarray:
    tokens_BT = np.random.default_rng(0).integers(4, 67, TEXT_BT.shape)
    return np.where(TEXT_BT, tokens_BT, 1 if "Roberta" in architecture else 0)


def types_of(kinds: int) -> np.ndarray | None:
    """Types of tokens, if a model has several: the second text begins at position 7."""
    return np.where(TEXT_BT & (np.arange(17) >= 7), 1, 0) if kinds > 1 else None


def ours(path: str, mesh: str) -> dict[str, np.ndarray]:
    """The same, by us, on a mesh."""
    source = checkpoint.find(path)
    layout = checkpoint.layout_of(source, make_mesh(mesh))
    variables, config = checkpoint.restore_variables(source, layout), layout.config
    B = -(-len(TEXT_BT) // layout.batch_shards) * layout.batch_shards
    types_BT = types_of(config.token_types)
    given = {
        "tokens": tokens_of(source.metadata["architecture"]),
        "segments": TEXT_BT.astype(np.int32),
    }
    given |= {} if types_BT is None else {"types": types_BT}
    given = {name: np.resize(array, (B, array.shape[1])) for name, array in given.items()}

    def outputs(variables, given):
        model = layout.model.merge(variables)
        of_texts = (given["tokens"], given["segments"], given.get("types"))
        is_text_BT = given["segments"].astype("float32")  # 1 or 0
        found = {"hidden": model.encode(*of_texts) * is_text_BT[:, :, None]}
        if config.task == "classify":
            return found | {"logits": model.classify(*of_texts)}
        return found | {"vector": model.pool(*of_texts)}

    found = layout.compile(outputs, variables, given)(variables, given)
    return {name: np.asarray(array)[: len(TEXT_BT)] for name, array in found.items()}


def largest_error(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(found[name] - wanted[name]).max()) for name in wanted)
