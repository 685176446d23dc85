"""The update of optimizer state in host memory: by one core in large pieces, by one in pieces that stay in its cache,
by a worker's share of the cores and by half of them. State on the device has to give the same weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from app.bench.gpu.measurement import Earlier, NamedFigures, Place, RunsAnywhere, relative_error
from app.bench.timing import Timing
from ops.comm.collectives import Group
from ops.config import OptimizerConfig
from ops.cores import usable_cores
from ops.update.sync import FlatSync
from ops.update.sync_places import StateLocation, SyncPlaces

WEIGHTS = 1 << 28  # their state takes 4 GiB of the host
_WORKERS = 8  # of a node, whose cores they share
_LARGE = 1 << 26  # elements
_ERROR = 1e-3  # of weights in bf16 after some updates, few of which round the other way


@dataclass(frozen=True, kw_only=True, slots=True)
class HostUpdate(RunsAnywhere):
    """Billions of weights a second of the end of a step, the copies over PCIe included."""

    name: str = "update.host"
    estimate_s: float = 25.0

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        count, cores = place.pick(WEIGHTS, 1 << 12), max(1, usable_cores() // 2)
        ways = {  # cores, and how many weights are updated together: None is the usual number
            "one core, large pieces": (1, _LARGE),
            "one core": (1, None),
            "a share of the cores": (max(1, cores // _WORKERS), None),
            "half of the cores": (cores, None),
        }
        figures: dict[str, float | int] = {"cores": usable_cores()}
        errors = []
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # as in a worker: the ways ask for more, and never for fewer
        try:
            on_device, _ = _updated(count, place, "device")
            for way, (host_cores, elements) in ways.items():
                weights, timing = _updated(count, place, "host", host_cores, elements)
                figures[f"{way}, G weights/s"] = count / timing.seconds / 1e9
                errors.append(relative_error(weights, on_device))
                figures[f"{way}, error"] = errors[-1]
        finally:
            torch.set_num_threads(before)
        return {"right": max(errors) < _ERROR, **figures}


def _updated(
    count: int, place: Place, state: StateLocation, host_cores: int | None = None, elements: int | None = None
) -> tuple[torch.Tensor, Timing]:
    """The weights after as many updates in every way, and the seconds of one."""
    module = nn.Linear(count, 1, bias=False, device=place.device, dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-1, 1, count, device=place.device)[None])
    config = OptimizerConfig(learning_rate=1e-2)
    sync = FlatSync(
        module, config, 1000, places=SyncPlaces(state=state), host_cores=host_cores, update_elements=elements
    )
    sync.form(Group.solo(), None)
    step = iter(range(1000))

    def end() -> None:
        sync.begin_step()
        sync.gradient().copy_(torch.linspace(1, -1, count, device=place.device))
        sync.finish_step(next(step), 1.0, 1.0, 1.0, phase=lambda name: None)

    timing = place.seconds(end, place.pick(3, 1))
    return module.weight.detach().flatten().clone(), timing
