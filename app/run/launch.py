"""A run from its config to its exit code: what is checked before it starts, in order, and what it prints at its end.

`app/run/ray_train.py` starts the controller and follows the run; read on in `app/run/controller_process.py`, which is
its process, and in `actors/run/controller.py`.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from actors.outcome import Exit, Outcome
from actors.plan.types import Cluster
from actors.pool.requested_size import forget_size
from app.inputs.batches import batch_limits, device_gib, is_open, with_limits, with_limits_of
from app.inputs.checkpoints import (
    check_same_weights,
    data_before,
    earlier_checkpoint,
    most_steps,
    note_most_steps,
    steps_begun,
)
from app.inputs.cluster import given_cluster
from app.inputs.compiling import with_compiling
from app.inputs.first_state import with_first_state
from app.inputs.synthetic import make_missing
from app.run.apart import is_inner, run_apart
from app.run.cluster import (
    check_capacity,
    check_device,
    check_nodes,
    connect,
    is_on_a_cluster,
    joined,
    on_usable,
    shut_down_ray,
)
from app.run.controller_process import CONTROLLER, CONTROLLER_S, DRIVER, code_of
from app.run.copies import keep_apart
from app.run.going_back import set_aside
from app.run.leftovers import end_leftovers
from app.run.lock import FolderHeld, FolderLock, holder, lock_path
from app.run.memory import check_memory
from app.run.outcomes import ALL_HAPPENED, OUTCOME, note_start, tell_failure, told_so_far, worth_keeping
from app.run.ray_train import follow_run
from app.run.signals import RunSignals
from app.settings.config import RunConfig, check_read, from_here
from app.settings.errors import one_line
from app.settings.notes import notes, sample_notes
from app.settings.packages import check_installed
from app.settings.resume import check_resume
from app.settings.run_folder import check_run_dir, prepare_run_dir, run_dir
from app.settings.terminal import say
from app.validation.clips import check_held_out
from data.storage import check_there
from ops.code_path import UPLOADED
from ops.counted import counted

if TYPE_CHECKING:
    from actors.pool.device import WorkersDevice

log = logging.getLogger(__name__)

_DRIVER_S = 3.0  # a run that was killed frees its folder within this


def train(
    config_path: str | Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
    back_to: int | None = None,
) -> int:
    """Run to the end. Returns the exit code; raises our own errors for what is found wrong before the start. `back_to`:
    a resume goes on from the checkpoint after as many steps."""
    config = from_here(RunConfig.load(config_path, overrides))
    check_read(config, *((steps_begun(config, back_to), data_before(config), most_steps(config)) if resume else ()))
    check_installed(config.track)
    given_cluster(config)
    check_run_dir(config, resume=resume, overwrite=overwrite)
    earlier_checkpoint(config, back_to, resume=resume, verify=False)  # `_run` reads it
    if is_inner() or is_on_a_cluster():
        with RunSignals() as signals:
            return _run(config, signals, resume=resume, overwrite=overwrite, back_to=back_to)
    if logging.getLogger("app").level == logging.DEBUG:
        os.environ["HEDDLE_DEBUG"] = "1"
    options = [word for override in overrides for word in ("--set", override)]
    options += ["--resume"] * resume + ["--overwrite"] * overwrite
    options += ["--back-to", str(back_to)] if back_to is not None else []
    return run_apart(["-m", "app.train", "--config", str(config_path), *options])


def _run(config: RunConfig, signals: RunSignals, *, resume: bool, overwrite: bool, back_to: int | None) -> int:
    """Take the locks of the run's folder, connect to Ray, run to the end, leave Ray. Returns the exit code."""
    folder = run_dir(config)
    with FolderLock(lock_path(folder, DRIVER)) as lock, FolderLock(lock_path(folder, CONTROLLER)) as predecessor:
        lock.take(_DRIVER_S, _note)
        check_run_dir(config, resume=resume, overwrite=overwrite)
        earlier = earlier_checkpoint(config, back_to, resume=resume)
        config, settled = _settled(config, folder, resume=resume)
        changes = check_resume(config, checkpoint=earlier) if resume else []
        predecessor.take(CONTROLLER_S, _note)  # of a driver that was killed: it ends soon after
        fresh = not folder.exists()
        _say_before(config, resume=resume)
        for said in settled:
            _note(said)
        with _told_in(folder if resume and not fresh else None):
            _check_files(config)  # before Ray starts, and an earlier run's files go
            if resume:
                check_same_weights(config, earlier)
            say("connecting to Ray" if is_on_a_cluster() else "starting Ray on this machine", sys.stdout)
            try:
                with signals.while_ray_starts():
                    connect(config)
                config, device = _fitted_to_cluster(config, folder, fresh=fresh)
                _take_folder(config, folder, device, predecessor, earlier, resume=resume, overwrite=overwrite)
                told_before = told_so_far(folder)
                outcome = follow_run(config, folder, lock.token, changes, _note, signals)
            finally:
                signals.over()
                shut_down_ray()
                if fresh and not lock.lost and not worth_keeping(folder):
                    shutil.rmtree(folder, ignore_errors=True)
        if not lock.lost and holder(lock_path(folder, CONTROLLER)) is None:
            tell_failure(folder, outcome, told_before)  # the controller may have had no recorder
    say(last_words(outcome, folder), sys.stderr if outcome.code else sys.stdout)
    return outcome.code


def _settled(config: RunConfig, folder: Path, *, resume: bool) -> tuple[RunConfig, list[str]]:
    """The config with one checkpoint in `train.init_from` and a decided `model.dit.compile`, and a note of each. A
    resumed run keeps what it has decided before, limits of batches among it."""
    config = with_limits_of(config, folder) if resume else config
    config, begins = with_first_state(config, folder if resume else None)
    config, decided = with_compiling(config, folder if resume else None)
    return config, [note for note in (begins, decided) if note]


def _fitted_to_cluster(config: RunConfig, folder: Path, *, fresh: bool) -> tuple[RunConfig, WorkersDevice]:
    """The config with this cluster's device and limits of batches, and that device. Raises our own errors for what the
    cluster cannot run; `fresh`: the run has no folder yet."""
    check_device(config)
    check_nodes(config)
    device = _device(config, folder)
    config = on_usable(config, device)
    config = _with_limits(config, device)
    check_memory(config, device, fresh=fresh)
    _check_cache(config)
    return config, device


def _take_folder(
    config: RunConfig,
    folder: Path,
    device: WorkersDevice,
    predecessor: FolderLock,
    earlier: Path | None,
    *,
    resume: bool,
    overwrite: bool,
) -> None:
    """Make the folder this run's, and have its controller take the lock that `predecessor` holds: end what an earlier
    run has left running, write config.yaml, go back to the checkpoint `earlier` if one is given."""
    if copied := keep_apart(folder):
        _note(copied)
    end_leftovers(config, overwrite=overwrite or earlier is not None)
    prepare_run_dir(config, resume=resume, overwrite=overwrite)
    keep_apart(folder)  # remembers where a new folder lies
    if resume:
        note_most_steps(config)
    if earlier is not None and (moved := set_aside(folder, earlier)):
        _note(moved)
    device.keep(folder)
    (folder / OUTCOME).unlink(missing_ok=True)
    forget_size(folder)
    joined().write(folder)
    predecessor.release()
    check_capacity(config)
    note_start(folder)


@contextmanager
def _told_in(folder: Path | None) -> Iterator[None]:
    """Write an error that ends the start, before a controller exists, into the folder's events.jsonl: for a resumed run
    that file may be all that anyone watches. Not if another live run holds the folder."""
    told_before = told_so_far(folder) if folder is not None else 0
    try:
        yield
    except FolderHeld:
        raise
    except Exception as error:
        if folder is not None:
            ended = Outcome(code=code_of(error, folder), reason=one_line(error), last_step=-1)
            tell_failure(folder, ended, told_before)
        raise


def last_words(outcome: Outcome, folder: Path) -> str:
    """What a run in `folder` says when it has ended. One that was stopped is no error."""
    steps = counted(outcome.last_step + 1, "step")
    if outcome.code == Exit.RESUMABLE and outcome.reason == ALL_HAPPENED:
        return f"{outcome.reason}. It has {steps}."
    if outcome.code == Exit.RESUMABLE:
        return f"{outcome.reason.rstrip('.')}. It has {steps}; the same command with --resume goes on from there."
    if outcome.code:
        return f"error: {outcome.reason}"
    done = f"done: {steps}. Next: "
    report, sample = ["heddle", "report", str(folder)], ["heddle", "sample", "--checkpoint", str(folder)]
    return f"{done}{shlex.join(report)}\n{' ' * len(done)}{shlex.join(sample)}"


def _check_files(config: RunConfig) -> None:
    """Raises FileNotFoundError or ValueError, one sentence, for files of the model that are missing or not whole, for
    settings that name nothing in it, and for data that is missing; the demo's is made."""
    from ops.models.folders import check_weights, resolve
    from ops.models.load import check_factors, check_kept, check_trained

    model, _ = resolve(config.model)
    check_weights(model)
    check_factors(model.dit)
    check_kept(model.dit)
    check_trained(model.dit, config.train.optimizer.kind)
    make_missing(config.data.sources)
    if not is_on_a_cluster():  # whose nodes may see more than this machine
        for source in (*config.data.sources, *(config.validation.sources if config.validation.every else ())):
            check_there(source.path)
        check_held_out(config)


def _check_cache(config: RunConfig) -> None:
    """Raises ConfigError where a run that trains from its cache alone would miss an entry: asked of a node of the
    cluster, whose folders may be others than this machine's."""
    from actors.plan.spared import from_cache
    from actors.pool.workers import uses_gpu
    from actors.ray_calls import get, remote_of
    from app.kept.wanted import check_only

    if not from_cache(config.data.cache):
        return
    cuda = uses_gpu(config.workers)
    if is_on_a_cluster():
        told = get(remote_of(check_only).options(num_cpus=0.1, max_retries=0).remote(config, cuda=cuda))
    else:
        told = check_only(config, cuda=cuda)
    say(told, sys.stdout)


def _device(config: RunConfig, folder: Path) -> WorkersDevice:
    """What the workers compute on; a note where plans have to assume how fast that is."""
    from actors.planning.options import assumption
    from actors.pool.device import workers_device

    found = workers_device(config, folder, tell=_note)
    if found.assumed and not config.planner.profile:
        _note(assumption(found.name))
    return found


def _with_limits(config: RunConfig, device: WorkersDevice) -> RunConfig:
    """The config with numbers in place of each `data.batch: auto`, as config.yaml will have them."""
    from actors.planning.batching import seconds_of
    from actors.planning.options import profile_of
    from actors.ray_calls import gpus_of_a_node
    from ops.models.folders import resolve

    before = {name: limits for name, limits in batch_limits(config).items() if is_open(limits)}
    if not before:
        return config
    model, geometry = resolve(config.model)
    profile = profile_of(config.planner, model, geometry, device.name, config.train, device.measured)
    cluster = given_cluster(config) or Cluster(nodes=(gpus_of_a_node(),))
    found, fit = with_limits(config, model, geometry, profile, cluster)
    for name, limits in ((name, batch_limits(found)[name]) for name in before):
        source = ""
        if fit is not None and name == "data.batch":
            source = f" for {seconds_of(limits, fit):.3g} s a batch ({fit.source}, {fit.quality})"
        _note(
            f"{name}: auto is memory_tokens {limits.memory_tokens:,.0f}, compute {limits.compute:.4g}, exponent "
            f"{limits.exponent:g}{source}"
        )
    if device_gib(config)[0] is None:
        _note(
            "the memory of the workers' devices is not known here: memory_tokens is as set, not found. "
            "workers.memory_gib says it."
        )
    return found


def _say_before(config: RunConfig, *, resume: bool) -> None:
    if UPLOADED in config.run.dir:
        _note(
            f"this run lies in the upload of its job, which Ray deletes in time: {config.run.dir}. Give a "
            f"folder that stays and that all nodes see: --set run.dir=/shared/runs"
        )
    if resume and not (run_dir(config) / "config.yaml").is_file():
        _note(f"there is no run {run_dir(config)} to resume; it starts anew, at step 0")
    for note in [*notes(config), *sample_notes(config)]:
        _note(note)


def _note(text: str) -> None:
    say(f"note: {text}", sys.stdout)
