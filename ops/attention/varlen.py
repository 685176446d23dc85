"""Attention over packed sequences: one interface over all backends, chosen by name or by device and shape.

N rows, H heads, d head size. Each query sees the keys of its own sequence only; there is no padding.
- `flash3`: FlashAttention 3; sm_90, half precision, where the package flash_attn_3 is installed.
- `flash`: PyTorch's variable-length FlashAttention 2; CUDA, half precision.
- `cudnn`: cuDNN per sequence (one call when all lengths are equal); CUDA, half precision.
- `flex`: FlexAttention with a mask by sequence; CUDA, or the forward pass on the CPU.
- `sdpa`: scaled_dot_product_attention per sequence (one call when all lengths are equal); any device and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ops.attention.backend import Backend
from ops.attention.lengths import Lengths, Pair
from ops.attention.names import BACKEND_NAMES, BackendName
from ops.attention.opaque import opaque
from ops.attention.table import AttentionSetting, AttentionTable, mean_length


@dataclass(frozen=True, slots=True)
class Preference:
    """`auto` takes the first backend of `PREFERENCES` that can serve the call and that suits its lengths."""

    backend: BackendName
    least: int = 0  # scores, queries times keys, of a sequence where all have the same lengths
    alone: int = 0  # of the mean sequence where they have not, and each is a call of its own
    plans: bool = False  # each new shape on the host: for lengths that come again

    def suits(self, lengths: Pair) -> bool:
        queries, keys = lengths
        if self.plans and not (queries.recur and keys.recur):
            return False
        if queries.equal and keys.equal:
            return queries.longest * keys.longest >= self.least
        scores = sum(rows * seen for rows, seen in zip(queries.host, keys.host, strict=True)) if self.alone else 0
        return scores >= self.alone * len(queries.host)


# cuDNN plans each new shape on the host, tens of milliseconds for each direction, which short sequences do not earn
# back, nor those that hold a caption of any length. One call for each sequence costs the host 50 to 100 us, so in the
# mean they must be as much for the device. FlexAttention's mask is found on the host for each pack.
_CUDNN = Preference("cudnn", least=1024**2, alone=2048**2, plans=True)
_FLEX = Preference("flex", plans=True)

# From published figures (H100, head size 128, 16k rows, forward: 648, 595 and 370 TFLOP/s) and those of docs/gpu (H200:
# 564 and 357; seven clips of 985 to 10,155 rows, a call for each: 521 and 355, backward 451 and 296; to 512 keys cuDNN
# takes 0.58 of flash's time); where a table of `python -m app.bench.gpu` is given, what it measured comes first.
PREFERENCES = (Preference("flash3"), _CUDNN, Preference("flash"), Preference("sdpa"))
_MEASURED: dict[BackendName, Preference] = {"cudnn": _CUDNN, "flex": _FLEX}  # costs that a table does not show


# The kernels of flash and of scaled_dot_product_attention have sequences in a dimension of CUDA's grid that ends here.
# Temporal blocks have one for each position of each clip: 65 pictures of 512x512 have more.
MOST_SEQUENCES = 65535

_stand_in: Backend | None = None


@contextmanager
def standing_in(backend: Backend | None) -> Iterator[None]:
    """Every call goes to this backend, None: to those that the calls name. For what is counted without a device."""
    global _stand_in
    before, _stand_in = _stand_in, backend
    try:
        yield
    finally:
        _stand_in = before


@opaque
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lengths: Lengths,
    k_lengths: Lengths,
    backend: AttentionSetting = "auto",
    *,
    most_sequences: int = MOST_SEQUENCES,
) -> Tensor:
    """q [Nq, H, d], k and v [Nk, H, d] -> [Nq, H, d]. A sequence without keys gives zeros, without queries no rows. One
    call of a backend has up to `most_sequences`.

        lengths = Lengths.of([5, 3])            # rows of each sequence, once for all layers; on a GPU with its device
        out = attention(q, k, v, lengths, lengths)

    Raises ValueError when rows and lengths do not fit, and when the named backend cannot serve this call; `auto`, also
    by a table, always finds one.
    """
    _check_rows(q, k, v, q_lengths, k_lengths)
    if len(q_lengths.host) != len(k_lengths.host):
        raise ValueError(f"{len(q_lengths.host)} sequences of queries and {len(k_lengths.host)} of keys; they pair up.")
    if not q_lengths.host:  # a rank of a bag that has no rows
        return q * 0  # stays in the graph, so that backward reaches the rank's collectives
    if len(q_lengths.host) > most_sequences:
        parts = _parts(q, k, v, q_lengths, k_lengths, most_sequences)
        return torch.cat([attention(*part, backend, most_sequences=most_sequences) for part in parts])
    lengths = q_lengths, k_lengths
    if _stand_in is not None:
        return _stand_in.run(q, k, v, q_lengths, k_lengths)
    if backend == "auto" or isinstance(backend, AttentionTable):
        return choose(q, lengths, table=_table_of(backend)).run(q, k, v, q_lengths, k_lengths)
    named = backend_of(backend)
    if reason := named.why_not(q, lengths):
        raise ValueError(reason)
    return named.run(q, k, v, q_lengths, k_lengths)


def _check_rows(q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths) -> None:
    """What no backend sees: sequences of one length are a batch to them, whatever that length is."""
    if not isinstance(q_lengths, Lengths) or not isinstance(k_lengths, Lengths):
        raise ValueError("attention takes lengths that Lengths.of([...], device) has made, for all layers at once.")
    queries = q_lengths.total  # temporal layers have a sequence for each position: added up once
    keys = queries if k_lengths is q_lengths else k_lengths.total
    if any(x.ndim != 3 or x.shape[0] != rows for x, rows in ((q, queries), (k, keys), (v, keys))):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} are not [rows, heads, head size] with the "
            f"{queries} rows of the queries' lengths and the {keys} of the keys'; flatten batches into rows."
        )


def _parts(
    q: Tensor, k: Tensor, v: Tensor, q_lengths: Lengths, k_lengths: Lengths, most_sequences: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Lengths, Lengths]]:
    """The call as several, of `most_sequences` each."""
    q_row = k_row = 0
    for first in range(0, len(q_lengths.host), most_sequences):
        sequences = slice(first, first + most_sequences)
        q_part, k_part = q_lengths.cut(sequences), k_lengths.cut(sequences)
        q_rows, k_rows = slice(q_row, q_row + q_part.total), slice(k_row, k_row + k_part.total)
        yield q[q_rows], k[k_rows], v[k_rows], q_part, k_part
        q_row, k_row = q_rows.stop, k_rows.stop


@cache
def backend_of(name: BackendName) -> Backend:
    """The backend of that name. Raises ValueError for a name that none has."""
    if name == "sdpa":
        from ops.attention.sdpa import Sdpa

        return Sdpa()
    if name == "cudnn":
        from ops.attention.cudnn import Cudnn

        return Cudnn()
    if name == "flex":
        from ops.attention.flex import Flex  # its import costs half a second

        return Flex()
    if name in ("flash", "flash3"):
        from ops.attention.flash import Flash, Flash3

        return Flash() if name == "flash" else Flash3()
    raise ValueError(f"attention {name!r} is none of auto, {', '.join(BACKEND_NAMES)}.")


def _table_of(setting: AttentionSetting) -> AttentionTable | None:
    return setting if isinstance(setting, AttentionTable) else None


def choose(
    q: Tensor,
    lengths: Pair,
    backends: Callable[[BackendName], Backend] = backend_of,
    table: AttentionTable | None = None,
) -> Backend:
    """What `auto` means for this call, of the `backends` by their names: the fastest of the table that can serve it, or
    what the rules say where it knows of no such call."""
    for backend in map(backends, _measured(table, q, lengths) if table is not None else ()):
        if backend.why_not(q, lengths) is None:
            return backend
    if not q.is_cuda:  # nothing else computes gradients there
        return backends("sdpa")
    candidates = (p for p in PREFERENCES if p.suits(lengths))
    return next(b for b in (backends(p.backend) for p in candidates) if b.why_not(q, lengths) is None)


def _measured(table: AttentionTable, q: Tensor, lengths: Pair) -> Iterator[BackendName]:
    """Backends of the table for this call, fastest first. It holds for self-attention in its own precision: of queries
    and keys with lengths of their own it says nothing."""
    queries, keys = lengths
    if not _covers(table, q) or not queries.longest or queries.host != keys.host:
        return
    length = float(queries.longest) if queries.equal else mean_length(queries.host)
    gradient = q.requires_grad and torch.is_grad_enabled()
    for name in table.fastest(q.shape[-1], queries.equal, length, gradient):
        if _MEASURED.get(name, Preference(name)).suits(lengths):
            yield name


def _covers(table: AttentionTable, q: Tensor) -> bool:
    return table.on_cuda == q.is_cuda and table.dtype == str(q.dtype).removeprefix("torch.")


def serving(
    q: Tensor, backends: Callable[[BackendName], Backend] = backend_of, table: AttentionTable | None = None
) -> list[BackendName]:
    """What `auto` chooses from for queries like `q` [N, H, d], best first, up to one that serves every call; what a
    table adds to these comes after them."""
    found = _by_rules(q, backends)
    if table is not None and _covers(table, q):
        found += [name for name in table.backends if name not in found and backends(name).why_not(q) is None]
    return found


def _by_rules(q: Tensor, backends: Callable[[BackendName], Backend]) -> list[BackendName]:
    if not q.is_cuda:
        return ["sdpa"]
    possible = [p for p in PREFERENCES if backends(p.backend).why_not(q) is None]
    always = next(i for i, p in enumerate(possible) if not p.least and not p.plans)
    return [p.backend for p in possible[: always + 1]]


def check_backend(
    name: AttentionSetting, device: torch.device, dtype: torch.dtype, head_dim: int, training: bool = True
) -> None:
    """Raises ValueError, before any work, when a model with heads of this size can never use the named backend here,
    or when a table is of another device.

    `dtype` is that of the queries: autocast's where it is on, else the parameters'.
    """
    if name == "auto":
        return
    if isinstance(name, AttentionTable):
        here = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
        if name.device != here:
            raise ValueError(
                f"model.dit.attention is a table of {name.device}, and this device is {here}. Give one that python -m "
                f"app.bench.gpu wrote on {here}, or set attention: auto."
            )
        return
    probe = torch.empty(0, 1, head_dim, device=device, dtype=dtype, requires_grad=training)
    if reason := backend_of(name).why_not(probe):
        raise ValueError(f"model.dit.attention {name} cannot be used here: {reason}")
