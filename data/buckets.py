"""Objects in Google Cloud Storage, gs://BUCKET/NAME, as paths or as copies in the cache.

Paths are etils.epath's, which have pathlib's methods; gcsfs sends the requests and retries them.
"""

import errno
import functools
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import pathlib
import re
import shutil
import sys
import tempfile
import threading
from typing import Any

from data import DataError, cache_dir

MAGIC = re.compile(r"[*?\[]")
SECONDS = 5  # limit for a bucket's first response, retries included
_ERRNOS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EROFS)
LOGIN = "run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS"


def remote(name: Any) -> bool:
    """Whether a name or path is SCHEME://…, so not on this machine's disks."""
    return bool(re.match(r"[A-Za-z][\w+.-]*://", str(name)))


def path(name: str, what: str) -> Any:
    """The path of a name in a bucket; checks that the bucket exists and responds.

    Args:
      what: the user's name for it, for messages: "--workdir=gs://bucket/run".

    Raises DataError, within SECONDS, if the bucket can't be used.
    """
    if magic := MAGIC.search(name):
        raise DataError(f"{what} has {magic[0]!r}, which is for patterns; use another name")
    if "#" in name:  # the arrays of all checkpoints would become one object
        raise DataError(f"{what} has '#', where TensorStore ends a name; use another name")
    _check(name, what)
    from etils import epath

    return epath.Path(name.rstrip("/"))


def _check(name: str, what: str) -> None:
    """Raises DataError if the name is invalid, or its bucket does not respond."""
    scheme, _, rest = name.partition("://")
    bucket, _, inside = rest.partition("/")
    if scheme != "gs":
        raise DataError(
            f"{what} is on {scheme}://, which can't be used; use gs://BUCKET/NAME, or a local path"
        )
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", bucket) or not inside.strip("/"):
        raise DataError(f"{what} is not gs://BUCKET/NAME; use, for example, gs://my-bucket/runs/a")
    if ".." in inside.split("/"):
        raise DataError(f"{what} has '..', which is an ordinary name in a bucket; leave it out")
    if importlib.util.find_spec("gcsfs") is None:
        raise DataError(f"{what} needs gcsfs; run pip install -e '.[gcs]'")
    if problem := _problem(bucket):
        raise DataError(f"{what}: {problem}")


@functools.cache
def filesystem() -> Any:
    """The gcsfs file system, configured for epath as well."""
    _import()
    import fsspec.config

    # Others write too, above all TensorStore, so cached listings would be wrong.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # errors come back as exceptions
    return fsspec.filesystem("gcs")


def _import() -> None:
    # Otherwise gcsfs asks for each bucket's type by gRPC, which needs more rights and retries for
    # minutes.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    importlib.import_module("gcsfs")


@functools.cache
def _problem(bucket: str) -> str:
    """Why a bucket can't be read, and the fix; "" if it can."""
    answers: dict[str, Any] = {}

    def ask() -> None:
        try:
            files = filesystem()  # looks for credentials
            answers["has_credentials"] = files.credentials.credentials is not None
            files.call("GET", "b/{}/o", bucket, maxResults=1)
            answers["error"] = None
        except Exception as error:
            answers["error"] = error

    _import()  # SECONDS don't include it: it takes seconds on a busy machine
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SECONDS)
    error = answers.get("error", TimeoutError(f"no answer in {SECONDS} s"))
    return explain(error, bucket, answers.get("has_credentials", False)) if error else ""


def explain(error: Exception, bucket: str, has_credentials: bool) -> str:
    """The cause of an error when a bucket's objects were listed, and the fix."""
    if isinstance(error, FileNotFoundError):
        return f"there is no bucket {bucket!r}; create it, or check its name"
    if not has_credentials:
        return f"there are no Google credentials ({reason(error)}); {LOGIN}"
    if getattr(error, "code", 0) == 401 or str(error).startswith("Forbidden"):
        return f"these Google credentials may not list it ({reason(error)}); use others, or {LOGIN}"
    return f"Google Cloud Storage can't be reached ({reason(error)}); check the network"


def post(path: pathlib.Path, **request) -> Any:
    """POSTs to an object's upload endpoint, and returns the response. Raises `errors`.

    Args:
      request: arguments of gcsfs's `call`: query parameters, `data` or `json`.
    """
    files = filesystem()
    bucket, name, _ = files.split_path(str(path))
    where = files.base.replace("/storage/v1/", "/upload/storage/v1/b/{}/o")
    return files.call("POST", where, bucket, name=name, **request)


def request(method: str, path: pathlib.Path, **query: str) -> tuple[Any, bytes]:
    """Sends a request about an object; returns (headers, content). Raises `errors`."""
    bucket, name, _ = filesystem().split_path(str(path))
    return filesystem().call(method, "b/{}/o/{}", bucket, name, **query)


# ---- errors --------------------------------------------------------------------------------------


def errors() -> tuple[type[Exception], ...]:
    """The exceptions that reading and writing files can raise, in buckets too; for `except`."""
    if "gcsfs" not in sys.modules:
        return (OSError,)
    from gcsfs import retry

    return (OSError, retry.HttpError, *retry.RETRIABLE_EXCEPTIONS)


def reason(error: BaseException) -> str:
    """The reason for an error in one line, in the operating system's words if it has any."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if known := next(filter(str(error).__contains__, map(os.strerror, _ERRNOS)), None):
        return known  # TensorStore's messages have these words
    if str(error).startswith("Forbidden"):
        return "403 Forbidden"
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return re.split(r" \[(?:http_response_body|tensorstore_spec)=", text)[0].rstrip(".")


# ---- copies in the cache -------------------------------------------------------------------------


def local(name: str, what: str) -> pathlib.Path:
    """The local path of a name. Objects in a bucket are first copied into the cache, once.

    Args:
      what: the user's name for it, for messages.

    Raises DataError if the bucket has no such object, or it can't be read or stored.
    """
    if not remote(name):
        return pathlib.Path(os.path.expanduser(name))
    root, objects = _listing(name, what)
    folder = _copied(root, objects, what)
    is_object = root != name.removeprefix("gs://").rstrip("/")
    return folder / next(iter(objects)) if is_object else folder


def files(name: str, what: str) -> list[pathlib.Path]:
    """Local copies of the object of this name, or of those in a folder or matching a pattern.

    Hidden objects in a folder are left out, like hidden files. Raises DataError.
    """
    root, objects = _listing(name, what)
    is_object = [f"{root}/{inner}" for inner in objects] == [name.removeprefix("gs://")]
    shown = {k: facts for k, facts in objects.items() if is_object or not is_hidden(k)}
    if not shown:
        raise DataError(f"{what} has only hidden files, such as {next(iter(objects))}; use others")
    folder = _copied(root, shown, what)
    return [folder / inner for inner in shown]


def is_hidden(path: str | pathlib.PurePath) -> bool:
    """Whether a file, or one of the folders on this relative path, has a name that begins with a dot."""
    return any(part.startswith(".") for part in pathlib.PurePosixPath(path).parts)


def _listing(name: str, what: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """Lists matching objects: (folder in the bucket, relative name → gcsfs's facts), sorted."""
    _check(name, what)
    full = name.removeprefix("gs://").rstrip("/")
    magic = MAGIC.search(full)
    root = full[: magic.start()].rpartition("/")[0] if magic else full
    try:
        look = filesystem().glob if magic else filesystem().find
        objects = look(full, detail=True).items()
        objects = {k: v for k, v in objects if v["type"] == "file" and not k.endswith("/")}
    except errors() as error:
        raise DataError(f"{what} can't be read ({reason(error)}); use another") from None
    if set(objects) == {full}:
        root = full.rpartition("/")[0]
    objects = {k.removeprefix(f"{root}/"): objects[k] for k in sorted(objects)}
    if not objects:
        raise DataError(f"{what} does not exist; check the name, and quote a pattern in a shell")
    for inner in objects:
        if not {"..", "", "."}.isdisjoint(inner.split("/")):
            raise DataError(
                f"{what} has an object {inner!r}, which can't be a file name; rename it"
            )
    return root, objects


def _copied(root: str, objects: dict[str, dict[str, Any]], what: str) -> pathlib.Path:
    """Copies a listing's objects to a folder of the cache, unless it has them already."""
    versions = [[inner, facts["generation"], facts["size"]] for inner, facts in objects.items()]
    digest = hashlib.sha256(json.dumps([root, versions]).encode()).hexdigest()[:16]
    folder = cache_dir() / "buckets" / digest / root.rpartition("/")[2]
    if os.path.exists(folder):  # False without permission, unlike Path.exists, which raises
        return folder
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = pathlib.Path(tempfile.mkdtemp(dir=folder.parent))
        for inner, facts in objects.items():
            copy = temporary / inner
            copy.parent.mkdir(parents=True, exist_ok=True)
            filesystem().get_file(f"{root}/{inner}", str(copy))
            if copy.stat().st_size != facts["size"]:
                raise OSError(f"{inner} has {copy.stat().st_size} bytes instead of {facts['size']}")
        temporary.rename(folder)
    except errors() as error:
        if os.path.exists(folder):  # another process was first
            return folder
        raise DataError(f"{what} can't be copied to {folder.parent} ({reason(error)})") from None
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder
