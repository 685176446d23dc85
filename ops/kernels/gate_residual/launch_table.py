"""Launch configurations of the gate ops for shipped widths. See base/tuning.py for the limits."""

from __future__ import annotations

from ops.kernels.base.tuning import Launch, Table

# (kernel, D, dtype of x, architecture)
TABLE: Table = {
    ("gate_forward", 1536, "bfloat16", "sm_90"): Launch(chunk=512, warps=2),
    ("gate_forward", 3072, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4),
    ("gate_forward", 5120, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4),
    ("gate_backward", 1536, "bfloat16", "sm_90"): Launch(chunk=512, warps=4, stages=3, per_sm=3, load_bits=64),
    ("gate_backward", 3072, "bfloat16", "sm_90"): Launch(chunk=1024, warps=8, stages=3, per_sm=1, load_bits=64),
    ("gate_backward", 5120, "bfloat16", "sm_90"): Launch(chunk=1024, warps=8, stages=2, per_sm=1, load_bits=64),
    ("gate_forward", 1536, "float32", "sm_90"): Launch(chunk=512, warps=2),
    ("gate_forward", 3072, "float32", "sm_90"): Launch(chunk=1024, warps=4),
    ("gate_forward", 5120, "float32", "sm_90"): Launch(chunk=1024, warps=4),
    ("gate_backward", 1536, "float32", "sm_90"): Launch(chunk=512, warps=4, stages=3, per_sm=3, load_bits=64),
    ("gate_backward", 3072, "float32", "sm_90"): Launch(chunk=1024, warps=8, stages=3, per_sm=1, load_bits=64),
    ("gate_backward", 5120, "float32", "sm_90"): Launch(chunk=1024, warps=8, stages=2, per_sm=1, load_bits=64),
}
