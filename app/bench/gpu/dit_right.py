"""Packed transformer blocks of real width: bf16 against the same weights in fp32, and packed against one by one."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from app.bench.gpu.measurement import Earlier, NamedFigures, Place, RunsAnywhere, relative_error
from app.bench.gpu.models import (
    HUNYUAN15_8B,
    HUNYUAN_13B,
    KANDINSKY_LITE,
    SKYREELS_DF_1_3B,
    WAN_1_3B,
    PackedCall,
    build,
    small,
    with_layers,
)
from ops.comm.collectives import Group
from ops.flow.train_pass import packed_loss
from ops.models.base.config import DiTConfig
from ops.packed.packing import Layout, Sequence

OUTPUT, GRADIENT = 2e-2, 5e-2  # relative L2 of bf16: a few blocks, each of a dozen roundings of 1.67e-3
PACKED = 1e-4  # fp32, other shapes of the same products
PACK = [Sequence((5, 12, 16), 77), Sequence((1, 20, 20), 33), Sequence((3, 8, 8), 128)]
SMALL_PACK = [Sequence((2, 2, 3), 5), Sequence((1, 2, 2), 3)]
LAYERS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class DiTCheck(RunsAnywhere):
    """A stack of blocks of one family."""

    family: str
    config: DiTConfig
    by_frame: bool = False  # each latent frame has a time of its own
    estimate_s: float = 18.0

    @property
    def name(self) -> str:
        return f"dit-right.{self.family}"

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        config = place.pick(with_layers(self.config, LAYERS), small(self.config, 1))
        pack = [replace(one, frame_times=self.by_frame) for one in place.pick(PACK, SMALL_PACK)]
        half = build(config, place.device)
        full = copy.deepcopy(half).float()
        call = PackedCall.of(config, pack, place.device)
        ours, gradient = _pass(half, call)
        exact_call = replace(call, tokens=call.tokens.float(), text=call.text.float())
        theirs, exact = _pass(full, exact_call)
        output, backward = relative_error(ours, theirs), relative_error(gradient, exact)
        packed = relative_error(theirs, _one_by_one(full, exact_call, pack))
        return {
            "right": output <= OUTPUT and backward <= GRADIENT and packed <= PACKED,
            "bf16 output against fp32": output,
            "bf16 gradient against fp32": backward,
            "packed against one by one, fp32": packed,
        }


def measurements() -> list[DiTCheck]:
    return [
        DiTCheck(family="wan", config=WAN_1_3B),
        DiTCheck(family="hunyuan", config=HUNYUAN_13B),
        DiTCheck(family="hunyuan15", config=HUNYUAN15_8B),
        DiTCheck(family="kandinsky", config=KANDINSKY_LITE),
        DiTCheck(family="skyreels-by-frame", config=SKYREELS_DF_1_3B, by_frame=True),
    ]


def _pass(dit: nn.Module, call: PackedCall) -> tuple[Tensor, Tensor]:
    """The output, and all gradients as one fp32 vector."""
    out = dit(call.tokens, call.timesteps, call.text, call.layout, Group.solo())
    packed_loss(out.float(), call.target, call.layout, call.weights).backward()
    gradients = [p.grad.float().flatten() for p in dit.parameters() if p.grad is not None]
    dit.zero_grad(set_to_none=True)
    return out.detach(), torch.cat(gradients)


@torch.no_grad()
def _one_by_one(dit: nn.Module, call: PackedCall, pack: list[Sequence]) -> Tensor:
    """The same samples, each in a call of its own."""
    tokens, texts = call.tokens.split(call.layout.lengths), call.text.split(call.layout.text_lengths)
    layouts = [Layout([sequence], device=call.layout.device) for sequence in pack]
    times = call.timesteps.split([layout.num_times for layout in layouts])
    calls = zip(tokens, times, texts, layouts, strict=True)
    return torch.cat([dit(*given, Group.solo()) for given in calls])
