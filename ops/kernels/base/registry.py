"""How the fused ops are made known to PyTorch: schema, one kernel for all devices, fake kernel, derivative.

The same as `torch.library.custom_op` with `register_fake` and `register_autograd`, by hand, because those look up every
argument's default in the schema and search the outputs for aliases on each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("heddle", "FRAGMENT")  # owns the registrations; they end with it
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
NO_DOUBLE_BACKWARD = (
    "{}: the fused backward has no derivative of its own; use the op's reference for create_graph=True."
)

Function = Callable[..., Any]


def custom_op(name: str, schema: str, call: Function, fake: Function) -> Callable[[Function], torch._ops.OpOverload]:
    """Decorator: register a function of one `call` as heddle::name; `fake` gives shapes and dtypes of its outputs.

    `call` is the named tuple of the op's arguments, whose fields are those of the schema in their order. The schema has
    no defaults. Outputs may share memory neither with inputs nor with each other.
    """

    def register(kernel: Function) -> torch._ops.OpOverload:
        LIBRARY.define(name + schema, tags=TAGS)
        op = getattr(torch.ops.heddle, name).default
        arguments = tuple(argument.name for argument in op._schema.arguments)
        assert arguments == call._fields, f"heddle::{name} takes {arguments}, its call has {call._fields}"  # type: ignore[attr-defined]
        LIBRARY.impl(name, lambda *inputs: kernel(call(*inputs)), "CompositeExplicitAutograd")
        torch.library.register_fake(f"heddle::{name}", lambda *inputs: fake(call(*inputs)), lib=LIBRARY)
        return op

    return register


def register_autograd(op: torch._ops.OpOverload, backward: Function, setup_context: Function) -> None:
    """Give the op a derivative: setup_context(ctx, inputs, output) saves, backward(ctx, *gradients) computes."""

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = op(*inputs)
            setup_context(ctx, inputs, output)
            return output

    Differentiable.backward = staticmethod(backward)  # type: ignore[method-assign]

    def autograd(*inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return Differentiable.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    LIBRARY.impl(op, autograd, "Autograd")


def refuse_double_backward(op: torch._ops.OpOverload, name: str) -> None:
    """Make the backward of a backward op an error that says what to do."""

    def refuse(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(NO_DOUBLE_BACKWARD.format(name))

    register_autograd(op, refuse, lambda ctx, inputs, output: None)
