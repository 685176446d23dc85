"""A real SLURM on hosts of their own (`tests/blackbox/network.py`): its controller, and a daemon on each host."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.blackbox import network
from tests.blackbox.network import Host, Network
from tests.blackbox.processes import wait_for

_TOOLS = ("slurmctld", "slurmd", "sbatch", "munged")
_START_S = 60.0
_CPUS = 4  # that each host says it has


def why_not() -> str:
    """Why this machine cannot have it; "" where it can."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)} (Debian: slurm-wlm munge)"
    return network.why_not()


class Slurm:
    """Partitions `main` and, for jobs that others may take the place of, `low`. Files lie in `folder`."""

    def __init__(self, folder: Path, hosts: int) -> None:
        self.folder, self.network = folder, Network(hosts)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._conf = folder / "slurm.conf"
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    @property
    def hosts(self) -> Sequence[Host]:
        return self.network.hosts

    def close(self) -> None:
        self.network.close()
        for process in self._processes:
            process.kill()
            process.wait()

    def environment(self) -> dict[str, str]:
        """Without what leads to another cluster; HOME, with Ray's token, is the folder."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
        return {**kept, "SLURM_CONF": str(self._conf), "HOME": str(self.folder), "OMP_NUM_THREADS": "1"}

    def run(self, *words: str) -> str:
        """Output of a command on the first host. Raises AssertionError where it fails."""
        done = self.hosts[0].run(*words, environment=self.environment())
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, script: Path, *words: str, options: Sequence[str] = ()) -> str:
        """The number of the job. Its script, without the line for GPUs, runs with these words."""
        text = "".join(line for line in script.open() if "gpus-per-node" not in line)
        copy = self.folder / script.name
        copy.write_text(text)
        return self.run("sbatch", "--parsable", *options, str(copy), *words).strip().partition(";")[0]

    def waiting_or_running(self, job: str) -> bool:
        return bool(self.run("squeue", "--noheader", "--jobs", job, "--states=PD,R").strip())

    def _begin(self) -> None:
        first, nodes = self.hosts[0], []
        for host in self.hosts:
            (self.folder / f"spool-{host.name}").mkdir()
            nodes.append(f"NodeName={host.name} NodeAddr={host.address} CPUs={_CPUS} RealMemory=4000 State=UNKNOWN")
        (self.folder / "state").mkdir()
        socket, key = self.folder / "munge.socket", self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._conf.write_text(
            f"""ClusterName=test
SlurmctldHost={first.name}({first.address})
AuthType=auth/munge
AuthInfo=socket={socket}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/controller.pid
SlurmdPidFile={self.folder}/node-%n.pid
SlurmctldLogFile={self.folder}/controller.log
SlurmdLogFile={self.folder}/node-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=2,sched_interval=2
MpiDefault=none
ReturnToService=2
KillWait=60
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=main Nodes=ALL PriorityTier=10 PreemptMode=OFF Default=YES
"""
            + "\n".join(nodes)
            + "\n"
        )
        private = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._start(["munged", "--foreground", "--force", f"--socket={socket}", *private])
        assert wait_for(socket.exists, _START_S), "munged has not begun"
        self._start(first.command("slurmctld", "-D", "-f", str(self._conf)))
        for host in self.hosts:
            self._start(host.command("slurmd", "-D", "-N", host.name, "-f", str(self._conf)))
        assert wait_for(self._is_ready, _START_S), "SLURM has not begun"

    def _start(self, command: Sequence[str]) -> None:
        log = (self.folder / f"daemon-{len(self._processes)}.log").open("wb")
        with log:
            process = subprocess.Popen(command, env=self.environment(), stdout=log, stderr=log)
        self._processes.append(process)

    def _is_ready(self) -> bool:
        done = self.hosts[0].run(
            "sinfo", "--noheader", "-o", "%D", "-t", "idle", "-p", "main", environment=self.environment()
        )
        return done.stdout.strip() == str(len(self.hosts))
