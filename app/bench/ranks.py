"""Ranks of a benchmark: processes of this machine, which meet at a store."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

import torch.distributed as dist

from ops.code_path import ROOT


def run_ranks(module: str, arguments: Sequence[str], count: int, wait_s: float) -> list[str]:
    """The last line that each rank of a module has printed, of `python -m MODULE ARGUMENTS --port PORT --rank RANK`.

    All together have `wait_s` seconds. Raises RuntimeError where one ended with an error, which stands above; none of
    them goes on.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *arguments, "--port", str(store.port)]
    processes = [
        subprocess.Popen([*command, "--rank", str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(count)
    ]
    deadline = time.monotonic() + wait_s
    try:
        outputs = [one.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for one in processes]
    finally:
        for process in processes:
            process.kill()
    if failed := [rank for rank, one in enumerate(processes) if one.returncode]:
        raise RuntimeError(f"ranks {failed} of {count} ended with an error; it stands above.")
    return [output.splitlines()[-1] for output in outputs]
