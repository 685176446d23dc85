"""Ranks of a benchmark: processes of this machine, which meet at a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ops.code_path import ROOT
from ops.comm.groups import Groups
from ops.waiting import CancelToken

_CAME_S = 300.0  # that a rank has to find the store


def run_ranks(module: str, given: Mapping[str, object], count: int, wait_s: float) -> list[Any]:  # JSON of any kind
    """What the ranks of a module answer, which calls `rank_main` when it is run. `given` can be written as JSON.

    All together have `wait_s` seconds. Raises RuntimeError where one ended with an error, which stands above; none of
    them goes on.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, json.dumps(given), str(store.port), str(count), str(wait_s)]
    processes = [
        subprocess.Popen([*command, str(rank)], env=environment, stdout=subprocess.PIPE, text=True)
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
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def rank_main(measure: Callable[..., object]) -> None:
    """One of the processes of `run_ranks`: `measure(group, **given)` is its answer."""
    given, port, count, wait_s, rank = sys.argv[1:]
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=_CAME_S))
    groups = Groups(store, int(rank), tuple(range(int(count))), "gloo", 0, float(wait_s), CancelToken(), "127.0.0.1")
    try:
        print(json.dumps(measure(groups.world_group(), **json.loads(given))))
    finally:
        groups.close()
