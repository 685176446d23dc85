"""What a process does that wants a node's weights by a key: it says how it came to them, and waits for its end."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

import torch

from ops.node_weights import NodeWeights, ReadTensor


def hold(key: str, how: str, mebibytes: int, answers: Connection) -> None:
    """Of so many mebibytes. `how` it reads, if it has to: `fills` them with the number of its process, or `hangs`."""
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
