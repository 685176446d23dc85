"""Workers that are called through a relay on their node train the same, whoever dies. Real Ray nodes and processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actors.records.events import GenerationEnded, StepsLost, WorkerDied
from app.bench.lab import OPEN_END, Lab
from tests.actors.test_elastic import FEWEST, FP32, MODEL

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("relayed")) as made:
        made.add_node(workers=2)
        made.add_node(workers=2)
        made.add_node(workers=2)
        yield made


@pytest.mark.faults
def test_through_relays_a_run_trains_the_same_when_a_worker_a_relay_and_a_node_die(lab: Lab) -> None:
    alone = lab.start(lab.config("alone", model=MODEL, train={"steps": FEWEST}, workers={"max": 1}))
    assert alone.join().code == 0
    config = lab.config(
        "relayed", model=MODEL, train={"steps": OPEN_END}, workers={"min": 2, "max": 6, "relay_from": 2}
    )
    run = lab.start(config)
    run.wait_for_workers(6)
    run.wait_for_more_steps(3)
    relays = run.controller.generations.forming.relays
    assert len(relays.known) == 3
    run.signal_worker(0)
    run.wait_for_recoveries(1)
    run.wait_for_workers(6)
    run.wait_for_more_steps(2)
    run.wait_for(lambda: [len(group) for group in relays.groups] == [2, 1], "the letters of one node to be handed on")
    first, second = relays.groups
    run.wait_for_more_steps(2)
    relays.again_s = 1.0
    lost = relays.known[first[-1]].address
    run.kill_actor("relay")  # the one that is handed its letters
    run.wait_for_recoveries(2)
    generation = run.generations()
    run.wait_for(lambda: len(relays.known) == 3, "its node, which goes on without, to have a relay again")
    run.wait_for_more_steps(2)
    assert relays.known[first[-1]].address != lost and run.generations() == generation, "nobody left the groups for it"
    assert len(run.controller.generations.runner._submitter.relay_of) == 3, "it is handed its letters again"
    node = first[0]
    lab.kill_node(next(one for one in lab.nodes if one.node_id == node))
    run.wait_for_recoveries(3)
    run.wait_for_more_steps(3)
    assert set(relays.known) == {first[-1], *second}
    run.stop()
    assert run.steps() == list(range(len(run.steps()))), "a step is missing or comes twice"
    expected = alone.losses()
    taken = [(m.step, m.loss) for m in run.metrics if m.step < len(expected)]
    assert [loss for _, loss in taken] == pytest.approx([expected[step] for step, _ in taken], rel=FP32)
    assert not [event for event in run.events if isinstance(event, StepsLost)]
    assert any(isinstance(event, WorkerDied) for event in run.events)
    assert any("relay of node" in event.why for event in run.events if isinstance(event, GenerationEnded))
