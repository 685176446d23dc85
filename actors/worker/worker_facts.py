"""What a worker says of itself: `WorkerInfo` when it is ready, and memory with each step."""

from __future__ import annotations

import os

import torch

from actors.messages import HostGpu, WorkerInfo, WorkerSettings
from actors.plan.types import GpuPlace
from actors.process import birth
from actors.ray_calls import object_store_gib
from actors.worker.executor import Executor
from actors.worker.loading import LateSizes
from ops.comm.reach import DoorAddress
from ops.environment import environment
from ops.memory.node_room import node_room, shared_room
from ops.units import GIB
from ops.update.flat_vector import trainable
from ops.update_room import pinned_gib
from ops.upload_room import uploads_gib


def worker_info(
    executor: Executor,
    settings: WorkerSettings,
    late: LateSizes,
    *,
    worker: str,
    here: HostGpu,
    frozen: tuple[tuple[str, str], ...],
    first: tuple[tuple[str, int], ...],
    lends: int,
    place: GpuPlace,
    door: DoorAddress | None,
) -> WorkerInfo:
    """A worker whose modules are loaded. `late`: what encoders will take that are not made yet."""
    device, sync, shared = executor.device, executor.sync, shared_room()
    return WorkerInfo(
        worker=worker,
        node=here.node,
        host=here.host,
        pid=os.getpid(),
        born=birth(os.getpid()),
        device=str(device),
        room_gib=room_gib(executor, late),
        publishes_later=executor.copies is not None,
        frozen=frozen,
        first=first,
        gradients=sync.gradient_memory,
        parameters="node" if executor.modules.blocks_on_host else sync.parameter_memory,
        host_weights_gib=_host_weights_gib(executor),
        host_encoders_gib=late.host,
        state_on_host=device.type == "cpu" or sync.state_on_host,
        lends=lends,
        uploads_gib=uploads_gib(settings.largest_upload) if device.type == "cuda" else 0.0,
        pinned_gib=_pinned_gib(executor),
        host_room_gib=node_room() / GIB,
        store_gib=object_store_gib(here.node),
        shared_gib=None if shared is None else shared / GIB,
        place=place,
        gpu=here.gpu,
        door=door,
        nccl=tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith("NCCL_"))),
        environment=environment(device),
    )


def gpu_gib(device: torch.device) -> float:
    """Memory of a worker's GPU; 0 on a CPU."""
    return torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else 0.0


def peak_gib(device: torch.device) -> float:
    """The most memory of a worker's GPU that tensors have taken at a time; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0


def room_gib(executor: Executor, late: LateSizes) -> float | None:
    """GiB for cascades, less what encoders will take that are not loaded yet; None: no limit."""
    room = executor.meter.room_gib()
    return None if room is None else room - late.device


def _host_weights_gib(executor: Executor) -> float:
    """GiB of its node's memory that hold parameters for its GPUs; a CPU's workers free as much when they share them."""
    dit = executor.modules.dit
    if executor.device.type == "cpu":
        return 0.0
    if executor.modules.blocks_on_host:
        return sum(p.nbytes for p in dit.parameters() if p.device.type == "cpu") / GIB
    return sum(p.nbytes for _, p in trainable(dit)) / GIB if executor.sync.parameter_memory == "node" else 0.0


def _pinned_gib(executor: Executor) -> float:
    """GiB of its node's memory through which its gradients and updates go to the host and come back."""
    if executor.device.type != "cuda":
        return 0.0
    sync = executor.sync
    sizes = [slot.hi - slot.lo for slot in sync.layout]
    itemsize = max(p.element_size() for _, p in trainable(executor.modules.dit))
    return pinned_gib(
        sum(sizes),
        max(sizes),
        itemsize,
        host_gradients=sync.gradient_memory == "host",
        host_state=sync.state_on_host,
        host_parameters=sync.parameter_memory == "node",
    )
