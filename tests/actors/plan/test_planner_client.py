"""What the planner has learned reaches the run's folder, and nothing older than what the controller has told it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.config import PlannerConfig
from actors.plan.costs.fetching import ON_DEVICE, FetchedWeights
from actors.plan.costs.profile import Profile
from actors.plan.types import Cluster
from actors.planning import client
from actors.planning.client import PlannerClient, PlannerHandle
from ops.models.wan.config import WanConfig


class Planner:
    """Its answers hold what it knew when it was asked."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.learned = SimpleNamespace(remote=lambda: tuple(self.told))
        self.exceeded = SimpleNamespace(remote=lambda found, tokens: self.told.append(found))
        self.count_fetched = SimpleNamespace(remote=lambda found: self.told.append(found))
        self.plan = SimpleNamespace(remote=lambda *question: tuple(self.told))


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Planner:
    monkeypatch.setattr(client, "wait", lambda refs, timeout: (refs, []))
    monkeypatch.setattr(client, "get", lambda ref, timeout: ref)
    monkeypatch.setattr(client, "save_learned", lambda profile, setting, folder: saved.append(profile))
    monkeypatch.setattr(client, "learn_limit", lambda profile, found, tokens: True)
    saved.clear()
    return Planner()


saved: list[Any] = []


def of(planner: Any, keep_in: Path | None, costs: Any = (), copies: FetchedWeights | None = None) -> PlannerClient:
    class ClientHere(PlannerClient):
        """Its planner is an object of this process."""

        def _start(self) -> PlannerHandle:
            handle: PlannerHandle = planner
            return handle

    # no costs: the planner here hands out what it was given
    return ClientHere(costs, PlannerConfig(), keep_in=keep_in, copies=copies)


def test_a_limit_that_came_while_costs_were_on_their_way_is_not_forgotten(planner: Planner, tmp_path: Path) -> None:
    """A planner that is started again begins with what the client holds."""
    held = of(planner, tmp_path)
    held.ask_learned()
    held.exceeded("dit ran out of memory", {})  # type: ignore[arg-type]
    held.poll()
    assert held._profile == ("dit ran out of memory",) and saved == [held._profile]


def test_a_limit_is_kept_at_once_and_not_with_the_next_checkpoint(planner: Planner, tmp_path: Path) -> None:
    held = of(planner, tmp_path)
    held.exceeded("dit ran out of memory", {})  # type: ignore[arg-type]
    held.poll()
    assert saved == [("dit ran out of memory",)]


def test_at_the_end_of_a_run_what_is_known_then_is_kept(planner: Planner, tmp_path: Path) -> None:
    held = of(planner, tmp_path)
    held.ask_learned()
    planner.told.append("a later step")
    held.save_learned()
    assert saved == [("a later step",)]
    nowhere = of(planner, None)
    nowhere.ask_learned()
    nowhere.save_learned()
    assert len(saved) == 1, "no folder to keep it in"


def test_a_generation_that_fetches_blocks_is_planned_so_from_its_first_plan_on(planner: Planner) -> None:
    copies, question = FetchedWeights(num_bytes=10, bytes_per_s=1.0), (0, ((),), Cluster(nodes=(1,)), (), 0.1)
    held = of(planner, None, costs=Profile.from_flops(WanConfig()), copies=copies)
    held.begin(fetched=False)
    held.request(*question)
    assert held.plan(*question) == () and planner.told == []  # type: ignore[comparison-overlap]
    held.begin(fetched=True)
    assert held.plan(*question) == (copies,), "what was asked for before is asked for anew"  # type: ignore[comparison-overlap]
    assert held._profile.fetched == copies, "a planner that is started again knows it, too"
    held.begin(fetched=True)
    assert planner.told == [copies]
    held.begin(fetched=False)
    assert planner.told == [copies, ON_DEVICE] and held._profile.fetched == ON_DEVICE


def test_where_the_settings_decide_nobody_is_told(planner: Planner) -> None:
    held = of(planner, None, costs=Profile.from_flops(WanConfig()))
    held.begin(fetched=True)
    assert planner.told == [] and held._profile.fetched == ON_DEVICE
