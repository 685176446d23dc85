import contextlib
import hashlib
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from data.config import (
    BatchConfig,
    BucketsConfig,
    DataConfig,
    EngineConfig,
    LimitsConfig,
    SourceConfig,
)
from data.dataset.dataset import Dataset
from data.dataset.order import LATER_SIZES
from data.dataset.order_state import BatchSizes
from data.decode import decode_job
from data.engines.blocks import as_batch
from data.engines.executions import GROWING, KEPT, growing
from data.engines.placement import kill
from data.engines.ray_data import RayEngine, _start_gate
from data.errors import DataIOError
from data.ledger import Reason
from data.types import Batch, DataItem
from ops.geometry import Geometry
from tests.data.making import clip
from tests.rays import local_ray

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
HERE = str(Path(__file__).parents[1])
ROOT = str(Path(__file__).parents[3])
OVERLAPPING = 4  # windows at once, at most: one ends, the next is used, the one after it starts
TABLE = ("1x64x96", "1x96x64", "1x80x80", "9x64x96", "9x96x64", "9x80x80")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, HERE])
    with local_ray(num_cpus=2, object_store_memory=200 << 20, logging_level=logging.ERROR, log_to_driver=False):
        yield
    del os.environ["PYTHONPATH"]


@pytest.fixture(autouse=True)
def _stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines of a test that fails midway are stopped: an execution that outlives Ray would end this process."""
    started: list[RayEngine] = []
    usual = RayEngine.start

    def start(engine: RayEngine, first_step: int, avoid: Sequence[str] = ()) -> None:
        started.append(engine)
        usual(engine, first_step, avoid)

    monkeypatch.setattr(RayEngine, "start", start)
    yield
    for engine in started:
        engine.stop()


def dataset(clips: Path, decoder: str = "data.decode:decode_clip", window: int = 7, **changes: object) -> Dataset:
    source = SourceConfig(path=str(clips / "shards"), caption="json:captions", index=str(clips / "index"))
    engine = EngineConfig(
        decode_workers=2,
        decode_cpus=0.5,
        object_store_mb=32,
        decoder=decoder,
        window=window,
    )
    usual = DataConfig(
        sources=(source,),
        buckets=BucketsConfig(table=TABLE),
        items_per_step=3,
        engine=engine,
        batch=BatchConfig(memory_tokens=400, text_tokens=48),
        limits=LimitsConfig(max_bad_fraction=1.0),
    )
    return Dataset.open(replace(usual, **changes), Geometry(), seed=0)  # type: ignore[arg-type]


def checksum(value: Any) -> str:
    batch = as_batch(value)
    return hashlib.sha256(batch.video.tobytes() + repr((batch.captions, batch.ok, batch.keys)).encode()).hexdigest()


def reference(clips: Path, first: int, last: int) -> list[list[str]]:
    """Checksums by plain decoding, one after the other."""
    data = dataset(clips)
    return [[checksum(decode_job(item.job)) for item in data.step(step).items] for step in range(first, last)]


@ray.remote(num_cpus=0)
class Consumer:
    """Reads references as a worker does."""

    def checksum(self, value: Any) -> str:
        assert not as_batch(value).video.flags.writeable  # a view of the object store, not a copy
        return checksum(value)


def consume(engine: RayEngine, consumers: list[Any], first: int, last: int) -> list[list[str]]:
    found = []
    for step in range(first, last):
        refs = engine.batches(step)
        found.append(ray.get([consumers[slot % len(consumers)].checksum.remote(ref) for slot, ref in enumerate(refs)]))
        engine.release(step)
    return found


def drain(engine: RayEngine, first: int, last: int) -> list[list[str]]:
    found = []
    for step in range(first, last):
        found.append([checksum(ray.get(ref)) for ref in engine.batches(step)])
        engine.release(step)
    return found


def test_pixels_are_the_same_for_any_number_of_consumers_and_across_a_stop(cluster: None, clips: Path) -> None:
    consumers = [Consumer.remote() for _ in range(3)]
    expected = reference(clips, 0, 10)
    first, second = RayEngine(dataset(clips)), RayEngine(dataset(clips, window=5))
    first.start(0)
    found = consume(first, consumers[:1], 0, 3)
    found += consume(first, consumers[:2], 3, 5)
    token = first.dataset.token(5)
    first.stop()
    second.start(second.dataset.resume(token))
    found += consume(second, consumers[:3], 5, 8)
    found += consume(second, consumers[:2], 8, 10)
    assert found == expected
    counts = second.counts()
    assert (
        counts["scheduled"]
        == counts["delivered"]
        == sum(item.batch for step in range(10) for item in first.dataset.step(step).items)
    )
    second.stop()
    for consumer in consumers:
        ray.kill(consumer)


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2, 3, 4, 8])
def test_every_number_of_consumers_sees_the_same_pixels(cluster: None, clips: Path, number: int) -> None:
    """Starts anywhere and stops anywhere: the step each number begins at differs too."""
    consumers = [Consumer.remote() for _ in range(number)]
    engine = RayEngine(dataset(clips))
    engine.start(number)
    found = consume(engine, consumers, number, number + 3)
    engine.stop()
    for consumer in consumers:
        ray.kill(consumer)
    assert found == reference(clips, number, number + 3)


def test_items_that_need_no_pixels_are_asked_for_once_and_not_decoded(cluster: None, clips: Path) -> None:
    data, asked = dataset(clips), Counter[str]()

    def needs_pixels(item: DataItem) -> bool:
        asked[item.id] += 1
        return item.slot == 1

    engine = RayEngine(data, needs_pixels=needs_pixels)
    engine.start(0)
    batches = [as_batch(ray.get(ref)) for ref in engine.batches(0)]
    engine.stop()
    expected = [decode_job(item.job) for item in data.step(0).items]
    assert {asked[item.id] for item in data.step(0).items} == {1}, "as its work begins, and never again"
    assert [batch.video.shape[1] == 0 for batch in batches] == [True, False, True]
    assert [(b.captions, b.ok, b.keys) for b in batches] == [(b.captions, b.ok, b.keys) for b in expected]
    assert (batches[1].video == expected[1].video).all()
    assert engine.counts()["delivered"] == sum(item.batch for item in data.step(0).items)


def decode_processes() -> list[psutil.Process]:
    """Worker processes of this test's cluster that run decode tasks now."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "decode_block" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.long
def test_a_gate_before_which_a_thousand_tasks_wait_is_opened(cluster: None) -> None:
    """By itself Ray serves 1,000 calls of an actor at a time: windows of hundreds of decode workers filled it, and no
    call that lets them in came to its turn."""
    gate = _start_gate()
    waiting = [gate.begin.remote(number, f"s{number}.0") for number in range(1001)]
    gate.open.remote(len(waiting), [])
    assert ray.get(waiting, timeout=60) == [(0, True)] * len(waiting)
    kill(gate)


@pytest.mark.long
def test_killed_decode_workers_change_no_pixel(cluster: None, clips: Path) -> None:
    engine = RayEngine(dataset(clips, decoder="slow_decoder:decode", window=64))
    engine.start(0)
    killed = 0
    deadline = time.monotonic() + 240
    found = []
    for step in range(8):
        while killed < 2 and time.monotonic() < deadline:
            for victim in decode_processes()[:1]:
                with contextlib.suppress(psutil.NoSuchProcess):  # it may end by itself
                    victim.send_signal(signal.SIGKILL)
                    killed += 1
            time.sleep(0.02)
        found += drain(engine, step, step + 1)
    engine.stop()
    assert killed == 2
    assert found == reference(clips, 0, 8)


def test_a_clip_that_crashes_its_decoder_is_named_and_the_rest_of_its_batch_is_trained(
    cluster: None, clips: Path
) -> None:
    data = dataset(clips, decoder="marked_decoder:decode")
    victim = data.step(1).items[0].samples[1]
    engine = RayEngine(data)
    (clips / "crashing").write_text(victim.key)
    engine.start(0)
    batches: list[Batch] = [as_batch(ray.get(ref)) for step in range(2) for ref in engine.batches(step)]
    engine.stop()
    named = {fault.key for batch in batches for fault in batch.faults}
    assert named == {victim.key}
    assert engine.counts()["skipped"] == {str(Reason.DECODER_CRASH): sum(b.keys.count(victim.key) for b in batches)}
    for batch in batches:
        assert batch.ok == [key != victim.key for key in batch.keys]


def test_faults_are_counted_for_the_source_they_are_of(cluster: None, clips: Path, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(clip(96, 64))
    (tmp_path / "a.txt").write_text("a clip")
    shards = SourceConfig(path=str(clips / "shards"), caption="json:captions", index=str(clips / "index"), weight=0.5)
    data = dataset(clips, sources=(shards, SourceConfig(path=str(tmp_path), kind="pairs", weight=0.5)))
    (tmp_path / "a.mp4").unlink()
    engine = RayEngine(data)
    engine.start(0)
    for step in range(3):
        engine.batches(step)
    of_shards, of_pairs = engine.counts()["sources"]
    engine.stop()
    assert of_shards["skipped"] == {} and of_shards["delivered"] == of_shards["scheduled"] > 0
    assert of_pairs["skipped"] == {"file_missing": of_pairs["scheduled"]} and of_pairs["scheduled"] > 0


def test_a_storage_failure_stops_the_run_by_its_own_name(cluster: None, clips: Path, tmp_path: Path) -> None:
    for shard in (clips / "shards").glob("*.tar"):
        (tmp_path / shard.name).write_bytes(shard.read_bytes())
    data = dataset(clips, sources=(SourceConfig(path=str(tmp_path), index=str(tmp_path / "index")),))
    for shard in tmp_path.glob("*.tar"):
        shard.unlink()
    engine = RayEngine(data)
    engine.start(0)
    for step in (0, 0, 1):  # asked again, for the same step or a later one: the same answer at once
        with pytest.raises(DataIOError, match="gone since it was indexed"):
            engine.batches(step)
    engine.stop()


def test_a_pausing_consumer_leaves_the_object_store_bounded(cluster: None, clips: Path) -> None:
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    def used() -> int:
        state = get_state_from_address(ray.get_runtime_context().gcs_address)
        return get_memory_info_reply(state).store_stats.object_store_bytes_used

    data = dataset(clips, window=200, batch=BatchConfig(memory_tokens=4000, text_tokens=48))
    limited = replace(data.config, engine=replace(data.config.engine, object_store_mb=8))
    before = -1
    while before != (before := used()):  # what earlier tests left goes by and by
        time.sleep(0.5)
    engine = RayEngine(data, limited)
    engine.start(0)
    engine.batches(0)
    peak, busy_s, began = 0, 0.0, time.monotonic()
    for number in range(20):
        if number == 10:  # by now, nothing is decoded any more
            busy_s, began = time.process_time(), time.monotonic()
        time.sleep(0.2)
        peak = max(peak, used() - before)
    busy_s, paused_s = time.process_time() - busy_s, time.monotonic() - began
    engine.stop()
    largest = max(data.batch_sizes()[b] * b.frames * b.area * 3 for b in data.batch_sizes())
    held = 3 * largest  # of the step that was handed out
    assert 0 < peak <= (8 << 20) + held
    assert busy_s < 0.25 * paused_s, "waiting costs nothing: Ray Data's scheduling loop must not spin"


def test_a_stopped_engine_leaves_no_execution_behind(
    cluster: None, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray waits 2 s for its scheduling thread; one that is still there after `ray.shutdown` ends the process."""
    from ray.data._internal.execution.streaming_executor import StreamingExecutor

    usual, stopping = StreamingExecutor._scheduling_loop_step, threading.Event()

    def slow(executor: StreamingExecutor, topology: Any) -> bool:
        if stopping.is_set():
            time.sleep(4)
        return usual(executor, topology)

    monkeypatch.setattr(StreamingExecutor, "_scheduling_loop_step", slow)
    engine = RayEngine(dataset(clips))
    engine.start(0)
    engine.batches(0)
    deadline = time.monotonic() + 120  # between two windows there may be none
    while not any(thread.name.startswith("StreamingExecutor") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "nothing is decoded ahead"
        time.sleep(0.01)
    stopping.set()
    engine.stop()
    assert not any(thread.name.startswith("StreamingExecutor") for thread in threading.enumerate())


def test_windows_leave_nothing_behind(cluster: None, clips: Path) -> None:
    """A run of a month has a hundred thousand of them."""
    from ray.data._internal.logging import get_log_directory
    from ray.data._internal.stats import get_or_create_stats_actor

    def told_of() -> set[str]:
        return set(ray.get(get_or_create_stats_actor().get_datasets.remote()))

    def files() -> set[str]:
        folder = Path(str(get_log_directory()))
        return {file.name for file in folder.glob("ray-data-*")}

    before, told_before = files(), told_of()
    engine = RayEngine(dataset(clips, window=1))
    engine.start(0)
    drain(engine, 0, 15)  # in 45 windows
    engine.stop()
    assert 1 <= len(told_of() - told_before) <= OVERLAPPING, "names come again in Ray's statistics"
    assert len(files() - before) <= OVERLAPPING
    for module, path in GROWING:
        assert 1 <= len(growing(module, path)) <= KEPT < 45, path


def test_all_decode_tasks_are_of_one_kind_to_ray(cluster: None, clips: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray keeps each kind of task for ever; what a task asks for is a part of its kind."""
    from ray.remote_function import RemoteFunction

    usual: Any = RemoteFunction._remote
    asked: list[tuple[object, ...]] = []

    def remote(function: RemoteFunction, *args: Any, **options: Any) -> Any:
        asked.append(tuple(options.get(name) for name in ("num_cpus", "memory", "resources", "label_selector")))
        return usual(function, *args, **options)

    monkeypatch.setattr(RemoteFunction, "_remote", remote)
    engine = RayEngine(dataset(clips))
    engine.start(0)
    drain(engine, 0, 5)
    engine.stop()
    assert len(asked) >= 15
    assert len(set(asked)) == 1, Counter(asked)


@pytest.mark.long
def test_several_feeders_deliver_what_one_does(cluster: None, clips: Path) -> None:
    data = dataset(clips)
    engine = RayEngine(data, replace(data.config, engine=replace(data.config.engine, feeders=2)))
    engine.start(2)
    found = drain(engine, 2, 5)
    counts = engine.counts()
    engine.stop()
    assert found == reference(clips, 2, 5)
    # samples of the steps before the start count as delivered
    assert counts["delivered"] == sum(item.batch for step in range(5) for item in data.step(step).items)


@pytest.mark.long
def test_further_feeders_know_every_decision_on_batch_sizes(
    cluster: None, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that went back has more of them ahead than a position has: others' clips were trained from there on."""
    data = dataset(clips)
    last = 2 + LATER_SIZES
    for step in range(1, last):
        data.resize(BatchSizes(from_step=step, sizes=dict.fromkeys(data.batch_sizes(), 1 + step % 2)))
    engine = RayEngine(data, replace(data.config, engine=replace(data.config.engine, feeders=2)))
    engine.start(0)
    try:
        for step in range(last + 2):
            delivered = [as_batch(ray.get(reference)).keys for reference in engine.batches(step)]
            planned = [[sample.key for sample in item.samples] for item in data.step(step).items]
            assert delivered == planned, step
            engine.release(step)
    finally:
        engine.stop()
