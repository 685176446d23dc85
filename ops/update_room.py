"""Pinned host memory through which one GPU's gradients go to the host, and new parameters come back. Pure.

PyTorch's allocator of pinned memory rounds a size up to a power of two and keeps what it has taken until the process
ends, so what is in use at once is what a node has to have.
"""

from __future__ import annotations

from ops.units import GIB

AHEAD_BYTES = GIB  # of a backward's gradients that are not added yet in host memory; more are waited for
BUCKET = 1 << 25  # elements of a range that are updated and sent together
_QUEUED = 2  # gradients beyond those: the one that was queued last, and the next, which waits
_TO_HOST = 3  # buckets of gradient, fp32: one that is used, the one before it, one on its way
_BACK = 2  # buckets of parameters: one that is written, one on its way
_FP32 = 4


def pinned_gib(
    total: int,
    largest: int,
    parameter_bytes: int,
    *,
    host_gradients: bool,
    host_state: bool,
    host_parameters: bool,
    ahead_bytes: int = AHEAD_BYTES,
    bucket: int = BUCKET,
) -> float:
    """GiB that a worker on a GPU may hold, which trains `total` weights, `largest` of them in one parameter. What lies
    in host memory of its node goes there or comes from there; `ahead_bytes` and elements of a `bucket` as they are
    on a GPU.

    >>> pinned_gib(1 << 30, 1 << 26, 2, host_gradients=True, host_state=True, host_parameters=False)
    1.375
    >>> pinned_gib(1 << 30, 1 << 26, 2, host_gradients=False, host_state=True, host_parameters=False)
    0.5
    """
    found = 0
    if host_gradients:
        ahead = ahead_bytes + _QUEUED * _block(largest * parameter_bytes)
        found += min(ahead, 2 * total * parameter_bytes)  # no more than all, each rounded up
    bucket = min(bucket, total)
    if host_state and not host_gradients:
        found += _TO_HOST * _block(bucket * _FP32)
    if host_state and not host_parameters:
        found += _BACK * _block(bucket * parameter_bytes)
    return found / GIB


def _block(num_bytes: int) -> int:
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0
