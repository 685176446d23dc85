"""Prodigy's end of a step beside AdamW's, which passes over its state once; its d beside that of fp64 on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from app.bench.gpu.measurement import Earlier, NamedFigures, Place, RunsAnywhere
from ops.comm.collectives import Group
from ops.config import OptimizerConfig, ProdigyConfig
from ops.update.sync import FlatSync

WEIGHTS = 1 << 28  # their state takes 6 GiB of a GPU
_STEPS = 6  # in which d grows from d0
_ERROR = 1e-4  # of d in fp32; weights that are rounded in the first small steps
_CONFIGS = {
    "AdamW": OptimizerConfig(),
    "Prodigy": OptimizerConfig(
        kind="prodigy", learning_rate=1.0, betas=(0.9, 0.999), prodigy=ProdigyConfig(d0=1e-4), max_grad_norm=0.0
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProdigyUpdate(RunsAnywhere):
    """Billions of weights a second of both, and the error of d."""

    name: str = "update.prodigy"
    estimate_s: float = 10.0

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        figures: dict[str, float | int] = {}
        for name, config in _CONFIGS.items():
            count = place.pick(WEIGHTS, 1 << 12)
            sync = _sync(config, count, place.device, torch.bfloat16)
            sync.gradient().normal_()
            seconds = place.seconds(lambda of=sync: _end(of), place.pick(5, 1)).seconds  # type: ignore[misc]
            figures[f"{name}, G weights/s"] = count / seconds / 1e9
            del sync
        exact = _found_d(torch.device("cpu"), torch.float64)
        error = abs(_found_d(place.device, torch.float32) / exact - 1)
        return {"right": error < _ERROR and exact > 10 * _CONFIGS["Prodigy"].prodigy.d0, "error of d": error, **figures}


def _sync(config: OptimizerConfig, count: int, device: torch.device, dtype: torch.dtype) -> FlatSync:
    module = nn.Linear(count, 1, bias=False, device=device, dtype=dtype)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-1, 1, count, dtype=torch.float64)[None])
    sync = FlatSync(module, config, total_steps=1000)
    sync.form(Group.solo(), None)
    sync.begin_step()
    return sync


def _end(sync: FlatSync, step: int = 0) -> float | None:
    return sync.finish_step(step, 1.0, 1.0, 1.0, phase=lambda name: None).d


def _found_d(device: torch.device, dtype: torch.dtype) -> float:
    """d after steps down a bowl whose bottom lies beside the start of all weights."""
    sync = _sync(_CONFIGS["Prodigy"], 10_000, device, dtype)
    found = None
    for step in range(_STEPS):
        sync.begin_step()
        sync.gradient().copy_(sync.state.arrays["master"] - 0.5)
        found = _end(sync, step)
    assert found is not None, "Prodigy tells d"
    return found
