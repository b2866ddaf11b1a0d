"""Pictures with the names of their classes, resized and normalized, through Grain.

load("digits")              # 1,797 handwritten digits in this repository: data/README.md
load("pets")                # a folder with one subfolder of pictures (PNG, JPEG) for each class,
                            # or with such subfolders in pets/train and pets/test
load("hf:uoft-cs/cifar10")  # a Hub dataset, or hf:NAME:CONFIG for one of its configurations

A folder with train and test files (Parquet, JSON Lines) is read like a Hub dataset. If there are no
pictures to evaluate on, a tenth of each class is held out.
"""

import concurrent.futures
import hashlib
import io
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import PIL.Image
import PIL.ImageOps

from data import DataError, buckets, hub, whole_texts
from data.batches import Dataset, Rows
from data.digits import DIGITS, check_row

SUFFIXES = (".png", ".jpg", ".jpeg")
TEST = ("test", "validation", "val")  # subfolders with pictures to evaluate on
FILTERS = {name.lower(): PIL.Image.Resampling[name] for name in PIL.Image.Resampling.__members__}
IN_MEMORY = 2**30  # most bytes of decoded pictures to keep; else each batch decodes its own
SAMPLE = 1_000  # pictures from which mean and standard deviation are computed


class Form(NamedTuple):
    """The form into which pictures are brought: uint8 [size, size, channels]."""

    size: int
    channels: int  # 1 (grey) or 3 (RGB); 0: as the pictures have
    resample: str = "bilinear"  # filter to resize with, one of FILTERS
    center_crop: bool = False  # cut to a square, instead of stretched

    @property
    def key(self) -> tuple:
        """What fingerprints have of it."""
        return self if self.center_crop else self[:3]

    def resized(self, picture: PIL.Image.Image) -> np.ndarray:
        """See `resized`."""
        return resized(picture, self)

    def arrays(self, pictures: Sequence[np.ndarray], slots: int) -> dict[str, np.ndarray]:
        """{"images": uint8 [slots, size, size, channels]} of pixels, then empty slots."""
        stacked = np.zeros((slots, self.size, self.size, self.channels), np.uint8)
        for slot, pixels in enumerate(pictures):
            stacked[slot] = pixels
        return {"images": stacked}


class AnyForm(Protocol):
    """A form into which pictures are brought: Form, or squares.SquareForm."""

    @property
    def channels(self) -> int: ...

    def resized(self, picture: PIL.Image.Image) -> np.ndarray: ...

    def arrays(self, pictures: Sequence[np.ndarray], slots: int) -> dict[str, np.ndarray]: ...


class Augment(NamedTuple):
    """Random changes of pictures."""

    crop: bool = False  # cut at random, after repeating the edges by an eighth on each side
    flip: bool = False  # mirror half of the pictures, left to right
    seed: int = 0


class Images(Rows):
    """Examples {"image": float32 [W, W, C], "label": int32}.

    Number n + e · len(self) is picture n in epoch e. Random crops and flips depend on (seed, e, n)
    alone, so any number of processes gets the same batches.
    """

    def __init__(self, pixels, label_N: np.ndarray, mean, std, augment: Augment):
        """`pixels` is a sequence of uint8 [W, W, C]; mean and std are for values from 0 to 1."""
        self.pixels, self.label_N, self.augment = pixels, label_N, augment
        self.mean, self.std = (np.asarray(x, np.float32) for x in (mean, std))

    def __len__(self):
        return len(self.label_N)

    def take(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        epochs, rows = np.divmod(numbers, len(self))
        image_BWWC = taken(self.pixels, rows)
        if self.augment.crop or self.augment.flip:
            image_BWWC = self._at_random(image_BWWC, epochs, rows)
        normalized = (image_BWWC.astype(np.float32) / 255 - self.mean) / self.std
        return {"image": normalized, "label": self.label_N[rows]}

    def _at_random(self, image_BWWC, epochs, rows) -> np.ndarray:
        W, augment = image_BWWC.shape[1], self.augment
        edge = max(1, W // 8) if augment.crop else 0
        around = (edge, edge)
        wide = np.pad(image_BWWC, ((0, 0), around, around, (0, 0)), mode="edge")
        for i, at in enumerate(zip(epochs.tolist(), rows.tolist(), strict=True)):
            rng = np.random.default_rng((augment.seed, *at))
            top, left = rng.integers(0, 2 * edge + 1, 2)
            picture = wide[i, top : top + W, left : left + W]
            image_BWWC[i] = picture[:, ::-1] if augment.flip and rng.random() < 0.5 else picture
        return image_BWWC


class Files(Sequence):
    """Pictures on disk, decoded when they are read."""

    def __init__(self, paths: list[pathlib.Path], dataset: str, form: Form):
        self.paths, self.dataset, self.form = paths, dataset, form

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        return decode(self.paths[i], self.form, self.dataset, self.paths[i])


def fits_in_memory(count: int, form: Form) -> bool:
    """Whether so many decoded pictures are kept."""
    return count * form.size**2 * form.channels <= IN_MEMORY


def taken(pixels: Sequence[np.ndarray] | np.ndarray, numbers: Any) -> np.ndarray:
    """Some pictures, [N, W, W, C]; those in files are decoded by threads."""
    if isinstance(pixels, np.ndarray):
        return pixels[numbers]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return np.stack(list(pool.map(pixels.__getitem__, numbers)))


def filler(image_size: int, channels: int) -> dict[str, np.ndarray]:
    """An example that does not count."""
    picture = np.zeros((image_size, image_size, channels), np.float32)
    return {"image": picture, "label": np.array(-1, np.int32)}


def load(
    dataset: str = "digits",
    image_size: int = 8,
    channels: int = 0,
    labels: Sequence[str] = (),
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    resample: str = "bilinear",
    crop: bool = False,
    flip: bool = False,
    image_column: str = "image",
    label_column: str = "label",
    seed: int = 0,
    center_crop: bool = False,
) -> Dataset:
    """Loads pictures of image_size × image_size pixels.

    Args:
      dataset: "digits", a path, or "hf:NAME"; see the module's docstring.
      channels: 1 (grey) or 3 (RGB); 0: as the pictures have.
      labels: names of a model's classes, in its order; kept if they include all of the dataset's.
      mean, std: for each channel, of values from 0 to 1; empty: those of the training pictures.
      resample: filter to resize with, one of FILTERS.
      crop: crops training pictures at random, after repeating their edges by an eighth on each side.
      flip: mirrors half of the training pictures, left to right.
      seed: seed of the crops and flips.
      center_crop: cuts pictures to a square, instead of stretching them.

    Raises DataError if there is no such dataset, or its pictures can't be used.
    """
    path = buckets.local(dataset, f"--dataset={dataset}")
    form = Form(image_size, channels, resample, center_crop)
    shown = [
        entry
        for entry in (path.iterdir() if path.is_dir() else ())
        if not buckets.is_hidden(entry.name)
    ]
    has_table = not {entry.suffix.lower() for entry in shown} <= {*SUFFIXES, ".txt"}
    notes: tuple[str, ...] = ()
    if path.is_dir() and (not has_table or any(entry.is_dir() for entry in shown)):
        check_columns(dataset, {"image_column": image_column, "label_column": label_column})
        notes = _unread(path)
        names, form, train, test = _folder(path, dataset, form)
    else:
        splits = _splits_of_rows(path, dataset)
        notes = _unused(splits[0], dataset, (image_column, label_column))
        names, form, train, test = _rows(splits, dataset, image_column, label_column, form)
    if len(names) < 2:
        raise DataError(
            f"--dataset={dataset} has a single class, {names[0]!r}; add a folder for another one"
        )
    labels = tuple(labels) if {*names} <= {*labels} else tuple(names)
    order = np.asarray([labels.index(name) for name in names], np.int32)
    (train_pixels, train_label), (test_pixels, test_label) = (
        (pixels, order[np.asarray(label_N)]) for pixels, label_N in (train, test)
    )
    train = Part(train_pixels, train_label)
    test = Part(test_pixels, test_label)
    augment = Augment(crop, flip, seed)
    data = normalized(train, test, form, mean, std, augment)
    parts = (train_pixels, train_label, test_pixels, test_label)
    return data._replace(
        config=data.config | {"classes": len(labels), "labels": labels},
        facts={"dataset": dataset, "fingerprint": _fingerprint(names, form, parts)},
        notes=notes,
    )


def check_columns(dataset: str, columns: dict[str, str]) -> None:
    """Raises DataError if flags name columns that a dataset does not have.

    Args:
      columns: flag → its value.
    """
    for flag, column in columns.items():
        if column not in ("", flag.removesuffix("_column")):
            raise DataError(
                f"--{flag}={column} is for rows, and --dataset={dataset} has none with it; leave it out"
            )


class Part(NamedTuple):
    """Pictures of a part of a dataset."""

    pixels: Any  # a sequence of uint8 [W, W, C]
    label_N: np.ndarray


def normalized(
    train: Part,
    test: Part,
    form: Form,
    mean: Sequence[float],
    std: Sequence[float],
    augment: Augment,
) -> Dataset:
    """A dataset of pictures, without the facts. Arguments as of `load`."""
    some = range(0, len(train.pixels), -(-len(train.pixels) // SAMPLE))
    sample = np.stack([train.pixels[i] for i in some]).reshape(-1, form.channels) / 255.0
    mean = tuple(mean) or tuple(round(float(x), 6) for x in sample.mean(axis=0))
    std = tuple(std) or tuple(max(round(float(x), 6), 1e-3) for x in sample.std(axis=0))
    return Dataset(
        train=Images(*train, mean, std, augment),
        held_out=Images(*test, mean, std, Augment()),
        filler=filler(form.size, form.channels),
        unit="images",
        units=1,
        config={"channels": form.channels, "mean": mean, "std": std},
        facts={},
        by_epoch=augment.crop or augment.flip,
    )


def _fingerprint(names: Sequence[str], form: Form, parts: Iterable[Files | np.ndarray]) -> str:
    """SHA-256 of classes, form, pixels and labels; of pictures in files, names and sizes instead."""
    digest = hashlib.sha256(repr((names, *form.key)).encode())
    for part in parts:
        if isinstance(part, Files):
            sizes = [(str(file), file.stat().st_size) for file in part.paths]
            digest.update(repr(sizes).encode())
        else:
            digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


# ---- folders of pictures -------------------------------------------------------------------------


def _folder(root: pathlib.Path, dataset: str, form: Form):
    """Returns (names of classes, form, (training pictures, labels), (held-out ones, labels))."""
    inner, test_folder = _splits(root)
    classes = _classes(inner, dataset)
    names = list(classes)
    if inner != root and test_folder:
        test = _classes(test_folder, dataset)
        for name in test.keys() - classes.keys():
            raise DataError(
                f"--dataset={dataset} has class {name!r} in {test_folder.name} but not in train; add "
                "pictures of it to train, or remove it"
            )
        train = classes
    else:
        train, test = {}, {}
        for name, files in classes.items():
            if len(files) < 2:
                raise DataError(
                    f"--dataset={dataset} has a single picture of class {name!r}, and one is held "
                    "out; add pictures"
                )
            at_random = sorted(files, key=lambda f: hashlib.sha256(os.fsencode(f.name)).digest())
            out = {*at_random[: max(1, len(files) // 10)]}
            test[name] = [file for file in files if file in out]
            train[name] = [file for file in files if file not in out]
    parts = [
        ([file for name in names for file in part.get(name, [])],
         [i for i, name in enumerate(names) for _ in part.get(name, [])])
        for part in (train, test)
    ]  # fmt: skip
    channels = _channels([file for files, _ in parts for file in files], dataset)
    form = form._replace(channels=form.channels or channels)
    keep = fits_in_memory(sum(len(files) for files, _ in parts), form)
    loaded = []
    for files, label in parts:
        pixels: Any = Files(files, dataset, form)
        loaded.append((taken(pixels, range(len(files))) if keep else pixels, label))
    return names, form, *loaded


def _splits(root: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path | None]:
    """The folder of the classes to train on, and the one to evaluate on, if there is one."""
    inner = root / "train" if (root / "train").is_dir() else root
    return inner, next((root / name for name in TEST if (root / name).is_dir()), None)


def _unread(root: pathlib.Path) -> tuple[str, ...]:
    """A line about files of a folder of classes that are no pictures, or lie in no class."""
    inner, test_folder = _splits(root)
    read = [inner, *([test_folder] if test_folder and inner != root else [])]
    unread = [
        path.relative_to(root).as_posix()
        for path in sorted(root.rglob("*"))
        if path.is_file()
        and not buckets.is_hidden(path.relative_to(root))
        and (
            path.suffix.lower() not in SUFFIXES
            or not any(folder in path.parent.parents for folder in read)
        )
    ]
    shown = ", ".join(unread[:3]) + ", …" * (len(unread) > 3)
    return (f"Files that are not read: {len(unread):,} ({shown}).",) if unread else ()


def _classes(folder: pathlib.Path, dataset: str) -> dict[str, list[pathlib.Path]]:
    """Class → its pictures, both sorted. Raises DataError if a class has none."""
    classes = {}
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        if not inner.name.startswith("."):
            classes[inner.name] = sorted(
                file
                for file in inner.rglob("*")
                if file.suffix.lower() in SUFFIXES
                and not buckets.is_hidden(file.relative_to(inner))
            )
            if not classes[inner.name]:
                raise DataError(
                    f"--dataset={dataset} has no pictures ({', '.join(SUFFIXES)}) in {inner}; add "
                    "some, or remove the folder"
                )
    if not classes:
        raise DataError(f"--dataset={dataset} has no folders in {folder}; use one for each class")
    return classes


def _channels(files: list[pathlib.Path], dataset: str) -> int:
    """The number of channels that all pictures have. Raises DataError if they differ."""
    first = {}
    for file in files:
        try:
            with PIL.Image.open(file) as picture:
                first.setdefault(channels_of(picture), file)
        except (OSError, SyntaxError, ValueError):
            raise broken(dataset, file) from None
    if len(first) > 1:
        raise DataError(
            f"--dataset={dataset} has grey pictures, such as {first[1]}, and colored ones, such as "
            f"{first[3]}; convert them to one kind"
        )
    return next(iter(first))


# ---- rows with columns for image and label -------------------------------------------------------


def _splits_of_rows(path: pathlib.Path, dataset: str) -> list[hub.Rows]:
    """Rows to train on, and to evaluate on if there are any: of the Hub, or of files of the same structure."""
    name = str(path) if path.is_dir() else dataset.removeprefix("hf:")
    if dataset == "digits":
        name = str(DIGITS)
    elif not dataset.startswith("hf:") and not path.is_dir():
        raise DataError(
            f"--dataset={dataset} is not a folder; use digits, a folder with one subfolder for each "
            "class, or hf:NAME"
        )
    return [split for split in hub.load(name, dataset) if split is not None]


def _unused(rows: hub.Rows, dataset: str, used: tuple[str, str]) -> tuple[str, ...]:
    """A line that names the columns besides the picture and its label."""
    first = next(iter(hub.read_errors(rows, dataset)), {})
    return tuple(whole_texts.unused([[("", first)]], used)) if {*used} <= {*first} else ()


def _rows(splits: list[hub.Rows], dataset: str, image: str, label: str, form: Form):
    """Reads the rows of each split. Returns what `_folder` does."""
    parts = []
    features = getattr(splits[0], "features", None) or {}
    names = list(getattr(features.get(label), "names", None) or [])
    for split in splits:
        images, labels = [], []
        for row in hub.read_errors(split, dataset):
            check_row(row, image, label, dataset)
            images.append(row[image])
            labels.append(row[label])
        parts.append((images, labels))
    if len(parts) == 1:
        images, labels = parts[0]
        kept, out = (
            [i for i in range(len(labels)) if bool(i % 10) == keep] for keep in (True, False)
        )
        parts = [([images[i] for i in part], [labels[i] for i in part]) for part in (kept, out)]
    if not all(labels for _, labels in parts):
        raise DataError(f"--dataset={dataset} has an empty split; add images to it")
    count = max(max(labels) for _, labels in parts) + 1
    names = names or [str(number) for number in range(count)]
    if count > len(names):
        raise DataError(
            f"--dataset={dataset} has the label {count - 1} and names of {len(names)} classes; fix "
            "its labels"
        )
    parts = [([_encoded(x, dataset, form) for x in images], labels) for images, labels in parts]
    # Nested lists have no fixed range: their largest value becomes white.
    numbers = [np.max(x) for x in parts[0][0] if not isinstance(x, PIL.Image.Image)]
    white = max(numbers, default=255)
    loaded, kinds = [], set()
    for images, labels in parts:
        pictures = [x if isinstance(x, PIL.Image.Image) else _picture(x, white) for x in images]
        kinds |= {channels_of(picture) for picture in pictures}
        if len(kinds) > 1:
            raise DataError(
                f"--dataset={dataset} has grey images and colored ones; use images of one kind"
            )
        form = form._replace(channels=form.channels or next(iter(kinds)))
        loaded.append((np.stack([resized(picture, form) for picture in pictures]), labels))
    return names, form, *loaded


def _encoded(picture: Any, dataset: str, form: Form) -> Any:
    """A picture that Parquet files have as bytes, without `datasets` knowing; others as they are."""
    content = picture.get("bytes") if isinstance(picture, dict) else picture
    if not isinstance(content, bytes):
        return picture
    try:
        return PIL.Image.open(io.BytesIO(content))
    except (OSError, SyntaxError, ValueError):
        raise broken(dataset, "a picture of a row") from None


def _picture(numbers: Any, white: float) -> PIL.Image.Image:
    """A picture of nested lists [H, W] or [H, W, 3]."""
    pixels = np.asarray(numbers, np.float32) * (255 / max(white, 1e-6))
    return PIL.Image.fromarray(pixels.clip(0, 255).round().astype(np.uint8))


# ---- one picture ---------------------------------------------------------------------------------


def channels_of(picture: PIL.Image.Image) -> int:
    """1 if a picture is grey, 3 if it is colored; transparency does not count."""
    return 1 if picture.mode[0] in "1LFI" else 3


def upright(picture: PIL.Image.Image, channels: int) -> PIL.Image.Image:
    """A picture as it was held, grey or colored."""
    # A phone stores how it was held; `datasets` has turned the pictures of hf: datasets already.
    picture = PIL.ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I"):  # 16 bits
        picture = PIL.Image.fromarray((np.asarray(picture) // 257).clip(0, 255).astype(np.uint8))
    if "transparency" in picture.info:
        picture = picture.convert("RGBA")
    mode = "L" if channels == 1 else "RGB"
    return picture if picture.mode == mode else picture.convert(mode)


def resized(picture: PIL.Image.Image, form: Form) -> np.ndarray:
    """The pixels of a picture, upright and resized: uint8 [size, size, channels]."""
    size = form.size
    picture = upright(picture, form.channels)
    if form.center_crop:  # as transformers does
        shortest = min(picture.size)
        width, height = (int(size * side / shortest) for side in picture.size)
        picture = picture.resize((width, height), FILTERS[form.resample])
        left, top = (width - size) // 2, (height - size) // 2
        picture = picture.crop((left, top, left + size, top + size))
    if picture.size != (size, size):
        picture = picture.resize((size, size), FILTERS[form.resample])
    return np.asarray(picture).reshape(size, size, form.channels)


def decode(
    file: pathlib.Path | BinaryIO, form: AnyForm, dataset: str, name: pathlib.Path | str
) -> np.ndarray:
    """The pixels of an encoded picture, resized. Raises DataError, which names it."""
    try:
        with PIL.Image.open(file) as picture:
            return form.resized(picture)
    except (OSError, SyntaxError, ValueError):  # Pillow raises these for broken files
        raise broken(dataset, name) from None


def broken(dataset: str, file: pathlib.Path | str) -> DataError:
    """The DataError for a picture that can't be decoded."""
    return DataError(f"--dataset={dataset}: {file} is not a readable picture; replace or remove it")
