"""The arguments of heddle::gate_residual, heddle::gate_residual_ln_modulate and their backwards.

The one list of them; fields stand in the order of the op's schema.

N tokens, D width, S table rows.
Named tuples, because one is made per call of an op, and a frozen dataclass of 19 fields takes 5.4 us against 0.6 us.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ops.kernels.base.segments import Segments, as_segments


class GateCall(NamedTuple):
    """x + gate * y."""

    x: Tensor  # [N, D]
    y: Tensor  # [N, D]
    gate: Tensor  # [S, D]
    run: Tensor | None
    cu: Tensor | None
    run2mod: Tensor | None
    mod_off: Tensor | None
    mod_runs: Tensor | None
    residual_dtype: torch.dtype

    @property
    def segments(self) -> Segments | None:
        """None: the tables have one row, or one row per token."""
        return as_segments(self.run, self.cu, self.run2mod, self.mod_off, self.mod_runs)


class GateBackwardCall(NamedTuple):
    """`gate_sum` asks for the gradient of the gate."""

    dxo: Tensor  # [N, D], gradient of x + gate * y
    y: Tensor  # [N, D]
    gate: Tensor  # [S, D]
    run: Tensor | None
    cu: Tensor | None
    run2mod: Tensor | None
    mod_off: Tensor | None
    mod_runs: Tensor | None
    gate_sum: bool

    @property
    def segments(self) -> Segments | None:
        """None: the tables have one row, or one row per token."""
        return as_segments(self.run, self.cu, self.run2mod, self.mod_off, self.mod_runs)


class GateNormCall(NamedTuple):
    """x' = x + gate * y, then its modulated norm."""

    x: Tensor  # [N, D]
    y: Tensor  # [N, D]
    gate: Tensor | None  # [S, D]
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
    residual_dtype: torch.dtype
    out_dtype: torch.dtype

    @property
    def segments(self) -> Segments | None:
        """None: the tables have one row, or one row per token."""
        return as_segments(self.run, self.cu, self.run2mod, self.mod_off, self.mod_runs)


class GateNormBackwardCall(NamedTuple):
    """`sums` and `gate_sum` ask for the gradients of the norm's tables and of the gate."""

    dxo: Tensor | None  # [N, D], gradient of x'
    dh: Tensor  # [N, D], gradient of its norm
    xo: Tensor  # [N, D], x' as stored
    y: Tensor  # [N, D]
    gate: Tensor | None  # [S, D]
    weight: Tensor | None  # [D]
    bias: Tensor | None  # [D]
    scale: Tensor | None  # [S, D]
    mean: Tensor  # [N]; empty for RMS
    rstd: Tensor  # [N]
    run: Tensor | None
    cu: Tensor | None
    run2mod: Tensor | None
    mod_off: Tensor | None
    mod_runs: Tensor | None
    rms: bool
    x_dtype: torch.dtype
    sums: bool
    gate_sum: bool

    @property
    def segments(self) -> Segments | None:
        """None: the tables have one row, or one row per token."""
        return as_segments(self.run, self.cu, self.run2mod, self.mod_off, self.mod_runs)
