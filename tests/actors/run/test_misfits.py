"""A run that waits for workers which can run its next step: told once, and not for ever."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from actors.config import PlannerConfig, WorkersConfig
from actors.outcome import StopRun
from actors.plan.types import PlanError
from actors.records.events import PlanAdapted, RunEvent, WorkersAwaited
from actors.run.misfits import Misfits
from tests.actors.fakes import StateHere, config_of, controller_of

ERROR = PlanError("no legal degree for dit on 2 workers: the smallest is 4. Add 2 workers.")


def test_what_plans_follow_is_told_when_it_changes() -> None:
    told: list[RunEvent] = []
    misfits = Misfits(10.0, told.append)
    for settings in ((), ("a",), ("a",), ("b",), (), ()):
        misfits.planned(settings)
    assert told == [PlanAdapted(settings=("a",)), PlanAdapted(settings=("b",)), PlanAdapted(settings=())]
    assert [event.describe() for event in told] == ["a", "b", "plans follow the settings of planner again"]


def test_waiting_is_told_once_and_ends_in_time() -> None:
    told: list[RunEvent] = []
    misfits = Misfits(10.0, told.append)
    for now in (100.0, 105.0, 110.0):
        misfits.refused(ERROR, now)
    assert len(told) == 1 and isinstance(told[0], WorkersAwaited) and "Add 2 workers" in told[0].describe()
    with pytest.raises(PlanError):
        misfits.refused(ERROR, 110.1)
    misfits.planned(())
    misfits.refused(ERROR, 200.0)
    assert len(told) == 2


@pytest.mark.parametrize("misfit", ["adapt", "wait"])
def test_a_run_waits_for_other_workers_where_it_is_told_to(misfit: str) -> None:
    config = config_of(planner=PlannerConfig(misfit=misfit), workers=WorkersConfig(min=1, max=4, wait_s=0.05))
    controller = controller_of(StateHere(-1), config=config, source=SimpleNamespace(has=lambda step, timeout_s: True))

    def dispatch() -> None:
        raise ERROR

    runner = SimpleNamespace(running=[], at_end=False, awaits_quiet=False, next_step=7, dispatch=dispatch)
    if misfit == "adapt":
        with pytest.raises(PlanError, match="Add 2 workers"):
            controller._dispatch(runner)
        return
    controller._dispatch(runner)
    with pytest.raises(StopRun) as stop:
        while True:
            controller._dispatch(runner)
    assert stop.value.outcome.code == 75 and "step 7" in stop.value.outcome.reason
