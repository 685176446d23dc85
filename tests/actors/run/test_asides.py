"""Which worker makes which aside, when it is given a turn, and what happens when a worker goes."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.aside_turns import TurnReport, TurnTask
from actors.plan.types import Cascade, Part
from actors.records.events import AsidesAwaited, AsidesLeft, RunEvent, SamplesFailed
from actors.run import asides
from actors.run.asides import MAX_LOSSES, AsideQueue, AsideTurns, gaps_of
from actors.step import Seat
from ops.waiting import Patience
from tests.actors.fakes import Handle


def works(*names: str) -> list[Any]:
    return [SimpleNamespace(name=name) for name in names]


def cascade(module: Any, step: int, workers: tuple[int, ...], start_s: float, end_s: float) -> Cascade:
    part = Part(item="i", first=0, count=1)
    return Cascade(id=f"{module}{workers}{end_s}", module=module, step=step, parts=(part,), degree=len(workers),
                   workers=workers, start_s=start_s, end_s=end_s)  # fmt: skip


def test_a_gap_is_from_a_workers_last_cascade_to_the_last_of_the_step() -> None:
    cascades = [
        cascade("dit", 7, (0,), 0, 3),
        cascade("dit", 7, (1, 2), 0, 2),
        cascade("vae", 8, (2,), 2, 2.5),  # early
        cascade("vae", 8, (0,), 3, 4),  # outlasts the step
    ]
    assert gaps_of(cascades, 7, 4) == [0.0, 1.0, 0.5, 3.0]


def on(node: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, node)


def test_no_more_workers_of_a_node_have_asides_than_its_memory_holds() -> None:
    queue, world = AsideQueue(), on("n", "w0", "w1", "w2") | on("m", "w3", "w4")
    queue.add(works("a", "b", "c", "d"))
    queue.deal(world, most=1)
    assert {worker: work.name for worker, work in queue.held.items()} == {"w0": "a", "w3": "b"}
    assert queue.end("a")
    queue.deal(world, most=1)
    assert {worker: work.name for worker, work in queue.held.items()} == {"w3": "b", "w0": "c"}
    queue.deal(world, most=2)
    assert queue.held["w1"].name == "d" and not queue.waiting


def test_who_is_free_takes_the_next_and_who_goes_gives_it_back_first() -> None:
    queue = AsideQueue()
    queue.add(works("a", "b", "c", "d"))
    queue.deal(on("n", "w0", "w1"))
    assert {worker: work.name for worker, work in queue.held.items()} == {"w0": "a", "w1": "b"}
    assert queue.end("b") and not queue.end("b")
    queue.deal(on("n", "w1", "w2"))  # w0 has gone
    assert {worker: work.name for worker, work in queue.held.items()} == {"w1": "a", "w2": "c"}
    assert [work.name for work in queue.waiting] == ["d"] and queue.left == ("a", "c", "d")


def test_an_aside_that_ends_its_workers_is_given_up() -> None:
    queue = AsideQueue()
    queue.add(works("a"))
    for number in range(MAX_LOSSES):
        queue.deal(on("n", f"w{number}"))
        queue.give_back(f"w{number}")
    assert [work.name for work in queue.hopeless] == ["a"] and not queue.left


@dataclass
class Wanting:
    """Wants these asides; remembers what became of them."""

    first: list[Any]
    share: float = 0.05
    expected: bool = True
    reports: list[TurnReport] = field(default_factory=list)
    unwanted: tuple[str, ...] = ()

    def wanted(self) -> list[Any]:
        found, self.first = self.first, []
        return found

    def ended(self, report: TurnReport) -> RunEvent | None:
        self.reports.append(report)
        return SamplesFailed(step=1, why=report.failed) if report.failed else None

    def dropped(self) -> Container[str]:
        return self.unwanted


class Answers:
    """Workers whose turns are over as soon as they are asked: made, failed, or the worker is gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **kinds: str) -> None:
        self.asked: list[tuple[str, TurnTask]] = []
        self.kinds = kinds
        monkeypatch.setattr(asides, "wait", lambda refs, num_returns, timeout: (list(refs), []))
        monkeypatch.setattr(asides, "get", self._get)

    def seats(self, *names: str) -> tuple[Seat, ...]:
        return tuple(Seat(name=name, node="n", handle=Handle(turn=self._turn(name))) for name in names)  # type: ignore[arg-type]

    def _turn(self, name: str) -> Any:
        def answer(task: TurnTask) -> tuple[str, str, int]:
            self.asked.append((name, task))
            return name, task.aside.name, len(self.asked)

        return answer

    def _get(self, reference: tuple[str, str, int]) -> TurnReport:
        name, aside, _ = reference
        kind = self.kinds.get(name, "made")
        if kind == "gone":
            raise ray.exceptions.ActorDiedError
        if kind == "slow":
            return TurnReport(aside=aside, took_s=0.1)
        return TurnReport(aside=aside, ended=True, made=name, failed="no file" if kind == "fails" else "")


def give(turns: AsideTurns, world: Sequence[Seat], outlasted: Container[int] = ()) -> None:
    turns.deal(world)
    turns.give(1, 4, world, [cascade("dit", 4, (0,), 0, 2)], outlasted, Patience(limit_s=60.0))


def test_every_step_asks_who_has_an_aside_and_is_not_outlasted(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[RunEvent] = []
    source, answers = Wanting(works("a", "b", "c")), Answers(monkeypatch, w1="slow")
    turns, world = AsideTurns(source, told.append), answers.seats("w0", "w1", "w2")
    give(turns, world, outlasted={2})
    assert [(name, task.aside.name, task.gap_s, task.share) for name, task in answers.asked] == [
        ("w0", "a", 0.0, 0.05),
        ("w1", "b", 2.0, 0.05),
    ]
    give(turns, world)
    assert [report.aside for report in source.reports] == ["a"]
    assert [(name, task.aside.name) for name, task in answers.asked[2:]] == [("w1", "b"), ("w2", "c")]
    assert not told
    give(turns, world)
    give(turns, world)
    assert [name for name, _ in answers.asked[4:]] == ["w1", "w1"], "only one is left"


def test_a_step_waits_for_what_a_worker_does_for_the_first_time_and_then_for_its_longest_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, answers = Wanting(works("a", "b")), Answers(monkeypatch)
    turns, world = AsideTurns(source, lambda event: None), answers.seats("w0", "w1", "w2")
    assert turns.deal(world) is None
    give(turns, world)
    assert turns.deal(world) == 0.0, "nobody has one"
    source.first = works("c")
    assert turns.deal(world) == 0.0, "w0 has made one; what w2 might do does not count"
    answers.kinds["w0"] = "slow"
    give(turns, world)
    assert turns.deal(world) == 0.1
    source.first = works("d", "e")
    assert turns.deal(world) is None, "w2 has its first"


def test_without_asides_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch)
    give(AsideTurns(Wanting([]), lambda event: None), answers.seats("w0"))
    assert not answers.asked


def test_a_dead_workers_aside_is_made_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    source, answers = Wanting(works("a")), Answers(monkeypatch, w0="gone")
    turns = AsideTurns(source, lambda event: None)
    give(turns, answers.seats("w0", "w1"))
    give(turns, answers.seats("w1"))
    give(turns, answers.seats("w1"))
    assert [(report.aside, report.made) for report in source.reports] == [("a", "w1")]


def test_a_failure_is_told_and_the_others_of_its_round_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[RunEvent] = []
    source, answers = Wanting(works("a", "b"), unwanted=("b",)), Answers(monkeypatch, w0="fails")
    turns = AsideTurns(source, told.append)
    give(turns, answers.seats("w0"))
    give(turns, answers.seats("w0"))
    assert told == [SamplesFailed(step=1, why="no file")]
    assert len(answers.asked) == 1 and turns.deal(answers.seats("w0")) == 0.0


def test_the_end_of_the_run_makes_the_rest_also_when_a_worker_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[RunEvent] = []
    source, answers = Wanting(works("a", "b", "c")), Answers(monkeypatch, w0="gone")
    assert AsideTurns(source, told.append, quiet_s=0.0).finish(1, answers.seats("w0", "w1"))
    assert sorted(report.aside for report in source.reports) == ["a", "b", "c"]
    assert all(task.whole for _, task in answers.asked)
    assert told == [AsidesAwaited(asides=("a", "b", "c"), limit_s=600.0)], "once, as it begins to wait"


def test_a_run_that_ends_with_nothing_left_to_make_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[RunEvent] = []
    assert not AsideTurns(Wanting([]), told.append, quiet_s=0.0).finish(1, Answers(monkeypatch).seats("w0"))
    assert told == []


def test_what_is_made_at_once_after_the_last_step_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[RunEvent] = []
    AsideTurns(Wanting(works("a", "b")), told.append).finish(1, Answers(monkeypatch).seats("w0"))
    assert told == []


def test_who_stops_the_run_does_not_wait_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[RunEvent] = []
    source, answers = Wanting(works("a", "b", "c")), Answers(monkeypatch)
    asked = iter([False, True])
    AsideTurns(source, told.append).finish(1, answers.seats("w0"), lambda: next(asked))
    assert len(answers.asked) == 1
    assert told == [AsidesLeft(asides=("b", "c"), why="the run was asked to end")]


def test_what_is_not_ready_after_the_last_step_is_told_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[RunEvent] = []
    source, answers = Wanting(works("a")), Answers(monkeypatch, w0="slow")
    AsideTurns(source, told.append, finish_s=0.05).finish(1, answers.seats("w0"))
    assert isinstance(told[-1], AsidesLeft) and told[-1].asides == ("a",) and answers.asked
    AsideTurns(Wanting(works("b")), told.append).finish(1, ())
    assert told[-1] == AsidesLeft(asides=("b",), why="no worker is left")
