"""Flags made from the fields of a model's Config, and --set, which reaches its other fields.

A flag's help text is the comment of its field in the zoo file.
"""

import ast
import dataclasses
import functools
import inspect
import io
import json
import math
import pathlib
import re
import textwrap
import tokenize
import types
from collections.abc import Iterable
from typing import Any

from recipes.common import entries
from recipes.common.runtime import UserError, flag
from recipes.common.runtime.flags import choose, split
from zoo.core.config import bounds_of
from zoo.options.compute_options import ComputeOptions
from zoo.options.quantization import FLOAT8_DEVICES, has_float8
from zoo.options.weights import adaptable

DECODER = (  # fields of every decoder that have a flag
    *("dtype", "matmul", "matmul_backward", "reduce_dtype", "remat"),
    *("context", "pipeline", "pipe_rounds", "pipe_microbatches"),
    *("lora_rank", "lora_alpha", "lora_targets"),
)
EXPERTS = ("num_experts", "experts_per_token", "capacity", "balance_weight")
ENCODER = tuple(x for x in DECODER if x != "context" and not x.startswith("pipe"))

# Flags with a default that isn't their field's → (default, what it stands for).
DEFAULTS: dict[str, tuple[Any, str]] = {
    "dtype": ("", "empty: bfloat16 on accelerators, else float32"),
    "remat": ("", "empty: the size's default"),
    "lora_alpha": (0.0, "0: twice the rank"),
    "lora_targets": ("all", "all, or some of "),
}
FLAG_CHOICES = {"dtype": ("", "float32", "bfloat16"), "matmul": ("", "int8", "fp8")}
MOST_UNROLLED = 32  # layers that a GPU's program has one by one; more would compile for minutes
COMPUTE = {name for name in ComputeOptions.__dataclass_fields__ if not name.startswith("lora_")}


def _set_flag(fields: Iterable[str] = ()) -> Any:
    return flag(
        (), "FIELD=VALUE of the model's Config, for fields without a flag; may be repeated.", "model",
        may_change=True,  # but see changed_setting
        fields=fields,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flag of every command that makes or loads a Config."""

    set: tuple[str, ...] = _set_flag()


def model_flags(
    config: type, fields: Iterable[str], sizes: Iterable[str] = (), remat: Iterable[str] = ()
) -> Any:
    """Flags of a model: an instance of a new dataclass, with --set and a flag for each of `fields`.

    Args:
      sizes: names of SIZES; adds --size. Empty: the recipe has no such flag.
      remat: values of --remat.
    """
    flags: dict[str, Any] = {"set": _set_flag(field.name for field in dataclasses.fields(config))}
    if sizes:
        flags["size"] = flag(
            "", "Size of the model; empty: small, or that of the checkpoint.", "model",
            choices=["", *sizes],
        )  # fmt: skip
    flags |= {name: field_flag(config, name, remat) for name in fields}
    if "matmul" in flags:
        flags["matmul_emulate"] = flag(
            False, "Allow --matmul=fp8 on devices without float8 matmuls, at no gain in speed.",
            "model", may_change=True,
        )  # fmt: skip
    if "lora_rank" in flags:
        flags["base"] = flag(
            "", "Base model of the adapter, if it has moved.", "checkpoints", may_change=True
        )
    typed = [(name, type(field.default), field) for name, field in flags.items()]
    return dataclasses.make_dataclass("ModelFlags", typed, bases=(Settings,), frozen=True)()


def field_flag(config: type, name: str, remat: Iterable[str] = ()) -> Any:
    """The flag of a Config's field."""
    default, least = config.__dataclass_fields__[name].default, 0
    choices = bounds_of(config, name).choices if name in COMPUTE else ()
    help = comment(config, name)
    if name in DEFAULTS:
        default, meaning = DEFAULTS[name]
        help += f"; {meaning}{named_targets(config) if name == 'lora_targets' else ''}"
    elif name not in COMPUTE and name != "lora_rank":
        default = least = _unset(config, name)
        unset = "empty" if default == "" else f"{default:g}"
        help += f"; {unset}: as in the size or the checkpoint"
    return flag(
        default, f"{help}.", "model", at_least=None if isinstance(default, str) else least,
        choices=(FLAG_CHOICES | {"remat": ("", *remat)}).get(name, choices), may_change=name in COMPUTE,
    )  # fmt: skip


def _unset(config: type, name: str) -> Any:
    """The default of a flag that leaves its field as it is: no value of the field."""
    kind = config.__dataclass_fields__[name].type
    if kind is int:
        return 0 if _least(config, name) else -1
    return -1.0 if kind is float else ""


def _least(config: type, name: str) -> int:
    """The least value of a field that is a number."""
    if config.__dataclass_fields__[name].type is float:
        return 0
    bounds = bounds_of(config, name)
    return 0 if bounds.least == 0 or 0 in bounds.choices else 1


def comment(config: type, name: str) -> str:
    """The comment of a Config's field, as a phrase.

    A field without one is explained in moe.Config or transformer.Config, as the docstrings say.
    """
    for source in (*config.__mro__[:-1], ComputeOptions):
        if text := _comments(source).get(name):
            return text
    explained = (_comments(entries.zoo_file(entry).Config) for entry in ("moe", "transformer"))
    return next(texts[name] for texts in explained if texts.get(name))


@functools.cache
def _comments(config: type) -> dict[str, str]:
    """Field → its comment in the source, without the letter of a dim; "" if it has none."""
    source = textwrap.dedent(inspect.getsource(config))
    above: dict[int, str] = {}  # lines that are only a comment
    trailing: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines = above if token.line.lstrip().startswith("#") else trailing
            lines[token.start[0]] = token.string.lstrip("# ")
    texts = {}
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while first - 1 in above:
                first -= 1
            text = trailing.get(node.end_lineno or node.lineno)
            text = text or " ".join(above[line] for line in range(first, node.lineno))
            text = re.sub(r"^[A-Z](, |$)", "", text).replace('""', "empty").replace('"', "")
            texts[node.target.id] = text[:1].upper() + text[1:].rstrip(".")
    return texts


# ---- from flags to a Config ----------------------------------------------------------------------


def configure(config: Any, flags: Any, device: Any) -> Any:
    """`config`, changed by the flags of `model_flags`. Raises UserError if the result is invalid.

    Args:
      device: one of the mesh's; decides the default of --dtype and which matmuls there are.
    """
    changes = _set_flags(config, flags)
    if "dtype" in vars(flags):
        changes["dtype"] = flags.dtype or default_dtype(device)
        _check_matmul_flags(flags, device)
    if "lora_rank" in vars(flags):
        changes |= lora_fields(flags, type(config))
    changes |= read_set(type(config), flags.set, vars(flags))
    changed = replace(config, changes)
    if "unroll" in type(config).__dataclass_fields__.keys() - changes.keys():
        changed = dataclasses.replace(changed, unroll=default_unroll(changed, device))
    return changed


def _check_matmul_flags(flags: Any, device: Any) -> None:
    for name in ("matmul_backward", "matmul_emulate"):
        if (value := getattr(flags, name)) and not flags.matmul:
            raise UserError(
                f"--{name}={value} is for low-precision matmuls, and --matmul is empty; add "
                "--matmul=int8 or --matmul=fp8"
            )
    check_matmul(flags.matmul, device, emulate=flags.matmul_emulate)


def check_matmul(matmul: str, device: Any, emulate: bool | None = None) -> None:
    """Raises UserError if a device lacks the matmuls of --matmul.

    Args:
      device: one of the mesh's, with its platform and device_kind.
      emulate: --matmul_emulate; None: the command has no such flag.
    """
    lacks = device.platform != "cpu" and not has_float8(device.device_kind)
    if matmul == "fp8" and lacks and not emulate:
        hint = ", or add --matmul_emulate, which rounds alike but is not faster"
        raise UserError(
            f"--matmul=fp8 needs float8 matmuls, which {device.device_kind} lacks and "
            f"{', '.join(FLOAT8_DEVICES)} have; use --matmul=int8{'' if emulate is None else hint}"
        )


def default_dtype(device: Any) -> str:
    """The dtype of activations and matmuls on a mesh's devices."""
    return "float32" if device.platform == "cpu" else "bfloat16"


def default_unroll(config: Any, device: Any) -> int:
    """Layers per iteration of the compiled loop.

    GPUs are faster with all layers unrolled (recipes/instruments/results): a loop stacks what layers
    save, and copies it. Unrolled, XLA would merge recomputed operations with the first ones, so models
    with remat keep the loop, as do deep ones, which would take minutes to compile.
    """
    unrolls = device.platform == "gpu" and config.remat == "none" and config.unroll == 1
    return config.num_layers if unrolls and config.num_layers <= MOST_UNROLLED else config.unroll


def _set_flags(config: Any, flags: Any) -> dict[str, Any]:
    """The fields that flags change; an unset flag leaves its field as it is."""
    changes = {}
    for name in vars(flags).keys() & type(config).__dataclass_fields__.keys() - DEFAULTS.keys():
        value = getattr(flags, name)
        if name in COMPUTE or value != _unset(type(config), name):
            changes[name] = value if name in COMPUTE else read(type(config), name, str(value))
    if vars(flags).get("remat"):
        changes["remat"] = flags.remat
    return changes


def named_targets(config: type) -> str:
    """The weights that --lora_targets may name; `all` means the first of them."""
    others = [name for name in adaptable(config) if name not in config.lora_targets]
    also = f" and, which all leaves out, {','.join(others)}" if others else ""
    return f"{','.join(config.lora_targets)}{also}"


def lora_fields(flags: Any, config: type) -> dict[str, Any]:
    """Config's LoRA fields. Raises UserError if the flags don't fit together."""
    if not flags.lora_rank:
        for name in ("lora_alpha", "lora_targets"):
            if (value := getattr(flags, name)) != DEFAULTS[name][0]:
                raise UserError(
                    f"--{name}={value} is for adapters, and --lora_rank=0 trains none; add, for "
                    "example, --lora_rank=8"
                )
        return {"lora_rank": 0}
    targets = adaptable(config)
    wanted = config.lora_targets if flags.lora_targets == "all" else split(flags.lora_targets)
    for name in wanted:
        if name not in targets:
            raise UserError(
                f"--lora_targets={flags.lora_targets} has {name!r}; use all, or some of "
                f"{','.join(targets)}"
            )
    return {
        "lora_rank": flags.lora_rank,
        "lora_alpha": flags.lora_alpha or 2.0 * flags.lora_rank,
        "lora_targets": tuple(name for name in targets if name in wanted),
    }


def replace(config: Any, changes: dict[str, Any]) -> Any:
    """dataclasses.replace for changes by a user. Raises UserError if the result is invalid."""
    try:
        return dataclasses.replace(config, **changes)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UserError(f"{error}; use other flags of the model") from None


# ---- --set ---------------------------------------------------------------------------------------


def read_set(config: type, texts: Iterable[str], flags: Iterable[str]) -> dict[str, Any]:
    """The fields that --set changes, and their values. Raises UserError.

    Args:
      texts: the flag's values.
      flags: names of the command's other flags.
    """
    values = {}
    names = [field.name for field in dataclasses.fields(config)]  # without class variables
    for text in texts:
        name, value = _split(text)
        name = choose("set", name, names)
        if name in flags:
            raise UserError(f"--set={text} is for fields without a flag; use --{text}")
        values[name] = read(config, name, value)
    return values


def _split(text: str) -> tuple[str, str]:
    """(field, its value as text). Raises UserError."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--set={text} has no value; write --set=FIELD=VALUE")
    return name, value


def read(config: type, name: str, text: str) -> Any:
    """The value of a Config's field that a text stands for. Raises UserError for another type."""
    kind = config.__dataclass_fields__[name].type
    kinds = [*kind.__args__] if isinstance(kind, types.UnionType) else [kind]
    optional = types.NoneType in kinds
    if optional and text.lower() == "none":
        return None
    reader, what = READERS.get(kinds[0], (_read_json, "JSON, such as [1, 2]"))
    try:
        value = reader(text)
    except UserError:
        raise
    except (ValueError, KeyError):
        what += ", or none" if optional else ""
        raise UserError(f"{name}={text[:50]} is not {what}; use a different value") from None
    if name == "layer_kinds":
        _check_layer_kinds(text, value)
    checks_itself = kinds[0] is float and issubclass(config, ComputeOptions)
    is_number = kinds[0] in (int, float)
    if is_number and not checks_itself and value < (least := _least(config, name)):
        raise UserError(f"{name}={value} must be ≥ {least}; use a different value")
    return value


def _check_layer_kinds(text: str, kinds: Any) -> None:
    """Raises UserError unless a value of layer_kinds has the form of some AttentionTypes."""

    def is_kind(kind: Any) -> bool:
        if not isinstance(kind, tuple) or len(kind) not in (2, 3):
            return False
        window, theta = kind[:2]
        is_number = isinstance(theta, (int, float)) and not isinstance(theta, bool)
        return (window is None or type(window) is int) and (theta is None or is_number)

    if not isinstance(kinds, tuple) or not all(map(is_kind, kinds)):
        raise UserError(
            f"layer_kinds={text[:50]} is not a list of [window, rope_theta] or [window, rope_theta, "
            "rope_scaling], with null for none; for example [[129, 10000], [null, 160000]]"
        )


def _read_number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value


def _read_json(text: str) -> Any:
    def tuples(value):
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    return tuples(json.loads(text, object_hook=_read_scaling))


def _read_scaling(keys: dict[str, Any]) -> Any:
    """A rotary scaling from rope_scaling of a config.json, the only JSON object that fields have."""
    from recipes.common.hf import family  # it needs safetensors, and benchmarks do without

    flag = "--set=rope_scaling"
    kinds = ("linear", "llama3", "yarn", "dynamic", "longrope")
    kind = keys.get("rope_type", keys.get("type"))
    if kind not in kinds:
        raise UserError(f"{flag} has rope_type {kind!r}; use one of {', '.join(kinds)}")
    context = "max_position_embeddings"
    known = {"rope_type", "type", "short_factor", "long_factor", context}
    known |= {*family.YARN, *family.LLAMA3}
    for name in keys.keys() - known:
        raise UserError(f"{flag} has {name!r}, which is not one of {', '.join(sorted(known))}")
    config_json = {"rope_scaling": keys, context: keys.get(context)}
    try:
        _, scaling = family.ConfigFile(config_json, pathlib.Path(flag), "layers").rope(
            by_length=True
        )
    except UserError as error:  # which knows of files only
        raise UserError(f"{str(error).rpartition(';')[0]}; use a different value") from None
    return scaling


READERS: dict[Any, tuple[Any, str]] = {  # type → (function of a text, its noun)
    bool: (lambda text: {"true": True, "false": False}[text.lower()], "true or false"),
    int: (int, "a whole number"),
    float: (_read_number, "a finite number"),
    str: (str, "a text"),
}


def check_set(flags: Any, decided: Iterable[str]) -> None:
    """Raises UserError if --set names a field that the data decides."""
    for text in flags.set:
        if (name := _split(text)[0]) in decided:
            raise UserError(f"--set={text}: the data decides {name}; leave it out")


def check_vocabulary(vocab_size: int, tokens: int) -> None:
    """Raises UserError if a table of embeddings is smaller than its tokenizer."""
    if vocab_size < tokens:
        raise UserError(
            f"vocab_size={vocab_size} is less than the {tokens} tokens of the tokenizer; use "
            f"--set=vocab_size={tokens}, or leave it out"
        )


def describe_set(flags: Any) -> list[str]:
    """A line of the report about --set, if it is given."""
    return [f"set: {', '.join(flags.set)}"] if flags.set else []


def changed_setting(before: Iterable[str], after: Iterable[str]) -> tuple[str, str] | None:
    """The first field that a run may not change when it resumes: (its flag now, its value before).

    Fields that only say how to compute the model may change.
    """
    saved, wanted = dict(map(_split, before)), dict(map(_split, after))
    for name in saved | wanted:
        if saved.get(name) != wanted.get(name) and name not in COMPUTE:
            return f"set={name}={wanted.get(name, '')}", saved.get(name, "")
    return None
