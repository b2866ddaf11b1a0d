"""Hugging Face model folders of the Llama family, as parameters of zoo/transformer.py and back.

A folder is config.json with one or many *.safetensors. Both ways go tensor by tensor, and nothing
in a folder is ever run. What our Transformer does not compute exactly is refused by name.
"""

import collections
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from recipes.common import sharding
from recipes.common.errors import UserError
from recipes.common.sharding import Tree, paths
from zoo.transformer import Config, Transformer

ARCHITECTURES = {  # theirs → model_type
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# Parameter → (name of the tensor, or of layer {}'s; our dims; theirs). Letters as in
# zoo/transformer.py. Their weights are [out, in], and hold several of our dims in one: q of ours is
# [D, N, H] and q_proj of theirs [N·H, D].
TENSORS = {
    "embed": ("model.embed_tokens.weight", "VD", "V D"),
    "layers/attention_norm/scale": ("model.layers.{}.input_layernorm.weight", "D", "D"),
    "layers/attention/q": ("model.layers.{}.self_attn.q_proj.weight", "DNH", "NH D"),
    "layers/attention/k": ("model.layers.{}.self_attn.k_proj.weight", "DKH", "KH D"),
    "layers/attention/v": ("model.layers.{}.self_attn.v_proj.weight", "DKH", "KH D"),
    "layers/attention/o": ("model.layers.{}.self_attn.o_proj.weight", "NHD", "D NH"),
    "layers/attention/q_bias": ("model.layers.{}.self_attn.q_proj.bias", "NH", "NH"),
    "layers/attention/k_bias": ("model.layers.{}.self_attn.k_proj.bias", "KH", "KH"),
    "layers/attention/v_bias": ("model.layers.{}.self_attn.v_proj.bias", "KH", "KH"),
    "layers/attention/q_norm/scale": ("model.layers.{}.self_attn.q_norm.weight", "H", "H"),
    "layers/attention/k_norm/scale": ("model.layers.{}.self_attn.k_norm.weight", "H", "H"),
    "layers/mlp_norm/scale": ("model.layers.{}.post_attention_layernorm.weight", "D", "D"),
    "layers/mlp/gate": ("model.layers.{}.mlp.gate_proj.weight", "DF", "F D"),
    "layers/mlp/up": ("model.layers.{}.mlp.up_proj.weight", "DF", "F D"),
    "layers/mlp/down": ("model.layers.{}.mlp.down_proj.weight", "FD", "D F"),
    "final_norm/scale": ("model.norm.weight", "D", "D"),
    "unembed": ("lm_head.weight", "VD", "V D"),
}

FLOATS = ("F32", "BF16", "F16")  # of safetensors; all of their values are exact in float32
FILE_BYTES = 2**30  # of tensors in a file that we write, which is how much of it is held in memory


class Tensor(NamedTuple):
    """One tensor of a model folder and what it is to us."""

    name: str
    path: str  # of our parameter
    layer: int | None  # None: the parameter is not stacked
    ours: dict[str, int]  # dim → size, in our order
    groups: list[str]  # the dims that each of theirs holds, outermost first

    @property
    def shape(self) -> tuple[int, ...]:
        """As it lies in the folder."""
        return tuple(math.prod(self.ours[dim] for dim in group) for group in self.groups)

    @property
    def order(self) -> str:
        """Our dims in their order."""
        return "".join(self.groups)

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        """Their tensor, contiguous, from an array with our dims."""
        array = array.transpose([list(self.ours).index(dim) for dim in self.order])
        return np.ascontiguousarray(array.reshape(self.shape))

    def to_ours(self, read, part: dict[str, slice]) -> np.ndarray:
        """`part` of their tensor, with our dims; reads no more rows and columns than it needs.

        Args:
          read: gives their tensor at a tuple of slices.
          part: dim → slice.
        """
        # Of several dims in one only the outermost is cut by reading: what it leaves is contiguous.
        where, shape, cut = [], [], []
        for outer, *inner in self.groups:
            size = math.prod(self.ours[dim] for dim in inner)
            where.append(slice(part[outer].start * size, part[outer].stop * size))
            shape += [-1 if inner else part[outer].stop - part[outer].start]
            shape += [self.ours[dim] for dim in inner]
            cut += [slice(None), *(part[dim] for dim in inner)]
        array = read(tuple(where)).reshape(shape)[tuple(cut)]
        return array.transpose([self.order.index(dim) for dim in self.ours])


def tensors(shapes: Tree) -> Iterator[Tensor]:
    """The tensors that a model with these parameters is in a folder; a parameter's are together."""
    for path, (name, ours, theirs) in TENSORS.items():
        if path not in paths(shapes):
            continue
        shape = paths(shapes)[path].shape
        stacked = "{}" in name
        sizes = dict(zip(ours, shape[1:] if stacked else shape, strict=True))
        for layer in range(shape[0]) if stacked else [None]:
            yield Tensor(name.format(layer), path, layer, sizes, theirs.split())


# ---- reading -------------------------------------------------------------------------------------


def locate(name: str) -> pathlib.Path:
    """The model folder: one on this machine, or ORG/NAME of the Hub, by its client and its cache.

    Raises UserError if there is neither.
    """
    folder = pathlib.Path(name).expanduser()
    if name and folder.exists():
        return folder.absolute()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"{name!r} does not exist; give a model folder, or ORG/NAME of the Hub")
    import huggingface_hub  # takes a third of a second

    wanted = ["config.json", "*.safetensors", "*.safetensors.index.json"]
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the client has no common base for what it raises
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            f"{name} is no folder here, and the Hub did not give it ({reason}); give a model "
            "folder, or ORG/NAME of a model that you can download"
        ) from None


class Folder:
    """A model folder, checked; to recipes.common.checkpoint it is a checkpoint of step 0."""

    step = 0

    def __init__(self, path: pathlib.Path):
        """Reads config.json and the headers of the tensors' files, and no tensor.

        Raises UserError if the folder is not a whole model that zoo/transformer.py computes.
        """
        self.path = path
        if not path.is_dir():
            raise UserError(f"{path} is a file; give the folder that it lies in")
        theirs = _json(path / "config.json")
        self.config = config_from(theirs, path / "config.json")
        self.metadata = {
            "entry": "transformer",
            "config": dataclasses.asdict(self.config),
            "step": self.step,
            "context": theirs.get("max_position_embeddings"),  # for an export back
        }
        self.shapes = sharding.blueprint(
            lambda: Transformer(self.config, rngs=nnx.Rngs(0))
        ).shapes  # nested dict of ShapeDtypeStruct, as in a checkpoint's `params`
        self._file_of = _files(path)
        self._check()

    def _check(self) -> None:
        wanted = {tensor.name: tensor for tensor in tensors(self.shapes)}
        theirs = {n for n in self._file_of if not n.endswith("rotary_emb.inv_freq")}  # computed
        if self.config.tie_embeddings and "lm_head.weight" in theirs:
            self._check_tied()
            theirs.remove("lm_head.weight")
        for names, what, fix in (
            (wanted.keys() - theirs, "lacks", "a file was not copied, or config.json is another's"),
            (theirs - wanted.keys(), "has an unexpected", "config.json is another model's"),
        ):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise UserError(f"{self.path} {what} tensor {min(names)}{more}; {fix}")
        for name, tensor in wanted.items():
            file = self._file_of[name]
            with _open(file) as opened:
                found = opened.get_slice(name)
                shape, dtype = tuple(found.get_shape()), found.get_dtype()
            if shape != tensor.shape:
                raise UserError(
                    f"{name} in {file} has shape {list(shape)}, and by config.json "
                    f"{list(tensor.shape)}; give the config.json of this model"
                )
            if dtype not in FLOATS:
                raise UserError(
                    f"{name} in {file} is of {dtype}; give a model of {', '.join(FLOATS)}"
                )

    def _check_tied(self) -> None:
        """An lm_head beside tied embeddings has to be the same again.

        Where it differs, versions of transformers disagree on whether it or config.json counts.
        """
        read = [self._reader(name) for name in ("lm_head.weight", "model.embed_tokens.weight")]
        V, D = self.config.vocab_size, self.config.embed
        rows = max(1, 2**24 // D)  # at a time
        for start in range(0, V, rows):
            part = (slice(start, min(start + rows, V)), slice(0, D))
            head, embed = (one(part) for one in read)
            if head.shape != embed.shape or not (head == embed).all():
                raise UserError(
                    f"{self.path} has an lm_head.weight that is not model.embed_tokens.weight, and "
                    "its config.json ties the two; if they are two, set tie_word_embeddings there "
                    "to false"
                )

    def read(self, where: Tree) -> Tree:
        """Parameters in float32, each shard read for itself and put onto its devices.

        Args:
          where: nested dict of shardings, one for each parameter that is wanted.
        """
        stacks = collections.defaultdict(list)
        for tensor in tensors(self.shapes):
            stacks[tensor.path].append(tensor)
        shapes = paths(self.shapes)
        arrays = [
            _place(shapes[path].shape, sharding, functools.partial(self._shard, stacks[path]))
            for path, sharding in paths(where).items()
        ]
        return jax.tree.unflatten(jax.tree.structure(where), arrays)

    def _shard(self, stack: list[Tensor], bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        """Part of a parameter in float32: bounds, (first, last + 1), for each of its dims."""
        shard = np.empty([stop - start for start, stop in bounds], np.float32)
        slices = [slice(*b) for b in bounds]
        stacked = stack[0].layer is not None
        part = dict(zip(stack[0].ours, slices[1:] if stacked else slices, strict=True))
        for i, tensor in enumerate(stack[slices[0]] if stacked else stack):
            values = tensor.to_ours(self._reader(tensor.name), part)
            shard[i if stacked else ...] = values  # widens bfloat16 and float16
        return shard

    def _reader(self, name: str) -> Callable[[tuple[slice, ...]], np.ndarray]:
        def read(where):
            # Opened anew each time: else all pages that were read would stay in this process.
            with _open(self._file_of[name]) as opened:
                return opened.get_slice(name)[where]

        return read


def _place(shape: tuple[int, ...], sharding: jax.sharding.Sharding, shard) -> jax.Array:
    """An array of which only one shard at a time is in this process, besides the devices.

    jax.make_array_from_callback has all shards first, and makes one for each device that has a copy.

    Args:
      shard: function of bounds, (first, last + 1) for each dim → NumPy array.
    """
    devices = collections.defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
        devices[bounds].append(device)
    arrays = []
    for bounds, copies in devices.items():
        values = shard(bounds)
        arrays += jax.block_until_ready([jax.device_put(values, device) for device in copies])
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _json(file: pathlib.Path) -> dict[str, Any]:
    """A JSON object. Raises UserError if there is none."""
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(f"{file} does not exist; give the whole model folder") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} can't be read ({error}); download it again") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} is not a JSON object; download it again")
    return found


def _open(file: pathlib.Path):
    """A file of tensors. Raises UserError if it is not whole: the header is checked against it."""
    try:
        return safetensors.safe_open(file, framework="numpy")
    except FileNotFoundError:
        raise UserError(f"{file} does not exist; download it again") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{file} can't be read ({error}); download it again") from None


def _files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Tensor's name → the file that it is in."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        files = _indexed(index)
    else:
        files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(p.name for ext in ("bin", "pt", "pth") for p in folder.glob(f"*.{ext}"))
        if pickles:
            raise UserError(
                f"{folder} has its weights in {pickles[0]}, a pickle, which may run any code when it "
                "is read; give a model with *.safetensors"
            )
        raise UserError(f"{folder} has no *.safetensors; give a model folder that has")
    found: dict[str, pathlib.Path] = {}
    for file in files:
        with _open(file) as opened:
            for name in opened.keys():  # noqa: SIM118, it is no dict
                if name in found:
                    raise UserError(
                        f"{name} is in both {found[name]} and {file.name}; remove the file that is "
                        "not of this model"
                    )
                found[name] = file
    return found


def _indexed(index: pathlib.Path) -> list[pathlib.Path]:
    """The files that an index names."""
    names = _json(index).get("weight_map")
    names = list(names.values()) if isinstance(names, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{index} names no files; download it again")
    names = sorted(set(names))
    for name in names:
        if pathlib.PurePath(name).name != name:
            raise UserError(
                f"{index} names {name!r}, which is not in its folder; download it again"
            )
        if not (index.parent / name).exists():
            raise UserError(
                f"{index.parent} lacks {name}, which its index names; download it again"
            )
    return [index.parent / name for name in names]


# ---- config.json ---------------------------------------------------------------------------------

# What our Transformer does not have: key → the values that leave it unused.
UNUSED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),  # of theirs, o has one as well
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
    "num_experts": (),
    "num_local_experts": (),
    "auto_map": (),  # code of the folder's own
}


def config_from(theirs: dict[str, Any], file: pathlib.Path) -> Config:
    """Our Config for their config.json, whose absent keys mean what they mean to transformers.

    Raises UserError, naming the key, for what our Transformer does not compute exactly.
    """
    kind = _model_type(theirs, file)
    for key, values in UNUSED.items():
        if theirs.get(key) is not None and theirs[key] not in values:
            raise _refused(file, key, theirs[key])
    number = functools.partial(_number, theirs, file)
    embed, heads = number("hidden_size"), number("num_attention_heads")
    head_dim = number("head_dim", 128 if kind == "qwen3" else embed // heads)
    kv_heads = number("num_key_value_heads", heads if kind == "llama" else None)
    if head_dim % 2:
        raise _refused(file, "head_dim", head_dim)
    if heads % kv_heads:
        raise _refused(file, "num_key_value_heads", kv_heads)
    theta, scaling = _rope(theirs, file)
    return Config(
        vocab_size=number("vocab_size"),
        embed=embed,
        num_layers=number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=number("intermediate_size"),
        norm_eps=number("rms_norm_eps", 1e-6, float),
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=_window(theirs, kind, file),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        tie_embeddings=theirs.get("tie_word_embeddings") is True,
    )


def _model_type(theirs, file) -> str:
    names = theirs.get("architectures") or [theirs.get("model_type")]
    known = ARCHITECTURES | {kind: kind for kind in ARCHITECTURES.values()}
    if names not in [[name] for name in known]:
        shown = ", ".join(map(str, names)) if isinstance(names, list) else names
        raise UserError(
            f"{file} is of {shown}, which zoo/transformer.py does not compute; give one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    return known[names[0]]


def _refused(file, key: str, value) -> UserError:
    return UserError(
        f"{file} has {key} {json.dumps(value)}, which zoo/transformer.py does not compute; give "
        "another model"
    )


def _number(theirs, file, key: str, default=None, kind: type = int) -> Any:
    """A number above 0; null is as absent. Raises UserError if there is none."""
    value = theirs.get(key)
    value = default if value is None else value
    kinds = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        raise UserError(
            f"{file} has {key} {json.dumps(value)}, which is not a number above 0; give the "
            "config.json of this model"
        )
    return kind(value)


def _rope(theirs, file) -> tuple[float, tuple[float, float, float, int] | None]:
    """(theta, scaling); older config.json have rope_theta and rope_scaling, newer rope_parameters."""
    # Where both are, transformers takes the older.
    key = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
    rope = theirs.get(key) or {}
    if not isinstance(rope, dict) or any(isinstance(v, dict) for v in rope.values()):
        raise _refused(file, key, rope)  # each kind of layer has its own, for instance
    rope = {"rope_theta": theirs.get("rope_theta")} | rope
    number = functools.partial(_number, rope, file)
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise _refused(file, "partial_rotary_factor", rope["partial_rotary_factor"])
    theta, kind = number("rope_theta", 10_000.0, float), rope.get("rope_type", rope.get("type"))
    if kind in (None, "default"):
        return theta, None
    if kind != "llama3":
        raise _refused(file, "rope_type", kind)
    factor, low, high = (
        number(key, None, float) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original = number("original_max_position_embeddings", theirs.get("max_position_embeddings"))
    return theta, (factor, low, high, original)


def _window(theirs, kind: str, file) -> int | None:
    """Positions that one sees, itself with them; None: all before it."""
    layers = _number(theirs, file, "num_hidden_layers")
    window = None if kind == "llama" else theirs.get("sliding_window", 4_096)
    types = theirs.get("layer_types")
    if kind in ("qwen2", "qwen3"):
        window = window if theirs.get("use_sliding_window") else None
        full = theirs.get("max_window_layers", 28)  # these, the first ones, have no window
        if window is not None and not types:
            if full not in (0, None) and _number(theirs, file, "max_window_layers", 28) < layers:
                raise _refused(file, "max_window_layers", full)
            window = None if full else window
    if types:
        one = "full_attention" if window is None else "sliding_attention"
        if types != [one] * layers:
            raise _refused(file, "layer_types", types)
    return None if window is None else _number(theirs, file, "sliding_window", window)


# ---- writing -------------------------------------------------------------------------------------


def write(folder: pathlib.Path, config: Config, context: int, read) -> None:
    """Writes a model folder, beside its place and then moved there whole.

    Besides the devices it holds one parameter and FILE_BYTES of tensors.

    Args:
      context: positions that the model was trained on.
      read: function of a parameter's path → the parameter, a float32 NumPy array.

    Raises UserError if no architecture of theirs is this Config's.
    """
    theirs = to_config_json(config, context)
    shapes = sharding.blueprint(lambda: Transformer(config, rngs=nnx.Rngs(0))).shapes
    read = functools.lru_cache(maxsize=1)(read)  # a parameter's tensors are next to one another
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    beside.mkdir()
    try:
        files = list(_pack(tensors(shapes)))
        weight_map = {}
        for i, part in enumerate(files, start=1):
            name = f"model-{i:05}-of-{len(files):05}.safetensors"
            name = name if len(files) > 1 else "model.safetensors"
            arrays = {t.name: t.to_theirs(read(t.path)[() if t.layer is None else t.layer])
                      for t in part}  # fmt: skip
            safetensors.numpy.save_file(arrays, beside / name, metadata={"format": "pt"})
            weight_map |= {tensor.name: name for tensor in part}
        if len(files) > 1:
            total = sum(4 * math.prod(tensor.shape) for tensor in tensors(shapes))
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (beside / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        (beside / "config.json").write_text(json.dumps(theirs, indent=2) + "\n")
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _pack(every: Iterator[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in their order, as many to a file as FILE_BYTES holds, and at least one."""
    file: list[Tensor] = []
    held = 0
    for tensor in every:
        size = 4 * math.prod(tensor.shape)
        if file and held + size > FILE_BYTES:
            yield file
            file, held = [], 0
        file.append(tensor)
        held += size
    yield file


def to_config_json(config: Config, context: int) -> dict[str, Any]:
    """Their config.json, in the keys that both old and new versions of transformers read.

    Raises UserError if no architecture of theirs is this one.
    """
    if config.qkv_bias and config.qk_norm:
        raise UserError(
            "qkv_bias together with qk_norm is in no Hugging Face architecture; export a model "
            "without one of them"
        )
    # Llama is Mistral without a window, and wants its heads to divide its embed.
    mistral = config.sliding_window is not None or config.embed % config.num_heads
    kind = (
        "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias
        else "mistral" if mistral else "llama"
    )  # fmt: skip
    theirs = {
        "architectures": [name for name, k in ARCHITECTURES.items() if k == kind],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": context,
        "torch_dtype": "float32",
        # Theirs are 1 and 2 where nothing is said, and every vocabulary has its own.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if config.rope_scaling is not None:
        factor, low, high, original = config.rope_scaling
        theirs["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
    if kind != "llama":
        theirs["sliding_window"] = config.sliding_window
    if kind in ("qwen2", "qwen3"):  # a window on every layer, or on none
        window = config.sliding_window is not None
        theirs |= {"use_sliding_window": window, "max_window_layers": 0 if window else 28}
    return theirs
