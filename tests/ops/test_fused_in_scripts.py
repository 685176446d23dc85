"""The fused ops and their modules where other scripts put them: transforms, modes, default devices, wrappers."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ops.kernels.base import registry
from ops.kernels.base.segments import Segments
from ops.kernels.gate_residual.op import FusedGateAdaLN, gate_residual, gate_residual_ln_modulate
from ops.kernels.norm_modulate.op import FusedAdaLN, ln_modulate
from ops.kernels.qk_rope.op import FusedQKNormRope, qk_norm_rope

WIDTH = 16
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "ln_modulate": ln_modulate,
    "gate_residual": lambda x: gate_residual(x, x, x.flatten(0, -2)[:1]),
    "gate_residual_ln_modulate": lambda x: gate_residual_ln_modulate(x, x)[1],
    "qk_norm_rope": lambda x: qk_norm_rope(x, x, None, None, head_dim=8)[0],
}


@pytest.mark.parametrize("name", OPS)
def test_a_derivative_that_an_op_has_not_is_refused_and_not_zero(name: str) -> None:
    op, x = OPS[name], torch.randn(2, 5, WIDTH)
    says = rf"{name}\.default: .*none in forward mode \(jvp\).*use the op's reference"
    with pytest.raises(RuntimeError, match=says):
        torch.func.jvp(op, (x,), (torch.ones_like(x),))
    with pytest.raises(RuntimeError, match=says), forward_ad.dual_level():
        op(forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(RuntimeError, match=says):
        torch.func.grad(lambda a: op(a).sum())(x)


@pytest.mark.parametrize("name", OPS)
def test_a_pytorch_with_another_name_for_the_level_of_forward_mode_has_the_ops(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "forward_ad", SimpleNamespace(unpack_dual=forward_ad.unpack_dual))
    op, x = OPS[name], torch.randn(2, 5, WIDTH, requires_grad=True)
    op(x).sum().backward()
    with forward_ad.dual_level():
        op(x)
        with pytest.raises(RuntimeError, match="none in forward mode"):
            op(forward_ad.make_dual(x.detach(), torch.ones_like(x)))


@pytest.mark.parametrize("name", OPS)
def test_vmap_is_the_op_of_each(name: str) -> None:
    x = torch.randn(3, 2, 5, WIDTH)
    torch.testing.assert_close(torch.func.vmap(OPS[name])(x), torch.stack([OPS[name](one) for one in x]))


@pytest.mark.parametrize("name", OPS)
def test_shapes_and_dtypes_are_known_on_the_meta_device(name: str) -> None:
    x = torch.randn(2, 5, WIDTH, device="meta", requires_grad=True)
    out = OPS[name](x)
    out.sum().backward()
    assert (out.shape, out.dtype, x.grad.device.type) == (x.shape, x.dtype, "meta")


@pytest.mark.parametrize("where", [torch.device("meta"), FakeTensorMode()], ids=["default device", "fake tensors"])
def test_segments_are_made_under_any_default_device_and_mode(where) -> None:
    with where:
        packed, dense = Segments.packed([5, 0, 3], [1, 0, 1]), Segments.dense(2, 4)
    assert (packed.num_rows, packed.num_mods, packed.run.device.type) == (8, 2, "cpu")
    assert dense.num_rows == 8


def test_deterministic_algorithms_and_another_default_dtype_change_nothing() -> None:
    x, table, segments = torch.randn(8, WIDTH), torch.randn(2, WIDTH), Segments.packed([5, 3])
    expected = gate_residual_ln_modulate(x, x, table, table, table, segments)
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    try:
        actual = gate_residual_ln_modulate(x, x, table, table, table, Segments.packed([5, 3]))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(actual, expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("fused", "plain"),
    [
        (FusedAdaLN(WIDTH, eps=1e-5, elementwise_affine=True), nn.LayerNorm(WIDTH)),
        (FusedAdaLN(WIDTH, eps=1e-5, elementwise_affine=True, bias=False), nn.LayerNorm(WIDTH, bias=False)),
        (FusedAdaLN(WIDTH, eps=1e-5), nn.LayerNorm(WIDTH, elementwise_affine=False)),
        (FusedAdaLN(WIDTH, eps=1e-5, elementwise_affine=True, rms=True), nn.RMSNorm(WIDTH, eps=1e-5)),
        (FusedAdaLN(WIDTH, eps=1e-5, rms=True), nn.RMSNorm(WIDTH, eps=1e-5, elementwise_affine=False)),
    ],
    ids=["layer norm", "without bias", "without weights", "rms norm", "rms norm without weights"],
)
def test_states_of_a_norm_and_its_fused_module_are_exchanged(fused: nn.Module, plain: nn.Module) -> None:
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    got, want = (torch.autograd.grad(norm(x).square().sum(), [x, *norm.parameters()]) for norm in (fused, plain))
    torch.testing.assert_close(got, want)
    plain.load_state_dict(fused.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        lambda **how: FusedAdaLN(WIDTH, elementwise_affine=True, **how),
        lambda **how: FusedGateAdaLN(WIDTH, elementwise_affine=True, **how),
        lambda **how: FusedQKNormRope(WIDTH, 8, **how),
    ],
    ids=["FusedAdaLN", "FusedGateAdaLN", "FusedQKNormRope"],
)
def test_modules_are_made_moved_and_copied_as_those_of_torch(make: Callable[..., nn.Module]) -> None:
    module = make(device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
    module.reset_parameters()
    expected = make().to(torch.bfloat16).state_dict()
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for one in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        torch.testing.assert_close(one.state_dict(), expected, atol=0, rtol=0)
    assert f"({WIDTH}, " in repr(module) and "eps=1e-06" in repr(module)


@pytest.mark.parametrize("name", OPS)
def test_results_are_no_views_and_may_be_changed_in_place(name: str) -> None:
    """fully_shard warns of a view, and loses its hooks when that is changed in place."""
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    out = OPS[name](x)
    assert not out._is_view()
    out += 1
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, *torch.autograd.grad(OPS[name](x).sum(), x))


def test_a_residual_that_is_saved_and_then_changed_is_an_error_of_the_backward() -> None:
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    residual, h = gate_residual_ln_modulate(x, x)
    residual += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.sum().backward()


class Block(nn.Module):
    """What a script makes of the modules: one modulated block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.Linear(WIDTH, 3 * WIDTH)
        self.first = FusedAdaLN(WIDTH, elementwise_affine=True)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = FusedQKNormRope(WIDTH, 8)
        self.second = FusedGateAdaLN(WIDTH)

    def forward(self, x: Tensor, time: Tensor, segments: Segments) -> Tensor:
        gate, scale, shift = self.tables(time).chunk(3, -1)
        q, k, v = self.qkv(self.first(x, scale, shift, segments)).chunk(3, -1)
        q, k = self.norm(q, k)
        x, h = self.second(x, torch.tanh(q * k) * v, gate, scale, shift, segments)
        return x + h


def example() -> tuple[Tensor, Tensor, Segments]:
    torch.manual_seed(1)
    return torch.randn(8, WIDTH), torch.randn(2, WIDTH), Segments.packed([5, 3])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_takes_segments(reentrant: bool) -> None:
    block, (x, time, segments) = Block(), example()
    x.requires_grad_()
    whole = torch.autograd.grad(block(x, time, segments).square().sum(), x)
    checkpoint(block, x, time, segments, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(x.grad, *whole)


def _wrapped(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    x, time, segments = example()
    torch.manual_seed(0)
    plain = Block()
    plain(x, time, segments).square().sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}

    by_ddp = DistributedDataParallel(copy.deepcopy(plain))
    by_ddp.zero_grad()
    by_ddp(x, time, segments).square().sum().backward()
    torch.testing.assert_close({name: p.grad for name, p in by_ddp.module.named_parameters()}, expected)

    sharded = copy.deepcopy(plain)
    sharded.zero_grad()
    mesh = init_device_mesh("cpu", (2,))
    for part in (sharded.first, sharded.second, sharded.norm, sharded):
        fully_shard(part, mesh=mesh)
    sharded(x, time, segments).square().sum().backward()
    gathered = {name: p.grad.full_tensor() for name, p in sharded.named_parameters()}
    torch.testing.assert_close(gathered, expected)
    dist.destroy_process_group()


@pytest.mark.long
def test_ddp_and_fully_shard_compute_the_same_gradients(tmp_path: Path) -> None:
    mp.spawn(_wrapped, args=(str(tmp_path),), nprocs=2)  # raises what a process raised
