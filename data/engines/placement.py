"""Where helper actors run, and their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

NODE_LABEL = "ray.io/node-id"  # Ray gives every node its id as a label


def elsewhere(avoid: Sequence[str]) -> dict[str, str] | None:
    """Ray's selector of nodes for what is not to be placed on these."""
    return {NODE_LABEL: f"!in({','.join(avoid)})"} if avoid else None


def beside_me() -> NodeAffinitySchedulingStrategy:
    """Scheduling strategy: on the caller's node. If the caller's node dies, its helper dies with it, and with no
    other node.

    Hard, since Ray places an actor without resources on any node when the wish is a soft one.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def kill(handle: object) -> None:
    """End the process of an actor without a word to it."""
    import ray

    actor: Any = handle  # Ray wants its own class; ours are protocols
    ray.kill(actor)
