"""A Ray for as long as a command takes: a cluster that runs, or one of this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from actors.names import NAMESPACE
from app.run.cluster import ADDRESS, as_given, must_answer, not_let_in, shut_down_ray, start_ray_here
from app.run.signals import unwinds_on_signal, while_ray_starts
from ops.code_path import python_environment


@contextmanager
def borrowed_ray(address: str | None, cpus: int) -> Iterator[None]:
    """The cluster at `address` (or RAY_ADDRESS), else one of this machine with `cpus` logical CPUs and all its GPUs.
    Raises ConfigError where no cluster answers."""
    with unwinds_on_signal() as put_back:
        import ray  # takes a while, in which a signal may come

        from app.run.own_job import as_own_job

        start = partial(
            as_own_job(ray.init, address or os.environ.get("RAY_ADDRESS", "")),
            log_to_driver=False,
            logging_level=logging.WARNING,
            namespace=NAMESPACE,
            runtime_env={"env_vars": python_environment()},
        )
        try:
            with while_ray_starts(put_back):
                _connect(start, address, cpus)
            yield
        finally:
            shut_down_ray()


def _connect(start: Callable[..., object], given: str | None, cpus: int) -> None:
    address, named = (given, "--cluster") if given else (os.environ.get(ADDRESS), ADDRESS)
    if not address:
        start_ray_here(partial(start, num_cpus=cpus, include_dashboard=False))
        return
    must_answer(address, named)
    try:
        start(address=address)
    except ConnectionError:
        raise not_let_in(as_given(address, named), "leave --cluster and RAY_ADDRESS out") from None
