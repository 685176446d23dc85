"""Tables of attention backends, of numbers that nobody measured."""

from __future__ import annotations

from ops.attention.names import BackendName
from ops.attention.table import AttentionTable, LengthsKind, TableRow


def table(
    *rows: tuple[BackendName, float, float],
    lengths: LengthsKind = "one",
    head_dim: int = 128,
    device: str = "GPU",
    dtype: str = "bfloat16",
) -> AttentionTable:
    """(backend, length, seconds of both directions), a third of them forward."""
    return AttentionTable(
        device=device, dtype=dtype, rows=tuple(row(*one, lengths=lengths, head_dim=head_dim) for one in rows)
    )


def row(
    backend: BackendName, length: float, seconds: float, *, lengths: LengthsKind = "one", head_dim: int = 128
) -> TableRow:
    return TableRow(
        backend=backend,
        head_dim=head_dim,
        lengths=lengths,
        length=length,
        forward_s=seconds / 3,
        backward_s=2 * seconds / 3,
    )
