"""Gradient checkpointing that keeps what attention gives, and computes the rest of a block again in its backward.

At long sequences attention is most of a block's work, and its output a small part of what a block would keep: N rows of
H heads of size d are 2 d H + 4 H bytes a row in half precision, against some 30 times that without checkpointing. What
is kept has the bits that would be computed again, so gradients are the same, bit for bit (selective activation
checkpointing: https://pytorch.org/blog/activation-checkpointing-techniques).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# Operators of PyTorch's attention: of scaled_dot_product_attention on a GPU and on the CPU, and of variable lengths.
# FlexAttention is none, so that a pass with it computes attention again all the same.
KEPT = frozenset(
    {
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "torch_attn._varlen_attn",
    }
)


def _policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    kept = isinstance(op, OpOverload) and str(op).rpartition(".")[0] in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]
_NOTHING = nullcontext()
_selective: Callable[[], _Contexts] = partial(create_selective_checkpoint_contexts, _policy)


def keeping_attention() -> _Contexts:
    """What torch.utils.checkpoint takes as `context_fn`: (for the forward, for the recomputation)."""
    forward, again = _selective()
    return casting_anew(forward), casting_anew(again)


@contextmanager
def casting_anew(inner: AbstractContextManager[object] = _NOTHING) -> Iterator[None]:
    """Runs without autocast's cache of weights. Operators of both passes are matched by their number, and a block that
    runs twice in a forward would find its weights cast, but not in the backward."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with inner:
            yield
    finally:
        torch.set_autocast_cache_enabled(before)
