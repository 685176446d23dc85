"""Data of `hf://` URIs: Hugging Face's own file system against a service of this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from urllib.parse import unquote, urlsplit

import pytest

from tests.data.making import clip, sample, shard

ABOUT = {"id": "me/clips", "sha": "0" * 40, "private": False, "downloads": 0, "likes": 0, "tags": [], "siblings": []}
# in a process of its own: the client reads its settings when it is imported
INDEX = """
import sys
from pathlib import Path
from data import storage
from tests.data.making import index_of
storage.REMOTE_RETRY_S = 0.01
index, _ = index_of(sys.argv[1], Path(sys.argv[2]))
print(index.num_ok, len(index.row(0).path))
"""


@dataclass(slots=True)
class Hub:
    """Files of the data set me/clips, and the bytes that were asked for."""

    endpoint: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    fetched: int = 0


@contextmanager
def hub_of(files: dict[str, bytes]) -> Iterator[Hub]:
    hub = Hub(files=files)

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            inside = path.partition("/resolve/main/")[2]
            if "/tree/main" in path:
                folder = path.partition("/tree/main")[2].strip("/")
                found = [self._entry(name) for name in self._names() if name.rpartition("/")[0] == folder]
                self._send(200, json.dumps(found).encode())
            elif path.startswith("/api/"):
                self._send(200, json.dumps(ABOUT).encode())
            else:
                first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
                data = hub.files[inside][int(first) : int(last) + 1]
                hub.fetched += len(data)
                self._send(206, data)

        def _names(self) -> set[str]:
            """Files, and the folders that they are in."""
            return {*hub.files, *(name.rpartition("/")[0] for name in hub.files)}

        def _entry(self, name: str) -> dict[str, object]:
            kind = "file" if name in hub.files else "directory"
            return {"type": kind, "path": name, "oid": "0" * 40, "size": len(hub.files.get(name, b""))}

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingTCPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads = True
        hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def long_clips(count: int) -> bytes:
    """A shard of clips with 2 MiB of frames each, all of it in a box that nothing reads."""
    box = (2 << 20).to_bytes(4, "big") + b"free" + bytes((2 << 20) - 8)
    return shard([member for number in range(count) for member in sample(number, mp4=clip() + box)])


def index(endpoint: str, uri: str, folder: Path) -> subprocess.CompletedProcess[str]:
    told = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", INDEX, uri, str(folder)]
    return subprocess.run(command, env=os.environ | told, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("uri", ["hf://datasets/me/clips/shards", "hf://datasets/me/clips/shards/{a,b}.tar"])
def test_an_index_of_the_hub_fetches_headers_alone(uri: str, tmp_path: Path) -> None:
    """Hugging Face's client reads 5 MiB ahead of each of them, together more than the shards hold."""
    with hub_of({"shards/a.tar": long_clips(6), "shards/b.tar": long_clips(6)}) as hub:
        found = index(hub.endpoint, uri, tmp_path)
        assert found.stdout.split()[:1] == ["12"], found.stderr[-2000:]
        assert hub.fetched < 0.7 * sum(map(len, hub.files.values()))


def test_a_hub_that_cannot_be_reached_is_storage_that_failed(tmp_path: Path) -> None:
    """Its client raises errors of the HTTP library below it, which are no OSErrors."""
    failed = index("http://127.0.0.1:1", "hf://datasets/me/clips/shards", tmp_path)
    assert failed.returncode == 1
    last = failed.stderr.strip().splitlines()[-1]
    assert last.startswith("data.errors.DataUnreachable: ") and "ConnectError" in last and "5 attempts" in last
