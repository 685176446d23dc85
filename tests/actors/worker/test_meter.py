"""What cascades take is measured, and a limit of memory is an error that leaves nothing behind."""

from __future__ import annotations

import gc
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from actors.config import TrainMemoryConfig
from actors.messages import CascadeTask, OutOfMemory, Piece, Span, StepSample
from actors.plan.types import USABLE, Item
from actors.worker import executor as executor_room
from actors.worker.executor import Executor
from actors.worker.meter import DeviceMeter, NoMeter, TensorMeter, collect, freed, host_bytes, keep, ran_out
from app.device.choice import pick_device
from ops.units import GIB
from ops.update.flat_vector import trainable
from ops.waiting import GroupError
from tests.actors.exactness import MODEL, Host, make_hosts, one_worker, run_step, train_config

ITEMS = [Item(id=f"s0.{n}", batch=3, frames=9, height=32, width=32, text_tokens=12) for n in range(2)]


def task(module: str, batch: int = 3) -> CascadeTask:
    samples = tuple(
        StepSample(step=0, item="i", index=n, key=f"k{n}", grid=(3, 2, 2), weight=1 / batch) for n in range(batch)
    )
    return CascadeTask(
        generation=1,
        step=0,
        cascade=f"i/{module}",
        name=f"{module} 9f 32x32 b{batch} sp1 s0",
        module=module,  # type: ignore[arg-type]
        bag=(0,),
        samples=samples,
        pieces=(Piece(item="i", bucket=(9, 32, 32), batch=batch),),
        planned_start_s=0.0,
        planned_end_s=1.0,
        publish=tuple(range(batch)),
    )


def clips(batch: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (batch, 9, 32, 32, 3), dtype=np.uint8)


def metered(limit_gib: float) -> Host:
    (host,) = make_hosts(1, torch.float32, train_config(), meter=TensorMeter(limit_gib), name="w0")
    return host


def with_room(room_gib: float) -> Host:
    """A worker that has this much beside what it holds."""
    host = metered(1000.0)
    room = host.executor.meter.room_gib()
    assert room is not None
    host.executor.meter = TensorMeter(1000.0 - room + room_gib)
    host.executor.meter.room_gib()
    return host


def test_every_cascade_says_what_it_took_and_where_nobody_counts_nothing() -> None:
    host = metered(64.0)
    run_step([host], ITEMS, one_worker(ITEMS))
    assert host.done is not None
    needs = {span.name.split()[0]: span.need_gib for span in host.done.spans}
    assert needs.pop("finish") is None
    assert set(needs) == {"text", "vae", "dit"} and all(need and 0 < need < 1 for need in needs.values())
    (unmetered,) = make_hosts(1, torch.float32, train_config())
    assert isinstance(unmetered.executor.meter, NoMeter)
    run_step([unmetered], ITEMS, one_worker(ITEMS))
    assert unmetered.done is not None and {span.need_gib for span in unmetered.done.spans} == {None}


def test_clips_that_do_not_fit_together_are_encoded_in_parts_with_the_same_result() -> None:
    host = metered(64.0)
    whole = host.encoding.vae(task("vae", 4), clips(4), [True] * 4)
    (span,) = host.executor.work.spans
    assert span.need_gib is not None and span.exceeded_gib is None
    short = with_room(0.7 * span.need_gib)
    parts = short.encoding.vae(task("vae", 4), clips(4), [True] * 4)
    assert all(torch.equal(a.rows, b.rows) for a, b in zip(whole, parts, strict=True))
    (span,) = short.executor.work.spans
    assert span.exceeded_gib is not None, "the planner hears that four at a time are too many"


def test_a_cascade_that_does_not_fit_is_named_with_what_it_took_and_frees_it() -> None:
    host = with_room(1e-5)
    before = [p.detach().clone() for _, p in trainable(host.executor.modules.dit)]
    with pytest.raises(OutOfMemory) as caught:
        run_step([host], ITEMS, one_worker(ITEMS))
    found = caught.value.found
    assert found.worker == "w0" and found.degree == 1 and found.peak_gib > found.room_gib > 0
    assert found.missing_gib == pytest.approx(found.peak_gib - found.room_gib)
    with pytest.raises(OutOfMemory, match=found.name):  # the end of the step says it, too
        host.executor.admit(1)
    assert all(torch.equal(a, p) for a, (_, p) in zip(before, trainable(host.executor.modules.dit), strict=True))


def test_memory_that_runs_out_before_a_pass_is_no_matter_of_what_the_last_one_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cascade whose inputs alone do not fit is named to the planner at once, and not run again and again."""
    checkpointed = replace(MODEL, dit=replace(MODEL.dit, gradient_checkpointing=True))
    train = train_config(memory=TrainMemoryConfig(attention="kept"))
    (host,) = make_hosts(1, torch.float32, train, config=checkpointed, name="w0")
    run_step([host], ITEMS, one_worker(ITEMS))
    assert host.done is not None and {s.kept_attention for s in host.done.spans if s.module == "dit"} == {True}

    def short(*given: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 9.00 GiB")

    monkeypatch.setattr(executor_room, "gather_inputs", short)
    with pytest.raises(OutOfMemory):
        run_step([host], ITEMS, one_worker(ITEMS))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_bag_that_ran_out_of_memory_leaves_nothing_of_it_on_any_rank(
    monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """One raises in the middle, the other loses its peer in an exchange; the hosts keep both errors."""
    hosts = make_hosts(2, torch.float32, train_config())
    plan = [replace(c, workers=(0, 1), degree=2) if c.module == "dit" else c for c in one_worker(ITEMS)]
    dit = Executor.dit

    def failing(name: str) -> None:
        if name == phase:
            raise torch.OutOfMemoryError("Tried to allocate 9.00 GiB")

    def run(executor: Executor, *arguments: Any) -> None:
        with freed():
            dit(executor, *arguments)

    monkeypatch.setattr(Executor, "dit", run)
    run_step(hosts, ITEMS, plan)
    collect()
    before = host_bytes()
    hosts[0].executor.on_phase = failing
    with pytest.raises((OutOfMemory, RuntimeError)):
        run_step(hosts, ITEMS, plan)
    for host in hosts:
        assert host.error is not None
        host.executor.leave()
    left_gib = (host_bytes() - before) / GIB
    assert left_gib < 0.02 * max(span.need_gib or 0.0 for span in metered_spans())


def test_a_compilers_tensors_count_nothing_and_their_sizes_may_be_symbols() -> None:
    before = host_bytes()
    real = torch.zeros(1 << 20)
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(real)
    assert isinstance(fake.shape[0], torch.SymInt)
    assert 4 << 20 <= host_bytes() - before < 5 << 20


def metered_spans() -> list[Span]:
    """Spans of the same step on one worker that counts."""
    host = metered(64.0)
    run_step([host], ITEMS, one_worker(ITEMS))
    assert host.done is not None
    return list(host.done.spans)


def test_the_room_is_what_the_states_leave_and_not_what_is_garbage() -> None:
    meter = TensorMeter(64.0)
    meter.settled()
    before = meter.room_gib()
    ring: list[object] = [torch.zeros(1 << 20)]
    ring.append(ring)
    del ring
    meter.settled()
    assert before is not None and meter.room_gib() == pytest.approx(before, abs=1e-4)


def test_the_error_travels_between_processes() -> None:
    host = with_room(1e-5)
    with pytest.raises(OutOfMemory) as caught:
        host.encoding.vae(task("vae", 1), clips(1), [True])
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.found == caught.value.found and str(again) == again.found.describe()
    assert replace(again.found, room_gib=0.0).missing_gib == 0.0


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("NCCL error ... Failed to CUDA calloc 6291456 bytes"), True),
        (GroupError("connecting bag (0, 1) failed: NCCL error ... Last error: Failed to CUDA calloc 12 bytes"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_that_mean_memory(error: BaseException, memory: bool) -> None:
    assert ran_out(error) == memory


class FakeAllocator:
    """PyTorch's functions for the memory of a device of 80 GiB, of which others have 2."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = self.peak = self.retries = self.asked = 0
        self.others_gib = 2.0
        for name in ("mem_get_info", "memory_reserved", "memory_stats_as_nested_dict", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.delattr(torch.cuda, "memory_stats")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        self.asked += 1
        return int((80 - self.others_gib) * GIB) - self.memory_reserved(device), 80 * GIB

    def memory_reserved(self, device: torch.device) -> int:
        return 40 * GIB

    def memory_stats_as_nested_dict(self, device: torch.device) -> dict[str, Any]:
        tensors = {"current": self.current, "peak": self.peak}
        return {"allocated_bytes": {"all": tensors}, "num_alloc_retries": self.retries} if self.peak else {}

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.current

    def take(self, gib: float) -> None:
        self.current += int(gib * GIB)
        self.peak = max(self.peak, self.current)


def test_a_limit_can_be_set_on_the_device_that_commands_pick(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: dict[int, float] = {}

    def limit(share: float, device: torch.device) -> None:
        shares[torch._utils._get_device_index(device)] = share  # as PyTorch's does

    FakeAllocator(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limit)
    DeviceMeter(pick_device("auto"), limit_gib=20)
    DeviceMeter(pick_device("cuda"), limit_gib=20)
    assert shares == {0: 0.25}


def test_a_device_is_asked_for_its_room_once_a_step_and_not_by_cascades(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeAllocator(monkeypatch)
    meter = DeviceMeter(torch.device("cuda", 0))
    assert meter.start() == pytest.approx(USABLE * 78) and meter.stop() == 0.0
    device.take(10)
    for _ in range(3):
        assert meter.start() == pytest.approx(USABLE * 78 - 10)
        device.take(5)
        device.take(-5)
        assert meter.stop() == pytest.approx(5)
    assert device.asked == 1
    device.others_gib = 6.0  # communicators came
    assert meter.start() == pytest.approx(USABLE * 78 - 10) and meter.room_gib() == pytest.approx(USABLE * 74 - 10)
    room = meter.start()
    assert room == pytest.approx(USABLE * 74 - 10) and device.asked == 2
    meter.settled()
    assert meter.start() == room and device.asked == 3


@pytest.mark.parametrize(("taken_gib", "tells_room"), [(1, False), (20, False), (50, True), (70, False)])
def test_a_large_cascade_before_which_cached_blocks_were_given_back_is_as_much_as_fits(
    taken_gib: int, tells_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the encode of a text would need all of the room, for which no plan has any when some of it has gone."""
    device = FakeAllocator(monkeypatch)
    meter = DeviceMeter(torch.device("cuda", 0))
    device.take(10)
    room = meter.start()
    assert room == pytest.approx(USABLE * 78 - 10)
    device.take(taken_gib)
    device.take(-taken_gib)
    device.retries += 1
    assert meter.stop() == pytest.approx(room if tells_room else taken_gib)


def test_what_an_encode_takes_that_outlasts_its_step_is_room_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step ends, and its report says the room, while the encode is in the middle of its work."""
    device = FakeAllocator(monkeypatch)
    meter = DeviceMeter(torch.device("cuda", 0))
    device.take(10)
    meter.start()
    device.take(20)
    device.others_gib = 6.0
    assert meter.room_gib() == pytest.approx(USABLE * 74 - 10)
    assert meter.stop() == pytest.approx(20) and meter.room_gib() == pytest.approx(USABLE * 74 - 30), "left behind"


def test_what_graphs_hold_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator has reserved it, and gives it to nothing else."""
    FakeAllocator(monkeypatch)
    meter = DeviceMeter(torch.device("cuda", 0))
    monkeypatch.setattr("actors.worker.meter.held_by_graphs", lambda device: 3 * GIB)
    assert meter.room_gib() == pytest.approx(USABLE * 78 - 3)


def test_what_stays_is_walked_no_more_on_a_gpu_alone() -> None:
    """On the CPU its tensors are found by that walk."""
    before = gc.get_freeze_count()
    try:
        keep(torch.device("cpu"))
        assert gc.get_freeze_count() == before
        keep(torch.device("cuda", 0))
        assert gc.get_freeze_count() > before + 1000
    finally:
        gc.unfreeze()
