"""Blocks by graphs compute what blocks as written compute, in passes that come again, and in no others."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.bench.gpu.models import WAN_1_3B, WAN_14B
from app.export.parity import parity_sample
from ops.comm.collectives import Group
from ops.models.base.config import DiTConfig
from ops.models.base.transformer import PackedTransformer
from ops.models.experts import by_graphs, code_made, most_in_small_pass, share_of_small
from ops.models.load import build_dit
from ops.packed.graphed_blocks import Capture, CudaGraphs, GraphedBlocks, held_by_graphs
from ops.packed.packing import Layout
from ops.packed.packing import Sequence as PackedSequence
from ops.packed.patches import patchify
from tests.families.registry import ONE_EACH, VARIANTS
from tests.ops.captures import TapeCapture
from tests.ops.compiled_rank import TINY, gradients

torch.set_num_threads(1)
GRAPHED = [name for name in ONE_EACH if VARIANTS[name].compiles]
SLOW = ("hunyuan15",)  # half a minute, six times what the next takes
Result = tuple[Tensor, list[Tensor]]


def graphed(config: DiTConfig, capture: Capture, **settings: Any) -> PackedTransformer:
    module = build_dit(config, 0)
    assert isinstance(module, PackedTransformer)
    usual = {"work": partial(share_of_small, config), "capture": capture, "warm_up": 1}
    module.graphed = GraphedBlocks(**{**usual, **settings})
    return module


def run(
    module: nn.Module, config: DiTConfig, number: int, copies: Sequence[bool] = (True,), by_frame: bool = False
) -> Result:
    """The velocity of copies of a family's sample, whole or their first row of patches, and its gradients. Rows, times
    and text are other ones for each `number`, and times for each frame."""
    sample, factor = parity_sample(config), 1.0 + number / 8
    sequences, rows = [], []
    for whole in copies:
        latent = sample.latent if whole else sample.latent[:, :, : config.patch[1]]
        t, h, w = (size // patch for size, patch in zip(latent.shape[1:], config.patch, strict=True))
        sequences.append(PackedSequence((t, h, w), len(sample.text), 0, sample.clean_frames, frame_times=by_frame))
        rows.append(patchify(latent, config.patch) * factor)
    layout = Layout(sequences)
    times = torch.linspace(1, 2, layout.num_times) if by_frame else torch.ones(len(copies))
    out = module(
        torch.cat(rows),
        sample.timestep / factor * times,
        sample.text.repeat(len(copies), 1) * factor,
        layout,
        Group.solo(),
        sample.conditions,
    )
    loss = out.square().mean()
    with torch.autocast("cpu", enabled=False):  # as a worker's backward pass
        loss.backward()
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


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.long) if one in SLOW else one for one in GRAPHED])
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
    assert (capture.prepared, capture.captured) == (2, 2 * 2 * blocks)  # two kinds, each block forward and backward
    assert [after - before for before, after in zip([0, *played], played)] == [
        2 * blocks * (number in (1, 3, 4, 5, 6)) for number in range(7)
    ]


@pytest.mark.parametrize("name", ["wan", "skyreels df at a frame rate"])
def test_passes_with_a_time_for_each_frame_compute_the_same_and_are_a_kind_of_their_own(name: str) -> None:
    config, capture = checkpointed(name), TapeCapture()
    ours, theirs = graphed(config, capture), build_dit(config, 0)
    for number, by_frame in enumerate((False, True, True, False, True)):
        found = run(ours, config, number, (True, False), by_frame)
        assert_same(ours, found, run(theirs, config, number, (True, False), by_frame))
    assert capture.captured == 2 * 2 * len(ours.all_blocks())


def test_passes_of_a_kind_may_overlap() -> None:
    """Three forward passes, then all backward: what a graph has left for one pass is of that pass alone."""
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
        for number in range(2):  # a GPU captures no pass while another is alive
            run(module, config, number)
        for loss in losses(module):
            loss.backward()
        pairs.append(gradients(module))
    assert all(torch.equal(one, other) for one, other in zip(*pairs, strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_rank": 2, "lora_targets": ("to_q", "to_v")},
        {"lora_rank": 2},
        {"lora_rank": 2, "frozen_dtype": "float8"},
        {"train_only": ("blocks.1",)},
    ],
    ids=["some projections", "lora", "beside 8 bits", "last block"],
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


def test_blocks_whose_weights_have_moved_run_as_written(caplog: pytest.LogCaptureFixture) -> None:
    config, capture = replace(checkpointed("wan"), num_layers=2), TapeCapture()
    ours, theirs = graphed(config, capture), build_dit(config, 0)
    for number in range(3):
        assert_same(ours, run(ours, config, number), run(theirs, config, number))
    moved = ours.all_blocks()[1]
    for parameter in moved.parameters():
        parameter.data = parameter.data.clone()
    played = capture.played
    with caplog.at_level(logging.WARNING):
        for number in range(3, 6):
            assert_same(ours, run(ours, config, number), run(theirs, config, number))
    assert capture.played == played + 2, "the block before it, in the pass in which that was found"
    assert caplog.text.count("run as written from now on: weights have moved") == 1


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
        assert ours.graphed(ours.all_blocks()[0], ()) is None
    large = graphed(config, capture, work=lambda layout: 1.1)
    for number in range(3):
        run(large, config, number)
    assert capture.captured == 0


def test_the_first_kinds_that_came_often_enough_have_graphs_for_good() -> None:
    config, capture = checkpointed("wan"), TapeCapture()
    ours, theirs = graphed(config, capture, kinds=1, warm_up=2), build_dit(config, 0)
    played = []
    for number, copies in enumerate(([True], [False], [True], [True], [False], [False], [False], [True])):
        before = capture.played
        assert_same(ours, run(ours, config, number, copies), run(theirs, config, number, copies))
        played.append(capture.played > before)
    assert played == [False, False, False, True, False, False, False, True]
    assert ours.graphed is not None
    assert ours.graphed.captures == len(ours.all_blocks()) and capture.prepared == 1


@pytest.mark.parametrize(("graphs_s", "stays"), [(0.98, False), (0.9, True)])
def test_a_kind_that_graphs_do_not_make_faster_runs_as_written_again(graphs_s: float, stays: bool) -> None:
    config, capture = checkpointed("wan"), TapeCapture()
    ours, theirs = graphed(config, capture, compared=True, warm_up=3), build_dit(config, 0)
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


class Failing(TapeCapture):
    """The n-th capture fails, when its work has been done."""

    def __init__(self, fails: int) -> None:
        super().__init__()
        self._fails = fails

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        played = super().__call__(work)
        if self.captured == self._fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        return played


@pytest.mark.parametrize("fails", [1, 2, 3, 4], ids=["forward", "backward", "of a later block", "its backward"])
def test_what_cannot_be_captured_runs_as_written(fails: int, caplog: pytest.LogCaptureFixture) -> None:
    """Blocks before it go on with their graphs in the pass in which that happens, forward and backward."""
    config, capture = replace(checkpointed("wan"), num_layers=2), Failing(fails)
    ours, theirs = graphed(config, capture), build_dit(config, 0)
    with caplog.at_level(logging.WARNING):
        for number in range(4):
            assert_same(ours, run(ours, config, number), run(theirs, config, number))
    assert capture.captured == fails and capture.played == (2 if fails > 2 else 0)
    assert caplog.text.count("run as written from now on: operation not permitted") == 1


def test_blocks_that_are_captured_count_as_code_that_was_made() -> None:
    config = checkpointed("wan")
    ours = graphed(config, TapeCapture())
    before, made = code_made(ours), []
    for number in range(3):
        run(ours, config, number)
        made.append(code_made(ours) - before)
    assert made == [0, len(ours.all_blocks()), len(ours.all_blocks())] and by_graphs(ours)


def test_what_is_small_depends_on_weights_and_rows() -> None:
    """Blocks of Wan2.1, of two sizes."""
    picture, fewer = PackedSequence((1, 30, 52), 512), PackedSequence((1, 16, 26), 512)
    for config, pack, small in (
        (WAN_1_3B, [picture], True),
        (WAN_1_3B, [picture] * 8, True),
        (WAN_1_3B, [picture] * 9, False),
        (WAN_1_3B, [fewer] * 4, True),
        (WAN_14B, [picture], False),
        (WAN_14B, [fewer], False),
        (WAN_14B, [PackedSequence((1, 2, 2), 8)], False),  # its gradients would be there three times
    ):
        assert (share_of_small(config, Layout(pack)) <= 1) == small
    assert most_in_small_pass(WAN_1_3B, picture) == 8 and most_in_small_pass(WAN_14B, picture) == 0


class FakeCuda:
    """What `CudaGraphs` asks of torch.cuda, in its order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.graphs: list[weakref.ref[object]] = []
        cuda = self

        class Stream:
            device_index = 0

            def __init__(self, name: str) -> None:
                self.name = name

            def wait_stream(self, other: Stream) -> None:
                cuda.said.append(f"{self.name} waits for {other.name}")

        class Graph:
            def __init__(self) -> None:
                cuda.graphs.append(weakref.ref(self))

            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                cuda.said.append(f"begin in {pool} {capture_error_mode}")

            def capture_end(self) -> None:
                cuda.said.append("end")

            def replay(self) -> None:
                cuda.said.append("replay")

        @contextmanager
        def within(stream: Stream) -> Iterator[None]:
            cuda.said.append(f"on {stream.name}")
            yield
            cuda.said.append(f"off {stream.name}")

        main, beside = Stream("main"), Stream("beside")
        for name, value in {
            "Stream": lambda device: beside,
            "CUDAGraph": Graph,
            "current_stream": lambda device: main,
            "stream": within,
            "graph_pool_handle": lambda: "pool",
            "synchronize": lambda device: cuda.said.append("synchronize"),
            "empty_cache": lambda: cuda.said.append("empty"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(
            torch._C, "_cuda_endAllocateToPool", lambda device, pool: cuda.said.append(f"leave {pool}"), raising=False
        )


def test_memory_of_graphs_is_counted_when_there_are_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    segments, asked = [], []

    def snapshot() -> list[dict[str, object]]:
        asked.append(len(segments))
        return segments

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    here, other = torch.device("cuda", 0), torch.device("cuda", 1)
    capture, before = CudaGraphs(here), held_by_graphs(here)
    assert not asked, "nothing is captured"
    sizes = (((0, 7), 3), ([0, 7], 4), ((0, 0), 9))
    segments += [{"segment_pool_id": pool, "total_size": size} for pool, size in sizes]
    capture(lambda: None)
    assert held_by_graphs(here) - before == held_by_graphs(here) - before == 7 and held_by_graphs(other) == 0
    assert len(asked) == 1
    capture(lambda: None)
    held_by_graphs(here)
    assert len(asked) == 2


def test_work_is_warmed_up_and_captured_beside_the_stream_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    capture = CudaGraphs(torch.device("cuda"))
    capture.prepare()
    play = capture(lambda: cuda.said.append("work"))
    play()
    assert cuda.said == [
        "synchronize",
        "empty",
        "beside waits for main",
        "on beside",
        "work",
        "begin in pool thread_local",
        "work",
        "end",
        "off beside",
        "main waits for beside",
        "replay",
    ]


def test_a_capture_that_fails_ends_and_no_graph_ever_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a graph would go workspaces that others of its stream use."""
    cuda = FakeCuda(monkeypatch)
    capture = CudaGraphs(torch.device("cuda"))
    capture(lambda: None)
    calls = iter([None, RuntimeError("no")])

    def fails() -> None:
        if (error := next(calls)) is not None:
            raise error

    cuda.said.clear()
    with pytest.raises(RuntimeError, match="no"):
        capture(fails)
    gc.collect()
    assert cuda.said[-3:] == ["end", "leave pool", "main waits for beside"]
    assert len(cuda.graphs) == 2 and all(graph() is not None for graph in cuda.graphs)


def test_a_capture_fails_with_its_own_error_where_pytorch_has_another_name_for_leaving_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks run as written after a RuntimeError alone."""
    FakeCuda(monkeypatch)
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    calls = iter([None, RuntimeError("no")])

    def fails() -> None:
        if (error := next(calls)) is not None:
            raise error

    with pytest.raises(RuntimeError, match="no"):
        CudaGraphs(torch.device("cuda"))(fails)
