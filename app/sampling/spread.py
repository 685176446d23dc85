"""`heddle sample --workers N`: many prompts on many workers, or every clip by all of them together.

Workers are Ray actors. The first of them encodes all prompts before any weights of the transformer are there; then all
load the checkpoint once. Apart, each takes a few prompts of one kind whenever it is free; one that dies gives its
prompts back and is replaced. Together, all denoise every clip as one bag or two (`app.sampling.ways`) and decode its
tiles, where its VAE has any (`ops.models.decoding`), so that the first one is there sooner. A clip depends on its
prompt and seed alone, to rounding, so it does not matter which worker makes it.

Every finished clip is a file and a line in STEM.clips.jsonl; the same command continues after whatever stopped it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from actors.ray_calls import GONE, get, get_all, kill, wait
from actors.refs import Ref
from app.drawing.video import SHEET_CLIPS, contact_sheet, read_mp4, sheet_frames
from app.sampling.chunk_limit import ChunkLimit
from app.sampling.clip_worker import ClipJob, ClipWorker, ClipWorkerHandle, MadeClip
from app.sampling.clips import ClipSettings, clip_files, clips_left, record_file
from app.sampling.crew import LOOK_S, START_S, ClipCrew, CrewError, EncodedJob, check_deaths, line_of
from app.sampling.occupancy import Occupancy
from app.sampling.prompt_queue import MAX_LOSSES, ClipRecord, PromptQueue
from app.settings.prompt_line import named
from ops.counted import counted
from ops.typed import ConfigError
from ops.waiting import GroupError
from ops.whole_file import write_whole

log = logging.getLogger(__name__)

Keep = Callable[[Sequence[int], Sequence[MadeClip]], None]
"""Takes the finished clips of these prompts."""

T = TypeVar("T")


def spread(
    job: ClipJob,
    prompts: Sequence[str],
    out: Path,
    workers: int,
    *,
    first: Sequence[np.ndarray | None] = (),
    batch: int = 1,
    together: bool = False,
    worker_class: type = ClipWorker,
    max_losses: int = MAX_LOSSES,
    tell: Callable[[str], None] = print,
) -> list[Path]:
    """Makes what is missing of the prompts' clips on the Ray that this process has joined; returns the files: the clips
    in order, then their contact sheet. Apart, a worker makes up to `batch` clips of one size at once. A prompt that has
    cost `max_losses` workers is given up, and the job with it.

    Raises ConfigError where the cluster has no room for all workers asked for, what a worker raised, and CrewError.
    What is finished stays, and the same call continues.
    """
    files, sheet = clip_files(out, len(prompts))
    record = ClipRecord(record_file(sheet), job, prompts, first)
    finished = {index for index in record.finished() if index < len(files) and files[index].is_file()}
    if finished:
        tell(f"note: there already: {len(finished)} of {counted(len(prompts), 'clip')}")
    shown = {index: sheet_frames(read_mp4(files[index])) for index in finished if index < SHEET_CLIPS}
    queue = PromptQueue(len(prompts), finished, 1 if together else batch, max_losses)
    begin, done = time.monotonic(), set(finished)

    def keep(chunk: Sequence[int], clips: Sequence[MadeClip]) -> None:
        for index, clip in zip(chunk, clips, strict=True):
            write_whole(files[index], clip.mp4)
            record.add(index)
            done.add(index)
            if index < SHEET_CLIPS:
                shown[index] = clip.shown
        made = len(done) - len(finished)
        tell(clips_left(len(done), len(prompts), (time.monotonic() - begin) / made))

    if queue.unfinished:
        if queue.unfinished < workers and not together:
            tell(f"note: {counted(queue.unfinished, 'prompt')} to make: as many of the {workers} workers start")
        crew = ClipCrew(job, worker_class, workers if together else min(workers, queue.unfinished))
        wanted = [index for index in range(len(prompts)) if index not in finished]
        try:
            encoded = EncodedJob.of(crew, prompts, first, wanted, max_losses)
            queue.group_of = encoded.groups.__getitem__
            if together:
                _make_together(crew, queue, encoded, keep, tell)
            elif line := _Apart(crew, queue, encoded, keep, tell).make().summary():
                tell(line)
        finally:
            crew.close()
    contact_sheet(sheet, [shown[index] for index in sorted(shown)], prompts, columns=1 if len(prompts) <= 4 else 2)
    write_whole(sheet.with_suffix(".json"), json.dumps(list(prompts)))
    record.path.unlink(missing_ok=True)  # another command has written here meanwhile
    return [*files, sheet]


def check_alike(prompts: Sequence[str], settings: ClipSettings) -> None:
    """Raises ConfigError for prompts of which each is to be made by all workers together, where their options ask for
    unlike clips: how bags are formed is chosen once."""
    for number, prompt in enumerate(prompts):
        own = settings.of_each([prompt])[0]
        if replace(own, seed=settings.seed, negative_prompt=settings.negative_prompt) != settings:
            raise ConfigError(
                f"{named(number, prompt)} asks for another clip than --height, --width and the like, and --together "
                f"forms its bags for one kind. Leave its options out but for --d, --n and --i, or leave out --together."
            )


class _Apart:
    """Workers that take a chunk of prompts whenever they are free. One that dies gives its chunk back, and another is
    started in its place."""

    def __init__(
        self, crew: ClipCrew, queue: PromptQueue, encoded: EncodedJob, keep: Keep, tell: Callable[[str], None]
    ) -> None:
        self._crew, self._queue, self._encoded, self._keep, self._tell = crew, queue, encoded, keep, tell
        self._idle: list[ClipWorkerHandle] = []
        # answer that is awaited -> its worker, its chunk (none: it loads)
        self._busy: dict[Ref[list[MadeClip] | None], tuple[ClipWorkerHandle, list[int]]] = {}
        self._since: dict[Ref[list[MadeClip] | None], float] = {}  # a chunk was given out
        self._limit = ChunkLimit()
        self._loading = crew.size  # of the first ones
        self._died_loading = 0  # in a row
        self._hired_at = time.monotonic()
        self._occupancy = Occupancy()

    def make(self) -> Occupancy:
        """Make all that the queue has. Raises what a worker raised, and CrewError."""
        for _ in range(self._crew.size):
            self._hire()
        while self._queue.unfinished:
            ready, _ = wait(list(self._busy), timeout=LOOK_S)
            if ready:
                self._hear(ready[0])
            elif late := self._late():
                self._end(late)
            elif time.monotonic() - self._hired_at > START_S and not any(chunk for _, chunk in self._busy.values()):
                raise CrewError(f"no worker has loaded {self._crew.job.checkpoint} within {START_S:.0f} s.")
        return self._occupancy

    def _hire(self) -> None:
        handle, loading = self._crew.start()
        self._busy[loading] = (handle, [])

    def _employ(self, handle: ClipWorkerHandle) -> None:
        chunk = self._queue.take(self._crew.size)
        self._occupancy.given_out(self._queue.waits, time.monotonic())
        if chunk:
            answer = self._encoded.begin(handle, chunk)
            self._busy[answer], self._since[answer] = (handle, chunk), time.monotonic()
        else:
            self._idle.append(handle)

    def _hear(self, answer: Ref[list[MadeClip] | None]) -> None:
        import ray

        handle, chunk = self._busy.pop(answer)
        since = self._since.pop(answer, 0.0)
        try:
            clips = get(answer) or []
        except GONE as error:
            self._replace(handle, chunk, error)
            return
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        if not chunk:
            self._has_loaded(handle)
            self._employ(handle)
            return
        self._limit.took(len(chunk), time.monotonic() - since, self._encoded.work(chunk))
        self._occupancy.answered(handle, sum(clip.seconds for clip in clips), time.monotonic())
        self._employ(handle)  # before its clips are written: it need not wait for the disk
        self._keep(chunk, clips)
        self._queue.finish(chunk)

    def _late(self) -> Ref[list[MadeClip] | None] | None:
        """An answer that should have come long ago."""
        now = time.monotonic()
        late = (answer for answer, since in self._since.items() if now - since > self._limit_s(self._busy[answer][1]))
        return next(late, None)

    def _limit_s(self, chunk: Sequence[int]) -> float:
        return self._limit.seconds(len(chunk), self._encoded.work(chunk))

    def _end(self, answer: Ref[list[MadeClip] | None]) -> None:
        """The worker that owes this answer hangs: it is ended, and replaced like one that has died."""
        handle, chunk = self._busy.pop(answer)
        seconds = time.monotonic() - self._since.pop(answer)
        kill(handle)
        self._replace(handle, chunk, TimeoutError(f"it has not answered for {seconds:.0f} s."))

    def _has_loaded(self, handle: ClipWorkerHandle) -> None:
        self._occupancy.ready(handle, time.monotonic())
        self._died_loading = 0
        self._loading -= 1
        if not self._loading:
            self._tell(f"note: {self._crew.size} worker(s) have loaded the model")

    def _replace(self, handle: ClipWorkerHandle, chunk: list[int], error: Exception) -> None:
        """Its chunk waits again, and a new worker loads. Raises CrewError where that would not help."""
        if chunk:
            _take_back(self._queue, chunk, self._encoded.prompts, error)
            self._occupancy.given_out(self._queue.waits, time.monotonic())
            self._occupancy.died(handle)
            log.warning("a worker died with prompts %s; another one makes them", chunk)
        else:
            self._died_loading += 1
            check_deaths(self._died_loading, self._queue.max_losses, f"loading {self._crew.job.checkpoint}", error)
        self._crew.members.remove(handle)
        self._hired_at = time.monotonic()
        self._hire()
        waiting, self._idle = self._idle, []
        for one in reversed(waiting):
            self._employ(one)


def _make_together(
    crew: ClipCrew, queue: PromptQueue, encoded: EncodedJob, keep: Keep, tell: Callable[[str], None]
) -> None:
    """Make all that the queue has, each clip by all workers; they begin anew when one dies. Raises as `_Apart`."""
    import ray

    limit = ChunkLimit()
    died_loading = 0  # in a row
    while queue.unfinished:
        chunk: list[int] = []
        try:
            members, way = crew.together()
            died_loading = 0
            left = crew.size - way.workers
            tell(f"note: each clip is made by {way.describe()}{f'; {left} worker is left over' if left else ''}")
            while queue.unfinished:
                chunk = queue.take(crew.size)
                answers, since = [encoded.begin(handle, chunk) for handle in members], time.monotonic()
                made = _first_of(answers, limit.seconds(len(chunk), encoded.work(chunk)))
                limit.took(len(chunk), time.monotonic() - since, encoded.work(chunk))
                keep(chunk, made)
                queue.finish(chunk)
            return
        except ray.exceptions.RayTaskError as error:
            # what is not an exchange that failed is a fault of its own: it would come again
            if not isinstance(error.cause, GroupError | TimeoutError) or not crew.has_lost_one():
                raise error.cause from None
            _take_back(queue, chunk, encoded.prompts, error)
        except GONE as error:
            if chunk:
                _take_back(queue, chunk, encoded.prompts, error)
            else:
                died_loading += 1
                check_deaths(died_loading, queue.max_losses, f"loading {crew.job.checkpoint}", error)
        except TimeoutError as error:  # on GPUs an exchange waits for a member that hangs for ever
            _take_back(queue, chunk, encoded.prompts, error)
        log.warning("a worker died or hung with prompts %s; all start again", chunk)
        crew.close()


def _first_of(answers: Sequence[Ref[T]], limit_s: float) -> T:
    """What the first rank has made, when all have ended. Raises what any of them has raised, at once: the others may
    still wait for it in an exchange. Raises TimeoutError, naming those that have not answered in time."""
    waiting, until = list(answers), time.monotonic() + limit_s
    while waiting:
        done, waiting = wait(waiting, timeout=max(0.0, until - time.monotonic()))
        if not done:
            late = ", ".join(str(answers.index(one)) for one in waiting)
            raise TimeoutError(f"worker(s) {late} of {len(answers)} have not answered for {limit_s:.0f} s.")
        get_all(done)
    return get(answers[0])


def _take_back(queue: PromptQueue, chunk: Sequence[int], prompts: Sequence[str], error: Exception) -> None:
    """The prompts of a worker that has died wait again. Raises CrewError where one of them has cost too many."""
    if hopeless := queue.lose(chunk):
        raise CrewError(
            f"{queue.max_losses} worker(s) died or hung while they made prompt {hopeless[0] + 1} "
            f"({prompts[hopeless[0]]!r}): {line_of(error)} "
            f"Clips that are finished stay; make smaller ones (--frames, --height, --width)."
        )
