"""Parameters once per node: the same training, bit for bit, and two blocks of them on a device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from app.export.parity import our_velocity, parity_sample
from ops.comm import Group
from ops.config import OptimizerConfig
from ops.gradient_places import GradientMemory
from ops.models.base.transformer import PackedTransformer
from ops.models.load import build_dit
from ops.parameter_places import ParametersOf
from ops.parameters import ParameterMemory
from ops.sync import FlatSync, StatePlace, trainable
from tests.ops.block_copies import in_buffers
from tests.ops.test_families import CASES, small

STEPS = 2
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=1.0, ema_decay=0.9)
WAYS: dict[str, ParameterMemory | ParametersOf] = {"node": "node", "buffers": in_buffers}


def model(case: str, layers: int = 3, dtype: torch.dtype = torch.float32) -> PackedTransformer:
    """Random in every parameter, so that each receives a gradient."""
    dit = build_dit(replace(small(case), num_layers=layers, gradient_checkpointing=True), seed=0)
    torch.manual_seed(0)
    for parameter in dit.parameters():
        nn.init.normal_(parameter, std=0.1)
    assert isinstance(dit, PackedTransformer)
    return dit.to(dtype).train()


def passes(dit: PackedTransformer, case: str, autocast: bool, scale: float) -> float:
    sample = parity_sample(small(case))
    dtype = next(dit.parameters()).dtype
    sample = replace(sample, latent=(scale * sample.latent).to(dtype), text=sample.text.to(dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        velocity = our_velocity(dit, sample)
    loss = velocity.float().square().mean()
    loss.backward()
    return float(loss.detach())


def trained(
    case: str,
    parameters: ParameterMemory | ParametersOf,
    *,
    gradients: GradientMemory = "own",
    state: StatePlace = "device",
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
) -> dict[str, Tensor]:
    """Losses, gradients before each end of a step, parameters and state of one worker after some steps."""
    dit = model(case, dtype=dtype)
    sync = FlatSync(dit, OPTIMIZER, STEPS, gradients=gradients, state=state, parameters=parameters)
    sync.form(Group.solo(), None)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        sync.begin_step()
        losses = []
        for scale in (1.0, 0.5):  # passes add up
            sync.watch_backward()
            losses.append(passes(dit, case, autocast, scale))
        sync.start_sum()
        found[f"losses {step}"] = torch.tensor(losses)
        found[f"gradient {step}"] = sync.gradient().clone()
        assert sync.finish_step(step, 1.0, 1.0, 1.0, lambda phase: None).applied
    found |= {name: p.detach().clone() for name, p in trainable(dit)}
    shard = sync.export_shard()
    return found | {f"state {name}": torch.from_numpy(array) for name, array in shard.arrays.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert tensor.isfinite().all() and tensor.any(), f"{name} says nothing"


@pytest.mark.parametrize("case", CASES)
def test_all_families_train_bit_for_bit_as_with_parameters_of_their_own(case: str) -> None:
    expected = trained(case, "replicated")
    for way in WAYS.values():
        assert_equal(trained(case, way), expected)
