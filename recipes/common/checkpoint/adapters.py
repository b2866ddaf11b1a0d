"""Adapters (LoRA) on disk: joined with its base, an adapter is a source of the merged model.

An adapter is a checkpoint whose only parameters are its A and B matrices, and those that are trained
with them (a ViT's head). Its metadata has `base`, {"path", "sha256"}: location and content of the
model that it was trained on. The factors of the weight layers/attention/q are
layers/attention/lora/q/a and …/b; the model's config has lora_rank, lora_alpha and lora_targets.
"""

import contextlib
import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from data import DataError
from data.tokenizer import Tokenizer, from_files
from recipes.common.checkpoint import integrity
from recipes.common.runtime import UserError
from recipes.common.sharding import Tree, paths
from recipes.common.sharding.abstract import nested

FIELDS = ("lora_rank", "lora_alpha", "lora_targets")  # in the model's config


@dataclasses.dataclass(frozen=True)
class Adapted:
    """An adapter joined with its base: a WeightSource of the merged model."""

    adapter: Any  # WeightSource of the factors: a Checkpoint or a PEFT folder
    base: Any  # WeightSource
    where: str  # location of the base, in the form that --base takes
    files = ()

    @property
    def path(self) -> pathlib.Path:
        return self.adapter.path

    @property
    def step(self) -> int:
        return self.adapter.step

    @property
    def metadata(self) -> dict[str, Any]:
        """The adapter's metadata, with the merged model's config and the base's current path.

        The merged model's config has no lora_alpha; a card names it.
        """
        config = {k: v for k, v in self.adapter.metadata["config"].items() if k not in FIELDS}
        alpha = {"lora_alpha": self.adapter.metadata["config"]["lora_alpha"]}
        base, located = self.base.metadata, self.adapter.metadata["base"] | {"path": self.where}
        context = base.get("context") or base.get("flags", {}).get("seq_len")  # not the adapter's
        facts = {"config": config, "base": located, "context": context}
        facts |= {"architecture": base.get("architecture"), "sentences": base.get("sentences")}
        return self.adapter.metadata | alpha | facts

    def shapes(self) -> Tree:
        shapes, adapter = self.base.shapes(), paths(self.adapter.shapes()["params"])
        head = {path: leaf for path, leaf in adapter.items() if "/lora/" not in path}
        return shapes | {"params": nested(paths(shapes["params"]) | head)}

    def tokenizer(self) -> Tokenizer | None:
        """The adapter's tokenizer, completed by the base's files (end-of-text tokens, for example)."""
        own = self.adapter.tokenizer()
        if own is None:
            return self.base.tokenizer()
        with contextlib.suppress(DataError):
            base = self.base.tokenizer()
            if own.files and base and own.sha256 == base.sha256:
                return from_files(base.files | own.files, own.name)
        return own

    def read(self, abstract: Tree) -> Tree:
        """Reads merged parameters, W + A·B·scale, adding in float32, one at a time.

        If `abstract` has "base", nothing is merged: "base" gets the base's parameters, and "params"
        the adapter's.
        """
        abstract, variables = dict(abstract), {}
        if "buffers" in abstract and "buffers" not in self.adapter.shapes():  # PEFT has none
            variables = self.base.read({"buffers": abstract.pop("buffers")})
        wanted, shapes = paths(abstract.pop("params", {})), paths(self.adapter.shapes()["params"])
        kept = abstract.pop("base", None)
        pairs = factors(shapes) if kept is None else {}
        pairs = {path: names for path, names in pairs.items() if path in wanted}
        own = {path: leaf for path, leaf in wanted.items() if path in shapes}
        rest = {path: leaf for path, leaf in wanted.items() if path not in {*own, *pairs}}
        abstract |= {"params": nested(own)} if own else {}
        variables |= self.adapter.read(abstract) if abstract else {}
        params = paths(variables.pop("params", {}))
        params |= paths(self.base.read({"params": nested(rest)})["params"]) if rest else {}
        if kept is not None:
            variables["base"] = self.base.read({"params": kept})["params"]
        for path, names in pairs.items():
            params[path] = self._merged(path, wanted[path], {name: shapes[name] for name in names})
        return {"params": nested(params)} | variables

    def _merged(self, path: str, leaf: jax.ShapeDtypeStruct, pair: dict[str, Any]) -> jax.Array:
        everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec())
        small = {
            name: jax.ShapeDtypeStruct(stored.shape, jnp.float32, sharding=everywhere)
            for name, stored in pair.items()
        }
        weight = self.base.read({"params": nested({path: leaf.update(dtype=jnp.float32)})})
        read = paths(self.adapter.read({"params": nested(small)})["params"])
        config = self.adapter.metadata["config"]
        scale = config["lora_alpha"] / config["lora_rank"]
        a, b = (read[name] for name in pair)
        return merge(paths(weight["params"])[path], a, b, scale).astype(leaf.dtype)

    def check(self) -> None:
        """Raises UserError if the adapter and its base have different shapes."""
        adapter = paths(self.adapter.shapes()["params"])
        base = paths(self.base.shapes()["params"])
        for path, names in factors(adapter).items():
            a, b = (tuple(adapter[name].shape) for name in names)
            weight = tuple(base[path].shape) if path in base else ()
            stacked = len(a) + len(b) - 2 - len(weight)
            if stacked < 0 or a[:-1] + b[stacked + 1 :] != weight:
                raise UserError(
                    f"{self.path} adapts {path} by {list(a)} · {list(b)}, and its base {self.where} "
                    f"has {list(weight) or 'none'} there; use --base=PATH of the model that it was "
                    "trained on"
                )

    def check_config(self, config: Any) -> None:
        """Raises UserError if a model with this config can't continue training the adapter."""
        for name in FIELDS:
            both = (self.adapter.metadata["config"][name], getattr(config, name))
            was, now = (",".join(x) if isinstance(x, (list, tuple)) else x for x in both)
            if was != now:
                raise UserError(
                    f"--{name}={now} must match the adapter {self.path}, {was}, to continue training "
                    "it; use that, or start a new adapter on a merged model (recipes.hf export, or "
                    "recipes.publish)"
                )


def factors(names) -> dict[str, tuple[str, str]]:
    """Path of each adapted weight → paths of its factors A and B, from the paths of all factors."""
    pairs = {}
    for a in names:
        module, _, rest = a.rpartition("/lora/")
        if rest.endswith("/a"):
            pairs[f"{module}/{rest.removesuffix('/a')}"] = (a, f"{a.removesuffix('a')}b")
    return pairs


def merge(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """Returns weight + a·b·scale in float32, sharded like the weight, which is donated.

    Args:
      weight: [stacked dims…, input dims…, output dims…].
      a: [stacked dims…, input dims…, rank].
      b: [stacked dims…, rank, output dims…].
    """
    product = functools.partial(jnp.tensordot, axes=1, precision="highest")
    for _ in range(a.ndim + b.ndim - 2 - weight.ndim):
        product = jax.vmap(product)
    delta = jax.jit(lambda a, b: product(a, b) * scale, out_shardings=weight.sharding)(a, b)
    return jax.jit(jnp.add, donate_argnums=0)(weight, delta)


# ---- base ----------------------------------------------------------------------------------------


def describe_base(source: Any, name: str) -> dict[str, str]:
    """metadata["base"] of an adapter trained on `source`; another adapter's base is kept.

    Args:
      name: the path under which `source` was found.
    """
    if isinstance(source, Adapted):
        source, name = source.base, source.where
    return {"path": portable_path(source, name), "sha256": content_sha256(source)}


def portable_path(source: Any, name: str) -> str:
    """`name` in a form that works from any folder: paths become absolute, names stay."""
    prefix, path = ("hf:", name[3:]) if name.startswith("hf:") else ("", name)
    return f"{prefix}{source.path}" if pathlib.Path(path).expanduser().exists() else name


def content_sha256(source: Any) -> str:
    """See integrity.content_sha256."""
    return integrity.content_sha256(source.path, source.files)
