"""A bucket in this process: gcp-storage-emulator, and a proxy in front of it.

The emulator ignores preconditions, does not say which generation it sends, and never fails. The proxy
enforces ifGenerationMatch (412), and a test can have it refuse, delay or cut off what it likes, or look
at the bucket before each change.
"""

import contextlib
import http.client
import http.server
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from gcp_storage_emulator.server import create_server

NAME = "zoo"
CUT = "cut"  # an answer: the connection ends half-way
VARIABLES = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")


class Request(NamedTuple):
    """What a client asks for."""

    method: str
    name: str  # of the object; of a copy, the new one; "" of a listing or a batch
    query: dict[str, list[str]]
    body: bytes

    @property
    def changes(self) -> bool:
        """Whether it changes the bucket. A part of a resumable upload may be its last."""
        return self.method != "GET"


Answer = int | float | str | None  # a status; seconds to wait before the real answer; CUT; as usual


class Bucket:
    """gs://zoo. `fault` is asked before each request, by several threads at once."""

    def __init__(self):
        logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
        logging.getLogger("api").setLevel(logging.CRITICAL)
        self._server = http.server.ThreadingHTTPServer(("localhost", 0), _proxy(self))
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # of clients that are dead
        self.port = self._server.server_port
        self._emulator = create_server("localhost", 0, in_memory=True, default_bucket=NAME)
        self.storage = self._emulator._storage
        self.storage._write_config_to_file = lambda: None  # of all objects, at each change
        self.storage.buckets[NAME]["softDeletePolicy"] = {"retentionDurationSeconds": 0}
        self.lock = threading.RLock()
        self.fault: Callable[[Request], Answer] = lambda request: None
        self.requests: list[Request] = []

    def __enter__(self) -> "Bucket":
        self._emulator.start()
        api = self._emulator._api
        while api._httpd is None:
            time.sleep(0.001)
        self.behind = api._httpd.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._emulator.stop()

    @property
    def env(self) -> dict[str, str]:
        """With which clients find it."""
        return dict.fromkeys(VARIABLES, f"http://localhost:{self.port}")

    @contextlib.contextmanager
    def failing(self, fault: Callable[[Request], Answer]) -> Iterator[None]:
        """Inside, requests are answered as `fault` says."""
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
        """All of it, for `reset`."""
        with self.lock:
            return dict(self.storage.objects.get(NAME, {})), dict(self.storage._store._files)

    def reset(self, state: tuple[dict, dict] = ({}, {})) -> None:
        with self.lock:
            self.storage.objects[NAME], self.storage._store._files = map(dict, state)

    def generation(self, name: str) -> int:
        """Of an object; 0 where there is none."""
        return int(self.storage.objects.get(NAME, {}).get(name, {"generation": 0})["generation"])

    # ---- the proxy -------------------------------------------------------------------------------

    def forward(self, method: str, path: str, headers, body: bytes):
        """The emulator's answer: (status, headers, body)."""
        connection = http.client.HTTPConnection("localhost", self.behind, timeout=60)
        dropped = ("connection", "content-length", "transfer-encoding", "expect")
        kept = {k: v for k, v in headers.items() if k.lower() not in dropped}
        connection.request(method, path, body, kept | {"Content-Length": str(len(body))})
        answer = connection.getresponse()
        dropped = ("date", "server", "connection", "content-length")
        kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in dropped]
        content = answer.read()
        connection.close()
        return answer.status, kept, content

    def answer(self, request: Request, path: str, headers):
        """One after another: a precondition and the change that it is of are one."""
        with self.lock:
            wanted = request.query.get("ifGenerationMatch")
            if wanted and int(wanted[0]) != self.generation(request.name):
                return error(412, "conditionNotMet")
            seen = request.query.get("ifGenerationNotMatch")
            if request.method == "GET" and seen and int(seen[0]) == self.generation(request.name):
                return error(304, "notModified")
            status, sent, content = self.forward(request.method, path, headers, request.body)
            if request.query.get("alt") == ["media"]:
                sent.append(("X-Goog-Generation", str(self.generation(request.name))))
            return status, sent, content


def error(status: int, reason: str):
    content = {"error": {"code": status, "message": reason, "errors": [{"reason": reason}]}}
    return status, [("Content-Type", "application/json")], json.dumps(content).encode()


def named(path: str, query: dict[str, list[str]], body: bytes) -> str:
    """The object that a request is about."""
    if "name" in query:
        return query["name"][0]
    if query.get("uploadType") == ["multipart"]:
        return json.loads(re.search(rb'\{.*?"name".*?\}\s', body, re.DOTALL)[0])["name"]
    return unquote(path.rpartition("/o/")[2]) if "/o/" in path else ""


def _proxy(bucket: Bucket) -> type:
    class Proxy(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # clients keep their connections
        disable_nagle_algorithm = True

        def handle_any(self):
            url, body = urlsplit(self.path), self._body()
            query = parse_qs(url.query)
            request = Request(self.command, named(url.path, query, body), query, body)
            bucket.requests.append(request)
            said = bucket.fault(request)
            if said == CUT:
                self.close_connection = True
                self.connection.close()
                return
            if isinstance(said, float):
                time.sleep(said)
            status, headers, content = (
                error(said, "injected")
                if isinstance(said, int)
                else bucket.answer(request, self.path, self.headers)
            )
            self.send_response(status)
            for key, value in headers:
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client may be dead
                self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = handle_any  # noqa: N815

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def log_message(self, *_):
            pass

    return Proxy


def main() -> None:
    """A bucket to try commands with, by hand, until it is interrupted."""
    with Bucket() as bucket:
        print(*(f"export {key}={value}" for key, value in bucket.env.items()), sep="\n", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
