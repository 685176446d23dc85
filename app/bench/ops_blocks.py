"""A transformer block with and without the fused ops: Diffusers' own, and the same with the ops swapped in.

Same weights, same inputs; forward and backward, time and peak memory, plain and under full activation checkpointing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from app.bench.timing import Timing, measure, peak_bytes
from ops.diffusers_swap.fuse import fuse
from ops.units import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockResult:
    """Forward and backward of one block."""

    block: str
    tokens: int
    checkpointing: bool
    variant: str
    timing: Timing
    peak_bytes: int


class BlockInputs(TypedDict):
    """Arguments of a block's forward. Wan names its rotary angles `rotary_emb`, HunyuanVideo `freqs_cis`."""

    hidden_states: Tensor  # [1, tokens, width]
    encoder_hidden_states: Tensor  # [1, text tokens, width]
    temb: Tensor
    rotary_emb: NotRequired[tuple[Tensor, Tensor]]  # cosines and sines
    freqs_cis: NotRequired[tuple[Tensor, Tensor]]


def wan_block(width: int, ffn: int, tokens: int, device: torch.device) -> tuple[nn.Module, BlockInputs]:
    """Wan2.1: 1536 wide and 8960 in the MLP is the 1.3B model."""
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    heads = width // 128
    block = WanTransformerBlock(width, ffn, heads, cross_attn_norm=True).to(device, torch.bfloat16)
    angles = torch.rand(1, tokens, 1, 64, device=device).repeat_interleave(2, dim=-1)
    return block, {
        "hidden_states": torch.randn(1, tokens, width, device=device, dtype=torch.bfloat16),
        "encoder_hidden_states": torch.randn(1, 512, width, device=device, dtype=torch.bfloat16),
        "temb": torch.randn(1, 6, width, device=device),
        "rotary_emb": (angles.cos(), angles.sin()),
    }


def mmdit_block(width: int, tokens: int, device: torch.device) -> tuple[nn.Module, BlockInputs]:
    """HunyuanVideo's double-stream block: 3072 wide is the 13B model."""
    from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoTransformerBlock

    block = HunyuanVideoTransformerBlock(width // 128, 128, 4.0).to(device, torch.bfloat16)
    angles = torch.rand(tokens, 64, device=device).repeat_interleave(2, dim=-1)
    return block, {
        "hidden_states": torch.randn(1, tokens, width, device=device, dtype=torch.bfloat16),
        "encoder_hidden_states": torch.randn(1, 256, width, device=device, dtype=torch.bfloat16),
        "temb": torch.randn(1, width, device=device, dtype=torch.bfloat16),
        "freqs_cis": (angles.cos(), angles.sin()),
    }


def compare_block(
    name: str, block: nn.Module, inputs: BlockInputs, device: torch.device, repeats: int
) -> list[BlockResult]:
    """The block as it is and fused."""
    fused = copy.deepcopy(block)
    fuse(fused)
    results = []
    for checkpointing in (False, True):
        for variant, module in (("eager", block), ("fused", fused)):
            call = _training_call(module, inputs, checkpointing)
            peak = peak_bytes(call, device)
            timing = measure(_always(call), GIB, device, repeats)  # one buffer set: a block's tensors pass the L2
            results.append(
                BlockResult(
                    block=name,
                    tokens=inputs["hidden_states"].shape[1],
                    variant=variant,
                    checkpointing=checkpointing,
                    timing=timing,
                    peak_bytes=peak,
                )
            )
    return results


def _always(call: Callable[[], object]) -> Callable[[int], Callable[[], object]]:
    return lambda _: call


def _training_call(block: nn.Module, inputs: BlockInputs, checkpointing: bool) -> Callable[[], object]:
    leaves: list[Tensor] = list(block.parameters())
    for tensor in (inputs["hidden_states"], inputs["encoder_hidden_states"]):
        tensor.requires_grad_()
        leaves.append(tensor)

    def call() -> object:
        if checkpointing:
            out = checkpoint(lambda: block(**inputs), use_reentrant=False, preserve_rng_state=False)
        else:
            out = block(**inputs)
        outs = out if isinstance(out, tuple) else (out,)
        return torch.autograd.grad([o.float().square().mean() for o in outs], leaves, allow_unused=True)

    return call
