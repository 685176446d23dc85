"""What every attention backend is: a name, what it cannot do, and the call."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ops.attention.lengths import Lengths, Pair
from ops.attention.names import BackendName

HALF = (torch.bfloat16, torch.float16)
_AMPERE = (8, 0)


class Backend(Protocol):
    """One way to compute attention over packed sequences. N rows, H heads, d head size."""

    @property
    def name(self) -> BackendName: ...

    def why_not(self, q: Tensor, lengths: Pair | None = None) -> str | None:
        """Why it cannot serve queries like `q` [N, H, d] (device, dtype, head size, gradient), in one sentence.

        With the lengths of queries and keys it also judges these; without, what does not depend on them.
        """
        ...

    def run(self, q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths) -> Tensor:
        """q [Nq, H, d], k and v [Nk, H, d] -> [Nq, H, d]; only called where `why_not` is None."""
        ...


def why_not_half_on_cuda(name: BackendName, q: Tensor, most: int) -> str | None:
    """The rule of the CUDA kernels: half precision, head sizes in steps of 8, GPUs from Ampere on."""
    if not q.is_cuda:
        return f"attention {name} needs a CUDA device; these tensors are on {q.device.type}. Use sdpa or auto."
    if q.dtype not in HALF:
        dtype = str(q.dtype).removeprefix("torch.")
        return f"attention {name} takes bfloat16 and float16, not {dtype}. Set train.autocast: bfloat16, or use sdpa."
    size = q.shape[-1]
    if size % 8 or size > most:
        return f"attention {name} takes head sizes that are multiples of 8 up to {most}, not {size}. Use sdpa or auto."
    major, minor = torch.cuda.get_device_capability(q.device)
    if (major, minor) < _AMPERE:
        return f"attention {name} runs on sm_80 and later; this device is sm_{major}{minor}. Use sdpa or auto."
    return None
