"""Compiled blocks compute what blocks as written compute, in one code for any rows, text and sequences."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

import ops.attention.opaque
from app.export.parity import parity_sample
from ops.attention.lengths import Lengths
from ops.attention.opaque import leave_opaque, opaque
from ops.comm.collectives import Group
from ops.models.base.transformer import PackedTransformer
from ops.models.experts import transformers
from ops.models.families import FAMILIES
from ops.models.load import build_dit
from ops.packed.compiled_blocks import CompiledBlocks, check_compiler
from ops.packed.packing import Exchange, Layout
from tests.families.registry import ONE_EACH, VARIANTS
from tests.ops.compiled_kept import FP32, run
from tests.ops.compiled_rank import PACKS, TINY, Parts, compiled, local_step

torch.set_num_threads(1)
COMPILED = [name for name in ONE_EACH if VARIANTS[name].compiles]
QUICK = ("wan",)
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


WARM_UP: list[Sequence[bool]] = [[True], [True, False]]
AFTER: list[Sequence[bool]] = [[False], [False] * 3, [True] * 4, [False, True, False], [True]]


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.long) for one in COMPILED]
)
@pytest.mark.timeout(600)
def test_one_code_serves_any_rows_and_sequences_and_computes_the_same(name: str) -> None:
    """Compiled once for one sequence and once for several, whichever comes first; then never again."""
    config = replace(VARIANTS[name], gradient_checkpointing=True)
    ours, theirs = compiled(build_dit(config, 0)), build_dit(config, 0)
    for copies in WARM_UP:
        torch.testing.assert_close(run(ours, config, copies), run(theirs, config, copies), **FP32)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    with torch._dynamo.config.patch(error_on_recompile=True):
        for copies in AFTER:
            torch.testing.assert_close(run(ours, config, copies), run(theirs, config, copies), **FP32)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.long
@pytest.mark.timeout(600)
def test_one_code_serves_any_frames_with_times_of_their_own() -> None:
    config = replace(VARIANTS["skyreels"], gradient_checkpointing=True)
    ours, theirs = compiled(build_dit(config, 0)), build_dit(config, 0)
    for copies in WARM_UP:
        torch.testing.assert_close(run(ours, config, copies, True), run(theirs, config, copies, True), **FP32)
    graphs = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for copies in AFTER:
            torch.testing.assert_close(run(ours, config, copies, True), run(theirs, config, copies, True), **FP32)
    assert counters["stats"]["unique_graphs"] == graphs > 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_bags_compute_the_same_also_with_ranks_that_have_no_rows(tmp_path: Path) -> None:
    """Three ranks, which share one head of four."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "tests.ops.compiled_rank"]
    ranks = [
        subprocess.Popen([*command, str(rank), "3", str(store.port), str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE)
        for rank in range(3)
    ]
    said = [rank.communicate(timeout=280)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], "\n".join(said)[-3000:]
    of_ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    whole = build_dit(TINY, 0)
    for parts, *found in zip(PACKS, *of_ranks, strict=True):
        for each, *shares in zip(local_step(whole, parts, Group.solo()), *found, strict=True):
            torch.testing.assert_close(sum(shares), each, atol=1e-5 * float(each.abs().max()), rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("frozen", ["same", "float8"])
def test_factors_are_trained_the_same(frozen: Literal["same", "float8"]) -> None:
    """LoRA of some projections: the first block's rows need no gradient, and blocks have plain layers beside others."""
    config = replace(TINY, lora_rank=2, lora_targets=("to_q", "to_v"), frozen_dtype=frozen)
    ours, theirs = compiled(build_dit(config, 0)), build_dit(config, 0)
    for module in (ours, theirs):  # factors begin as a product of zero
        for index, parameter in enumerate(p for p in module.parameters() if p.requires_grad):
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(index))
    for parts in ([((1, 3, 3), 4)], [((1, 3, 3), 4), ((2, 2, 2), 1)], [((1, 2, 5), 3)]):
        found, expected = (local_step(module, parts, Group.solo()) for module in (ours, theirs))
        assert len(expected) == 2 * 2 * 2 * config.num_layers
        torch.testing.assert_close(found, expected, **FP32)


@pytest.mark.long
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_passes_that_keep_what_attention_gives_run_the_same_code(autocast: bool) -> None:
    """`train.memory.attention` keeps it in some passes and not in others, by what passes have taken: long after the
    first cascades, when nobody waits for a compiler. In a process that has compiled nothing else, as a worker is."""
    command = [sys.executable, "-m", "tests.ops.compiled_kept", *["autocast"] * autocast]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    graphs = json.loads(done.stdout.splitlines()[-1])
    assert graphs[0] > 0 and len(set(graphs)) == 1


def test_code_behind_attention_is_one_however_its_result_lies_in_memory() -> None:
    """As heads come back from a bag, from attention without one, and from one clip after the other."""

    how = ""

    @opaque
    def attended(x: Tensor) -> Tensor:
        twice = 2 * x
        ways = {
            "own": twice,
            "of several": torch.stack([twice, x]).unbind(0)[0],
            "turned": twice.transpose(0, 1).contiguous().transpose(0, 1),
            "a part": torch.cat([twice, x])[: len(x)],
        }
        return ways[how]

    leave_opaque()
    block = torch.compile(lambda x: attended(x + 1).flatten(1).sin(), dynamic=True, backend="aot_eager")
    graphs = []
    for rows, how in ((5, "own"), (7, "of several"), (4, "turned"), (6, "a part"), (3, "own")):  # noqa: B007, attended
        x = torch.randn(rows, 4, 8, requires_grad=True)
        out = block(x)
        out.sum().backward()
        torch.testing.assert_close(out, (2 * (x + 1)).flatten(1).sin())
        torch.testing.assert_close(x.grad, 2 * (2 * (x + 1)).cos())
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1] == 2, "before it and behind it"


@pytest.mark.parametrize("name", COMPILED)
def test_attention_is_given_no_frozen_dataclass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 makes code for every field of one that a call outside of the code is given."""
    given: list[object] = []

    def noting(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            given.extend([*arguments, *named.values()])
            return function(*arguments, **named)

        return call

    outside = {name: noting(function) for name, function in ops.attention.opaque._functions.items()}
    monkeypatch.setattr(ops.attention.opaque, "_left", outside)
    run(build_dit(VARIANTS[name], 0), VARIANTS[name], [True, False])
    assert any(isinstance(one, Lengths | Exchange) for one in given)
    assert {type(one) for one in given if is_dataclass(one) and one.__dataclass_params__.frozen} == set()  # type: ignore[attr-defined]


def test_attention_is_not_looked_into_and_fused_ops_are_calls() -> None:
    seen: list[str] = []

    def spy(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    module = build_dit(TINY, 0)
    assert isinstance(module, PackedTransformer)
    module.compiled = CompiledBlocks(module.block_parts, spy)
    local_step(module, [((1, 2, 2), 2)], Group.solo())
    assert any("ln_modulate" in name for name in seen) and any("qk_norm_rope" in name for name in seen)
    assert any("linear" in name for name in seen) and not any("scaled_dot_product" in name for name in seen)


@pytest.mark.parametrize("name", [name for name, config in VARIANTS.items() if config.compiles])
def test_blocks_use_the_parts_of_a_layout_that_their_transformer_names(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others would be made in compiled code, which then held for this layout alone."""
    from app.export.parity import our_velocity

    config = VARIANTS[name]
    module, made = build_dit(config, 0), set[str]()
    runs = PackedTransformer.run

    def noted(self: PackedTransformer, block: nn.Module, *inputs: object) -> object:
        layout = next(one.layout for one in inputs if isinstance(getattr(one, "layout", None), Layout))
        before = set(layout.__dict__)
        result = runs(self, block, *inputs)
        made.update(set(layout.__dict__) - before)
        return result

    monkeypatch.setattr(PackedTransformer, "run", noted)
    our_velocity(module, parity_sample(config))
    for one in transformers(module):
        assert isinstance(one, PackedTransformer)
        assert made <= set(one.block_parts) | {"sequence_segments"}


def test_blocks_whose_weights_are_fetched_run_as_written() -> None:
    module = compiled(build_dit(TINY, 0))
    assert isinstance(module, PackedTransformer)
    module.fetched = lambda block: block
    local_step(module, [((1, 2, 2), 2)], Group.solo())
    assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in {one.split()[0] for one in COMPILED}])
def test_a_family_whose_blocks_are_not_compiled_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"blocks of architecture {name} are not compiled"):
        replace(next(config for one, config in VARIANTS.items() if one.split()[0] == name), compile=True)
    assert name in ("latte", "stdit3")


@pytest.mark.parametrize(
    ("device", "gone", "said"),
    [
        ("cpu", ("g++", "clang++"), r"for the CPU this one has no g\+\+ or clang\+\+. Install that"),
        ("cuda", ("gcc", "clang"), "for which this one has no gcc or clang"),
        ("cuda", ("triton",), "for a GPU this one has no Triton"),
        ("cpu", ("Python.h",), "Python.h, which this one does not have"),
    ],
)
def test_a_machine_without_a_compiler_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, gone: Sequence[str], said: str
) -> None:
    there = {"g++", "gcc", "triton", "Python.h"}
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    check_compiler(torch.device(device))
    there -= set(gone)
    if "Python.h" in gone:
        (tmp_path / "Python.h").unlink()
    with pytest.raises(ValueError, match=said):
        check_compiler(torch.device(device))


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.timeout(900)
def test_code_of_the_cpu_computes_the_same() -> None:
    ours, theirs = compiled(build_dit(TINY, 0), "inductor"), build_dit(TINY, 0)
    packs: list[Parts] = [[((1, 3, 3), 4)], [((1, 3, 3), 4), ((2, 2, 2), 1)], [((1, 2, 5), 3)], [((1, 1, 1), 1)] * 3]
    for number, parts in enumerate(packs):
        with torch._dynamo.config.patch(error_on_recompile=number > 1):
            found, expected = (local_step(module, parts, Group.solo()) for module in (ours, theirs))
        for each, one in zip(found, expected, strict=True):
            assert (each - one).norm() <= 1e-5 * one.norm()
