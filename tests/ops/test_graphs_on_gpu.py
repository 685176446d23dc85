"""CUDA graphs of blocks, and large uploads, on a GPU. Imports nothing but torch and pytest, like all tests of a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from actors.worker.meter import DeviceMeter
from app.bench.gpu.graphs import PicturePass
from app.bench.gpu.measurement import Place
from app.bench.gpu.models import PICTURE_256P, WAN_1_3B, PackedCall, build, with_layers
from ops.comm.collectives import Group
from ops.packed.graphed_blocks import CudaGraphs, GraphedBlocks, held_by_graphs
from ops.packed.uploads import expect, upload
from ops.units import GIB
from ops.upload_room import BLOCK, most_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_memory_of_graphs_is_no_room_for_cascades() -> None:
    device = torch.device("cuda", 0)
    config = replace(with_layers(WAN_1_3B, 2), gradient_checkpointing=True)
    dit = build(config, device).train()
    call = PackedCall.of(config, [PICTURE_256P] * 4, device)
    dit.graphed = GraphedBlocks(lambda layout: 1.0, CudaGraphs(device), warm_up=1)
    meter, before = DeviceMeter(device), held_by_graphs(device)

    def once() -> None:
        dit(call.tokens, call.timesteps, call.text, call.layout, Group.solo()).float().square().mean().backward()
        dit.zero_grad()

    once()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    room, taken = meter.room_gib(), torch.cuda.mem_get_info(device)[0]
    once()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held, left = held_by_graphs(device) - before, torch.cuda.mem_get_info(device)[0]
    assert dit.graphed.by_graphs and held > 0
    beside = 0.4 * GIB  # gradients of a block, what goes in and out, workspaces of cuBLAS for the stream of captures
    assert held <= taken - left <= held + beside
    now = meter.room_gib()
    assert room is not None and now is not None and room - now >= held / GIB


def test_passes_by_graphs_are_right_beside_a_busy_thread() -> None:
    measured = PicturePass(name="two blocks", pictures=(PICTURE_256P,), beside=True, layers=2)
    figures = measured.run(Place(device=torch.device("cuda", 0), rehearse=False), {})
    assert figures["right"], figures


def test_clips_that_are_queued_share_their_pinned_memory() -> None:
    """Ten of the largest, while the device is busy."""
    device, clip = torch.device("cuda", 0), torch.randint(0, 255, (129, 720, 1280, 3), dtype=torch.uint8)
    expect(device, clip.numel())
    torch.cuda.reset_peak_host_memory_stats()
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    busy = torch.randn(8192, 8192, device=device)
    for _ in range(200):
        busy = torch.mm(busy, busy).clamp_(-1, 1)
    there = [upload([clip], device)[0] for _ in range(10)]
    assert torch.cuda.host_memory_stats()["allocated_bytes.peak"] - before <= most_blocks(clip.numel()) * BLOCK
    assert all(torch.equal(one, there[0]) for one in there) and torch.equal(there[0].cpu(), clip)
