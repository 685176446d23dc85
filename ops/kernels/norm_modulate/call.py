"""The arguments of heddle::ln_modulate and its backward.

The one list of them; fields stand in the order of the op's schema.

N tokens, D width, S table rows.
Named tuples, because one is made per call of an op, and a frozen dataclass of 19 fields takes 5.4 us against 0.6 us.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ops.kernels.base.segments import Segments, as_segments


class NormCall(NamedTuple):
    """(norm(x) * weight + bias) * (1 + scale) + shift."""

    x: Tensor  # [N, D]
    weight: Tensor | None  # [D]
    bias: Tensor | None  # [D]
    scale: Tensor | None  # [S, D]
    shift: Tensor | None  # [S, D]
    run: Tensor | None
    cu: Tensor | None
    run2mod: Tensor | None
    mod_off: Tensor | None
    mod_runs: Tensor | None
    eps: float
    rms: bool
    out_dtype: torch.dtype

    @property
    def segments(self) -> Segments | None:
        """None: the tables have one row, or one row per token."""
        return as_segments(self.run, self.cu, self.run2mod, self.mod_off, self.mod_runs)


class NormBackwardCall(NamedTuple):
    """Without `sums` no table needs a gradient."""

    dy: Tensor  # [N, D]
    x: Tensor  # [N, D]
    weight: Tensor | None  # [D]
    bias: Tensor | None  # [D]
    scale: Tensor | None  # [S, D], or [N, D] with per_token
    mean: Tensor  # [N]; empty for RMS
    rstd: Tensor  # [N]
    run: Tensor | None
    cu: Tensor | None
    run2mod: Tensor | None
    mod_off: Tensor | None
    mod_runs: Tensor | None
    per_token: bool
    rms: bool
    sums: bool

    @property
    def segments(self) -> Segments | None:
        """None: the tables have one row, or one row per token."""
        return as_segments(self.run, self.cu, self.run2mod, self.mod_off, self.mod_runs)
