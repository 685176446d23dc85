"""Whatever a call loses, and whichever call fails: the generation ends and its steps are computed again, whole.

As on GPUs everything is in bf16, weights, autocast, VAE and text, and results are published later; the losses are those
of a run in fp32. So a dtype that somebody mixes up shows without a GPU.
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
from diffusers import AutoencoderKLWan

from actors.messages import CascadeTask, PublishedResult
from actors.records.events import GenerationEnded
from actors.run import steps as step_runner
from actors.run.dispatch import Call
from actors.run.submitter import Submitter
from actors.step import SubmittedCall
from actors.worker import loading
from actors.worker.executor import Executor
from actors.worker.handoff import CopyInFlight, HostCopies
from actors.worker.worker import Worker
from app.bench.lab import Lab, LabRun
from data.cache import kept_kinds
from data.config import CacheConfig
from ops.models.config import TextConfig
from ops.update.shard_export import CopyAtOnce
from tests.ops.test_frozen import t5_folder

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
BF16 = 1e-2  # of the loss, beside fp32
SAME = 5e-3  # two runs in bf16: a caption's states depend on its batch by rounding
FAILS = "HEDDLE_FAILING_CALLS"  # a folder with a file for each call that is still to fail, and for each encoder made
HALF = {"parameter_dtype": "bfloat16", "autocast": "bfloat16"}


def _copy(rows: torch.Tensor) -> CopyInFlight:
    return CopyInFlight(host=rows.clone(), wait=lambda: None)


class GpuLikeWorker(Worker):
    """A CPU worker that does what one on CUDA does differently, and whose calls fail where a file says so. It notes
    which encoders it makes."""

    def _device(self) -> torch.device:
        return torch.device("cpu")

    def _load(self) -> Executor:
        TextConfig.dtype_on = lambda config, device: "bfloat16"  # type: ignore[method-assign]
        for part in ("text", "vae"):
            setattr(loading, f"build_{part}", self._noted(part, getattr(loading, f"build_{part}")))
        executor = super()._load()
        executor.sync.state.copy_arrays = CopyAtOnce()  # type: ignore[attr-defined]
        return executor

    def _noted(self, part: str, build: Any) -> Any:
        def noting(*arguments: Any, **named: Any) -> Any:
            (Path(os.environ[FAILS]) / f"made {part} {self.name} {os.getpid()}").touch()
            return build(*arguments, **named)

        return noting

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
class LosingSubmitter(Submitter):
    """Passes references to objects that are gone."""

    losses: Losses
    _kind: dict[str, str] = field(default_factory=dict)  # of each published result

    def submit(self, call: Call, data: Any) -> SubmittedCall | None:
        task = call.task
        if task.module == "dit":
            for needed in call.needs:
                if self.losses.strikes(self._kind.get(needed, needed.rpartition("/")[0]), call):
                    self.results[needed] = self.losses.gone.pop()
                    if needed.startswith("cache/"):
                        _, module, item = needed.split("/", 2)
                        data[task.step].cached[module, item] = self.results[needed]
        elif self.losses.strikes("captions" if task.module == "text" else "pixels", call):
            data[task.step].batches[call.items[0]] = self.losses.gone.pop()
        self._kind[task.cascade] = task.module
        return super().submit(call, data)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lost")
    os.environ[FAILS] = str(folder / "fails")
    (folder / "fails").mkdir()
    publish(folder / "model")
    with Lab(folder) as one:
        one.add_node(workers=3, gpus=3)  # a GPU brings the io thread
        yield one


def publish(folder: Path) -> None:
    """Encoders as a pipeline holds them."""
    t5_folder(folder)
    torch.manual_seed(0)
    AutoencoderKLWan(
        base_dim=3, z_dim=8, dim_mult=[1] * 4, num_res_blocks=1, latents_mean=[0.0] * 8, latents_std=[0.14] * 8
    ).save_pretrained(folder / "vae")


def start(lab: Lab, name: str, steps: int, workers: int, *, half: bool = True, **sections: Any) -> LabRun:
    """In 16 bits as on a GPU, or in fp32 by plain workers."""
    path = str(lab.folder / "model")
    buckets = {"buckets": {"table": ["1x32x48", "5x32x48", "9x32x48", "5x48x32"], "short_videos": "image"}}
    model = {
        "vae": {"kind": "diffusers", "path": path, "dtype": "bfloat16" if half else "float32"},
        "text": {"path": path, "max_length": 40},
    }
    return lab.start(
        lab.config(
            name,
            model=model,
            train={"steps": steps, **(HALF if half else {})},
            workers={"min": workers, "max": workers, "device": "auto" if half else "cpu", "collective_timeout_s": 30.0},
            planner={"strategy": "cascade", "degrees": [1]},  # no bags: results go through the object store
            data={**buckets, **sections.pop("data", {})},
            **sections,
        ),
        worker_class=GpuLikeWorker if half else Worker,
    )


def ended(run: LabRun, steps: range) -> LabRun:
    """Its last step has been taken, and every step is whole."""
    assert run.join(400).code == 0, run.outcome
    assert run.steps() == list(steps)
    assert [m.good_weight for m in run.metrics] == [1.0] * len(steps)
    return run


def run_of(lab: Lab, name: str, steps: int, workers: int, **sections: Any) -> LabRun:
    return ended(start(lab, name, steps, workers, **sections), range(steps))


def made_encoders(lab: Lab) -> list[str]:
    """What was made since the last call: which encoder, and by which worker."""
    notes = sorted((lab.folder / "fails").glob("made *"))
    for note in notes:
        note.unlink()
    return [" ".join(note.name.split()[1:3]) for note in notes]


def losing(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> Losses:
    losses = Losses(kinds=list(kinds), gone=orphans(len(kinds)), rng=random.Random(5))
    monkeypatch.setattr(step_runner, "Submitter", partial(LosingSubmitter, losses=losses))
    return losses


def broken(run: LabRun) -> list[str]:
    return [e.why for e in run.events if isinstance(e, GenerationEnded) and not e.clean]


@pytest.mark.faults
def test_no_step_is_committed_without_a_sample_whichever_argument_or_call_is_lost(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = run_of(lab, "calm", 15, 1, half=False)
    assert not broken(calm)
    kinds = ("text", "pixels", "vae", "captions")
    losses = losing(monkeypatch, *kinds)
    for call in ("published", "dit", "encode_text"):
        (lab.folder / "fails" / call).touch()
    storm = start(lab, "storm", 12, 3)
    storm.wait_for_step(1)
    storm.signal_worker()
    ended(storm, range(12))
    assert tuple(kind for kind, _ in losses.happened) == kinds, f"lost were {losses.happened}"
    assert len(broken(storm)) >= 4, "several may fall into one generation"
    assert {note.split()[0] for note in made_encoders(lab)} == {"text", "vae"}
    assert not list((lab.folder / "fails").iterdir())
    resumed = ended(start(lab, "storm", 15, 2), range(12, 15))
    assert [*storm.losses(), *resumed.losses()] == pytest.approx(calm.losses(), rel=BF16)
    assert calm.losses() != storm.losses(), "they computed in other dtypes"


@pytest.mark.long
def test_results_that_come_from_the_cache_are_not_missed_in_silence_either(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = {"cache": {"path": str(tmp_path / "cache")}}
    calm = run_of(lab, "plain", 6, 1, half=False)
    made_encoders(lab)
    filling = run_of(lab, "filling", 6, 1, data=cache)
    assert len(made_encoders(lab)) == 2, "of an empty cache all is missing: both are loaded before the first step"
    assert kept_kinds(CacheConfig(path=str(tmp_path / "cache"))) == ("latents", "text")
    losses = losing(monkeypatch, "cache/vae", "cache/text")
    found = run_of(lab, "cached", 6, 2, data=cache)
    assert len(losses.happened) == 2 and len(broken(found)) >= 1
    assert not made_encoders(lab), "all is in the cache"
    assert filling.losses() == pytest.approx(calm.losses(), rel=BF16)
    assert found.losses() == pytest.approx(filling.losses(), rel=SAME)
    gone = sorted((tmp_path / "cache" / "text").glob("*/*.npy"))[0]
    gone.unlink()
    missed = run_of(lab, "missed", 6, 2, data=cache)
    assert {note.split()[0] for note in made_encoders(lab)} == {"text"}, "made for the one that is missing"
    assert gone.is_file() and missed.losses() == pytest.approx(filling.losses(), rel=SAME)
