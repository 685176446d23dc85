"""Launch configurations of ln_modulate for shipped widths. See base/tuning.py for the limits."""

from __future__ import annotations

from ops.kernels.base.tuning import Launch, Table

# (kernel, D, dtype of x, architecture)
TABLE: Table = {
    ("forward", 1536, "bfloat16", "sm_90"): Launch(chunk=512, warps=2),
    ("forward", 3072, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4),
    ("forward", 5120, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4),
    ("backward", 1536, "bfloat16", "sm_90"): Launch(chunk=512, warps=2, stages=3, per_sm=6),
    ("backward", 3072, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4, stages=3, per_sm=3),
    ("backward", 5120, "bfloat16", "sm_90"): Launch(chunk=1024, warps=8, stages=3, per_sm=1, load_bits=64),
    ("token_backward", 1536, "bfloat16", "sm_90"): Launch(chunk=512, warps=2),
    ("token_backward", 3072, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4),
    ("token_backward", 5120, "bfloat16", "sm_90"): Launch(chunk=1024, warps=4),
    # fp32 residual stream, bf16 branches and gradients. The norm backward takes twice the warps of bf16: with 24
    # columns per thread triton 3.9 converts layouts in the row loop and 3.6 uses 240 registers.
    ("forward", 1536, "float32", "sm_90"): Launch(chunk=512, warps=2),
    ("forward", 3072, "float32", "sm_90"): Launch(chunk=1024, warps=4),
    ("forward", 5120, "float32", "sm_90"): Launch(chunk=1024, warps=4),
    ("backward", 1536, "float32", "sm_90"): Launch(chunk=512, warps=4, stages=3, per_sm=4, load_bits=64),
    ("backward", 3072, "float32", "sm_90"): Launch(chunk=1024, warps=8, stages=3, per_sm=2, load_bits=64),
    ("backward", 5120, "float32", "sm_90"): Launch(chunk=1024, warps=8, stages=3, per_sm=1, load_bits=64),
    ("token_backward", 1536, "float32", "sm_90"): Launch(chunk=512, warps=4, load_bits=64),
    ("token_backward", 3072, "float32", "sm_90"): Launch(chunk=1024, warps=8, load_bits=64),
    ("token_backward", 5120, "float32", "sm_90"): Launch(chunk=1024, warps=8, load_bits=64),
}
