"""Whatever a call loses, and whichever call fails: the generation ends and its steps are computed again, whole.

Text encoders compute in bf16 and results are published later, both as on GPUs.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.messages import CascadeTask, PublishedResult
from actors.records.events import GenerationEnded
from actors.run import forming
from actors.run.dispatch import Call
from actors.run.steps import StepRunner
from actors.step import StepData, SubmittedCall
from actors.worker.executor import Executor
from actors.worker.handoff import CopyInFlight, HostCopies
from actors.worker.worker import Worker
from app.bench.lab import Lab, LabRun
from ops.shard_export import CopyAtOnce

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
BF16 = 5e-3  # a caption's states depend on its batch by rounding; a sample that is missing changes the loss by more
FAILS = "HEDDLE_FAILING_CALLS"  # a folder with a file for each call that is still to fail


def _copy(rows: torch.Tensor) -> CopyInFlight:
    return CopyInFlight(host=rows.clone(), wait=lambda: None)


class GpuLikeWorker(Worker):
    """A CPU worker that does what one on CUDA does differently, and whose calls fail where a file says so."""

    def _load(self) -> Executor:
        executor = super()._load()
        executor.modules.text.encoder.bfloat16()
        executor.sync.state.copy_arrays = CopyAtOnce()  # type: ignore[attr-defined]
        return executor

    def _host_copies(self) -> HostCopies:
        return HostCopies(_copy)

    def published(self, task: CascadeTask, encode: Any) -> list[PublishedResult]:
        self._fail_once("published")
        return super().published(task, encode)

    def dit(self, task: CascadeTask, *published: list[PublishedResult]) -> None:
        self._fail_once("dit")
        super().dit(task, *published)

    def encode_text(self, task: CascadeTask, *batches: Any) -> list[PublishedResult]:
        self._fail_once("encode_text")
        return super().encode_text(task, *batches)

    def _fail_once(self, call: str) -> None:
        if self.heartbeat.progress.step >= 1:
            try:
                (Path(os.environ[FAILS]) / call).unlink()
            except FileNotFoundError:
                return
            raise RuntimeError(f"{call} fails once")


class Owner:
    """Owns what it puts; dies."""

    def things(self, count: int) -> list[Any]:
        return [ray.put(number) for number in range(count)]


def orphans(count: int) -> list[Any]:
    """References whose objects are gone with their owner."""
    owner = ray.remote(Owner).options(num_cpus=0).remote()
    references = ray.get(owner.things.remote(count))
    ray.kill(owner)
    deadline = time.monotonic() + 150
    for reference in references:
        while not is_lost(reference):
            assert time.monotonic() < deadline, "the object outlives its owner"
            time.sleep(0.05)
    return references


def is_lost(reference: Any) -> bool:
    """Ray notices the death of an owner in its own time; until then the object can be read, or cannot be found."""
    try:
        ray.get(reference, timeout=10)
    except ray.exceptions.ObjectLostError:
        return True
    except ray.exceptions.GetTimeoutError:
        pass
    return False


@dataclass
class Losses:
    """Kinds of arguments still to be lost, and those that were: (kind, name of the call)."""

    kinds: list[str]
    gone: list[Any]
    rng: random.Random
    happened: list[tuple[str, str]] = field(default_factory=list)
    not_before: int = 1

    def strikes(self, kind: str, call: Call) -> bool:
        """Whether this call loses its argument of this kind; one loss, then two steps of peace."""
        due = self.kinds and self.kinds[0] == kind and call.task.step >= self.not_before
        if not due or self.rng.random() < 0.5:
            return False
        self.kinds.pop(0)
        self.happened.append((kind, call.task.name))
        self.not_before = call.task.step + 2
        return True


@dataclass(kw_only=True)
class LosingRunner(StepRunner):
    """Passes references to objects that are gone."""

    losses: Losses
    _kind: dict[str, str] = field(default_factory=dict)  # of each published result

    def _submit(self, call: Call, data: dict[int, StepData]) -> SubmittedCall:
        task = call.task
        if task.module == "dit":
            for needed in call.needs:
                if self.losses.strikes(self._kind.get(needed, needed.rpartition("/")[0]), call):
                    self._results[needed] = self.losses.gone.pop()
                    if needed.startswith("cache/"):
                        _, module, item = needed.split("/", 2)
                        data[task.step].cached[module, item] = self._results[needed]
        elif self.losses.strikes("captions" if task.module == "text" else "pixels", call):
            data[task.step].batches[call.items[0]] = self.losses.gone.pop()
        self._kind[task.cascade] = task.module
        return super()._submit(call, data)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lost")
    os.environ[FAILS] = str(folder / "fails")
    (folder / "fails").mkdir()
    with Lab(folder) as one:
        one.add_node(workers=3, gpus=3)  # a GPU brings the io thread
        yield one


def run_of(lab: Lab, name: str, steps: int, workers: int, **sections: Any) -> LabRun:
    run = lab.start(
        lab.config(
            name,
            train={"steps": steps},
            workers={"min": workers, "max": workers, "device": "auto", "collective_timeout_s": 30.0},
            planner={"strategy": "cascade", "degrees": [1]},  # no bags: results go through the object store
            **sections,
        ),
        worker_class=GpuLikeWorker,
    )
    assert run.join(400).code == 0, run.outcome
    assert run.steps() == list(range(steps))
    assert [m.good_weight for m in run.metrics] == [1.0] * steps
    return run


def losing(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> Losses:
    losses = Losses(kinds=list(kinds), gone=orphans(len(kinds)), rng=random.Random(5))
    monkeypatch.setattr(forming, "StepRunner", partial(LosingRunner, losses=losses))
    return losses


def broken(run: LabRun) -> list[str]:
    return [e.why for e in run.events if isinstance(e, GenerationEnded) and not e.clean]


def test_no_step_is_committed_without_a_sample_whichever_argument_or_call_is_lost(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = run_of(lab, "calm", 12, 1)
    assert not broken(calm)
    kinds = ("text", "pixels", "vae", "captions")
    losses = losing(monkeypatch, *kinds)
    for call in ("published", "dit", "encode_text"):
        (lab.folder / "fails" / call).touch()
    storm = run_of(lab, "storm", 12, 3)
    assert tuple(kind for kind, _ in losses.happened) == kinds, f"lost were {losses.happened}"
    assert not list((lab.folder / "fails").iterdir())
    assert len(broken(storm)) >= 4, "several may fall into one generation"
    assert storm.losses() == pytest.approx(calm.losses(), rel=BF16)


@pytest.mark.long
def test_results_that_come_from_the_cache_are_not_missed_in_silence_either(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = {"cache": {"path": str(tmp_path / "cache")}}
    filling = run_of(lab, "filling", 6, 1, data=cache)
    losses = losing(monkeypatch, "cache/vae", "cache/text")
    found = run_of(lab, "cached", 6, 2, data=cache)
    assert len(losses.happened) == 2 and len(broken(found)) >= 1
    assert found.losses() == pytest.approx(filling.losses(), rel=BF16)
