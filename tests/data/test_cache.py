import errno
import multiprocessing
import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.cache import Cache, CacheWriter, EntryNames, Listing, latent_key, latent_keys, text_key
from data.config import CacheConfig, DataConfig, LimitsConfig
from data.decode import AVI_VERSION, DECODE_VERSION, PICTURE_VERSION, RESAMPLED_VERSION, TURNED_VERSION
from data.errors import DataIOError, DataUnreachable
from data.ledger import BadSample, Reason
from data.types import Bucket, Clip, DataItem, DecodeJob, SampleRef

SAMPLE = SampleRef(source=0, epoch=0, row=3, start_frame=5, key="a", caption_chars=4, content="ab12")
CLIP = Clip(key="a", media="a", offset=0, size=1, suffix="mp4", image=False, frames=22, fps=8.0, start_frame=5)
BUCKET = Bucket(17, 64, 96)


def cache(folder: Path) -> Cache:
    return Cache(CacheConfig(path=str(folder), min_free_gib=0.0))


def test_what_was_put_comes_back_also_in_another_run(tmp_path: Path) -> None:
    latent = np.random.default_rng(0).standard_normal((48, 5, 8, 12)).astype(np.float32)
    key = latent_key(SAMPLE, BUCKET, 8.0, "vae", "decoder 1")
    assert cache(tmp_path).get("latents", key) is None
    assert cache(tmp_path).put("latents", key, latent)
    again = cache(tmp_path)
    found = again.get("latents", key)
    assert found is not None and found.dtype == latent.dtype and np.array_equal(found, latent)
    assert (again.hits, again.misses) == (1, 0)
    assert again.size("latents") == (1, latent.nbytes + 128 + 8)


@pytest.mark.parametrize(
    "other",
    [
        latent_key(replace(SAMPLE, start_frame=6), BUCKET, 8.0, "vae", "decoder 1"),
        latent_key(replace(SAMPLE, content="cd34"), BUCKET, 8.0, "vae", "decoder 1"),
        latent_key(SAMPLE, Bucket(17, 96, 64), 8.0, "vae", "decoder 1"),
        latent_key(SAMPLE, BUCKET, 16.0, "vae", "decoder 1"),
        latent_key(SAMPLE, BUCKET, 8.0, "vae bf16", "decoder 1"),
        latent_key(SAMPLE, BUCKET, 8.0, "vae", "decoder 1", crop=True),
        latent_key(SAMPLE, BUCKET, 8.0, "vae", "decoder 2"),
    ],
)
def test_everything_a_latent_depends_on_is_in_its_key(other: str) -> None:
    assert other != latent_key(SAMPLE, BUCKET, 8.0, "vae", "decoder 1")


def test_a_latent_does_not_depend_on_when_and_where_it_is_drawn() -> None:
    moved = replace(SAMPLE, epoch=7, row=9, source=1, key="b", caption_drop=True)
    assert latent_key(moved, BUCKET, 8.0, "vae", "decoder 1") == latent_key(SAMPLE, BUCKET, 8.0, "vae", "decoder 1")


@pytest.mark.parametrize(
    ("about", "fps", "version"),
    [
        ({"suffix": "mp4"}, 0.0, DECODE_VERSION),
        ({"suffix": "mp4", "rotation": 90}, 0.0, DECODE_VERSION),
        ({"suffix": "jpg", "rotation": 90, "image": True}, 24.0, PICTURE_VERSION),
        ({"suffix": "png", "image": True}, 0.0, PICTURE_VERSION),
        ({"suffix": "avi"}, 0.0, AVI_VERSION),
        ({"suffix": "mkv"}, 0.0, DECODE_VERSION),
        ({"suffix": "mkv", "rotation": 90}, 0.0, TURNED_VERSION),
        ({"suffix": "webm", "rotation": 180}, 0.0, TURNED_VERSION),
        ({"suffix": "mp4"}, 24.0, RESAMPLED_VERSION),
        ({"suffix": "avi"}, 24.0, RESAMPLED_VERSION),
        ({"suffix": "mkv", "rotation": 90}, 24.0, RESAMPLED_VERSION),
    ],
)
def test_latents_are_those_of_a_decoder_and_its_version(about: dict[str, Any], fps: float, version: int) -> None:
    clip = replace(CLIP, **about)
    job = DecodeJob(item="s0", bucket=BUCKET, clips=(clip,), fps=fps, crop=False, limits=LimitsConfig(), decoder="")
    item, ours = DataItem(job=job, samples=(SAMPLE,)), DataConfig(sources=(), fps=fps)
    for decoder in (ours.engine.decoder, "my.module:decode"):
        config = replace(ours, engine=replace(ours.engine, decoder=decoder))
        wanted = latent_key(SAMPLE, BUCKET, ours.fps, "vae", f"{decoder} {version}")
        assert latent_keys(item, config, "vae") == (wanted,)


def test_texts_are_told_apart_by_caption_encoder_and_length() -> None:
    keys = {text_key("a", "t5", 226), text_key("b", "t5", 226), text_key("a", "umt5", 226), text_key("a", "t5", 128)}
    assert len(keys) == 4


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY\x01\x00", b"not an array"])
def test_a_torn_file_counts_as_absent(tmp_path: Path, damage: bytes) -> None:
    store, key = cache(tmp_path), text_key("a", "t5", 226)
    store.put("text", key, np.ones((4, 8), np.float32))
    (path,) = (tmp_path / "text").glob("*/*.npy")
    path.write_bytes(damage)
    assert store.get("text", key) is None
    assert store.put("text", key, np.zeros((4, 8), np.float32))
    found = store.get("text", key)
    assert found is not None and not found.any()


def test_an_array_of_objects_is_never_unpickled(tmp_path: Path) -> None:
    store, key = cache(tmp_path), text_key("a", "t5", 226)
    path = tmp_path / "text" / key[:2] / f"{key}.npy"
    path.parent.mkdir(parents=True)
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert store.get("text", key) is None


def test_a_full_disk_stops_the_cache_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Cache(CacheConfig(path=str(tmp_path), min_free_gib=1e9))
    assert not store.put("text", text_key("a", "t5", 226), np.ones(3))
    assert not store.put("text", text_key("b", "t5", 226), np.ones(3))
    assert len(caplog.records) == 1 and "min_free_gib" in caplog.text
    assert not list(tmp_path.rglob("*.npy"))


@pytest.mark.parametrize("begin", [128, 300, -4])
def test_a_file_of_the_right_size_whose_end_is_zeros_counts_as_absent(tmp_path: Path, begin: int) -> None:
    """What a power cut leaves."""
    store, key = cache(tmp_path), text_key("a", "t5", 226)
    store.put("text", key, np.ones((4, 80), np.float32))
    (path,) = (tmp_path / "text").glob("*/*.npy")
    data = path.read_bytes()
    path.write_bytes(data[:begin] + bytes(len(data[begin:])))
    assert store.get("text", key) is None and not path.exists()


@pytest.mark.parametrize(
    "array",
    [
        np.ones((4, 8), np.int8),
        np.ones((4, 7), np.float32),
        np.ones((9, 8), np.float32),
        np.ones(8, np.float32),
        np.ones((4, 8), np.float64),
    ],
)
def test_an_array_that_is_not_what_was_asked_for_counts_as_absent(tmp_path: Path, array: np.ndarray) -> None:
    store, key = cache(tmp_path), text_key("a", "t5", 226)
    store.put("text", key, array)
    assert store.get("text", key, range(1, 9), 8) is None
    store.put("text", key, np.ones((4, 8), np.float32))
    assert store.get("text", key, range(1, 9), 8) is not None


def test_an_entry_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace_ = os.fsync, os.replace
    thread = threading.get_ident()

    def note(what: str) -> None:
        if threading.get_ident() == thread:  # and not one that an earlier test has left
            done.append(what)

    monkeypatch.setattr(os, "fsync", lambda file: (note("fsync"), fsync(file))[1])
    monkeypatch.setattr(os, "replace", lambda *names: (note("replace"), replace_(*names))[1])
    cache(tmp_path).put("text", text_key("a", "t5", 226), np.ones(3))
    assert done == ["fsync", "replace"]


def test_a_cache_in_a_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.cache\.path 's3://bucket/cache' is a URI"):
        CacheConfig(path="s3://bucket/cache")


@pytest.mark.parametrize(("code", "tries"), [(errno.EACCES, 1), (errno.ENOSPC, 1), (errno.EROFS, 1), (errno.EIO, 8)])
def test_a_disk_that_fails_is_counted_and_said_and_then_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int, tries: int
) -> None:
    tried: list[Path] = []

    def fail(path: Path, array: np.ndarray) -> None:
        tried.append(path)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("data.cache._write", fail)
    writer = CacheWriter(cache(tmp_path))
    for number in range(12):
        assert writer.submit("text", text_key(str(number), "t5", 226), np.ones(3))
    wait_for(writer, 12)
    assert len(tried) == writer.cache.failed == tries and writer.counts == {"failed": 12}
    assert os.strerror(code) in caplog.text and "takes no more entries" in caplog.text


def test_a_slow_disk_costs_entries_and_not_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    monkeypatch.setattr("data.cache._write", lambda path, array: free.wait(60))
    writer = CacheWriter(cache(tmp_path), most_bytes=1000)
    taken = [writer.submit("text", text_key(str(number), "t5", 226), np.ones(50)) for number in range(10)]
    assert taken == [True, True] + [False] * 8
    free.set()
    wait_for(writer, 2)
    assert writer.counts == {"kept": 2, "dropped": 8}
    assert writer.submit("text", "f" * 64, np.ones(500)), "one that is larger than the queue goes alone"


def test_an_entry_that_is_on_its_way_is_written_when_it_has_come(tmp_path: Path) -> None:
    """Its bytes count from the beginning, and one that does not come is one entry less."""
    come = threading.Event()
    writer = CacheWriter(cache(tmp_path), most_bytes=1000)

    def ready() -> np.ndarray:
        assert come.wait(60)
        return np.ones(100, np.float64)

    key = text_key("late", "t5", 226)
    assert writer.submit_later("text", key, ready, 800)
    assert not writer.submit("text", text_key("other", "t5", 226), np.ones(50)), "there is no room beside it"
    assert writer.cache.get("text", key) is None
    come.set()
    wait_for(writer, 1)
    found = writer.cache.get("text", key)
    assert found is not None and found.sum() == 100

    def failed() -> np.ndarray:
        raise RuntimeError("CUDA error")

    assert writer.submit_later("text", "f" * 64, failed, 800)
    wait_for(writer, 2)
    assert writer.counts == {"kept": 1, "failed": 1, "dropped": 1}


def wait_for(writer: CacheWriter, entries: int) -> None:
    """Wait until `entries` were written or failed."""
    deadline = time.monotonic() + 60
    while writer.counts["kept"] + writer.counts["failed"] < entries and time.monotonic() < deadline:
        time.sleep(0.01)


def write_many(folder: str, seed: int) -> None:
    store = cache(Path(folder))
    for number in np.random.default_rng(seed).permutation(40):
        store.put("latents", text_key(str(number), "", 0), np.full((50, 50), number, np.float32))


@pytest.mark.timeout(600)  # 120 writes, and a disk may take a second for each
def test_several_processes_fill_one_cache(tmp_path: Path) -> None:
    workers = [
        multiprocessing.get_context("spawn").Process(target=write_many, args=(str(tmp_path), seed)) for seed in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(500)
        assert worker.exitcode == 0
    store = cache(tmp_path)
    for number in range(40):
        found = store.get("latents", text_key(str(number), "", 0))
        assert found is not None and (found == number).all()
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if name.endswith(".part")]


def stored(folder: Path) -> tuple[Cache, str, Path]:
    store, key = cache(folder), text_key("a", "t5", 226)
    store.put("text", key, np.ones((4, 8), np.float32))
    (path,) = (folder / "text").glob("*/*.npy")
    return store, key, path


def test_what_is_taken_is_what_was_put_and_of_the_wanted_shape(tmp_path: Path) -> None:
    store, key, _ = stored(tmp_path)
    assert np.array_equal(store.take("text", key, range(5), 8), np.ones((4, 8), np.float32))
    with pytest.raises(BadSample, match=r"is damaged \(float32 \[4, 8\] where float32 \[0..3, 8\]") as caught:
        store.take("text", key, range(4), 8)
    assert caught.value.reason is Reason.NOT_CACHED


def test_an_entry_that_is_damaged_or_gone_is_a_fault_of_its_sample_and_is_made_again(tmp_path: Path) -> None:
    store, key, path = stored(tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    for said in ("its checksum is wrong", "is not there; `heddle data cache` makes it again"):
        with pytest.raises(BadSample, match=said) as caught:
            store.take("text", key, range(5), 8)
        assert caught.value.reason is Reason.NOT_CACHED
    assert not len(store.listing("text").entries), "the next `heddle data cache` finds it missing"


def test_names_of_entries_are_found_in_their_order_whatever_their_bytes(tmp_path: Path) -> None:
    draw = random.Random(0)
    keys = [draw.randbytes(32).hex() for _ in range(500)] + [f"{number:02x}" * 32 for number in range(256)]
    keys += ["00" * 31 + "01", "01" + "00" * 31, "01" * 31 + "00"]
    there, others = keys[::2], keys[1::2]
    names = EntryNames(b"".join(map(bytes.fromhex, there)))
    assert list(names) == sorted(there) and len(names) == len(there)
    assert [names.place(key) for key in sorted(there)] == list(range(len(there)))
    assert {names.place(key) for key in others} == {-1} == {EntryNames().place(keys[0])}
    asked = EntryNames(b"".join(map(bytes.fromhex, keys)))
    assert [key for key, has in zip(asked, names.has(asked), strict=True) if has] == sorted(there)
    assert not EntryNames().has(asked).any() and names.has(EntryNames()).all()
    assert names.digest() == EntryNames(b"".join(map(bytes.fromhex, reversed(there)))).digest()
    assert names.digest() != EntryNames(b"".join(map(bytes.fromhex, others))).digest()
    store = Cache(CacheConfig(path=str(tmp_path)))
    folder = store._path("text", keys[0]).parent
    folder.mkdir(parents=True)
    for name in (f"{keys[0]}.npy", f".{keys[0]}.npy.1.part", "notes.npy", f"{keys[0].upper()}x.npy", f"{keys[0]}.txt"):
        (folder / name).touch()
    assert list(store.listing("text").entries) == [keys[0]]


def test_a_mark_says_why_there_is_no_entry_until_there_is_one(tmp_path: Path) -> None:
    store, key, _ = stored(tmp_path)
    other = text_key("b", "t5", 226)
    assert store.mark("text", other, BadSample(Reason.TRUNCATED_VIDEO, "ends 3 frames early", 512))
    listed = store.listing("text")
    assert (list(listed.entries), list(listed.bad)) == ([key], [other])
    with pytest.raises(BadSample) as caught:
        store.take("text", other, range(5), 8)
    assert (caught.value.reason, caught.value.detail) == (Reason.TRUNCATED_VIDEO, "ends 3 frames early")
    assert caught.value.offset == 512
    store.put("text", other, np.ones((4, 8), np.float32))
    assert not len(store.listing("text").bad) and len(store.take("text", other, range(5), 8)) == 4


def test_an_entry_that_storage_says_nothing_of_counts_as_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, key, _ = stored(tmp_path)
    asked = os.stat

    def stale(path: Any, **how: Any) -> os.stat_result:
        if key in str(path):
            raise OSError(errno.ESTALE, "Stale file handle")
        return asked(path, **how)

    with monkeypatch.context() as broken:
        broken.setattr(os, "stat", stale)
        assert not store.has("text", key)
    assert "Stale file handle" in caplog.text
    assert store.has("text", key)


def test_storage_that_fails_is_no_fault_of_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is not mounted any more would else be a hundred clips that train nothing."""
    monkeypatch.setattr("data.cache.time.sleep", lambda seconds: None)
    store, key, _ = stored(tmp_path)
    tries: list[Path] = []

    def refused(self: Path) -> bytes:
        tries.append(self)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "read_bytes", refused)
        with pytest.raises(DataUnreachable, match="Input/output error"):
            store.take("text", key, range(5), 8)
    assert len(tries) > 1
    assert len(store.take("text", key, range(5), 8)) == 4
    (tmp_path / "text").rename(tmp_path / "elsewhere")
    with pytest.raises(DataIOError, match="text is gone"):
        store.take("text", key, range(5), 8)


def test_a_listing_has_all_of_another_where_no_entry_and_no_mark_has_gone() -> None:
    def names(*keys: int) -> EntryNames:
        return EntryNames(b"".join(bytes([key]) * 32 for key in keys))

    before = Listing(entries=names(1, 2), bad=names(3))
    unmarked = Listing(entries=names(1, 2), bad=names())
    assert Listing(entries=names(1, 2, 3, 4), bad=names()).has_all_of(before), "a mark has become an entry"
    assert not unmarked.has_all_of(before) and before.has_all_of(unmarked)
    assert unmarked.digest() != before.digest()
