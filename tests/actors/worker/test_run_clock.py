"""Times that workers of several hosts tell are comparable, whatever the clocks of their hosts say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.plan.measures import wait_sync
from actors.pool.monitor import Monitor
from actors.worker import heartbeat, run_clock
from actors.worker.heartbeat import Heartbeat
from actors.worker.run_clock import RunClock
from actors.worker.stopwatch import HostWatch
from tests.actors.pool.test_heartbeats import CONFIG

UNIX = 1.7e9


class Host:
    """A clock that is `ahead_s` of the monitor's, and calls to it."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s, self.now = ahead_s, 50.0
        self.clock = RunClock(lambda: UNIX + self.now + self.ahead_s, lambda: self.now)

    def call(self, there_s: float, back_s: float, monitor_ahead_s: float = 0.0) -> None:
        began = self.now
        told = UNIX + began + there_s + monitor_ahead_s
        self.now += there_s + back_s
        self.clock.heard(began, told, self.now)

    @property
    def off_s(self) -> float:
        return self.clock.now() - (UNIX + self.now)


@pytest.mark.parametrize("ahead_s", [5.0, -5.0, 0.3])
def test_a_clock_that_is_wrong_tells_the_monitors_time_after_a_call(ahead_s: float) -> None:
    host = Host(ahead_s)
    host.call(there_s=0.8, back_s=0.0)  # a busy monitor
    assert abs(host.off_s) <= max(0.4, ahead_s if ahead_s < 0.42 else 0.0) + 1e-6
    host.call(there_s=0.002, back_s=0.004)
    assert abs(host.off_s) <= 0.003 + 1e-6
    host.call(there_s=3.0, back_s=0.0)
    assert abs(host.off_s) <= 0.003 + 1e-6, "the shortest call counts"


def test_clocks_that_agree_are_left_alone() -> None:
    host = Host(0.004)
    for there_s in (0.001, 0.1, 2.0):
        host.call(there_s=there_s, back_s=0.001)
        assert host.off_s == pytest.approx(0.004, abs=1e-6)


def test_a_clock_that_is_set_changes_nothing_and_another_monitor_is_followed() -> None:
    host = Host(0.0)
    host.call(0.001, 0.001)
    host.ahead_s = 3600.0
    assert abs(host.off_s) < 1e-6
    for _ in range(run_clock._NEWEST):
        host.call(0.001, 0.001, monitor_ahead_s=7.0)
    assert host.off_s == pytest.approx(7.0, abs=0.01)


def test_a_heartbeat_corrects_the_times_of_spans_and_what_is_said_of_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers that come to a gradient sum together, one on a host whose clock is 5 s ahead: nobody waited."""
    right, wrong = RunClock(), RunClock(lambda: run_clock.time.time() + 5.0)
    monkeypatch.setattr(heartbeat, "get", lambda reference, timeout: reference)
    monitor = Monitor()
    beat = SimpleNamespace(options=lambda **given: SimpleNamespace(remote=monitor.beat))
    mailbox: Any = SimpleNamespace(beat=beat)
    came = []
    for clock in (right, wrong):
        monkeypatch.setattr("actors.worker.heartbeat.own_clock", clock)
        monkeypatch.setattr("actors.worker.stopwatch.own_clock", clock)
        Heartbeat("w0", CONFIG, mailbox).beat()
        watch = HostWatch()
        came.append(watch.unix(watch.mark()))
    assert max(wait_sync([0.0, 0.0], came)) < 2.0
