"""Latents and text embeddings kept by content, so that no run encodes the same thing twice.

    cache = Cache(config.cache)
    key = latent_key(sample, bucket, fps, vae="haar-4x8x8-48 float32", decoder="data.decode:decode_clip 1")
    latent = cache.get("latents", key)           # None: not there, encode and put it
    cache.put("latents", key, latent)

A key names everything the result depends on: the bytes of the clip, the frames taken from them, the shape, the
decoder, the encoder. So folders may be shared by runs, by machines and by bucket tables, and a stopped run goes on
where it was. A latent of 81 frames at 480x832 is 4 MB, more than its clip: the cache saves encoder time, not space.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data.config import CacheConfig, DataConfig
from data.types import Bucket, DataItem, SampleRef

log = logging.getLogger(__name__)

Kind = Literal["latents", "text"]
ANSWERS_KEPT = 1 << 16  # items; far more than are under way at once


def latent_key(sample: SampleRef, bucket: Bucket, fps: float, vae: str, decoder: str, crop: bool = False) -> str:
    """64 hex digits. `vae` names the encoder with its weights and dtype, `decoder` the decoder with its version."""
    return _digest("latent", sample.content, str(bucket), sample.start_frame, fps, crop, vae, decoder)


def text_key(caption: str, encoder: str, max_length: int) -> str:
    """64 hex digits; equal captions share an embedding."""
    return _digest("text", caption, encoder, max_length)


class Cache:
    """A folder of `.npy` files. Any number of processes read and write it at the same time."""

    def __init__(self, config: CacheConfig) -> None:
        if not config.path:
            raise ValueError("data.cache.path is empty: there is no cache to open. Give a folder.")
        self.root, self.config = Path(config.path).expanduser(), config
        self.hits = self.misses = self.written = 0
        self._full = False

    def has(self, kind: Kind, key: str) -> bool:
        return self._path(kind, key).is_file()

    def get(self, kind: Kind, key: str) -> np.ndarray | None:
        """The array, or None. A torn or foreign file counts as absent and is removed."""
        path = self._path(kind, key)
        try:
            array = np.load(path, allow_pickle=False)
        except FileNotFoundError:
            self.misses += 1
            return None
        except (ValueError, EOFError) as error:
            log.warning("cache: %s is damaged (%s); it is encoded again", path, error)
            path.unlink(missing_ok=True)
            self.misses += 1
            return None
        self.hits += 1
        return array

    def put(self, kind: Kind, key: str, array: np.ndarray) -> bool:
        """Keep an array. False when the disk is too full to: training goes on without."""
        path = self._path(kind, key)
        if self._full or path.is_file():
            return not self._full
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free - array.nbytes < self.config.min_free_gib * 2**30:
            return self._stop(f"less than data.cache.min_free_gib {self.config.min_free_gib:g} GiB would stay free")
        try:
            _write(path, array)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return self._stop(str(error))
        self.written += 1
        return True

    def size(self, kind: Kind) -> tuple[int, int]:
        """Number of entries and their bytes."""
        sizes = [path.stat().st_size for path in (self.root / kind).glob("*/*.npy")]
        return len(sizes), sum(sizes)

    def _path(self, kind: Kind, key: str) -> Path:
        return self.root / kind / key[:2] / f"{key}.npy"

    def _stop(self, why: str) -> bool:
        log.warning("cache %s takes no more entries: %s. Free space, or set data.cache.path to another disk.",
                    self.root, why)
        self._full = True
        return False


class CachedLatents:
    """Which items of a run have all their latents in the cache. An answer stays what it was, so that who plans the
    encoding of an item and who decodes its pixels agree while workers fill the cache; entries must not be removed."""

    def __init__(self, cache: Cache, vae: str, config: DataConfig) -> None:
        """`vae` names the encoder as in `latent_key`."""
        from data.decode import DECODE_VERSION  # imports PyAV, which a worker that reads the cache has no use for

        self._cache, self._vae = cache, vae
        self._decoder = f"{config.engine.decoder} {DECODE_VERSION}"
        self._fps, self._crop = config.fps, config.buckets.oversize == "crop"
        self._answers: OrderedDict[str, bool] = OrderedDict()

    def keys(self, item: DataItem) -> tuple[str, ...]:
        """Cache keys of the latents of an item's samples."""
        return tuple(latent_key(sample, item.bucket, self._fps, self._vae, self._decoder, self._crop)
                     for sample in item.samples)

    def has(self, item: DataItem) -> bool:
        if item.id not in self._answers:
            self._answers[item.id] = all(self._cache.has("latents", key) for key in self.keys(item))
            if len(self._answers) > ANSWERS_KEPT:
                self._answers.popitem(last=False)
        return self._answers[item.id]


def _write(path: Path, array: np.ndarray) -> None:
    """Whole or not at all: under another name first."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, array, allow_pickle=False)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _digest(*fields: Any) -> str:
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()
