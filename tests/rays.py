"""A Ray of this machine for tests, on machines that are slow to start one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from app.bench.lab import patiently
from app.run.cluster import start_ray_here


@contextmanager
def local_ray(**settings: object) -> Iterator[None]:
    """A cluster that ends with the block; `settings` go to `ray.init`. What a failed test left is ended first."""
    import ray

    patiently(partial(_start, include_dashboard=False, **settings))
    try:
        yield
    finally:
        ray.shutdown()


def _start(**settings: object) -> None:
    import ray

    ray.shutdown()  # what a start that failed has left
    start_ray_here(partial(ray.init, **settings))
