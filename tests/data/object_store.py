"""An S3 service in this process for PyArrow's client: objects by `bucket/key`, what was asked, faults on request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the service saw it."""

    connection: int
    method: str
    path: str  # bucket/key
    range: str  # of bytes, "0-99"; empty: all of them
    signed_by: str  # the access key


@dataclass(slots=True)
class ObjectStore:
    """`fault` may answer a request with (status, XML code) instead of the object. Lists say `second`, a fraction too,
    of when objects were written; an answer about one of them has whole seconds."""

    endpoint: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    fault: Callable[[Asked], tuple[int, str] | None] = lambda asked: None
    connections: int = 0
    second: str = "00.000"

    def of(self, method: str) -> list[Asked]:
        return [asked for asked in self.asked if asked.method == method]


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    store = ObjectStore()

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            store.connections += 1
            self.connection_number = store.connections

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            parts = urlsplit(self.path)
            wanted = self.headers.get("Range", "").removeprefix("bytes=")
            signed = self.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]
            path = unquote(parts.path).strip("/") if "list-type" in parts.query else unquote(parts.path)[1:]
            asked = Asked(self.connection_number, self.command, path, wanted, signed)
            store.asked.append(asked)
            if fault := store.fault(asked):
                self._send(fault[0], f"<Error><Code>{fault[1]}</Code><Message>as the test wants</Message></Error>")
            elif "list-type" in parts.query:
                self._list(path, parse_qs(parts.query))
            elif asked.path not in store.objects:
                self._send(404, "<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")
            else:
                data = store.objects[asked.path]
                first, _, last = wanted.partition("-")
                self._send(206 if wanted else 200, data[int(first or 0) : int(last) + 1 if last else None])

        def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
            prefix = f"{bucket}/{query.get('prefix', [''])[0]}"
            found = [
                f"<Contents><Key>{escape(path.partition('/')[2])}</Key><Size>{len(data)}</Size>"
                f"<LastModified>2026-01-01T00:00:{store.second}Z</LastModified></Contents>"
                for path, data in sorted(store.objects.items())
                if path.startswith(prefix)
            ]
            about = f"<KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated>"
            self._send(200, f"<ListBucketResult>{about}{''.join(found)}</ListBucketResult>")

        def _send(self, status: int, body: bytes | str) -> None:
            data = body.encode() if isinstance(body, str) else body
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Last-Modified", formatdate(1_767_225_600, usegmt=True))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingTCPServer(("127.0.0.1", 0), Answers) as server:  # HTTPServer would ask for the name of this host
        server.daemon_threads = True
        store.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield store
        finally:
            server.shutdown()
            thread.join()
