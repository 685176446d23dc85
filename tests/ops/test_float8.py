"""Frozen projections in 8 bits: how far they are from what they were, and that all else is a plain projection's."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from ops.config import OptimizerConfig
from ops.models.base.config import DiTConfig
from ops.models.config import ModelConfig
from ops.models.experts import transformers
from ops.models.float8 import FLOAT8, SCALE, FrozenLinear, in_8_bits, in_float8, spared_bytes, widened
from ops.models.folders import dit_json
from ops.models.forecast import Precision, pass_bytes, states_bytes
from ops.models.load import build_dit, dit_skeleton, first_values
from ops.models.lora import A, DoRALinear, LoRALinear
from ops.models.weights import frozen_digests, is_lora, write_folder
from ops.packed.packing import Sequence
from ops.shards import padding
from ops.storages import StorageCount
from tests.families.registry import CASES, ONE_EACH, VARIANTS
from tests.ops.test_lora import WAN, disturb, forward

HALF_A_STEP = 2**-4  # of a number with 3 bits of fraction
OF_THE_LARGEST = 2**-17  # where e4m3's smallest step, 2^-9 of a scale, counts
EIGHT = replace(WAN, frozen_dtype="float8")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def like_trained(rows: int, width: int) -> Tensor:
    """Rows of very different sizes, one of zeros, and one with a single large weight."""
    weight = random(rows, width) * torch.logspace(-12, 6, rows)[:, None]
    weight[1] = 0
    weight[2, 3] = 1e4
    return weight


def wide(layer: FrozenLinear, dtype: torch.dtype) -> Tensor:
    assert layer.weight_scale is not None
    return widened(layer.weight, layer.weight_scale, dtype)


def test_every_weight_is_within_half_a_step_of_what_it_was() -> None:
    weight = like_trained(40, 300)
    found = widened(*in_float8(weight), torch.float32)
    bound = torch.maximum(HALF_A_STEP * weight.abs(), OF_THE_LARGEST * weight.abs().amax(1, keepdim=True))
    assert ((found - weight).abs() <= bound).all()
    assert found[1].count_nonzero() == 0
    usual = random(300, 300)
    assert (widened(*in_float8(usual), torch.float32) - usual).norm() < 0.03 * usual.norm()
    assert torch.equal(widened(*in_float8(found), torch.float32), found), "rounded once is rounded"


def test_the_wide_weight_is_the_same_in_any_dtype_and_however_it_was_cut() -> None:
    weight = like_trained(40, 300).bfloat16()
    small, scales = in_float8(weight)
    in_fp32, in_parts = in_float8(weight.float()), in_float8(weight, part_elements=700)
    for one, other in ((small, in_fp32[0]), (small, in_parts[0])):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(scales, in_fp32[1]) and torch.equal(scales, in_parts[1])
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5)), "powers of two"
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(widened(small, scales, dtype).double(), widened(small, scales, torch.float32).double())


@pytest.mark.parametrize("broken", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_stays_so(broken: float) -> None:
    """A cast to e4m3 makes 448 of infinity, and a broken file would train as another model."""
    weight = random(4, 6)
    weight[2, 3] = broken
    found = widened(*in_float8(weight), torch.bfloat16)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], widened(*in_float8(weight[[0, 1, 3]]), torch.bfloat16))


@pytest.mark.parametrize("rows", [(7,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_results_and_gradients_are_those_of_a_plain_projection(
    rows: tuple[int, ...], dtype: torch.dtype, autocast: bool
) -> None:
    """Bit for bit: of the wide weight, by the same product."""
    base = nn.Linear(24, 40).requires_grad_(False)
    layer = LoRALinear(base, 3, 2.0, "float8").to(dtype)
    disturb(layer)
    plain = LoRALinear(base, 3, 2.0).to(dtype)
    plain.load_state_dict({name: t for name, t in layer.state_dict().items() if name != "weight_scale"})
    plain.weight = nn.Parameter(wide(layer, dtype), requires_grad=False)
    found = []
    for one in (layer, plain):
        x = random(*rows, 24).to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = one(1 * x)  # as in a block: of a leaf, autocast would keep the cast for both products
        (out.float() * random(*rows, 40, seed=1)).sum().backward()
        found.append([out, x.grad, one.lora_A.weight.grad, one.lora_B.weight.grad])
        assert one.weight.grad is None
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_a_cast_of_the_module_leaves_8_bits_and_scales_as_they_are() -> None:
    module = build_dit(EIGHT, 0)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    held = dict(module.named_parameters())
    module.to(torch.bfloat16)
    for name, tensor in module.state_dict().items():
        small = name in in_8_bits(module) or name.endswith(SCALE)
        assert tensor.dtype == (before[name].dtype if small else torch.bfloat16)
        if small:
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8))
        assert held[name] is module.get_parameter(name)


@contextmanager
def saved() -> Iterator[list[Tensor]]:
    """What is kept for a backward."""
    found: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: found.append(tensor) or tensor, lambda kept: kept):
        yield found


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.timeout(300)
def test_no_wide_weight_is_kept_for_the_backward(compiled: bool) -> None:
    base = nn.Linear(64, 640).requires_grad_(False)
    layer = FrozenLinear(base, "float8")
    call = torch.compile(layer, dynamic=True, backend="aot_eager_decomp_partition") if compiled else layer
    x = random(5, 64).requires_grad_()
    with saved() as kept:
        out = call(x)
    assert not [tensor for tensor in kept if tensor.numel() >= base.weight.numel() and tensor.dtype != FLOAT8]
    out.square().sum().backward()
    with saved() as of_plain:
        F.linear(x, wide(layer, torch.float32))
    assert [tensor for tensor in of_plain if tensor.numel() >= base.weight.numel()]
    grad = x.grad
    x.grad = None
    layer(x).square().sum().backward()
    assert torch.equal(grad, x.grad)


@pytest.mark.parametrize("kind", [LoRALinear, DoRALinear])
@pytest.mark.timeout(300)
def test_compiled_code_leaves_8_bits_to_a_call(kind: type[LoRALinear]) -> None:
    """Triton refuses a cast of e4m3 on GPUs before Ada and Hopper."""
    users: set[str] = set()

    def compiler(graph: GraphModule, inputs: object) -> object:
        for node in graph.graph.nodes:
            if any(of.meta["val"].dtype == FLOAT8 for of in node.all_input_nodes if isinstance(of.meta["val"], Tensor)):
                users.add(str(node.target))
        return make_boxed_func(graph.forward)

    layer = kind(nn.Linear(24, 40).requires_grad_(False), 3, 2.0, "float8")
    x = random(5, 24).requires_grad_()
    torch.compile(layer, backend=aot_autograd(fw_compiler=compiler))(x).sum().backward()
    assert users - {"output", "<built-in function getitem>", "aten.split.Tensor"} == {"heddle.widened.default"}


@pytest.mark.parametrize("case", ONE_EACH)
def test_the_projections_of_the_blocks_are_held_in_8_bits_and_nothing_else(case: str) -> None:
    config = replace(VARIANTS[case], lora_rank=2, lora_targets=(CASES[VARIANTS[case].architecture].lora[0],))
    some = dit_skeleton(replace(config, frozen_dtype="float8"))
    every = dit_skeleton(replace(config, lora_targets=()))
    assert in_8_bits(some) == {name.replace(A, ".weight") for name in every.state_dict() if name.endswith(A)}
    rest = {name for name, weight in some.named_parameters() if weight.dtype != FLOAT8 and not is_lora(name)}
    plain = {name for name, _ in dit_skeleton(config.without_lora()).named_parameters()}
    assert {name for name in rest if not name.endswith(SCALE)} == plain - in_8_bits(some)
    first = next(some.parameters())
    assert first.dtype == torch.float32 and first.requires_grad is False, "what is asked for the module's dtype"


@pytest.mark.parametrize("case", ONE_EACH)
def test_a_transformer_computes_nearly_what_the_wide_one_does(case: str) -> None:
    config = replace(VARIANTS[case], lora_rank=2, frozen_dtype="float8")
    found, expected = (forward(build_dit(one, 0)) for one in (config, config.without_lora()))
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_a_folder_are_rounded_as_stored(dtype: torch.dtype, stored: torch.dtype, tmp_path: Path) -> None:
    """Whatever the dtype of the other parameters is, which a resume may change."""
    plain = {name: tensor.to(stored) for name, tensor in build_dit(WAN.without_lora(), 3).state_dict().items()}
    write_folder(tmp_path / "transformer", plain, dit_json(WAN.without_lora()))
    module = build_dit(replace(EIGHT, path=str(tmp_path)), 0, dtype)
    state, small = module.state_dict(), in_8_bits(module)
    assert len(small) == 20
    for name, tensor in plain.items():
        if name in small:
            numbers, scales = in_float8(tensor)
            assert torch.equal(state[name].view(torch.uint8), numbers.view(torch.uint8))
            assert torch.equal(state[name.removesuffix(".weight") + SCALE], scales)
        else:
            assert torch.equal(state[name], tensor.to(dtype))


def test_reading_holds_one_wide_weight_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "transformer", build_dit(WAN.without_lora(), 3).state_dict(), dit_json(WAN))
    read: list[weakref.ref[Tensor]] = []

    def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
        assert not any(one() is not None for one in read), "which were rounded before"
        read.append(weakref.ref(weight))
        return in_float8(weight)

    monkeypatch.setattr("ops.models.weights.in_float8", rounded)
    build_dit(replace(EIGHT, path=str(tmp_path)), 0)
    assert len(read) == 20
    with StorageCount() as count:
        in_float8(random(100, 1000), part_elements=10 * 1000)
    assert count.peak_bytes < 100_000 * (4 + 1) + 2 * 4 * 10_000 + 1000, "itself, 8 bits, and two parts in fp32"


@pytest.mark.parametrize("from_folder", [False, True])
def test_dora_begins_with_the_rows_in_8_bits(from_folder: bool, tmp_path: Path) -> None:
    """So that it begins as LoRA beside them."""
    config = replace(EIGHT, lora_dora=True)
    if from_folder:
        write_folder(tmp_path / "transformer", build_dit(WAN.without_lora(), 3).state_dict(), dit_json(WAN))
        config = replace(config, path=str(tmp_path))
    module, first = build_dit(config, 0), first_values(config, 0)
    for name, parameter in module.named_parameters():
        if is_lora(name):
            assert torch.equal(first(name), parameter)
    torch.testing.assert_close(
        forward(module), forward(build_dit(replace(config, lora_dora=False), 0)), rtol=0, atol=1e-5
    )
    layer = module.get_submodule("blocks.0.ffn.net.2")
    assert isinstance(layer, DoRALinear)
    disturb(layer)
    whole = wide(layer, torch.float64) + layer.scale * (layer.lora_B.weight @ layer.lora_A.weight).double()
    torch.testing.assert_close(layer.row_lengths().double(), whole.norm(dim=1), rtol=1e-5, atol=0)


def test_lengths_of_many_rows_are_made_in_parts() -> None:
    layer = DoRALinear(nn.Linear(16, 50).requires_grad_(False), 2, 1.0, "float8")
    whole = layer.row_lengths()
    with StorageCount() as count:
        torch.testing.assert_close(layer.row_lengths(part_elements=7 * 16), whole, rtol=1e-6, atol=0)
    assert count.peak_bytes < 50 * 16 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_states_that_are_predicted_are_those_of_the_module(dtype: torch.dtype) -> None:
    module = build_dit(EIGHT, 0, dtype)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    frozen = sum(p.nbytes for p in module.parameters() if not p.requires_grad)
    numbers = sum(p.numel() for p in module.parameters() if not p.requires_grad)
    assert frozen == numbers * dtype.itemsize - spared_bytes(dit_skeleton(EIGHT), dtype.itemsize)
    _, held = states_bytes(EIGHT, OptimizerConfig(), 1, Precision(parameters=dtype))
    assert held == frozen + (trained + padding(trained)) * (dtype.itemsize + 4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_of_a_pass_one_wide_weight_is_predicted_besides(checkpointing: bool) -> None:
    config = replace(EIGHT, gradient_checkpointing=checkpointing, head_dim=128, ffn_dim=1024)
    clips = [Sequence((1, 2, 2), 2)]
    peaks = [pass_bytes(one, clips, 1, Precision())[0] for one in (config, replace(config, frozen_dtype="same"))]
    largest = 4 * config.dim * config.ffn_dim
    assert 0 < peaks[0] - peaks[1] < 1.2 * largest


def trained_losses(config: DiTConfig, steps: int) -> list[float]:
    """Losses of factors that learn a velocity by heart."""
    module = build_dit(config, 0)
    target = forward(build_dit(replace(config.without_lora(), num_layers=2), 9)).detach()
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = (forward(module) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_factors_learn_beside_8_bits_as_beside_wide_weights() -> None:
    ours, theirs = (trained_losses(config, 60) for config in (EIGHT, WAN))
    assert ours[-1] < 0.3 * ours[0]
    assert ours[-1] == pytest.approx(theirs[-1], rel=0.15)


def test_workers_compare_8_bits_and_scales() -> None:
    config = ModelConfig(dit=replace(EIGHT, path="/of/all"))
    module = build_dit(EIGHT, 0)
    layer = module.get_submodule("blocks.1.attn1.to_k")
    assert isinstance(layer, FrozenLinear) and layer.weight_scale is not None
    digests = [frozen_digests(config, module, None, None)]
    for tensor in (layer.weight.view(torch.uint8), layer.weight_scale.data):
        tensor[3] += 1
        digests.append(frozen_digests(config, module, None, None))
    assert len(set(digests)) == 3


def test_both_experts_are_held_in_8_bits() -> None:
    pair = replace(VARIANTS["wan"], expert="both", boundary=0.9, lora_rank=2, frozen_dtype="float8")
    module = build_dit(pair, 0, torch.bfloat16)
    sizes = [len(in_8_bits(one)) for one in transformers(module)]
    assert len(sizes) == 2 and sizes[0] == sizes[1] > 0


def test_without_lora_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"frozen_dtype is float8, and lora_rank is 0: .* Set the rank, or leave"):
        replace(WAN, lora_rank=0, frozen_dtype="float8")
