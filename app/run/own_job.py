"""Where the workers of a Ray job import from, and what they have of the job's environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ray.job_config import JobConfig

from ops.code_path import ROOT

T = TypeVar("T")


class OwnJob(JobConfig):
    """Given to `ray.init`. Ray has the workers of a job import from the folder in which that is called before any
    other, where somebody's app.py or data.py would be taken for ours; from Heddle's folder instead.

    `ray.init` itself is called in the user's folder: a Ray that it starts, and all of its workers, have that for the
    current one, against which files in environment variables are named (GOOGLE_APPLICATION_CREDENTIALS=key.json)."""

    def _serialize(self) -> str:
        here = os.path.abspath(os.curdir)
        folders = [str(ROOT) if folder == here else folder for folder in self._py_driver_sys_path]
        self._py_driver_sys_path = list(dict.fromkeys(folders))
        return super()._serialize()


def as_own_job(start: Callable[..., T], address: str) -> Callable[..., T]:
    """`start`, which calls `ray.init` with this address, with a job of ours. Where that asks a server of Ray Client it
    takes none, and workers import from no folder of this machine.

    The `runtime_env` given to `start` is added to that of a submitted job, whose PYTHONPATH ours has in it. Ray would
    refuse a variable that both set, also to one value, in a sentence with all that the job sets, tokens among it."""
    os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"
    return start if address.startswith("ray://") else partial(start, job_config=OwnJob())
