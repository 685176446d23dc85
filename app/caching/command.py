"""`heddle data cache`: encodes what a run may draw into `data.cache.path`, before it trains.

heddle data cache --config RUN.yaml --dry-run        # what is missing, and the bytes that it will take
heddle data cache --config RUN.yaml
heddle train --config RUN.yaml --set data.cache.only=true
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from actors.plan.types import ENCODED, Module
from app.data_tools.printing import print_ledger
from app.inputs.checkpoints import data_before, most_steps, steps_begun
from app.inputs.profiles import gpu_of
from app.inputs.synthetic import make_missing
from app.kept.wanted import NO_SOURCE, CacheLook, WantedEntry, keep_filled, look
from app.records.progress import ProgressBar
from app.settings.config import RunConfig, check_read, from_here
from app.settings.out_files import begin_list
from app.settings.terminal import say
from data.cache import EntryKind
from data.config import CacheConfig
from data.dataset.every_draw import item_of
from data.decode import fault_of
from data.ledger import Ledger
from ops.counted import counted
from ops.listing import nearest_folder
from ops.typed import ConfigError
from ops.units import GIB, MIB

if TYPE_CHECKING:
    from actors.pool.room import Need
    from app.caching.worker import FilledUnit, FillJob

_LINE_S = 30.0  # between two lines of progress where there is no terminal
_WORDS = {"latents": "clips", "text": "texts"}


class NotKept(RuntimeError):
    """The disk did not take some entries."""


def cache(path: Path, overrides: Sequence[str], *, cluster: str | None, dry_run: bool, again: bool, out: Path) -> None:
    """Body of the command. Raises ConfigError for a run that has no cache or nothing to keep in it, and where the disk
    is too small; DataError where more clips are bad than `data.limits` allow; FillError, NotKept."""
    config = from_here(RunConfig.load(path, overrides))
    check_read(config, steps_begun(config), data_before(config), most_steps(config))
    modules = _kept_modules(config)
    make_missing(config.data.sources)
    if dry_run:
        found, _ = _look(config, modules, cuda=bool(gpu_of(config)), again=again, out=None)
        _print_found(found)
        _check_room(found, config.data.cache)
        return
    from app.run.borrowed_ray import borrowed_ray

    begin_list(out)
    with borrowed_ray(cluster, _cpus(config)):
        config = _on_cluster(config)
        found, modules = _look(config, modules, cuda=config.workers.device == "cuda", again=again, out=out)
        _print_found(found)
        _check_room(found, config.data.cache)
        ledger = _file_known(found)
        try:
            done = _fill(config, found, ledger)
        finally:
            ledger.close()
    _print_end(found, done, ledger, out)
    ledger.check()
    ledger.check_limits()
    _check_kept(done, config.data.cache)
    keep_filled(found)
    _say(f"next      {_next(path, overrides, config, modules)}")


def _say(text: str) -> None:
    """What hours have made is not lost for a line that nobody reads."""
    say(text, sys.stdout)


def _kept_modules(config: RunConfig) -> tuple[Module, ...]:
    """Modules of which the cache keeps results. Raises ConfigError where there is no cache, or nothing is kept."""
    kept = config.data.cache
    if not kept.path:
        raise ConfigError("data.cache.path is empty: nothing can be kept. Give a folder: --set data.cache.path=cache.")
    if not (kept.latents or kept.text):
        raise ConfigError("latents and text of data.cache are both false: nothing is kept. Set one of them to true.")
    asked: dict[Module, bool] = {"text": kept.text, "vae": kept.latents}
    return tuple(module for module in ENCODED if asked[module])


def _look(
    config: RunConfig, modules: tuple[Module, ...], *, cuda: bool, again: bool, out: Path | None
) -> tuple[CacheLook, tuple[Module, ...]]:
    """What is there and missing of what can be kept, and of which modules that is everything. Where every draw takes
    another part of longer clips, texts alone are. Raises ConfigError where that leaves nothing."""
    with ProgressBar("looking") as progress:
        found = look(config, cuda=cuda, modules=modules, bad_list=out, progress=progress)
    for account in found.kinds.values() if again else ():
        account.missing += account.bad
        account.bad.clear()
    if not found.moving:
        return found, modules
    why = (
        f"data.start_frame is random: of {counted(found.moving, 'clip')} longer than their bucket every draw takes "
        f"another part, the first is {found.moving_name}"
    )
    if "text" not in modules or found.cache.encoders.picture_rows:
        raise ConfigError(f"{why}. Nothing of them can be kept beforehand: set data.start_frame: fixed, or a number.")
    keeps = "data.start_frame: fixed, or a number, keeps both"
    print(f"note: {why}. Their latents cannot be all there: texts alone are kept. {keeps}.")
    only_text: tuple[Module, ...] = ("text",)
    return replace(found, kinds={"text": found.kinds["text"]}, moving=0), only_text


def _cpus(config: RunConfig) -> int:
    """Logical CPUs of a Ray of this machine."""
    workers = config.workers
    return max(os.cpu_count() or 1, math.ceil(workers.max * workers.cpus_per_worker))


def _on_cluster(config: RunConfig) -> RunConfig:
    """The config with the device of the workers on this cluster, as a run has it there."""
    from actors.pool.device import workers_device
    from actors.pool.workers import uses_gpu
    from app.run.cluster import check_device, on_usable

    check_device(config)
    if not uses_gpu(config.workers):
        return replace(config, workers=replace(config.workers, device="cpu"))
    seen = workers_device(config, Path(config.data.cache.path), tell=lambda text: print(f"note: {text}", flush=True))
    config = on_usable(config, seen)
    if uses_gpu(config.workers):
        return replace(config, workers=replace(config.workers, device="cuda"))
    return config


def _print_found(found: CacheLook) -> None:
    for kind, account in found.kinds.items():
        bad = f"{len(account.bad):,} bad + " if account.bad else ""
        takes = f", {'about ' * (kind == 'text')}{size(account.missing_bytes)}" if account.missing else ""
        print(
            f"{_WORDS[kind]:<9} {account.wanted:,} wanted = {account.there.total():,} there + {bad}"
            f"{len(account.missing):,} missing{takes}"
        )
    if found.untold:
        first = found.untold[0]
        print(f"captions  {len(found.untold):,} cannot be read, the first is {first.where}: their draws train nothing")


def _check_room(found: CacheLook, kept: CacheConfig) -> None:
    """Raises ConfigError where the disk has too little room for what is missing."""
    needed = sum(account.missing_bytes for account in found.kinds.values())
    free = shutil.disk_usage(nearest_folder(Path(kept.path).expanduser())).free
    print(f"storage   {size(needed)} for {kept.path}, {size(free)} free, of which {kept.min_free_gib:g} GiB stay free")
    if needed and needed + kept.min_free_gib * GIB > free:
        raise ConfigError(
            f"data.cache.path {kept.path} has {size(free)} free, and the missing entries take {size(needed)} beside "
            f"data.cache.min_free_gib {kept.min_free_gib:g}. Give a folder on another disk, or keep texts alone "
            f"(data.cache.latents: false)."
        )


def _check_kept(done: _Filled, kept: CacheConfig) -> None:
    """Raises NotKept where entries are missing still."""
    if done.absent:
        raise NotKept(
            f"{done.absent:,} of {done.missing:,} entries could not be written into {kept.path}: {done.why}. "
            f"Free space, and give the same command again."
        )


@dataclass(kw_only=True)
class _Filled:
    """What has become of the missing entries so far."""

    missing: int
    began: float
    workers: int = 0
    new: Counter[EntryKind] = field(default_factory=Counter)
    num_bytes: int = 0
    there: int = 0  # that other processes have made meanwhile
    bad: int = 0
    failed: int = 0  # that the disk did not take
    why: str = ""  # it did not take the first of them, or takes no more
    seconds: float = 0.0

    @property
    def ended(self) -> int:
        return self.new.total() + self.there + self.bad + self.failed

    @property
    def absent(self) -> int:
        """Entries that the disk did not take, or that were not made any more as it was full."""
        return self.failed + self.missing - self.ended

    def add(self, entries: Sequence[WantedEntry], answer: FilledUnit) -> None:
        self.new[entries[0].kind] += len(answer.kept)
        self.num_bytes += answer.num_bytes
        self.there += len(answer.there)
        self.bad += len(answer.faults)
        self.failed += len(answer.failed)
        self.why = self.why or answer.why
        self.seconds = time.monotonic() - self.began

    def describe(self) -> str:
        """How far it is."""
        left = self.seconds / self.ended * (self.missing - self.ended) if self.ended else 0.0
        return (
            f"{self.ended:,} of {self.missing:,} entries, {size(self.num_bytes)}, {timedelta(seconds=round(left))} left"
        )


def _fill(config: RunConfig, found: CacheLook, ledger: Ledger) -> _Filled:
    """Make what is missing. Raises DataError when more clips are bad than the limits allow."""
    done = _Filled(missing=sum(len(account.missing) for account in found.kinds.values()), began=time.monotonic())
    if not done.missing:
        return done
    from app.caching.fill import fill

    done.workers, threads = _capacity(config), 1 + _decoders(config)
    said = done.began
    with _signed(config, found) as job, ProgressBar("encoding") as progress:
        answers = fill(job, found, done.workers, threads=threads, need=_need(config), tell=_say)
        with closing(answers):
            try:
                for entries, answer in answers:
                    done.add(entries, answer)
                    progress(done.ended, done.missing)
                    _file(ledger, entries, answer)
                    if answer.full:  # what follows would be made for nothing
                        return done
                    if time.monotonic() - said >= _LINE_S:
                        said = time.monotonic()
                        _say(done.describe())
            except BaseException:
                _say(f"stopped with {done.ended:,} of {done.missing:,} entries; the same command goes on")
                raise
    return done


def _file_known(found: CacheLook) -> Ledger:
    """The account of the data with what a look at the cache has told of its samples. Raises DataError beyond the
    limits."""
    ledger = found.dataset.ledger
    for account in found.kinds.values():
        for one in account.bad:
            if one.cut is not None:
                error = found.cache.cache.why_absent(one.kind, one.key)
                (clip,) = item_of(found.dataset, "cache", [one.cut]).job.clips
                ledger.schedule(1, one.source)
                ledger.skip(fault_of(clip, error.reason, error.offset, error.detail))
    for fault in found.untold:
        ledger.schedule(1, fault.source)
        ledger.skip(fault)
    for account in found.kinds.values():  # good ones last: bad ones that are listed first are none in a row
        for source, count in account.there.items():
            if source != NO_SOURCE:
                ledger.schedule(count, source)
                ledger.deliver(count, source)
    return ledger


def _file(ledger: Ledger, entries: Sequence[WantedEntry], answer: FilledUnit) -> None:
    """Count the clips of a unit in the account: those of `data.sources`."""
    for _, fault in answer.faults if entries[0].source != NO_SOURCE else ():
        ledger.schedule(1, fault.source)
        ledger.skip(fault)
    good = Counter(entries[place].source for place in (*answer.kept, *answer.there))
    for source, count in good.items():
        if source != NO_SOURCE:
            ledger.schedule(count, source)
            ledger.deliver(count, source)
    ledger.check_limits()


def _capacity(config: RunConfig) -> int:
    """Workers that the cluster has room for, at most `workers.max`. Raises ConfigError where it has none."""
    from actors.ray_calls import nodes

    need = _need(config)
    room = sum(need.capacity(node["Resources"]) for node in nodes() if node["Alive"])
    if not room:
        raise ConfigError(
            f"a worker takes {need.cpus:g} CPUs{' and a GPU' * bool(need.gpus)} (workers.cpus_per_worker), and no node "
            f"of this Ray has room for one. Give another cluster (--cluster)."
        )
    return min(room, config.workers.max)


def _decoders(config: RunConfig) -> int:
    """Threads of a worker that decode and write while one encodes: `auto` is what its node leaves beside its workers
    and what Ray reserves for it, shared among the workers there, of the node that has least."""
    from actors.feed.step_source import decode_nodes
    from actors.ray_calls import nodes
    from data.engines.machine import number_of, settled

    engine, need = config.data.engine, _need(config)
    if engine.decode_workers != "auto":
        return engine.decode_workers
    found = []
    for node in nodes():
        here = min(config.workers.max, need.capacity(node["Resources"])) if node["Alive"] else 0
        if here:
            alone = replace(config.workers, max=here, min=1)
            (left,) = decode_nodes([node], alone, gpu=bool(need.gpus))
            of_node = replace(left, cpus=left.cpus + here * need.cpus)  # it decodes in what is reserved for it
            found.append(max(1, number_of(settled(engine, [of_node]).decode_workers) // here))
    return min(found, default=1)


def _need(config: RunConfig) -> Need:
    from actors.pool.room import Need

    return Need(config.workers.cpus_per_worker, 1.0 if config.workers.device == "cuda" else 0.0)


@contextmanager
def _signed(config: RunConfig, found: CacheLook) -> Iterator[FillJob]:
    """The job of all workers, for as long as a file in the folder tells them that it is this one."""
    from actors.planning.demand import clips_of, largest_upload
    from app.caching.worker import FillJob

    root = found.cache.cache.root
    root.mkdir(parents=True, exist_ok=True)
    sign = root / f".filling.{uuid.uuid4().hex[:12]}"
    sign.touch()
    cuda = config.workers.device == "cuda"
    try:
        yield FillJob(
            model=config.model,
            train=config.train,
            workers=config.workers,
            cache=config.data.cache,
            clip_timeout_s=config.data.engine.clip_timeout_s,
            sign=sign.name,
            largest_upload=largest_upload(clips_of(config.data, found.dataset.geometry)) if cuda else 0,
        )
    finally:
        sign.unlink(missing_ok=True)


def _print_end(found: CacheLook, done: _Filled, ledger: Ledger, out: Path) -> None:
    kinds = " and ".join(f"{done.new[kind]:,} {_WORDS[kind]}" for kind in found.kinds)
    there = sum(account.there.total() for account in found.kinds.values()) + done.there
    bad = sum(len(account.bad) for account in found.kinds.values()) + done.bad
    took = f" in {done.seconds:.1f} s by {counted(done.workers, 'worker')}" if done.workers else ""
    failed = f", {done.absent:,} not written" if done.absent else ""
    _say(f"cache     {kinds} new, {there:,} there already, {bad:,} bad{failed}; {size(done.num_bytes)} written{took}")
    print_ledger(ledger, "entries {} = good {} + bad {}", _say)
    if bad:
        _say("          of bad clips a run trains nothing; `--again` tries them once more")
    if out.exists():
        _say(f"faults    {out}")


def _next(path: Path, overrides: Sequence[str], config: RunConfig, modules: Sequence[Module]) -> str:
    """The command that trains from the cache alone."""
    settings = list(overrides)
    if "vae" not in modules and config.data.cache.latents:
        settings.append("data.cache.latents=false")
    if not config.data.cache.only:
        settings.append("data.cache.only=true")
    given = [word for setting in settings for word in ("--set", setting)]
    return shlex.join(["heddle", "train", "--config", str(path), *given])


def size(num_bytes: int) -> str:
    """Such as 3.2 GiB, 410 MiB."""
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:,.1f} MiB"
