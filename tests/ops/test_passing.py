"""Errors of a file server that pass are known by any name that libraries give them."""

from __future__ import annotations

import errno

import pytest
from safetensors import SafetensorError

from ops.passing import passes

STALE = OSError(errno.ESTALE, "Stale file handle", "/weights/model.safetensors")


def wrapped(cause: Exception, *, hidden: bool) -> Exception:
    """As libraries say it: `raise ... from error`, or `from None`."""
    try:
        try:
            raise cause
        except Exception as error:
            raise ValueError("no folder of weights") from (None if hidden else error)
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        STALE,
        TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
        OSError("Stale file handle (os error 116)"),  # safetensors opens a file
        SafetensorError("Error while deserializing: I/O error: Input/output error (os error 5)"),
        wrapped(STALE, hidden=False),
        wrapped(STALE, hidden=True),
        wrapped(wrapped(OSError("Input/output error (os error 5)"), hidden=True), hidden=False),
    ],
    ids=str,
)
def test_what_storage_that_does_not_answer_raises_passes(error: Exception) -> None:
    assert passes(error)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/weights"),
        PermissionError("Permission denied (os error 13)"),
        OSError("it does not appear to have a file named config.json"),
        RuntimeError("CUDA error: unknown, error 5"),
        wrapped(FileNotFoundError(errno.ENOENT, "No such file or directory"), hidden=False),
        None,
    ],
    ids=str,
)
def test_what_another_start_would_meet_again_does_not(error: Exception | None) -> None:
    assert not passes(error)


def test_errors_that_are_each_others_cause_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert not passes(one)
