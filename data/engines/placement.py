"""Where helper actors run."""

from __future__ import annotations

from typing import Any


def beside_me() -> Any:
    """Scheduling strategy: on the caller's node. A helper shares the fate of whom it helps, not some worker's.

    Hard, since Ray places an actor without resources on any node when the wish is a soft one.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
