"""The push is measured by app.bench.gpu.push: it is no op on rows, as those that `heddle bench ops` compares."""

from __future__ import annotations

from ops.kernels.base.contest import Contest


def contests(liger: bool) -> list[Contest]:
    """None."""
    return []
