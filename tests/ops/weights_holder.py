"""A process that wants a node's weights by a key, says how it came to them and waits for its end; and its memory."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ops.memory.node_weights import NodeWeights, ReadTensor


def hold(key: str, how: str, mebibytes: int, answers: Connection) -> None:
    """Hold memory of this size. `how` it reads, if it has to: `fills` it with the number of its process, or `hangs`."""
    torch.set_num_threads(1)

    def read() -> dict[str, ReadTensor]:
        answers.send("reads")
        while how == "hangs":
            time.sleep(1)
        return {"w": ReadTensor(torch.full((mebibytes * 2**18,), float(os.getpid())), torch.float32)}

    held = NodeWeights.of(key, read)
    mean = held.tensors["w"].mean(dtype=torch.float64).item()  # touches all of it
    answers.send(f"{'read' if held.read_here else 'mapped'} {mean:.0f}")
    time.sleep(3600)


def shared_kib(pid: int) -> tuple[int, int]:
    """(resident, proportional) KiB of a node's weights in a process."""
    found = {"Rss": 0, "Pss": 0}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        word = line.split()[0]
        if not word.endswith(":"):
            inside = "heddle-weights" in line
        elif inside and word.rstrip(":") in found:
            found[word.rstrip(":")] += int(line.split()[1])
    return found["Rss"], found["Pss"]
