"""`heddle sample --workers N`: the same clips from any number of workers, none lost with a worker, none made twice."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from app.cli import app
from app.drawing.video import SHEET_CLIPS, read_mp4
from app.sampling import clip_worker
from app.sampling import spread as spreading
from app.sampling.chunk_limit import ChunkLimit
from app.sampling.clip_worker import ClipJob, ClipWork, ClipWorker, MadeClip
from app.sampling.clips import ClipChanges, ClipSettings, clip_files, clips_of, write_clips
from app.sampling.crew import ClipCrew, CrewError
from app.sampling.model import saved_model
from app.sampling.prompt_queue import ClipRecord, PromptQueue
from app.sampling.prompts import PromptRows
from app.sampling.spread import spread
from ops.models.base.config import DiTConfig
from ops.models.stdit3.config import STDiT3Config
from ops.typed import ConfigError
from tests.app.test_sample import tiny_run, write_checkpoint
from tests.rays import local_ray

torch.set_num_threads(1)
PROMPTS = [f"a disc number {index}" for index in range(5)]


@given(
    total=st.integers(0, 30),
    done=st.sets(st.integers(0, 29)),
    limit=st.integers(1, 9),
    workers=st.integers(1, 4),
    deaths=st.lists(st.booleans(), max_size=4),
)
def test_every_prompt_is_made_once_whoever_dies(total, done, limit, workers, deaths) -> None:  # type: ignore[no-untyped-def]
    queue, made, misfortune = PromptQueue(total, done, limit), [], list(deaths)
    while queue.unfinished:
        chunk = queue.take(workers)
        assert 1 <= len(chunk) <= limit and chunk == sorted(chunk)
        if misfortune and misfortune.pop():
            if queue.lose(chunk):
                return  # three workers died of it
            continue
        made += chunk
        queue.finish(chunk)
    assert sorted(made) == [index for index in range(total) if index not in done]
    assert queue.take(workers) == []


def test_chunks_become_smaller_to_the_end() -> None:
    queue = PromptQueue(64, (), 16)
    sizes = []
    while chunk := queue.take(3):
        sizes.append(len(chunk))
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 10 and sizes[-6:] == [1] * 6


def test_prompts_of_one_kind_are_given_out_together_wherever_they_stand() -> None:
    """Large and small clips by turns, some of them finished: also of each of a lost chunk, which is tried alone."""
    queue = PromptQueue(40, (4, 5), 4)
    queue.group_of = lambda index: index % 2
    assert [queue.take(2) for _ in range(2)] == [[0, 2, 6, 8], [1, 3, 7, 9]]
    assert queue.lose([0, 2, 6, 8]) == []
    assert [queue.take(2) for _ in range(6)] == [[0], [2], [6], [8], [10, 12, 14, 16], [11, 13, 15, 17]]


def test_a_prompt_that_ends_three_workers_is_given_up() -> None:
    queue = PromptQueue(2, (), 1)
    found = []
    for _ in range(3):
        chunk = queue.take(1)
        found.append(queue.lose(chunk))
    assert found == [[], [], [0]]


def test_prompts_of_a_lost_chunk_are_tried_one_by_one() -> None:
    queue = PromptQueue(12, (), 4)
    assert queue.lose(queue.take(1)) == []
    sizes = []
    while chunk := queue.take(1):
        sizes.append(len(chunk))
    assert sizes[:4] == [1] * 4 and sizes[4] == 4


def settings() -> ClipSettings:
    return ClipSettings.of(tiny_run())


def job(folder: Path) -> ClipJob:
    return ClipJob(checkpoint=str(folder), ema=True, device="cpu", settings=settings())


def test_a_record_continues_its_own_job_only(tmp_path: Path) -> None:
    path = tmp_path / "x.clips.jsonl"
    record = ClipRecord(path, job(tmp_path), PROMPTS)
    assert record.finished() == set()
    record.add(3)
    record.add(1)
    with path.open("a") as file:
        file.write("4")  # torn: no end of line
    again = ClipRecord(path, job(tmp_path), PROMPTS)
    assert again.finished() == {1, 3}
    again.add(0)
    assert ClipRecord(path, job(tmp_path), PROMPTS).finished() == {0, 1, 3}
    other = replace(job(tmp_path), settings=replace(settings(), seed=7))
    assert ClipRecord(path, other, PROMPTS).finished() == set()
    assert ClipRecord(path, job(tmp_path), PROMPTS).finished() == set()  # it is the other job's now


@pytest.mark.parametrize("name", ["COMPLETE", "model.safetensors"])
def test_a_record_finishes_nothing_of_other_weights_in_the_same_place(tmp_path: Path, name: str) -> None:
    """As after `heddle train --overwrite`, or another export."""
    (folder := tmp_path / "step-9").mkdir()
    (folder / "shard").write_text("1")
    path = tmp_path / "x.clips.jsonl"
    (folder / name).write_text(json.dumps({"files": {"shard": {"size": 1, "crc32": 1}}}))
    record = ClipRecord(path, job(folder), PROMPTS)
    record.finished()
    record.add(1)
    assert ClipRecord(path, job(folder), PROMPTS).finished() == {1}
    (folder / name).write_text(json.dumps({"files": {"shard": {"size": 1, "crc32": 20}}}))
    assert ClipRecord(path, job(folder), PROMPTS).finished() == set()


def test_clips_that_one_process_has_made_are_not_taken_for_those_of_workers(tmp_path: Path) -> None:
    """The command has the same --out and another number of steps."""
    path = tmp_path / "x.clips.jsonl"
    record = ClipRecord(path, job(tmp_path), PROMPTS)
    record.finished()
    record.add(0)
    made = ((number, np.zeros((1, 16, 16, 3), np.uint8)) for number in range(len(PROMPTS)))
    write_clips(tmp_path / "x.mp4", made, PROMPTS, 8.0)
    assert ClipRecord(path, job(tmp_path), PROMPTS).finished() == set()


def test_of_many_clips_that_are_there_those_of_the_contact_sheet_alone_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was killed over its sheet ends when the same command is given again."""
    prompts, read = ["a disc"] * (SHEET_CLIPS + 8), list[Path]()
    files, sheet = clip_files(tmp_path / "x.mp4", len(prompts))
    record = ClipRecord(tmp_path / "x.clips.jsonl", job(tmp_path), prompts)
    record.finished()
    for number, file in enumerate(files):
        file.touch()
        record.add(number)

    def decoded(file: Path) -> np.ndarray:
        read.append(file)
        return np.zeros((5, 16, 24, 3), np.uint8)

    monkeypatch.setattr(spreading, "read_mp4", decoded)
    assert spread(job(tmp_path), prompts, tmp_path / "x.mp4", 1) == [*files, sheet]
    assert sorted(read) == files[:SHEET_CLIPS] and sheet.is_file()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {"env_vars": {"PYTHONPATH": path}}
    with local_ray(num_cpus=3, log_to_driver=False, runtime_env=environment):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("run"), tiny_run())


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[np.ndarray]:
    """The clips as this process makes them."""
    return [clip for _, clip in clips_of(saved_model(checkpoint, device="cpu"), PROMPTS, settings())]


def numbers(work: ClipWork, told: Sequence[PromptRows]) -> range:
    return range(work.seeds[0], work.seeds[0] + len(told))


class Diary(ClipWorker):
    """Writes down which prompts it is given, and dies at the first of a kind that is in the folder."""

    def make(self, work: ClipWork, negative: PromptRows, *told: PromptRows) -> list[MadeClip]:
        assert self._job is not None
        diary = Path(self._job.checkpoint).parents[1] / "diary"
        mortal = list(diary.glob("deaths-*"))
        if mortal and any(str(number) in mortal[0].name for number in numbers(work, told)):
            mortal[0].unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        made = super().make(work, negative, *told)
        with (diary / "made").open("a") as file:
            file.write("".join(f"{number}\n" for number in numbers(work, told)))
        return made


class DiesInside(Diary):
    """Is killed after the first denoising step of a chunk with a prompt from number 20 on, once in a job."""

    def make(self, work: ClipWork, negative: PromptRows, *told: PromptRows) -> list[MadeClip]:
        assert self._job is not None
        alive, whole = Path(self._job.checkpoint).parents[1] / "diary" / "alive", clip_worker.make_clips

        def progress(done: int) -> None:
            if done == 1 and work.seeds[0] >= 20 and alive.exists():
                alive.unlink()
                os.kill(os.getpid(), signal.SIGKILL)

        clip_worker.make_clips = partial(whole, progress=progress)
        try:
            return super().make(work, negative, *told)
        finally:
            clip_worker.make_clips = whole


class Failing(ClipWorker):
    """Cannot make prompt 1."""

    def make(self, work: ClipWork, negative: PromptRows, *told: PromptRows) -> list[MadeClip]:
        if 1 in numbers(work, told):
            raise OSError("no memory left for prompt 1")
        return super().make(work, negative, *told)


class FailingMember(ClipWorker):
    """The second of a bag has too little memory; the first waits for it."""

    def make(self, work: ClipWork, negative: PromptRows, *told: PromptRows) -> list[MadeClip]:
        if self._group.rank == 1:
            raise OSError("no memory left on the second")
        return super().make(work, negative, *told)


class DiesLoading(ClipWorker):
    """Is killed while it loads, once for each file in the folder."""

    def load(self, job: ClipJob) -> None:
        for death in sorted((Path(job.checkpoint).parents[1] / "deaths").glob("*"))[:1]:
            death.unlink(missing_ok=True)  # another worker may have taken it
            os.kill(os.getpid(), signal.SIGKILL)
        super().load(job)


class DiesEncoding(ClipWorker):
    """Is killed when its first row is there, once for each file in the folder."""

    def encode(self, job: ClipJob, prompts: Sequence[str], first: Sequence[np.ndarray | None] = ()) -> Any:
        for number, rows in enumerate(super().encode(job, prompts, first)):
            deaths = sorted((Path(job.checkpoint).parents[1] / "deaths").glob("*"))
            if number and deaths:
                deaths[0].unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            yield rows


class Doomed(ClipWorker):
    """Its process ends at prompt 1."""

    def make(self, work: ClipWork, negative: PromptRows, *told: PromptRows) -> list[MadeClip]:
        if 1 in numbers(work, told):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().make(work, negative, *told)


def assert_same(files: Sequence[Path], alone: Sequence[np.ndarray], fps: float = 8.0) -> None:
    """The files hold the same pixels but for rounding before 8 bits and H.264, which answers one changed level with
    some more: up to 1.6 of 255 in the mean were seen. Another clip is tens away."""
    encoded = [as_encoded(clip, files[0].parent, fps).astype(int) for clip in alone]
    for index, file in enumerate(files):
        away = [np.abs(read_mp4(file).astype(int) - one).mean() for one in encoded]
        assert away[index] < 3 and min(away[:index] + away[index + 1 :], default=255.0) > 10, away


def as_encoded(clip: np.ndarray, folder: Path, fps: float) -> np.ndarray:
    from app.drawing.video import write_mp4

    write_mp4(folder / "plain.mp4", clip, fps)
    return read_mp4(folder / "plain.mp4")


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
@pytest.mark.long
def test_clips_of_three_workers_are_those_of_none(checkpoint, alone, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Those of one worker are compared where it continues what was stopped."""
    told: list[str] = []
    *files, sheet = spread(job(checkpoint), PROMPTS, tmp_path / "x.mp4", 3, batch=2, tell=told.append)
    assert [file.name for file in files] == [f"x-{index:02d}.mp4" for index in range(5)] and sheet.name == "x.png"
    assert_same(files, alone)
    assert told[-2].startswith("5/5 clips") and "until the last prompt was given out" in told[-1]
    assert not (tmp_path / "x.clips.jsonl").exists()


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_workers_together_make_the_same_clips(checkpoint, alone, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """By FLOPs two halves take as long as one bag and exchange less."""
    told: list[str] = []
    *files, _ = spread(job(checkpoint), PROMPTS[:2], tmp_path / "x.mp4", 2, together=True, tell=told.append)
    assert told[0].startswith("note: each clip is made by two halves of 1, ")
    assert_same(files, alone[:2])


STDIT3 = STDiT3Config(num_layers=1, num_heads=2, head_dim=12, ffn_dim=96, caption_rows=4)
MODELS: dict[str, tuple[DiTConfig | None, float]] = {  # None: that of `tiny_run`
    "wan, guided": (None, 3.0),
    "wan, the prompt alone": (None, 1.0),
    "stdit3": (STDIT3, 3.0),
}


def saved_run(folder: Path, dit: DiTConfig | None, guidance: float) -> tuple[Path, ClipSettings]:
    run = tiny_run()
    run = replace(run, sample=replace(run.sample, guidance_scale=guidance))
    if dit is not None:
        text = replace(run.model.text, empty="none")
        run = replace(run, model=replace(run.model, dit=dit, text=text))
    return write_checkpoint(folder, run), ClipSettings.of(run)


@pytest.mark.parametrize(("name", "workers"), [("wan, guided", 3), ("wan, the prompt alone", 2), ("stdit3", 3)])
def test_workers_that_join_make_the_clip_of_one(
    name: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor's own methods, in threads: a bag of more than one worker, also of spatial-temporal layers."""
    monkeypatch.setattr(clip_worker, "node_address", lambda: "127.0.0.1")
    folder, told = saved_run(tmp_path, *MODELS[name])
    given = ClipJob(checkpoint=str(folder), ema=True, device="cpu", settings=told, halves="never")
    ((_, expected),) = clips_of(saved_model(folder, device="cpu"), PROMPTS[:1], told)
    crew = [ClipWorker() for _ in range(workers)]
    negative, rows = crew[0].encode(given, PROMPTS[:1])

    def work(rank: int) -> list[MadeClip]:
        crew[rank].join(rank, way, *where)
        return crew[rank].make(ClipWork(settings=told, seeds=(told.seed,)), negative, rows)

    for one in crew:
        one.load(given)
    way, where = crew[0].way(workers), crew[0].serve()
    assert (way.bags, way.size) == (1, workers) and (way.rates is not None) == (name == "stdit3")
    with ThreadPoolExecutor(workers) as pool:
        (clip,), *others = pool.map(work, range(workers))
    assert others == [[]] * (workers - 1)
    (tmp_path / "x.mp4").write_bytes(clip.mp4)
    assert_same([tmp_path / "x.mp4"], [expected], told.fps)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("name", "workers"), [("wan, guided", 3), ("wan, the prompt alone", 2), ("stdit3", 3)])
def test_bags_of_workers_make_the_same_clips(name: str, workers: int, tmp_path: Path) -> None:
    folder, told = saved_run(tmp_path, *MODELS[name])
    given = ClipJob(checkpoint=str(folder), ema=True, device="cpu", settings=told, halves="never")
    expected = [clip for _, clip in clips_of(saved_model(folder, device="cpu"), PROMPTS[:2], told)]
    *files, _ = spread(given, PROMPTS[:2], tmp_path / "x.mp4", workers, together=True, tell=lambda text: None)
    assert_same(files, expected, told.fps)


@pytest.mark.faults
@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_a_killed_worker_loses_no_prompt_and_repeats_no_finished_one(tmp_path: Path, alone) -> None:  # type: ignore[no-untyped-def]
    folder = write_checkpoint(tmp_path, tiny_run())
    diary = tmp_path / "diary"
    diary.mkdir()
    (diary / "deaths-2").touch()
    *files, _ = spread(job(folder), PROMPTS, tmp_path / "x.mp4", 2, worker_class=Diary, tell=lambda text: None)
    assert_same(files, alone)
    made = Counter((diary / "made").read_text().split())
    assert not list(diary.glob("deaths-*"))  # somebody died
    assert made == {str(index): 1 for index in range(5)}


@pytest.mark.faults
@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("together", [False, True])
def test_a_worker_that_dies_while_it_loads_is_replaced_and_three_in_a_row_are_not(
    tmp_path: Path, alone: list[np.ndarray], together: bool
) -> None:
    folder = write_checkpoint(tmp_path, tiny_run())
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    (deaths / "0").touch()
    make = partial(spread, job(folder), PROMPTS, worker_class=DiesLoading, together=together, tell=lambda text: None)
    *files, _ = make(tmp_path / "x.mp4", 2)
    assert_same(files, alone)
    assert not list(deaths.iterdir()), "somebody died"
    for number in range(9):
        (deaths / str(number)).touch()
    with pytest.raises(CrewError, match="3 workers died in a row while loading "):
        make(tmp_path / "y.mp4", 1 if not together else 2)


@pytest.mark.faults
@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_a_worker_that_dies_over_the_prompts_is_replaced_and_as_many_as_a_prompt_may_cost_are_not(
    tmp_path: Path, alone: list[np.ndarray]
) -> None:
    folder = write_checkpoint(tmp_path, tiny_run())
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    (deaths / "0").touch()
    make = partial(spread, job(folder), PROMPTS, worker_class=DiesEncoding, tell=lambda text: None)
    *files, _ = make(tmp_path / "x.mp4", 2)
    assert_same(files, alone)
    assert not list(deaths.iterdir()), "somebody died"
    for number in range(9):
        (deaths / str(number)).touch()
    with pytest.raises(CrewError, match="2 workers died in a row while encoding the prompts: "):
        make(tmp_path / "y.mp4", 1, max_losses=2)
    assert len(list(deaths.iterdir())) == 7, "two have died"


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_of_many_prompts_none_is_lost_or_made_twice_when_a_worker_dies_over_one(tmp_path: Path) -> None:
    """And the last line says how busy each worker was."""
    folder = write_checkpoint(tmp_path, tiny_run())
    diary, prompts = tmp_path / "diary", [f"a disc number {number}" for number in range(64)]
    diary.mkdir()
    (diary / "alive").touch()
    size = ClipChanges(frames=17, height=32, width=48, steps=40)
    told: list[str] = []
    first_seen: dict[Path, int] = {}

    def tell(line: str) -> None:
        told.append(line)
        for file in tmp_path.glob("x-*.mp4"):
            first_seen.setdefault(file, file.stat().st_mtime_ns)

    given = replace(job(folder), settings=settings().changed(size))
    *files, _ = spread(given, prompts, tmp_path / "x.mp4", 3, batch=4, worker_class=DiesInside, tell=tell)
    assert not (diary / "alive").exists(), "somebody died"
    assert Counter((diary / "made").read_text().split()) == {str(number): 1 for number in range(64)}
    assert len(files) == 64 and {file: file.stat().st_mtime_ns for file in files} == first_seen
    assert len(re.findall(r"(\d+)%", told[-1])) >= 3, told[-1]


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
@pytest.mark.long
def test_what_was_stopped_continues_where_it_was(checkpoint, alone, tmp_path) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "x.mp4"
    with pytest.raises(OSError, match="no memory left for prompt 1"):
        spread(job(checkpoint), PROMPTS, out, 1, worker_class=Failing, tell=lambda text: None)
    before = (tmp_path / "x-00.mp4").stat().st_mtime_ns
    told: list[str] = []
    *files, _ = spread(job(checkpoint), PROMPTS, out, 1, tell=told.append)
    assert told[0] == "note: there already: 1 of 5 clips"
    assert files[0].stat().st_mtime_ns == before
    assert_same(files, alone)


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
@pytest.mark.faults
def test_a_deadly_prompt_is_named(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"1 worker\(s\) died or hung while they made prompt 2 \('a disc number 1'\)"
    ):
        # one loss: a start of a worker takes seconds
        spread(
            job(checkpoint), PROMPTS, tmp_path / "x.mp4", 1, worker_class=Doomed, max_losses=1, tell=lambda text: None
        )
    assert (tmp_path / "x-00.mp4").is_file()


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(300)  # half of what the first would wait for the second
@pytest.mark.faults
def test_a_member_that_fails_is_told_and_not_waited_for(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no memory left on the second"):
        spread(job(checkpoint), PROMPTS, tmp_path / "x.mp4", 2, together=True, worker_class=FailingMember)


def test_the_others_of_a_bag_are_not_asked_before_the_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(references: Any) -> None:
        assert references == ["failed"], "it still waits in an exchange"
        raise OSError("no memory left")

    monkeypatch.setattr(ray, "wait", lambda waiting, **how: (["failed"], ["waits"]))
    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(OSError, match="no memory left"):
        spreading._first_of(["waits", "failed"], 60.0)


class HangingCrew:
    """Two workers whose calls end when the clock says so: by (prompt, how often it was asked for) the seconds that a
    call takes, 100 for all others. Stands for Ray, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: dict[tuple[int, int], float]) -> None:
        self.size, self.job, self.now, self.takes = 2, SimpleNamespace(checkpoint="x"), 0.0, takes
        self.members, self.ended, self.closed, self.began = [], [], 0, Counter()  # type: ignore[var-annotated]
        self.prompts = PROMPTS
        monkeypatch.setattr(spreading, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(spreading, "wait", self.wait)
        monkeypatch.setattr(
            spreading, "get", lambda answer: [] if answer[1] is None else [SimpleNamespace(seconds=1.0)]
        )
        monkeypatch.setattr(spreading, "get_all", lambda answers: None)
        monkeypatch.setattr(spreading, "kill", self.ended.append)

    def start(self) -> tuple[str, Any]:
        self.members.append(f"worker {len(self.members) + len(self.ended)}")
        return self.members[-1], (self.members[-1], None, self.now)

    def together(self) -> tuple[list[str], Any]:
        self.members = [self.start()[0] for _ in range(2)]
        return self.members, SimpleNamespace(workers=2, describe=lambda: "two")

    def has_lost_one(self) -> bool:
        return False

    def work(self, chunk: Sequence[int]) -> float:
        return 1.0

    def close(self) -> None:
        self.closed += 1

    def begin(self, handle: str, chunk: Sequence[int]) -> Any:
        self.began[handle, chunk[0]] += 1
        times = sum(count for (_, prompt), count in self.began.items() if prompt == chunk[0])
        return handle, (chunk[0], times), self.now + self.takes.get((chunk[0], times), 100.0)

    def wait(self, answers: list[Any], timeout: float | None) -> tuple[list[Any], list[Any]]:
        first = min(answers, key=lambda answer: answer[2])
        assert timeout is not None, "a wait without a limit"
        if first[2] > self.now + timeout:
            self.now += timeout
            return [], answers
        self.now = max(self.now, first[2])
        return [first], [one for one in answers if one is not first]


def test_workers_that_hang_together_are_ended_and_all_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    crew: Any = HangingCrew(monkeypatch, {(3, 1): 1e9})  # that of the second, which the first waits for
    kept: list[int] = []
    spreading._make_together(crew, PromptQueue(5, (), 1), crew, lambda chunk, made: kept.extend(chunk), print)
    assert kept == [0, 1, 2, 3, 4] and crew.closed == 1
    assert 900 < crew.now < 900 + 5 * 100 + 6 * 100 + 1, "five times what clips took, and what a new process may"


def test_a_worker_that_hangs_alone_is_ended_and_its_prompt_made_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    crew: Any = HangingCrew(monkeypatch, {(2, 1): 1e9})
    kept: list[int] = []
    spreading._Apart(crew, PromptQueue(5, (), 1), crew, lambda chunk, made: kept.extend(chunk), print).make()
    assert sorted(kept) == [0, 1, 2, 3, 4] and len(crew.ended) == 1
    assert crew.now < 900 + 12 * 100


def test_no_worker_waits_for_another_while_prompts_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some clips take three times as long, and one worker hangs."""
    takes = {**{(prompt, 1): 300.0 for prompt in range(0, 80, 7)}, (10, 1): 1e9}
    crew: Any = HangingCrew(monkeypatch, takes)

    def made(answer: Any) -> list[Any]:
        return [] if answer[1] is None else [SimpleNamespace(seconds=takes.get(answer[1], 100.0))]

    monkeypatch.setattr(spreading, "get", made)
    occupancy = spreading._Apart(crew, PromptQueue(80, (), 1), crew, lambda chunk, clips: None, print).make()
    assert len(crew.ended) == 1 and len(occupancy.shares()) == 3 and min(occupancy.shares()) > 0.99


@pytest.mark.parametrize("make", ["together", "apart"])
@pytest.mark.parametrize(
    "gone",
    [
        ray.exceptions.RayActorError(),
        ray.exceptions.OutOfMemoryError("the node was low on memory"),
        ray.exceptions.RuntimeEnvSetupError("No space left on device"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_worker_that_ray_ends_is_replaced_also_where_it_ends_it_for_memory_or_cannot_start_it(
    gone: Exception, make: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are errors of families of their own. One while it loads, and one over prompt 2."""
    crew: Any = HangingCrew(monkeypatch, {})
    kept: list[int] = []
    left = [None, 2]  # what is awaited when a worker ends

    def result_of(answer: Any) -> list[Any]:
        prompt = answer[1] and answer[1][0]
        if prompt in left:
            left.remove(prompt)
            raise gone
        return [] if prompt is None else [SimpleNamespace(seconds=1.0)]

    def together() -> tuple[list[str], Any]:
        result_of(("", None))
        return HangingCrew.together(crew)

    monkeypatch.setattr(spreading, "get", result_of)
    monkeypatch.setattr(spreading, "get_all", lambda answers: [result_of(answer) for answer in answers])
    monkeypatch.setattr(crew, "together", together)
    queue, keep = PromptQueue(5, (), 1), lambda chunk, made: kept.extend(chunk)
    if make == "together":
        spreading._make_together(crew, queue, crew, keep, print)
    else:
        spreading._Apart(crew, queue, crew, keep, print).make()
    assert sorted(kept) == [0, 1, 2, 3, 4] and not left


def test_a_prompt_over_which_workers_hang_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in ("together", "apart"):
        crew: Any = HangingCrew(monkeypatch, {(2, times): 1e9 for times in range(20)})
        queue, keep = PromptQueue(5, (), 1), lambda chunk, made: None
        with pytest.raises(CrewError, match=r"died or hung while they made prompt 3 .*not answered for 1[0-9]{3} s"):
            if make == "together":
                spreading._make_together(crew, queue, crew, keep, print)
            else:
                spreading._Apart(crew, queue, crew, keep, print).make()


def test_slow_clips_are_waited_for() -> None:
    limit = ChunkLimit()
    assert limit.seconds(1) == 12 * 3600, "the first clip of a large model takes hours"
    limit.took(2, 1200.0)
    limit.took(1, 100.0)
    assert limit.seconds(1) == 900 + 5 * 600 and limit.seconds(3) == 900 + 3 * 5 * 600


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_more_workers_than_the_cluster_holds_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--workers 4 need a CPU each, and this Ray has 3; use at most 3"):
        spread(job(checkpoint), PROMPTS, tmp_path / "x.mp4", 4)


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_what_a_worker_cannot_load_is_said_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        spread(job(tmp_path / "none"), PROMPTS, tmp_path / "x.mp4", 1)


def test_a_worker_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "wait", lambda waiting, **how: ([], list(waiting)))
    with pytest.raises(CrewError, match=r"worker\(s\) 0, 1 of 2 have not met the others within 600 s"):
        ClipCrew._answers(SimpleNamespace(size=2), ["a", "b"], 600.0, "met the others")  # type: ignore[arg-type]


def test_together_needs_workers() -> None:
    result = CliRunner().invoke(app, ["sample", "--checkpoint", "x", "--together"])
    assert result.exit_code == 2 and "need --workers N" in result.output


@pytest.mark.cluster
@pytest.mark.timeout(560)  # two starts of Ray's processes, on a machine that does much else
@pytest.mark.long
def test_the_command_makes_them_on_a_ray_of_its_own(checkpoint: Path, alone, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    import subprocess
    import sys

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    command = ["sample", "--checkpoint", str(checkpoint), "--prompts", str(prompts), "--workers", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", *command, "--out", str(tmp_path / "x.mp4"), "--device", "cpu"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert_same([tmp_path / f"x-{index:02d}.mp4" for index in range(5)], alone)
