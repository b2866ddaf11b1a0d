"""Reads and writes the tensors of a model folder: safetensors files, their index, slices, shards.

This file knows no model. A family's table says which tensors of a folder make up each parameter:

    parameter's path → (the tensor's name, our dims, their dims)

Each {} in the name is an index into one of the parameter's leading, stacked dims, such as the
layer; {:3} counts from 3, and {:0,1,2/4} has the first three of every four: 0, 1, 2, 4, 5, 6, 8. A
dim is a letter. One dim of theirs may hold several of ours: "NH D" is [N·H, D]. If a tensor holds
several parameters, "D #NH 1/3" is the second third of [D, 3·N·H], where # has size 3. "KH D +8/16":
their first dim, of 16, holds several parameters, of which this one begins at 8. "KH D +8/16x2": their
first dim is 2 blocks of 16 rows, and each has half of KH from its row 8 on. 1 is a dim of theirs of
size 1, which ours lacks; a letter that theirs lacks is one of ours. "NH D H~64": the last 64 of H are rotary pairs that are neighbors in theirs;
in ours, all first ones come before all second ones. "64~H": the first 64.
"""

import collections
import contextlib
import functools
import json
import math
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors
import safetensors.numpy

from recipes.common.runtime.errors import UserError
from recipes.common.runtime.terminal import print0

FLOATS = ("F32", "BF16", "F16")  # safetensors' names; float32 holds all of their values exactly
FILE_BYTES = 2**30  # most bytes of tensors in a file that we write; a file is held in memory


class Rotary(NamedTuple):
    """A dim of ours whose first or last `count` are rotary pairs, which are neighbors in theirs."""

    dim: str
    count: int
    last: bool

    def order(self, size: int) -> np.ndarray:
        """Their order of the dim, which has this size."""
        order = np.arange(size)
        first = size - self.count if self.last else 0
        pairs = first + np.arange(self.count).reshape(2, -1).T.reshape(-1)
        order[first : first + self.count] = pairs
        return order


class Rows(NamedTuple):
    """Rows of a tensor that a parameter has, if the first dim holds several parameters.

    The dim is `blocks` blocks of `size` rows, which each have an equal part from row `first` on.
    """

    first: int
    size: int
    blocks: int = 1

    def row_indices(self, count: int) -> np.ndarray:
        """The rows of a parameter that has `count` of them."""
        blocks = np.arange(self.blocks)[:, None] * self.size
        return (self.first + blocks + np.arange(count // self.blocks)).reshape(-1)


class Tensor(NamedTuple):
    """One tensor of a model folder, and the part of our parameter that it holds."""

    name: str
    path: str  # our parameter's path
    index: tuple[int, ...]  # index into the parameter's stacked dims; () if it has none
    ours: dict[str, int]  # dim → size, in our order
    groups: list[str]  # our dims in each of theirs, outermost first; "": a dim of size 1
    piece: tuple[int, int] = (0, 1)  # index and size of dim #
    rotary: Rotary | None = None
    rows: Rows | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the folder."""
        shape = [math.prod(self._sizes[dim] for dim in group) for group in self.groups]
        return (self.rows.blocks * self.rows.size, *shape[1:]) if self.rows else tuple(shape)

    @property
    def _sizes(self) -> dict[str, int]:
        return self.ours | {"#": self.piece[1]}

    @property
    def _count(self) -> int:
        """The number of rows of their first dim that are ours."""
        return math.prod(self._sizes[dim] for dim in self.groups[0])

    def put(self, array: np.ndarray, target: np.ndarray) -> None:
        """Writes an array with our dims into their tensor, or into its piece of it."""
        dims = "".join(self.groups)
        index = self.piece[0]
        if self.rotary:
            dim = self.rotary.dim
            order = self.rotary.order(self.ours[dim])
            array = array.take(order, axis=list(self.ours).index(dim))
        array = array.squeeze(tuple(i for i, d in enumerate(self.ours) if d not in dims))
        ours = [dim for dim in self.ours if dim in dims]
        array = array.transpose([ours.index(d) for d in dims if d != "#"])
        if self.rows:
            rows = self.rows.row_indices(self._count)
            target[rows] = array.reshape(len(rows), *target.shape[1:])
            return
        target = target.reshape([self._sizes[dim] for dim in dims])  # a view
        where = tuple(index if dim == "#" else slice(None) for dim in dims)
        target[where] = array

    def to_ours(self, read, part: dict[str, slice]) -> np.ndarray:
        """Reads `part` (dim → slice) of their tensor, converted to our dims.

        `read` is a function from a tuple of slices to that part of their tensor.
        """
        # If one dim holds several of ours, read slices of only the outermost, which are contiguous.
        where, shape, cut, rotary = [], [], [], self.rotary
        if rotary:  # all of it
            wanted, part = part[rotary.dim], part | {rotary.dim: slice(0, self.ours[rotary.dim])}
        part, sizes = part | {"#": slice(self.piece[0], self.piece[0] + 1)}, self._sizes
        for group in self.groups:
            if not group:
                where.append(slice(None))
                continue
            outer, *inner = group
            size = math.prod(sizes[dim] for dim in inner)
            where.append(slice(part[outer].start * size, part[outer].stop * size))
            shape += [part[outer].stop - part[outer].start, *(sizes[dim] for dim in inner)]
            cut += [slice(None), *(part[dim] for dim in inner)]
        if self.rows:
            rows = self.rows.row_indices(self._count)[where[0]]
            array = read((slice(rows[0], rows[-1] + 1), *where[1:]))[rows - rows[0]]
        else:
            array = read(tuple(where))
        array = array.reshape(shape)[tuple(cut)]
        dims = "".join(self.groups)
        array = array.squeeze(dims.index("#")) if "#" in dims else array
        array = array.transpose([dims.replace("#", "").index(d) for d in self.ours if d in dims])
        array = np.expand_dims(array, tuple(i for i, d in enumerate(self.ours) if d not in dims))
        if rotary:
            theirs = np.argsort(rotary.order(self.ours[rotary.dim]))[wanted]
            array = array.take(theirs, axis=list(self.ours).index(rotary.dim))
        return array


class Index(int):
    """An index in a tensor's name; see the top of this file for the format spec."""

    def __format__(self, spec: str) -> str:
        first, _, period = spec.partition("/")
        numbers = [int(number) for number in (first or "0").split(",")]
        repeats, place = divmod(int(self), len(numbers))
        return str(repeats * int(period or 1) + numbers[place])


def expand(table: dict[str, tuple[str, str, str]], parameters: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors of parameters (path → shaped leaf); a parameter's tensors are adjacent."""
    for path, (name, ours, theirs) in table.items():
        if path in parameters:
            shape, stacked = parameters[path].shape, name.count("{")
            tensor = Tensor(
                name, path, (), dict(zip(ours, shape[stacked:], strict=True)), **_layout(theirs)
            )
            for index in np.ndindex(shape[:stacked]):
                yield tensor._replace(name=name.format(*map(Index, index)), index=index)


def _layout(theirs: str) -> dict[str, Any]:
    """Fields of a Tensor, from their dims in a family's table."""
    parts: dict[str, Any] = {"groups": []}
    for word in theirs.split():
        if "~" in word:
            left, right = word.split("~")
            last = left.isalpha()
            parts["rotary"] = Rotary(*((left, int(right)) if last else (right, int(left))), last)
        elif word.startswith("+"):
            first, size = word.split("/")
            parts["rows"] = Rows(int(first), *map(int, size.split("x")))
        elif "/" in word:
            start, count = map(int, word.split("/"))
            parts["piece"] = (start, count)
        else:
            parts["groups"].append(word.replace("1", ""))
    return parts


# ---- reading -------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A tensor in a file. Only its header has been read."""

    file: pathlib.Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self, where: tuple[slice, ...]) -> np.ndarray:
        # Opened for each read, because pages that were read stay in memory while a file is open.
        with _open(self.file) as opened:
            # A number without dims has no slices.
            return opened.get_slice(self.name)[where] if where else opened.get_tensor(self.name)


class Zeros(NamedTuple):
    """Like Stored, for a tensor that is absent from a folder because all of it is 0."""

    file: pathlib.Path
    name: str
    shape: tuple[int, ...]
    dtype: str = "F32"

    def read(self, where: tuple[slice, ...]) -> np.ndarray:
        bounds = [part.indices(size) for part, size in zip(where, self.shape, strict=True)]
        return np.zeros([stop - start for start, stop, _ in bounds], np.float32)


class Part(NamedTuple):
    """Like Stored, for some rows at one index of a stored tensor [index, rows, …]."""

    tensor: Stored
    index: int
    rows: slice

    @property
    def file(self) -> pathlib.Path:
        return self.tensor.file

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows.stop - self.rows.start, *self.tensor.shape[2:])

    def read(self, where: tuple[slice, ...]) -> np.ndarray:
        rows, *others = where
        start, stop, _ = rows.indices(self.shape[0])
        rows = slice(self.rows.start + start, self.rows.start + stop)
        return self.tensor.read((slice(self.index, self.index + 1), rows, *others))[0]


def find(folder: pathlib.Path, stem: str = "model") -> dict[str, Stored]:
    """The tensors in a folder by name. Raises UserError if a file is missing or damaged.

    Args:
      stem: stem of the files' names.
    """
    index = folder / f"{stem}.safetensors.index.json"
    single = folder / f"{stem}.safetensors"
    if single.exists():  # transformers and PEFT read it too, whatever else is there
        files = [single]
        if shards := sorted(path.name for path in folder.glob(f"{stem}-*.safetensors")):
            print0(
                f"Reads {single} alone, as transformers does; {shards[0]} and other files beside it "
                "are left out."
            )
    elif index.exists():
        names = read_json(index).get("weight_map")
        names = list(names.values()) if isinstance(names, dict) else []
        if not names or any(pathlib.PurePath(str(name)).name != name for name in names):
            raise UserError(f"{index} does not list files in its folder; download it again")
        files = [folder / name for name in sorted(set(names))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(p.name for ext in ("bin", "pt", "pth") for p in folder.glob(f"*.{ext}"))
        if pickles:
            raise UserError(
                f"{folder} has its weights in {pickles[0]}, a pickle, which can execute code when "
                "loaded; use a model with *.safetensors"
            )
        raise UserError(f"{folder} has no *.safetensors; use a model folder that has them")
    tensors: dict[str, Stored] = {}
    for file in files:
        with _open(file) as opened:
            for name in opened.keys():  # noqa: SIM118, not a dict
                if name in tensors:
                    raise UserError(
                        f"{name} is in both {tensors[name].file} and {file.name}; remove the file "
                        "that does not belong to this model"
                    )
                header = opened.get_slice(name)
                tensors[name] = Stored(file, name, tuple(header.get_shape()), header.get_dtype())
    return tensors


def check(
    folder: pathlib.Path,
    stored: dict[str, Stored],
    wanted: dict[str, tuple[int, ...]],
    implied: str,
    fix: str,
) -> None:
    """Raises UserError if names or shapes of tensors differ from `wanted`, name → shape.

    Args:
      implied: source of the wanted shapes, for messages: "config.json implies".
      fix: what to use instead.
    """
    missing, others = wanted.keys() - stored.keys(), stored.keys() - wanted.keys()
    if missing and others:  # no missing file would help
        raise UserError(
            f"{folder} is missing tensor {_first_of(missing)}, and has {_first_of(others)} that the "
            f"model lacks; rename them, or use {fix}"
        )
    if missing:
        raise UserError(
            f"{folder} is missing tensor {_first_of(missing)}; copy the missing file, or use {fix}"
        )
    if others:
        raise UserError(f"{folder} has an unexpected tensor {_first_of(others)}; use {fix}")
    for name, shape in wanted.items():
        if stored[name].shape != shape:
            raise UserError(
                f"{name} in {stored[name].file} has shape {list(stored[name].shape)}, but {implied} "
                f"{list(shape)}; use {fix}"
            )
        if stored[name].dtype not in FLOATS:
            raise UserError(
                f"{name} in {stored[name].file} has dtype {stored[name].dtype}; use a model in "
                f"{', '.join(FLOATS)}"
            )


def _first_of(names: Collection[str]) -> str:
    return min(names) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


@contextlib.contextmanager
def _reading(file: pathlib.Path):
    """Turns errors of opening a file into UserErrors."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{file} does not exist; use a complete model folder") from None
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UserError(f"{file} can't be read ({error}); download it again") from None


def _open(file: pathlib.Path):
    with _reading(file):
        return safetensors.safe_open(file, framework="numpy")  # compares file size and header


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object. Raises UserError if the file does not hold one."""
    with _reading(file):
        content = json.loads(file.read_text())
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a JSON object; download it again")
    return content


def equal(a: Stored, b: Stored) -> bool:
    """Whether two tensors of one shape have the same values."""
    rows = max(1, 2**24 // math.prod(a.shape[1:]))  # rows at a time
    rest = tuple(slice(0, size) for size in a.shape[1:])
    parts = [(slice(i, min(i + rows, a.shape[0])), *rest) for i in range(0, a.shape[0], rows)]
    return all((a.read(part) == b.read(part)).all() for part in parts)


def rename(
    stored: dict[str, Any], new_name: Callable[[str], str], folder: pathlib.Path
) -> dict[str, Any]:
    """Returns the tensors under their new names. Raises UserError if two get the same one."""
    renamed: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for old, tensor in stored.items():
        new = new_name(old)
        if new in renamed:
            raise UserError(
                f"{folder} has both {origin[new]} and {old}, which are the same tensor of the model; "
                "remove the file with the one that does not belong to it"
            )
        renamed[new] = tensor
        origin[new] = old
    return renamed


def read_shard(stored: dict[str, Stored], stack: list[Tensor], dtype, bounds) -> np.ndarray:
    """Reads the part of a parameter within bounds, (first, last + 1) per dim, from its tensors."""
    shard = np.empty([stop - start for start, stop in bounds], dtype)
    stacked = len(stack[0].index)
    part = dict(zip(stack[0].ours, (slice(*b) for b in bounds[stacked:]), strict=True))
    for tensor in stack:
        offset = tuple(i - start for i, (start, _) in zip(tensor.index, bounds, strict=False))
        if all(0 <= i < size for i, size in zip(offset, shard.shape, strict=False)):
            shard[offset] = tensor.to_ours(stored[tensor.name].read, part)  # widens bf16 and fp16
    return shard


def place(leaf: jax.ShapeDtypeStruct, shard) -> jax.Array:
    """Makes an array of this shape and sharding from a function of a shard's bounds.

    The host holds only one shard at a time. jax.make_array_from_callback would hold all of them,
    and read a shard again for each device that has a copy.
    """
    devices = collections.defaultdict(list)
    indices: Any = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    for device, index in indices.items():
        bounds = tuple(s.indices(size)[:2] for s, size in zip(index, leaf.shape, strict=True))
        devices[bounds].append(device)
    arrays = []
    for bounds, copies in devices.items():
        values = shard(bounds)
        arrays += jax.block_until_ready([jax.device_put(values, device) for device in copies])
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)


# ---- writing -------------------------------------------------------------------------------------


def write(folder: pathlib.Path, tensors: Iterable[Tensor], read, stem: str = "model") -> None:
    """Writes tensors to one file, or to several of at most FILE_BYTES with an index.

    Args:
      read: a function from a parameter's path to a float32 array; as many are held at a time as share
        a tensor.
      stem: stem of the files' names.
    """
    from huggingface_hub import split_state_dict_into_shards_factory  # takes a third of a second

    by_name: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        by_name.setdefault(tensor.name, []).append(tensor)
    most = max(map(len, by_name.values()))
    read = functools.lru_cache(maxsize=most)(read)  # a parameter's tensors are adjacent
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda pieces: 4 * math.prod(pieces[0].shape),
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=FILE_BYTES,
    )
    for file, names in split.filename_to_tensors.items():
        # Zeros: an adapter may lack a piece of a tensor.
        arrays = {name: np.zeros(by_name[name][0].shape, np.float32) for name in names}
        for name in names:
            for tensor in by_name[name]:
                tensor.put(read(tensor.path)[tensor.index], arrays[name])
        safetensors.numpy.save_file(arrays, folder / file, metadata={"format": "pt"})
        del arrays  # before the next file's are made
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        file = folder / f"{stem}.safetensors.index.json"
        file.write_text(json.dumps(index, indent=2) + "\n")
