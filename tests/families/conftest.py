"""Threads as ranks, as in tests/ops."""

from tests.ops.conftest import run_ranks

__all__ = ["run_ranks"]
