"""Training state on durable storage: one safetensors file per shard, and a COMPLETE marker that is written last.

    begin(folder)                                   # clear what a torn attempt left
    files = [write_shard(folder, shard), ...]       # one after the other, or by several processes
    seal(folder, meta, files=files)                 # checks coverage, then COMPLETE with size and checksum of each file
    folder = latest(root)                           # a torn or damaged checkpoint is never chosen
    meta, shards = load(folder)                     # memory-mapped; ops.shards.cut(shards, lo, hi) reads only the range

A checkpoint written by N workers is read by any other number. No pickle anywhere. Every file appears under its name
only when its bytes are on disk (write aside, fsync, rename, fsync of the folder).

Where storage does not answer (`ops.passing`) it is not known whether a checkpoint is whole: whoever reads one raises
that OSError, and whoever removes some leaves it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from ops.listing import names_in
from ops.models.config import ModelConfig
from ops.passing import UNREACHABLE
from ops.shards import Distance, ShardState, Slot, cut, missing
from ops.units import GIB

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

COMPLETE = "COMPLETE"
META = "meta.json"
FORMAT = 1  # of what this version writes, and the latest that it reads; a COMPLETE that names none is of the first
GONE = -1  # in place of a checksum, which is never below 0
_DTYPES: dict[str, np.dtype] = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8")}
_INCOMPLETE = "it is not complete (torn, or in the making)"
_READERS = 8
_WRITTEN_BY = re.compile(r"# Written by Heddle (\d+(?:\.\d+)*)")  # the first line of the config in meta.json
_BLOCK_BYTES = 16 << 20
_HEADER_BYTES = 1024  # of a shard file, at most: 940 with Prodigy's six arrays, and the numbers of two experts


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A file of a checkpoint as it was written; `crc32` is None in checkpoints of earlier versions, which had none."""

    name: str
    size: int
    crc32: int | None


Meta = dict[str, Any]  # an object of JSON as a file gives it; see `seal` for that of a checkpoint


class ParameterMeta(TypedDict):
    """A trained parameter as a checkpoint's meta lists it, in the order of the flat vector."""

    name: str
    shape: list[int]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message names the file and the remedy."""


class LaterFormat(CheckpointError):
    """A later version of Heddle has written the checkpoint, which is whole for all that is known: it counts neither as
    damaged nor as none, so that no run goes on without it unasked, and nobody removes it."""


class FirstStateLost(CheckpointError):
    """The checkpoint that a run without a state of its own begins with is gone."""


# Writing ------------------------------------------------------------------------------------------------------------


def root_of(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint taken after step `step` lies."""
    return root / f"step-{step}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def begin(folder: Path, anew: bool = False) -> bool:
    """Make an empty folder for a checkpoint. False when a whole one is already there: nothing is to be written. One
    that this user may not read or not remove is none and is moved aside: a run that had to pass over it, and has come
    to its step again, writes its own. Raises LaterFormat, and leaves that one. `anew`: what is there is not the run's
    own, and a whole one or one of a later version is moved aside, too.
    """
    try:
        if is_complete(folder) and (anew or not damage(folder)):
            if not anew:
                return False
            log.warning("%s is moved aside, to %s: the run goes on without it", folder, put_aside(folder).name)
        elif os.path.lexists(folder):
            log.warning("%s: removing an incomplete or damaged checkpoint", folder)
            remove(folder)
    except (PermissionError, LaterFormat) as error:
        if isinstance(error, LaterFormat) and not anew:
            raise
        aside = put_aside(folder)
        log.warning("%s is moved aside, to %s: %s", folder, aside.name, error)
    folder.mkdir(parents=True)
    _sync_folder(folder.parent)
    return True


def put_aside(folder: Path) -> Path:
    """Give it a name by which nobody looks for checkpoints, and return that. It may be of another user: only what it
    lies in has to be writable."""
    names = (f"passed-over-{folder.name}{more}" for more in chain([""], (f"-{n}" for n in count(2))))
    aside = next(path for path in map(folder.with_name, names) if not os.path.lexists(path))
    folder.rename(aside)
    return aside


def write_shard(folder: Path, shard: ShardState) -> File:
    """Write one worker's shard. Safe to call from several processes at once."""
    numbers = {"step": shard.updates, "lo": shard.lo, "hi": shard.hi, "total": shard.total}
    said = {name: str(value) for name, value in numbers.items()}
    if shard.part_updates:
        said["part_updates"] = ",".join(map(str, shard.part_updates))
    if shard.distances:
        said["distances"] = json.dumps([asdict(one) for one in shard.distances])  # every digit of a float
    header: dict[str, object] = {"__metadata__": said}
    at = 0
    for name, array in shard.arrays.items():
        header[name] = {
            "dtype": "F64" if array.dtype == np.float64 else "F32",
            "shape": [array.size],
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format asks for aligned data
    parts: list[bytes | memoryview] = [
        len(text).to_bytes(8, "little"),
        text,
        *(_bytes_of(array) for array in shard.arrays.values()),
    ]
    return _write(folder / _shard_name(shard.lo, shard.hi), parts)


def seal(
    folder: Path,
    meta: Meta,
    bounds: Sequence[tuple[int, int]] | None = None,
    files: Sequence[File] = (),
) -> None:
    """Make the checkpoint valid: write `meta`, check that the shards cover the vector, write COMPLETE last.

    `bounds` are the shards that belong to it, by default all that are there; others are removed. `files` are what
    `write_shard` returned: the checksum of any other shard is taken by reading it back. `meta` is JSON; "step" is
    required and "parameters" (names and shapes in flat order, see `parameters_meta`) is needed to read weights by name.
    """
    if "step" not in meta:
        raise CheckpointError(f"{folder}: meta has no 'step'; it is needed to find the latest checkpoint.")
    names = [_shard_name(a, b) for a, b in bounds] if bounds is not None else _shard_names(folder)
    shards = [_open_shard(folder / name) for name in names]
    if not shards:
        raise CheckpointError(f"{folder}: no shard was written; call write_shard before seal.")
    total = shards[0].total
    ranges = [(shard.lo, shard.hi) for shard in shards]
    gaps = missing(ranges, 0, total)
    overlap = sum(b - a for a, b in ranges) != total
    if gaps or overlap or len({shard.state for shard in shards}) > 1:
        raise CheckpointError(
            f"{folder}: shards {ranges} of {total} elements "
            + (f"leave {gaps} uncovered" if gaps else "overlap or belong to different states")
            + "; begin the checkpoint again."
        )
    known = {file.name: file for file in [*files, _write(folder / META, [json.dumps(meta, indent=1).encode()])]}
    listed = [known.get(name) or _as_it_is(folder / name) for name in [*names, META]]
    entries = {file.name: {"size": file.size, "crc32": file.crc32} for file in listed}
    _write(folder / COMPLETE, [json.dumps({"format": [FORMAT, FORMAT], "files": entries}).encode()])
    with suppress(OSError):  # it is whole, whatever else lies there
        for left in (*folder.glob(".*.part"), *(folder / name for name in _shard_names(folder) if name not in entries)):
            left.unlink(missing_ok=True)  # of attempts that were given up


def parameters_meta(layout: Sequence[Slot]) -> list[ParameterMeta]:
    """`sync.layout` as JSON for `meta["parameters"]`."""
    return [{"name": slot.name, "shape": list(slot.shape)} for slot in layout]


def trained_parameters(model: ModelConfig) -> list[ParameterMeta]:
    """`meta["parameters"]` of a run with this (resolved) model, without building its weights."""
    from ops.models.load import dit_skeleton
    from ops.update.flat_vector import slots, trainable

    return parameters_meta(slots(trainable(dit_skeleton(model.dit))))


# Reading ------------------------------------------------------------------------------------------------------------


def is_complete(folder: Path) -> bool:
    """COMPLETE is there and every file it lists has its full size. `damage` looks at the bytes, too. As all that read
    one it raises LaterFormat."""
    try:
        return all((folder / file.name).stat().st_size == file.size for file in _listed(folder))
    except (OSError, CheckpointError) as error:
        if may_pass(error):
            raise
        return False


def damage(folder: Path) -> str:
    """What is wrong with a complete checkpoint, or nothing. Reads all of it, several files at a time.

    One that was written without checksums is opened, but its bytes are taken as they are.
    """
    try:
        with ThreadPoolExecutor(max_workers=_READERS) as readers:
            wrong = [name for name in readers.map(lambda file: _changed(folder, file), _listed(folder)) if name]
        if wrong:
            return f"{', '.join(wrong)}: the bytes are not those that were written (checksum)"
        load(folder)
    except (OSError, CheckpointError) as error:
        if may_pass(error):
            raise
        return str(error)
    return ""


def latest(root: Path) -> Path | None:
    """The whole checkpoint of the highest step, or None. Says at WARNING which newer ones it passes over, and why."""
    for folder in reversed(step_folders(root)):
        why = damage(folder) if is_complete(folder) else _INCOMPLETE
        if not why:
            return folder
        log.warning("%s is passed over: %s", folder, why)
    return None


def step_folders(root: Path) -> list[Path]:
    """All checkpoints below `root`, whole or not, oldest first. Raises what keeps storage from listing them: a run that
    took it for none would begin anew."""
    names = [name.removeprefix("step-") for name in names_in(root) if name.startswith("step-")]
    return [root / f"step-{step}" for step in sorted(filter(str.isdigit, names), key=int)]


def complete(root: Path) -> list[Path]:
    """The complete checkpoints below `root` to choose from, oldest first: without those of which storage does not say
    now, or not to this user, whether they are, and of later versions."""
    found = []
    for folder in step_folders(root):
        with suppress(OSError, LaterFormat):
            if is_complete(folder):
                found.append(folder)
    return found


def newest_step(run_dir: Path) -> int | None:
    """The step of the newest complete checkpoint, whose bytes are not read, and which may be of a later version; -1
    without one, None where storage does not say."""
    try:
        newest = next(filter(_is_there, reversed(step_folders(root_of(run_dir)))), None)
    except OSError as error:
        log.warning("which checkpoints are on disk is not known: %s", error)
        return None
    return step_of(newest) if newest is not None else -1


def _is_there(folder: Path) -> bool:
    try:
        return is_complete(folder)
    except LaterFormat:
        return True


def load(folder: Path) -> tuple[Meta, list[ShardState]]:
    """Meta and shards of a checkpoint. The arrays are memory-mapped and read-only: bytes are read when touched."""
    if not is_complete(folder):
        why = "is not a complete checkpoint" if folder.is_dir() else "is gone: a live run keeps the newest ones"
        raise CheckpointError(f"{folder} {why}; choose one that has a {COMPLETE} file.")
    files = _listed(folder)
    return _meta(folder, files), [_opened(folder, file) for file in files if file.name != META]


def meta_of(folder: Path) -> Meta:
    """What a checkpoint says about itself, if its bytes are those that were written: a changed one may be JSON all the
    same. Looks at none of its shards. Raises CheckpointError."""
    return _meta(folder, _listed(folder))


def checksum(folder: Path) -> int:
    """Equal where checkpoints are: of the sizes and checksums that COMPLETE lists. Raises CheckpointError."""
    return zlib.crc32(json.dumps(sorted((file.name, file.size, file.crc32) for file in _listed(folder))).encode())


def checksum_or_gone(folder: Path) -> int:
    """`checksum`, or GONE where there is no complete checkpoint, or none that this user may read."""
    try:
        return checksum(folder) if is_complete(folder) else GONE
    except (CheckpointError, PermissionError):  # removed meanwhile, or taken away: a run with a state needs none
        return GONE


def model_state(folder: Path, ema: bool = True, verify: bool = True) -> dict[str, Tensor]:
    """Trained weights by name, fp32: the EMA, or the weights themselves (`ema=False`, or the run kept no EMA).

    `verify` reads all of the checkpoint first, moments too, and compares checksums.
    """
    import torch  # here: a process that writes checkpoints needs no torch

    if verify and is_complete(folder) and (why := damage(folder)):
        raise CheckpointError(f"{folder} is damaged: {why}. Use another checkpoint of the run.")
    meta, shards = load(folder)
    if "parameters" not in meta:
        raise CheckpointError(f"{folder}: meta.json has no 'parameters'; this checkpoint has no names for its weights.")
    which = "ema" if ema and "ema" in shards[0].arrays else "master"
    if ema and which == "master":
        log.info("%s keeps no EMA; using the weights themselves", folder)
    only = [replace(shard, arrays={which: shard.arrays[which]}) for shard in shards]
    state, at = {}, 0
    for entry in meta["parameters"]:
        shape = tuple(entry["shape"])
        end = at + int(np.prod(shape, dtype=np.int64))
        array = cut(only, at, end).arrays[which].astype(np.float32, copy=False)
        state[entry["name"]] = torch.from_numpy(array).view(shape)
        at = end
    if at != shards[0].total:
        raise CheckpointError(
            f"{folder}: names cover {at} of {shards[0].total} elements; meta.json is of another model."
        )
    return state


# Room ---------------------------------------------------------------------------------------------------------------


def forecast_bytes(total: int, *, weight_bytes: int, num_shards: int = 1, num_parameters: int = 0) -> int:
    """Size of one checkpoint of `total` trained elements, whose state takes `weight_bytes` of each, plus headers."""
    return total * weight_bytes + num_shards * _HEADER_BYTES // 2 + num_parameters * 80 + 1024


def check_free_space(root: Path, needed: int) -> None:
    """Raise CheckpointError when the file system of `root` has less than `needed` bytes free."""
    place = root
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise CheckpointError(
            f"a checkpoint needs {needed / GIB:.2f} GiB and {place} has {free / GIB:.2f} GiB free; make room, "
            f"choose another run.dir, or keep fewer with checkpoint.keep_last."
        )


# Files --------------------------------------------------------------------------------------------------------------


def _shard_name(lo: int, hi: int) -> str:
    return f"shard-{lo}-{hi}.safetensors"


def _shard_names(folder: Path) -> list[str]:
    return sorted(name for name in names_in(folder) if fnmatchcase(name, "shard-*.safetensors"))


def _bytes_of(array: np.ndarray) -> memoryview:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return little.view(np.uint8).data


def _open_shard(path: Path) -> ShardState:
    """A shard with memory-mapped arrays. Raises CheckpointError when the file is missing, torn or something else."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size, _HEADER_BYTES):
                raise CheckpointError(f"{path} is not a shard: its header claims {length} bytes.")
            header = json.loads(file.read(length))
        numbers = header.pop("__metadata__")
        arrays = {name: _map(path, entry, 8 + length, size) for name, entry in header.items()}
        return ShardState(
            updates=int(numbers["step"]),
            lo=int(numbers["lo"]),
            hi=int(numbers["hi"]),
            total=int(numbers["total"]),
            arrays=arrays,
            part_updates=tuple(int(count) for count in numbers.get("part_updates", "").split(",") if count),
            distances=tuple(Distance(**one) for one in json.loads(numbers.get("distances", "[]"))),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if may_pass(error):
            raise
        raise CheckpointError(f"{path} cannot be read as a shard ({error}); use another checkpoint.") from error


def _opened(folder: Path, file: File) -> ShardState:
    """A shard of a complete checkpoint. What this version does not know in it is damage where the bytes are not those
    that were written."""
    try:
        return _open_shard(folder / file.name)
    except LaterFormat:
        if file.crc32 is None or _changed(folder, file):
            raise CheckpointError(
                f"{folder / file.name}: the bytes are not those that were written; use another checkpoint."
            ) from None
        raise


def _map(path: Path, entry: Meta, start: int, size: int) -> np.ndarray:
    begin_at, end_at = entry["data_offsets"]
    if (dtype := _DTYPES.get(entry["dtype"])) is None:
        raise _later(path.parent, f"{path.name} holds {entry['dtype']}, and this version reads {' and '.join(_DTYPES)}")
    if start + end_at > size or (end_at - begin_at) != entry["shape"][0] * dtype.itemsize:
        raise ValueError(f"data {begin_at}..{end_at} does not fit a file of {size} bytes")
    if begin_at == end_at:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=start + begin_at, shape=(entry["shape"][0],))


def _listed(folder: Path) -> list[File]:
    """What COMPLETE lists. Raises CheckpointError when it is missing or not as `seal` writes it."""
    try:
        said = json.loads((folder / COMPLETE).read_bytes())
        found, again = said.get("format", (FORMAT, FORMAT))
        if found != again:  # a bit of it has changed: nothing else in this file makes up for that
            raise ValueError(f"its format is {found} and {again}")
        if found > FORMAT:
            raise _later(folder, f"its format is {found}, and this version reads up to {FORMAT}")
        entries = said["files"].items()
        return [
            File(name=name, size=entry, crc32=None)
            if isinstance(entry, int)
            else File(name=name, size=entry["size"], crc32=entry["crc32"])
            for name, entry in entries
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if may_pass(error):
            raise
        raise CheckpointError(f"{folder / COMPLETE} cannot be read ({error}); use another checkpoint.") from error


def _meta(folder: Path, files: Sequence[File]) -> Meta:
    """meta.json, if its bytes are those that were written."""
    if any(file.name == META and _changed(folder, file) for file in files):
        raise CheckpointError(f"{folder / META}: the bytes are not those that were written; use another checkpoint.")
    try:
        meta: Meta = json.loads((folder / META).read_bytes())
    except (OSError, ValueError) as error:
        if may_pass(error):
            raise
        raise CheckpointError(f"{folder / META} cannot be read ({error}); use another checkpoint.") from error
    return meta


def _later(folder: Path, why: str) -> LaterFormat:
    """The error for a checkpoint of a later version; it names the version where meta.json still says it."""
    version = ""
    with suppress(OSError, ValueError):
        if (found := _WRITTEN_BY.search((folder / META).read_text(encoding="utf-8"))) is not None:
            version = f", {found[1]}"
    return LaterFormat(
        f"{folder} was written by a later version of Heddle: {why}. Use the version that wrote it{version}, or an "
        f"earlier checkpoint (heddle train --resume --back-to STEPS)."
    )


def may_be_later(folder: Path) -> bool:
    """Whether a later version has written a checkpoint, or storage does not answer who has."""
    try:
        _listed(folder)
    except (OSError, CheckpointError) as error:
        return may_pass(error)
    return False


def may_pass(error: Exception) -> bool:
    """Whether an error says nothing against a checkpoint: storage does not answer, or not to this user, or a later
    version has written it."""
    return isinstance(error, PermissionError | LaterFormat) or (
        isinstance(error, OSError) and error.errno in UNREACHABLE
    )


def _changed(folder: Path, file: File) -> str:
    """The name of a file that does not have the checksum it was written with."""
    return file.name if file.crc32 is not None and _as_it_is(folder / file.name).crc32 != file.crc32 else ""


def _as_it_is(path: Path) -> File:
    size = crc32 = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            size, crc32 = size + len(block), zlib.crc32(block, crc32)
    return File(name=path.name, size=size, crc32=crc32)


def _write(path: Path, parts: Sequence[bytes | memoryview]) -> File:
    """All of the file or none of it, also after a power cut."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")  # a given-up attempt may still write its own
    size = crc32 = 0
    with aside.open("wb") as file:
        for part in parts:
            file.write(part)
            size, crc32 = size + len(part), zlib.crc32(part, crc32)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    _sync_folder(path.parent)
    return File(name=path.name, size=size, crc32=crc32)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Remove a checkpoint, whole or not; where it was moved to another disk and linked back, only the link."""
    if folder.is_symlink():
        folder.unlink()
        return
    # COMPLETE goes first: a removal that is cut short must not leave something that looks whole.
    (folder / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder)
