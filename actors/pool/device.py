"""What the workers of a run compute on: GPUs as their driver names them, and how fast those are that no table lists.

Ray knows a GPU by a word of its name ("H100" of an H100 PCIe, too) and the process that plans may have none. So one is
looked at where it is, by an actor on it; what it says is kept in the run's folder, so that a resume on the same kinds
of GPUs plans with the same figures.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import ray

from actors.config import PlannerConfig, WorkersConfig
from actors.messages import HostGpu
from actors.plan.devices import device_speed
from actors.pool.own_gpu import own_gpu
from actors.pool.workers import uses_gpu
from actors.ray_calls import get, given_gpu, kill, remote_of, resources, wait
from ops.whole_file import write_whole

log = logging.getLogger(__name__)

DEVICE = "device.json"  # in the folder of a run
MEASURED_S = 10.0  # of products on a GPU that no table lists
_LOOK_S = 180.0  # for an actor to start, import torch and measure
_SOON_S = 20.0  # in which it usually has
_MORE = 8  # GPUs that are looked at at the same time where the first cannot be used; that one may be among them again
_MORE_S = 60.0
_KIND = "accelerator_type:"


class ComputeSettings(Protocol):
    """The sections of a run's settings that are asked for."""

    @property
    def workers(self) -> WorkersConfig: ...
    @property
    def planner(self) -> PlannerConfig: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenGpu:
    """A GPU as it was seen."""

    name: str  # that its driver gives; "" of one that cannot be used
    tflops: float = 0.0  # bf16, measured; 0: a table has it
    unusable: str = ""  # why it cannot be used, and what helps


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersDevice:
    """What workers compute on."""

    name: str  # "cpu"; names of GPUs with "+" between them; "cuda" where nobody knows
    measured: Mapping[str, float] = field(default_factory=dict)  # bf16 TFLOP/s by name, of GPUs that no table lists
    kinds: tuple[str, ...] = ()  # the GPUs of the cluster as Ray names them
    unusable: str = ""  # why no GPU that was looked at can be used

    @property
    def assumed(self) -> bool:
        """Whether nobody knows how fast they are."""
        return self.name != "cpu" and device_speed(self.name, self.measured) is None

    def keep(self, folder: Path) -> None:
        """Write it into a run's folder."""
        write_whole(folder / DEVICE, json.dumps(asdict(self)) + "\n")

    @classmethod
    def kept(cls, folder: Path) -> WorkersDevice | None:
        """The device that a run's folder names; None where no file names one, or the file is damaged."""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            told = json.loads((folder / DEVICE).read_text(encoding="utf-8"))
            measured = {str(name): float(tflops) for name, tflops in told["measured"].items()}
            return cls(name=str(told["name"]), measured=measured, kinds=tuple(map(str, told["kinds"])))
        return None


def workers_device(
    config: ComputeSettings,
    folder: Path,
    look: Callable[[str], SeenGpu | None] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> WorkersDevice:
    """What a run's workers compute on. GPUs are looked at once, unless the folder knows those that are there now; with
    a measured profile their names are enough. To be called with Ray connected. `tell` gets a sentence when that takes
    long."""
    if not uses_gpu(config.workers):
        return WorkersDevice(name="cpu")
    kinds = gpu_kinds()
    if config.planner.profile:
        return WorkersDevice(name="+".join(kinds) or "cuda", kinds=kinds)
    kept = WorkersDevice.kept(folder)
    if kept is not None and kept.kinds == kinds and kept.name != "cpu" and not kept.assumed:
        return kept
    there = kinds or (("",) if resources(free=False).get("GPU") else ())  # some clusters do not name theirs
    seen = {kind: (look or partial(look_at, tell=tell))(kind) for kind in there}
    unusable = [gpu.unusable if gpu is not None else "" for gpu in seen.values()]
    if unusable and all(unusable):
        return WorkersDevice(name="cpu", kinds=kinds, unusable=unusable[0])
    names = [gpu.name if gpu is not None and not gpu.unusable else kind for kind, gpu in seen.items()]
    return WorkersDevice(
        name="+".join(sorted(set(filter(None, names)))) or "cuda",
        measured={gpu.name: gpu.tflops for gpu in seen.values() if gpu is not None and gpu.tflops},
        kinds=kinds,
    )


def gpu_kinds() -> tuple[str, ...]:
    """The GPUs that the cluster has now, as Ray names them. One that it names twice, as A100 and A100-80G, has the
    shorter name: profiles are compared with it."""
    found = {name.removeprefix(_KIND) for name in resources(free=False) if name.startswith(_KIND)}
    return tuple(sorted(kind for kind in found if kind.rpartition("-")[0] not in found))


def look_at(kind: str, patience_s: float = _LOOK_S, tell: Callable[[str], None] = lambda text: None) -> SeenGpu | None:
    """A GPU of this kind ("": of any) of the cluster, one that can be used if any of several can; None where none is
    free in time. `tell` gets a sentence when none is at once."""
    first = next(_looks(kind, 1, patience_s, tell), None)
    if first is None or not first.unusable:
        return first
    log.warning("%s", first.unusable)
    there = int(resources(free=False).get("GPU", 0))
    more = _looks(kind, min(_MORE, there), min(_MORE_S, patience_s)) if there > 1 else ()
    return next((gpu for gpu in more if not gpu.unusable), first)


def _looks(
    kind: str, count: int, patience_s: float, tell: Callable[[str], None] = lambda text: None
) -> Iterator[SeenGpu]:
    """As many GPUs of this kind as they are seen, as far as they are free in time. Tasks would be given the same one
    again and again: an actor holds its own."""
    kinds = {"accelerator_type": kind} if kind else {}
    actor = remote_of(_Look).options(num_cpus=0, scheduling_strategy="SPREAD", **own_gpu(1), **kinds)
    looks = [actor.remote() for _ in range(count)]
    until, left = time.monotonic() + patience_s, [look.at.remote(_seen) for look in looks]
    try:
        if not wait(left, timeout=min(_SOON_S, patience_s))[0]:
            seconds = max(0.0, until - time.monotonic())
            tell(f"waiting for a GPU{f' {kind}' * bool(kind)} that is free, to see what it is; at most {seconds:.0f} s")
        while left:
            ready, left = wait(left, timeout=max(0.0, until - time.monotonic()))
            if not ready:
                log.warning("no GPU %s could be looked at within %g s", kind, patience_s)
                return
            try:
                yield get(ready[0])
            except ray.exceptions.RayError as error:
                log.warning("no GPU %s could be looked at: %s", kind, type(error).__name__)
    finally:
        for look in looks:
            kill(look)


class _Look:
    """The actor, on a GPU."""

    def at(self, seen: Callable[[], SeenGpu]) -> SeenGpu:
        return seen()


def _seen() -> SeenGpu:
    """The GPU of the process that runs this."""
    import torch

    from ops.gpu_check import why_unusable
    from ops.matmul import matmul_tflops

    if why := why_unusable():
        return SeenGpu(name="", unusable=f"{HostGpu(host=socket.gethostname(), gpu=given_gpu())}: {why}")
    name, device = torch.cuda.get_device_name(0), torch.device("cuda", 0)
    if device_speed(name) is not None:
        return SeenGpu(name=name)
    return SeenGpu(name=name, tflops=matmul_tflops(device, torch.bfloat16, MEASURED_S))
