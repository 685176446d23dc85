"""A Ray for as long as a command takes: a cluster that runs, or one of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.run.launch import start_ray_here
from app.run.live_runs import must_answer, shut_down_ray
from ops.typed import ConfigError


@contextmanager
def borrowed_ray(address: str | None, cpus: int) -> Iterator[None]:
    """The cluster at `address` (or RAY_ADDRESS), else one of this machine with `cpus` logical CPUs and all its GPUs.
    Raises ConfigError where no cluster answers."""
    import ray

    path = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "warning",
        "namespace": "heddle",
        "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(path)}},
    }
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        must_answer(address)
        try:
            ray.init(address=address, **quiet)
        except ConnectionError:
            raise ConfigError(f"no Ray cluster answers at {address}. Start it, or leave --cluster out.") from None
    else:
        start_ray_here({"num_cpus": cpus, "include_dashboard": False, **quiet})
    try:
        yield
    finally:
        shut_down_ray()
