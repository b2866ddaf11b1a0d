"""Adapters (LoRA) on disk: with its base, one is a source of the merged model.

An adapter is a checkpoint like any other, whose parameters are its A and B alone, and whose metadata
has `base`, {"path", "sha256"}: where the model is that it was trained on, and what names its content.
The factors of a weight, layers/attention/q, are layers/attention/lora/q/a and …/b; the model's config
has lora_rank, lora_alpha and lora_targets.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from data import cache_dir
from data.tokenizer import Tokenizer
from recipes.common.checkpoint import integrity
from recipes.common.hf import Folder
from recipes.common.runtime import UserError
from recipes.common.sharding import Tree, paths
from recipes.common.sharding.abstract import nested, unadapted

FIELDS = ("lora_rank", "lora_alpha", "lora_targets")  # of a config


@dataclasses.dataclass(frozen=True)
class Adapted:
    """An adapter on its base: a Source of the merged model."""

    adapter: Any  # a Source of the factors: a Checkpoint, or a PEFT folder
    base: Any  # a Source
    where: str  # the base is, as --base takes it

    @property
    def path(self) -> pathlib.Path:
        return self.adapter.path

    @property
    def step(self) -> int:
        return self.adapter.step

    @property
    def metadata(self) -> dict[str, Any]:
        """The adapter's; its `config` is that of the merged model, its `base` where that is now."""
        config = {k: v for k, v in self.adapter.metadata["config"].items() if k not in FIELDS}
        base, named = self.base.metadata, self.adapter.metadata["base"] | {"path": self.where}
        context = base.get("context") or base.get("flags", {}).get("seq_len")  # not the adapter's
        facts = {"config": config, "base": named, "context": context}
        return self.adapter.metadata | facts

    def shapes(self) -> Tree:
        return self.base.shapes()

    def tokenizer(self) -> Tokenizer | None:
        return self.adapter.tokenizer() or self.base.tokenizer()

    def read(self, abstract: Tree) -> Tree:
        """Merged parameters, W + A·B·scale, one after another.

        Where `abstract` has "base", those are the base's, and "params" the adapter's.
        """
        others = {kind: tree for kind, tree in abstract.items() if kind not in ("params", "base")}
        params = self.base.read({"params": unadapted(abstract)["params"]})["params"]
        if "base" in abstract:
            own = self.adapter.read(others | {"params": abstract["params"]})
            return own | {"base": params}
        config, shapes = self.adapter.metadata["config"], paths(self.adapter.shapes()["params"])
        merged = paths(params)
        for path, names in factors(shapes).items():
            if path in merged:
                where = NamedSharding(merged[path].sharding.mesh, PartitionSpec())
                wanted = {name: jax.ShapeDtypeStruct(shapes[name].shape, jnp.float32, sharding=where)
                          for name in names}  # fmt: skip
                read = paths(self.adapter.read({"params": nested(wanted)})["params"])
                scale = config["lora_alpha"] / config["lora_rank"]
                merged[path] = merge(merged[path], *(read[name] for name in names), scale)
        return {"params": nested(merged)} | (self.adapter.read(others) if others else {})

    def check(self) -> None:
        """Raises UserError if it is the adapter of a model of another shape."""
        ours, theirs = paths(self.adapter.shapes()["params"]), paths(self.base.shapes()["params"])
        for path, names in factors(ours).items():
            a, b = (tuple(ours[name].shape) for name in names)
            found = tuple(theirs[path].shape) if path in theirs else ()
            stacked = len(a) + len(b) - 2 - len(found)
            if stacked < 0 or a[:-1] + b[stacked + 1 :] != found:
                raise UserError(
                    f"{self.path} adapts {path} by {list(a)} · {list(b)}, and its base {self.where} "
                    f"has {list(found) or 'none'} there; use --base=PATH of the model that it was "
                    "trained on"
                )

    def check_config(self, config: Any) -> None:
        """Raises UserError if a model with this config can't train the adapter on."""
        for name in FIELDS:
            both = (self.adapter.metadata["config"][name], getattr(config, name))
            was, now = (",".join(x) if isinstance(x, (list, tuple)) else x for x in both)
            if was != now:
                raise UserError(
                    f"--{name}={now} must be that of the adapter {self.path}, {was}, to train it on; "
                    "use that, or begin a new adapter on a merged model (recipes.hf export, or "
                    "recipes.publish)"
                )


def factors(names) -> dict[str, tuple[str, str]]:
    """Path of a weight → paths of its factors A and B, from the paths of all factors."""
    found = {}
    for a in names:
        module, _, rest = a.rpartition("/lora/")
        if rest.endswith("/a"):
            found[f"{module}/{rest.removesuffix('/a')}"] = (a, f"{a.removesuffix('a')}b")
    return found


def merge(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """Weight + a·b·scale, sharded as the weight is, whose memory is used again.

    Args:
      a: [stacked dims…, dims of the input…, rank]; b: [stacked…, rank, dims of the output…];
        weight: [stacked…, input…, output…].
    """
    product = functools.partial(jnp.tensordot, axes=1, precision="highest")
    for _ in range(a.ndim + b.ndim - 2 - weight.ndim):
        product = jax.vmap(product)
    delta = jax.jit(lambda a, b: product(a, b) * scale, out_shardings=weight.sharding)(a, b)
    # The sum is float32's, rounded once to what the weight was read as.
    add = jax.jit(lambda w, delta: (w + delta).astype(w.dtype), donate_argnums=0)
    return add(weight, delta)


# ---- its base ------------------------------------------------------------------------------------


def named(source: Any, given: str) -> dict[str, str]:
    """What the metadata of an adapter that is trained on this source says of its base.

    Args:
      given: what `find` took.
    """
    if isinstance(source, Adapted):
        source, given = source.base, source.where
    return {"path": located(source, given), "sha256": sha256(source)}


def located(source: Any, given: str) -> str:
    """`given`, as it is found from any folder: names stay, paths become absolute."""
    prefix, path = ("hf:", given[3:]) if given.startswith("hf:") else ("", given)
    return f"{prefix}{source.path}" if pathlib.Path(path).expanduser().exists() else given


def sha256(source: Any) -> str:
    """Names the content of a checkpoint, by its hashes.json, or of a model folder, by its files."""
    if not isinstance(source, Folder):
        hashes = source.path / integrity.HASHES
        if hashes.exists():
            return hashlib.sha256(hashes.read_bytes()).hexdigest()
        every = integrity.hashes_of(source.path, integrity.files_of(source.path))  # an old one
        return hashlib.sha256(json.dumps(every).encode()).hexdigest()
    # Every byte is read, once: it is remembered by the files' sizes and times.
    stats = [(str(file.resolve()), file.stat()) for file in source.files]
    listing = [[name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for name, s in stats]
    key = hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16]
    remembered = cache_dir() / "models" / f"{key}.sha256"
    if remembered.exists():
        return remembered.read_text()
    every = integrity.hashes_of(source.path, [file.name for file in source.files])
    digest = hashlib.sha256(json.dumps(every).encode()).hexdigest()
    with contextlib.suppress(OSError):  # a cache that can't be written costs time alone
        remembered.parent.mkdir(parents=True, exist_ok=True)
        beside = remembered.with_suffix(f".{os.getpid()}")
        beside.write_text(digest)
        beside.rename(remembered)
    return digest
