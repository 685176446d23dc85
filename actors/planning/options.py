"""Turns a run's config into what the planner takes: the same for a run and for its preview."""

from __future__ import annotations

from collections.abc import Mapping

from actors.config import PlannerConfig, TrainConfig
from actors.plan.costs.fetching import ON_DEVICE, FetchedWeights
from actors.plan.costs.fit import Fit
from actors.plan.costs.flops import exchange_seconds, text_cost
from actors.plan.costs.halved import HalvedHeads
from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.plan.devices import UNLISTED_LINK_GBPS, DeviceSpeed, device_speed
from actors.plan.schedule.problem import PlanOptions
from actors.plan.types import MODULES
from actors.planning.forecasts import sizes_of
from actors.planning.learned import refuse_other, setting_of
from actors.planning.memory import MemoryForecast
from ops.degrees import bags_of
from ops.geometry import Geometry
from ops.models.base.flops import TrainedPart
from ops.models.base.tiling import Tiling
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.folders import text_layers, tiling_of
from ops.models.load import trained_part
from ops.models.other_forms import OtherForm

# Of a GPU that nobody has profiled, assumed: what large DiTs reach of the peak (KnapFormer's best HFU is 0.27, with
# short sequences), what all-to-alls reach of a link, and Wan2.1's VAE encoder (5.06e6 FLOP a pixel, counted).
_EFFICIENCY, _EFFICIENCY_OF_LINKS, _VAE_FLOPS_PER_PIXEL = 0.4, 0.7, 5e6
# What copies reach of a GPU's link to host memory (54.8 of 64 GB/s on an H200, docs/results.md), and what all GPUs of a
# node read together of weights that lie there once, in memory of one socket: eight channels of DDR4-3200 have 205 GB/s,
# of DDR5-4800 307.
_EFFICIENCY_OF_COPIES, _NODE_GBPS = 0.85, 200.0
_LAUNCH_S = 1e-4  # of a block's kernels in the four passes
_MEASURED_S = 10.0
_ASSUMED = "H100"  # where GPUs are not known

LEAST_GAIN = 0.1
"""A run has not measured most pieces of a cut batch, and every cascade more costs calls: a cut must promise more."""


def options_of(config: PlannerConfig, *, budget_s: float, replans: bool) -> PlanOptions:
    """`replans`: only the first step of a plan will be executed, as in a run; a preview shows all of them."""
    return PlanOptions(
        strategy=config.strategy,
        budget_s=budget_s,
        degrees=config.degrees,
        topology=config.topology,
        static_degree=config.static_degree,
        split=config.split,
        lookahead=config.lookahead,
        replans=replans,
        least_gain=LEAST_GAIN,
        bag_peers=config.bag_peers,
    )


def profile_of(
    config: PlannerConfig,
    model: ModelConfig,
    geometry: Geometry,
    device: str = "",
    train: TrainConfig | None = None,
    measured: Mapping[str, float] | None = None,
    gpus: int = 1,
    part: TrainedPart | None = None,
) -> Profile:
    """Measured latencies where the config names them, else the FLOP model, at the degrees that the config allows.
    Raises PlanError for a bad file, and for one that was measured in another setting, as far as `device` and `train`
    are given. `measured`: bf16 TFLOP/s of devices that no table lists, by name. `gpus`: of a node, which copy weights
    from its memory where `train` says that these lie there; where `auto` decides that, `tell_fetched` adds the copies
    later, and in a run the planner, generation by generation (`copies_if_fetched`). `part`: what is trained (None: what
    the model's settings say, for which a model of 14B is looked at for seconds)."""
    if config.profile:
        profile = read_profile(config.profile)
        refuse_other(profile, setting_of(model, device, train), config.profile)
        profile.text_cost, profile.tiling = text_cost(model.dit), tiling_of(model.vae)
        priced, part = _device_of(device or profile.device), part or trained_part(model.dit)
        if missing := [module for module in MODULES if not profile.has(module)]:  # from a cache, or stopped early
            guessed = flop_profile(model, geometry, priced, measured, train, part)
            profile.models |= {module: guessed.models[module] for module in missing}
            if profile.extrapolate:  # else a plan that needs them raises PlanError
                without = f"{config.profile} has no point of {' and '.join(missing)}"
                profile.notes += [f"{without}: the FLOP model is taken.", *guessed.notes]
        if "dit" not in missing:
            profile.proportions = _proportions(model, geometry, priced, measured, train, part)
        if model.dit.spatial_temporal:  # its form of costs, and bags of any size
            assumed = flop_profile(model, geometry, priced, measured, train, part)
            profile.sliced, profile.num_heads = assumed.sliced, assumed.num_heads
        profile.halved = HalvedHeads.of(model.dit, profile.device)
        sends = profile.element_bytes if train is None else train.element_bytes
        profile.exchange_s *= sends / profile.element_bytes  # of a file that does not say in what it was measured
        profile.element_bytes = sends
        profile.row_bytes = exchange_seconds(model.dit, 1.0, sends, part)
        profile.latent_channels = model.dit.out_channels
        degrees = profile.candidate_degrees("dit")
    else:
        profile = flop_profile(model, geometry, device, measured, train, part)
        usual = profile.candidate_degrees("dit")
        degrees = (
            *usual,
            *config.degrees,
            config.static_degree,
            *(bags_of(config.topology) if config.topology else ()),
        )
    if config.sequence == "ulysses" and model.dit.deals_heads:
        degrees = tuple(k for k in degrees if model.dit.num_heads % k == 0) or (1,)
    profile.degrees["dit"] = tuple(sorted(set(degrees)))
    if train is not None and train.memory.parameters == "node" and device not in ("", "cpu"):
        tell_fetched(profile, model, sizes_of(model, train, cuda=True), gpus)
    return profile


def tell_fetched(profile: Profile, model: ModelConfig, found: MemoryForecast, gpus: int) -> None:
    """Have a profile know what passes copy to each of a node's `gpus` from its memory, with weights where the forecast
    has them."""
    profile.count_fetched(fetched_weights(profile, model, found, gpus) if found.fetches else ON_DEVICE)


def fetched_weights(profile: Profile, model: ModelConfig, found: MemoryForecast, gpus: int) -> FetchedWeights:
    """What passes copy to each of a node's `gpus` where the weights of blocks lie in its memory."""
    speed = device_speed(_ASSUMED if profile.device == "cuda" else profile.device)
    link_gbps = UNLISTED_LINK_GBPS if speed is None else speed.host_gbps
    return FetchedWeights(
        num_bytes=found.in_blocks // len(model.dit.experts),  # a pass is of one expert
        bytes_per_s=1e9 * min(_EFFICIENCY_OF_COPIES * link_gbps, _NODE_GBPS / gpus),
        in_points=found.frozen_blocks,  # heddle profile measures trained weights on the device
    )


def copies_if_fetched(profile: Profile, model: ModelConfig, train: TrainConfig, gpus: int) -> FetchedWeights | None:
    """What passes will copy if the workers of a run put the weights of blocks into host memory of nodes of `gpus` (0: a
    run on CPUs); None where settings, model or device leave them no choice."""
    if not gpus or train.memory.parameters != "auto" or not model.dit.fetchable:
        return None
    return fetched_weights(profile, model, sizes_of(model, train, cuda=True), gpus)


def update_kind(train: TrainConfig, weights: int, device: str) -> str:
    """How steps end on workers with this device (cpu, or a GPU's name), as far as it decides how long that takes:
    where `auto` has a choice, the device makes it."""
    places = train.places(weights, "cpu" if device in ("", "cpu") else "cuda")
    ema = "EMA" if train.optimizer.ema_decay > 0 else "no EMA"
    ways = (f"{p.gradients}/{p.state}{'/fetched' if p.parameters == 'node' else ''}" for p in places)
    kind = f"{train.optimizer.kind}, " if train.optimizer.kind != "adamw" else ""
    return f"{train.sync} {train.parameter_dtype}, {kind}{ema}, {', '.join(ways)}"


def tell_updates(
    profile: Profile, train: TrainConfig, model: ModelConfig, device: str, memory_gib: float = 0.0
) -> None:
    """Have a profile know how the run ends its steps, and that at most `memory_gib` of a device may be used (0: all):
    it forgets figures of another way, and where memory ran out beside states that lay otherwise."""
    from ops.models.load import num_trained

    weights = num_trained(model.dit)
    kind = update_kind(train, weights, device)
    profile.update = profile.update.of_run(kind, weights)
    profile.needs.lie_beside(f"{kind}, {memory_gib:g} GiB" if memory_gib else kind)


def flop_profile(
    model: ModelConfig,
    geometry: Geometry,
    device: str = "",
    measured: Mapping[str, float] | None = None,
    train: TrainConfig | None = None,
    part: TrainedPart | None = None,
) -> Profile:
    """The FLOP model of workers on this device: `cpu`, names of GPUs (a table knows published ones; of several with "+"
    between them the slowest counts), or "", which is taken for a CPU. A GPU that is neither in the table nor among the
    `measured` is timed for ten seconds where it is this process's own; else it is taken for an H100, and a note of the
    profile says so. `train` says in what it multiplies and sends; None: a GPU in bf16, a CPU in fp32. `part`: what is
    trained (None: what the model's settings say)."""
    parts = (model.dit, model.vae, model.text, geometry, model.image, _tiling_if_there(model.vae))
    part = part or trained_part(model.dit)
    if device in ("", "cpu"):
        return Profile.from_flops(*parts, part=part, element_bytes=train.element_bytes if train is not None else 4)
    train = train or TrainConfig(autocast="bfloat16")
    measured = measured or {}
    if device_speed(device, measured) is None:
        measured = {**measured, **_measured_here(device)}
    known, notes = device_speed(device, measured, train.products), []
    unlisted = [name for name in device.split("+") if name in measured]
    if unlisted:
        told = ", ".join(f"{name} {measured[name]:.0f} TFLOP/s" for name in unlisted)
        notes.append(f"{told}: in no table of devices, measured. heddle profile measures cascades.")
    if known is None:
        known = device_speed(_ASSUMED)
        assert known is not None
        notes.append(assumption(device))
    encoders = device_speed(device, measured) or known  # of several GPUs others may be the slowest in another precision
    own = device_speed(device, measured, "tf32" if train.allows_tf32 else "float32") or known
    profile = Profile.from_flops(
        *parts,
        tflops=_EFFICIENCY * known.peak_tflops(train.products),
        encoder_tflops=_EFFICIENCY * encoders.bf16_tflops,
        exchange_gbps=_EFFICIENCY_OF_LINKS * known.link_gbps,
        host_gbps=_EFFICIENCY_OF_COPIES * known.host_gbps,
        text_flops_per_token=24.0 * model.text.d_model**2 * _layers_if_there(model.text),
        vae_flops_per_pixel=None if model.vae.kind == "haar" else _vae_flops_per_pixel(model.vae, encoders, own, train),
        launch_s=_LAUNCH_S,
        device=device,
        part=part,
        element_bytes=train.element_bytes,
    )
    profile.notes.extend(notes)
    return profile


def _proportions(
    model: ModelConfig,
    geometry: Geometry,
    device: str,
    measured: Mapping[str, float] | None,
    train: TrainConfig | None,
    part: TrainedPart,
) -> Fit:
    """The FLOP model of a transformer, whose level measured points set: a GPU that nobody knows is not timed for it."""
    if device not in ("", "cpu") and device_speed(device, measured) is None:
        device = _ASSUMED
    return flop_profile(model, geometry, device, measured, train, part).models["dit"]


def _device_of(name: str) -> str:
    """A device as `flop_profile` takes it, by its name in a profile: of a CPU that has the processor, too."""
    return "cpu" if name.upper().startswith("CPU") else name


def assumption(device: str) -> str:
    """What is said where nobody knows how fast a GPU is."""
    what = "the GPUs are not known" if device == "cuda" else f"{device} is in no table of devices and was not measured"
    return f"{what}: an H100's FLOPs are assumed. heddle profile measures cascades; a run corrects them as it goes."


def _vae_flops_per_pixel(vae: VAEConfig, bf16: DeviceSpeed, own: DeviceSpeed, train: TrainConfig) -> float:
    """FLOPs of a VAE's pixel in bf16 on the device `bf16` that take as long as the VAE's own, in its precision, on
    `own`: each is the slowest device of the run in that precision."""
    if vae.dtype_on("cuda") == "bfloat16":
        return _VAE_FLOPS_PER_PIXEL
    return _VAE_FLOPS_PER_PIXEL * bf16.bf16_tflops / own.peak_tflops("tf32" if train.allows_tf32 else "float32")


def _measured_here(device: str) -> dict[str, float]:
    """bf16 TFLOP/s of this process's GPU where it is one of these, by its name."""
    import torch

    from ops.matmul import matmul_tflops

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    if name not in device.split("+"):
        return {}
    return {name: matmul_tflops(torch.device("cuda"), torch.bfloat16, _MEASURED_S)}


def _layers_if_there(text: TextConfig) -> int:
    """Layers of a text encoder; of a preset whose folder is not here as many as the random one has."""
    try:
        return text_layers(text)
    except (FileNotFoundError, OtherForm):
        return text.num_layers


def _tiling_if_there(vae: VAEConfig) -> Tiling:
    """How an autoencoder cuts clips; of a preset whose folder is not here, which a benchmark prices all the same,
    that it cuts none."""
    try:
        return tiling_of(vae)
    except (FileNotFoundError, OtherForm):
        return Tiling()
