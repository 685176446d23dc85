"""Blocks by graphs compute what blocks as written compute, in passes that come again, and in no others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.bench.gpu.models import WAN_1_3B, WAN_14B
from app.export.parity import parity_sample
from ops.comm import Group
from ops.graphed_blocks import Capture, GraphedBlocks
from ops.models.base.config import DiTConfig
from ops.models.base.transformer import PackedTransformer
from ops.models.experts import is_small_pass
from ops.models.load import build_dit
from ops.packing import Layout
from ops.packing import Sequence as PackedSequence
from ops.patches import patchify
from tests.families.registry import ONE_EACH, VARIANTS
from tests.ops.captures import TapeCapture
from tests.ops.compiled_rank import TINY, gradients

torch.set_num_threads(1)
GRAPHED = [name for name in ONE_EACH if VARIANTS[name].compiles]
Result = tuple[Tensor, list[Tensor]]


def graphed(config: DiTConfig, capture: Capture, **settings: Any) -> PackedTransformer:
    module = build_dit(config, 0)
    assert isinstance(module, PackedTransformer)
    module.graphed = GraphedBlocks(**{"is_small": partial(is_small_pass, config), "capture": capture, **settings})
    return module


def run(module: nn.Module, config: DiTConfig, number: int, copies: Sequence[bool] = (True,)) -> Result:
    """The velocity of copies of a family's sample, whole or their first row of patches, and its gradients. Rows, times
    and text are other ones for each `number`."""
    sample, factor = parity_sample(config), 1.0 + number / 8
    sequences, rows = [], []
    for whole in copies:
        latent = sample.latent if whole else sample.latent[:, :, : config.patch[1]]
        t, h, w = (size // patch for size, patch in zip(latent.shape[1:], config.patch, strict=True))
        sequences.append(PackedSequence((t, h, w), len(sample.text), 0, sample.clean_frames))
        rows.append(patchify(latent, config.patch) * factor)
    out = module(
        torch.cat(rows),
        sample.timestep.repeat(len(copies)) / factor,
        sample.text.repeat(len(copies), 1) * factor,
        Layout(sequences),
        Group.solo(),
        sample.conditions,
    )
    out.square().mean().backward()
    return out.detach(), gradients(module)


def assert_same(ours: PackedTransformer, found: Result, expected: Result) -> None:
    """Bit for bit, but for weights in front of the blocks: gradients of what all blocks are given are added up block by
    block, in another order."""
    assert torch.equal(found[0], expected[0])
    own = {id(parameter) for block in ours.all_blocks() for parameter in block.parameters()}
    trained = [parameter for parameter in ours.parameters() if parameter.requires_grad]
    for parameter, one, other in zip(trained, found[1], expected[1], strict=True):
        if id(parameter) in own:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-6 * float(other.abs().max()))


def checkpointed(name: str) -> DiTConfig:
    return replace(VARIANTS[name], gradient_checkpointing=True)


@pytest.mark.parametrize("name", GRAPHED)
def test_passes_that_come_again_compute_the_same(name: str) -> None:
    """Also when another kind came between, and after an update of the weights."""
    config, capture = checkpointed(name), TapeCapture()
    ours, theirs = graphed(config, capture), build_dit(config, 0)
    played = []
    for number, copies in enumerate(([True], [True], [True, False], [True], [True, False], [True], [True, False])):
        assert_same(ours, run(ours, config, number, copies), run(theirs, config, number, copies))
        played.append(capture.played)
        for module in (ours, theirs):
            for parameter in module.parameters():
                parameter.data.mul_(1.01)
    blocks = len(ours.all_blocks())
    assert capture.captured == 2 * 2 * blocks  # two kinds, each block forward and backward
    assert [after - before for before, after in zip([0, *played], played)] == [
        2 * blocks * (number in (1, 3, 4, 5, 6)) for number in range(7)
    ]


def test_passes_of_a_kind_may_overlap() -> None:
    """Two forward passes, then both backward: what a graph has left for one pass is of that pass alone."""
    config = checkpointed("wan")

    def losses(module: nn.Module) -> list[Tensor]:
        found = []
        for number in range(3):
            sample = parity_sample(config)
            grid = tuple(size // patch for size, patch in zip(sample.latent.shape[1:], config.patch, strict=True))
            layout = Layout([PackedSequence(grid, len(sample.text))])  # type: ignore[arg-type]
            rows = patchify(sample.latent, config.patch) * (number + 1)
            out = module(rows, sample.timestep, sample.text, layout, Group.solo(), sample.conditions)
            found.append(out.square().mean())
        return found

    pairs = []
    for module in (graphed(config, TapeCapture()), build_dit(config, 0)):
        for loss in losses(module):
            loss.backward()
        pairs.append(gradients(module))
    assert all(torch.equal(one, other) for one, other in zip(*pairs, strict=True))


@pytest.mark.parametrize(
    "changes",
    [{"lora_rank": 2, "lora_targets": ("to_q", "to_v")}, {"lora_rank": 2}, {"train_only": ("blocks.1",)}],
    ids=["some projections", "lora", "last block"],
)
def test_frozen_weights_get_no_gradient(changes: dict[str, object]) -> None:
    config, capture = replace(TINY, **changes), TapeCapture()  # type: ignore[arg-type]
    ours, theirs = graphed(config, capture), build_dit(config, 0)
    for module in (ours, theirs):
        for index, parameter in enumerate(p for p in module.parameters() if p.requires_grad):
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(index))
    for number in range(3):
        assert_same(ours, run(ours, config, number), run(theirs, config, number))
    trained = 1 if "train_only" in changes else len(ours.all_blocks())
    assert capture.captured == 2 * trained
    assert all(p.grad is None for p in ours.parameters())


def test_under_autocast_weights_are_cast_as_they_are_now() -> None:
    config = checkpointed("wan")
    ours, theirs = graphed(config, TapeCapture()), build_dit(config, 0)
    for number in range(4):
        results = []
        for module in (ours, theirs):
            with torch.autocast("cpu", torch.bfloat16):
                results.append(run(module, config, number))
            for parameter in module.parameters():
                parameter.data.mul_(1.1)
        assert_same(ours, *results)


def test_weights_that_have_moved_are_captured_again() -> None:
    config, capture = checkpointed("wan"), TapeCapture()
    ours, theirs = graphed(config, capture), build_dit(config, 0)
    for number in range(3):
        assert_same(ours, run(ours, config, number), run(theirs, config, number))
    before = capture.captured
    moved = ours.all_blocks()[0]
    for parameter in moved.parameters():
        parameter.data = parameter.data.clone()
    assert_same(ours, run(ours, config, 3), run(theirs, config, 3))
    assert capture.captured == before + 2


def test_large_passes_bags_and_passes_without_a_gradient_run_as_written() -> None:
    config, capture = checkpointed("wan"), TapeCapture()
    ours = graphed(config, capture)
    with torch.no_grad():
        for _ in range(3):
            sample = parity_sample(config)
            grid = tuple(size // patch for size, patch in zip(sample.latent.shape[1:], config.patch, strict=True))
            layout = Layout([PackedSequence(grid, len(sample.text))])  # type: ignore[arg-type]
            rows = patchify(sample.latent, config.patch)
            ours(rows, sample.timestep, sample.text, layout, Group.solo(), sample.conditions)
    assert ours.graphed is not None
    for _ in range(3):
        ours.graphed.begin(Layout([PackedSequence((1, 2, 2), 3)], degree=2))
        assert ours.graphed(ours.all_blocks()[0]) is None
    large = graphed(config, capture, is_small=lambda layout: False)
    for number in range(3):
        run(large, config, number)
    assert capture.captured == 0


def test_graphs_of_kinds_that_were_not_seen_for_long_go() -> None:
    config, capture = checkpointed("wan"), TapeCapture()
    ours, theirs = graphed(config, capture, kinds=1), build_dit(config, 0)
    counts = []
    for number, copies in enumerate(([True], [True], [False], [False], [True], [True])):
        assert_same(ours, run(ours, config, number, copies), run(theirs, config, number, copies))
        counts.append(capture.captured // (2 * len(ours.all_blocks())))
    assert counts == [0, 1, 1, 2, 3, 3]


@pytest.mark.parametrize(("graphs_s", "stays"), [(0.98, False), (0.9, True)])
def test_a_kind_that_graphs_do_not_make_faster_runs_as_written_again(graphs_s: float, stays: bool) -> None:
    config, capture = checkpointed("wan"), TapeCapture()
    ours, theirs = graphed(config, capture, compared=True), build_dit(config, 0)
    assert ours.graphed is not None
    played, known = [], []
    for number in range(9):
        before = capture.played
        assert_same(ours, run(ours, config, number), run(theirs, config, number))
        played.append(capture.played > before)
        known.append(ours.graphed.timing())
        # the first pass of a kind takes longer, and so does the one that captures
        known[-1](9.0 if number in (0, 3) else graphs_s if played[-1] else 1.0)
    assert played == [False] * 3 + [True] * 3 + [stays] * 3


def test_what_cannot_be_captured_runs_as_written(caplog: pytest.LogCaptureFixture) -> None:
    config, asked = checkpointed("wan"), []

    def fails(work: Callable[[], None]) -> Callable[[], None]:
        asked.append(work)
        raise RuntimeError("operation not permitted when stream is capturing")

    ours, theirs = graphed(config, fails), build_dit(config, 0)
    with caplog.at_level(logging.WARNING):
        for number in range(4):
            assert_same(ours, run(ours, config, number), run(theirs, config, number))
    assert len(asked) == 1 and "run as written from now on: operation not permitted" in caplog.text


def test_what_is_small_depends_on_weights_and_rows() -> None:
    """Blocks of Wan2.1, of two sizes."""
    picture, fewer = PackedSequence((1, 30, 52), 512), PackedSequence((1, 16, 26), 512)
    for config, pack, small in (
        (WAN_1_3B, [picture], True),
        (WAN_1_3B, [picture] * 2, False),
        (WAN_1_3B, [fewer] * 4, True),
        (WAN_14B, [picture], False),
        (WAN_14B, [fewer], False),
        (WAN_14B, [PackedSequence((1, 8, 13), 64)], True),
    ):
        assert is_small_pass(config, Layout(pack)) == small
