"""A run whose feeder is renewed again and again trains what one with a single feeder trains."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actors.feed.growth import Growth
from actors.records.events import FeederLost, FeederRenewed, RunFinished
from app.bench.lab import Lab, LabRun

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1200)]
STEPS = 30


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as made:
        made.add_node(workers=1)
        yield made


def start(lab: Lab, name: str) -> LabRun:
    return lab.start(lab.config(name, train={"steps": STEPS}, workers={"min": 1, "max": 1}))


def renewals(run: LabRun) -> list[int]:
    """The steps at which another feeder took over."""
    return [event.from_step for event in run.events if isinstance(event, FeederRenewed)]


def ledger(run: LabRun) -> object:
    return next(event.ledger for event in run.events if isinstance(event, RunFinished))


def test_a_run_with_feeders_that_take_over_has_the_same_losses_and_the_same_account(lab: Lab) -> None:
    renewed = start(lab, "renewed")
    renewed.wait_for(lambda: renewed.controller is not None, "the controller")
    # over as soon as it has settled
    renewed.controller.source._growth = Growth(most_bytes=-(1 << 60), settling_steps=4, steady_steps=1)
    renewed.wait_for(lambda: bool(renewals(renewed)), "another feeder")  # it opens in seconds, in which many steps pass
    assert renewed.join(900).code == 0
    plain = start(lab, "plain")
    assert plain.join(600).code == 0
    told = renewals(renewed)
    assert told == sorted(set(told)) and told[-1] < STEPS
    assert renewed.steps() == plain.steps() == list(range(STEPS))
    assert renewed.losses() == pytest.approx(plain.losses(), rel=1e-5)
    assert ledger(renewed) == ledger(plain)
    assert renewed.generations() == 1 and not [e for e in renewed.events if isinstance(e, FeederLost)]
