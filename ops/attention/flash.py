"""Variable-length flash attention of PyTorch: FlashAttention 2 as it comes, FlashAttention 3 where its package is.

Both are the same call. PyTorch replaces its flash kernels for the whole process when FlashAttention 3 is activated, so
each backend puts its own in place before a call; a pass and its backward should run under the same one (their saved
tensors are laid out alike, so a mixture is right, only not what was asked for).
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from ops.attention.backend import why_not_half_on_cuda
from ops.attention.lengths import Lengths, Pair
from ops.attention.names import BackendName

MOST = 256  # head size
_FA3 = "FA3"
_FA3_MODULE = "flash_attn_interface"  # what the package flash_attn_3 installs

# Found once: a compiled block traces the choice of its backend, and neither of the two can be traced.
INSTALLED = importlib.util.find_spec(_FA3_MODULE) is not None
OFFERED = hasattr(torch.nn.attention, "current_flash_attention_impl") and (
    _FA3 in torch.nn.attention.list_flash_attention_impls()
)


class Flash:
    name: BackendName = "flash"

    def why_not(self, q: Tensor, lengths: Pair | None = None) -> str | None:
        return why_not_half_on_cuda(self.name, q, MOST)

    def run(self, q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths) -> Tensor:
        if OFFERED:
            _put_in_place(None)
        return _varlen(q, k, v, q_lengths, k_lengths)


class Flash3:
    name: BackendName = "flash3"

    def __init__(self, installed: bool = INSTALLED, offered: bool = OFFERED) -> None:
        """Whether its package is `installed`, and PyTorch has `offered` to put it in place."""
        self._installed, self._offered = installed, offered

    def why_not(self, q: Tensor, lengths: Pair | None = None) -> str | None:
        reason = why_not_half_on_cuda(self.name, q, MOST)
        if reason is not None:
            return reason
        if not self._offered:
            return (
                f"attention flash3 is not offered by PyTorch {torch.__version__} (activate_flash_attention_impl knows "
                f"no {_FA3}). Install a newer PyTorch, or use flash or auto."
            )
        if not self._installed:
            return (
                f"attention flash3 needs the package flash_attn_3 (module {_FA3_MODULE}), which is not installed. "
                f"Install it, or use flash or auto."
            )
        major, minor = torch.cuda.get_device_capability(q.device)
        if (major, minor) != (9, 0):
            return f"attention flash3 runs on sm_90; this device is sm_{major}{minor}. Use flash, cudnn or auto."
        return None

    def run(self, q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths) -> Tensor:
        _put_in_place(_FA3)
        return _varlen(q, k, v, q_lengths, k_lengths)


def _put_in_place(impl: str | None) -> None:
    if torch.compiler.is_compiling():  # a compiled call keeps what was in place when it was traced
        return
    if torch.nn.attention.current_flash_attention_impl() == impl:
        return
    if impl is None:
        torch.nn.attention.restore_flash_attention_impl()
    else:
        torch.nn.attention.activate_flash_attention_impl(impl)


def _varlen(q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # imports the CUDA kernel's registrations

    if not q_lengths.longest or not k_lengths.longest:  # nothing to launch
        return q * 0
    out = varlen_attn(q, k, v, q_lengths.offsets, k_lengths.offsets, q_lengths.longest, k_lengths.longest)
    assert isinstance(out, Tensor)  # a tuple only with return_aux
    return out
