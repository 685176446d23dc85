"""A step as a worker runs it: several cascades one after the other, by its own executor, and the end of the step.

A plain step beside it has the same passes in one go, without what a worker adds: noise, levels, layouts, spans, memory
counted, and the wait for all cascades at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from actors.messages import FinishTask
from actors.worker.executor import Executor
from actors.worker.meter import meter_of
from app.bench.gpu.graphs import graphed
from app.bench.gpu.measurement import Earlier, Figure, NamedFigures, Place
from app.bench.gpu.models import (
    CLIP_480P81,
    PICTURE_480P,
    SHORT_480P17,
    SMALL_CLIP,
    WAN_1_3B,
    PackedCall,
    build,
    small,
)
from app.bench.gpu.train_step import AS_TRAINED, idle_of, make_trained
from app.bench.gpu.worker_alone import encoded_cascade, worker_alone
from ops.models.base.config import DiTConfig

# a clip, short ones, and pictures
CASCADES = ((CLIP_480P81,), (SHORT_480P17,) * 4, (PICTURE_480P,) * 8, (PICTURE_480P,) * 8, (PICTURE_480P,))
SMALL_CASCADES = ((SMALL_CLIP,), (SMALL_CLIP,) * 2)
NEEDS_GIB = 38.0  # states of 1.3B and the clip's pass take 35


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStep:
    """Seconds of the step by an executor, the idle share, and how many cascades kept their attention."""

    name: str = "worker.wan-1.3b"
    by_graphs: bool = False  # blocks of small passes
    estimate_s: float = 65.0

    def why_not(self, place: Place) -> str | None:
        return _without_room(place)

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        config = replace(place.pick(WAN_1_3B, small(WAN_1_3B, 2)), gradient_checkpointing=True)
        torch.manual_seed(0)
        dit = build(config, place.device).train()
        dit.graphed = graphed(config, place) if self.by_graphs else None
        worker = worker_alone(dit, config, meter_of(place.device, 0.0))
        steps = _Steps(worker, place)
        timing = place.seconds(steps.run, place.pick(3, 1), warm_up=place.pick(3, 1))
        if dit.graphed is not None and not dit.graphed.captures:
            raise RuntimeError("no pass ran by CUDA graphs: a capture has failed, or none was small.")
        figures: dict[str, Figure] = {
            "seconds": timing.seconds,
            "spread": timing.spread,
            "cascades": len(steps.cascades),
            "kept attention": steps.kept,
            **idle_of(steps.run, self.name, place),
        }
        worker.leave()
        return figures


@dataclass(frozen=True, kw_only=True, slots=True)
class PassesAlone:
    """Seconds of the same passes and the same update, without a worker."""

    name: str = "worker.passes-alone"
    estimate_s: float = 30.0

    def why_not(self, place: Place) -> str | None:
        return _without_room(place)

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        config = replace(place.pick(WAN_1_3B, small(WAN_1_3B, 2)), gradient_checkpointing=True)
        timing = place.seconds(_plain_step(config, place), place.pick(3, 1), warm_up=place.pick(2, 1))
        return {"seconds": timing.seconds, "spread": timing.spread}


def measurements() -> list[WorkerStep | PassesAlone]:
    return [WorkerStep(name="worker.wan-1.3b.graphs", by_graphs=True), WorkerStep(), PassesAlone()]


def _without_room(place: Place) -> str | None:
    return None if place.has_gib(NEEDS_GIB) else f"{NEEDS_GIB:g} GiB are not free: all of 1.3B is trained."


class _Steps:
    """Steps of a worker, each with new samples."""

    def __init__(self, worker: Executor, place: Place) -> None:
        self.worker, self.step, self.kept = worker, 0, 0
        self.cascades = place.pick(CASCADES, SMALL_CASCADES)

    def run(self) -> None:
        worker, names = self.worker, [f"c{i}" for i in range(len(self.cascades))]
        for name, pack in zip(names, self.cascades, strict=True):
            worker.dit(encoded_cascade(worker, self.step, name, pack, share=1 / len(names)), {})
        end = FinishTask(generation=0, step=self.step, export=False, cascades=tuple(names), weight=1.0)
        done = worker.finish(end)
        self.kept = sum(span.kept_attention for span in done.spans)
        self.step += 1


def _plain_step(config: DiTConfig, place: Place) -> Callable[[], None]:
    """The same passes and the same update, without a worker."""
    dit, sync = make_trained(config, AS_TRAINED, place)
    packs = place.pick(CASCADES, SMALL_CASCADES)
    calls = [PackedCall.of(config, list(pack), place.device) for pack in packs]

    def step() -> None:
        sync.begin_step()
        for call in calls:
            (call.loss(dit) / len(calls)).backward()
        sync.finish_step(0, 0.0, 1.0, 1.0, lambda phase: None)

    return step
