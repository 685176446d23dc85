"""What autograd gives the forward and backward of a function of our own."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

InputGradients = tuple[Tensor | None, ...]  # one per input of the forward


class Context(Protocol):
    """The `ctx` of a torch.autograd.Function; what a function keeps on it beside tensors is declared in a subclass."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """As they were saved, with None where None was: PyTorch's own annotation leaves that out, too."""
        ...

    @property
    def needs_input_grad(self) -> tuple[bool, ...]: ...

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *outputs: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...
