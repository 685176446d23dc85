"""What Ray starts a process with that is to compute on a GPU of its own.

remote_of(Look).options(num_cpus=0, **own_gpu(1)).remote()      # torch sees one GPU in it, as cuda:0
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Required, TypedDict

# Token counts differ from cascade to cascade: without it cached blocks of other sizes fill the GPU.
_ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
_ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_ALL_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"  # every process sees all: set for other frameworks


class GpuOptions(TypedDict, total=False):
    """Options of Ray, by its names."""

    num_gpus: Required[float]
    runtime_env: Mapping[str, Mapping[str, str]]


def own_gpu(gpus: float, given: Mapping[str, str] = os.environ) -> GpuOptions:
    """Options of an actor or task with one GPU; with `gpus` 0, of one without. `given` is the caller's environment."""
    return {"num_gpus": gpus, "runtime_env": {"env_vars": gpu_environment(given)}} if gpus else {"num_gpus": 0}


def gpu_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Variables of its process; the allocator as the user has set it, if so. It sees its own GPU alone, whatever the
    cluster is set to."""
    allocator = {} if any(name in given for name in _ALLOCATOR_NAMES) else _ALLOCATOR
    return {**allocator, _ALL_GPUS: "0"}
