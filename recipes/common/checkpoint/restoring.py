"""The model of a checkpoint: its config, its layout on a mesh, and its variables."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from data.tokenizer import Tokenizer
from recipes.common import entries
from recipes.common.checkpoint import adapters
from recipes.common.checkpoint.locate import find
from recipes.common.checkpoint.store import WeightSource, config_of
from recipes.common.flags.config_flags import replace
from recipes.common.runtime import UserError
from recipes.common.sharding import Layout, Rules, Tree, make_layout, paths, shardings
from recipes.common.sharding.abstract import nested, unadapted
from zoo.core.strategies import VOCAB
from zoo.options.mtp import HEAD_PATH


def restore(
    path: str | pathlib.Path,
    mesh: Mesh,
    rules: str | Rules | None = None,
    *,
    verify: bool = True,
    base: str = "",
):
    """Restores a trained model onto `mesh`, whatever mesh and rules it was saved with.

    Args:
      path: as in `find`: a run's workdir, a checkpoint's own folder, a published name, "hf:DIR".
      rules: a strategy of the entry's RULES, or your own table; None: chosen by the mesh.
      verify: whether to hash every file first, which is slow for a huge checkpoint.
      base: path of an adapter's base if it has moved.

    Returns:
      (model, metadata): an NNX module with every array sharded by `rules`, and the checkpoint's
      metadata. No device ever holds more than its shards.

    Raises UserError, a ValueError, if there is no checkpoint, it is damaged, or the rules don't fit.
    """
    source = find(path, hash_files=verify, base=base)
    layout = layout_of(source, mesh, rules)
    return layout.model.merge(restore_variables(source, layout)), source.metadata


def layout_of(
    source: WeightSource,
    mesh: Mesh,
    rules: str | Rules | None = None,
    *,
    seq_len: int = 0,
    **compute,
) -> Layout:
    """The layout of a checkpoint's model on `mesh`; reads and allocates no arrays.

    Args:
      seq_len: see make_layout.
      compute: fields to replace in its Config, such as dtype.

    Raises UserError if the model is unknown or doesn't fit the mesh.
    """
    config = config_of(source)
    # How the run that saved it computed, on its mesh and devices.
    default = {"context": "auto", "pipeline": "1f1b", "pipe_rounds": 2, "pipe_microbatches": 0}
    default |= {"matmul": "", "matmul_backward": "", "reduce_dtype": "", "attention": "auto"}
    default |= {"load_limit": 0.0}
    default = {name: value for name, value in default.items() if hasattr(config, name)}
    config = replace(config, default | compute)
    return make_layout(
        entries.model(source.metadata["entry"]), config, mesh, rules, seq_len=seq_len
    )


def context(source: WeightSource) -> int:
    """Context length of a model in tokens: the one in its folder, or the one it was trained with.

    Never more than the positions that the model has learned, if it learns them.
    """
    facts = source.metadata
    tokens = facts.get("context") or facts.get("flags", {}).get("seq_len") or 2_048
    return min(tokens, facts["config"].get("max_positions") or tokens)


def restore_variables(source: WeightSource, layout: Layout, dtype: str | None = None) -> Tree:
    """Reads a checkpoint's parameters and buffers, sharded by `layout`.

    Args:
      dtype: dtype of matmul weights, for a model that is not trained; None: float32.

    Raises UserError if the checkpoint belongs to a different model.
    """
    check_variables(source, layout)
    return source.read(variables_of_dtype(layout, dtype))


def variables_of_dtype(layout: Layout, dtype: str | None = None) -> Tree:
    """A model's variables as ShapeDtypeStructs; see restore_variables."""
    wanted, matrices = layout.variables(), {*layout.names.in_use, VOCAB}
    if not dtype:
        return wanted
    return jax.tree.map(
        lambda axes, a: a.update(dtype=jnp.dtype(dtype)) if matrices & set(axes) else a,
        layout.model.axes, wanted, is_leaf=lambda x: isinstance(x, tuple),
    )  # fmt: skip


def check_variables(source: WeightSource, layout: Layout) -> None:
    """Raises UserError if the checkpoint's variables or their shapes differ from the model's.

    The model may lack the checkpoint's head for the second-next token: see `leaves_out_head`.
    """
    shapes = source.shapes()
    adapted = source.source if isinstance(source, NewHead) else source
    if "base" in layout.model.shapes and isinstance(adapted, adapters.Adapted):
        adapted.check_config(layout.config)
    model = unadapted(layout.model.shapes)
    for kind in {**shapes, **model}:
        saved, wanted = paths(shapes.get(kind, {})), paths(model.get(kind, {}))
        left_out = head_paths(saved) - wanted.keys()
        for path in sorted((saved.keys() ^ wanted.keys()) - left_out):
            what = f"{kind[:-1].replace('param', 'parameter')} {path}"
            if path in wanted:
                raise UserError(
                    f"checkpoint {source.path} has no {what}; use a checkpoint of the same model"
                )
            raise UserError(
                f"the model has no {what}, and checkpoint {source.path} has one; leave out the flags "
                "of the model, or use those that the checkpoint was made with"
            )
        for path in wanted:
            saved_shape, shape = list(saved[path].shape), list(wanted[path].shape)
            if saved_shape != shape:
                raise UserError(
                    f"{path} has shape {saved_shape} in checkpoint {source.path} and {shape} in this "
                    "model; use the flags that the checkpoint was made with"
                )


def leaves_out_head(source: WeightSource, layout: Layout) -> bool:
    """Whether a checkpoint has a head for the second-next token, and the model, by mtp_depth=0, none."""
    saved = head_paths(paths(source.shapes()["params"]))
    return bool(saved) and not layout.shape.mtp_layers


def head_paths(variables: dict) -> set[str]:
    """The paths of a head for the second-next token."""
    return {path for path in variables if path.startswith(HEAD_PATH)}


@dataclasses.dataclass(frozen=True)
class NewHead:
    """A WeightSource in which some of a checkpoint's parameters are replaced by zeros of a new shape.

    A head of zeros gives all classes the same probability, and makes the first gradients of all
    other parameters zero.
    """

    source: WeightSource
    layout: Layout  # the new model's
    names: tuple[str, ...]  # paths of the head's parameters
    files = ()

    @property
    def path(self) -> pathlib.Path:
        return self.source.path

    @property
    def step(self) -> int:
        return self.source.step

    @property
    def metadata(self) -> dict[str, Any]:
        return self.source.metadata

    def shapes(self) -> Tree:
        shapes, model = self.source.shapes(), paths(self.layout.model.shapes["params"])
        params = paths(shapes["params"]) | {name: model[name] for name in self.names}
        return shapes | {"params": nested(params)}

    def read(self, abstract: Tree) -> Tree:
        """Reads what `abstract` names, except for the head."""
        wanted = paths(abstract["params"])
        head = {name: leaf for name, leaf in wanted.items() if name in self.names}
        rest = {name: leaf for name, leaf in wanted.items() if name not in self.names}
        variables = self.source.read(abstract | {"params": nested(rest)})
        zeros = functools.partial(
            jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), head
        )
        made = jax.jit(zeros, out_shardings=shardings(head))()
        return variables | {"params": nested(paths(variables["params"]) | made)}

    def tokenizer(self) -> Tokenizer | None:
        return self.source.tokenizer()
