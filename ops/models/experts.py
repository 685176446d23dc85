"""Two transformers in one module, for high and for low noise, as Wan2.2 A14B has them: one run trains both.

A forward pass is that of one of them (`routed`), for clips whose noise levels are its own. Parameters are
`high.NAME` and `low.NAME`, so in the flat vector those of one expert lie behind those of the other.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

EXPERTS = ("high", "low")  # in the order of `DiTConfig.experts`


class ExpertPair(nn.Module):
    """Called as each of the two is (`PackedTransformer`)."""

    def __init__(self, high: nn.Module, low: nn.Module) -> None:
        super().__init__()
        self.high, self.low = high, low
        self.routed = 0  # the number of the expert, of `EXPERTS`, that the next forward passes are of

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """As the expert's."""
        velocity: Tensor = transformers(self)[self.routed](*inputs, **named)
        return velocity


def transformers(module: nn.Module) -> tuple[nn.Module, ...]:
    """Both experts of a pair, for high noise first; else the transformer itself."""
    return (module.high, module.low) if isinstance(module, ExpertPair) else (module,)


def parts_of(module: nn.Module) -> tuple[str, ...]:
    """What the names of parameters of each of the `transformers` begin with."""
    return tuple(f"{name}." for name in EXPERTS) if isinstance(module, ExpertPair) else ("",)
