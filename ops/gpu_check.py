"""Whether PyTorch can use the GPU of this process: the driver, the build of PyTorch or the GPU may be in the way."""

from __future__ import annotations

import torch

from ops.waiting import first_line

_NUMBERS = 1000


def why_unusable() -> str:
    """Why nothing can be computed on the first GPU that this process may use, and what helps, as a sentence without its
    full stop; "" where it works. Afterwards the process holds a CUDA context."""
    if torch.version.cuda is None:
        return (
            f"PyTorch {torch.__version__} is a build without CUDA; install one with it, for example by "
            f"pip install --force-reinstall torch=={torch.__version__.partition('+')[0]} from PyPI"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        found = torch.arange(_NUMBERS, device="cuda").sum().item()
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:  # which is no RuntimeError
        told = first_line(error).removesuffix(".")
        return f"PyTorch {torch.__version__} of CUDA {torch.version.cuda} cannot use it: {told}"
    right = _NUMBERS * (_NUMBERS - 1) // 2
    return "" if found == right else f"it computes wrongly: {found} where {right} is right. Take it out of the cluster"
