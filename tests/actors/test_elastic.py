"""Workers come, go and die; the run goes on and trains the same. Real Ray nodes, processes and signals."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.planning.client import PlannerClient
from actors.ray_calls import drain
from actors.records.events import (
    CheckpointWritten,
    FeederLost,
    GenerationEnded,
    GenerationFormed,
    KeeperLost,
    MemoryRanOut,
    MonitorRestarted,
    PlanAdapted,
    PoolResized,
    StepsLost,
    WorkerDied,
    WorkerDrained,
    WorkerReady,
    WorkerReplaced,
)
from actors.run.communicators import Communicators
from actors.step import StepAssignment
from app.bench.lab import OPEN_END, Lab, LabRun
from app.bench.soak import soak
from app.settings.config import RunConfig
from ops.config import FlowConfig
from ops.models.config import ModelConfig
from tests.actors import chaos
from tests.families.registry import MODELS, WHOLE_RUNS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
FP32 = 1e-5
STEPS = 60  # whose losses are compared
FEWEST = 24
# Legal degrees 1, 2, 3; captions of one length, so that a cascade's rows follow from its shape and batch.
MODEL = {"dit": {"num_heads": 6}, "text": {"max_length": 64, "pad_to": 64}}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    os.environ[chaos.FOLDER] = str(folder)
    (folder / chaos.SHORT).mkdir()
    with Lab(folder) as made:
        made.add_node(workers=2)
        made.add_node(workers=2)
        made.add_node(workers=1)
        yield made


class Alone:
    """One worker that nobody disturbs, which has trained as many steps as somebody has compared."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._losses: list[float] = []

    def losses(self, steps: int) -> list[float]:
        if steps > len(self._losses):
            train = {"steps": max(steps, FEWEST)}
            run = self._lab.start(
                self._lab.config(f"undisturbed-{steps}", model=MODEL, train=train, workers={"max": 1})
            )
            assert run.join().code == 0
            self._losses = run.losses()
        return self._losses[:steps]


@pytest.fixture(scope="module")
def alone(lab: Lab) -> Alone:
    return Alone(lab)


@pytest.fixture(scope="module")
def undisturbed(alone: Alone) -> list[float]:
    return alone.losses(STEPS)


def assert_same_training(run: LabRun, expected: Sequence[float]) -> None:
    steps = run.steps()
    assert len(steps) >= 5 and steps == list(range(len(steps))), "a step is missing or comes twice"
    assert_same_losses(run, expected)


def assert_same_losses(run: LabRun, expected: Sequence[float]) -> None:
    """The losses are the same for every step among those that the undisturbed run took, however often it came."""
    taken = [(m.step, m.loss) for m in run.metrics if m.step < len(expected)]
    assert taken and [loss for _, loss in taken] == pytest.approx([expected[step] for step, _ in taken], rel=FP32)


@pytest.mark.long
def test_the_pool_follows_its_target_up_and_down(lab: Lab, undisturbed: list[float]) -> None:
    """A clean change needs no snapshot: workers hold the last step themselves, nothing is computed again, and it is on
    disk when the run is ended."""
    run = lab.start(
        lab.config(
            "resize",
            model=MODEL,
            train={"steps": OPEN_END},
            workers={"min": 1, "max": 3},
            snapshot={"enabled": False},
        )
    )
    for target in (2, 1, 3):
        run.scale(target)
        run.wait_for_workers(target)
        run.wait_for_more_steps(2)
    run.stop()
    assert_same_training(run, undisturbed)
    assert not [e for e in run.events if isinstance(e, WorkerDied | StepsLost)]
    assert (run.run_dir / "checkpoints" / f"step-{run.steps()[-1]}" / "COMPLETE").exists()


PHASES = ("encode", "forward", "backward", "reduce", "update", "gather", "snapshot")
PLACES = (  # of gradients, optimizer state and parameters
    {"gradients": "own", "state": "device"},
    {"gradients": "node", "state": "host"},
    {"gradients": "node", "state": "host", "parameters": "node"},
)


@pytest.mark.faults
@pytest.mark.parametrize("memory", PLACES, ids=lambda places: "-".join(places.values()))
def test_sigkill_in_every_phase_of_a_step_loses_no_step(
    lab: Lab, undisturbed: list[float], memory: dict[str, str]
) -> None:
    """Static plans on bags of three, so that forward and backward die inside a bag, and workers of several nodes."""
    folder = Path(os.environ[chaos.FOLDER])
    for fired in folder.glob("fired-*"):
        fired.unlink()
    (folder / "order").write_text("\n".join(PHASES))
    dit = {**MODEL["dit"], "gradient_checkpointing": True}  # as blocks that are fetched need
    run = lab.start(
        lab.config(
            f"phases-{'-'.join(memory.values())}",
            model={**MODEL, "dit": dit},
            train={"steps": OPEN_END, "memory": memory},
            workers={"min": 3, "max": 3},
            planner={"strategy": "static", "static_degree": 3},
        ),
        chaos.ChaosWorker,
    )
    run.wait_for(lambda: all((folder / f"fired-{name}").exists() for name in PHASES), "a death in every phase", 400)
    run.wait_for_step(8)
    run.wait_for_more_steps(2)
    run.stop()
    assert_same_training(run, undisturbed)
    started = [e.worker for e in run.events if isinstance(e, WorkerReady)]
    assert len(started) >= 3 + len(PHASES), "each of the dead is replaced"


@pytest.mark.faults
def test_deaths_freezes_and_lost_helpers_in_one_run(lab: Lab, undisturbed: list[float]) -> None:
    run = lab.start(lab.config("storm", model=MODEL, train={"steps": OPEN_END}, workers={"min": 1, "max": 4}))
    run.wait_for_workers(4)
    run.signal_worker(0)
    run.signal_worker(1)  # two at once
    run.wait_for_recoveries(1)
    run.kill_actor("planner")
    run.wait_for_more_steps(2)
    run.kill_actor("keeper")
    run.wait_for_more_steps(2)
    run.kill_actor("feeder")
    run.wait_for_more_steps(2)
    run.kill_actor("monitor")
    run.wait_for_more_steps(2)
    run.wait_for(lambda: len(run.active()) >= 2, "replacements")
    run.signal_worker(-1, signal.SIGSTOP)
    run.wait_for_recoveries(2)
    run.wait_for_more_steps(3)
    run.stop()
    assert_same_training(run, undisturbed)
    assert {WorkerDied, WorkerReplaced, KeeperLost, FeederLost, MonitorRestarted} <= {type(e) for e in run.events}


# For runs in which nobody freezes: on a busy machine, a worker that is heard of late is none to replace.
PATIENT = {"suspect_s": 60.0}


@pytest.mark.long
def test_a_preempted_worker_leaves_at_a_step_boundary(lab: Lab, alone: Alone) -> None:
    workers = {"min": 1, "max": 2, **PATIENT}
    run = lab.start(lab.config("notice", model=MODEL, train={"steps": OPEN_END}, workers=workers))
    run.wait_for_workers(2)
    pairs = [e.cluster for e in run.events if isinstance(e, GenerationFormed) and len(e.workers) == 2]
    assert set(pairs) == {(2,)}, "a node has room for both"
    name = run.signal_worker(0, signal.SIGTERM)
    run.wait_for(lambda: any(isinstance(e, WorkerDrained) and e.worker == name for e in run.events), f"{name} to leave")
    run.wait_for_more_steps(5)
    run.stop()
    assert_same_training(run, alone.losses(len(run.steps())))
    assert not [e for e in run.events if isinstance(e, WorkerDied | StepsLost)]


@pytest.mark.long
def test_the_workers_of_a_node_that_ray_drains_leave_and_no_step_is_lost(lab: Lab, alone: Alone) -> None:
    """As a pod that Kubernetes deletes."""
    run = lab.start(
        lab.config("drained", model=MODEL, train={"steps": OPEN_END}, workers={"min": 1, "max": 2, **PATIENT})
    )
    run.wait_for_workers(2)
    names, (home,) = {name for name, _ in run.active()}, set(run.nodes_of_active())
    drain(lab.cluster.address, home, 300, "a test")
    run.wait_for(lambda: {e.worker for e in run.events if isinstance(e, WorkerDrained)} >= names, "both to leave")
    run.wait_for_workers(2)
    run.wait_for_more_steps(5)
    assert home not in run.nodes_of_active()
    run.stop()
    lab.kill_node(next(node for node in lab.nodes if node.node_id == home))
    lab.add_node(workers=2)
    assert_same_training(run, alone.losses(len(run.steps())))
    assert not [e for e in run.events if isinstance(e, WorkerDied | StepsLost)]


@pytest.mark.long
def test_a_drained_node_that_alone_holds_the_state_leaves_a_checkpoint(lab: Lab, alone: Alone) -> None:
    """The workers' node goes while the run waits for others, as the only pod with GPUs does. Its keeper has the state,
    and no other node a copy."""
    run = lab.start(
        lab.config(
            "the-only-one",
            model=MODEL,
            train={"steps": OPEN_END},
            workers={"min": 2, "max": 2, **PATIENT},
            snapshot={"enabled": False},
        )
    )
    run.wait_for_workers(2)
    run.wait_for_more_steps(2)
    (home,) = set(run.nodes_of_active())
    drain(lab.cluster.address, home, 300, "a test")
    run.wait_for(lambda: any(isinstance(e, CheckpointWritten) for e in run.events), "a checkpoint")
    lab.kill_node(next(node for node in lab.nodes if node.node_id == home))
    lab.add_node(workers=2)
    run.wait_for(lambda: run.generations() > 1, "other workers")
    run.wait_for_more_steps(3)
    run.stop()
    assert_same_training(run, alone.losses(len(run.steps())))
    assert not [e for e in run.events if isinstance(e, WorkerDied | StepsLost)]


@pytest.mark.long
def test_a_topology_that_no_longer_fits_gives_way_until_the_pool_is_whole_again(lab: Lab, alone: Alone) -> None:
    """Two bags of two; a worker dies, and three are left until another has come."""
    planner = {"strategy": "knapsack", "topology": "g2n2"}
    workers = {"min": 3, "max": 4, **PATIENT}
    run = lab.start(lab.config("topology", model=MODEL, train={"steps": OPEN_END}, workers=workers, planner=planner))
    run.wait_for_workers(4)
    run.wait_for_more_steps(2)
    whole, told = max(m.generation for m in run.metrics), len([e for e in run.events if isinstance(e, PlanAdapted)])
    run.signal_worker()
    run.wait_for(lambda: run.metrics[-1].generation > whole and run.metrics[-1].workers == 4, "the pool to be whole")
    run.wait_for_more_steps(2)
    run.stop()
    assert_same_training(run, alone.losses(len(run.steps())))
    assert any(isinstance(e, WorkerDied) for e in run.events)
    sizes = {m.generation: m.workers for m in run.metrics}
    degrees: dict[int, set[int]] = {}
    for span in run.spans:
        if span.module == "dit":
            degrees.setdefault(span.generation, set()).add(span.degree)
    for generation, count in sizes.items():
        assert count != 4 or degrees[generation] == {2}, f"generation {generation}: {degrees[generation]}"
    adapted = [e.settings for e in run.events if isinstance(e, PlanAdapted)][told:]
    if any(count == 3 for generation, count in sizes.items() if generation > whole):
        (short,), after = adapted
        assert short.startswith("planner.topology g2n2 does not fit 3 workers: ") and after == ()
    else:  # the new worker came before three had taken a step
        assert adapted == []


def assert_avoided(run: LabRun, event: MemoryRanOut) -> None:
    """From then on nothing as large of that shape ran; one clip may be tried again at the highest degree, and where
    as much fits then, the limit is none."""
    found = re.fullmatch(r"(\w+) (\d+)f (\d+)x(\d+) b(\d+) sp(\d+) s\d+", event.cascade)
    assert found is not None, event
    frames, height, width, batch, degree = map(int, found.groups()[1:])
    for span in sorted((s for s in run.spans if s.start > event.time), key=lambda s: s.start):
        pixels = math.prod(span.bucket or ()) * span.batch
        if span.module == found[1] == "dit" and span.batch == 1 and pixels >= frames * height * width * batch:
            return
        same = (span.module, span.bucket, span.degree) == (found[1], (frames, height, width), degree)
        assert not (same and span.batch >= batch > 1), f"{span.name} after {event}"


@pytest.mark.long
def test_random_cascades_run_out_of_memory_and_the_training_is_the_same(lab: Lab, alone: Alone) -> None:
    """That is a measurement: no step is lost, the losses are the same, and it is avoided from then on."""
    workers = {"min": 2, "max": 2, **PATIENT}
    run = lab.start(lab.config("short", model=MODEL, train={"steps": 12}, workers=workers), chaos.ShortWorker)
    assert run.join(600).code == 0
    told = [event for event in run.events if isinstance(event, MemoryRanOut)]
    # Two that come at once end one generation, which may be reported for one of them.
    assert len(told) > 1, "nothing ran out of memory, or once"
    assert run.steps() == list(range(12))
    assert run.losses() == pytest.approx(alone.losses(12), rel=FP32)
    assert not [e for e in run.events if isinstance(e, StepsLost | WorkerDied)]
    ended = [e for e in run.events if isinstance(e, GenerationEnded) and not e.clean]
    assert 0 < len(ended) <= len(told), "nothing else has broken a generation"
    for event in told:
        assert_avoided(run, event)


@pytest.mark.faults
def test_the_loss_of_a_node_and_a_run_that_waits_for_capacity(lab: Lab, undisturbed: list[float]) -> None:
    """A node dies with worker and keeper, then another: too few are left, exit code 75; a resumed run goes on."""
    config = lab.config("node", model=MODEL, train={"steps": OPEN_END}, workers={"min": 3, "max": 5, "wait_s": 60})
    run = lab.start(config)
    run.wait_for_workers(5)
    run.wait_for_step(4)
    lab.kill_node(lab.nodes[2])
    run.wait_for_recoveries(1)
    run.wait_for_more_steps(2)
    lab.kill_node(lab.nodes[1])
    outcome = run.join()
    assert outcome.code == 75, outcome
    assert "workers.min" in outcome.reason
    assert_same_training(run, undisturbed)
    reached = outcome.last_step
    assert (run.run_dir / "checkpoints" / f"step-{reached}" / "COMPLETE").exists()
    lab.add_node(workers=2)
    resumed = lab.start(config)
    resumed.wait_for_more_steps(5)
    resumed.stop()
    assert resumed.steps()[0] == reached + 1
    assert_same_losses(resumed, undisturbed)


@pytest.mark.faults
def test_the_death_of_the_only_node_with_workers_loses_no_step(lab: Lab, undisturbed: list[float]) -> None:
    """Its keeper is on another node, which has no worker: they lay side by side, and went together."""
    run = lab.start(lab.config("lonely", model=MODEL, train={"steps": OPEN_END}, workers={"min": 1, "max": 1}))
    run.wait_for_step(4)
    (home,) = {run.controller.generations.pool.info(name).node for name, _ in run.active()}
    lab.kill_node(next(node for node in lab.nodes if node.node_id == home))
    run.wait_for_recoveries(1)
    run.wait_for_more_steps(3)
    run.stop()
    lab.add_node(workers=2)
    assert_same_training(run, undisturbed)
    assert not [e for e in run.events if isinstance(e, StepsLost)]


@pytest.mark.long
def test_with_all_keepers_and_workers_lost_the_last_checkpoint_is_used(lab: Lab, undisturbed: list[float]) -> None:
    """As long as a worker lives, the state of its node does, whoever else dies."""
    config = lab.config(
        "keepers",
        model=MODEL,
        train={"steps": OPEN_END},
        workers={"min": 2, "max": 2},
        checkpoint={"every": 4},
    )
    run = lab.start(config)
    run.wait_for_step(6)
    run.kill_actor("keepers")
    run.signal_worker(0)
    run.wait_for_recoveries(1)
    run.wait_for_more_steps(3)
    assert not [e for e in run.events if isinstance(e, StepsLost)]
    run.wait_for(lambda: run.steps()[-1] % 4 == 1, "steps that no checkpoint holds")
    run.kill_actor("keepers")
    for _, pid in run.active():
        os.kill(pid, signal.SIGKILL)
    run.wait_for(lambda: any(isinstance(e, StepsLost) for e in run.events), "the return to a checkpoint")
    fallback = next(e for e in run.events if isinstance(e, StepsLost))
    assert fallback.to_step % 4 == 3 and fallback.lost_steps >= 1
    run.wait_for_step(fallback.to_step + fallback.lost_steps + 2)
    run.stop()
    steps = run.steps()
    again = steps.index(fallback.to_step + 1, steps.index(fallback.to_step + 1) + 1)
    assert steps[again:] == list(range(steps[again], steps[-1] + 1)), "from the checkpoint on every step comes again"
    assert_same_losses(run, undisturbed)


@pytest.mark.faults
def test_with_no_state_left_anywhere_training_begins_again_from_the_first_weights(
    lab: Lab, undisturbed: list[float]
) -> None:
    """Survivors hold weights that have been trained; without snapshot and checkpoint those are of no step."""
    config = lab.config(
        "nothing", model=MODEL, train={"steps": OPEN_END}, workers={"min": 2, "max": 2}, snapshot={"enabled": False}
    )
    run = lab.start(config)
    run.wait_for_step(3)
    run.signal_worker(1)
    run.wait_for_recoveries(1)
    run.wait_for_more_steps(3)
    run.stop()
    steps = run.steps()
    assert [e.to_step for e in run.events if isinstance(e, StepsLost)] == [-1]
    assert steps.count(0) == 2 and steps.count(1) == 2
    assert_same_losses(run, undisturbed)


@pytest.mark.long
def test_the_controller_is_killed_and_the_run_ends_all_the_same(lab: Lab, undisturbed: list[float]) -> None:
    """Ray Train starts it again; it finds the keepers and the last committed step."""
    config = lab.config("controller", model=MODEL, train={"steps": 24}, workers={"min": 1, "max": 2})
    path = lab.folder / "controller.yaml"
    path.write_text(config.to_yaml())
    run_dir = Path(config.run.dir) / config.run.name
    process = subprocess.Popen(
        [sys.executable, "-m", "app.train", "--config", str(path)],
        text=True,
        env={**os.environ, "RAY_ADDRESS": lab.cluster.address, "RAY_TRAIN_V2_ENABLED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        metrics = run_dir / "metrics.jsonl"
        _wait(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 8, process)
        starts = [e for e in _events(run_dir) if e["event"] == "start"]
        os.kill(starts[-1]["pid"], signal.SIGKILL)
        output, _ = process.communicate(timeout=480)
    finally:
        process.kill()
    assert process.returncode == 0, output[-3000:]
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(24)) and {line["good_weight"] for line in lines} == {1}
    assert [line["loss"] for line in lines] == pytest.approx(undisturbed[:24], rel=FP32)
    starts = [e for e in _events(run_dir) if e["event"] == "start"]
    assert len(starts) == 2 and starts[1]["origin"] == "keepers" and starts[1]["from_step"] >= 7


def _events(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def _wait(condition, process: subprocess.Popen, timeout_s: float = 360) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.05)


@pytest.mark.faults
def test_deepspeed_takes_the_same_steps_and_survives_a_death(lab: Lab, undisturbed: list[float]) -> None:
    run = lab.start(
        lab.config(
            "deepspeed",
            model=MODEL,
            train={"steps": OPEN_END, "sync": "deepspeed"},
            workers={"min": 1, "max": 2},
        )
    )
    run.wait_for_workers(2)
    run.wait_for_more_steps(4)
    run.signal_worker(1)
    run.wait_for_recoveries(1)
    run.wait_for_more_steps(3)
    run.stop()
    assert_same_training(run, undisturbed)


@pytest.mark.long
def test_a_short_soak_ends_with_equal_parameters_and_the_undisturbed_losses(lab: Lab) -> None:
    result = soak(lab, steps=30, faults=5, seed=1)
    assert result.loss_difference <= FP32 and result.equal_parameters
    assert sum(result.faults.values()) == 5
    assert result.rss_last_gib < 1.3 * result.rss_first_gib


@pytest.mark.long
def test_bags_that_make_room_for_each_other_change_no_loss(
    lab: Lab, undisturbed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for one peer, every step closes the bag of the one before, on all its members, and connects another.

    A planner keeps to a bag for as long as measured times let it, so its bags are moved on by a worker each step.
    """
    planned = PlannerClient.plan

    def turned(planner: PlannerClient, step: int, *question: Any) -> StepAssignment:
        found = planned(planner, step, *question)
        cascades = [
            replace(one, workers=tuple((worker + step) % 3 for worker in one.workers)) if one.module == "dit" else one
            for one in found.cascades
        ]
        return replace(found, cascades=tuple(cascades))

    monkeypatch.setattr(PlannerClient, "plan", turned)
    run = lab.start(
        lab.config(
            "bags",
            model=MODEL,
            train={"steps": 25},
            workers={"min": 3, "max": 3},
            planner={"degrees": [2], "bag_peers": 1},
        )
    )
    assert run.join().code == 0
    assert_same_training(run, undisturbed)
    members: dict[tuple[float, str], set[str]] = {}
    for span in sorted((s for s in run.spans if s.module == "dit"), key=lambda s: s.start):
        members.setdefault((span.step, span.cascade), set()).add(span.worker)
    bags = [tuple(sorted(workers)) for workers in members.values()]
    account = Communicators(1)
    assert sum(account.step([tuple(int(name[1:]) for name in bag)]).made for bag in bags) >= 20
    assert not [e for e in run.events if isinstance(e, WorkerDied | StepsLost)]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_workers_in_bags_train_the_same_also_after_a_death(lab: Lab, alone: Alone) -> None:
    """Another compiles in its place, in steps whose first runs teach plans nothing."""
    run = lab.start(
        lab.config(
            "compiled",
            model={**MODEL, "dit": {**MODEL["dit"], "compile": True}},
            train={"steps": OPEN_END},
            planner={"degrees": [1, 2]},
            workers={"min": 2, "max": 2},
        )
    )
    run.wait_for_workers(2)
    run.wait_for_more_steps(6)
    before = run.generations()
    run.signal_worker(0)
    run.wait_for(lambda: run.generations() > before and len(run.active()) == 2, "another in its place")
    run.wait_for_more_steps(6)
    run.stop()
    assert_same_training(run, alone.losses(FEWEST))


def config_of(lab: Lab, name: str, model: ModelConfig, **sections: Mapping[str, object]) -> RunConfig:
    """A run of this model on clips of several lengths, or on pictures."""
    sizes = ["1x64x96", "1x96x64", "1x32x48"] if model.dit.images_only else ["1x64x96", "9x64x96", "17x64x96"]
    flow = {} if model.dit.diffusion else {"flow_shift": 1.0}
    told = {"buckets": {"table": sizes}, "batch": {"memory_tokens": 400}}
    made = lab.config(name, model={"dit": {}}, data=told, **sections)
    return replace(made, model=model, train=replace(made.train, flow=FlowConfig(**flow)))


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_streams_of_two_widths_train_the_same(lab: Lab) -> None:
    """Mochi's text is narrower than its video, and its last block is of another kind."""
    model = MODELS["mochi"]
    compiled = replace(model, dit=replace(model.dit, compile=True, gradient_checkpointing=True))
    length, workers = {"steps": FEWEST}, {"min": 2, "max": 2}
    run = lab.start(
        config_of(lab, "mochi-compiled", compiled, train=length, planner={"degrees": [1, 2]}, workers=workers)
    )
    alone = lab.start(config_of(lab, "mochi-as-written", model, train=length, workers={"min": 1, "max": 1}))
    assert run.join(600).code == 0 and alone.join(600).code == 0
    assert_same_training(run, alone.losses())


@pytest.mark.long
@pytest.mark.parametrize("family", WHOLE_RUNS)
def test_a_model_of_every_family_trains_the_same_while_workers_die_and_come(lab: Lab, family: str) -> None:
    """In bags, by its own kind of sequence parallelism."""
    model = MODELS[family]

    def settings(name: str, **sections: Mapping[str, object]) -> RunConfig:
        return config_of(lab, name, model, **sections)

    run = lab.start(
        settings(
            f"{family}-storm",
            train={"steps": OPEN_END},
            planner={"degrees": [3]},  # two workers take the nearest that they can
            workers={"min": 2, "max": 3, **PATIENT},
        )
    )
    run.scale(2)
    run.wait_for_workers(2)
    run.wait_for_more_steps(3)
    before = run.generations()
    run.signal_worker(0)
    run.wait_for(lambda: run.generations() > before and len(run.active()) == 2, "another in its place")
    run.wait_for_more_steps(3)
    run.scale(3)
    run.wait_for_workers(3)
    run.wait_for_more_steps(3)
    run.pause()
    digests = run.parameter_digests()
    run.go_on()
    run.stop()
    assert len(digests) == 3 and len(set(digests)) == 1
    assert [e for e in run.events if isinstance(e, WorkerDied)]
    assert {span.degree for span in run.spans if span.module == "dit"} >= {2, 3}
    steps = max(FEWEST, len(run.steps()))
    alone = lab.start(settings(f"{family}-alone", train={"steps": steps}, workers={"min": 1, "max": 1}))
    assert alone.join(600).code == 0
    assert_same_training(run, alone.losses())


@pytest.mark.long
def test_a_size_that_was_asked_for_holds_under_another_controller_with_another_monitor(lab: Lab) -> None:
    """Their node may have died with both."""
    config = lab.config("sized", train={"steps": OPEN_END}, workers={"max": 2, **PATIENT})
    first = lab.start(config)
    first.wait_for_workers(2)
    first.scale(1)
    first.wait_for(lambda: len(first.active()) == 1, "one worker is kept")
    first.stop()  # its monitor ends with it
    second = lab.start(config)
    second.wait_for_more_steps(3)
    second.stop()
    assert [event.target for event in second.events if isinstance(event, PoolResized)] == [1]
    assert {len(event.workers) for event in second.events if isinstance(event, GenerationFormed)} == {1}
