"""A bucket in this process: gcp-storage-emulator behind a handler that adds what it lacks.

The emulator ignores preconditions, does not say which generation it sends, and never fails. Here
ifGenerationMatch is enforced (412), and a test can refuse, delay or cut off what it likes, and look at
the bucket after each change.
"""

import contextlib
import http.server
import io
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from gcp_storage_emulator import server
from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.storage import Storage

NAME = "zoo"
CUT, LOST = "cut", "lost"  # answers: the connection ends before the change, or after it
VARIABLES = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")


class Request(NamedTuple):
    """A client's HTTP request."""

    method: str
    name: str  # of the object; of a copy, the new one; "" of a listing or a batch
    query: dict[str, list[str]]
    body: bytes

    @property
    def changes(self) -> bool:
        """Whether it changes the bucket. Any part of a resumable upload may be the last."""
        return self.method != "GET"


Answer = (
    int | float | str | None
)  # a status; seconds to wait before the real one; CUT, LOST; as usual


class Bucket:
    """The bucket gs://zoo. Several threads call `fault`, which sees each request first."""

    def __init__(self):
        logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
        logging.getLogger("api").setLevel(logging.CRITICAL)
        self.storage = Storage(use_memory_fs=True)
        self.storage._write_config_to_file = lambda: None  # of all objects, at each change
        buckets.create_bucket(NAME, self.storage)
        self.storage.buckets[NAME]["softDeletePolicy"] = {"retentionDurationSeconds": 0}
        self.lock = threading.RLock()
        self.fault: Callable[[Request], Answer] = lambda request: None
        self.requests: list[Request] = []
        self.history: list[tuple[dict, dict]] | None = (
            None  # the bucket after each change; None: off
        )
        self._server = _Server(("localhost", 0), _handler(self))
        self.port = self._server.server_port

    def __enter__(self) -> "Bucket":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def env(self) -> dict[str, str]:
        """Environment variables with which clients find it."""
        return dict.fromkeys(VARIABLES, f"http://localhost:{self.port}")

    @contextlib.contextmanager
    def failing(self, fault: Callable[[Request], Answer]) -> Iterator[None]:
        """Context in which `fault` decides how requests are answered."""
        self.fault = fault
        try:
            yield
        finally:
            self.fault = lambda request: None

    # ---- what is in it, seen past the proxy ------------------------------------------------------

    def names(self, prefix: str = "") -> list[str]:
        with self.lock:
            return sorted(n for n in self.storage.objects.get(NAME, {}) if n.startswith(prefix))

    def read(self, name: str) -> bytes:
        return self.storage.get_file(NAME, name)

    def snapshot(self) -> tuple[dict, dict]:
        """Returns the whole content, for `reset`."""
        with self.lock:
            return dict(self.storage.objects.get(NAME, {})), dict(self.storage._store._files)

    def reset(self, state: tuple[dict, dict] = ({}, {})) -> None:
        self.requests.clear()
        with self.lock:
            self.storage.objects[NAME], self.storage._store._files = map(dict, state)

    def generation(self, name: str) -> int:
        """Generation of an object; 0 if it doesn't exist."""
        return int(self.storage.objects.get(NAME, {}).get(name, {"generation": 0})["generation"])

    def refuses(self, request: Request) -> int:
        """HTTP status if the request's precondition fails; 0 if it holds."""
        now, wanted = self.generation(request.name), request.query.get("ifGenerationMatch")
        if wanted and int(wanted[0]) != now:
            return 412
        seen = request.query.get("ifGenerationNotMatch")
        return 304 if request.method == "GET" and seen and int(seen[0]) == now else 0


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # clients connect many at once, and wait a second if there is no room

    def handle_error(self, *_):
        """Ignores errors from clients that died."""


def named(path: str, query: dict[str, list[str]], body: bytes) -> str:
    """Returns the object that a request is about."""
    if "name" in query:
        return query["name"][0]
    if query.get("uploadType") == ["multipart"]:
        return json.loads(re.search(rb'\{.*?"name".*?\}\s', body, re.DOTALL)[0])["name"]
    return unquote(path.rpartition("/o/")[2]) if "/o/" in path else ""


def _handler(bucket: Bucket) -> type:
    class Handler(server.RequestHandler):
        """The emulator's handler, plus preconditions, generations and faults."""

        protocol_version = "HTTP/1.1"  # clients keep their connections
        disable_nagle_algorithm = True
        _sent: Request | None = None  # what is being answered

        def __init__(self, *args):
            super().__init__(bucket.storage, *args)

        def answer(self):
            url, body = urlsplit(self.path), self._body()
            query = parse_qs(url.query)
            request = Request(self.command, named(url.path, query, body), query, body)
            bucket.requests.append(request)
            said = bucket.fault(request)
            if said == CUT:
                self._hang_up()
                return
            if isinstance(said, float):
                time.sleep(said)
            # One after another: a precondition and the change that it is of are one.
            with bucket.lock:
                status = said if isinstance(said, int) else bucket.refuses(request)
                if status:
                    self._refuse(status)
                    return
                self._sent = request
                files, self.rfile = (self.rfile, self.wfile), io.BytesIO(body)
                self.wfile = io.BytesIO() if said == LOST else self.wfile
                try:
                    server.Router(self).handle(self.command)
                finally:
                    self.rfile, self.wfile = files
                if request.changes and bucket.history is not None:
                    bucket.history.append(bucket.snapshot())
            if said == LOST:
                self._hang_up()

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = answer

        def end_headers(self):
            if self._sent and self._sent.query.get("alt") == ["media"]:
                self.send_header("X-Goog-Generation", str(bucket.generation(self._sent.name)))
            super().end_headers()

        def _hang_up(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

        def _refuse(self, status: int) -> None:
            self._sent = None
            reason = {"code": status, "message": "refused", "errors": [{"reason": "refused"}]}
            content = b"" if status == 304 else json.dumps({"error": reason}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            if content:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            del self.headers["Transfer-Encoding"]
            self.headers["Content-Length"] = str(sum(map(len, parts)))
            return b"".join(parts)

    return Handler


def main() -> None:
    """Serves a bucket to try commands with, until interrupted."""
    with Bucket() as bucket:
        print(*(f"export {key}={value}" for key, value in bucket.env.items()), sep="\n", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
