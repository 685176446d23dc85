"""A million steps: what is held of the past neither grows nor forgets the way back."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.config import BatchConfig, BucketsConfig, DataConfig, SourceConfig
from data.dataset.dataset import Dataset
from data.dataset.order_state import Cursor, OrderState, SampleDraw
from data.dataset.positions import FEWEST_RECENT, MOST_TOKENS, MOST_WAITING, Positions
from data.errors import DataError
from data.types import Bucket
from ops.geometry import Geometry

BUCKET = Bucket(1, 64, 96)


class Plan:
    """As long as one likes: a step is its number."""

    def __init__(self) -> None:
        self.walked = 0

    def advance(self, state: OrderState) -> None:
        state.step += 1
        self.walked += 1

    def token(self, state: OrderState) -> dict[str, Any]:
        return {"step": state.step}

    def restore(self, token: dict[str, Any]) -> OrderState:
        return at(token["step"])


def at(step: int, waiting: int = 0) -> OrderState:
    queues = {BUCKET: [SampleDraw(0, 0, 0, 0)] * waiting} if waiting else {}
    return OrderState(step=step, stage=0, drawn=step, passed=0, cursors=[Cursor()], queues=queues)


def run(steps: int, waiting: int = 0) -> tuple[Plan, Positions]:
    plan: Any = Plan()
    positions, state = Positions(plan, at(0), recent=200), at(0, waiting)
    for step in range(1, steps + 1):
        state.step = step
        positions.keep(state)
    return plan, positions


def test_a_quarter_of_a_million_steps_hold_what_a_few_thousand_do_and_any_of_them_is_found_again() -> None:
    short, (plan, long) = run(20_000, waiting=20)[1], run(250_000, waiting=20)
    assert len(pickle.dumps(long)) < 1.1 * len(pickle.dumps(short))
    assert len(long._tokens) <= MOST_TOKENS
    for step in (0, 1, 5_000, 177_777, 249_801, 250_000, 250_300):
        before = plan.walked
        assert long.at(step).step == step
        assert plan.walked - before <= 2**18 // MOST_TOKENS * 2
        before = plan.walked
        for later in range(step + 1, step + 20):  # going on from there costs one step each
            assert long.at(later).step == later
        assert plan.walked - before <= 19


def test_many_waiting_rows_are_held_for_fewer_steps() -> None:
    positions = run(300, waiting=MOST_WAITING // 100)[1]
    assert FEWEST_RECENT < len(positions._recent) <= 100
    assert len(run(300, waiting=MOST_WAITING)[1]._recent) == FEWEST_RECENT


@pytest.mark.parametrize("again_from", [300, 990], ids=["far back", "a recent one"])
def test_what_is_planned_anew_is_found_from_no_position_of_before(again_from: int) -> None:
    """Neither by the tokens of later steps nor by where the last walk ended."""

    class Sized(Plan):
        size = 1

        def advance(self, state: OrderState) -> None:
            super().advance(state)
            state.drawn += self.size

        def token(self, state: OrderState) -> dict[str, Any]:
            return {"step": state.step, "drawn": state.drawn}

        def restore(self, token: dict[str, Any]) -> OrderState:
            state = at(token["step"])
            state.drawn = token["drawn"]
            return state

    plan: Any = Sized()
    positions = Positions(plan, at(0), recent=0)
    assert positions.at(1000).drawn == 1000
    positions.forget_after(again_from)
    plan.size = 2
    assert positions.at(1000).drawn == again_from + 2 * (1000 - again_from)


def test_before_the_first_there_is_nothing() -> None:
    plan: Any = Plan()
    with pytest.raises(DataError, match="lies before step 7"):
        Positions(plan, at(7), recent=10).at(6)


def test_a_dataset_of_a_million_steps_holds_what_one_of_a_few_thousand_does(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SourceConfig(path=str(clips / "shards"), caption="json:captions", index=str(clips / "index"))
    config = DataConfig(
        sources=(source,),
        buckets=BucketsConfig(table=("1x64x96", "9x64x96")),
        items_per_step=1,
        batch=BatchConfig(memory_tokens=400, text_tokens=48),
    )
    data = Dataset.open(config, Geometry(), 0, bad_list=tmp_path / "bad.jsonl")
    files = sorted(tmp_path.rglob("*"))
    micros = data.planner.advance(data.planner.start())

    def advance(state: OrderState) -> Any:
        state.step += 1
        return micros

    monkeypatch.setattr(
        data, "planner", SimpleNamespace(advance=advance, token=data.planner.token, stages=data.planner.stages)
    )
    monkeypatch.setattr(data._positions, "_planner", data.planner)
    monkeypatch.setattr(
        data, "_item", lambda name, micro, crop: SimpleNamespace(samples=())
    )  # the samples of a step are not what grows

    def run_to(first: int, last: int) -> int:
        for step in range(first, last):
            data.step(step)
            data.count_draws(step, ())
        return len(pickle.dumps((data._positions._recent, data._positions._tokens, data._steps, data._draws)))

    short = run_to(0, 5_000)
    state = data._positions.newest.copy()
    for step in range(5_008, 1_000_001, 8):  # every one would only take longer
        state.step = step
        data._positions.keep(state)
        if step % 1000 == 0:
            data._keep_draws(step)
    data._steps.clear()
    assert run_to(1_000_000, 1_000_500) < 1.5 * short
    assert sorted(tmp_path.rglob("*")) == files
