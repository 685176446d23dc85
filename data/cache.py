"""Latents and text embeddings kept by content, so that no run encodes the same thing twice.

    cache = Cache(config.cache)
    key = latent_key(sample, bucket, fps, vae="haar-4x8x8-48 float32", decoder="data.decode:decode_clip 1")
    latent = cache.get("latents", key)           # None: not there, encode and put it
    cache.put("latents", key, latent)

A key names everything the result depends on: the bytes of the clip, the frames taken from them, the shape, the
decoder, the encoder. So folders may be shared by runs, by machines and by bucket tables, and a stopped run goes on
where it was. A latent of 81 frames at 480x832 is 4 MB, more than its clip: the cache saves encoder time, not space.

An entry is a `.npy` file with a checksum at its end. One that is torn, changed or not of the wanted shape is a miss:
it is removed, and the caller encodes again. A run that makes no entries itself takes them by `take`, and a clip that
cannot be decoded has a mark, `.bad`, in the place of its entry (`mark`): the reason for which it trains nothing.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import queue
import re
import shutil
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data.config import CacheConfig, DataConfig
from data.errors import DataIOError, DataUnreachable
from data.ledger import BadSample, Reason
from data.types import Bucket, Clip, DataItem, SampleRef
from ops.listing import names_in
from ops.passing import UNREACHABLE
from ops.units import GIB
from ops.whole_file import whole_file, write_whole

log = logging.getLogger(__name__)

EntryKind = Literal["latents", "text"]
QUEUE_BYTES = 256 << 20  # entries that wait to be written; a slow disk costs entries, not memory
FAILURES_IN_A_ROW = 8  # after this many failed writes the cache takes no more entries
FOR_GOOD = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)  # the next entry would fail, too
OVERHEAD_BYTES = 136  # of an entry beside its numbers: NumPy's header and the checksum
_TRIES, _RETRY_S = 4, 1.0  # of a read of `take` that storage refuses
_LISTERS = 16  # folders listed at a time: on a shared file system each takes some milliseconds
_ENTRY, _BAD = ".npy", ".bad"
_KEY = re.compile("[0-9a-f]{64}")
_KEY_BYTES = 32
_SEAL = b"crc1"


def latent_key(sample: SampleRef, bucket: Bucket, fps: float, vae: str, decoder: str, crop: bool = False) -> str:
    """64 hex digits. `vae` names the encoder with its files and dtype, `decoder` the decoder with its version."""
    return _digest("latent", sample.content, str(bucket), sample.start_frame, fps, crop, vae, decoder)


def latent_keys(item: DataItem, config: DataConfig, vae: str) -> tuple[str, ...]:
    """Names of the latents of an item's samples."""
    return tuple(
        latent_key(sample, item.bucket, config.fps, vae, _decoder_of(clip, config), item.job.crop)
        for sample, clip in zip(item.samples, item.job.clips, strict=True)
    )


def text_key(caption: str, encoder: str, max_length: int, frame: str = "") -> str:
    """64 hex digits; equal captions share an embedding. `frame` names the first frame where the encoder sees it."""
    return _digest("text", caption, encoder, max_length, *([frame] if frame else []))


def frame_keys(item: DataItem, config: DataConfig) -> tuple[str, ...]:
    """Names of the first frames of an item's samples, 64 hex digits each."""
    how = (config.fps, item.job.crop)
    return tuple(
        _digest("frame", sample.content, str(item.bucket), sample.start_frame, *how, _decoder_of(clip, config))
        for sample, clip in zip(item.samples, item.job.clips, strict=True)
    )


def _decoder_of(clip: Clip, config: DataConfig) -> str:
    # these import PyAV; who only reads the cache does not need it
    from data.decode import AVI_VERSION, DECODE_VERSION, PICTURE_VERSION, RESAMPLED_VERSION, TURNED_VERSION
    from data.media import BOX_SUFFIXES

    version = AVI_VERSION if clip.suffix == "avi" else DECODE_VERSION
    if clip.rotation and clip.suffix not in BOX_SUFFIXES:
        version = TURNED_VERSION
    if config.fps > 0:
        version = RESAMPLED_VERSION
    if clip.image:
        version = PICTURE_VERSION
    return f"{config.engine.decoder} {version}"


class EntryNames:
    """Keys of entries, in order, 32 bytes each: as strings in a set ten million took more than a GB."""

    def __init__(self, packed: bytes = b"") -> None:
        """`packed`: one after the other, in any order."""
        self.packed = np.sort(np.frombuffer(packed, dtype=f"S{_KEY_BYTES}"))

    def __len__(self) -> int:
        return len(self.packed)

    def __iter__(self) -> Iterator[str]:
        packed = self.packed.tobytes()
        return (packed[at : at + _KEY_BYTES].hex() for at in range(0, len(packed), _KEY_BYTES))

    def place(self, key: str) -> int:
        """Its number among them; -1 of one that is not there."""
        wanted = np.frombuffer(bytes.fromhex(key), dtype=self.packed.dtype)
        place = int(np.searchsorted(self.packed, wanted)[0])
        return place if place < len(self) and self.packed[place] == wanted[0] else -1

    def has(self, others: EntryNames) -> NDArray[np.bool_]:
        """Which of the others are among these."""
        if not len(self):
            return np.zeros(len(others), dtype=bool)
        places = np.minimum(np.searchsorted(self.packed, others.packed), len(self) - 1)
        return self.packed[places] == others.packed

    def digest(self) -> str:
        """Equal for equal keys."""
        return hashlib.blake2b(self.packed.tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The names of all entries of a kind, and of the clips that cannot be decoded."""

    entries: EntryNames
    bad: EntryNames

    def has_all_of(self, other: Listing) -> bool:
        """Whether no name of the other has gone; one of a clip that was bad may be an entry by now."""
        return all((self.entries.has(names) | self.bad.has(names)).all() for names in (other.entries, other.bad))

    def digest(self) -> str:
        """Equal for listings of the same entries."""
        return f"{self.entries.digest()} {self.bad.digest()}"


class Cache:
    """A folder of `.npy` files. Any number of processes read and write it at the same time."""

    def __init__(self, config: CacheConfig) -> None:
        if not config.path:
            raise ValueError("data.cache.path is empty: there is no cache to open. Give a folder.")
        self.root, self.config = Path(config.path).expanduser(), config
        self.hits = self.misses = self.written = self.failed = 0
        self._in_a_row = 0
        self.full = False  # takes no more entries
        self.why_not = ""  # the last entry that was not written

    def has(self, kind: EntryKind, key: str) -> bool:
        """Whether an entry is there; one that storage says nothing of is not, as `get` could not read it either."""
        path = self._path(kind, key)
        try:
            return path.is_file()
        except OSError as error:
            log.warning("cache: %s cannot be looked at (%s); it is encoded again", path, error)
            return False

    def get(self, kind: EntryKind, key: str, rows: range | None = None, width: int = 0) -> np.ndarray | None:
        """The array, or None: not there, not readable, torn, or not float32 of [one of `rows`, `width`] where that is
        given. An entry that cannot be used is removed, so that it can be written again."""
        path = self._path(kind, key)
        try:
            array = _read(path, rows, width)
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

    def take(self, kind: EntryKind, key: str, rows: range, width: int) -> np.ndarray:
        """The array, float32 of [one of `rows`, `width`], for a run that cannot encode it. Raises BadSample for a clip
        that is marked, and for an entry that is gone or damaged; DataIOError where storage fails, also where the whole
        folder is gone."""
        path = self._path(kind, key)
        for tries_left in range(_TRIES - 1, -1, -1):
            try:
                return _read(path, rows, width)
            except FileNotFoundError:
                if not (self.root / kind).is_dir():
                    raise DataIOError(f"{self.root / kind} is gone. Restore it, and resume.") from None
                raise self.why_absent(kind, key) from None
            except (ValueError, EOFError) as error:
                self._remove(path)  # or `heddle data cache` would take it for one that is there
                raise BadSample(Reason.NOT_CACHED, f"{path} is damaged ({error}); it trains nothing") from None
            except OSError as error:
                if not tries_left:
                    kind_of = DataUnreachable if error.errno in UNREACHABLE else DataIOError
                    raise kind_of(
                        f"{path} of the cache cannot be read: {error}. A run that ends by this can be resumed."
                    ) from error
                time.sleep(_RETRY_S)
        raise AssertionError("every try returns or raises")

    def why_absent(self, kind: EntryKind, key: str) -> BadSample:
        """What keeps samples from training for want of this entry: what the mark in its place says, if there is one."""
        path = self._path(kind, key)
        try:
            told = json.loads(path.with_suffix(_BAD).read_text(encoding="utf-8"))
            return BadSample(Reason(told["reason"]), str(told["detail"]), told["offset"])
        except (OSError, ValueError, KeyError, TypeError):
            return BadSample(Reason.NOT_CACHED, f"{path} is not there; `heddle data cache` makes it again")

    def mark(self, kind: EntryKind, key: str, error: BadSample) -> bool:
        """In the place of an entry that cannot be made, say why. Lasts until the entry is put after all. False when it
        could not be written."""
        path = self._path(kind, key).with_suffix(_BAD)
        told = {"reason": str(error.reason), "detail": error.detail, "offset": error.offset}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(told), synced=True)
        except OSError as failure:
            return self._failed_by(failure)
        return True

    def listing(self, kind: EntryKind) -> Listing:
        """By the names of all files, without a look at one."""
        folders = (self.root / kind / f"{number:02x}" for number in range(256))
        with ThreadPoolExecutor(_LISTERS) as listers:
            packed = list(listers.map(_packed_names, folders))
        entries, bad = (b"".join(part) for part in zip(*packed, strict=True))
        return Listing(entries=EntryNames(entries), bad=EntryNames(bad))

    def put(self, kind: EntryKind, key: str, array: np.ndarray) -> bool:
        """Keep an array. False when it could not be: training goes on without."""
        path = self._path(kind, key)
        if self.full:
            return False
        try:
            if path.is_file():
                return True
            path.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(path.parent).free - array.nbytes < self.config.min_free_gib * GIB:
                return self._stop(f"less than data.cache.min_free_gib {self.config.min_free_gib:g} GiB would stay free")
            _write(path, array)
            path.with_suffix(_BAD).unlink(missing_ok=True)
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
        self.why_not = str(error)
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
        self.why_not, self.full = why, True  # in this order, as another thread asks why once it is full
        return False


def _packed_names(folder: Path) -> tuple[bytes, bytes]:
    """Keys of the entries in a folder, and of the marks."""
    packed = {suffix: bytearray() for suffix in (_ENTRY, _BAD)}
    for stem, suffix in map(os.path.splitext, names_in(folder)):
        if suffix in packed and _KEY.fullmatch(stem):
            packed[suffix] += bytes.fromhex(stem)
    return bytes(packed[_ENTRY]), bytes(packed[_BAD])


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


def _read(path: Path, rows: range | None = None, width: int = 0) -> np.ndarray:
    """Raises ValueError or EOFError for a file that is not what `_write` made, or not float32 of [one of `rows`,
    `width`] where that is given."""
    data = path.read_bytes()
    body, seal = data[: -len(_SEAL) - 4], data[-len(_SEAL) - 4 :]
    if seal != _sealed(body):
        raise ValueError("its checksum is wrong")
    array: np.ndarray = np.load(io.BytesIO(body), allow_pickle=False)
    if rows is not None and (
        array.dtype != np.float32 or array.ndim != 2 or len(array) not in rows or array.shape[1] != width
    ):
        raise ValueError(
            f"{array.dtype} {list(array.shape)} where float32 [{rows.start}..{rows.stop - 1}, {width}] was wanted"
        )
    return array


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
