"""A worker without a cluster: its executor in a generation of its own, and cascades whose encodes have run here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor

from actors.config import TrainConfig
from actors.messages import CascadeTask, StepSample
from actors.worker.executor import Executor
from actors.worker.handoff import EncodeResult
from actors.worker.loading import Modules
from actors.worker.meter import Meter
from ops.comm.groups import Groups
from ops.geometry import Geometry
from ops.models.base.config import DiTConfig
from ops.models.base.transformer import PackedTransformer
from ops.models.config import ImageConfig, ModelConfig, TextConfig, VAEConfig
from ops.models.families import FAMILIES
from ops.packed.packing import Sequence as PackedSequence
from ops.update.sync import FlatSync
from ops.waiting import CancelToken

if TYPE_CHECKING:
    from ops.models.base.vae import VAE
    from ops.models.text import TextEncoder


@dataclass(frozen=True, slots=True)
class _Width:
    """All that a cascade asks of an encoder."""

    channels: int = 0
    dim: int = 0


def worker_alone(
    dit: PackedTransformer, config: DiTConfig, meter: Meter | None = None, groups: Groups | None = None
) -> Executor:
    """Trains these bf16 weights on their device, as the only one of its generation or in that of the `groups`."""
    modules = Modules(
        config=model_of(config),
        geometry=Geometry(patch=config.patch),
        dit=dit,
        vae=cast("VAE", _Width(channels=config.out_channels)),
        text=cast("TextEncoder", _Width(dim=config.text_dim)),
    )
    train = TrainConfig(parameter_dtype="bfloat16", autocast="bfloat16")
    device = next(dit.parameters()).device
    worker = Executor(modules, FlatSync(dit, train.optimizer, train.steps), train, device, meter=meter)
    groups = groups or Groups(dist.HashStore(), 0, (0,), "gloo", 0, 60.0, CancelToken(), "127.0.0.1")
    worker.form(0, groups, None)
    return worker


def model_of(config: DiTConfig) -> ModelConfig:
    """The encoders whose results a transformer takes: an image of the first frame, a pooled vector, where it does."""
    text = TextConfig(d_model=config.text_dim)
    if config.pooled_width:
        (kind, *_) = FAMILIES[config.architecture].texts
        text = replace(text, kind=kind, pooled_dim=config.pooled_width)
    image = ImageConfig(d_model=config.image_width) if config.image_width else None
    if image and config.image_rows:  # of two pictures, each of its patches and one more
        image = replace(image, size=math.isqrt(config.image_rows // 2 - 1) * image.patch)
    return ModelConfig(dit=config, vae=VAEConfig(channels=config.out_channels), text=text, image=image)


def encoded_cascade(
    worker: Executor,
    step: int,
    name: str,
    pack: Sequence[PackedSequence],
    make: Callable[..., Tensor] = torch.randn,
    share: float = 1.0,
) -> CascadeTask:
    """A cascade of `share` of a step, whose encode results lie on the worker; `make` makes their rows."""
    model, frame = worker.modules.config, worker.frame
    samples = [
        StepSample(step=step, item=name, index=i, key=f"{name}/{i}", grid=one.grid, weight=share / len(pack))
        for i, one in enumerate(pack)
    ]
    for sample, one in zip(samples, pack, strict=True):
        for module, rows, width in (
            ("vae", one.tokens + frame.tail, frame.width),
            ("text", one.text_tokens + model.text.tail, model.dit.text_dim),
        ):
            encoded = make(rows, width, dtype=torch.bfloat16, device=worker.device)
            worker.store.keep(module, EncodeResult(id=sample.id, rows=encoded))
    return CascadeTask(
        generation=0,
        step=step,
        cascade=name,
        name=f"dit {name} s{step}",
        module="dit",
        bag=(0,),
        samples=tuple(samples),
        pieces=(),
        planned_start_s=0.0,
        planned_end_s=0.0,
        sources={"vae": (0,) * len(pack), "text": (0,) * len(pack)},
    )
