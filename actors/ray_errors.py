"""Ray's words for an actor that is gone."""

from __future__ import annotations

from ray.exceptions import ActorDiedError, ActorUnschedulableError, NodeDiedError, OutOfMemoryError, RayActorError

FOR_GOOD = (ActorDiedError, ActorUnschedulableError, NodeDiedError, OutOfMemoryError)
GONE = (RayActorError, *FOR_GOOD)  # also one that is out of reach, and may answer again
