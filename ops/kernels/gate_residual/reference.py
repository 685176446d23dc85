"""What heddle::gate_residual and heddle::gate_residual_ln_modulate take and mean: arguments, and plain PyTorch.

The reference is differentiable, runs on any device and is exact in float64; it is the judge of every test. The second
op is the first one, then `norm_modulate.reference.ln_modulate` of its result.
The fields of a call stand in the order of the op's schema; no other list of them exists.

N tokens, D width, S rows of the modulation tables. `rows` maps each token to its table row; None means one row for
all tokens (tables of one row) or one row per token (tables of N rows).
Arithmetic is float32 for inputs of up to 32 bits and float64 for float64.

Calls are named tuples, because one is made per call of an op, and a frozen dataclass of 19 fields takes 5.4 us against
0.6 us.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ops.kernels.base.dtypes import compute_dtype
from ops.kernels.base.segments import Segments, as_segments
from ops.kernels.norm_modulate.reference import per_token


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


def gate_residual(
    x: Tensor, y: Tensor, gate: Tensor | None, rows: Tensor | None = None, residual_dtype: torch.dtype | None = None
) -> Tensor:
    """x + gate * y for x, y [N, D]; without a gate x + y."""
    dtype = compute_dtype(x, y)
    branch = y.to(dtype)
    if gate is not None:
        branch = branch * per_token(gate, rows).to(dtype)
    return (x.to(dtype) + branch).to(residual_dtype or x.dtype)
