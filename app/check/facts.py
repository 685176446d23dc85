"""What a node and a GPU say of themselves: the parts of `heddle check` that run where these are."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from shutil import disk_usage

from ops.environment import software
from ops.listing import nearest_folder, paths_below
from ops.units import GIB

_PRODUCTS_S = 1.0  # of bf16 products on each GPU
_TALK_S = 60.0  # that members of a sum wait for each other
_TALKS, _TALK_BYTES = 3, 256 << 20
MARKED = ".heddle-check-"  # names of markers begin so


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPaths:
    """The local files of a run that every node has to see alike."""

    marker: str = ""  # a file in the run's folder, or above it, that the command has just written; "": no run
    run_dir: str = ""
    cache_marker: str = ""  # a file of that kind in the cache's folder; "": it may only be read, or there is none
    cache: str = ""
    sources: tuple[str, ...] = ()
    media: tuple[str, ...] = ()  # folders of the clips that tables name
    folders: tuple[str, ...] = ()  # of models


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """A node as it was seen."""

    node: str  # Ray's name of it
    host: str
    software: Mapping[str, str]  # versions by name; "heddle" with a digest of the program's files
    cores: int  # that processes of Ray may use there
    room_gib: float  # of memory, before processes are ended for it
    shared_gib: float | None = None  # of /dev/shm; None: there is none
    store_gib: float | None = None  # of Ray's object store, which lies in /dev/shm where that is as large
    open_files: int = 0  # that a process may have
    hidden: Mapping[str, str] = field(default_factory=dict)  # what it does not see of the run, by path: why
    own_cache: str = ""  # the folder of a cache, where it is not the one that others see
    folders: Mapping[str, str] = field(default_factory=dict)  # digest of the names and sizes below each folder
    disk_gib: float | None = None  # that is free where the run's folder lies


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """A GPU as it was seen."""

    host: str
    index: str  # as Ray counts those of the node
    name: str = ""
    total_gib: float = 0.0
    free_gib: float = 0.0  # before this process took any
    tflops: float = 0.0  # bf16, measured
    unusable: str = ""  # why it cannot be used, and what helps

    def __str__(self) -> str:
        return f"GPU {self.index} of {self.host}"


def node_facts(node: str, paths: RunPaths, store_gib: float | None) -> NodeFacts:
    """The node on which this runs, whose object store has `store_gib`."""
    from ops.cores import usable_cores
    from ops.memory.node_room import node_room, shared_room

    shared = shared_room()
    return NodeFacts(
        node=node,
        host=socket.gethostname(),
        software=software(),
        cores=usable_cores(),
        room_gib=node_room() / GIB,
        shared_gib=None if shared is None else shared / GIB,
        store_gib=store_gib,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        hidden=hidden(paths),
        own_cache=own_cache(paths),
        folders={folder: digest_of(folder) for folder in paths.folders if Path(folder).is_dir()},
        disk_gib=disk_usage(nearest_folder(Path(paths.run_dir))).free / GIB if paths.run_dir else None,
    )


def hidden(paths: RunPaths) -> dict[str, str]:
    """What of a run's files cannot be used here, and why."""
    from data.errors import DataError
    from data.storage import check_there, local_path

    found = {}
    if paths.marker:
        found[paths.run_dir] = _unshared(paths.marker)
    if paths.cache:
        found[paths.cache] = _empty(paths.cache)
    for source in paths.sources:
        try:
            check_there(source)
        except DataError as error:
            found[source] = str(error).removesuffix(".")
    found |= {folder: _empty(local_path(folder)) for folder in paths.media}
    found |= {folder: "it is not there" for folder in paths.folders if not Path(folder).is_dir()}
    return {path: why for path, why in found.items() if why}


def own_cache(paths: RunPaths) -> str:
    """The folder of a cache that has something here and is not the one in which the marker was made: it may be a copy,
    by which a run trains as well, as entries are looked for by their names."""
    marker = paths.cache_marker
    return paths.cache if marker and not Path(marker).is_file() and not _empty(paths.cache) else ""


def _unshared(marker: str) -> str:
    """Why the folder of a marker is not the one in which it was made, or cannot be used; empty: it can."""
    if not Path(marker).is_file():
        return "it is not the folder that the others see"
    return "" if os.access(Path(marker).parent, os.W_OK) else "it cannot be written there"


def _empty(folder: str) -> str:
    """Why there is nothing in a folder, as in a mount point without its mount; empty: there is something."""
    try:
        with os.scandir(folder) as entries:
            return "" if any(not entry.name.startswith(MARKED) for entry in entries) else "it is empty there"
    except (FileNotFoundError, NotADirectoryError):
        return "it is not there"
    except OSError as error:
        return f"it cannot be listed there ({error.strerror})"


def digest_of(folder: str) -> str:
    """Names and sizes of all files below a folder."""
    files = sorted(path for path in paths_below(Path(folder)) if path.is_file())
    told = "\n".join(f"{path.relative_to(folder)} {path.stat().st_size}" for path in files)
    return blake2b(told.encode(), digest_size=4).hexdigest()


def gpu_facts(index: str) -> GpuFacts:
    """The GPU of the process in which this runs."""
    import torch

    from ops.gpu_check import why_unusable
    from ops.matmul import matmul_tflops
    from ops.waiting import first_line

    given = given_facts(index)
    if why := why_unusable():
        return replace(given, unusable=why)
    free, total = torch.cuda.mem_get_info()
    try:
        tflops = matmul_tflops(torch.device("cuda", 0), torch.bfloat16, _PRODUCTS_S)
    except RuntimeError as error:
        room = f"{free / GIB:.1f} of its {total / GIB:.1f} GiB were free"
        return replace(given, unusable=f"it multiplies no matrices ({room}): {first_line(error).removesuffix('.')}")
    return replace(given, name=torch.cuda.get_device_name(0), total_gib=total / GIB, free_gib=free / GIB, tflops=tflops)


def given_facts(index: str) -> GpuFacts:
    """The GPU of the process in which this runs, which nobody has looked at yet."""
    return GpuFacts(host=socket.gethostname(), index=index)


@dataclass(frozen=True, kw_only=True, slots=True)
class Talk:
    """A sum over processes that all of them have made together."""

    members: int
    right: bool
    gb_per_s: float  # that each sends, of the sum's ring: 2 (n - 1) / n times its bytes


def talk(store: tuple[str, int] | None, own: object, rank: int, nodes: Sequence[int], cuda: bool) -> Talk:
    """A sum of numbers in fp32, as the workers of a run connect and sum. `nodes` of all members by rank. The
    members meet at `store`, HOST and PORT, or at their `own`. Raises what the library raises, and TimeoutError."""
    import torch
    import torch.distributed as dist

    from actors.ray_calls import node_address
    from ops.comm.groups import Groups
    from ops.waiting import CancelToken

    meeting = own if store is None else dist.TCPStore(*store, is_master=False)
    assert isinstance(meeting, dist.Store)
    device, world = torch.device("cuda:0" if cuda else "cpu"), tuple(range(len(nodes)))
    if cuda:
        torch.cuda.set_device(device)
    groups = Groups(
        meeting, rank, world, "nccl" if cuda else "gloo", 0, _TALK_S, CancelToken(), node_address(), nodes, device
    )
    try:
        group = groups.world_group()
        values = torch.full((_TALK_BYTES // 4,), float(rank + 1), device=device)
        group.all_reduce(values)  # which connects
        right = bool((values == len(world) * (len(world) + 1) / 2).all())
        seconds = []
        for _ in range(_TALKS):
            values.zero_()
            group.barrier(device)
            began = time.perf_counter()
            group.all_reduce(values)
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    finally:
        groups.close()
    sent = 2 * (len(world) - 1) / len(world) * _TALK_BYTES
    return Talk(members=len(world), right=right, gb_per_s=sent / min(seconds) / 1e9)
