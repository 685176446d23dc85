"""Real runs that train from a cache alone, which `heddle data cache` has filled on the workers of the same cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterator

import pytest
import torch

from actors.messages import FailedStart, HostGpu
from actors.pool.room import Need
from actors.worker.loading import EncoderSet
from app.bench.lab import Lab, LabRun
from app.caching.fill import FillError, fill
from app.caching.worker import FilledUnit, FillJob, FillUnit, FillWorker
from app.kept.wanted import CacheLook, WantedEntry, check_only, look
from app.settings.config import RunConfig
from data.cache import Cache
from data.config import CacheConfig

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

STEPS = 8
SAME_TRAINING = 1e-6  # sums of other workers, and texts that were encoded beside others


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("cached")) as lab:
        lab.add_node(workers=2)
        yield lab


def config_of(lab: Lab, name: str, cache: str, only: bool = False, workers: int = 1) -> RunConfig:
    return lab.config(
        name,
        data={"cache": {"path": str(lab.folder / cache), "min_free_gib": 0, "only": only}, "start_frame": "fixed"},
        train={"steps": STEPS},
        workers={"min": 1, "max": workers},
        planner={"strategy": "static"},
    )


class DyingWorker(FillWorker):
    """Ends in the middle of its third unit, the first of all to come to one, and has written the others by then."""

    def fill(self, unit: FillUnit) -> FilledUnit | FailedStart:
        answer = super().fill(unit)
        if unit.number >= 2:
            try:
                (self._cache.root / ".died").touch(exist_ok=False)
            except FileExistsError:
                return answer
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


class HopelessWorker(FillWorker):
    """Ends with each unit of clips."""

    def fill(self, unit: FillUnit) -> FilledUnit | FailedStart:
        if unit.kind == "latents":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fill(unit)


class LateWorker(FillWorker):
    """The second of two dies when it starts, and the one in its place has no encoder."""

    def load(self, job: FillJob) -> HostGpu | FailedStart:
        if self.name == "w1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load(job)

    def _none_made(self) -> EncoderSet:
        made = super()._none_made()
        if self.name == "w2":
            made.ready = no_memory  # type: ignore[method-assign]
        return made


def no_memory(*modules: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


class UnstartedWorker(FillWorker):
    """None of its kind starts."""

    def _load(self, job: FillJob) -> None:
        raise FileNotFoundError(f"no weights for {self.name}")


class MarkingWorker(FillWorker):
    """Leaves the name of its node in the folder, and goes on when those of two nodes are there."""

    def fill(self, unit: FillUnit) -> FilledUnit | FailedStart:
        answer = super().fill(unit)
        (self._cache.root / f".by-{self._here.node}").touch()
        until = time.monotonic() + 60.0
        while len(list(self._cache.root.glob(".by-*"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.1)
        return answer


def begun(
    config: RunConfig, workers: int, worker_class: type, tell: Callable[[str], None]
) -> tuple[CacheLook, Generator[tuple[tuple[WantedEntry, ...], FilledUnit]]]:
    found = look(config, cuda=False, modules=("text", "vae"))
    root = found.cache.cache.root
    root.mkdir(parents=True, exist_ok=True)
    (root / ".sign").touch()
    job = FillJob(
        model=config.model,
        train=config.train,
        workers=config.workers,
        cache=config.data.cache,
        clip_timeout_s=60.0,
        sign=".sign",
    )
    return found, fill(job, found, workers, threads=2, need=Need(2.0, 0.0), tell=tell, worker_class=worker_class)


def filled(
    config: RunConfig, workers: int, worker_class: type = FillWorker, tell: Callable[[str], None] = lambda text: None
) -> tuple[CacheLook, list[FilledUnit]]:
    found, told = begun(config, workers, worker_class, tell)
    return found, [answer for _, answer in told]


def files(lab: Lab, cache: str) -> dict[str, bytes]:
    root = lab.folder / cache
    return {str(path.relative_to(root)): path.read_bytes() for path in root.glob("*/*/*.npy")}


@pytest.fixture(scope="module")
def one(lab: Lab) -> CacheLook:
    """A cache that one worker has filled."""
    found, answers = filled(config_of(lab, "one", "one"), workers=1)
    assert sum(len(answer.kept) for answer in answers) == sum(one.wanted for one in found.kinds.values())
    return found


@pytest.mark.long
def test_two_workers_of_which_one_dies_fill_the_same_bytes(lab: Lab, one: CacheLook) -> None:
    """What was written stays, what was not is made by the others; nothing is made twice."""
    config = config_of(lab, "two", "two")
    found, answers = filled(config, workers=2, worker_class=DyingWorker)
    assert (lab.folder / "two" / ".died").is_file()
    assert sum(len(a.kept) + len(a.there) for a in answers) == sum(one.wanted for one in found.kinds.values())
    assert any(answer.there for answer in answers), "what the dead one had written"
    assert files(lab, "two") == files(lab, "one")


@pytest.mark.long
def test_workers_that_do_not_start_are_told_of_and_the_others_go_on(lab: Lab, one: CacheLook) -> None:
    told: list[str] = []
    filled(config_of(lab, "late", "late"), workers=2, worker_class=LateWorker, tell=told.append)
    assert files(lab, "late") == files(lab, "one")
    failed = [line for line in told if "did not start" in line]
    assert ["w1" in line or "w2" in line for line in failed] == [True] * len(failed) and failed, told
    assert "worker w1 did not start" in failed[0] and "goes on with 1 worker" in failed[0]
    second = [line for line in failed if "worker w2 did not start" in line]
    assert not second or "OutOfMemoryError: CUDA out of memory" in second[0]


@pytest.mark.long
def test_workers_of_two_nodes_fill_one_folder_also_when_a_node_is_lost_and_after_a_stop(
    lab: Lab, one: CacheLook
) -> None:
    config, told = config_of(lab, "nodes", "nodes"), list[str]()
    second = lab.add_node(workers=1)
    root = lab.folder / "nodes"
    found, answers = begun(config, 3, MarkingWorker, told.append)
    kept = 0
    for number, (_, answer) in enumerate(answers):
        kept += len(answer.kept)
        if second in lab.nodes and (root / f".by-{second.node_id}").exists():
            lab.kill_node(second)
            lost_at = number
        if second not in lab.nodes and number >= lost_at + 4:
            answers.close()  # as Ctrl-C does
    assert second not in lab.nodes, "workers of both nodes have written"
    wanted = sum(account.wanted for account in one.kinds.values())
    assert 0 < kept < wanted == sum(account.wanted for account in found.kinds.values())
    again, more = filled(config, 2, tell=told.append)
    missing = sum(len(account.missing) for account in again.kinds.values())
    assert sum(len(answer.kept) for answer in more) == missing <= wanted - kept
    assert files(lab, "nodes") == files(lab, "one")


@pytest.mark.long
def test_where_no_worker_starts_the_command_ends_after_three(lab: Lab, one: CacheLook) -> None:
    with pytest.raises(FillError, match=r"3 workers in a row failed to start, and none is left: .*no weights for w2"):
        filled(config_of(lab, "never", "never"), workers=1, worker_class=UnstartedWorker)


@pytest.mark.long
def test_a_unit_that_ends_three_workers_ends_the_command_and_the_same_command_goes_on(lab: Lab, one: CacheLook) -> None:
    config = config_of(lab, "three", "three")
    with pytest.raises(FillError, match=r"3 workers died or hung while they encoded .* What is written stays"):
        filled(config, workers=2, worker_class=HopelessWorker)
    kept = files(lab, "three")
    assert kept and all(name.startswith("text") for name in kept)
    found, _ = filled(config, workers=1)
    assert not found.kinds["text"].missing and files(lab, "three") == files(lab, "one")


def modules_of(run: LabRun) -> set[str]:
    return {span.module for span in run.spans}


@pytest.mark.long
def test_a_run_from_the_cache_encodes_nothing_and_trains_what_a_run_trains_that_encodes(
    lab: Lab, one: CacheLook
) -> None:
    """Also when a worker of two dies in it. The other run keeps what it encodes: its own entries are the same."""
    check_only(config_of(lab, "from-cache", "one", only=True), cuda=False)
    taking = lab.start(config_of(lab, "from-cache", "one", only=True, workers=2))
    taking.wait_for_step(1)
    taking.signal_worker()
    assert taking.join(600).code == 0
    encoding = lab.start(config_of(lab, "encodes", "own"))
    assert encoding.join(600).code == 0
    assert taking.steps() == encoding.steps() == list(range(STEPS)) and taking.generations() > 1
    assert modules_of(taking) == {"dit", "finish"} and modules_of(encoding) == {"text", "vae", "dit", "finish"}
    assert taking.losses() == pytest.approx(encoding.losses(), rel=SAME_TRAINING)
    own, made = (Cache(CacheConfig(path=str(lab.folder / name))) for name in ("own", "one"))
    assert set(made.listing("text").entries) >= set(own.listing("text").entries)
    latents = list(own.listing("latents").entries)
    assert latents and all(
        own._path("latents", key).read_bytes() == made._path("latents", key).read_bytes() for key in latents
    )


@pytest.mark.long
def test_a_run_whose_entries_are_those_of_another_run_takes_the_same_steps_to_the_last_bit(lab: Lab) -> None:
    """What `data.cache.only` changes is who loads encoders: a run that finds all in the cache trains the same."""
    config = config_of(lab, "finds", "one")
    found, taken = lab.start(config), lab.start(config_of(lab, "takes", "one", only=True))
    assert found.join(600).code == taken.join(600).code == 0
    assert modules_of(found) == modules_of(taken) == {"dit", "finish"}
    assert found.losses() == taken.losses() and len(found.losses()) == STEPS
