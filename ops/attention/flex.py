"""FlexAttention with a mask by sequence: a fallback that is compiled for the device at hand.

On CUDA the compiled kernel runs, which skips whole blocks of other sequences. On the CPU PyTorch has the forward pass
only, and computes all scores: that is a check of the mask, not a way to train.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ops.attention.lengths import Lengths, Pair
from ops.attention.names import BackendName

BLOCK = 128
LEAST = 16  # head size: the least that a tensor core product takes
_CUDA_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


_of_graphs: list[BlockMask] = []  # that CUDA graphs read, by their addresses alone; kept for good, as graphs are


class Flex:
    name: BackendName = "flex"

    def why_not(self, q: Tensor, lengths: Pair | None = None) -> str | None:
        if q.device.type == "cpu":
            if q.requires_grad and torch.is_grad_enabled():
                return "attention flex has no backward on cpu in PyTorch. Use sdpa or auto."
            return None
        if not q.is_cuda:
            return f"attention flex runs on cuda and cpu, not on {q.device.type}. Use sdpa or auto."
        if q.dtype not in _CUDA_DTYPES:
            dtype = str(q.dtype).removeprefix("torch.")
            return f"attention flex takes bfloat16, float16 and float32, not {dtype}. Use sdpa or auto."
        if q.shape[-1] < LEAST:
            return f"attention flex takes head sizes from {LEAST}, not {q.shape[-1]}. Use sdpa or auto."
        return None

    def run(self, q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths) -> Tensor:
        if not q_lengths.longest or not k_lengths.longest:
            return q * 0
        mask = document_mask(q_lengths.host, k_lengths.host, q.device)
        if _is_captured(q.device) and not any(mask is one for one in _of_graphs):
            _of_graphs.append(mask)
        q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (q, k, v))
        out = _compiled()(q, k, v, block_mask=mask) if q.is_cuda else flex_attention(q, k, v, block_mask=mask)
        assert isinstance(out, Tensor)  # a tuple only where a second result is asked for
        return out[0].transpose(0, 1)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@cache
def _compiled() -> Callable[..., Tensor | tuple[Tensor, ...]]:
    return torch.compile(flex_attention, dynamic=True)


@lru_cache(maxsize=16)  # all layers of a cascade ask for the same two or three
def document_mask(q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], device: torch.device) -> BlockMask:
    """Each query sees the keys of its own sequence. Found on the host from the lengths, without a mask of N x N.

    The keys that a block of queries sees are one range, because sequences come in the same order on both sides; keys
    of a sequence without queries may lie in it, and are masked.
    """
    q_document = np.repeat(np.arange(len(q_lengths)), q_lengths)
    k_start = np.concatenate([[0], np.cumsum(k_lengths)])
    first = q_document[::BLOCK]  # sequence of the first query of each block, and of the last
    last = q_document[np.minimum(np.arange(1, len(first) + 1) * BLOCK, len(q_document)) - 1]
    start, stop = k_start[first], k_start[last + 1]
    num_k = int(k_start[-1])
    column = np.arange(-(-num_k // BLOCK))[None]
    low, high = column * BLOCK, np.minimum((column + 1) * BLOCK, num_k)
    touched = (low < stop[:, None]) & (high > start[:, None])
    full = (first == last)[:, None] & (low >= start[:, None]) & (high <= stop[:, None])
    q_of = torch.from_numpy(q_document).to(device, torch.int32)
    k_of = torch.from_numpy(np.repeat(np.arange(len(k_lengths)), k_lengths)).to(device, torch.int32)

    def same_sequence(batch: Tensor, head: Tensor, q_row: Tensor, k_row: Tensor) -> Tensor:
        return q_of[q_row] == k_of[k_row]

    return BlockMask.from_kv_blocks(
        *_block_list(touched & ~full, device),
        *_block_list(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=same_sequence,
        seq_lengths=(len(q_document), num_k),
    )


def _block_list(chosen: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """The list of chosen columns of a bool [rows, columns]: how many columns each row has, and which (those first): [1,
    1, R], [1, 1, R, C]."""
    count = chosen.sum(axis=1, dtype=np.int32)
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    return tuple(torch.from_numpy(part)[None, None].to(device) for part in (count, order))  # type: ignore[return-value]
