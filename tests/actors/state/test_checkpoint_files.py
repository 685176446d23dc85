"""Checkpoints: round trips at other worker counts, torn writes at every point, retention, sizes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import threading
import zlib
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from actors.state.checkpoint_files import (
    COMPLETE,
    GONE,
    CheckpointError,
    LaterFormat,
    begin,
    check_free_space,
    checksum,
    checksum_or_gone,
    complete,
    damage,
    forecast_bytes,
    is_complete,
    latest,
    load,
    model_state,
    parameters_meta,
    seal,
    step_folder,
    write_shard,
)
from actors.state.checkpoint_retention import _milestones, prune, remove_torn, stands_for_multiple
from ops.shards import ARRAYS, Distance, ShardState, Slot, cut, shard_bounds

TOTAL = 1003


def state(lo: int = 0, hi: int = TOTAL, *, step: int = 5, total: int = TOTAL, ema: bool = True) -> ShardState:
    """A piece of one well-known vector per array."""
    names = [name for name in ARRAYS if ema or name != "ema"]
    whole = {name: (np.arange(total) * (i + 1) + step).astype(np.float32) for i, name in enumerate(names)}
    return ShardState(updates=step, lo=lo, hi=hi, total=total, arrays={n: a[lo:hi] for n, a in whole.items()})


def write(root: Path, step: int, size: int = 2, **meta: object) -> Path:
    folder = step_folder(root, step)
    begin(folder)
    files = [write_shard(folder, state(lo, hi, step=step)) for lo, hi in shard_bounds(TOTAL, size)]
    seal(folder, {"step": step, **meta}, files=files if step % 2 else ())
    return folder


@pytest.mark.parametrize("written", [1, 2, 5])
@pytest.mark.parametrize("read", [1, 3, 4])
def test_any_number_of_workers_reads_what_any_other_number_wrote(tmp_path: Path, written: int, read: int) -> None:
    meta, shards = load(write(tmp_path, 5, written, token={"row": 3}))
    assert meta == {"step": 5, "token": {"row": 3}}
    for lo, hi in shard_bounds(TOTAL, read):
        found, expected = cut(shards, lo, hi), state(lo, hi)
        assert (found.updates, found.lo, found.hi, found.total) == (5, lo, hi, TOTAL)
        for name in ARRAYS:
            np.testing.assert_array_equal(found.arrays[name], expected.arrays[name])


def test_loading_maps_files_instead_of_reading_them(tmp_path: Path) -> None:
    _, shards = load(write(tmp_path, 1))
    assert all(isinstance(array, np.memmap) for shard in shards for array in shard.arrays.values())


def test_shards_are_plain_safetensors(tmp_path: Path) -> None:
    folder = write(tmp_path, 5, 1)
    path = folder / f"shard-0-{TOTAL}.safetensors"
    for name, array in load_file(path).items():
        np.testing.assert_array_equal(array, state().arrays[name])
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0, "arrays begin at a multiple of their size"


@pytest.mark.parametrize("counts", [(), (3, 0)])
def test_a_shard_comes_back_in_its_precision_and_with_the_updates_of_its_parts(
    tmp_path: Path, counts: tuple[int, ...]
) -> None:
    arrays = {name: np.linspace(0, 1, 7) / 3 for name in ARRAYS}
    distances = tuple(Distance(d=1e-6 / 3, d_max=0.1 + 0.2, numerator=-1e-17 / count) for count in (3, 7))
    given = ShardState(updates=3, lo=0, hi=7, total=7, arrays=arrays, part_updates=counts, distances=distances)
    begin(folder := step_folder(tmp_path, 5))
    write_shard(folder, given)
    seal(folder, {"step": 5})
    (found,) = load(folder)[1]
    assert (found.updates, found.part_updates) == (3, counts)
    assert found.distances == distances, "to the last bit"
    for name in ARRAYS:
        assert found.arrays[name].dtype == np.float64
        np.testing.assert_array_equal(found.arrays[name], arrays[name])


def test_weights_are_read_by_name(tmp_path: Path) -> None:
    layout = [Slot(name="a.weight", shape=(3, 1), lo=0, hi=3), Slot(name="b", shape=(10, 100), lo=3, hi=TOTAL)]
    folder = write(tmp_path, 5, 3, parameters=parameters_meta(layout))
    for ema, array in ((True, "ema"), (False, "master")):
        weights = model_state(folder, ema=ema)
        assert {name: tuple(w.shape) for name, w in weights.items()} == {"a.weight": (3, 1), "b": (10, 100)}
        flat = torch.cat([w.flatten() for w in weights.values()]).numpy()
        np.testing.assert_array_equal(flat, state().arrays[array])


def test_without_an_ema_the_weights_stand_in(tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 1)
    begin(folder)
    write_shard(folder, state(ema=False))
    seal(folder, {"step": 1, "parameters": [{"name": "w", "shape": [TOTAL]}]})
    np.testing.assert_array_equal(model_state(folder)["w"].numpy(), state().arrays["master"])


class Crash(BaseException):
    """The machine stops here."""


class Crasher:
    """Raises Crash at the n-th file operation (open, rename, remove, mkdir) below a folder while switched on. What
    earlier tests left running does not count."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.below = ""
        self.thread = threading.get_ident()
        sys.addaudithook(self)  # hooks cannot be removed; this one sleeps between tests

    def __call__(self, event: str, args: tuple) -> None:
        if self.left is None or event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            return
        if threading.get_ident() != self.thread:
            return
        removal = event in ("os.remove", "os.rmdir")  # these name files relative to an open folder
        if not removal and not str(args[0]).startswith(self.below):
            return
        if self.left == 0:
            self.left = None
            raise Crash(f"{event} {args[0]}")
        self.left -= 1


@pytest.fixture(scope="module")
def module_crasher() -> Crasher:
    return Crasher()


@pytest.fixture
def crasher(module_crasher: Crasher, tmp_path: Path) -> Iterator[Crasher]:
    module_crasher.below = str(tmp_path)
    yield module_crasher
    module_crasher.left = None


def test_a_write_cut_at_any_file_operation_leaves_the_previous_checkpoint_the_latest(
    tmp_path: Path, crasher: Crasher
) -> None:
    previous = write(tmp_path, 1)
    for at in range(200):
        crasher.left = at
        try:
            write(tmp_path, 2)
        except Crash:
            crasher.left = None
            found = latest(tmp_path)
            # Only when the very last rename was done may the cut come too late to matter.
            assert found == previous or is_complete(step_folder(tmp_path, 2))
            assert found is not None
            for shard in load(found)[1]:
                np.testing.assert_array_equal(
                    shard.arrays["ema"], state(shard.lo, shard.hi, step=int(found.name[5:])).arrays["ema"]
                )
            continue
        crasher.left = None
        break
    assert at > 10, "the write is made of more file operations than this"
    assert latest(tmp_path) == step_folder(tmp_path, 2)


def test_a_power_cut_leaves_complete_beside_whole_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is on disk before it has its name, and its name before the next file is begun, COMPLETE last."""
    done: list[str] = []
    fsync, replace, thread = os.fsync, os.replace, threading.get_ident()

    def note(what: str) -> None:
        if threading.get_ident() == thread:  # and not one that an earlier test has left
            done.append(what)

    def synced(file: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{file}")).name
        note(f"{'bytes' if name.endswith('.part') else name} on disk")
        fsync(file)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda a, b: (note(f"{Path(b).name} named"), replace(a, b))[1])
    begin(folder := step_folder(tmp_path, 5))
    assert done == [f"{tmp_path.name} on disk"], "the folder itself"
    file = write_shard(folder, state())
    seal(folder, {"step": 5}, files=[file])
    names = [file.name, "meta.json", COMPLETE]
    assert done[1:] == [what for name in names for what in ("bytes on disk", f"{name} named", f"{folder.name} on disk")]


def test_a_checkpoint_with_a_file_cut_at_any_length_is_not_chosen(tmp_path: Path) -> None:
    previous, torn = write(tmp_path, 1), write(tmp_path, 2)
    for path in sorted(torn.iterdir()):
        whole = path.read_bytes()
        for length in (0, 1, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            assert latest(tmp_path) == previous, f"{path.name} cut to {length} bytes"
        path.write_bytes(whole)
    assert latest(tmp_path) == torn


def test_a_byte_changed_anywhere_is_noticed_and_the_older_checkpoint_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At full size: it was trained on without a word."""
    previous, hurt = write(tmp_path, 1), write(tmp_path, 2, data_token={"rows": [3, 1, 4]})
    rng = np.random.default_rng(0)
    for path in sorted(hurt.iterdir()):
        whole = path.read_bytes()
        for at in [0, 7, 8, len(whole) // 2, len(whole) - 1, *rng.integers(0, len(whole), 8)]:
            changed = bytearray(whole)
            changed[at] ^= 1 << int(rng.integers(0, 8))
            path.write_bytes(changed)
            caplog.clear()
            found = latest(tmp_path)
            if path.name == COMPLETE and found == hurt:  # a white space between two entries
                continue
            assert found == previous, f"byte {at} of {path.name}"
            assert f"{hurt} is passed over" in caplog.text, "it is said"
        path.write_bytes(whole)
    assert latest(tmp_path) == hurt


def test_a_zeroed_half_is_damage_with_a_name(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, parameters=[{"name": "w", "shape": [TOTAL]}])
    path = sorted(folder.glob("shard-*"))[1]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2].ljust(path.stat().st_size, b"\0"))
    assert is_complete(folder) and path.name in damage(folder)
    with pytest.raises(CheckpointError, match="is damaged"):
        model_state(folder)
    assert begin(folder), "it is written again, not taken for done"
    assert not list(folder.iterdir())


def test_meta_that_was_changed_is_one_clear_error(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, note="right")
    meta = folder / "meta.json"
    meta.write_text(meta.read_text().replace("right", "wrong"))
    with pytest.raises(CheckpointError, match=r"meta\.json.*not those that were written"):
        load(folder)


def test_a_checkpoint_of_an_earlier_version_without_checksums_is_still_read(tmp_path: Path) -> None:
    folder = write(tmp_path, 2)
    entries = json.loads((folder / COMPLETE).read_bytes())["files"]
    (folder / COMPLETE).write_text(json.dumps({"files": {name: entry["size"] for name, entry in entries.items()}}))
    assert latest(tmp_path) == folder and load(folder)[0] == {"step": 2}
    (folder / "meta.json").write_text("x" * entries["meta.json"]["size"])
    assert "meta.json cannot be read" in damage(folder) and latest(tmp_path) is None


def test_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    """Taken while they are written, or read back where another process has written them."""
    for folder in (write(tmp_path, 1), write(tmp_path, 2, told=True)):
        for name, entry in json.loads((folder / COMPLETE).read_bytes())["files"].items():
            assert entry == {"size": (folder / name).stat().st_size, "crc32": zlib.crc32((folder / name).read_bytes())}


def test_a_removal_cut_at_any_point_never_leaves_half_a_checkpoint_that_looks_whole(
    tmp_path: Path, crasher: Crasher
) -> None:
    for at in range(50):
        write(tmp_path, 1)
        write(tmp_path, 2)
        crasher.left = at
        try:
            prune(tmp_path, keep_last=1)
        except Crash:
            crasher.left = None
            for folder in complete(tmp_path):
                assert {path.name for path in folder.iterdir()} >= set(
                    json.loads((folder / COMPLETE).read_bytes())["files"]
                )
            assert latest(tmp_path) == step_folder(tmp_path, 2)
            continue
        crasher.left = None
        break
    assert at > 3
    assert complete(tmp_path) == [step_folder(tmp_path, 2)]


def test_a_torn_attempt_with_other_cuts_does_not_leak_into_the_next(tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 3)
    begin(folder)
    write_shard(folder, state(0, 500, step=99))
    assert begin(folder)
    write_shard(folder, state(0, TOTAL, step=3))
    seal(folder, {"step": 3})
    assert [shard.updates for shard in load(folder)[1]] == [3]
    assert not begin(folder), "a complete checkpoint is not written again"


def test_what_is_begun_anew_moves_a_whole_one_aside_and_removes_a_torn_one(tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    was = checksum(folder)
    assert not begin(folder) and begin(folder, anew=True) and not any(folder.iterdir())
    assert checksum(tmp_path / "passed-over-step-3") == was
    write_shard(folder, state())
    assert begin(folder, anew=True) and not any(folder.iterdir())
    of_later_version(write(tmp_path, 4))
    assert begin(tmp_path / "step-4", anew=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "passed-over-step-3",
        "passed-over-step-4",
        "step-3",
        "step-4",
    ]


def test_seal_refuses_gaps_overlaps_and_mixed_states(tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 1)
    begin(folder)
    write_shard(folder, state(0, 400))
    with pytest.raises(CheckpointError, match=r"\[\(400, 1003\)\] uncovered"):
        seal(folder, {"step": 1})
    write_shard(folder, state(300, TOTAL))
    with pytest.raises(CheckpointError, match="overlap"):
        seal(folder, {"step": 1})
    write_shard(folder, state(400, TOTAL, step=6))
    with pytest.raises(CheckpointError, match="different states"):
        seal(folder, {"step": 1}, bounds=[(0, 400), (400, TOTAL)])
    write_shard(folder, state(0, 603))
    with pytest.raises(CheckpointError, match=r"\[\(603, 1003\)\] uncovered"):  # as many elements as there are
        seal(folder, {"step": 1}, bounds=[(0, 603), (0, 400)])
    assert latest(tmp_path) is None


def test_seal_takes_the_shards_that_it_is_told_and_none_without_a_step(tmp_path: Path) -> None:
    begin(folder := step_folder(tmp_path, 1))
    with pytest.raises(CheckpointError, match="no shard was written"):
        seal(folder, {"step": 1})
    for lo, hi in ((0, 400), (400, TOTAL), (300, TOTAL)):  # the last one by a worker that was given up
        write_shard(folder, state(lo, hi))
    with pytest.raises(CheckpointError, match="meta has no 'step'"):
        seal(folder, {}, bounds=[(0, 400), (400, TOTAL)])
    assert latest(tmp_path) is None
    (folder / ".shard-0-400.safetensors.0123456789ab.part").touch()
    seal(folder, {"step": 1}, bounds=[(0, 400), (400, TOTAL)])
    assert latest(tmp_path) == folder
    shards = {f"shard-{lo}-{hi}.safetensors" for lo, hi in ((0, 400), (400, TOTAL))}
    assert {path.name for path in folder.iterdir()} == {*shards, "meta.json", COMPLETE}
    assert [(shard.lo, shard.hi) for shard in load(folder)[1]] == [(0, 400), (400, TOTAL)]


def test_loading_something_else_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match=r"step-3 is gone: a live run keeps the newest ones; choose one"):
        load(tmp_path / "step-3")
    folder = write(tmp_path, 1)
    shard = next(folder.glob("shard-*"))
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    with pytest.raises(CheckpointError, match="is not a shard"):
        load(folder)


def test_prune_keeps_the_newest_the_multiples_and_what_is_being_written(tmp_path: Path) -> None:
    for step in (9, 19, 24, 29, 39):  # after 10, 20, ... steps
        write(tmp_path, step)
    begin(step_folder(tmp_path, 4))  # a torn one of long ago
    begin(step_folder(tmp_path, 37))  # one of late
    for step in (34, 49):
        begin(step_folder(tmp_path, step))  # being written
    removed = prune(tmp_path, keep_last=2, keep_every=20, writing={34})
    assert [folder.name for folder in removed] == ["step-4", "step-9", "step-24", "step-37"]
    left = ["step-19", "step-29", "step-34", "step-39", "step-49"]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == left


def test_milestones_are_kept_where_storage_is_slower_than_checkpoints_are_due(tmp_path: Path) -> None:
    """One that takes 130 steps puts off the next but one, which is taken some steps later: of 20 milestones two were
    kept."""
    for step in range(99, 6000, 131):
        write(tmp_path, step, size=1)
        prune(tmp_path, keep_last=2, keep_every=1000, until=step)
    kept = [int(folder.name.removeprefix("step-")) for folder in complete(tmp_path)]
    assert kept == [1016, 2064, 3112, 4029, 5077, 5863, 5994]


@pytest.mark.parametrize(("every", "keep_every"), [(20, 50), (50, 20), (20, 60)])
def test_the_first_checkpoint_at_or_after_each_multiple_is_a_milestone(
    tmp_path: Path, every: int, keep_every: int
) -> None:
    for step in range(every - 1, 300, every):
        write(tmp_path, step, size=1)
        prune(tmp_path, keep_last=1, keep_every=keep_every)
    kept = {int(folder.name.removeprefix("step-")) + 1 for folder in complete(tmp_path)}
    assert kept == {-(-multiple // every) * every for multiple in range(keep_every, 301, keep_every)}


@given(st.lists(st.integers(0, 400), unique=True).map(sorted), st.integers(1, 60))
def test_each_multiple_has_one_checkpoint_that_stands_for_it_and_is_kept(steps: list[int], every: int) -> None:
    standing = [step for before, step in pairwise([-1, *steps]) if stands_for_multiple(step, every, before)]
    first = {next((step for step in steps if step >= multiple - 1), None) for multiple in range(every, 402, every)}
    assert standing == sorted(first - {None})
    assert {Path(f"step-{step}") for step in standing} == _milestones(
        [Path(f"step-{step}") for step in steps], every, lambda folder: True
    )


def test_without_an_earlier_checkpoint_that_is_known_a_multiple_itself_stands_for_it() -> None:
    """Also where the run has gone back from a later one, or never got as far as that."""
    for before in (None, 1029, 1099):
        assert stands_for_multiple(999, 1000, before) and not stands_for_multiple(1019, 1000, before)
    assert not stands_for_multiple(1029, 1000, 1029)


@pytest.mark.parametrize(("keep_last", "most"), [(0, 0), (50, 50)])
def test_checkpoints_that_were_seen_whole_are_not_asked_for_all_their_files_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_last: int, most: int
) -> None:
    """2,500 of 64 shards took 165,000 calls with each further one, 50 s on NFS, in which nothing was dispatched."""
    for step in range(50):
        write(tmp_path, step, size=1)
    known: dict[Path, int] = {}
    assert prune(tmp_path, keep_last, known=known) == [] and len(known) == 50
    asked, stat = list[Path](), Path.stat
    with monkeypatch.context() as counting:
        counting.setattr(Path, "stat", lambda path, **how: asked.append(path) or stat(path, **how))
        assert prune(tmp_path, keep_last, known=known) == [] and len(asked) == most
        asked.clear()
        write(tmp_path, 50, size=1)
        asked.clear()
        prune(tmp_path, keep_last or 51, known=known)
    assert len(asked) <= 50 + 4 and len(known) == 51


def test_a_checkpoint_that_was_seen_whole_is_looked_at_again_once_it_is_another_one(tmp_path: Path) -> None:
    for step in (9, 19, 29):
        write(tmp_path, step)
    known: dict[Path, int] = {}
    prune(tmp_path, keep_last=3, known=known)
    torn = step_folder(tmp_path, 19)
    (torn / COMPLETE).unlink()
    os.utime(step_folder(tmp_path, 29) / COMPLETE, ns=(0, 0))
    next(step_folder(tmp_path, 29).glob("shard-*")).unlink()
    assert prune(tmp_path, keep_last=1, known=known) == [] and list(known) == [step_folder(tmp_path, 9)]
    write(tmp_path, 39)
    assert len(prune(tmp_path, keep_last=1, known=known)) == 3 and step_folder(tmp_path, 39) in known


def test_prune_removes_no_checkpoint_where_all_are_kept(tmp_path: Path) -> None:
    for step in (9, 19, 29, 39):
        write(tmp_path, step)
    for step in (4, 24, 34):
        begin(step_folder(tmp_path, step))  # torn
    assert [folder.name for folder in prune(tmp_path, keep_last=0, until=29)] == ["step-4", "step-24"]
    assert [folder.name for folder in complete(tmp_path)] == ["step-9", "step-19", "step-29", "step-39"]


@pytest.mark.parametrize("keep_last", [1, 2])
def test_later_checkpoints_that_a_run_has_passed_over_keep_no_place_of_those_that_it_writes(
    tmp_path: Path, keep_last: int
) -> None:
    for step in (9, 19, 29):
        write(tmp_path, step)
    for step in (19, 29):  # resumed from step 9
        shard = next(step_folder(tmp_path, step).glob("shard-*"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    write(tmp_path, 14)
    removed = prune(tmp_path, keep_last=keep_last, until=14)
    assert [folder.name for folder in removed] == (["step-9"] if keep_last == 1 else [])
    assert latest(tmp_path) == step_folder(tmp_path, 14)


def test_an_old_checkpoint_that_cannot_be_removed_stays_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (9, 19):
        write(tmp_path, step)

    def busy(folder: Path) -> None:
        raise OSError(16, "Device or resource busy", str(folder))

    monkeypatch.setattr("actors.state.checkpoint_files.shutil.rmtree", busy)
    assert prune(tmp_path, keep_last=1) == []
    assert latest(tmp_path) == step_folder(tmp_path, 19)


@pytest.mark.parametrize(("mute", "removed"), [("step-19", ["step-9", "step-29"]), ("step-39", ["step-9", "step-19"])])
def test_prune_goes_on_where_storage_does_not_give_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mute: str, removed: list[str]
) -> None:
    for step in (9, 19, 29, 39):
        write(tmp_path, step)
    stat = Path.stat

    def given(path: Path, **how: bool) -> os.stat_result:
        if path.parent.name == mute and (mute == "step-19" or path.name != COMPLETE):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return stat(path, **how)

    with monkeypatch.context() as failing:
        failing.setattr(Path, "stat", given)
        assert [folder.name for folder in prune(tmp_path, keep_last=1)] == removed


@pytest.mark.parametrize(("keep_last", "keep_every", "most"), [(0, 0, 50), (2, 0, 50 + 2 * 65), (2, 10, 50 + 2 * 65)])
def test_the_first_look_at_many_checkpoints_asks_for_no_sizes_of_those_that_stand_in_nobody_s_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_last: int, keep_every: int, most: int
) -> None:
    """50 of 64 shards took 3,250 calls of the controller after each of its starts."""
    last = write(tmp_path, 499, size=64)
    for step in range(9, 499, 10):
        shutil.copytree(last, step_folder(tmp_path, step))
    torn = step_folder(tmp_path, 5)
    begin(torn)
    asked, stat = list[Path](), Path.stat
    with monkeypatch.context() as counting:
        counting.setattr(Path, "stat", lambda path, **how: asked.append(path) or stat(path, **how))
        removed = prune(tmp_path, keep_last, keep_every, until=499, known={})
    assert torn in removed and len(removed) == (49 if keep_last and not keep_every else 1)
    assert len([path for path in asked if path.parent.parent == tmp_path]) <= most + 1


def test_of_several_that_stand_for_a_multiple_the_first_whole_one_is_kept(tmp_path: Path) -> None:
    for step in (9, 12, 15, 19, 29, 39):
        write(tmp_path, step)
    shard = next(step_folder(tmp_path, 9).glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    removed = prune(tmp_path, keep_last=1, keep_every=10)
    assert [folder.name for folder in removed] == ["step-9", "step-15"]


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_newest_checkpoint_that_is_cut_short_keeps_no_place_of_a_whole_one(tmp_path: Path, keep_last: int) -> None:
    for step in (9, 19, 29, 39):
        write(tmp_path, step)
    shard = next(step_folder(tmp_path, 39).glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    removed = prune(tmp_path, keep_last=keep_last)
    assert [folder.name for folder in removed] == ["step-9", "step-19"][: 3 - keep_last]
    assert latest(tmp_path) == step_folder(tmp_path, 29)


def test_of_a_checkpoint_that_was_moved_to_another_disk_and_linked_back_the_link_goes(tmp_path: Path) -> None:
    """Its COMPLETE was removed there, through the link, and nothing else."""
    (archive := tmp_path / "archive").mkdir()
    for step in (9, 19):
        shutil.move(write(tmp_path, step), archive)
        step_folder(tmp_path, step).symlink_to(step_folder(archive, step))
    shard = next(step_folder(archive, 19).glob("shard-*"))
    shard.write_bytes(bytes([*shard.read_bytes()[:-1], 1]))
    linked = step_folder(tmp_path, 19)
    assert damage(linked) and begin(linked) and not linked.is_symlink(), "the damaged one, whose step is written again"
    write(tmp_path, 29)
    assert prune(tmp_path, keep_last=1) == [step_folder(tmp_path, 9), linked]
    assert complete(tmp_path) == [step_folder(tmp_path, 29)]
    assert complete(archive) == [step_folder(archive, 9), step_folder(archive, 19)]


def test_a_first_state_that_may_not_be_read_any_more_is_as_one_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker asks for its checksum, though a run with a state reads nothing of it: each ended at its start."""
    folder = write(tmp_path, 9)
    assert checksum_or_gone(folder) == checksum(folder) != GONE
    refuse(monkeypatch, folder / COMPLETE)
    assert checksum_or_gone(folder) == GONE


@pytest.mark.parametrize("name", [COMPLETE, "shard-0-1003.safetensors"])
def test_a_step_whose_checkpoint_may_not_be_read_is_written_anew_and_that_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A run that passed over it and came to its step again wrote none of it, at each attempt: in a folder of another
    user nothing can be removed."""
    folder = write(tmp_path, 9, size=1, of="another user")
    with monkeypatch.context() as another:
        refuse(another, folder / name)
        lock(another, folder)
        with pytest.raises(PermissionError):
            damage(folder)
        assert begin(folder) and list(folder.iterdir()) == []
    write(tmp_path, 9)
    assert not damage(folder)
    assert load(tmp_path / "passed-over-step-9")[0]["of"] == "another user" and complete(tmp_path) == [folder]


def test_a_torn_attempt_of_another_user_is_moved_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = step_folder(tmp_path, 9)
    for _ in range(2):
        begin(folder)
        write_shard(folder, state())
        with monkeypatch.context() as another:
            lock(another, folder)
            assert begin(folder)
    assert {path.name for path in tmp_path.iterdir()} == {"step-9", "passed-over-step-9", "passed-over-step-9-2"}


def of_later_version(folder: Path) -> Path:
    """As a version writes it whose format is the next one."""
    said = json.loads((folder / COMPLETE).read_bytes())
    (folder / COMPLETE).write_text(json.dumps({**said, "format": [number + 1 for number in said["format"]]}))
    return folder


def test_a_checkpoint_of_a_later_version_is_neither_damaged_nor_none_and_stays(tmp_path: Path) -> None:
    """A run that was started with an older Heddle went on without it, even anew, and removed it at its step."""
    written = "# Written by Heddle 9.1.\nrun: {}\n"
    folder = of_later_version(write(tmp_path, 19, config=written))
    for look in (is_complete, damage, load, begin, checksum):
        with pytest.raises(LaterFormat, match=r"step-19 .* format is 2, .* up to 1\. Use the version .*it, 9\.1, or"):
            look(folder)
    write(tmp_path, 9)
    with pytest.raises(LaterFormat):
        latest(tmp_path)
    remove_torn(folder)
    for step in (29, 39):
        write(tmp_path, step)
    assert prune(tmp_path, keep_last=1) == [step_folder(tmp_path, 9), step_folder(tmp_path, 29)]
    assert latest(tmp_path) == step_folder(tmp_path, 39) and complete(tmp_path) == [step_folder(tmp_path, 39)]
    newest = of_later_version(write(tmp_path, 49))
    assert prune(tmp_path, keep_last=1) == [] and newest.is_dir() and folder.is_dir()


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EACCES])
def test_one_that_storage_does_not_tell_of_may_be_of_a_later_version_and_stays(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, read = [write(tmp_path, step) for step in (9, 19, 29)], Path.read_bytes
    of_later_version(folders[0])

    def stale(path: Path) -> bytes:
        if path.parent == folders[0]:
            raise OSError(code, os.strerror(code))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", stale)
    assert prune(tmp_path, keep_last=1) == [folders[1]] and folders[0].is_dir()


def test_no_bit_that_changes_makes_a_checkpoint_one_of_a_later_version(tmp_path: Path) -> None:
    """It would refuse every resume, where one that is damaged is passed over."""
    marker = write(tmp_path, 9) / COMPLETE
    said = marker.read_bytes()
    for place, bit in product(range(len(said)), range(8)):
        marker.write_bytes(said[:place] + bytes([said[place] ^ 1 << bit]) + said[place + 1 :])
        is_complete(marker.parent)


def test_a_checkpoint_without_a_format_is_of_the_first(tmp_path: Path) -> None:
    folder = write(tmp_path, 9)
    before, said = checksum(folder), json.loads((folder / COMPLETE).read_bytes())
    assert said.pop("format") == [1, 1]
    (folder / COMPLETE).write_text(json.dumps(said))
    assert latest(tmp_path) == folder and checksum(folder) == before
    (folder / COMPLETE).write_text(json.dumps({**said, "format": "?"}))
    assert not is_complete(folder)


def test_numbers_of_an_unknown_kind_are_of_a_later_version_where_the_bytes_are_those_that_were_written(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path, 9, size=1)
    shard = next(folder.glob("shard-*"))
    shard.write_bytes(shard.read_bytes().replace(b'"F32"', b'"F16"', 1))
    with pytest.raises(CheckpointError, match="not those that were written") as raised:
        load(folder)
    assert not isinstance(raised.value, LaterFormat) and "checksum" in damage(folder)
    said = json.loads((folder / COMPLETE).read_bytes())
    said["files"][shard.name]["crc32"] = zlib.crc32(shard.read_bytes())
    (folder / COMPLETE).write_text(json.dumps(said))
    for look in (damage, load, latest, begin):
        with pytest.raises(LaterFormat, match=r"shard-0-1003\.safetensors holds F16, .* reads F32 and F64"):
            look(tmp_path if look is latest else folder)
    assert folder.is_dir()


def lock(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A folder in which this user may remove nothing."""
    unlink, rmtree = Path.unlink, shutil.rmtree

    def check(path: Path) -> None:
        if folder in (path, path.parent):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: check(path) or unlink(path, missing_ok))
    monkeypatch.setattr(shutil, "rmtree", lambda path: check(path) or rmtree(path))


def refuse(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """A file of somebody else, which this user may not read."""
    opened = open

    def given(name: Any, *more: Any, **named: Any) -> Any:
        if name == path or name == str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(name))
        return opened(name, *more, **named)

    monkeypatch.setattr("builtins.open", given)
    monkeypatch.setattr("io.open", given)


@pytest.mark.parametrize("asked", ["size", "bytes"])
def test_a_checkpoint_that_storage_does_not_give_now_is_no_torn_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """A stale handle is back after a moment. Meanwhile a milestone of keep_every was removed, and a whole checkpoint
    where another attempt at its step began."""
    for step in (9, 19, 29):
        write(tmp_path, step)
    milestone = step_folder(tmp_path, 9)
    size, read = Path.stat, Path.open

    def answers(path: Path, asks: str) -> None:
        if asks == asked and path.parent == milestone and path.suffix:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as stale:
        stale.setattr(Path, "stat", lambda path, **how: answers(path, "size") or size(path, **how))
        stale.setattr(Path, "open", lambda path, *mode, **how: answers(path, "bytes") or read(path, *mode, **how))
        assert prune(tmp_path, keep_last=1, keep_every=10) == []
        remove_torn(milestone)
        with pytest.raises(OSError, match="Stale file handle"):
            begin(milestone)
        with pytest.raises(OSError, match="Stale file handle"):
            load(milestone)
    assert [folder.name for folder in complete(tmp_path)] == ["step-9", "step-19", "step-29"]
    assert not damage(milestone)


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    write(tmp_path, 9)
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) == step_folder(tmp_path, 9)
    assert latest(tmp_path) != write(tmp_path, 10) == latest(tmp_path)


@pytest.mark.parametrize("ema", [True, False])
@pytest.mark.parametrize("size", [1, 8])
def test_forecast_is_within_two_percent_of_the_real_size(tmp_path: Path, ema: bool, size: int) -> None:
    total = 100_000
    folder = step_folder(tmp_path, 1)
    begin(folder)
    for lo, hi in shard_bounds(total, size):
        write_shard(folder, state(lo, hi, total=total, ema=ema))
    layout = [{"name": f"blocks.{i}.attn1.to_q.weight", "shape": [10, 100]} for i in range(100)]
    seal(folder, {"step": 1, "parameters": layout})
    real = sum(path.stat().st_size for path in folder.iterdir())
    weight_bytes = 4 * len(state(ema=ema).arrays)
    assert forecast_bytes(total, weight_bytes=weight_bytes, num_shards=size, num_parameters=100) == pytest.approx(
        real, rel=0.02
    )


def test_too_little_space_is_refused_before_writing(tmp_path: Path) -> None:
    check_free_space(tmp_path / "not" / "there" / "yet", 1)
    with pytest.raises(CheckpointError, match=r"needs 1048576\.00 GiB"):
        check_free_space(tmp_path, 2**50)
