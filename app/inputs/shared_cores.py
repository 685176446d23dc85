"""CPU workers of one machine that share its cores: what is predicted of each is of one that has its own."""

from __future__ import annotations

from dataclasses import replace

from actors.plan.types import Cluster
from app.inputs.profiles import gpu_of
from app.settings.config import RunConfig
from ops.cores import usable_cores
from ops.counted import counted


def with_shared_cores(cluster: Cluster, config: RunConfig) -> tuple[Cluster, str]:
    """The cluster of a preview with the speed that CPU workers have while all of them compute, and a sentence that says
    so; "" for GPUs, and where each worker has its threads' cores. Without `workers.cluster` the run is on this machine,
    with the cores that this process may use; of a cluster's nodes nobody knows them."""
    if gpu_of(config):
        return cluster, ""
    threads = config.workers.torch_threads
    if config.workers.cluster:
        return cluster, (
            f"seconds are those of CPU workers with {counted(threads, 'core')} each (workers.torch_threads): where "
            f"workers of a node share cores, it takes longer by as much"
        )
    cores = usable_cores()
    share = cores / (cluster.num_workers * min(threads, cores))
    if share >= 1:
        return cluster, ""
    speeds = cluster.speed or (1.0,) * cluster.num_workers
    of_threads = f" of {threads} threads" if threads > 1 else ""
    return replace(cluster, speed=tuple(share * speed for speed in speeds)), (
        f"{counted(cluster.num_workers, 'worker')}{of_threads} share the {counted(cores, 'core')} of this machine: "
        f"each counts {share:.2f} of one that has its own"
    )
