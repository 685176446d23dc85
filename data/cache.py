"""Latents and text embeddings kept by content, so that no run encodes the same thing twice.

    cache = Cache(config.cache)
    key = latent_key(sample, bucket, fps, vae="haar-4x8x8-48 float32", decoder="data.decode:decode_clip 1")
    latent = cache.get("latents", key)           # None: not there, encode and put it
    cache.put("latents", key, latent)

A key names everything the result depends on: the bytes of the clip, the frames taken from them, the shape, the
decoder, the encoder. So folders may be shared by runs, by machines and by bucket tables, and a stopped run goes on
where it was. A latent of 81 frames at 480x832 is 4 MB, more than its clip: the cache saves encoder time, not space.

An entry is a `.npy` file with a checksum at its end. One that is torn, changed or not of the wanted shape is a miss:
it is removed, and the caller encodes again.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import queue
import shutil
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from data.config import CacheConfig, DataConfig
from data.types import Bucket, DataItem, SampleRef
from ops.whole_file import whole_file

log = logging.getLogger(__name__)

EntryKind = Literal["latents", "text"]
QUEUE_BYTES = 256 << 20  # entries that wait to be written; a slow disk costs entries, not memory
FAILURES_IN_A_ROW = 8  # after this many failed writes the cache takes no more entries
FOR_GOOD = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)  # the next entry would fail, too
_SEAL = b"crc1"


def latent_key(sample: SampleRef, bucket: Bucket, fps: float, vae: str, decoder: str, crop: bool = False) -> str:
    """64 hex digits. `vae` names the encoder with its files and dtype, `decoder` the decoder with its version."""
    return _digest("latent", sample.content, str(bucket), sample.start_frame, fps, crop, vae, decoder)


def latent_keys(item: DataItem, config: DataConfig, vae: str) -> tuple[str, ...]:
    """Names of the latents of an item's samples."""
    decoder, crop = _decoder_of(config), item.job.crop
    return tuple(latent_key(sample, item.bucket, config.fps, vae, decoder, crop) for sample in item.samples)


def text_key(caption: str, encoder: str, max_length: int, frame: str = "") -> str:
    """64 hex digits; equal captions share an embedding. `frame` names the first frame where the encoder sees it."""
    return _digest("text", caption, encoder, max_length, *([frame] if frame else []))


def frame_keys(item: DataItem, config: DataConfig) -> tuple[str, ...]:
    """Names of the first frames of an item's samples, 64 hex digits each."""
    decoder, crop = _decoder_of(config), item.job.crop
    return tuple(
        _digest("frame", sample.content, str(item.bucket), sample.start_frame, config.fps, crop, decoder)
        for sample in item.samples
    )


def _decoder_of(config: DataConfig) -> str:
    from data.decode import DECODE_VERSION  # imports PyAV; workers that only read the cache do not need it

    return f"{config.engine.decoder} {DECODE_VERSION}"


class Cache:
    """A folder of `.npy` files. Any number of processes read and write it at the same time."""

    def __init__(self, config: CacheConfig) -> None:
        if not config.path:
            raise ValueError("data.cache.path is empty: there is no cache to open. Give a folder.")
        self.root, self.config = Path(config.path).expanduser(), config
        self.hits = self.misses = self.written = self.failed = 0
        self._in_a_row = 0
        self._full = False

    def has(self, kind: EntryKind, key: str) -> bool:
        return self._path(kind, key).is_file()

    def get(self, kind: EntryKind, key: str, rows: range | None = None, width: int = 0) -> np.ndarray | None:
        """The array, or None: not there, not readable, torn, or not float32 of [one of `rows`, `width`] where that is
        given. An entry that cannot be used is removed, so that it can be written again."""
        path = self._path(kind, key)
        try:
            array = _read(path)
            if rows is not None and (
                array.dtype != np.float32 or array.ndim != 2 or len(array) not in rows or array.shape[1] != width
            ):
                raise ValueError(
                    f"{array.dtype} {list(array.shape)} where float32 [{rows.start}..{rows.stop - 1}, "
                    f"{width}] was wanted"
                )
        except FileNotFoundError:
            self.misses += 1
            return None
        except (ValueError, EOFError) as error:
            log.warning("cache: %s is damaged (%s); it is encoded again", path, error)
            self._remove(path)
        except OSError as error:
            log.warning("cache: %s cannot be read (%s); it is encoded again", path, error)
        else:
            self.hits += 1
            return array
        self.misses += 1
        return None

    def put(self, kind: EntryKind, key: str, array: np.ndarray) -> bool:
        """Keep an array. False when it could not be: training goes on without."""
        path = self._path(kind, key)
        if self._full:
            return False
        try:
            if path.is_file():
                return True
            path.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(path.parent).free - array.nbytes < self.config.min_free_gib * 2**30:
                return self._stop(f"less than data.cache.min_free_gib {self.config.min_free_gib:g} GiB would stay free")
            _write(path, array)
        except OSError as error:
            return self._failed_by(error)
        self.written += 1
        self._in_a_row = 0
        return True

    def size(self, kind: EntryKind) -> tuple[int, int]:
        """Number of entries and their bytes."""
        sizes = [path.stat().st_size for path in (self.root / kind).glob("*/*.npy")]
        return len(sizes), sum(sizes)

    def _path(self, kind: EntryKind, key: str) -> Path:
        return self.root / kind / key[:2] / f"{key}.npy"

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cache: %s cannot be removed (%s); it will be encoded again each time", path, error)

    def _failed_by(self, error: OSError) -> bool:
        self.failed += 1
        self._in_a_row += 1
        if error.errno in FOR_GOOD or self._in_a_row >= FAILURES_IN_A_ROW:
            return self._stop(str(error))
        log.warning("cache %s: an entry was not written: %s (%d so far)", self.root, error, self.failed)
        return False

    def _stop(self, why: str) -> bool:
        log.warning(
            "cache %s takes no more entries: %s. Free space, see to its permissions, or set data.cache.path to "
            "another disk.",
            self.root,
            why,
        )
        self._full = True
        return False


def kept_kinds(config: CacheConfig) -> tuple[EntryKind, ...]:
    """Kinds of which a cache with these settings has an entry, if it is asked for them."""
    if not config.path:
        return ()
    root, asked = Path(config.path).expanduser(), {"latents": config.latents, "text": config.text}
    kinds: tuple[EntryKind, ...] = ("latents", "text")
    return tuple(kind for kind in kinds if asked[kind] and any((root / kind).glob("*/*.npy")))


class CacheWriter:
    """Writes entries during the next cascades, in a thread of its own. What does not fit its queue is not kept."""

    def __init__(self, cache: Cache, most_bytes: int = QUEUE_BYTES) -> None:
        self.cache, self.counts = cache, Counter[str]()  # of entries: kept, failed, dropped
        self._most, self._waiting = most_bytes, 0
        self._queue: queue.SimpleQueue[tuple[EntryKind, str, Callable[[], np.ndarray], int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._write_all, name="cache", daemon=True).start()

    def submit(self, kind: EntryKind, key: str, array: np.ndarray) -> bool:
        """Returns at once; False when too much waits already. The array must not be changed after."""
        return self.submit_later(kind, key, lambda: array, array.nbytes)

    def submit_later(self, kind: EntryKind, key: str, ready: Callable[[], np.ndarray], num_bytes: int) -> bool:
        """The same of an array of `num_bytes` that is on its way: `ready` returns it when it has come."""
        with self._lock:
            if self._waiting and self._waiting + num_bytes > self._most:
                self.counts["dropped"] += 1
                if self.counts["dropped"] == 1:
                    log.warning(
                        "cache %s is slower than the encoders: some entries are not kept, and are encoded "
                        "again when they are wanted",
                        self.cache.root,
                    )
                return False
            self._waiting += num_bytes
        self._queue.put((kind, key, ready, num_bytes))
        return True

    def _write_all(self) -> None:
        while True:
            kind, key, ready, num_bytes = self._queue.get()
            try:
                kept = self.cache.put(kind, key, ready())
            except Exception:  # the thread must live: it is the only one that empties the queue
                log.exception("cache %s: an entry was not written", self.cache.root)
                kept = False
            with self._lock:
                self.counts["kept" if kept else "failed"] += 1
                self._waiting -= num_bytes


def _read(path: Path) -> np.ndarray:
    """Raises ValueError or EOFError for a file that is not what `_write` made."""
    data = path.read_bytes()
    body, seal = data[: -len(_SEAL) - 4], data[-len(_SEAL) - 4 :]
    if seal != _sealed(body):
        raise ValueError("its checksum is wrong")
    return np.load(io.BytesIO(body), allow_pickle=False)


def _write(path: Path, array: np.ndarray) -> None:
    """Written whole or left as it was, also after a power cut."""
    body = io.BytesIO()
    np.save(body, array, allow_pickle=False)
    with whole_file(path, synced=True) as part, part.open("wb") as file:
        file.write(body.getbuffer())
        file.write(_sealed(body.getbuffer()))


def _sealed(body: bytes | memoryview) -> bytes:
    return _SEAL + zlib.crc32(body).to_bytes(4, "little")


def _digest(*fields: str | float) -> str:
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()
