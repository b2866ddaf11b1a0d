"""A user's own model, its loss, rules and batch, with or without the zoo's kit.

A user's file is named as "file.py:name". It is imported as the module that the current folder makes
of its path, so its own imports work.
"""

import ast
import dataclasses
import difflib
import importlib
import inspect
import operator
import pathlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.dtypes import canonicalize_dtype

from recipes.common.runtime import UserError, flag
from recipes.common.sharding import AbstractModel, abstract_model
from recipes.common.sharding.abstract import AXES, UNNAMED, declared_names
from recipes.common.sharding.rules import Rules
from recipes.common.train.feed import check_ids
from zoo.core.sharding import check_names, optimizer_axis

SEQ_LEN = 32  # positions of a row that is made from the signature
ROWS = 24  # of a batch that is made from the signature


@dataclasses.dataclass(frozen=True)
class ModelFlags:
    """Flags that name a user's own model."""

    model: str = flag("", "FILE.py:NAME of your own nnx.Module.", group="model")
    config: str = flag(
        "", "Size of your model, a classmethod of the class Config in its file; empty: it is built from "
        "rngs alone.", group="model",
    )  # fmt: skip
    rules: str = flag(
        "", "FILE.py:NAME of your model's sharding rules, a table or a dict of tables; empty: RULES in its "
        "file.", group="model",
    )  # fmt: skip
    loss: str = flag(
        "", "FILE.py:NAME of your model's loss, a function of the model and the batch's arrays; empty: its "
        "method.", group="model",
    )  # fmt: skip
    batch: str = flag(
        "", "FILE.py:NAME of a function that returns a batch, a dict of arrays; empty: random tokens, for "
        "language models.", group="data",
    )  # fmt: skip

    def parts(self) -> "ModelFiles":
        """What the flags name. Raises UserError."""
        file, _, _ = self.model.rpartition(":")
        return ModelFiles(
            build=builder(load_function(self.model, "--model"), self.config),
            loss=load_function(self.loss, "--loss") if self.loss else None,
            rules=load(self.rules or f"{file}:RULES", "--rules"),
            batch=load_batch(self.batch) if self.batch else None,
        )


class ModelFiles(NamedTuple):
    """The arguments of `make_user_model`, as a user names them."""

    build: Callable[[], nnx.Module]
    loss: Callable | None
    rules: Any
    batch: Any


@dataclasses.dataclass(frozen=True)
class UserModel:
    """A model, as a user names it."""

    build: Callable[[], nnx.Module]
    loss: Callable[..., Any]  # (model, **batch) → (sum, count, {name: (sum, count)})
    rules: dict[str, Rules]  # strategy → table
    batch: dict[str, Any]  # name → numpy array, rows first
    optimizer: Any = None  # of the steps of a proof


# ---- a user's files ------------------------------------------------------------------------------


def load(named: str, flag: str) -> Any:
    """The object that "file.py:name" names. Raises UserError."""
    file, _, name = named.rpartition(":")
    path = pathlib.Path(file).expanduser().absolute()
    if not file.endswith(".py") or not name.isidentifier():
        raise UserError(f"{flag}={named} is not FILE.py:NAME; try {flag}=model.py:MyModel")
    if not path.is_file():
        raise UserError(f"{flag}={named}: there is no file {file}; fix the path")
    module = import_file(path, f"{flag}={named}")
    if name not in vars(module):
        names = defined_in(path) or [key for key in vars(module) if not key.startswith("_")]
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.8) or names
        raise UserError(f"{flag}={named}: {file} has no {name!r}; it has {', '.join(near)}")
    return vars(module)[name]


def defined_in(path: pathlib.Path) -> list[str]:
    """The public names that a file defines itself, in order: imports are others'."""
    names = []
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.ClassDef() | ast.FunctionDef():
                names.append(node.name)
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names += [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]


def load_function(named: str, flag: str) -> Callable:
    """The function or class that "file.py:name" names. Raises UserError."""
    function = load(named, flag)
    if not callable(function):
        kind = type(function).__name__
        raise UserError(f"{flag}={named} is of type {kind}; name a function or a class")
    return function


def load_batch(named: str) -> Any:
    """What the function that --batch names returns. Raises UserError."""
    function = load_function(named, "--batch")
    try:
        return function()
    except Exception as error:  # whatever the user's code raises
        raise UserError(f"--batch={named} failed ({reason(error)}); fix the function") from error


def reason(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def import_file(path: pathlib.Path, named: str) -> types.ModuleType:
    """Imports a file: by its path from the current folder if it is below, else by its own folder."""
    root = pathlib.Path.cwd() if path.is_relative_to(pathlib.Path.cwd()) else path.parent
    if path.parent == root and re.search(r"^\s*from \.", path.read_text(), re.MULTILINE):
        root = root.parent  # its folder is the package
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    for folder in (str(path.parent), str(root)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise UserError(f"{named} can't be imported ({reason(error)}); fix the file") from error
    if pathlib.Path(module.__file__ or "").resolve() != path.resolve():
        raise UserError(f"{named}: another module is called {name!r}; rename the file")
    return module


def builder(model: Callable, config_name: str) -> Callable[[], nnx.Module]:
    """A function that builds `model(config, rngs=…)`, or `model(rngs=…)` without a config's name.

    Args:
      config_name: a classmethod of `Config` in the model's file, such as tiny.

    Raises UserError.
    """
    if not config_name:
        return lambda: model(rngs=nnx.Rngs(0))
    file = sys.modules[model.__module__]
    if "Config" not in vars(file):
        raise UserError(f"--config={config_name}: {file.__file__} has no class Config; add one")
    sizes = [name for name, x in vars(file.Config).items() if isinstance(x, classmethod)]
    if config_name not in sizes:
        raise UserError(f"--config={config_name} is not one of {', '.join(sizes)}")
    make_config = operator.methodcaller(config_name)
    return lambda: model(make_config(file.Config), rngs=nnx.Rngs(0))


def text_batch(model: nnx.Module, loss: Callable) -> dict[str, Any]:
    """Random tokens for a language model, whose loss takes `tokens` and `targets`.

    Rows have different numbers of targets, so that a mean over a shard is not one over the whole.
    Raises UserError if it is another model.
    """
    needed = [
        name
        for name, parameter in inspect.signature(loss).parameters.items()
        if parameter.default is inspect.Parameter.empty and name not in ("self", "model")
    ]
    config: Any = vars(model).get("config")
    if needed != ["tokens", "targets"] or "vocab_size" not in dir(config):
        raise UserError(
            f"the loss takes {', '.join(needed)}, and only a batch of tokens and targets can be made; "
            "write a function that returns a dict of arrays, and use --batch=FILE.py:FUNCTION"
        )
    random = np.random.default_rng(0)
    window_BT = random.integers(0, config.vocab_size, (ROWS, SEQ_LEN + 1), np.int32)
    lengths_B1 = random.integers(SEQ_LEN // 4, SEQ_LEN + 1, (ROWS, 1))
    is_padding_BT = np.arange(SEQ_LEN)[None] >= lengths_B1
    targets_BT = np.where(is_padding_BT, -1, window_BT[:, 1:]).astype(np.int32)
    return {"tokens": window_BT[:, :-1], "targets": targets_BT}


# ---- its parts -----------------------------------------------------------------------------------


def make_user_model(
    build: Callable[[], nnx.Module],
    loss: Callable | None,
    rules: dict,
    batch: dict[str, Any] | None,
    optimizer: optax.GradientTransformation | None = None,
) -> UserModel:
    """Checks that the parts fit each other on one device. Raises UserError.

    Args:
      build: makes the model. Its variables have logical axes in `out_sharding`; those without any
        are replicated.
      loss: (model, **batch) → a mean, or (sum, count, {name: (sum, count)}); None: the model's.
      rules: strategy → table, or one table.
      batch: name → array with the rows first; None: tokens for a language model.
    """
    named = _named_tables(rules)
    build_named = _with_names(build)
    try:
        model: Any = nnx.eval_shape(build_named)
    except UserError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise UserError(
            f"the model can't be built ({reason(error)}); fix it or its config"
        ) from error
    if not any(isinstance(x, nnx.Variable) for _, x in nnx.iter_graph(model)):
        raise UserError(
            f"{type(model).__name__} has no variables, so there is nothing to train; give it an nnx.Param"
        )
    if loss is None and "loss" not in dir(model):
        raise UserError(f"{type(model).__name__} has no method loss; use --loss=FILE.py:FUNCTION")
    compute_loss = loss or (lambda model, **batch: model.loss(**batch))
    batch = text_batch(model, loss or model.loss) if batch is None else batch
    config: Any = vars(model).get("config")
    if "vocab_size" in dir(config):
        check_ids(batch, config.vocab_size)
    batch = _arrays(batch)
    signature = inspect.signature(loss or model.loss)
    try:
        signature.bind(*([model] if loss else []), **batch)
    except TypeError as error:
        raise UserError(
            f"the loss can't be called with the batch's {', '.join(batch)} ({error}); name the arrays "
            f"like its parameters, {signature}"
        ) from None
    return UserModel(build_named, with_sums(compute_loss), named, batch, optimizer)


def _named_tables(rules: Any) -> dict[str, Rules]:
    """Strategy → table; one table is called "rules". Raises UserError if it isn't a table."""
    if not isinstance(rules, dict) or not rules:
        raise UserError(
            "the rules are not a dict; write {'batch': 'data'}, or one for each strategy"
        )
    named = rules if all(isinstance(x, dict) for x in rules.values()) else {"rules": rules}
    for strategy, table in named.items():
        for axis, target in table.items() if isinstance(table, dict) else [("", table)]:
            names = target if isinstance(target, tuple) else (target,)
            if not all(name is None or isinstance(name, str) for name in names):
                raise UserError(
                    f"rules {strategy!r} map {axis!r} to {target!r}; use the name of a mesh axis, a "
                    "tuple of names, or None"
                )
    return named


def _with_names(build: Callable[[], nnx.Module]) -> Callable[[], nnx.Module]:
    """Builds the model with a logical axis for each dim of its variables, UNNAMED if it has none."""

    def build_named() -> nnx.Module:
        with nnx.use_eager_sharding(False):
            model = build()
        if not isinstance(model, nnx.Module):
            raise UserError(f"the model is of type {type(model).__name__}; use an nnx.Module")
        for _, variable in nnx.iter_graph(model):
            if isinstance(variable, nnx.Variable):
                unnamed = (None,) * len(jnp.shape(variable.get_value()))
                axes = variable.get_metadata().get("out_sharding") or unnamed
                # Not in out_sharding: the model's own nnx.scan takes names off that it has put on.
                variable.set_metadata(**{AXES: tuple(axis or UNNAMED for axis in axes)})
        return model

    return build_named


def _arrays(batch: Any) -> dict[str, Any]:
    """The batch in dtypes that JAX has. Raises UserError unless all arrays have as many rows."""
    if not isinstance(batch, dict):
        raise UserError(
            "the batch is not a dict; return {name: array}, with the loss's parameters as names"
        )
    arrays = {name: np.asarray(x) for name, x in batch.items()}
    rows = {name: x.shape[:1] for name, x in arrays.items()}
    if len({*rows.values()}) != 1 or () in rows.values():
        listed = ", ".join(f"{name} {list(x.shape)}" for name, x in arrays.items())
        raise UserError(f"the batch's arrays have different numbers of rows ({listed}); use one")
    return {name: x.astype(canonicalize_dtype(x.dtype)) for name, x in arrays.items()}


def with_sums(loss: Callable) -> Callable:
    """A loss that returns (sum, count, aux), as the zoo's do; a mean counts once.

    It raises UserError if `loss` returns something else.
    """

    def sums(model: nnx.Module, **batch):
        match loss(model, **batch):
            case (total, count, dict() as aux) if all(map(is_pair, aux.values())):
                return total, count, aux
            case jax.Array() | float() | np.floating() as mean:
                one = jnp.ones_like(mean)
                return jnp.asarray(mean), one, {"loss": (mean, one)}
            case other:
                raise UserError(
                    f"the loss returns {in_words(other)}; return a mean, or a sum, a count and a "
                    "dict of metrics, {name: (sum, count)}, with 'loss' among them"
                )

    return sums


def is_pair(metric: Any) -> bool:
    return isinstance(metric, tuple | list) and len(metric) == 2


def in_words(result: Any) -> str:
    """What a loss returns, for a message."""

    def kind(x: Any) -> str:
        return "array" if isinstance(x, jax.Array) else type(x).__name__

    items = f" ({', '.join(map(kind, result))})" if isinstance(result, tuple | list) else ""
    return f"a {kind(result)}{items}"


def with_rules(user_model: UserModel) -> tuple[AbstractModel, dict[str, Rules]]:
    """The traced model and its rules, completed. Raises UserError if they name unknown axes.

    A model that does not declare its axes has those of its variables and of its constraints.
    """
    model = abstract_model(user_model.build)._replace(loss=user_model.loss)
    known = model.names.logical_axes
    if declared_names(nnx.eval_shape(user_model.build)) is None:
        others = {axis for table in user_model.rules.values() for axis in table} - {*known}
        others -= {optimizer_axis(axis) for axis in known}
        for axis in sorted(others):
            if not constrains(user_model, axis):
                weights = sorted({*known} - {"batch"})
                near = difflib.get_close_matches(axis, weights, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(weights)}"
                raise UserError(f"the model has no logical axis {axis!r}, which rules name; {hint}")
        known = known | dict.fromkeys(sorted(others), "weights")
        model = model._replace(names=dataclasses.replace(model.names, logical_axes=known))
    for strategy, table in user_model.rules.items():
        try:
            check_names(table, known)
        except ValueError as error:
            raise UserError(f"rules {strategy!r}: {error}") from None
    return model, {name: dict.fromkeys(known) | table for name, table in user_model.rules.items()}


def constrains(user_model: UserModel, axis: str) -> bool:
    """Whether the loss depends on the rule of a logical axis that no variable has."""
    axes = {axis for table in user_model.rules.values() for axis in table}
    mesh = jax.sharding.AbstractMesh((1,), ("any",))

    def traced(target: str | None) -> str:
        rules = dict.fromkeys(axes) | {axis: target}
        with jax.sharding.use_abstract_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
            # A new function: JAX's cache ignores the rules.
            jaxpr = jax.make_jaxpr(
                lambda: user_model.loss(user_model.build(), **user_model.batch)
            )()
        return re.sub("0x[0-9a-f]+", "", str(jaxpr))

    try:
        return traced("any") != traced(None)
    except (TypeError, ValueError, KeyError):  # it constrains something that can't be split so
        return True
