"""`heddle prove`: some steps of a run on this cluster twice, once undisturbed and once through losses, and whether both
were the same training."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from actors.outcome import Exit
from actors.plan.spared import comes_whole
from actors.state.checkpoint_files import CheckpointError
from app.inputs.batches import batch_limits
from app.proof.disturbance import Disturber
from app.proof.verdict import table, verdict
from app.records.rundir import RunDir
from app.report.compare import write_comparison
from app.run.apart import signal_code
from app.run.launch import train
from app.settings.config import RunConfig, from_here
from app.settings.files import run_name_override
from app.settings.out_files import put_text
from app.settings.run_folder import check_run_dir
from app.settings.terminal import say
from ops.typed import ConfigError

CALM, DISTURBED = "calm", "disturbed"
QUARTERS = 4  # of the steps: to each of three disturbances, and from the last to the end
MOST = 100  # times --steps: of tiny models many steps go by while a worker starts anew


def prove(
    config_path: Path, overrides: Sequence[str], steps: int, out: Path | None, page: Path | None, *, overwrite: bool
) -> int:
    """Train both runs, print the verdict, and write its figures (JSON) and a page. Returns the exit code: that of a run
    that has ended early, or 1 where the runs were not the same training."""
    own = from_here(RunConfig.load(config_path, overrides))
    common = settings_of(own, steps)
    settings = {kind: [*overrides, *common, run_name_override(f"{own.run.name}-{kind}")] for kind in (DISTURBED, CALM)}
    folders = {}
    for kind in settings:
        config = RunConfig.load(config_path, [*settings[kind], f"train.steps={steps}"])
        folders[kind] = check_run_dir(from_here(config), overwrite=overwrite)
    disturbance = Disturber(folders[DISTURBED], steps // QUARTERS, own.workers.min)
    say(f"{DISTURBED}: {folders[DISTURBED]}, of open length: ended when all was done that disturbs it", sys.stdout)
    with disturbance:
        code = train(config_path, [*settings[DISTURBED], f"train.steps={MOST * steps}"], overwrite=overwrite)
    if disturbance.failed or not disturbance.all_done or signal_code() or code != Exit.RESUMABLE:
        say(f"not proven: {disturbance.failed or 'the run has ended early'}", sys.stdout)
        return Exit.FAILURE if disturbance.failed else signal_code() or code or Exit.FAILURE
    taken = sum(1 for _ in RunDir.open(folders[DISTURBED]).metrics())
    say(f"{CALM}: {folders[CALM]}", sys.stdout)
    if code := train(config_path, [*settings[CALM], f"train.steps={taken}"], overwrite=overwrite) or signal_code():
        say("not proven: the run has ended early", sys.stdout)
        return code
    try:
        found = verdict(folders[CALM], folders[DISTURBED], own.train)
    except CheckpointError as error:
        say(f"not proven: {error}", sys.stdout)
        return Exit.FAILURE
    say("\n".join(["", *disturbance.done, *table(found)]), sys.stdout)
    if out is not None:
        told = {"same": found.same, "disturbance": disturbance.done, **asdict(found)}
        told = json.loads(json.dumps(told), parse_constant=lambda name: None)  # JSON has neither NaN nor infinity
        put_text(out, json.dumps(told, indent=1))
    if page is not None:
        write_comparison([folders[CALM], folders[DISTURBED]], page)
    return Exit.OK if found.same else Exit.FAILURE


def settings_of(config: RunConfig, steps: int) -> list[str]:
    """Overrides by which a run's settings become those of a proof: of any length, and without what a run does beside
    training. Raises ConfigError for too few steps."""
    if steps < QUARTERS:
        raise ConfigError(f"--steps {steps}: each quarter of them ends with a disturbance; give {QUARTERS} or more.")
    return [*_schedule(config, steps), *_alone(config)]


def _schedule(config: RunConfig, steps: int) -> Iterator[str]:
    """A warm-up that fits, and no decay, which would depend on the length of the run."""
    optimizer = config.train.optimizer
    yield f"train.optimizer.lr_warmup_steps={min(optimizer.lr_warmup_steps, steps // 2)}"
    if optimizer.lr_scheduler != "constant":
        yield from ("train.optimizer.lr_scheduler=constant", "train.optimizer.lr_decay_steps=0")


def _alone(config: RunConfig) -> Iterator[str]:
    yield "checkpoint.every=0"  # the one at its end
    yield "sample.every=0"
    yield "validation.every=0"
    yield "track=[]"
    if config.data.cache.path and not comes_whole(config.data.cache):  # what the first encodes is not for the second
        yield from ("data.cache.only=false", "data.cache.path=''")
    for name, limits in batch_limits(config).items():
        if limits.recalibrate == "on":  # by costs that each run measures
            yield f"{name.replace('[', '.').replace(']', '')}.recalibrate=off"
