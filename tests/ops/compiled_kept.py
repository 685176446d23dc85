"""Compiled blocks in passes that keep what attention gives, and in others: prints how much code there is after each.

    python -m tests.ops.compiled_kept [autocast]

A process, as a worker is: what other tests have compiled would be in it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from app.export.parity import parity_sample
from ops.comm.collectives import Group
from ops.models.base.config import DiTConfig
from ops.models.base.transformer import PackedTransformer
from ops.models.load import build_dit
from ops.packed.packing import Layout
from ops.packed.packing import Sequence as PackedSequence
from ops.packed.patches import patchify
from tests.families.registry import VARIANTS
from tests.ops.compiled_rank import compiled, gradients

FP32 = {"atol": 1e-5, "rtol": 1e-5}


def run(
    module: nn.Module, config: DiTConfig, copies: Sequence[bool], by_frame: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The velocity of copies of a family's sample, whole or their first row of patches, and its gradients; with a time
    for each copy, or for each frame of it."""
    sample = parity_sample(config)
    conditions, sequences, rows = sample.conditions, [], []
    for whole in copies:
        latent = sample.latent if whole else sample.latent[:, :, : config.patch[1]]
        t, h, w = (size // patch for size, patch in zip(latent.shape[1:], config.patch, strict=True))
        sequences.append(PackedSequence((t, h, w), len(sample.text), 0, sample.clean_frames, frame_times=by_frame))
        rows.append(patchify(latent, config.patch))
    layout = Layout(sequences)
    times = torch.linspace(1, 2, layout.num_times) if by_frame else torch.ones(len(copies))
    out = module(
        torch.cat(rows),
        sample.timestep * times,
        sample.text.repeat(len(copies), 1),
        layout,
        Group.solo(),
        conditions,
    )
    out.square().mean().backward()
    return out.detach(), gradients(module)


def main(autocast: bool) -> None:
    config = replace(VARIANTS["wan"], gradient_checkpointing=True)
    ours, theirs = compiled(build_dit(config, 0)), build_dit(config, 0)
    assert isinstance(ours, PackedTransformer)
    graphs, close = [], {"atol": 5e-2, "rtol": 5e-2} if autocast else FP32
    for keeps in (False, True, False):
        ours.keeps_attention = keeps
        for copies in ([False], [False] * 2, [True] * 3):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found, expected = run(ours, config, copies), run(theirs, config, copies)
            torch.testing.assert_close(found, expected, **close)
            assert torch.is_autocast_cache_enabled()
        graphs.append(counters["stats"]["unique_graphs"])
    print(json.dumps(graphs))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main("autocast" in sys.argv[1:])
