"""Which errors are answered with a sentence, and the exit code of each (listed by `heddle --help`)."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path

from actors.outcome import Exit
from ops.code_path import ROOT
from ops.passing import UNREACHABLE

PACKAGES = ("app", "actors", "data", "ops")

# the path cannot be used; EEXIST: a file is there where a folder is to be made
NO_PLACE = frozenset((errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST))
FULL = frozenset((errno.ENOSPC, errno.EDQUOT))

# by class name along the inheritance, so that no layer is imported only for this
CODES = {
    "ConfigError": Exit.USAGE,
    "LaterFormat": Exit.USAGE,
    "OtherKeepers": Exit.USAGE,
    "PlanError": Exit.PLAN,
    "DataError": Exit.DATA,
}


def exit_code(error: BaseException) -> int:
    """The process's exit code for an error that reached the command line."""
    error = unwrap(error)
    for cls in type(error).__mro__:
        if cls.__module__.split(".")[0] in PACKAGES and cls.__name__ in CODES:
            return CODES[cls.__name__]
    if type(error).__module__.split(".")[0] in PACKAGES:
        return Exit.FAILURE
    if is_ours(error) and isinstance(error, ValueError | OSError):
        return Exit.FAILURE if getattr(error, "errno", None) in FULL | UNREACHABLE else Exit.USAGE
    return Exit.FAILURE


def is_ours(error: BaseException) -> bool:
    """True for errors whose message is written for the person at the terminal.

    These are our own types, a ValueError raised by a line of ours, and files that are missing, cannot be written or are
    out of reach; anything else is a defect and keeps its traceback.
    """
    error = unwrap(error)
    if type(error).__module__.split(".")[0] in PACKAGES:
        return True
    if isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError | IsADirectoryError):
        return True
    if _is_of_a_place(error):
        return True
    return isinstance(error, ValueError) and _raised_by_us(error)


def unwrap(error: BaseException) -> BaseException:
    """The error a Ray task died of, when that is what `error` reports."""
    seen = 0
    while (cause := getattr(error, "cause", None)) is not None and isinstance(cause, BaseException) and seen < 8:
        error, seen = cause, seen + 1
    return error


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks; of a place that cannot be written or reached, what to do."""
    found = unwrap(error)
    if isinstance(found, OSError) and _is_of_a_place(found):
        remedy = "Free space, or choose another path" if found.errno in FULL else "Choose another path"
        remedy = "Its storage does not answer; try again when it does" if found.errno in UNREACHABLE else remedy
        return f"{found.filename}: {found.strerror}. {remedy}."
    return " ".join(str(unwrap(error)).split()) or type(unwrap(error)).__name__


def _is_of_a_place(error: BaseException) -> bool:
    return isinstance(error, OSError) and bool(error.filename) and error.errno in NO_PLACE | FULL | UNREACHABLE


def _raised_by_us(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    path = Path(frames[-1].filename).resolve()
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
