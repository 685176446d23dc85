"""The fused ops as PyTorch sees them: opcheck, torch.compile, checkpointing, processes."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.nn.functional import all_gather
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ops.comm.collectives import Group
from ops.kernels.base.segments import Segments
from ops.kernels.gate_residual.op import gate_residual, gate_residual_ln_modulate
from ops.kernels.norm_modulate.cpu import table_grads
from ops.kernels.norm_modulate.op import ln_modulate
from ops.kernels.qk_rope.op import qk_norm_rope
from ops.models.families import FAMILIES
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.load import build_dit
from ops.packed.packing import Layout, Sequence
from tests.ops.test_fused import runs_of

SEGMENTS = Segments.packed([9, 0, 5], [1, 2, 0], num_mods=4)
NONE = (None,) * 5
WIDTH, HEAD_DIM = 32, 8
heddle = torch.ops.heddle


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    return leaf(SEGMENTS.num_rows, WIDTH, dtype=dtype)


def table(dtype: torch.dtype = torch.float32) -> Tensor:
    return leaf(SEGMENTS.num_mods, WIDTH, dtype=dtype)


def test_opcheck_accepts_ln_modulate() -> None:
    index, vector = SEGMENTS.tensors(), leaf(WIDTH)
    calls = [
        (tokens(), None, None, table(), table(), *index, 1e-6, False, torch.float32),
        (tokens(torch.bfloat16), vector, vector.detach(), None, None, *NONE, 1e-6, False, torch.bfloat16),
        (tokens(torch.float64), vector, None, table(), None, *index, 1e-6, True, torch.float64),
        (tokens(), None, None, tokens(), tokens(), *NONE, 1e-6, False, torch.float32),
        (leaf(0, WIDTH), None, None, leaf(1, WIDTH), None, *NONE, 1e-6, False, torch.float32),
    ]
    for call in calls:
        torch.library.opcheck(heddle.ln_modulate.default, call)


def test_opcheck_accepts_the_gate_ops() -> None:
    index = SEGMENTS.tensors()
    torch.library.opcheck(heddle.gate_residual.default, (tokens(), tokens(), table(), *index, torch.float32))
    torch.library.opcheck(heddle.gate_residual.default, (tokens(), tokens(), tokens(), *NONE, torch.bfloat16))
    both = (1e-6, False, torch.float32, torch.bfloat16)
    calls = [
        (tokens(), tokens(torch.bfloat16), table(), None, None, table(), table(), *index, *both),
        (tokens(), tokens(), None, leaf(WIDTH), leaf(WIDTH), None, None, *NONE, *both),
    ]
    for call in calls:
        torch.library.opcheck(heddle.gate_residual_ln_modulate.default, call)


def test_opcheck_accepts_qk_norm_rope() -> None:
    angles = torch.randn(SEGMENTS.num_rows, HEAD_DIM // 2)
    rope = (angles.cos(), angles.sin())
    for per_head, tables in ((False, rope), (True, rope), (False, (None, None))):
        weight = leaf(HEAD_DIM if per_head else WIDTH)
        call = (tokens(), tokens(), weight, weight.detach(), *tables, HEAD_DIM, per_head, 1e-6, torch.float32)
        torch.library.opcheck(heddle.qk_norm_rope.default, call)


def block(x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, segments: Segments) -> Tensor:
    h = ln_modulate(x, scale, shift, segments)
    x, h = gate_residual_ln_modulate(x, torch.sin(h) * y, gate, scale, shift, segments)
    q, k = qk_norm_rope(h, torch.cos(h), None, None, head_dim=HEAD_DIM)
    return gate_residual(x, q + k, gate, segments)


def block_inputs(lengths: list[int]) -> list[Tensor]:
    num_tokens = sum(lengths)
    return [leaf(num_tokens, WIDTH), leaf(num_tokens, WIDTH), *(leaf(len(lengths), WIDTH) for _ in range(3))]


def test_compiles_to_one_graph_for_every_length() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for lengths in ([5, 7, 3], [20, 2, 9], [11, 40, 6]):
        given = block_inputs(lengths)
        segments = Segments.packed(lengths)
        actual, expected = compiled(*given, segments), block(*given, segments)
        torch.testing.assert_close(actual, expected)
        got, want = (torch.autograd.grad(out.square().sum(), given) for out in (actual, expected))
        torch.testing.assert_close(got, want)
    assert sum(len(graph.graph.nodes) > 0 for graph in counter.graphs) == 1


class CallCounter(TorchDispatchMode):
    """Counts the calls of one op."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        super().__init__()
        self.op, self.calls = op, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func is self.op
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kept, calls", [(False, 2), (True, 1)], ids=["recomputed", "kept by the policy"])
def test_selective_checkpointing_sees_the_ops(kept: bool, calls: int) -> None:
    op = heddle.ln_modulate.default

    def policy(ctx, func, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if kept and func is op else CheckpointPolicy.PREFER_RECOMPUTE

    given = block_inputs([5, 7])
    segments = Segments.packed([5, 7])
    contexts = partial(create_selective_checkpoint_contexts, policy)
    with CallCounter(op) as counter:
        out = checkpoint(block, *given, segments, use_reentrant=False, context_fn=contexts)
        gradients = torch.autograd.grad(out.square().sum(), given)
    assert counter.calls == calls
    expected = torch.autograd.grad(block(*given, segments).square().sum(), given)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


class OpNames(TorchDispatchMode):
    """Names of the ops that are called from outside of other ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_gradients_of_tables_alone_need_no_arithmetic_beyond_the_column_sums() -> None:
    products, sums = torch.randn(2, 3, WIDTH).unbind()
    scale = torch.randn(3, WIDTH, dtype=torch.bfloat16)
    with OpNames() as called:
        dscale, dshift, *_ = table_grads(products, sums, None, None, scale)
    assert called.names == {"aten.new_empty.default"}
    assert dscale is products and dshift is sums
    with OpNames() as called:
        table_grads(products, sums, scale[0], None, scale)
    assert "aten.add.Tensor" in called.names


@pytest.mark.parametrize("architecture", ["wan", "hunyuan"])
def test_transformers_norm_gate_and_rotate_through_the_fused_ops_only(architecture: str) -> None:
    config = FAMILIES[architecture].config(
        num_layers=1, num_heads=2, head_dim=16, ffn_dim=64, freq_dim=32, text_dim=24, in_channels=4, out_channels=4
    )
    if isinstance(config, HunyuanConfig):
        config = replace(config, num_single_layers=1)
    layout = Layout([Sequence((1, 2, 3), 5), Sequence((2, 2, 2), 4)])
    with OpNames() as seen:
        model = build_dit(config, seed=0)
        seen.names.clear()
        out = model(torch.randn(14, 16), torch.tensor([100.0, 700.0]), torch.randn(9, 24), layout, Group.solo())
        out.square().sum().backward()
    fused_ops = {"ln_modulate", "gate_residual", "gate_residual_ln_modulate", "qk_norm_rope"}
    wanted = {f"heddle.{name}{suffix}.default" for name in fused_ops for suffix in ("", "_bwd")}
    assert wanted <= seen.names
    parts = ("layer_norm", "rms_norm", "rsqrt", "addcmul", "var_mean", "complex")
    assert not {name for name in seen.names if any(part in name for part in parts)}


def test_plain_checkpointing_gives_the_same_gradients() -> None:
    given = block_inputs([6, 4])
    segments = Segments.packed([6, 4])
    out = checkpoint(block, *given, segments, use_reentrant=False)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), given), torch.autograd.grad(block(*given, segments).sum(), given), rtol=0, atol=0
    )


def shard_gradient(rank: int, folder: str) -> None:
    """Sequence of 30 tokens over two processes; the table rows are gathered from both, as KnapFormer does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    case = torch.load(f"{folder}/case.pt")
    mine = case["table"][rank : rank + 1].requires_grad_()
    gathered = torch.cat(all_gather(mine))
    rows = slice(0, 17) if rank == 0 else slice(17, 30)
    local = Segments.packed(*runs_of(case["ids"][rows]), num_mods=2)
    out = ln_modulate(case["x"][rows], gathered, gathered, local)
    (out * case["cotangent"][rows]).sum().backward()
    torch.save(mine.grad, f"{folder}/grad{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.long
def test_two_processes_reduce_the_gradient_of_gathered_tables(tmp_path: Path) -> None:
    ids = torch.tensor([0] * 10 + [1] * 20)
    x, tables, cotangent = torch.randn(30, WIDTH), torch.randn(2, WIDTH), torch.randn(30, WIDTH)
    case = {"x": x, "table": tables, "cotangent": cotangent, "ids": ids}
    torch.save(case, tmp_path / "case.pt")
    mp.spawn(shard_gradient, args=(str(tmp_path),), nprocs=2)
    rows = case["table"].clone().requires_grad_()
    out = ln_modulate(case["x"], rows, rows, Segments.packed([10, 20]))
    (expected,) = torch.autograd.grad((out * case["cotangent"]).sum(), rows)
    actual = torch.cat([torch.load(tmp_path / f"grad{rank}.pt") for rank in (0, 1)])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
