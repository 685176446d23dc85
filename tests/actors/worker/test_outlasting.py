"""An encode that outlasts its step: the update does not wait for it, and the training is the same."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from actors.messages import StaleGeneration
from actors.plan.types import Cascade, Item, Part
from actors.run import steps
from actors.run.dispatch import Call, Holdings, calls_of, finish_of
from actors.run.steps import StepRunner
from actors.step import StepItems
from actors.worker.executor import Executor
from actors.worker.work_done import FinishedStep
from ops.update.engine import StepIncomplete
from ops.waiting import GroupError
from tests.actors.exactness import Host, execute, make_hosts, on_all, train_config
from tests.actors.fakes import step_items

ITEMS = [
    [Item(id=f"s{step}.{n}", batch=2, frames=5, height=32, width=48, text_tokens=12) for n in range(2)]
    for step in (0, 1)
]
DONE_S = 120.0


def cascade(item: str, module: str, workers: tuple[int, ...], start: float, end: float) -> Cascade:
    step = int(item[1])
    return Cascade(id=f"{item}/{module}/0", module=module, step=step, parts=(Part(item=item, first=0, count=2),),
                   degree=len(workers), workers=workers, start_s=start, end_s=end)  # fmt: skip


def encodes(item: str, worker: int) -> list[Cascade]:
    return [cascade(item, module, (worker,), 0, 1) for module in ("text", "vae")]


def two_steps(early: tuple[int, ...]) -> list[list[Cascade]]:
    """The VAE of s1.0 runs on `early` from the first step into the second."""
    first = [*encodes("s0.0", 0), *encodes("s0.1", 1)]
    first += [cascade("s0.0", "dit", (0,), 1, 2), cascade("s0.1", "dit", (1,), 1, 9)]
    late = cascade("s1.0", "vae", early, 2 if early == (0,) else 8.9, 12)
    second = [
        cascade("s1.0", "text", (0,), 3, 4),
        *encodes("s1.1", 1),
        cascade("s1.0", "dit", (0, 1, 2), 4, 5),
        cascade("s1.1", "dit", (1,), 5, 6),
    ]
    return [[*first, late], second]


def samples_of(hosts: Sequence[Host]) -> dict[int, StepItems]:
    return {
        step: step_items(
            step,
            [(i.id, (i.frames, i.height, i.width), [f"0/{step}/{i.id}/{n}" for n in range(i.batch)]) for i in items],
            hosts[0].executor.modules.geometry,
            "sample",
        )
        for step, items in enumerate(ITEMS)
    }


def train(hosts: Sequence[Host], plans: Sequence[Sequence[Cascade]]) -> list[list[FinishedStep]]:
    """Every dispatch as the controller and the workers run it. An encode that outlasts its step begins to compute only
    when its worker has updated: a rank that waits for it before waits for ever."""
    samples, holdings, before = samples_of(hosts), Holdings(), []
    published: dict[str, list] = {}
    found: list[list[FinishedStep]] = []
    for step, cascades in enumerate(plans):
        calls = calls_of(cascades, samples, 1, step, holdings)
        ready = {c.task.cascade: threading.Event() for c in calls}
        updated = [threading.Event() for _ in hosts]
        done: dict[int, FinishedStep] = {}

        def deliver(call: Call, results: list | None, ready: dict = ready) -> None:
            if call.task.publish:
                published[call.task.cascade] = results or []
                if call.task.cascade in ready:
                    ready[call.task.cascade].set()

        def late(call: Call, updated: list = updated) -> list:
            assert updated[call.rank].wait(DONE_S), "the update waits for an encode that outlasts its step"
            return execute(hosts[call.rank].encoding, call, published, frozenset()) or []

        def run(
            rank: int,
            step: int = step,
            calls: list = calls,
            ready: dict = ready,
            updated: list = updated,
            done: dict = done,
            before: list = before,
        ) -> None:
            executor = hosts[rank].executor
            mine = [call for call in calls if call.rank == rank]
            for call in mine:
                if call.task.outlasts:
                    executor.begin_outlasting(call.task, lambda call=call: late(call))
                    continue
                for needed in call.needs:
                    assert needed not in ready or ready[needed].wait(DONE_S)
                deliver(call, execute(hosts[rank].encoding, call, published, frozenset()))
            done[rank] = executor.finish(finish_of(rank, calls, 1, step, False, before))
            updated[rank].set()
            for call in [call for call in mine if call.task.outlasts]:
                deliver(call, executor.end_outlasting(call.task))

        on_all(hosts, run)
        before = [call for call in calls if call.task.outlasts]
        found.append([done[rank] for rank in range(len(hosts))])
    return found


@pytest.mark.parametrize("early", [(0,), (0, 2)], ids=["alone", "in a bag"])
def test_the_update_does_not_wait_for_an_encode_that_outlasts_its_step(early: tuple[int, ...]) -> None:
    hosts = make_hosts(3, torch.float64, train_config())
    steps = train(hosts, two_steps(early))
    alone = make_hosts(1, torch.float64, train_config())
    whole = [
        [cascade(f"s{step}.{n}", module, (0,), 0, 1) for n in (0, 1) for module in ("text", "vae", "dit")]
        for step in (0, 1)
    ]
    expected = train(alone, whole)
    for step in (0, 1):
        assert steps[step][0].result.loss == pytest.approx(expected[step][0].result.loss, rel=1e-10)
    ours, theirs = (list(h[0].executor.modules.dit.parameters()) for h in (hosts, alone))
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(ours, theirs, strict=True))
    named = [[span.name for span in steps[step][0].spans if span.step == 1 and span.module == "vae"] for step in (0, 1)]
    assert [len(names) for names in named] == [0, 1], "its span belongs to the step in which it has ended"


def test_time_at_the_gate_is_no_work() -> None:
    hosts = make_hosts(3, torch.float64, train_config())
    (_, second) = train(hosts, two_steps((0, 2)))
    (span,) = [s for s in second[2].spans if s.module == "vae"]
    assert span.work_s <= span.end - span.start - (span.wait_s or 0.0) + 1e-3


def test_a_step_that_lacks_what_outlasted_the_one_before_is_not_applied() -> None:
    hosts = make_hosts(1, torch.float64, train_config())
    first = [*encodes("s0.0", 0), cascade("s0.0", "dit", (0,), 1, 2), cascade("s1.0", "vae", (0,), 1.5, 9)]
    calls = calls_of(first, samples_of(hosts), 1, 0, Holdings())
    executor = hosts[0].executor
    for call in calls[:-1]:
        execute(hosts[0].encoding, call, {}, frozenset())
    assert calls[-1].task.outlasts and calls[-1].task.cascade not in finish_of(0, calls, 1, 0, False).cascades
    with pytest.raises(StepIncomplete, match="was not begun here"):
        executor.end_outlasting(calls[-1].task)
    task = finish_of(0, [], 1, 1, False, before=[calls[-1]])
    with pytest.raises(StepIncomplete, match="has not run s1"):
        executor.work.check_complete(task)


def test_what_an_encode_raises_is_raised_at_its_end_and_stops_the_worker() -> None:
    (host,) = make_hosts(1, torch.float64, train_config())
    calls = calls_of([cascade("s1.0", "vae", (0,), 1, 9)], samples_of([host]), 1, 0, Holdings())

    def encode() -> list:
        return host.encoding.vae(calls[0].task, np.zeros((2, 5, 32, 48), np.uint8), [True, True])

    host.executor.begin_outlasting(calls[0].task, encode)
    with pytest.raises((ValueError, RuntimeError, IndexError, StaleGeneration)):
        host.executor.end_outlasting(calls[0].task)
    with pytest.raises(StaleGeneration, match="failed here"):
        host.executor.admit(1)


@pytest.mark.parametrize("fails", [False, True])
def test_what_the_end_of_a_step_has_queued_comes_before_all_that_follows_it(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside an encode it has a stream of its own. A host that has waited for it needs no more; one that has failed
    forms the next generation on the usual stream, and would write weights that a queued update still reads."""
    said: list[str] = []
    beside = SimpleNamespace(synchronize=lambda: said.append("host waits"))
    usual = SimpleNamespace(wait_stream=lambda other: said.append(f"usual waits {other is beside}"))
    for name, value in {
        "Stream": lambda device: beside,
        "current_stream": lambda device: usual,
        "stream": lambda stream: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    executor: Any = SimpleNamespace(_outlasting=object(), device=torch.device("cuda", 0), _stream=None)
    with nullcontext() if not fails else pytest.raises(GroupError), Executor.beside_encodes(executor):
        if fails:
            raise GroupError("a worker has died")
    assert said == (["usual waits True"] if fails else ["host waits"])


def test_a_generation_that_ends_waits_for_the_thread_and_drops_its_results() -> None:
    (host,) = make_hosts(1, torch.float64, train_config())
    calls = calls_of([cascade("s1.0", "vae", (0,), 1, 9)], samples_of([host]), 1, 0, Holdings())
    threads = threading.active_count()
    host.executor.begin_outlasting(calls[0].task, lambda: execute(host.encoding, calls[0], {}, frozenset()) or [])
    host.executor.leave()
    assert len(host.executor.store) == 0 and threading.active_count() <= threads


def test_a_call_of_two_steps_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a generation is lost: Ray refuses to wait for a reference twice."""
    asked: list[str] = []

    def wait_for(references: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        assert len(references) == len(set(references)) == num_returns
        asked.extend(references)
        return references, []

    monkeypatch.setattr(steps, "wait", wait_for)
    monkeypatch.setattr(steps, "has_lost_argument", lambda reference: reference == "late")
    late = SimpleNamespace(reference="late", reads_data=True)
    own = [SimpleNamespace(reference=f"s{step}", reads_data=True) for step in (0, 1)]
    running = [SimpleNamespace(calls=[own[0], late]), SimpleNamespace(calls=[late, own[1]])]
    runner: Any = SimpleNamespace(running=running)
    assert StepRunner._pixels_lost(runner)
    assert sorted(asked) == ["late", "s0", "s1"]
