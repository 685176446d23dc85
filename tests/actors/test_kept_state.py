"""The state in the memory of nodes, in real runs: no death of a worker or of a keeper, whenever it comes, loses a step
or lets a half-written value into the training. Ray nodes of two and of one worker."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.records.events import KeeperLost, StepsLost, WorkerDied
from app.bench.lab import OPEN_END, Lab, LabRun
from app.bench.memory import object_store_mib
from tests.actors import chaos

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
FP32 = 1e-5
STEPS = 60
MODEL = {"dit": {"num_heads": 6}}
ENDLESS = {"steps": OPEN_END}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    os.environ[chaos.FOLDER] = str(folder)
    with Lab(folder) as made:
        made.add_node(workers=2)
        made.add_node(workers=1)
        yield made


@pytest.fixture(scope="module")
def undisturbed(lab: Lab) -> list[float]:
    """Losses of one worker that nobody disturbs."""
    run = lab.start(lab.config("undisturbed", model=MODEL, train={"steps": STEPS}, workers={"max": 1}))
    assert run.join().code == 0
    return run.losses()


def assert_same(run: LabRun, undisturbed: list[float]) -> None:
    """No step is missing, or came twice, and the losses are those of one worker."""
    run.stop()
    steps = run.steps()
    assert steps == list(range(len(steps))) and not [e for e in run.events if isinstance(e, StepsLost)]
    taken = [(m.step, m.loss) for m in run.metrics if m.step < STEPS]
    assert len(taken) > 5
    assert [loss for _, loss in taken] == pytest.approx([undisturbed[step] for step, _ in taken], rel=FP32)


@pytest.mark.faults
def test_a_worker_that_dies_in_the_middle_of_its_next_state_leaves_the_one_before(
    lab: Lab, undisturbed: list[float]
) -> None:
    run = lab.start(
        lab.config("half", model=MODEL, train=ENDLESS, workers={"min": 1, "max": 3}), chaos.HalfUpdatingWorker
    )
    for deaths in (1, 2, 3):
        run.wait_for_workers(3)
        run.wait_for_more_steps(2)
        (Path(os.environ[chaos.FOLDER]) / chaos.ARMED).touch()
        run.wait_for_recoveries(deaths)
    run.wait_for_more_steps(3)
    run.pause()
    digests = run.parameter_digests()
    run.go_on()
    assert_same(run, undisturbed)
    assert len(set(digests)) == 1 and len([e for e in run.events if isinstance(e, WorkerDied)]) == 3


@pytest.mark.faults
@pytest.mark.parametrize("every", [1, 3])
def test_keepers_that_die_at_any_moment_are_followed_by_others_and_nothing_is_lost(
    lab: Lab, undisturbed: list[float], every: int
) -> None:
    """One or all of them, while workers write and other keepers copy; then a worker, whose state they hold."""
    draws = random.Random(every)
    run = lab.start(
        lab.config(
            f"keepers-{every}", model=MODEL, train=ENDLESS, workers={"min": 3, "max": 3}, snapshot={"every": every}
        )
    )
    run.wait_for_step(3)
    for kind in ("keeper", "keepers", "keeper"):
        time.sleep(draws.uniform(0.0, 0.5))
        run.kill_actor(kind)
        run.wait_for_more_steps(4)
    lost = len([e for e in run.events if isinstance(e, KeeperLost)])
    assert lost >= 4
    if every == 1:  # else the steps since the last snapshot are computed again
        run.signal_worker(0)
        run.wait_for_recoveries(1)
        run.wait_for_more_steps(2)
    assert_same(run, undisturbed)


@pytest.mark.long
def test_the_object_stores_are_as_full_after_many_steps_as_after_a_few(lab: Lab) -> None:
    """Copies for other nodes pass through them, and stay in none."""
    run = lab.start(lab.config("store", model=MODEL, train=ENDLESS, workers={"min": 3, "max": 3}))
    found: list[float] = []
    for step in (10, 20, 30, 40):
        run.wait_for_step(step)
        found.append(object_store_mib())
    run.stop()
    assert max(found[1:]) <= found[0] + 2.0, found
