"""Real runs whose workers add their gradients in memory of their node: Ray nodes of three and of one worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.plan.types import PlanError
from actors.records.events import GenerationFormed, StepsLost, WorkerDied
from actors.worker.worker import Worker
from app.bench.lab import OPEN_END, Lab, LabRun
from app.run.controller_process import code_of
from app.run.memory import _asked
from ops.typed import ConfigError
from tests.actors import chaos

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
FP32 = 1e-5
STEPS = 40  # whose losses are compared
MODEL = {"dit": {"num_heads": 6}}  # legal degrees 1, 2, 3
SHARED = {"steps": OPEN_END, "memory": {"gradients": "node"}}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    os.environ[chaos.FOLDER] = str(folder)
    with Lab(folder) as made:
        made.add_node(workers=3)
        made.add_node(workers=1)
        yield made


@pytest.fixture(scope="module")
def undisturbed(lab: Lab) -> list[float]:
    """Losses of one worker with a gradient of its own."""
    train = {"steps": STEPS, "memory": {"gradients": "own"}}
    run = lab.start(lab.config("undisturbed", model=MODEL, train=train, workers={"max": 1}))
    assert run.join().code == 0
    return run.losses()


def formed(run: LabRun) -> list[GenerationFormed]:
    return [event for event in run.events if isinstance(event, GenerationFormed)]


@pytest.mark.long
def test_workers_join_leave_and_die_in_an_addition_and_the_training_is_that_of_one_worker(
    lab: Lab, undisturbed: list[float]
) -> None:
    run = lab.start(
        lab.config("shared", model=MODEL, train=SHARED, workers={"min": 1, "max": 4}), chaos.HalfAddingWorker
    )
    run.wait_for_workers(4)
    run.wait_for_more_steps(2)
    run.scale(2)
    run.wait_for_workers(2)
    run.wait_for_more_steps(2)
    run.scale(4)
    run.wait_for_workers(4)
    run.wait_for_more_steps(1)
    (Path(os.environ[chaos.FOLDER]) / chaos.ARMED).touch()
    run.wait_for_recoveries(1)
    run.wait_for_more_steps(2)
    run.pause()
    digests = run.parameter_digests()
    run.go_on()
    run.stop()
    steps = run.steps()
    assert steps == list(range(len(steps))), "a step is missing or comes twice"
    taken = [(m.step, m.loss) for m in run.metrics if m.step < STEPS]
    assert len(taken) > 7
    assert [loss for _, loss in taken] == pytest.approx([undisturbed[step] for step, _ in taken], rel=FP32)
    assert len(digests) > 2 and len(set(digests)) == 1, "the replacement may not be there yet"
    assert {event.gradients for event in formed(run)} == {"node"}
    assert [1, 3] in [sorted(event.cluster) for event in formed(run)]
    assert len([e for e in run.events if isinstance(e, WorkerDied)]) == 1
    assert not [e for e in run.events if isinstance(e, StepsLost)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("worker", "ends", "says"),
    [
        (chaos.DeafWorker, ConfigError, r"of \d workers of a node 0 could write into memory of one\)\. Set it to auto"),
        (
            chaos.FullNodeWorker,
            PlanError,
            r"could not form the generation: .*no room for .* shared memory \(gradients\)",
        ),
    ],
)
def test_workers_that_cannot_share_a_gradient_end_the_run_at_once(
    lab: Lab, worker: type[Worker], ends: type[Exception], says: str
) -> None:
    """Another generation would be no better."""
    name = f"unable-{worker.__name__}"
    run = lab.start(lab.config(name, model=MODEL, train=SHARED, workers={"min": 2, "max": 2}), worker)
    with pytest.raises(ends, match=says):
        run.join()
    lab.runs.remove(run)  # it has ended, and would say why once more
    assert len(formed(run)) == 1 and not run.metrics
    assert code_of(run.error, run.run_dir) == (2 if ends is ConfigError else 3)  # type: ignore[arg-type]


@pytest.mark.long
def test_every_node_of_a_cluster_says_what_it_has(lab: Lab) -> None:
    nodes = [node.node_id for node in lab.nodes]
    told = _asked(nodes)
    assert set(told) == set(nodes)
    assert all(sizes.gpus == () and sizes.room > 0 and sizes.host for sizes in told.values())
