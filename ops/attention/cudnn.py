"""cuDNN's attention through scaled_dot_product_attention: sequences of one length in one call, others one by one.

cuDNN plans each new shape once (tens of milliseconds on the host), so it is for shapes that come again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ops.attention.backend import why_not_half_on_cuda
from ops.attention.lengths import Lengths, Pair
from ops.attention.names import BackendName
from ops.attention.sdpa import alike, by_sequence

MOST = 128  # head size: more needs a newer cuDNN than the oldest PyTorch that we take brings
LEAST = 91501  # cuDNN 9.15.1: before it, lengths that 128 does not divide read beside their memory (PyTorch #169849)
INSTALLED: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
MOST_HEADS = 65535  # heads, and sequences, at most: PyTorch's own limits of this call


class Cudnn:
    name: BackendName = "cudnn"

    def __init__(self, version: int | None = INSTALLED) -> None:
        """`version` of cuDNN, by default the one that PyTorch has: None in a build for CPUs."""
        self._version = version

    def why_not(self, q: Tensor, lengths: Pair | None = None) -> str | None:
        why = why_not_half_on_cuda(self.name, q, MOST) or (lengths and _why_not_count(*lengths))
        return why or _why_not_version(self._version)

    def run(self, q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths) -> Tensor:
        # after an all-to-all q, k and v are views of one tensor; cuDNN is only offered dense rows
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return by_sequence(q, k, v, q_lengths, k_lengths, _alike)


def _why_not_version(version: int | None) -> str | None:
    if version is not None and version < LEAST:
        return f"attention cudnn needs cuDNN {LEAST}, not {version}. Install a newer PyTorch, or use flash or auto."
    return None


def _alike(q: Tensor, k: Tensor, v: Tensor, count: int) -> Tensor:
    if len(k) > count:
        return alike(q, k, v, count)
    # one key in each sequence, which cuDNN does not take: its share is 1. All three stay in the graph, as anywhere
    values: Tensor = q.unflatten(0, (count, -1)) * 0 + (v + k * 0).unsqueeze(1)
    return values.flatten(0, 1)


def _why_not_count(q_lengths: Lengths, k_lengths: Lengths) -> str | None:
    if q_lengths.equal and k_lengths.equal and len(q_lengths.host) > MOST_HEADS:
        return f"attention cudnn takes up to {MOST_HEADS} sequences, not {len(q_lengths.host)}. Use flash or auto."
    return None
