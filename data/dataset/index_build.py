"""Makes the index of a source, from headers once, and verifies it at every start.

Each shard has a Parquet file keyed by path, size and modification time; only changed shards are read again, into a file
of their own: an open index stays as it was.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from hashlib import blake2b
from itertools import chain, count, islice, pairwise
from pathlib import Path
from typing import TypeVar

from data import storage
from data.config import LimitsConfig, SourceConfig
from data.dataset.index import Index, IndexedPart
from data.errors import DataError, DataIOError
from data.in_words import part_of
from data.ledger import Ledger, Reason
from data.readers.catalogue import listing
from data.readers.part import (
    CAPTIONS,
    MEDIA,
    MISSING,
    REVISION,
    VERSION,
    IndexPart,
    PartMeta,
    PartWriter,
    clear_up,
    read_meta,
)
from data.readers.registry import reader_of, with_kind
from data.readers.tables import was_misread
from ops.counted import counted
from ops.listing import names_in

log = logging.getLogger(__name__)

T = TypeVar("T")

MANY_SHARDS = 64  # worth a hint that processes help
OPENED_AT_ONCE = 8
MOST_NAMED = 80  # bytes of a shard's name in that of its file; file systems take 255 in all
MOST_SAID = 240  # characters of the first fault of a reason
SUPERSEDED_S = 30 * 86400.0  # since the next state of a part was indexed; runs of before it have ended by then


def build_index(
    source: SourceConfig,
    cache_dir: Path | None,
    ledger: Ledger,
    *,
    limits: LimitsConfig | None = None,
    ordinal: int = 0,
    workers: int = 1,
    allow_empty: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Index:
    """The index of a source, from the cache where shards are unchanged, and filed into the ledger.

    Raises DataError when the source has no usable sample (unless `allow_empty`), DataIOError when storage fails.
    `progress(done, total)` counts the shards that have to be read.
    """
    limits = limits or LimitsConfig()
    folder = cache_dir or index_folder(source)
    source = with_kind(source)
    located = replace(source, path=storage.absolute(source.path), media=storage.absolute(source.media))
    reader = reader_of(located, limits)
    settings = _settings(located, limits)
    parts = reader.parts()
    states = _states_in(folder)
    listed = cache(listing)

    def known(part: IndexPart) -> tuple[Path, PartMeta | None]:
        first = folder / _file_name(part.uri, settings)
        return _file_of(part, first, states.get(first.stem, []), listed)

    with ThreadPoolExecutor(OPENED_AT_ONCE) as pool:  # a feeder waits for storage, of a hundred thousand files
        told = list(pool.map(known, parts))
    files, metas = [file for file, _ in told], [meta for _, meta in told]
    stale = [i for i, meta in enumerate(metas) if meta is None]
    if stale:
        log.info(
            "index of %s: %d of %s to read%s",
            source.path,
            len(stale),
            counted(len(parts), part_of(source.kind)),
            "; `heddle data index --workers N` does it in parallel" if len(stale) >= MANY_SHARDS > workers else "",
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            jobs = [(located, limits, parts[i], files[i]) for i in stale]
            for done, _ in enumerate(_build_parts(jobs, workers), 1):
                if progress:
                    progress(done, len(jobs))
            clear_up(folder)
            for i in stale:
                _drop_superseded([*states.get(_first_name(files[i]), []), files[i]])
        except OSError as error:
            raise DataIOError(
                f"index of {source.path} in {folder}: {error}. Free space or name another folder in data.sources index."
            ) from error
    for i in stale:
        metas[i] = _meta_of(files[i])
    indexed = []
    for part, file, meta in zip(parts, files, metas, strict=True):
        assert meta is not None, f"{file} was just written"
        indexed.append(IndexedPart(part, file, meta))
    index = Index(source, limits, ordinal, indexed)
    index.file_into(ledger)
    if not index.num_ok and not allow_empty:
        raise DataError(_why_empty(index))
    return index


def index_folder(source: SourceConfig) -> Path:
    """Where the index of a source lies: as set, else beside local data, else in the user's cache."""
    if source.index:
        return Path(source.index)
    first = source.path.split("::")[0]
    if storage.is_local(first):
        written = storage.local_path(first)
        path = Path(written[: storage.first_sign(written, r"[{*?[]")])
        beside = path if path.is_dir() else path.parent
        if os.access(beside, os.W_OK):
            return beside / ".heddle-index"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "heddle" / "index"


def _build_parts(jobs: list[tuple[SourceConfig, LimitsConfig, IndexPart, Path]], workers: int) -> Iterator[None]:
    if workers <= 1 or len(jobs) == 1:
        yield from map(_build_part, jobs)
        return
    # spawn: a fork would copy the threads of Ray and PyArrow in a locked state
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context, initializer=_end_when_told) as pool:
        try:
            yield from pool.map(_build_in_pool, jobs)
        except BaseException as error:
            if not isinstance(error, Exception):  # such as a signal: a part may take minutes, which the pool would wait
                for process in list(pool._processes.values()):
                    process.terminate()
            raise


def _end_when_told() -> None:
    """SIGTERM ends this process of a pool, and so does the end of the process that has made it: of itself it would wait
    for jobs for ever."""
    maker = multiprocessing.parent_process()
    assert maker is not None, "it is one of a pool"
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    def watch() -> None:
        maker.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="watch-maker", daemon=True).start()


def _build_in_pool(job: tuple[SourceConfig, LimitsConfig, IndexPart, Path]) -> None:
    try:
        _build_part(job)
    except SystemExit:  # the pool would take it for a result, and give this process another job
        os._exit(1)


def _build_part(job: tuple[SourceConfig, LimitsConfig, IndexPart, Path]) -> None:
    """Raises DataIOError for what the data lack, OSError for the folder of the index."""
    source, limits, part, file = job
    try:
        _write_part(source, limits, part, file)
    except OSError as error:
        if error.filename is None or Path(os.fsdecode(error.filename)).is_relative_to(file.parent):
            raise
        raise DataIOError(
            f"index of {part.uri}: {error}. Restore it or let this user read it, then index again."
        ) from error


def _write_part(source: SourceConfig, limits: LimitsConfig, part: IndexPart, file: Path) -> None:
    reader = reader_of(source, limits)
    writer = PartWriter(file, part, reader.score_names(part))
    try:
        reader.read(part, writer)
        writer.close()
    except BaseException:
        writer.abandon()
        raise


def _states_in(folder: Path) -> dict[str, list[Path]]:
    """Files of each part by the stem of its first one: how it was at several times."""
    states: dict[str, list[Path]] = {}
    names = _asked(f"list {folder}", lambda: names_in(folder))
    for file in sorted(folder / name for name in names if name.endswith(".parquet")):
        states.setdefault(_first_name(file), []).append(file)
    return states


def _meta_of(file: Path) -> PartMeta | None:
    return _asked(f"read {file}", lambda: read_meta(file))


def _asked(what: str, ask: Callable[[], T]) -> T:
    """What the folder of an index says. Raises DataIOError; where it may say it later, that is DataUnreachable."""
    try:
        return storage.retried(what, ask)
    except OSError as error:  # such as those of a folder that somebody else made for himself
        raise DataIOError(f"{what}: {error}. Name another folder in data.sources index.") from error


def _first_name(file: Path) -> str:
    return re.sub(r"\.\d+$", "", file.stem)


def _file_of(
    part: IndexPart, first: Path, states: Sequence[Path], listed: Callable[[str], str]
) -> tuple[Path, PartMeta | None]:
    """The file that says how a part is now, and its metadata; without one None, and where to write it. A file that says
    how the part was at another time stays: replaced under the open index of a run it would give that other rows and
    other captions. One that is so again becomes the newest, for `_drop_superseded`."""
    taken, states = set(), _newest_first(states)  # several may be it where the folders outside are not seen
    for file in states:
        meta = _meta_of(file)
        if meta is None:
            continue
        if _fresh(part, meta, listed):
            if file != states[0]:
                with suppress(OSError):  # an index that is only read keeps all of its states
                    os.utime(file)
            return file, meta
        taken.add(file)
    names = chain([first], (first.with_name(f"{first.stem}.{number}.parquet") for number in count(1)))
    return next(file for file in names if file not in taken), None


def _newest_first(states: Sequence[Path]) -> Sequence[Path]:
    if len(states) < 2:
        return states
    try:
        return sorted(states, key=lambda file: file.stat().st_mtime, reverse=True)
    except FileNotFoundError:  # another process removed one
        return states


def _drop_superseded(states: Sequence[Path]) -> None:
    """Remove files that say how a part was before, a month after another one was written."""
    with suppress(OSError):  # others may remove them at the same time, and what stays does no harm
        files = sorted((file.stat().st_mtime, file) for file in {*states})
        for (_, earlier), (written, _) in pairwise(files):
            if time.time() - written > SUPERSEDED_S:
                for suffix in (".parquet", CAPTIONS, MEDIA, MISSING):
                    earlier.with_suffix(suffix).unlink(missing_ok=True)


def _fresh(part: IndexPart, meta: PartMeta, listed: Callable[[str], str]) -> bool:
    """Whether a part and the folders outside of its source are as they were. `listed`: what is in a folder now. One in
    which nothing is seen counts as unchanged: a driver opens the index of clips that its workers alone have mounted."""
    now = (part.size, part.mtime_ns, part.fingerprint)
    if "revision" not in meta or (meta["size"], meta["mtime_ns"], meta["fingerprint"]) != now:
        return False
    if meta["revision"] < REVISION and was_misread(meta):
        return False
    return all(listed(folder) in ("", then) for folder, then in meta.get("outside", {}).items())


def _settings(source: SourceConfig, limits: LimitsConfig) -> str:
    """All settings that decide the rows; with the bytes of a shard they name its part."""
    bounds = {name: value for name, value in asdict(limits).items() if name.startswith("max_") and "bad" not in name}
    takes_all = [] if source.default_caption is None else ["without text"]  # its words are put in when a row is read
    return json.dumps([VERSION, source.kind, source.caption, source.media, bounds, *takes_all])


def _file_name(uri: str, settings: str) -> str:
    """Name of a part's file. A path of local storage may have bytes that are no UTF-8, and letters of several bytes."""
    which = blake2b((uri + settings).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    name = re.sub(r"[^\w.-]", "_", storage.name_of(uri)).removesuffix(".tar")
    return f"{name.encode()[:MOST_NAMED].decode(errors='ignore')}-{which}.parquet"


def _why_empty(index: Index) -> str:
    reasons = Counter({str(reason): count for reason, count in index.rejects.items()})
    if index.missing:
        reasons[str(Reason.FILE_MISSING)] += index.missing
    for part in index.parts:
        reasons.update(fault["reason"] for fault in part.meta["faults"])
    total = len(index) + index.missing
    if not total and not reasons:
        return (
            f"source {index.name}: nothing to train on in {index.config.path}: no sample in "
            f"{counted(index.num_shards, part_of(index.config.kind))} ({index.config.kind}). "
            f"Check data.sources path and kind."
        )
    firsts: dict[str, str] = {}
    for fault in chain(index.faults(), islice(index.missing_faults(), 1)):
        said = ": ".join(filter(None, (fault.key, fault.detail)))
        firsts.setdefault(str(fault.reason), f", first {said[:MOST_SAID]}" if said else "")
    why = "; ".join(f"{count} {reason}{firsts[reason]}" for reason, count in reasons.most_common(4))
    return (
        f"source {index.name}: none of its {counted(total, 'sample')} in "
        f"{counted(index.num_shards, part_of(index.config.kind))} can be used ({why or 'no sample is listed'}). "
        f"Check data.sources path, media and caption; `heddle data lint` lists every case."
    )
