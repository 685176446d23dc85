"""What trackers read of the environment, on its way from the shell that starts a run to its controller.

The controller runs where Ray puts it, with the environment of that node. Ray's own way, `runtime_env`, shows every
value to all who see the cluster's dashboard, and so do the settings that Ray Train gets. A key goes with the function
that Ray Train runs, which lies in Ray's object store and stands in no file and no list.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

S = TypeVar("S")
R = TypeVar("R")

_PREFIXES = {"wandb": "WANDB_", "mlflow": "MLFLOW_"}
_OF_A_PROCESS = frozenset({"WANDB_SERVICE"})  # a socket on the host of the process that has made it


def tracker_environment(track: Sequence[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that these trackers read, keys among them: not to be written or shown anywhere."""
    prefixes = tuple(_PREFIXES[name] for name in track if name in _PREFIXES)
    return {
        name: value
        for name, value in environment.items()
        if prefixes and name.startswith(prefixes) and name not in _OF_A_PROCESS
    }


def in_environment(loop: Callable[[S], R], variables: Mapping[str, str]) -> Callable[[S], R]:
    """The function, in a process where these variables are set from then on: they come before the node's own."""

    def controller(settings: S) -> R:
        os.environ.update(variables)
        return loop(settings)

    return controller
