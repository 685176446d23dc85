"""A Ray of this machine for tests, on machines that are slow to start one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from app.run.cluster import start_ray_here


@contextmanager
def local_ray(**settings: object) -> Iterator[None]:
    """A cluster that ends with the block; `settings` go to `ray.init`. What a failed test left is ended first."""
    import ray

    ray.shutdown()
    start_ray_here(partial(ray.init, include_dashboard=False, **settings))
    try:
        yield
    finally:
        ray.shutdown()
