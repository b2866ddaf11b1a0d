"""Pictures classified by captions alone, with a model of two towers.

Shapes: B batch, D joint embedding, M captions of all classes, T tokens of a text, K classes or texts.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from data import buckets, captions, hub, images
from data.batches import Dataset, held_out_batches
from data.captions import Texts
from recipes.common.runtime import UserError
from recipes.common.runtime.flags import split
from recipes.common.sharding import Layout, Tree
from recipes.common.train.feed import to_devices
from zoo.core.sharding import constrain


class Classes:
    """The captions of classes. A class is the mean of its captions' embeddings."""

    def __init__(self, names: Sequence[str], texts: Texts, templates: Sequence[str] = ()):
        """Raises DataError if a caption is too long."""
        by_class = captions.class_tokens(names, texts, templates)
        self.count = len(by_class)
        self._tokens_MT = np.concatenate(by_class)
        self._share_MK = np.zeros((len(self._tokens_MT), self.count), np.float32)
        first = 0
        for k, tokens in enumerate(by_class):
            self._share_MK[first : first + len(tokens), k] = 1 / len(tokens)
            first += len(tokens)

    def embed(self, model, layout: Layout):
        """[K, D], of a model inside `layout.compile`."""
        padding = ((0, -len(self._tokens_MT) % layout.batch_shards), (0, 0))  # of no class
        tokens_MT, share_MK = (np.pad(x, padding) for x in (self._tokens_MT, self._share_MK))
        text_MD = constrain(model.embed_texts(jnp.asarray(tokens_MT)), None, None)
        return jnp.asarray(share_MK).T @ text_MD


def accuracy(classes: Classes, layout: Layout) -> Callable[..., Tree]:
    """An extra sum for `fit`: images whose own class has the nearest captions."""

    def count(model, batch: Tree) -> Tree:
        return nearest(model, batch, classes.embed(model, layout), batch["label"])

    return count


def retrieval(model, batch: Tree) -> Tree:
    """An extra sum for `fit`: images whose own caption is the nearest of the batch's."""
    text_BD = constrain(model.embed_texts(batch["tokens"]), None, None)
    is_pair_B = constrain(batch["label"], None) >= 0
    return nearest(model, batch, text_BD, jnp.arange(len(text_BD)), is_pair_B)


def nearest(model, batch: Tree, text_KD, own_B, is_candidate_K: Any = True) -> Tree:
    """How many images are nearest to their own text, of number `own_B` among the candidates."""
    image_BD = constrain(model.embed_images(batch["image"]), "batch", None)
    score_BK = jnp.where(is_candidate_K, image_BD @ text_KD.T, -2.0)  # below any cosine
    counted_B = constrain(batch["label"], "batch") >= 0
    right_B = (score_BK.argmax(axis=1) == constrain(own_B, "batch")) & counted_B
    return {"accuracy": (right_B.sum().astype(jnp.float32), counted_B.sum().astype(jnp.float32))}


# ---- recipes.evaluate --labels -------------------------------------------------------------------


def read_labels(labels: str) -> list[str]:
    """--labels: names with commas between them, or a file with one a line. Raises UserError."""
    names = _read_list(labels, "labels")
    if len(names) < 2:
        raise UserError(f"--labels={labels} has {len(names)} names of classes; use two or more")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--labels={labels} has {twice[0]!r} twice; remove one")
    return names


def read_templates(templates: str) -> list[str]:
    """--templates: captions with commas between them, or a file with one a line. Raises UserError.

    Captions that have commas themselves, such as CLIP's for food and pets, need a file.
    """
    captions = _read_list(templates, "templates")
    if templates and not captions:
        raise UserError(f"--templates={templates} has no captions; write some, or leave it out")
    for caption in captions:
        if "{}" not in caption:
            raise UserError(
                f"--templates has {caption!r} without {{}} for a class's name; add it, or write captions "
                "that have commas into a file, one a line"
            )
    return captions


def _read_list(value: str, flag: str) -> list[str]:
    path = buckets.local(value, f"--{flag}={value}")
    if os.path.isfile(path):  # pathlib's raises for a list longer than a file's name may be
        try:
            text = path.read_text(encoding="utf-8-sig")
            lines = [
                line
                for part in hub.without_nul([text], f"--{flag}={value}")
                for line in part.splitlines()
            ]
        except UnicodeDecodeError:
            raise UserError(f"--{flag}={value} is not UTF-8; convert the file") from None
    else:
        lines = split(value)
    return [line.strip() for line in lines if line.strip()]


def pictures(
    dataset: str,
    names: list[str],
    config: Any,
    part: str,
    image_column: str = "image",
    label_column: str = "label",
) -> list[Dataset]:
    """The parts of a dataset of pictures to classify, whose classes are among `names`.

    Each part has its pictures as held-out ones. Raises UserError.
    """
    data = images.load(
        dataset, config.image_size, config.channels, names, config.mean, config.std, config.resample,
        image_column=image_column, label_column=label_column, center_crop=config.center_crop,
    )  # fmt: skip
    classes = data.config["labels"]
    if list(classes) != names:
        other = next(name for name in classes if name not in names)
        raise UserError(f"--dataset={dataset} has class {other!r}, which --labels lacks; add it")
    return [data] if part == "held_out" else [data._replace(held_out=data.train), data]


def evaluate(
    parts: list[Dataset], classes: Classes, layout: Layout, variables: Tree
) -> tuple[float, float]:
    """(images classified right, images) of parts of a dataset."""
    embed = layout.compile(
        lambda variables: classes.embed(layout.model.merge(variables), layout),
        variables, out_shardings=layout.replicated,
    )  # fmt: skip
    class_KD, program, total = embed(variables), None, np.zeros(2)

    def count(variables, class_KD, batch):
        model = layout.model.merge(variables)
        return nearest(model, batch, class_KD, batch["label"])["accuracy"]

    for data in parts:
        for rows in held_out_batches(data, layout.batch_size, layout.process_rows):
            inputs = variables, class_KD, to_devices(rows, layout)
            program = program or layout.compile(count, *inputs, out_shardings=layout.replicated)
            total += np.array([float(x) for x in program(*inputs)])
    return total[0], total[1]
