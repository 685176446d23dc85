"""What of a job of `heddle sample --workers N` is still to be made: the queue of its prompts, and the record on disk by
which the same command continues."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np

from actors.state.checkpoint_files import GONE, checksum_or_gone
from app.sampling.clip_worker import ClipJob
from ops.whole_file import write_whole

MAX_LOSSES = 3  # of workers while they make one prompt; then it is the prompt that ends them


class PromptQueue:
    """Which prompts are still to be made, and which workers have lost some. A chunk is the first that waits and the
    next ones of its group, by `group_of`, wherever they stand. Chunks become smaller to the end, so that all workers
    end at about the same time."""

    def __init__(self, total: int, finished: Iterable[int], limit: int, max_losses: int = MAX_LOSSES) -> None:
        done = set(finished)
        self.group_of: Callable[[int], object] = lambda index: None
        self._waiting = deque(index for index in range(total) if index not in done)
        self._limit, self.max_losses = limit, max_losses
        self._losses: dict[int, int] = {}
        self.unfinished = len(self._waiting)

    @property
    def waits(self) -> bool:
        """Whether a prompt waits to be given out."""
        return bool(self._waiting)

    def take(self, workers: int) -> list[int]:
        """The next chunk for one of `workers` workers; empty when nothing waits."""
        size = max(1, min(self._limit, len(self._waiting) // (2 * workers)))
        if self._waiting and self._waiting[0] in self._losses:
            size = 1  # which of the chunk was it?
        alike = (index for index in self._waiting if self.group_of(index) == self.group_of(self._waiting[0]))
        chunk = list(islice(alike, size))  # none but the first has been lost: those wait before all others
        taken = set(chunk)
        self._waiting = deque(index for index in self._waiting if index not in taken)
        return chunk

    def finish(self, chunk: Sequence[int]) -> None:
        self.unfinished -= len(chunk)

    def lose(self, chunk: Sequence[int]) -> list[int]:
        """The chunk's worker died: the chunk waits again, first. Returns prompts that have ended too many workers."""
        for index in chunk:
            self._losses[index] = self._losses.get(index, 0) + 1
        self._waiting.extendleft(reversed(chunk))
        return [index for index in chunk if self._losses[index] >= self.max_losses]


class ClipRecord:
    """Which clips of a job are finished: the job on the first line, with what tells its weights from others that come
    to lie in the same place, and a number on every further one."""

    def __init__(
        self, path: Path, job: ClipJob, prompts: Sequence[str], first: Sequence[np.ndarray | None] = ()
    ) -> None:
        self.path = path
        pictures = ["" if one is None else hashlib.sha256(one.tobytes()).hexdigest() for one in first]
        weights = [job.checkpoint, *([] if job.other is None else [job.other]), *(lora.path for lora in job.loras)]
        whole = {
            **asdict(job),
            "prompts": list(prompts),
            "first": pictures,
            "weights": [_weights(Path(path)) for path in weights],
        }
        self._header = json.dumps(whole, sort_keys=True)

    def finished(self) -> set[int]:
        """Numbers of the clips that the same job has finished; none where the record is of another one, which is begun
        anew."""
        try:
            header, *lines = self.path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError):
            header, lines = "", []
        same = header == self._header
        found = {int(line) for line in lines[:-1] if line.isdigit()} if same else set()  # the last one may be torn
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, "\n".join([self._header, *map(str, sorted(found)), ""]))
        return found

    def add(self, index: int) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{index}\n")


def _weights(path: Path) -> object:
    """Another value once other weights lie there: the checksum of a checkpoint; else sizes and times of files. Only of
    weights: clips may be made into a folder of the model."""
    found = checksum_or_gone(path)
    if found != GONE:
        return found
    with suppress(OSError):
        files = sorted(path.rglob("*.safetensors")) if path.is_dir() else [path]
        states = [(str(file.relative_to(path)), file.stat()) for file in files if file.is_file()]
        return [(name, state.st_size, state.st_mtime_ns) for name, state in states]
    return None
