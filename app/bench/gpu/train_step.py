"""One training step of Wan (forward, loss, backward, clipping, AdamW, EMA) as a worker runs it alone.

bf16 weights with fp32 gradient, master copy, moments and EMA (ops/update/sync.py), full checkpointing, one clip of
480p81 with 512 text tokens. Each other setting changes one thing of that.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import nn

from actors.plan.costs.flops import DiTWork
from app.bench.gpu.ceilings import matmul_peak
from app.bench.gpu.idle import device_use
from app.bench.gpu.measurement import Earlier, Figure, NamedFigures, Place
from app.bench.gpu.memory import blocks_that_fit, kept_bytes, step_bytes
from app.bench.gpu.models import (
    CLIP_480P81,
    PICTURE_480P,
    SHORT_480P17,
    SMALL_CLIP,
    WAN_1_3B,
    WAN_14B,
    PackedCall,
    build,
    small,
)
from app.bench.gpu.timeline import timeline, traced
from ops.attention.names import AttentionName
from ops.attention.varlen import backend_of
from ops.comm.collectives import Group
from ops.config import OptimizerConfig
from ops.kernels.base import backend
from ops.models.base.config import DiTConfig
from ops.models.base.flops import ALL_TRAINED
from ops.models.base.transformer import PackedTransformer
from ops.packed.compiled_blocks import CompiledBlocks, codes_made
from ops.packed.packing import Sequence as PackedSequence
from ops.units import GIB
from ops.update.engine import StepResult
from ops.update.parameters import ParameterMemory
from ops.update.sync import FlatSync
from ops.update.sync_places import SyncPlaces

_NORM_ERROR = 1e-2  # FlashAttention's backward adds in any order
ROOM = 0.85  # of the free memory; fragments, cuBLAS and cuDNN take the rest


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """The settings in which steps differ."""

    fused: bool = True
    attention: AttentionName = "auto"
    checkpointing: bool = True
    keeps: bool = False  # what attention gives is not computed again
    compiled: bool = False
    fetched: bool = False  # weights lie in host memory, and blocks are fetched (train.memory.parameters: node)

    @property
    def is_checked(self) -> bool:
        """Whether the first gradient is held against that of a step as trained, which then runs, too."""
        return self.keeps or self.compiled or self.fetched


AS_TRAINED = StepSettings()
SETTINGS = {
    "as-trained": AS_TRAINED,
    "attention-kept": replace(AS_TRAINED, keeps=True),
    "compiled-blocks": replace(AS_TRAINED, compiled=True),
    "fetched-blocks": replace(AS_TRAINED, fetched=True),
    "without-checkpointing": replace(AS_TRAINED, checkpointing=False),
    "attention-flash": replace(AS_TRAINED, attention="flash"),
    "without-fused-ops": replace(AS_TRAINED, fused=False),
    "attention-sdpa": replace(AS_TRAINED, attention="sdpa"),
}
LARGE = ("as-trained", "attention-kept", "compiled-blocks", "attention-flash", "without-fused-ops")  # of 14B blocks
DRAWN = ("as-trained", "fetched-blocks")  # a timeline of the whole, and of copies beside compute
MODELS = {"wan-1.3b": WAN_1_3B, "wan-14b": WAN_14B}
# what compiled code may be made for: one sample, which the clip has been, and several; and what it then has to serve
SEVERAL, SMALL_SEVERAL = (SHORT_480P17, PICTURE_480P), (SMALL_CLIP,)  # a rehearsal has no time for more code
SERVED = ((PICTURE_480P,), (PICTURE_480P,) * 3, (PICTURE_480P, SHORT_480P17))
SMALL_SERVED = ((PackedSequence((1, 4, 6), 3),),)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainStep:
    """Seconds, shares of the matmul peak, memory and idle share of one model with one setting."""

    model: str
    setting: str
    estimate_s: float

    @property
    def name(self) -> str:
        return f"step.{self.model}.{self.setting}"

    def why_not(self, place: Place) -> str | None:
        attention = SETTINGS[self.setting].attention
        if attention == "auto":
            return None
        probe = torch.empty(0, 1, 128, dtype=torch.bfloat16, device=place.device)
        return backend_of(attention).why_not(probe)

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        settings = SETTINGS[self.setting]
        config = step_config(MODELS[self.model], settings, place)
        expected = first_norm(config, place) if settings.is_checked else None
        if place.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(place.device)
        with fused_ops(settings.fused):
            dit, sync = make_trained(config, settings, place)
            step = clip_step(dit, sync, config, place)
            off = None if expected is None else abs(step().grad_norm / expected - 1)
            timing = place.seconds(step, place.pick(3, 1), warm_up=place.pick(2, 1))
            peak = place.peak_gib(step)
            idle = idle_of(step, self.name if self.setting in DRAWN else None, place)
            codes = _codes(dit, sync, config, place) if settings.compiled else {}
        return {
            **({} if off is None else {"right": off < _NORM_ERROR, "gradient norm off by": off}),
            "blocks": config.num_layers,
            "parameters": sync.total,
            "seconds": timing.seconds,
            "spread": timing.spread,
            **_shares(config, settings, place, timing.seconds, matmul_peak(earlier)),
            **idle,
            **codes,
            **_memory(config, settings, place, peak),
        }


def measurements(model: str) -> list[TrainStep]:
    """The step as it is trained first."""
    seconds = {"wan-1.3b": 26.0, "wan-14b": 38.0}[model]
    return [
        TrainStep(
            model=model,
            setting=setting,
            estimate_s=seconds * (1.5 if settings.is_checked else 1.0),
        )
        for setting, settings in SETTINGS.items()
        if model == "wan-1.3b" or setting in LARGE
    ]


def idle_of(step: Callable[[], object], name: str | None, place: Place) -> dict[str, Figure]:
    """The idle share of two steps and the time between them, and with a name their timeline. Where profiling is not
    allowed, only these figures are missing."""
    try:
        events = traced(lambda: (step(), step()), place)
    except RuntimeError as error:
        return {"idle share": None, "profiler": str(error)}
    use = device_use(events)
    return {
        "idle share": use.idle_share if use.kernels else None,
        "longest gap ms": 1e3 * use.longest_gap_s,
        "kernels per step": use.kernels // 2,
        "copies per step": use.copies // 2,
        **(timeline(events, name, place) if name else {}),
    }


def first_norm(config: DiTConfig, place: Place) -> float:
    """The norm of the gradient of the first step, with all weights on the device."""
    return clip_step(*make_trained(config, AS_TRAINED, place), config, place)().grad_norm


def clip_step(dit: PackedTransformer, sync: FlatSync, config: DiTConfig, place: Place) -> Callable[[], StepResult]:
    """A whole step of one clip as one call."""
    return step_over(dit, sync, PackedCall.of(config, [place.pick(CLIP_480P81, SMALL_CLIP)], place.device))


def _codes(dit: PackedTransformer, sync: FlatSync, config: DiTConfig, place: Place) -> dict[str, Figure]:
    """How often code was made for packs that code is there for, after steps of one sample and of several."""

    def run(pack: Sequence[PackedSequence]) -> None:
        step_over(dit, sync, PackedCall.of(config, list(pack), place.device))()

    run(place.pick(SEVERAL, SMALL_SEVERAL))
    before = codes_made()
    for pack in place.pick(SERVED, SMALL_SERVED):
        run(pack)
    return {"codes after the first": codes_made() - before}


def make_trained(config: DiTConfig, settings: StepSettings, place: Place) -> tuple[PackedTransformer, FlatSync]:
    """A model on the device, and what sums its gradients and updates it."""
    torch.manual_seed(0)  # steps of one model are compared
    dit = build(config, place.device).train()
    dit.keeps_attention = settings.keeps
    if settings.compiled:  # a rehearsal traces without making code, which needs a compiler
        dit.compiled = CompiledBlocks(dit.block_parts, place.pick("inductor", "aot_eager"))
    parameters: ParameterMemory = "node" if settings.fetched else "replicated"
    sync = FlatSync(dit, OptimizerConfig(), total_steps=1000, places=SyncPlaces(parameters=parameters))
    gc.collect()  # the weights that the flat vector replaced
    if place.device.type == "cuda":
        torch.cuda.empty_cache()
    sync.form(Group.solo(), None)
    return dit, sync


def step_over(dit: nn.Module, sync: FlatSync, call: PackedCall) -> Callable[[], StepResult]:
    """A whole step over these samples: forward, loss, backward, clipping, AdamW, EMA."""

    def step() -> StepResult:
        sync.begin_step()
        loss = call.loss(dit)
        loss.backward()
        return sync.finish_step(0, float(loss.detach()), 1.0, 1.0, lambda phase: None)

    return step


def fused_ops(on: bool) -> AbstractContextManager[None]:
    """Inside, the fused ops run, or unless `on` their library calls."""
    return backend.forced("auto" if on else "library")


def step_config(
    model: DiTConfig,
    settings: StepSettings,
    place: Place,
    clips: Sequence[PackedSequence] = (CLIP_480P81,),
    room: float = ROOM,
) -> DiTConfig:
    """The model with the setting; of one that is too large for a step of `clips` with checkpointing as many blocks as
    fit into the share `room` of the free memory. Raises RuntimeError if none does."""
    config = place.pick(model, small(model, 2))
    config = replace(config, gradient_checkpointing=settings.checkpointing, attention=settings.attention)
    if place.device.type != "cuda":
        return config
    free = room * torch.cuda.mem_get_info(place.device)[0]
    fitting = blocks_that_fit(replace(config, gradient_checkpointing=True, attention="auto"), clips, free)
    if not fitting:
        raise RuntimeError(f"not one block fits: {free / GIB:.0f} GiB are free for a step. Use a larger device.")
    # a model that fits whole keeps all its blocks also without checkpointing, where it may run out of memory
    return replace(config, num_layers=fitting)


def step_flops(config: DiTConfig, sequences: Sequence[PackedSequence], recompute: bool) -> float:
    """FLOP of forward and backward, as plans count them; with `recompute` the forward counts twice, as under
    checkpointing."""
    work = replace(DiTWork.of(config), recomputes=recompute, part=ALL_TRAINED)
    return 1e12 * sum(work.computed_tflop(1, s.tokens, s.text_tokens, s.grid[0]) for s in sequences)


def _shares(
    config: DiTConfig, settings: StepSettings, place: Place, seconds: float, peak: float | None
) -> dict[str, float | None]:
    clip = [place.pick(CLIP_480P81, SMALL_CLIP)]
    model = step_flops(config, clip, recompute=False)
    hardware = step_flops(config, clip, recompute=settings.checkpointing)
    if settings.keeps:
        hardware -= sum(config.flops.attention(one.tokens, one.text_tokens, one.grid[0]) for one in clip)
    return {
        "TFLOP of the model": model / 1e12,
        "TFLOP/s": model / seconds / 1e12,
        "MFU": model / seconds / peak if peak else None,
        "HFU": hardware / seconds / peak if peak else None,
    }


def _memory(config: DiTConfig, settings: StepSettings, place: Place, peak: float | None) -> dict[str, float | None]:
    counts = settings.fused and settings.attention == "auto" and not (settings.compiled or settings.fetched)
    clips = [place.pick(CLIP_480P81, SMALL_CLIP)]
    model = (step_bytes(config, clips) + settings.keeps * kept_bytes(config, clips)) / GIB if counts else None
    return {
        "peak GiB": peak,
        "memory model GiB": model,
        "memory model off by": None if model is None or peak is None else abs(model / peak - 1),
    }
