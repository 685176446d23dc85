"""Hosts of a cluster on one machine: namespaces of the kernel with a network that can fail.

A host has its own network, processes, host name, /dev/shm and /tmp/ray; files are those of the machine, as on a shared
file system. It is one process that holds the namespaces: when that ends, everything on the host does, and its
interfaces go with it. Hosts hang on a bridge in a namespace of its own, so the machine's own network is left alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.blackbox.processes import wait_for

_TOOLS = ("unshare", "nsenter", "ip", "iptables", "tc", "mount")
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child")
_BRIDGE, _CABLE = "switch", "eth0"
_SHM = "size=4g"


def why_not() -> str:
    """Why this machine cannot have such hosts; "" where it can."""
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)}"
    try:
        with Network(1) as network:
            network.hosts[0].rule("-I", "INPUT", "-s", "10.77.0.99", "-j", "DROP")
    except (subprocess.CalledProcessError, OSError, AssertionError) as error:
        return f"namespaces, bridges or iptables cannot be had here: {error}"
    return ""


class Host:
    """One of them. Commands run on it as the same user, in the folder of the caller."""

    def __init__(self, name: str, address: str, ray: Path) -> None:
        """`ray` is its /tmp/ray."""
        self.name, self.address, self.ray = name, address, ray
        ray.mkdir(parents=True, exist_ok=True)
        self._holder, self._init = _hold()
        Path("/tmp/ray").mkdir(exist_ok=True)
        self._set_up("hostname", name)
        self._set_up("mount", "-t", "tmpfs", "-o", _SHM, "tmpfs", "/dev/shm")
        self._set_up("mount", "--bind", str(ray), "/tmp/ray")
        self._set_up("ip", "link", "set", "lo", "up")

    @property
    def namespace(self) -> str:
        """As `ip link ... netns` takes it."""
        return str(self._init)

    def command(self, *words: str) -> list[str]:
        """The command that runs `words` on the host."""
        return ["nsenter", "--target", str(self._init), "--all", f"--wdns={os.getcwd()}", *words]

    def run(
        self, *words: str, environment: Mapping[str, str] | None = None, timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        env = None if environment is None else dict(environment)
        return subprocess.run(self.command(*words), env=env, capture_output=True, text=True, timeout=timeout_s)

    def rule(self, *words: str) -> None:
        """An iptables rule of the host's own packets."""
        self._set_up("iptables", *words)

    def deafen(self, others: Sequence[Host], *more: str) -> None:
        """Packets of these hosts are dropped here, with `more` to say which. No sender learns of it."""
        for other in others:
            self.rule("-I", "INPUT", "-s", other.address, *more, "-j", "DROP")

    def lose(self, share: float) -> None:
        """This share of the packets from other hosts is dropped here, and of those to them."""
        some = ("-m", "statistic", "--mode", "random", "--probability", f"{share:g}", "-j", "DROP")
        self.rule("-I", "INPUT", "-i", _CABLE, *some)
        self.rule("-I", "OUTPUT", "-o", _CABLE, *some)

    def slow_down(self, bytes_per_s: float) -> None:
        """Packets to other hosts leave here at this speed."""
        shape = ("rate", f"{bytes_per_s * 8:.0f}bit", "burst", "64kb", "latency", "50ms")
        self._set_up("tc", "qdisc", "replace", "dev", _CABLE, "root", "tbf", *shape)

    def hurry(self) -> None:
        """Packets leave as fast as they can again."""
        self._set_up("tc", "qdisc", "del", "dev", _CABLE, "root")

    def listen(self) -> None:
        """No packet is dropped any more."""
        self.rule("-F", "INPUT")
        self.rule("-F", "OUTPUT")

    def processes(self) -> dict[int, str]:
        """Command lines of what runs on the host, by process id as this machine sees it."""
        found = {}
        inside = os.readlink(f"/proc/{self._init}/ns/pid")
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                here = os.readlink(f"/proc/{process.pid}/ns/pid") == inside
                if here and process.pid != self._init and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = " ".join(process.cmdline())
        return found

    def shared_memory(self) -> list[str]:
        """Files in its /dev/shm."""
        return self.run("ls", "-A", "/dev/shm").stdout.split()

    def end(self) -> None:
        """The host loses its power."""
        with suppress(ProcessLookupError):
            os.kill(self._init, signal.SIGKILL)
        self._holder.wait()

    def _set_up(self, *words: str) -> None:
        subprocess.run(self.command(*words), check=True, capture_output=True)


class Network:
    """Hosts 10.77.0.1, 10.77.0.2 and so on, each with a cable to one switch."""

    def __init__(self, hosts: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        self.hosts: list[Host] = []
        self._switch, self._switch_init = _hold()
        try:
            self._of_switch("link", "add", _BRIDGE, "type", "bridge")
            self._of_switch("link", "set", _BRIDGE, "up")
            for number in range(1, hosts + 1):
                self.hosts.append(self._host(number))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """All hosts end, with all that runs on them."""
        for host in self.hosts:
            host.end()
        with suppress(ProcessLookupError):
            os.kill(self._switch_init, signal.SIGKILL)
        self._switch.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def cut(self, host: Host) -> None:
        """Packets from and to a host vanish; its interface stays up, and no sender learns of it."""
        self._of_switch("link", "set", self._port(host), "nomaster")

    def mend(self, host: Host) -> None:
        self._of_switch("link", "set", self._port(host), "master", _BRIDGE)

    def slow(self, host: Host, rate: str) -> None:
        """What a host receives and sends passes at `rate`, such as 10mbit."""
        shape = ("root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
        subprocess.run(
            [
                "nsenter",
                "--target",
                str(self._switch_init),
                "--net",
                "tc",
                "qdisc",
                "replace",
                "dev",
                self._port(host),
                *shape,
            ],
            check=True,
        )
        host._set_up("tc", "qdisc", "replace", "dev", _CABLE, *shape)

    def _host(self, number: int) -> Host:
        host = Host(f"host{number}", f"10.77.0.{number}", self.folder / f"host{number}")
        port = self._port(host)
        self._of_switch("link", "add", port, "type", "veth", "peer", "name", _CABLE, "netns", host.namespace)
        self._of_switch("link", "set", port, "master", _BRIDGE, "up")
        host._set_up("ip", "address", "add", f"{host.address}/24", "dev", _CABLE)
        host._set_up("ip", "link", "set", _CABLE, "up")
        return host

    def _port(self, host: Host) -> str:
        return f"to-{host.name}"

    def _of_switch(self, *words: str) -> None:
        command = ["nsenter", "--target", str(self._switch_init), "--net", "ip", *words]
        subprocess.run(command, check=True, capture_output=True)


def _hold() -> tuple[subprocess.Popen[bytes], int]:
    """A process that holds new namespaces, and the id of their first process: all of them end with it."""
    holder = subprocess.Popen(
        ["unshare", *_NAMESPACES, "sleep", "infinity"], start_new_session=True, stderr=subprocess.DEVNULL
    )
    found: list[psutil.Process] = []

    def held() -> bool:
        found[:] = [one for one in psutil.Process(holder.pid).children() if one.name() == "sleep"]
        return bool(found) or holder.poll() is not None

    assert wait_for(held, 30.0) and found, f"unshare has ended with code {holder.poll()}"
    return holder, found[0].pid
