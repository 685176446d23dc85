"""`heddle train --dry-run`: everything that can be known before a worker starts, and the exit code a run would get.

Resolves the config and the model folders, opens the data (index, ledger, batch sizes), forms the items of the first
steps and plans them on `workers.cluster`, else on `workers.max` workers. With --resume it compares the settings with
those of the run. A missing synthetic set is made, as a run would. Starts neither Ray nor a worker.
"""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from actors.plan.types import Plan, PlanError
from actors.planning.forecasts import host_weights_gib
from app.inputs.account import account_lines
from app.inputs.batches import device_gib, with_limits, with_limits_of
from app.inputs.beside import spared
from app.inputs.checkpoints import (
    check_same_weights,
    data_before,
    earlier_checkpoint,
    later_folders,
    most_steps,
    steps_begun,
)
from app.inputs.cluster import cluster_of
from app.inputs.compiling import with_compiling
from app.inputs.first_state import with_first_state
from app.inputs.items import items_from_data, open_dataset
from app.inputs.memory import view_memory
from app.inputs.profiles import profile_of
from app.inputs.shared_cores import with_shared_cores
from app.inputs.synthetic import make_missing
from app.kept.wanted import cache_preview
from app.plan.memory import in_words, need_lines, pixel_line, state_lines, with_room
from app.plan.preview import PlanInputs, planned, preview_options, step_figures, step_seconds, update_line
from app.settings.config import RunConfig, check_read, from_here
from app.settings.notes import notes, sample_notes
from app.settings.packages import check_installed
from app.settings.resume import Change, check_resume
from app.settings.run_folder import CONFIG, LORA, check_place, check_run_dir, run_dir
from app.validation.clips import check_held_out
from data.dataset.coverage import account, check_coverage
from ops.counted import counted
from ops.models.base.config import DiTConfig
from ops.models.config import ModelConfig
from ops.models.folders import check_weights, resolve
from ops.models.load import check_factors, check_kept, check_trained, num_trained
from ops.shards import bytes_per_weight
from ops.typed import ConfigError
from ops.units import GIB

STEPS = 8  # planned as one rolling sequence
MOST_SECONDS, MOST_MINUTES = 120, 180  # of a run; a longer one is given in minutes, or in hours


def dry_run(
    path: Path,
    overrides: Sequence[str],
    *,
    resume: bool = False,
    overwrite: bool = False,
    back_to: int | None = None,
) -> None:
    """Print the preview, on `workers.cluster` where one is given. Raises what a run would: ConfigError, DataError,
    PlanError. An existing run may be previewed without `resume` or `overwrite`, which its start would ask for."""
    config = from_here(RunConfig.load(path, overrides))
    check_read(config, *((steps_begun(config, back_to), data_before(config), most_steps(config)) if resume else ()))
    check_installed(config.track)
    config, said, changes = _of_the_start(config, resume=resume, overwrite=overwrite, back_to=back_to)
    for note in [*notes(config), *sample_notes(config), *said]:
        print(f"note: {note}")
    if config.workers.device == "cuda" and not _cuda_here():
        print("note: workers.device is cuda and this machine has no CUDA device: it can plan the run, not train it.")
    model, geometry = resolve(config.model)
    print(f"run       {run_dir(config)}{_beginning(config, resume=resume, overwrite=overwrite)}")
    for change in changes:
        print(f"          changed since its last start: {change}")
    cluster = cluster_of(config)
    check_trained(model.dit, config.train.optimizer.kind)
    _print_model(config, model, "cuda" if device_gib(config, cluster.memory_gib)[1] else "cpu")
    try:
        check_weights(model)
        check_factors(model.dit)
        check_kept(model.dit)
    except (FileNotFoundError, ValueError) as error:
        print(f"          warning: {error} This can be planned, not trained.")
    profile = profile_of(config, model, geometry)
    config, _ = with_limits(config, model, geometry, profile, cluster)
    view = view_memory(config, model, geometry, profile, cluster)
    cluster = with_room(cluster, view)
    if view is not None:
        print("\n".join(state_lines(view)))
    elif cluster.memory_gib:
        print("memory    unknown: workers.device is cpu, and the cluster's memory_gib is that of its GPUs")
    make_missing(config.data.sources)
    dataset = open_dataset(config, geometry, profile)
    print("\n".join(account_lines(account(dataset, run_steps=config.train.steps))))
    check_coverage(dataset.ledger, config.data.min_coverage)
    if held_out := check_held_out(config):
        print(f"validates {held_out}")
    cache_line, why_not = cache_preview(config)
    if cache_line:
        print(cache_line)
    count = min(STEPS, config.train.steps)
    steps = items_from_data(dataset, count, config, model)
    shared, sharing = with_shared_cores(cluster, config)
    inputs = PlanInputs(
        steps=steps,
        profile=profile,
        cluster=shared,
        options=preview_options(config),
        adapts=config.planner.misfit == "adapt",
    )
    plan = planned(inputs, config.planner.strategy)
    _print_plan(config, plan, inputs)
    if sharing:
        print(f"          {sharing}")
    if view is not None:
        print("\n".join(["cascades  GiB of that room", *need_lines(view, plan, inputs.items(plan), profile)]))
    if pixels := pixel_line(steps, config):
        print(pixels)
    if why_not:
        raise ConfigError(why_not)


def _of_the_start(
    config: RunConfig, *, resume: bool, overwrite: bool, back_to: int | None
) -> tuple[RunConfig, list[str], list[Change]]:
    """The config that a start would train with, what it says of `train.init_from` and of compiling, and what a resume
    changes. Raises ConfigError where the folder or the run in it refuses the start."""
    if resume or overwrite:
        check_run_dir(config, resume=resume, overwrite=overwrite)
    else:
        check_place(run_dir(config))
    folder, earlier = run_dir(config) if resume else None, earlier_checkpoint(config, back_to, resume=resume)
    config = config if folder is None else with_limits_of(config, folder)
    config, begins = with_first_state(config, folder)
    config, decided = with_compiling(config, folder)
    back = f"it goes back to {earlier.name}; what came later is moved aside" if earlier is not None else ""
    said = [one for one in (begins, decided, back) if one]
    if folder is None:
        return config, said, []
    changes = check_resume(config, folder, checkpoint=earlier)
    check_same_weights(config, earlier)
    return config, said, changes


def _beginning(config: RunConfig, *, resume: bool, overwrite: bool) -> str:
    """What the start does with the folder of the run."""
    folder = run_dir(config)
    if not (folder / CONFIG).is_file():
        return " (there is none to resume: starts at step 0)" if resume else " (exists)" if folder.exists() else ""
    if overwrite:
        return " (exists: emptied first)"
    return " (exists: continued)" if resume else " (exists: give --resume or --overwrite to start it)"


def _print_model(config: RunConfig, model: ModelConfig, device: str) -> None:
    """`device`: the kind that the workers compute on, cpu or cuda."""
    dit = model.dit
    count, whole = num_trained(dit), num_trained(replace(dit.without_lora(), train_only=()))
    layers = "+".join(map(str, dit.block_counts))
    print(
        f"model     {dit.architecture}, {layers} layers, {counted(dit.num_heads, 'head')}, width {dit.dim}: "
        f"{whole / 1e6:,.1f} M weights{'' if count == whole else f', {count / 1e6:,.1f} M trained'}"
    )
    size, free = count * bytes_per_weight(config.train.optimizer), free_bytes(run_dir(config))
    kept = config.checkpoint.num_kept(config.train.steps)
    print(f"gradients {_gradients(config, count, device)}")
    print(f"encoders  {_encoders(model, device)}{_unneeded(config)}")
    if config.train.memory.parameters == "node":
        which = "frozen weights of blocks" if dit.freezes_blocks else "weights"
        gib = host_weights_gib(model, config.train)
        print(f"weights   {gib:.2f} GiB of {which} once in host memory of each node (train.memory.parameters: node)")
    print(f"storage   {in_words(size)} per checkpoint, {kept} kept, {free / GIB:,.1f} GiB free")
    factors = lora_bytes(config, dit)
    if factors:
        form = config.checkpoint.lora_files
        print(f"          about {in_words(factors)} of LoRA files in {LORA}/, all kept (checkpoint.lora_files: {form})")
    for aside in later_folders(run_dir(config)):
        taken, linked = _taken(aside)
        where = f" ({in_words(linked)} of it elsewhere, by links)" if linked else ""
        print(
            f"          {in_words(taken)} in {aside.name}/{where}, from before the run went back: no retention "
            f"removes it"
        )
    if size * (kept + 1) + factors > free:
        print("          warning: the disk fills up before the run ends; keep fewer with checkpoint.keep_last")


def _taken(aside: Path) -> tuple[int, int]:
    """Bytes of the files in a folder that a run has put aside, and how many of them do not lie in it: its entries may
    be links to other disks. Files that go meanwhile are left out."""
    taken = linked = 0
    for entry in aside.iterdir():
        place = entry.resolve()
        inside = [Path(folder, name) for folder, _, names in os.walk(place) for name in names]
        for path in inside or [place]:
            with suppress(OSError):
                size = path.stat().st_size if path.is_file() else 0
                taken += size
                linked += size if entry.is_symlink() else 0
    return taken, linked


def lora_bytes(config: RunConfig, dit: DiTConfig) -> int:
    """What the LoRA files of all checkpoints take in the end, for Diffusers and ComfyUI, but for their headers."""
    form = config.checkpoint.lora_files
    if form == "off" or not dit.lora_rank:
        return 0
    from ops.models.lora_files import num_written

    written = replace(config.checkpoint, keep_last=0).num_kept(config.train.steps)
    return (4 if form == "float32" else 2) * sum(num_written(one) for one in dit.experts) * written


def _encoders(model: ModelConfig, device: str) -> str:
    """What encoders compute in."""
    if model.vae.kind == "haar":
        vae = "haar codec"
    else:
        compiled = ", compiled" if model.vae.compile else ""
        vae = f"VAE in {model.vae.dtype_on(device)} (model.vae.dtype: {model.vae.dtype}{compiled})"
    place = "" if model.text.place == "device" else ", in host memory between its calls"
    return f"{vae}, text encoder in {model.text.dtype_on(device)}{place}"


def _unneeded(config: RunConfig) -> str:
    """Which encoders no worker loads; "" where all are loaded."""
    parts = {"text": "text encoder", "vae": "VAE"}
    names = [parts[module] for module in spared(config).encoders]
    return f"; {' and '.join(names)} not loaded (data.cache.only)" if names else ""


def _gradients(config: RunConfig, weights: int, device: str) -> str:
    """Where gradients lie and what they take."""
    possible = dict.fromkeys(one.gradients for one in config.train.places(weights, device))
    place = {
        "own": "on each worker",
        "node": "on each node, in memory that its workers share",
        "host": "in each node's host memory",
    }
    where = ", or ".join(place[one] for one in possible)
    return f"{in_words(4 * weights)} {where} (train.memory.gradients: {config.train.memory.gradients})"


def _alone_line(plan: Plan, inputs: PlanInputs) -> str:
    """The plan beside one of its workers alone, with the same items; "" of one worker, and where one alone has no room
    for them or cannot follow the settings."""
    cluster, workers = inputs.cluster, inputs.cluster.num_workers
    if workers == 1:
        return ""
    one = replace(cluster, nodes=(1,), hosts=(), places=(), speed=(), room_gib=cluster.room_gib[:1])
    try:
        alone = step_seconds(planned(replace(inputs, cluster=one), plan.strategy))
    except PlanError:
        return ""
    rate = alone / step_seconds(plan)
    return (
        f"          one worker alone: {alone:.3f} s per step; {workers} are {rate:.2f} times as fast, "
        f"{100 * rate / workers:.0f}% of {workers} times"
    )


def _lasts(seconds: float) -> str:
    """A length of time in the unit that a person would take."""
    if seconds < MOST_SECONDS:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.1f} minutes" if seconds < 60 * MOST_MINUTES else f"{seconds / 3600:.1f} hours"


def _cuda_here() -> bool:
    import torch

    return torch.cuda.is_available()


def free_bytes(folder: Path) -> int:
    """Free space where `folder` will be made."""
    existing = folder.resolve()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(os.fspath(existing)).free


def _print_plan(config: RunConfig, plan: Plan, inputs: PlanInputs) -> None:
    balance, workers = step_figures(plan, inputs), inputs.cluster.num_workers
    seconds = statistics.fmean(step.makespan_s for step in plan.steps)
    idle = statistics.fmean(figure.idle_ratio for figure in balance)
    print(
        f"plan      {plan.strategy} on {counted(workers, 'worker')}, first {counted(len(plan.steps), 'step')}: "
        f"{seconds:.3f} s per step (bound {inputs.bound():.3f} s), idle {100 * idle:.1f}%, planned in "
        f"{1000 * statistics.fmean(step.planning_s for step in plan.steps):.1f} ms per step"
    )
    whole = step_seconds(plan)
    if line := _alone_line(plan, inputs):
        print(line)
    if line := update_line([plan], inputs):
        print(line)
    least = inputs.profile.device == "cpu" and not inputs.profile.measured  # small operations cost far more than FLOPs
    length = f"{'at least' if least else 'about'} {_lasts(whole * config.train.steps)}"
    print(f"          {counted(config.train.steps, 'step')} in {length}")
    if not inputs.profile.measured:
        print("          times come from FLOPs alone; `heddle profile` measures this device")
        for note in inputs.profile.notes:
            print(f"          {note}")
