"""Workers are ended once Ray has the bars of their last cascades, and no later."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from actors.pool import workers
from actors.pool.workers import Pool, PoolMember, RayPool


class OneWorker(RayPool):
    """One that is ready, and no Ray."""

    def __init__(self) -> None:
        Pool.__init__(self)
        info: Any = SimpleNamespace()
        member = PoolMember(name="w0", handle=info, info_ref=info, wished=None, info=info)
        self._members = {"w0": member}

    def _end(self, member: PoolMember, frozen: bool) -> None:
        pass


@pytest.mark.parametrize(("rested_s", "waits_s"), [(None, 1.2), (0.0, 1.2), (0.9, 0.3), (60.0, 0.0)])
def test_what_a_checkpoint_took_after_the_last_step_is_not_waited_for_again(
    monkeypatch: pytest.MonkeyPatch, rested_s: float | None, waits_s: float
) -> None:
    pool, waited, now = OneWorker(), list[float](), time.monotonic()
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: now, sleep=waited.append))
    if rested_s is not None:
        pool.rest()
        now += rested_s
    pool.close()
    assert waited == [pytest.approx(waits_s)] and not pool.names
