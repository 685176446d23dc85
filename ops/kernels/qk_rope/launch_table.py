"""Launch configurations of qk_norm_rope for shipped widths. See base/tuning.py for the limits."""

from __future__ import annotations

from ops.kernels.base.tuning import Launch, Table

# (kernel, D, dtype of x, architecture)
TABLE: Table = {
    ("qk_forward", 1536, "bfloat16", "sm_90"): Launch(chunk=512, warps=2),
    ("qk_forward", 3072, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4),
    ("qk_forward", 5120, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4),
    ("qk_backward", 1536, "bfloat16", "sm_90"): Launch(chunk=512, warps=2, stages=3, per_sm=6),
    ("qk_backward", 3072, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4, stages=2, per_sm=3),
    ("qk_backward", 5120, "bfloat16", "sm_90"): Launch(chunk=1024, warps=8, stages=3, per_sm=2, load_bits=64),
}
