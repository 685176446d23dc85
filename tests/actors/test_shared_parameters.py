"""Real runs whose workers have their parameters once per node: Ray nodes of three and of one worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.records.events import GenerationFormed, StepsLost, WorkerDied
from app.bench.lab import OPEN_END, Lab
from tests.actors import chaos

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
FP32 = 1e-5
STEPS = 20  # whose losses are compared
MODEL = {"dit": {"num_heads": 6, "gradient_checkpointing": True}}  # legal degrees 1, 2, 3
SHARED = {"steps": OPEN_END, "memory": {"gradients": "node", "parameters": "node"}}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    os.environ[chaos.FOLDER] = str(folder)
    with Lab(folder) as made:
        made.add_node(workers=3)
        made.add_node(workers=1)
        yield made


@pytest.mark.long
def test_workers_join_and_die_in_writing_parameters_and_the_training_is_that_of_one_worker(lab: Lab) -> None:
    train = {"steps": STEPS, "memory": {"gradients": "own", "parameters": "replicated"}}
    alone = lab.start(lab.config("undisturbed", model=MODEL, train=train, workers={"max": 1}))
    assert alone.join().code == 0
    undisturbed = alone.losses()
    run = lab.start(
        lab.config("shared", model=MODEL, train=SHARED, workers={"min": 1, "max": 4}), chaos.HalfWritingWorker
    )
    run.wait_for_workers(4)
    run.wait_for_more_steps(2)
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
    assert len(taken) > 4
    assert [loss for _, loss in taken] == pytest.approx([undisturbed[step] for step, _ in taken], rel=FP32)
    assert len(digests) > 2 and len(set(digests)) == 1, "the replacement may not be there yet"
    formed = [event for event in run.events if isinstance(event, GenerationFormed)]
    assert {event.parameters for event in formed} == {"node"}
    assert [1, 3] in [sorted(event.cluster) for event in formed]
    assert len([e for e in run.events if isinstance(e, WorkerDied)]) == 1
    assert not [e for e in run.events if isinstance(e, StepsLost)]


@pytest.mark.long
def test_lora_beside_blocks_in_memory_of_the_node_is_the_training_of_one_worker_that_has_them(lab: Lab) -> None:
    """Workers join and die; samples are made beside the steps, by the same blocks."""
    tuned = {"dit": {**MODEL["dit"], "lora_rank": 4, "frozen_dtype": "float8", "lora_dora": True}}
    alone = lab.start(lab.config("tuned alone", model=tuned, train={"steps": STEPS}, workers={"max": 1}))
    assert alone.join().code == 0
    undisturbed = alone.losses()
    train = {"steps": OPEN_END, "memory": {"parameters": "node"}}
    beside = {"sample": {"prompts": ["a red circle"], "every": 5, "frames": 1, "steps": 2}, "checkpoint": {"every": 5}}
    config = lab.config("tuned", model=tuned, train=train, workers={"min": 1, "max": 4}, **beside)
    run = lab.start(config, chaos.FetchingWorker)
    run.wait_for_workers(4)
    run.wait_for_more_steps(2)
    run.signal_worker()
    run.wait_for_recoveries(1)
    run.wait_for_more_steps(7)
    run.stop()
    steps = run.steps()
    assert steps == list(range(len(steps))), "a step is missing or comes twice"
    taken = [(m.step, m.loss) for m in run.metrics if m.step < STEPS]
    assert len(taken) > 4
    assert [loss for _, loss in taken] == pytest.approx([undisturbed[step] for step, _ in taken], rel=FP32)
    assert {event.parameters for event in run.events if isinstance(event, GenerationFormed)} == {"node"}
    assert not [event for event in run.events if isinstance(event, StepsLost)]
