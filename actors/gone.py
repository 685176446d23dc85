"""Ray's words for an actor that is gone. Only the first of them is a RayActorError."""

from __future__ import annotations

from ray.exceptions import ActorUnschedulableError, NodeDiedError, OutOfMemoryError, RayActorError

GONE = (RayActorError, OutOfMemoryError, NodeDiedError, ActorUnschedulableError)
