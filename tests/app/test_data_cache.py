"""`heddle data cache` and runs that train from what it keeps: no entry is missing, none is another than a run's own."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import numpy as np
import pytest
import ray
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from actors.config import WorkersConfig
from actors.feed.feeder import Feeder
from actors.feed.step_source import item_facts
from actors.messages import CascadeTask, FailedStart, HostGpu, Piece
from actors.outcome import Exit
from actors.plan.spared import Spared
from actors.plan.types import Module, PlanError
from actors.planning.forecasts import forecast
from actors.pool.room import Need
from actors.step import StepItems
from actors.worker.caching import ResultCache, host_copy
from app.caching import command, worker
from app.caching import fill as filling
from app.caching.fill import FillPlan, plans_of, unit_of
from app.caching.worker import FilledUnit, FillJob, FillWorker
from app.cli import app
from app.inputs.beside import live_texts, spared
from app.inputs.items import cache_of, items_from_data, open_dataset
from app.inputs.profiles import profile_of
from app.kept.verdict import WholeVerdict
from app.kept.wanted import CacheLook, KindAccount, WantedEntry, cache_preview, check_only, keep_filled, look
from app.plan.dry_run import dry_run
from app.proof.command import settings_of
from app.sampling.kept_texts import kept_texts
from app.sampling.prompts import encode_prompts
from app.settings.config import RunConfig
from app.settings.sections import ValidationConfig
from app.validation.clips import held_out_clips, held_out_data
from app.validation.work import HeldOutPart, KeptClips
from data.cache import Cache, CacheWriter
from data.config import CacheConfig
from data.dataset.every_draw import every_row
from data.dataset.index import Index, IndexRow
from data.decode import decode_job
from data.engines.engine import make_engine
from data.errors import DataIOError
from data.ledger import BadSample, Ledger, Reason
from data.tools.synthetic import SynthConfig, synthesize
from ops.models.folders import resolve
from ops.models.load import build_text
from ops.typed import ConfigError
from tests.actors.exactness import close_hosts, make_hosts, train_config
from tests.actors.worker.test_late_encoders import folders
from tests.data.making import clip, good, picture, shard

RUNS = Path(__file__).parents[2] / "configs" / "runs"
BOTH: tuple[Module, ...] = ("text", "vae")
CPU = torch.device("cpu")
OTHER_BATCH = 1e-5  # rounding of fp32 in a text encoder, whose products are of another size with other captions beside


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    synthesize(folder, SynthConfig(clips=7, images=3, shards=1, seed=3, koala=False))
    synthesize(folder / "held-out", SynthConfig(clips=2, images=1, shards=1, seed=4, koala=False))
    return folder


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(worker, "node_id", lambda: "here")
    monkeypatch.setattr(worker, "given_gpu", lambda: "")
    yield
    close_hosts()


def config_of(clips: Path, cache: Path, run: str = "demo", *changes: str) -> RunConfig:
    given = [
        f"data.sources=[{{path: {clips / 'shards'}, index: {clips / 'index'}, caption: 'json:captions'}}]",
        f"data.cache={{path: {cache}, min_free_gib: 0}}",
        "data.start_frame=fixed",
        "data.engine.kind=pool",
        "data.engine.decode_workers=1",
        "workers.device=cpu",
    ]
    return RunConfig.load(RUNS / f"{run}.yaml", [*given, *changes])


def from_cache(config: RunConfig, **cache: Any) -> RunConfig:
    return replace(config, data=replace(config.data, cache=replace(config.data.cache, only=True, **cache)))


def looked(config: RunConfig, modules: tuple[Module, ...] = BOTH) -> CacheLook:
    return look(config, cuda=False, modules=modules)


def filled(config: RunConfig, modules: tuple[Module, ...] = BOTH) -> tuple[CacheLook, list[FilledUnit]]:
    """What the command makes, by one worker in this process."""
    found, made = looked(config, modules), worker_of(config)
    return found, [made.fill(unit_of(plan, found)) for plan in plans_of(found)]


def worker_of(config: RunConfig) -> FillWorker:
    """One in this process."""
    root = looked(config, ()).cache.cache.root
    root.mkdir(parents=True, exist_ok=True)
    (root / ".sign").touch()
    made = FillWorker()
    made.load(
        FillJob(
            model=config.model,
            train=config.train,
            workers=config.workers,
            cache=config.data.cache,
            clip_timeout_s=60.0,
            sign=".sign",
        )
    )
    return made


def feeder_of(config: RunConfig, folder: Path) -> Feeder:
    model, geometry = resolve(config.model)
    facts = item_facts(config.data, config.train, config.workers, model, geometry)
    return Feeder(config.data, facts, config.train.seed, str(folder), make_engine)


# -- what is made


@pytest.mark.parametrize("run", ["demo", "hunyuan-tiny", "hunyuan15-i2v-tiny"])
def test_entries_are_those_that_the_run_itself_keeps(clips: Path, tmp_path: Path, run: str) -> None:
    """Latents bit for bit, texts but for the captions that they were encoded beside. Also of texts with the vector of
    a second encoder, of latents with the condition of a first frame, and of an encoder of captions that sees it."""
    config = config_of(clips, tmp_path / "made", run)
    found, answers = filled(config)
    assert all(account.missing for account in found.kinds.values())
    assert not any(answer.failed or answer.faults or answer.there for answer in answers)
    again = looked(config)
    assert not any(account.missing or account.bad for account in again.kinds.values())

    model, geometry = resolve(config.model)
    facts = item_facts(config.data, config.train, config.workers, model, geometry)
    cache = cache_of(replace(config, model=model), config.data, cuda=False)
    writer = CacheWriter(Cache(CacheConfig(path=str(tmp_path / "own"), min_free_gib=0.0)))
    (host,) = make_hosts(
        1, torch.float32, train_config(), config=config.model, on_encoded=ResultCache(writer, host_copy)
    )
    dataset = open_dataset(config, geometry, profile_of(config, model, geometry))
    for step in range(3):
        for item in dataset.step(step).items:
            drawn = facts.drawn(item, cache.names(item), ())
            samples = StepItems.of(step, [drawn], geometry, "sample").items[item.id].samples
            piece = Piece(item=item.id, bucket=item.bucket.shape, batch=item.batch)
            batch = decode_job(item.job)
            for module in BOTH:
                task = CascadeTask(
                    generation=1,
                    step=step,
                    cascade=f"{item.id}/{module}",
                    name=module,
                    module=module,
                    bag=(0,),
                    samples=samples,
                    pieces=(piece,),
                    planned_start_s=0.0,
                    planned_end_s=1.0,
                )
                if module == "vae":
                    host.encoding.vae(task, batch.video, batch.ok)
                else:
                    seen = [video[0] for video in batch.video] if model.text.sees_picture else []
                    host.encoding.text(task, batch.captions, seen, batch.ok if seen else ())
    while writer._waiting:
        pass
    own = sorted(path.relative_to(tmp_path / "own") for path in (tmp_path / "own").glob("*/*/*.npy"))
    assert {path.parts[0] for path in own} == {"latents", "text"}
    for path in own:
        if path.parts[0] == "latents":
            assert (tmp_path / "own" / path).read_bytes() == (tmp_path / "made" / path).read_bytes(), path
            continue
        ours, theirs = (
            Cache(CacheConfig(path=str(tmp_path / name))).get("text", path.stem) for name in ("made", "own")
        )
        assert ours is not None and theirs is not None and ours.shape == theirs.shape
        assert np.abs(ours - theirs).max(initial=0.0) <= OTHER_BATCH * np.abs(theirs).max(initial=0.0), path


def test_what_is_there_is_not_made_again_and_each_entry_counts_once(clips: Path, tmp_path: Path) -> None:
    config = config_of(clips, tmp_path, "demo-curriculum")
    found, answers = filled(config)
    wanted = {kind: account.wanted for kind, account in found.kinds.items()}
    assert sum(len(answer.kept) for answer in answers) == sum(wanted.values())
    kept = sorted(tmp_path.glob("latents/*/*.npy"))
    for path in kept[:3]:
        path.unlink()
    before = {path: path.stat().st_mtime_ns for path in kept[3:]}
    again, made = filled(config)
    assert {kind: account.wanted for kind, account in again.kinds.items()} == wanted
    assert sum(len(answer.kept) for answer in made) == 3 == len(again.kinds["latents"].missing)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    shapes = {one.cut.bucket for one in found.kinds["latents"].missing if one.cut is not None}
    assert len(shapes) > 3, "of every segment"


def test_held_out_clips_are_made_apart_from_cropped_ones_of_the_same_shape(clips: Path, tmp_path: Path) -> None:
    found = looked(config_of(clips, tmp_path, "demo", "data.buckets.oversize=crop", *held_out(clips)))
    plans = plans_of(found)
    assert all(len({one.item is None for one in plan.entries}) == 1 for plan in plans)
    assert any(one.cut is not None and one.cut.crop for plan in plans for one in plan.entries)
    for plan in plans:
        unit = unit_of(plan, found)
        assert unit.job is None or len(unit.job.clips) == len(unit.keys)


def test_bad_clips_that_are_known_are_none_in_a_row(clips: Path, tmp_path: Path) -> None:
    """However many are listed before the good ones: marks of a cache that has the others."""
    config = config_of(clips, tmp_path, "demo", "data.limits={bad_after: 2, max_bad_fraction: 0.9}")
    found, _ = filled(config)
    again = looked(config)
    some = found.kinds["latents"].missing
    for one in some[:3]:
        again.cache.cache.mark("latents", one.key, BadSample(Reason.DECODE_ERROR, "torn"))
    bad = KindAccount(there=Counter({0: len(some) - 3}), bad=some[:3])
    ledger = command._file_known(replace(again, kinds={"latents": bad}))
    ledger.check_limits()
    assert ledger.summary()["skipped"]["decode_error"] == 3 and ledger.summary()["delivered"] == len(some) - 3


def test_a_full_disk_ends_the_command_and_says_why(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(clips, tmp_path / "cache")
    full = replace(config, data=replace(config.data, cache=replace(config.data.cache, min_free_gib=1e6)))
    found, answers = filled(full)
    assert answers[0].full and answers[0].failed and not answers[0].kept
    assert "GiB would stay free" in answers[0].why
    asked = iter([(found.kinds["text"].missing[:1], answers[0]), (found.kinds["text"].missing[1:2], answers[1])])
    monkeypatch.setattr("app.caching.fill.fill", lambda *given, **named: (one for one in asked))
    monkeypatch.setattr(command, "_capacity", lambda config: 1)
    done = command._fill(full, found, found.dataset.ledger)
    assert done.failed == len(answers[0].failed) and "GiB would stay free" in done.why
    assert next(asked)[1] is answers[1], "no further answer is asked for"


def test_hours_of_work_do_not_end_for_a_line_that_nobody_reads(
    clips: Path, tmp_path: Path, unread: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe without a reader, or a log on a disk that is full for a moment."""
    config = config_of(clips, tmp_path)
    found, answers = filled(config)
    made = [(tuple(plan.entries), answer) for plan, answer in zip(plans_of(found), answers, strict=True)]
    monkeypatch.setattr("app.caching.fill.fill", lambda *given, tell, **named: tell("loaded") or (one for one in made))
    monkeypatch.setattr(command, "_capacity", lambda config: 1)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=itertools.count(0.0, 60.0).__next__))
    monkeypatch.setattr(sys, "stdout", unread)
    ledger = found.dataset.ledger
    done = command._fill(config, found, ledger)
    command._print_end(found, done, ledger, tmp_path / "faults.jsonl")
    assert done.ended == done.missing > 0


def test_a_disk_that_is_full_at_its_last_entry_leaves_others_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread of the worker met the end of the disk, so that no entry of this answer has failed."""
    missing = [SimpleNamespace(kind="latents", source=0) for _ in range(3)]
    found: Any = SimpleNamespace(kinds={"latents": SimpleNamespace(missing=missing)})
    answer = FilledUnit(number=0, kept=(0,), num_bytes=8, full=True, why="the disk is full")
    monkeypatch.setattr("app.caching.fill.fill", lambda *given, **named: (one for one in [(missing[:1], answer)]))
    for name, value in (("_capacity", 1), ("_decoders", 1), ("_need", None)):
        monkeypatch.setattr(command, name, lambda config, value=value: value)
    monkeypatch.setattr(command, "_signed", lambda *given: nullcontext())
    ledger: Any = Ledger()
    ledger.add_planned(3)
    done = command._fill(None, found, ledger)
    with pytest.raises(command.NotKept, match=r"2 of 3 entries could not be written into cache: the disk is full\."):
        command._check_kept(done, CacheConfig(path="cache"))


def test_a_worker_whose_disk_another_thread_has_found_full_says_why(clips: Path, tmp_path: Path) -> None:
    config = config_of(clips, tmp_path)
    found, made = looked(config, ("text",)), worker_of(config)
    unit = unit_of(plans_of(found)[0], found)
    put = made._cache.put
    made._cache.put = lambda *given: put(*given) and made._cache._stop("the disk is full") is False
    answer = made.fill(replace(unit, keys=unit.keys[:1], captions=unit.captions[:1]))
    assert answer.full and answer.kept == (0,) and answer.why == "the disk is full"


def test_a_proof_of_a_run_that_takes_texts_alone_encodes_them_in_both_runs(clips: Path, tmp_path: Path) -> None:
    config = from_cache(config_of(clips, tmp_path), latents=False)
    given = config_of(
        clips, tmp_path, "demo", "data.cache.only=true", "data.cache.latents=false", *settings_of(config, 8)
    )
    assert not given.data.cache.path and not given.data.cache.only


class Crewed:
    """Ray with workers that answer at once: the first call of `method` gives this error of Ray's."""

    def __init__(self, method: str, error: Exception) -> None:
        self._deadly, self._error, self.hired = method, error, list[str]()

    def options(self, **given: object) -> Crewed:
        return self

    def remote(self, name: str) -> SimpleNamespace:
        self.hired.append(name)
        where = HostGpu(node="n", host="h")
        return SimpleNamespace(
            load=SimpleNamespace(remote=lambda job: self._call("load", where)),
            fill=SimpleNamespace(
                remote=lambda unit: self._call("fill", FilledUnit(number=unit.number, kept=(0,), num_bytes=1))
            ),
        )

    def _call(self, method: str, answer: object) -> Callable[[], object]:
        if method != self._deadly:
            return lambda: answer
        self._deadly = ""
        return self._killed

    def _killed(self) -> object:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.OutOfMemoryError("1 worker(s) were killed due to the node running low on memory."),
        ray.exceptions.RuntimeEnvSetupError("OSError: [Errno 28] No space left on device"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("method", ["load", "fill"])
def test_a_worker_that_ray_ends_for_memory_or_cannot_start_is_replaced(
    error: Exception, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's errors of these are neither that of an actor nor that of a task."""
    crew, told = Crewed(method, error), list[str]()
    monkeypatch.setattr(filling, "remote_of", lambda plain: crew)
    monkeypatch.setattr(filling, "wait", lambda calls, timeout: (calls[:1], calls[1:]))
    monkeypatch.setattr(filling, "get", lambda call: call())
    monkeypatch.setattr(filling, "kill", lambda handle: None)
    monkeypatch.setattr(filling, "where_of", lambda error: HostGpu(node="n", host="h"))
    missing = [WantedEntry(kind="text", key="00", num_bytes=1, caption="a circle")]
    found: Any = SimpleNamespace(kinds={"text": KindAccount(missing=missing)})
    job: Any = SimpleNamespace(workers=WorkersConfig())
    made = list(filling.fill(job, found, 1, threads=1, need=Need(1.0, 0.0), tell=told.append))
    assert [(entries, answer.kept) for entries, answer in made] == [(tuple(missing), (0,))]
    assert crew.hired == ["w0", "w1"] and any(
        "running low on memory" in line or "No space left" in line for line in told
    ) == (method == "load")


def test_a_unit_that_another_process_has_made_meanwhile_decodes_nothing(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(clips, tmp_path)
    found, _ = filled(config)
    made = FillWorker()
    made._cache = found.cache.cache
    monkeypatch.setattr(made, "_decoded", lambda *given: pytest.fail("decoded"))
    for plan in plans_of(found):
        answer = made.fill(unit_of(plan, found))
        assert answer.there == tuple(range(len(plan.entries))) and not answer.kept


def test_a_shard_that_decoders_may_not_read_leaves_no_mark(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks stay in a cache that others share: the clips would train nothing in their runs."""
    config = config_of(clips, tmp_path / "cache")
    found, made = looked(config), worker_of(config)
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "opened = os.open\n"
        "def denied(path, *how, **given):\n"
        "    if str(path).endswith('.tar'):\n"
        "        raise PermissionError(13, 'Permission denied', path)\n"
        "    return opened(path, *how, **given)\n"
        "os.open = denied\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    plan = next(plan for plan in plans_of(found) if plan.entries[0].kind == "latents")
    with pytest.raises(DataIOError, match="may not be read by user"):
        made.fill(unit_of(plan, found))
    assert not len(found.cache.cache.listing("latents").bad)


def test_encoders_of_a_cache_attend_as_those_of_a_run(clips: Path, tmp_path: Path, cudnn_attention: None) -> None:
    worker_of(config_of(clips, tmp_path))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_worker_whose_folder_is_another_one_says_so(clips: Path, tmp_path: Path) -> None:
    config = config_of(clips, tmp_path)
    job = FillJob(
        model=config.model,
        train=config.train,
        workers=config.workers,
        cache=config.data.cache,
        clip_timeout_s=60.0,
        sign=".of-the-driver",
    )
    answer = FillWorker().load(job)
    assert isinstance(answer, FailedStart) and "is not the folder that this command writes to" in answer.why


def test_a_worker_that_cannot_load_an_encoder_answers_that_it_does_not_start(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmuch")

    monkeypatch.setattr(worker.EncoderSet, "ready", no_memory)
    config = config_of(clips, tmp_path)
    _, answers = filled(config)
    assert {type(answer) for answer in answers} == {FailedStart}
    assert answers[0].why == "OutOfMemoryError: CUDA out of memory. Tried to allocate"  # type: ignore[attr-defined]
    assert len(looked(config).kinds["latents"].missing) == 10


def test_a_batch_that_runs_out_of_memory_is_encoded_in_parts(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sizes = worker.encode_texts, list[int]()

    def tight(encoder: Any, texts: list[str], group: Any, measure: Any, *more: Any) -> Any:
        encode = encoder.encode

        def at_most_two(some: list[str], *seen: Any) -> Any:
            sizes.append(len(some))
            if len(some) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return encode(some, *seen)

        return real(SimpleNamespace(encode=at_most_two), texts, group, measure, *more)

    monkeypatch.setattr(worker, "encode_texts", tight)
    _, answers = filled(config_of(clips, tmp_path), ("text",))
    assert max(sizes) > 2 and not any(answer.failed for answer in answers)
    assert not looked(config_of(clips, tmp_path)).kinds["text"].missing


class _Copies(TorchDispatchMode):
    """Counts copies of whole tensors by their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = Counter[tuple[int, ...]]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # PyTorch's
        if func is torch.ops.aten._to_copy.default:
            self.shapes[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def test_a_text_encoder_of_the_host_comes_to_the_device_once_for_all_captions(clips: Path, tmp_path: Path) -> None:
    """A run copies it for every cascade, as its transformer needs the room; here nothing else does."""
    config = config_of(clips, tmp_path, "demo", "model.text.place=host")
    made, found = worker_of(config), looked(config, ("text",))
    (plan,) = plans_of(found)
    units = [unit_of(FillPlan(number=number, entries=(one,)), found) for number, one in enumerate(plan.entries)]
    with _Copies() as copies:
        for unit in units:
            assert made.fill(unit).kept == (0,)
    (embeddings,) = {tuple(p.shape) for p in made._encoders.text.parameters() if len(p) == 384}
    assert len(units) > 2 and copies.shapes[embeddings] <= 1


# -- bad samples


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Three clips and three pictures with captions. The middle of a picture is lost."""
    folder = tmp_path / "pairs"
    folder.mkdir()
    for number in range(6):
        media = clip(width=96, height=64, frames=17, seed=number) if number < 3 else picture(96, 64, seed=number)
        if number == 4:
            media = media[: len(media) // 3] + bytes(len(media) - len(media) // 3)
        (folder / f"c{number}.{'mp4' if number < 3 else 'png'}").write_bytes(media)
        (folder / f"c{number}.txt").write_text(f"a clip {number}")
    return folder


def test_the_lists_of_a_run_and_what_is_no_file_stay(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--out` of what fills a cache: an earlier list goes before it begins."""

    class Begun(Exception):
        pass

    def begin(*given: object) -> None:
        raise Begun

    monkeypatch.setattr("app.run.borrowed_ray.borrowed_ray", begin)
    sources = f"data.sources=[{{path: {clips / 'shards'}, index: {clips / 'index'}}}]"
    settings = [sources, f"data.cache.path={tmp_path / 'cache'}"]

    def fill(out: Path) -> None:
        command.cache(RUNS / "demo.yaml", settings, cluster=None, dry_run=False, again=False, out=out)

    (run := tmp_path / "run").mkdir()
    for name in ("config.yaml", "metrics.jsonl", "bad.jsonl"):
        (run / name).write_text("{}\n")
    with pytest.raises(ConfigError, match="is in the folder of a run"):
        fill(run / "bad.jsonl")
    assert (run / "bad.jsonl").read_text() == "{}\n"
    (earlier := tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(Begun):
        fill(earlier)
    assert not earlier.exists()
    os.mkfifo(pipe := tmp_path / "pipe")
    end = os.open(pipe, os.O_RDWR)
    with pytest.raises(Begun):
        fill(pipe)
    os.close(end)
    assert pipe.is_fifo()


def config_of_broken(broken: Path, cache: Path, *changes: str) -> RunConfig:
    sources = f"data.sources=[{{path: {broken}, index: {cache / 'index'}}}]"
    limits = "data.limits={max_bad_fraction: 1.0}"
    return config_of(broken, cache, "demo", sources, limits, "data.caption_dropout=0", *changes)


def faults_of(config: RunConfig, folder: Path, steps: int) -> tuple[list[list[bool]], dict[str, int]]:
    """Whether each sample of the first steps trains, as workers learn it, and why others do not."""
    folder.mkdir()
    feeder = feeder_of(config, folder)
    feeder.start(0)
    found = []
    try:
        for step in range(steps):
            got: Any = feeder.batches(step)
            for item, value in zip(feeder.dataset.step(step).items, got.references, strict=True):
                latents = got.cached.get(("vae", item.id))
                texts = got.cached.get(("text", item.id), ())
                good = list(value.ok) if latents is None else [one.ok for one in latents]
                found.append([one and all(text.ok for text in texts[i : i + 1]) for i, one in enumerate(good)])
            feeder.release(step)
        return found, feeder.dataset.ledger.summary()["skipped"]
    finally:
        feeder._running.stop()


def test_a_caption_that_cannot_be_read_any_more_trains_nothing_whatever_is_cached(tmp_path: Path) -> None:
    """Its latents were taken out of the cache, with an empty text, while the account called it bad."""
    tar = tmp_path / "set" / "0.tar"
    tar.parent.mkdir()
    tar.write_bytes(shard(good(5)))
    config = config_of_broken(tar, tmp_path / "cache")
    without = replace(config, data=replace(config.data, cache=CacheConfig()))
    filled(config)
    before = tar.stat()
    tar.write_bytes(tar.read_bytes().replace(b"caption 1", b"caption \xff", 1))
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))  # the index is taken for that of this tar
    assert len(looked(config).untold) == 1
    runs = [faults_of(one, tmp_path / str(n), 4) for n, one in enumerate((without, config, from_cache(config)))]
    assert runs[0] == runs[1] == runs[2] and runs[0][1]["caption_not_utf8"] > 0


def test_a_clip_that_cannot_be_decoded_trains_nothing_in_either_run(broken: Path, tmp_path: Path) -> None:
    """And is counted under the same reason, by a run that decodes it and by one that takes all from the cache."""
    config = config_of_broken(broken, tmp_path / "cache")
    without = replace(config, data=replace(config.data, cache=CacheConfig()))
    _, answers = filled(config)
    faults = [fault for answer in answers for _, fault in answer.faults]
    assert faults and {fault.key for fault in faults} == {"c4"}
    (account, texts) = (looked(config).kinds[kind] for kind in ("latents", "text"))
    assert len(account.bad) == len(faults) and not account.missing and not texts.bad
    assert "and 1 bad" in check_only(from_cache(config), cuda=False)
    decoded, why = faults_of(without, tmp_path / "a", 4)
    taken, too = faults_of(from_cache(config), tmp_path / "b", 4)
    assert taken == decoded and too == why and sum(why.values()) == sum(not one for some in taken for one in some) > 0
    listed = [
        [json.loads(line) for line in (tmp_path / name / "bad.jsonl").read_text().splitlines()] for name in ("a", "b")
    ]
    assert listed[0] == listed[1]


def test_an_entry_that_is_damaged_in_the_run_is_a_bad_draw_of_it(clips: Path, tmp_path: Path) -> None:
    """Its results are there all the same, with weight 0: plans and calls of the step are those of any other."""
    config = from_cache(config_of(clips, tmp_path / "cache", "demo", "data.limits={max_bad_fraction: 1.0}"))
    filled(config)
    feeder = feeder_of(config, tmp_path)
    (item, *_) = feeder.dataset.step(0).items
    assert feeder._cache is not None
    names = feeder._cache.names(item)
    hurt = feeder._cache.cache._path("latents", names.latents[0])
    hurt.write_bytes(hurt.read_bytes()[:-1])
    feeder.start(0)
    try:
        got = feeder.batches(0)
        plans = [one.plan for one in feeder.items(0)]
    finally:
        feeder._running.stop()
    assert all(set(plan.cached) == set(BOTH) for plan in plans)
    results: Any = got.cached["vae", item.id]
    assert [one.ok for one in results] == [sample.content != item.samples[0].content for sample in item.samples]
    assert results[0].rows.shape == results[-1].rows.shape and not results[0].rows.any()
    (fault, *_) = feeder._look_up(item).faults
    assert fault.reason is Reason.NOT_CACHED and "its checksum is wrong" in fault.detail
    assert feeder.dataset.ledger.summary()["skipped"]["not_cached"] > 0
    assert not hurt.exists()
    with pytest.raises(ConfigError, match="lacks latents of 1 of 10 clips, the first is"):
        check_only(config, cuda=False)


# -- a run that takes all from the cache


@pytest.mark.parametrize("start", ["fixed", "3"])
def test_a_run_finds_every_entry_and_asks_for_no_pixel(clips: Path, tmp_path: Path, start: str) -> None:
    """In each of its steps, as planner, feeder and preview see them."""
    config = from_cache(config_of(clips, tmp_path / "cache", "demo-curriculum", f"data.start_frame={start}"))
    found, _ = filled(config)
    assert any("from frame" in found.name_of(one) for one in found.kinds["latents"].missing) == (start == "3")
    feeder = feeder_of(config, tmp_path)
    model, _ = resolve(config.model)
    previewed = items_from_data(feeder.dataset, 12, config, model)
    for step in range(12):
        items = feeder.dataset.step(step).items
        assert [one.plan for one in feeder.items(step)] == list(previewed[step])
        for item, plan in zip(items, previewed[step], strict=True):
            assert plan.cached == BOTH and not feeder._needs_pixels(item)
            assert not feeder._look_up(item).faults


@pytest.mark.parametrize("kept", [{"latents": False}, {"text": False}], ids=["texts", "latents"])
def test_what_the_cache_does_not_keep_is_encoded_in_steps(clips: Path, tmp_path: Path, kept: dict[str, bool]) -> None:
    config = config_of(clips, tmp_path / "cache")
    filled(config)
    feeder = feeder_of(from_cache(config, **kept), tmp_path)
    (plan, *_) = (one.plan for one in feeder.items(0))
    assert plan.cached == (("text",) if "latents" in kept else ("vae",))
    assert feeder._needs_pixels(feeder.dataset.step(0).items[0]) == ("latents" in kept)


def test_a_clip_that_begins_anywhere_counts_once_in_however_many_shapes(clips: Path, tmp_path: Path) -> None:
    found = looked(config_of(clips, tmp_path, "demo-curriculum", "data.start_frame=random"))
    cuts = [[cut.moves for cut in cuts] for _, cuts in every_row(found.dataset)]
    assert 0 < found.moving == sum(map(any, cuts)) < sum(map(sum, cuts))


def test_texts_alone_may_be_taken_by_a_run_whose_clips_begin_anywhere(clips: Path, tmp_path: Path) -> None:
    random = config_of(clips, tmp_path, "demo", "data.start_frame=random")
    filled(config_of(clips, tmp_path))
    found = looked(random)
    keep_filled(replace(found, kinds={"text": found.kinds["text"]}, moving=0))  # as the command has it
    with pytest.raises(ConfigError, match=r"random: of \d clips longer than their bucket every draw"):
        check_only(from_cache(random), cuda=False)
    assert "has all of" in check_only(from_cache(random, latents=False), cuda=False)


def test_a_run_that_lacks_entries_is_refused_with_their_number_the_first_and_the_command(
    clips: Path, tmp_path: Path
) -> None:
    config = from_cache(config_of(clips, tmp_path))
    with pytest.raises(ConfigError) as caught:
        check_only(config, cuda=False)
    said = str(caught.value)
    assert (
        "lacks 21 of 21 texts and latents of 10 of 10 clips" in said and "heddle data cache --config RUN.yaml" in said
    )
    filled(config)
    found = looked(config)
    lost = found.cache.cache._path("text", found.cache.text(""))
    lost.unlink()
    with pytest.raises(ConfigError, match="lacks 1 of 21 texts, the first is the caption ''"):
        check_only(config, cuda=False)


def test_a_cache_that_was_whole_is_not_asked_for_each_clip_again(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ten million clips every start and resume read all rows and captions for an hour or two."""
    given = config_of(clips, tmp_path / "cache", "demo", *SAMPLES, *held_out(clips))
    filled(given)
    config = from_cache(given)
    rows: list[int] = []
    read = Index._row

    def counting(index: Index, row: int, *given: Any) -> IndexRow:
        rows.append(index.ordinal)
        return read(index, row, *given)

    def asked(config: RunConfig) -> int:
        rows.clear()
        assert "has all of" in check_only(config, cuda=False)
        return len(rows) - held

    monkeypatch.setattr(Index, "_row", counting)
    held = 0
    first = asked(replace(config, validation=ValidationConfig()))
    assert first >= 10 and asked(replace(config, validation=ValidationConfig())) == 0
    assert asked(config) >= first, "held-out clips are other entries"
    held = asked(config)
    assert 0 < held < first and asked(config) == 0, "these alone, which are few"
    assert cache_preview(config) == (check_only(config, cuda=False), "")

    seldom = replace(config, data=replace(config.data, caption_dropout=0.0))
    assert asked(seldom) > 0 and asked(seldom) == asked(config) == 0, "each by its caption policy"
    for folder in ("shards", "index"):
        shutil.copytree(clips / folder, tmp_path / "moved" / folder)
    moved = from_cache(config_of(tmp_path / "moved", tmp_path / "cache"))
    with pytest.raises(ConfigError, match="lacks latents of 10 of 10 clips"):
        check_only(moved, cuda=False)
    store = looked(given).cache.cache
    lost = store._path("text", next(iter(store.listing("text").entries)))
    content = lost.read_bytes()
    lost.unlink()
    store.put("text", "ab" * 32, np.ones((4, 8), np.float32))  # as many as before
    for _ in range(2):
        with pytest.raises(ConfigError, match="lacks 1 of"):
            check_only(config, cuda=False)
    lost.write_bytes(content)
    assert asked(config) > 0 and asked(config) == 0, "whatever else is there"


def test_what_the_command_has_made_is_not_asked_for_by_the_first_run_either(
    broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of_broken(broken, tmp_path / "a")
    keep_filled(filled(config)[0])
    seen = looked(config).describe()
    found, _ = filled(other := config_of_broken(broken, tmp_path / "b"))
    found.cache.cache._path("text", found.kinds["text"].missing[0].key).unlink()
    keep_filled(found)
    with pytest.raises(ConfigError, match="lacks 1 of"):
        check_only(from_cache(other), cuda=False)
    found, _ = filled(other)
    found.cache.cache._path("text", next(iter(found.listed["text"].entries))).unlink()  # it was there at the look
    keep_filled(found)
    with pytest.raises(ConfigError, match="lacks 1 of"):
        check_only(from_cache(other), cuda=False)
    monkeypatch.setattr("app.kept.wanted._look", lambda *given: pytest.fail("each clip is asked for"))
    assert check_only(from_cache(config), cuda=False) == seen and "and 1 bad" in seen


def test_a_verdict_by_other_files_of_the_program_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two releases the version stays, and which entries are asked for may not."""
    WholeVerdict.of(tmp_path, "key", []).keep("all of them")
    assert WholeVerdict.of(tmp_path, "key", []).told() == "all of them"
    monkeypatch.setattr("app.kept.verdict.digest_of_program", lambda folders: "another")
    assert WholeVerdict.of(tmp_path, "key", []).told() == ""


def test_a_verdict_that_cannot_be_read_or_kept_is_none(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = from_cache(config_of(clips, tmp_path))
    filled(config_of(clips, tmp_path))
    told = check_only(config, cuda=False)
    (verdict,) = (tmp_path / "whole").iterdir()
    kept = verdict.read_bytes()
    for damaged in (b"", b"[]", kept[:-9], b'{"there": []}'):
        verdict.write_bytes(damaged)
        assert check_only(config, cuda=False) == told and verdict.read_bytes() == kept
    shutil.rmtree(verdict.parent)
    verdict.parent.touch()
    assert check_only(config, cuda=False) == told and "cannot be kept there" in caplog.text


SAMPLES = ["sample={prompts: [a red disc, a blue disc], negative_prompt: blurred, every: 100, steps: 2}"]


def held_out(clips: Path) -> list[str]:
    source = f"{{path: {clips / 'held-out' / 'shards'}, index: {clips / 'held-index'}, caption: 'json:captions'}}"
    return [f"validation={{sources: [{source}], every: 100, draws: 2}}"]


def test_prompts_and_held_out_clips_are_kept_too_where_a_run_makes_something_of_them(
    clips: Path, tmp_path: Path
) -> None:
    plain = looked(config_of(clips, tmp_path)).kinds
    more = looked(config_of(clips, tmp_path, "demo", *SAMPLES, *held_out(clips))).kinds
    assert more["latents"].wanted == plain["latents"].wanted + 3
    texts = {one.caption for one in more["text"].missing} - {one.caption for one in plain["text"].missing}
    assert {"a red disc", "a blue disc", "blurred"} < texts and len(texts) == 6


def test_texts_of_prompts_are_those_without_their_options(clips: Path, tmp_path: Path) -> None:
    prompts = "sample.prompts=[a red disc --w 64 --n torn, a red disc --d 4, a blue disc]"
    config = config_of(clips, tmp_path, "demo", *SAMPLES, prompts)
    assert set(live_texts(config)) == {"a red disc", "a blue disc", "torn", "blurred"}


def test_rows_of_prompts_are_those_of_the_encoder(clips: Path, tmp_path: Path) -> None:
    config = config_of(clips, tmp_path, "hunyuan-tiny", *SAMPLES)
    filled(config)
    model, _ = resolve(config.model)
    cache = cache_of(replace(config, model=model), config.data, cuda=False)
    kept = kept_texts(cache, live_texts(config), "float32")
    prompts, negative = config.sample.prompts, config.sample.negative_prompt
    ours = encode_prompts(kept, None, model, prompts, negative)
    theirs = encode_prompts(build_text(model.text, "cpu"), None, model, prompts, negative)
    for one, other in zip([*ours.prompts, ours.negative], [*theirs.prompts, theirs.negative], strict=True):
        assert torch.allclose(one.text, other.text, rtol=0, atol=OTHER_BATCH * float(other.text.abs().max()))
        assert one.vector is not None and other.vector is not None and one.vector.shape == other.vector.shape
        assert torch.allclose(one.vector, other.vector, rtol=0, atol=OTHER_BATCH)


def test_held_out_losses_of_kept_clips_are_those_of_encoded_ones_and_decode_nothing(
    clips: Path, tmp_path: Path
) -> None:
    config = config_of(clips, tmp_path, "hunyuan15-i2v-tiny", *held_out(clips))
    filled(config)
    model, geometry = resolve(config.model)
    resolved = replace(config, model=model)
    cache = cache_of(resolved, held_out_data(resolved), cuda=False)
    named = held_out_clips(resolved, geometry, cache)
    kept = KeptClips.over(cache, named, BOTH)
    assert kept.spares_pixels and len(named) == 2, "the still has no frame after its first"
    (host,) = make_hosts(1, torch.float32, train_config(), config=config.model)
    modules: Any = host.executor.modules
    part = HeldOutPart(train=config.train, draws=2, timeout_s=60.0, clips=tuple(named))
    theirs = part.run(modules, CPU)
    modules.vae = modules.text = SimpleNamespace()  # nothing is asked of them
    ours = replace(part, kept=kept).run(modules, CPU)
    assert len(ours.losses) == 4 and [one.bucket for one in ours.losses] == [one.bucket for one in theirs.losses]
    assert [one.loss for one in ours.losses] == pytest.approx([one.loss for one in theirs.losses], rel=1e-4)
    (path,) = {cache.cache._path("latents", name) for name in named[0].kept.latents}  # type: ignore[union-attr]
    path.unlink()
    fewer = replace(part, kept=kept).run(modules, CPU)
    assert len(fewer.losses) == 2 and fewer.unread == (named[0].bucket,)


SPARED = {
    "nothing": (Spared(), (True, True), {"dit", "vae", "text"}),
    "all": (Spared(cascades=BOTH, encoders=BOTH), (False, False), {"dit"}),
    "all but the VAE of samples": (Spared(cascades=BOTH, encoders=("text",)), (True, False), {"dit"}),
    "texts": (Spared(cascades=("text",), encoders=("text",)), (True, False), {"dit", "vae"}),
}


@pytest.mark.parametrize("case", SPARED)
def test_predictions_count_the_encoders_and_cascades_that_there_are(case: str, tmp_path: Path) -> None:
    without, (vae, text), modules = SPARED[case]
    model, geometry = resolve(folders(tmp_path))
    found = forecast(model, geometry, train_config(), [(9, 32, 32)], (1,), True, without)
    assert (found.vae_gib > 0, found.text_gib > 0) == (vae, text)
    assert {module for module, _ in found.needs.predicted} == modules
    assert (found.host_uploads_gib > 0) == ("vae" in modules)


def test_what_workers_load_for_samples_is_counted(clips: Path, tmp_path: Path) -> None:
    plain = from_cache(config_of(clips, tmp_path))
    assert spared(plain) == Spared(cascades=BOTH, encoders=BOTH)
    sampled = from_cache(config_of(clips, tmp_path, "demo", *SAMPLES))
    assert spared(sampled) == Spared(cascades=BOTH, encoders=("text",)), "the VAE decodes"
    assert spared(config_of(clips, tmp_path, "demo", *SAMPLES)) == Spared()
    with pytest.raises(ConfigError, match="sees with a picture: the cache has none of them"):
        config_of(clips, tmp_path, "hunyuan15-i2v-tiny", "data.cache.only=true", *SAMPLES, f"sample.images=[{clips}]")


# -- what is said


def said_by(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    told = done.output if done.exception is None or isinstance(done.exception, SystemExit) else str(done.exception)
    return (done.exit_code if not isinstance(done.exception, ConfigError) else Exit.USAGE), " ".join(told.split())


def file_of(config: RunConfig, folder: Path) -> Path:
    file = folder / "run.yaml"
    file.write_text(config.to_yaml())
    return file


def test_a_run_without_a_cache_or_with_nothing_to_keep_is_refused(clips: Path, tmp_path: Path) -> None:
    file = file_of(config_of(clips, tmp_path / "cache"), tmp_path)
    asked = ("data", "cache", "--config", str(file), "--dry-run")
    refusals = {
        ("--set", "data.cache.path=''"): "data.cache.path is empty: nothing can be kept. Give a folder",
        ("--set", "data.cache.latents=false", "--set", "data.cache.text=false"): "nothing is kept",
        ("--set", "data.start_frame=random", "--set", "data.cache.text=false"): "set data.start_frame: fixed",
    }
    for more, sentence in refusals.items():
        code, told = said_by(*asked, *more)
        assert code == Exit.USAGE and sentence in told, told
    code, told = said_by(*asked, "--set", "data.start_frame=random")
    assert code == 0 and "texts alone are kept" in told and "clips 10" not in told


def test_a_disk_without_room_is_named_before_anything_is_encoded(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_of(config_of(clips, tmp_path / "cache"), tmp_path)
    code, told = said_by("data", "cache", "--config", str(file), "--dry-run")
    assert code == 0 and "clips 10 wanted = 0 there + 10 missing" in told and not (tmp_path / "cache").exists()
    monkeypatch.setattr(command.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 10))
    code, told = said_by("data", "cache", "--config", str(file), "--dry-run")
    assert code == Exit.USAGE and "has 0.0 MiB free, and the missing entries take" in told


def test_predicted_bytes_are_those_that_are_written(clips: Path, tmp_path: Path) -> None:
    """For latents to the byte; for texts as captions are long, with one token for each of their letters here."""
    found, _ = filled(config_of(clips, tmp_path))
    cache = found.cache.cache
    assert cache.size("latents")[1] == found.kinds["latents"].missing_bytes
    assert cache.size("text")[1] == pytest.approx(found.kinds["text"].missing_bytes, rel=0.1)


def test_a_dry_run_says_what_is_missing_and_counts_no_encoder(clips: Path, tmp_path: Path) -> None:
    large = ["workers.memory_gib=4", "model.text.d_model=256", "model.text.num_layers=3"]
    config = config_of(clips, tmp_path / "cache", "demo", *large, "planner.strategy=static")
    file = file_of(replace(config, run=replace(config.run, dir=str(tmp_path / "runs"))), tmp_path)
    asked = ("train", "--config", str(file), "--dry-run")
    code, told = said_by(*asked)
    assert code == 0 and "worst vae cascade" in told and "text encoder 0.00" not in told
    code, told = said_by(*asked, "--set", "data.cache.only=true")
    assert code == Exit.USAGE and "heddle data cache" in told
    filled(config)
    code, told = said_by(*asked, "--set", "data.cache.only=true")
    assert code == 0 and "cache has all of 21 texts, 10 clips" in told
    assert "VAE 0.00, text encoder 0.00" in told and "worst vae" not in told and "worst text" not in told


@pytest.mark.long
def test_a_run_that_fits_without_encoders_alone_is_refused_with_that_way(clips: Path, tmp_path: Path) -> None:
    large = ["workers.memory_gib=0.3", "model.text.d_model=1024", "model.text.num_layers=8", "planner.strategy=static"]
    config = config_of(clips, tmp_path / "cache", "demo", *large)
    file = file_of(replace(config, run=replace(config.run, dir=str(tmp_path / "runs"))), tmp_path)
    with pytest.raises(PlanError, match=r"Or train from a cache that `heddle data cache` has filled"):
        dry_run(file, [])
    with pytest.raises(ConfigError, match="lacks 21 of 21 texts"):  # what it takes of memory is there
        dry_run(file, ["data.cache.only=true"])
