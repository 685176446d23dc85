"""What processes are in the middle of, for the message of a test that has waited in vain."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import psutil

_DUMP_S = 20.0
_OURS = ("ray::", "app.train", "data.engines.child")  # in the command line
_OTHERS = ("/bin/sh", "ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")  # its begin


def stacks_below(pid: int) -> str:
    """The Python stacks of a run's processes that descend from this one."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:  # it has ended
            continue
        if any(word in command for word in _OURS) and not command.startswith(_OTHERS):
            found.append(f"== {process.pid} {command[:120]}\n{_stack(process.pid)}")
    return "\n".join(found)


def _stack(pid: int) -> str:
    spy = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or "py-spy"
    try:
        done = subprocess.run([spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=_DUMP_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout or done.stderr
