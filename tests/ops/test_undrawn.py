"""Modules on the meta device without first values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ops.models.load import bare_dit, dit_skeleton
from ops.models.undrawn import Undrawn
from ops.models.wan.config import WanConfig


class Seen(TorchDispatchMode):
    """Notes what reaches a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_draws_are_left_out_of_the_meta_device_alone() -> None:
    with Undrawn():
        torch.manual_seed(1)
        drawn = nn.Linear(8, 8).weight
        torch.manual_seed(1)
    assert torch.equal(drawn, nn.Linear(8, 8).weight), "on the CPU as ever"
    with torch.device("meta"), Seen() as seen, Undrawn():
        layer = nn.Linear(8, 8)
        for init in (nn.init.xavier_uniform_, nn.init.normal_, nn.init.kaiming_uniform_, nn.init.trunc_normal_):
            assert init(layer.weight) is layer.weight
        assert nn.init.uniform_(tensor=layer.bias) is layer.bias
    assert seen.names and not [name for name in seen.names if "uniform" in name or "normal" in name]


def test_a_skeleton_is_its_module_without_values() -> None:
    config = WanConfig(num_layers=2, text_dim=64, lora_rank=4)
    with torch.device("meta"):
        whole = bare_dit(config)

    def facts(module: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype, bool, str]]:
        def of(weight: Tensor) -> tuple[torch.Size, torch.dtype, bool, str]:
            return weight.shape, weight.dtype, weight.requires_grad, weight.device.type

        return {name: of(weight) for name, weight in (*module.named_parameters(), *module.named_buffers())}

    assert facts(dit_skeleton(config)) == facts(whole)
