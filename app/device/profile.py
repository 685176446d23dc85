"""`heddle profile`: measures what the cascades of a config cost on this device, and writes a profile for planners.

    heddle profile --config configs/runs/demo.yaml --out profile.json

Every bucket is measured with synthetic pixels, random tokens and the config's own models: text, VAE and DiT on one
device and in bags of every degree that this machine has devices for, with the process groups of a run; the end of a
step by the run's engine; all-to-alls; handoffs from one worker to another through Ray's object store. On a Ray cluster
of several nodes cascades, the end of a step, all-to-alls and handoffs are measured across nodes, too. What runs out of
memory is a limit. On a GPU, and on a CPU whose workers have a limit (`workers.memory_gib`), the largest batch and the
longest clip that fit are searched for, and what cascades take of memory is counted; with `--minutes` larger batches are
tried on any CPU. With `model.dit.compile: auto` the DiT of some buckets is timed with compiled blocks and with blocks
as written before all else, and everything is then measured the faster way. The file is written after every point, and a
file of the same setting is continued. Other batch sizes and degrees are predicted by the models fitted to these points.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from actors.plan.costs.fit import POOR_RESIDUAL, RESIDUAL_POINTS
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.plan.types import PlanError
from actors.planning.batching import seconds_of
from actors.planning.demand import clips_of
from actors.planning.forecasts import forecast
from actors.planning.learned import refuse_other, setting_of
from actors.planning.options import tell_updates
from app.device.bag import degrees_here
from app.device.bench import Bench
from app.device.both_ways import with_faster_way
from app.device.choice import device_name, pick_device
from app.device.measuring import Measuring, ProcessBags, is_known
from app.device.over_nodes import LentRay, MeasuredCluster
from app.device.summary import summary_lines
from app.device.wanted import by_information, figures_of, largest_of, longest_of, points_of, shapes_of, usual_degrees
from app.device.write_limits import write_limits
from app.inputs.batches import with_limits
from app.settings.config import RunConfig, from_here
from app.settings.out_files import check_writable, is_no_file
from ops.counted import counted
from ops.geometry import Geometry
from ops.models.config import ModelConfig
from ops.models.folders import tiling_of
from ops.models.load import trained_part
from ops.standard_out import is_stdout
from ops.typed import ConfigError

if TYPE_CHECKING:
    import torch

_FIXED = 0.5  # of a batch's seconds: above this a line says what does not grow with it


def run_profile(
    path: Path,
    overrides: Sequence[str],
    out: Path,
    repeats: int = 3,
    device: str = "auto",
    write: bool = False,
    degrees: Sequence[int] = (),
    minutes: float = 0.0,
    fresh: bool = False,
    ray: LentRay | None = None,
) -> Profile:
    """Measure, print the table, write `out`; with `write` also the limits of batches into the config.

    `degrees`: of the DiT, empty for all that this machine can run. `minutes`: the most informative points first, until
    the time is over; 0 measures all. `fresh`: also what `out` has already. `ray`: for handoffs, and for bags over the
    nodes of a cluster; None leaves them out. Raises ConfigError for a device that is not there, for an `out` of another
    setting, and for a config that cannot be edited.
    """
    import torch

    from ops.models.folders import resolve

    if is_stdout(out):
        raise ConfigError(f"--out {out} is where this command says what it does; give a file, or a pipe of its own.")
    check_writable([out])
    began, config = time.monotonic(), from_here(RunConfig.load(path, overrides))
    target = pick_device(device)
    torch.set_num_threads(config.workers.torch_threads)
    config, both_ways = with_faster_way(config, target, out, repeats, fresh)
    model, geometry = resolve(config.model)
    profile = _empty_profile(config, model, geometry, target, degrees)
    profile.both_ways = both_ways
    profile.source = f"measured by heddle profile, torch {torch.__version__}, median of {repeats}"
    legal = profile.degrees["dit"]
    cluster = None if ray is None else MeasuredCluster.of(ray, config, legal, degrees, target.type)
    over = {} if cluster is None else {degree: len(set(nodes)) for degree, nodes in cluster.bags.items()}
    bags = degrees_here(config, legal, degrees, target.type, over)
    sized, _ = with_limits(config, model, geometry, profile)
    shapes = list(shapes_of(sized, geometry, profile))
    handoffs = () if cluster is None else cluster.handoffs(config.workers.max, target.type)
    points = by_information(points_of(shapes, bags, over), figures_of(config, bags, over, handoffs))
    limited = target.type == "cuda" or bool(config.workers.memory_gib)  # else no limit belongs to one worker
    if limited:
        clips, cuda = clips_of(config.data, geometry), target.type == "cuda"
        profile.expect_needs(forecast(model, geometry, config.train, clips, legal, cuda).needs)
    if limited or minutes:
        points += largest_of(shapes, bags)
    if limited:
        points += longest_of(shapes, bags)
    device = "" if target.type == "cpu" else profile.device
    tell_updates(profile, config.train, model, device, config.workers.memory_gib)
    if not fresh:
        continue_from(out, profile)
    left = [point for point in points if not is_known(point, profile)]
    print(f"{counted(len(points), 'point')} on {profile.device}, degrees {_listed([1, *bags])}")
    print(f"nodes     {_over_nodes(over)}")
    if len(left) < len(points):
        print(f"          {len(points) - len(left)} are known from {out} already (--fresh measures them again)")
    together = ProcessBags(config=config, device=target.type, cluster=cluster)
    measuring = Measuring(Bench(config, model, geometry, target), together, profile, out, repeats)
    try:
        measuring.run(left, began + 60 * minutes if minutes else 0.0)
    except (KeyboardInterrupt, SystemExit):
        if is_no_file(out):
            with suppress(OSError):
                measuring.save_if_read()
        elif out.is_file():
            print(f"stopped   what was measured is in {out}; the same command without --fresh goes on from it")
        raise
    offer_residual(profile)
    measuring.save(last=True)
    for line in summary_lines(profile, model):
        print(line)
    print(f"profile   {out}")
    _limits(config, path, model, geometry, profile, write)
    return profile


def _empty_profile(
    config: RunConfig, model: ModelConfig, geometry: Geometry, device: torch.device, degrees: Sequence[int]
) -> Profile:
    """A profile of this setting in which nothing has been measured yet."""
    profile = Profile.from_flops(
        model.dit,
        model.vae,
        model.text,
        geometry,
        model.image,
        tiling_of(model.vae),
        degrees=config.planner.degrees or usual_degrees(model, config.planner.sequence, degrees),
        device=device_name(device),
        part=trained_part(model.dit),
        element_bytes=config.train.element_bytes,
    )
    profile.setting = setting_of(model, profile.device if device.type == "cuda" else "cpu", config.train)
    return profile


def offer_residual(profile: Profile) -> None:
    """Have trees explain what the fit of the VAE leaves (Arachne sec. IV-B), where points are many enough and the
    package is here. They stay where they help at points that they have not seen."""
    points = sum(key[0] == "vae" for key in profile.measured)
    if profile.residual != "none" or points < RESIDUAL_POINTS:
        return
    if importlib.util.find_spec("xgboost") is None:
        print(f"vae   {points} points are enough for trees on top of its fit: install the extra [xgboost] for them")
        return
    profile.use_residual("xgboost")
    found = profile.model_of("vae")
    if found is None or found.residual is None:
        profile.use_residual("none")


def continue_from(out: Path, profile: Profile) -> None:
    """Take up the points of a file that an earlier call has left. Raises ConfigError where it is of another setting."""
    if not out.is_file():
        return
    assert profile.setting is not None
    try:
        before = read_profile(out)
        refuse_other(before, profile.setting, str(out))
    except PlanError as error:
        raise ConfigError(f"{error} --out names a file that is not continued: give another, or --fresh.") from None
    for key, seconds in before.measured.items():
        profile.measure(key, seconds, before.text_tokens.get(key), before.spread.get(key))
    profile.needs.take_up(before.needs.known())
    profile.max_frames = before.max_frames
    profile.update = before.update.of_run(profile.update.kind, profile.update.weights)
    profile.exchanges = before.exchanges
    profile.count_exchange(before.exchange_s, before.exchange_calls)
    profile.count_over_nodes(before.over_nodes)
    profile.count_handoffs(before.handoffs)


def _limits(
    config: RunConfig, path: Path, model: ModelConfig, geometry: Geometry, profile: Profile, write: bool
) -> None:
    """Show M_mem, M_comp and p of these measurements (AdaptiveLoad sec. 3.2), and put them into the config. Raises
    ConfigError where they are to be put there and the measurements give none."""
    wanted = replace(config.data.batch, auto=True, compute=0.0, from_table=False)
    open_config = replace(config, data=replace(config.data, batch=wanted))
    if not config.data.tables_of_batch:
        told = "every segment of data.segments has a batch of its own: data.batch limits nothing"
        if write:
            raise ConfigError(f"{told}, and --write has no place for the limits. Leave it out.")
        print(f"batches   {told}")
        return
    try:
        found, fit = with_limits(open_config, model, geometry, profile)
    except ConfigError as error:
        if write:
            raise
        print(f"batches   {error}")
        return
    batch = found.data.batch
    assert fit is not None
    fixed, slope = fit.coefficients
    print(
        f"batches   seconds = {fixed:.4g} + {slope:.4g} B S^{fit.exponent:g}, {fit.quality}; M_mem "
        f"{batch.memory_tokens:,.0f} tokens, M_comp {batch.compute:.4g} for {seconds_of(batch, fit):.3g} s a batch"
        + ("; the fit is poor, and so are these limits" if fit.worst > POOR_RESIDUAL else "")
    )
    share = fixed / seconds_of(batch, fit)
    if share > _FIXED:
        print(
            f"batches   {share:.0%} of that does not grow with the batch (launches, or what else every cascade takes): "
            f"larger batches cost little more, and data.batch.target_s above {fixed:.3g} s makes them"
        )
    if write:
        write_limits(path, batch)
        print(f"written   data.batch of {path}")


def _over_nodes(over: Mapping[int, int]) -> str:
    if not over:
        return "all on one: what bags and handoffs cost across nodes is not measured"
    return f"bags over nodes: degrees {_listed(over)}"


def _listed(degrees: Iterable[int]) -> str:
    return ", ".join(map(str, degrees))
