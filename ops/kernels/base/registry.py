"""How the fused ops are made known to PyTorch: schema, one kernel for all devices, fake kernel, derivative.

The same as `torch.library.custom_op` with `register_fake` and `register_autograd`, by hand, because those look up every
argument's default in the schema and search the outputs for aliases on each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ops.kernels.base.autograd import Context, InputGradients

LIBRARY = torch.library.Library("heddle", "FRAGMENT")  # owns the registrations; they end with it
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
NO_DOUBLE_BACKWARD = (
    "{}: the fused backward has no derivative of its own; use the op's reference for create_graph=True."
)
NO_TRANSFORM = (
    "{}: the fused op has a derivative for backward() alone, none in forward mode (jvp) and none inside torch.func's "
    "grad and vjp; use the op's reference there, which is plain PyTorch."
)


C = TypeVar("C", bound=NamedTuple)
X = TypeVar("X", bound=Context)
R = TypeVar("R", bound=Tensor | tuple[Tensor, ...])
R_co = TypeVar("R_co", bound=Tensor | tuple[Tensor, ...], covariant=True)


class RegisteredOp(Protocol[R_co]):
    """An operator of PyTorch, called with the arguments of its schema in their order."""

    def __call__(self, *inputs: object) -> R_co: ...


def custom_op(
    name: str, schema: str, call: type[C], fake: Callable[[C], Tensor | tuple[Tensor, ...]]
) -> Callable[[Callable[[C], R]], RegisteredOp[R]]:
    """Decorator: register a function of one `call` as heddle::name; `fake` gives shapes and dtypes of its outputs.

    `call` is the named tuple of the op's arguments, whose fields are those of the schema in their order. The schema has
    no defaults. Outputs may share memory neither with inputs nor with each other.
    """

    def register(kernel: Callable[[C], R]) -> RegisteredOp[R]:
        LIBRARY.define(name + schema, tags=TAGS)
        overload = getattr(torch.ops.heddle, name).default
        arguments = tuple(argument.name for argument in overload._schema.arguments)
        assert arguments == call._fields, f"heddle::{name} takes {arguments}, its call has {call._fields}"
        LIBRARY.impl(name, lambda *inputs: kernel(call._make(inputs)), "CompositeExplicitAutograd")
        torch.library.register_fake(f"heddle::{name}", lambda *inputs: fake(call._make(inputs)), lib=LIBRARY)
        op: RegisteredOp[R] = overload
        return op

    return register


def register_autograd(
    op: RegisteredOp[R],
    backward: Callable[..., InputGradients],
    setup_context: Callable[[X, Iterable[object], R], None],
) -> None:
    """Give the op a derivative: setup_context(ctx, inputs, output) saves, backward(ctx, *gradients) computes.

    What would lose a derivative on its way through this is refused: tangents of forward mode, and torch.func.
    """

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: X, *inputs: object) -> R:
            with torch._C._AutoDispatchBelowAutograd():
                output = op(*inputs)
            setup_context(ctx, inputs, output)
            return output

    Differentiable.backward = staticmethod(backward)  # type: ignore[method-assign]

    def autograd(*inputs: object) -> R:
        # Most calls are outside of every level, where asking each tensor takes 1 us. The level has no public name;
        # where it has another one, they are asked.
        level = getattr(forward_ad, "_current_level", 0)
        if level >= 0 and any(isinstance(x, Tensor) and _has_tangent(x) for x in inputs):
            raise RuntimeError(NO_TRANSFORM.format(op))
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            if torch._C._are_functorch_transforms_active():
                raise RuntimeError(NO_TRANSFORM.format(op))
            output: R = Differentiable.apply(*inputs)
            return output
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    LIBRARY.impl(op, autograd, "Autograd")


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def refuse_double_backward(op: RegisteredOp[R], name: str) -> None:
    """Make the backward of a backward op an error that says what to do."""

    def refuse(ctx: Context, *grads: Tensor) -> InputGradients:
        raise RuntimeError(NO_DOUBLE_BACKWARD.format(name))

    def save_nothing(ctx: Context, inputs: Iterable[object], output: R) -> None:
        return None

    register_autograd(op, refuse, save_nothing)
