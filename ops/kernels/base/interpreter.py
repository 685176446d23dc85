"""Triton's interpreter on CPU tensors, for tests and rehearsals. Needs triton, imported with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from functools import cache

import numpy as np
import torch


def interpreting() -> bool:
    """Whether kernels of this process are interpreted; triton reads the variable when a kernel is defined."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def round_bf16_like_hardware() -> None:
    """The interpreter truncates fp32 to bf16 (3.3e-3 error and a bias to zero); hardware rounds to even."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    truncate = interpreter._convert_float

    def convert(values: np.ndarray, source: object, target: object, rounding_mode: object) -> np.ndarray:
        if source == tl.float32 and target == tl.bfloat16:
            exact = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
            return exact.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        converted: np.ndarray = truncate(values, source, target, rounding_mode)
        return converted

    interpreter._convert_float = convert
