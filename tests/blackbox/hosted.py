"""A Ray cluster on hosts of their own (`tests/blackbox/network.py`): where runs are tried whose network fails."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Any

from tests.blackbox.network import Host, Network
from tests.blackbox.place import Place
from tests.blackbox.processes import wait_for
from tests.blackbox.run import Run

_PORT = 6379
_HEAD_CPUS, _CPUS, _WORKER_CPUS = 2, 4, 3.0  # one worker on each host but the head
_STORE = 200_000_000


class HostedPlace(Place):
    """A place whose runs are started on the head's host, and train on all the others."""

    def __init__(self, folder: Path, steps: int, hosts: int) -> None:
        super().__init__(folder, steps)
        self.network = Network(hosts)
        self.head, *self.others = self.network.hosts
        self._token = folder / "token"
        self._token.write_text(secrets.token_hex(32))
        self._token.chmod(0o600)
        try:
            self.start_ray(self.head)
            for host in self.others:
                self.start_ray(host)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.network.close()
        super().close()

    def start_ray(self, host: Host) -> None:
        """`ray start`, as README says."""
        is_head = host is self.head
        role = ["--head", f"--port={_PORT}", "--include-dashboard=false"] if is_head else [f"--address={self._address}"]
        cpus = [f"--num-cpus={_HEAD_CPUS if is_head else _CPUS}", f"--object-store-memory={_STORE}"]
        ray = [str(Path(sys.executable).with_name("ray")), "start", f"--node-ip-address={host.address}"]
        done = host.run(*ray, *role, *cpus, environment=self.environment(), timeout_s=300.0)
        assert done.returncode == 0, done.stdout + done.stderr

    def command(self, name: str, *more: str, settings: dict[str, object] | None = None) -> list[str]:
        return self.head.command(*super().command(name, *more, settings=settings))

    def environment(self, **more: str) -> dict[str, str]:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token)}
        found = super().environment(**token, RAY_ADDRESS=self._address, **more)
        del found["RAY_TMPDIR"]  # each host has a /tmp/ray of its own
        return found

    def workers_of(self, run: Run) -> dict[str, Host]:
        """The hosts of the newest generation's workers, by their names."""
        named = {host.name: host for host in self.network.hosts}
        of = {event["worker"]: named[event["host"]] for event in run.events("ready")}
        return {worker: of[worker] for worker in _newest(run)["workers"]}

    def controller_of(self, run: Run) -> Host:
        """The host of the run's controller."""
        pid = run.events("start")[-1]["pid"]
        beside = [
            host for host in self.network.hosts if any("ray::Monitor" in line for line in host.processes().values())
        ]
        assert len(beside) == 1, f"no host, or several, have the monitor of the controller {pid}"
        return beside[0]

    @property
    def _address(self) -> str:
        return f"{self.head.address}:{_PORT}"


SETTINGS: dict[str, object] = {
    "workers.min": 2,
    "workers.max": 3,
    "workers.cpus_per_worker": _WORKER_CPUS,
    "workers.suspect_s": 15.0,
}


def wait_for_generation(run: Run, workers: int, since: float, timeout_s: float) -> bool:
    """Whether a generation of this size was formed after `since` (unix seconds) and has finished a step."""

    def formed() -> bool:
        newest = _newest(run)
        return (
            newest["time"] > since
            and len(newest["workers"]) == workers
            and run.metrics()[-1]["generation"] == newest["generation"]
        )

    return wait_for(formed, timeout_s, poll_s=0.5)


def _newest(run: Run) -> dict[str, Any]:
    return run.events("generation")[-1]
