import hashlib
import json
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import BatchConfig, BucketsConfig, DataConfig, EngineConfig, LimitsConfig, SourceConfig
from data.dataset.dataset import Dataset
from data.decode import decode_job
from data.engines.blocks import as_batch, from_block, to_block
from data.engines.child import DecodeProcess
from data.engines.engine import make_engine
from data.engines.processes import PoolEngine
from data.errors import DataError, DataIOError
from data.ledger import Reason
from data.types import Batch, DecodeJob
from ops.geometry import Geometry
from tests.data.making import clip

HERE = str(Path(__file__).parents[1])
TABLE = ("1x64x96", "1x96x64", "1x80x80", "9x64x96", "9x96x64", "9x80x80")


def dataset(
    clips: Path, decoder: str = "data.decode:decode_clip", workers: int = 2, seed: int = 0, **changes: object
) -> Dataset:
    source = SourceConfig(path=str(clips / "shards"), caption="json:captions", index=str(clips / "index"))
    engine = EngineConfig(kind="pool", decode_workers=workers, lookahead=1, decoder=decoder)
    usual = DataConfig(
        sources=(source,),
        buckets=BucketsConfig(table=TABLE),
        items_per_step=3,
        engine=engine,
        batch=BatchConfig(memory_tokens=400, text_tokens=48),
        limits=LimitsConfig(max_bad_fraction=1.0),
    )
    return Dataset.open(replace(usual, **changes), Geometry(), seed)  # type: ignore[arg-type]


def checksum(batch: Batch) -> str:
    return hashlib.sha256(batch.video.tobytes() + repr((batch.captions, batch.ok, batch.keys)).encode()).hexdigest()


def reference(clips: Path, first: int, last: int) -> list[list[str]]:
    """Checksums by plain decoding, one after the other."""
    data = dataset(clips)
    return [[checksum(decode_job(item.job)) for item in data.step(step).items] for step in range(first, last)]


def drain(engine: PoolEngine, first: int, last: int) -> list[list[str]]:
    found = []
    for step in range(first, last):
        found.append([checksum(batch) for batch in engine.batches(step)])
        engine.release(step)
    return found


@pytest.mark.parametrize("workers", [1, 3])
def test_the_pool_delivers_what_plain_decoding_gives(clips: Path, workers: int) -> None:
    engine = PoolEngine(dataset(clips, workers=workers))
    engine.start(0)
    try:
        assert drain(engine, 0, 8) == reference(clips, 0, 8)
    finally:
        engine.stop()


def test_a_small_source_whose_files_vanish_ends_the_run_by_name(clips: Path, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.mp4").write_bytes(clip(96, 64, seed=number))
        (tmp_path / f"{number}.txt").write_text("a clip")
    shards = SourceConfig(path=str(clips / "shards"), caption="json:captions", index=str(clips / "index"), weight=0.5)
    mine = SourceConfig(path=str(tmp_path), kind="pairs", name="mine", weight=0.5)
    data = dataset(clips, sources=(shards, mine), limits=LimitsConfig())
    engine = PoolEngine(data)
    try:
        engine.start(0)
        engine.batches(0)
        for number in range(3):
            (tmp_path / f"{number}.mp4").unlink()
        with pytest.raises(DataError, match=r"source mine: none of its last 2\d draws could be read; .* is gone since"):
            for step in range(1, 100):
                engine.batches(step)
    finally:
        engine.stop()
    counts = data.ledger.summary()["sources"]
    assert counts[0]["skipped"] == {} and counts[1]["delivered"] and set(counts[1]["skipped"]) == {"file_missing"}


@given(st.integers(0, 2**31), st.integers(0, 9), st.sets(st.sampled_from(TABLE), min_size=2), st.integers(1, 3))
@settings(max_examples=5, deadline=None)
def test_pixels_are_those_of_plain_decoding_for_any_seed_table_and_step(
    clips: Path, seed: int, stop: int, table: set[str], workers: int
) -> None:
    buckets = BucketsConfig(table=tuple(sorted(table)))
    plain, stopped = (dataset(clips, seed=seed, buckets=buckets) for _ in range(2))
    engine = PoolEngine(dataset(clips, workers=workers, seed=seed, buckets=buckets))
    try:
        engine.start(engine.dataset.resume(json.loads(json.dumps(stopped.token(stop)))))
        assert drain(engine, stop, stop + 2) == [
            [checksum(decode_job(item.job)) for item in plain.step(step).items] for step in (stop, stop + 1)
        ]
    finally:
        engine.stop()


def test_a_stopped_run_continues_with_another_number_of_workers(clips: Path) -> None:
    first, second = PoolEngine(dataset(clips, workers=2)), PoolEngine(dataset(clips, workers=1))
    try:
        first.start(0)
        before = drain(first, 0, 5)
        second.start(second.dataset.resume(first.dataset.token(5)))
        assert before + drain(second, 5, 9) == reference(clips, 0, 9)
    finally:
        first.stop()
        second.stop()


def test_killed_decode_processes_change_no_pixel(clips: Path) -> None:
    engine = PoolEngine(dataset(clips))
    engine.start(0)
    found, killed = [], 0
    try:
        for step in range(6):
            if step in (1, 3):
                for process in engine.processes:  # in the middle of whatever they do ahead, one may just start anew
                    if (running := process._process) is not None:
                        running.kill()  # by its handle: it may have ended and been waited for
                        killed += 1
            found += drain(engine, step, step + 1)
        assert found == reference(clips, 0, 6) and killed >= 2
    finally:
        engine.stop()


def test_a_clip_that_kills_or_hangs_its_decoder_is_named_and_skipped(
    clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataset(clips, decoder="dangerous_decoder:decode")
    first, *_, last = sorted(data.step(0).items, key=lambda item: item.batch)
    hanging, crashing = first.samples[-1].key, last.samples[1].key
    monkeypatch.setenv("PYTHONPATH", HERE)
    monkeypatch.setenv("CRASHING_CLIPS", crashing)
    monkeypatch.setenv("HANGING_CLIPS", hanging)
    decode = DecodeProcess.decode

    def impatient(process: DecodeProcess, job: DecodeJob, timeout_s: float) -> Batch:
        """With the clip that hangs: the others may take as long as they do on a busy machine."""
        assert timeout_s == data.config.engine.clip_timeout_s * len(job.clips)
        return decode(process, job, 1.0 if hanging in [clip.key for clip in job.clips] else timeout_s)

    monkeypatch.setattr(DecodeProcess, "decode", impatient)
    engine = PoolEngine(data)
    engine.start(0)
    try:
        batches = engine.batches(0)
    finally:
        engine.stop()
    bad = {crashing: Reason.DECODER_CRASH, hanging: Reason.DECODE_TIMEOUT}
    assert {fault.key: fault.reason for batch in batches for fault in batch.faults} == bad
    for batch in batches:
        assert batch.ok == [key not in bad for key in batch.keys]
        assert [bool(video.any()) for video in batch.video] == batch.ok


def test_every_draw_is_counted_once_also_when_a_run_goes_back(clips: Path) -> None:
    engine = PoolEngine(dataset(clips))
    try:
        engine.start(0)
        drain(engine, 0, 6)
        token = engine.dataset.token(3)
        engine.start(3)
        drain(engine, 3, 6)
        scheduled = sum(item.batch for step in range(6) for item in engine.dataset.step(step).items)
        counts = engine.counts()
        assert (counts["scheduled"], counts["delivered"], counts["pending"]) == (scheduled, scheduled, 0)
        other = dataset(clips)
        other.resume(token)
        assert other.ledger.scheduled == sum(item.batch for s in range(3) for item in engine.dataset.step(s).items)
    finally:
        engine.stop()


def test_too_many_bad_clips_stop_the_run_with_one_sentence(clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset(clips, decoder="dangerous_decoder:decode", limits=LimitsConfig(max_bad_fraction=0.01, bad_after=5))
    monkeypatch.setenv("PYTHONPATH", HERE)
    monkeypatch.setenv("CRASHING_CLIPS", data.step(0).items[0].samples[0].key)
    monkeypatch.setenv("HANGING_CLIPS", "")
    engine = PoolEngine(data)
    engine.start(0)
    try:
        with pytest.raises(DataError, match=r"bad data: 1 of \d+ samples .* worst: 1 decoder_crash"):
            drain(engine, 0, 1)
    finally:
        engine.stop()


@pytest.mark.parametrize(
    ("harm", "said"),
    [(Path.unlink, "gone since it was indexed"), (lambda shard: os.truncate(shard, 700), "has 700 bytes, but had")],
    ids=["gone", "cut"],
)
def test_a_lost_shard_stops_the_run(clips: Path, tmp_path: Path, harm: Callable[[Path], None], said: str) -> None:
    for shard in (clips / "shards").glob("*.tar"):
        (tmp_path / shard.name).write_bytes(shard.read_bytes())
    data = dataset(clips, sources=(SourceConfig(path=str(tmp_path), index=str(tmp_path / "index")),))
    for shard in tmp_path.glob("*.tar"):
        harm(shard)
    engine = PoolEngine(data)
    engine.start(0)
    try:
        with pytest.raises(DataIOError, match=said):
            engine.batches(0)
    finally:
        engine.stop()


def test_a_process_with_thousands_of_open_files_decodes(clips: Path) -> None:
    """Descriptors above 1023, as a long run with many peers has them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    engine = PoolEngine(dataset(clips, workers=1))
    engine.start(0)
    try:
        assert drain(engine, 0, 1) == reference(clips, 0, 1)
    finally:
        engine.stop()
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_unknown_decoder_is_named(clips: Path) -> None:
    engine = PoolEngine(dataset(clips, decoder="no_such_module:decode"))
    engine.start(0)
    try:
        with pytest.raises(ValueError, match="no_such_module:decode"):
            engine.batches(0)
    finally:
        engine.stop()


def test_a_block_is_the_batch_without_a_copy(clips: Path) -> None:
    data = dataset(clips)
    batch = decode_job(data.step(0).items[0].job)
    block = to_block(batch)
    again = from_block(block)
    assert checksum(again) == checksum(batch) == checksum(as_batch(batch))
    assert again.video.ctypes.data == batch.video.ctypes.data


def test_the_settings_choose_the_engine(clips: Path) -> None:
    data = dataset(clips)
    engine = make_engine(data)
    assert isinstance(engine, PoolEngine)
    engine.stop()
    other = make_engine(data, replace(data.config, engine=replace(data.config.engine, kind="ray")))
    assert type(other).__name__ == "RayEngine"


def test_a_module_in_the_current_folder_is_not_taken_for_ours(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference(clips, 0, 2)
    (tmp_path / "data.py").write_text("raise SystemExit('the user has a module of this name')\n")
    monkeypatch.chdir(tmp_path)
    engine = PoolEngine(dataset(clips, workers=1))
    engine.start(0)
    try:
        assert drain(engine, 0, 2) == expected
    finally:
        engine.stop()
