"""The files that a command is to write, by --out and the like: whether they can be written, and how they take the place
of earlier ones."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ops.standard_out import STDOUT, is_stdout
from ops.typed import ConfigError
from ops.whole_file import whole_file

PAGES = (".html", ".htm")
_RUN = ("config.yaml", "metrics.jsonl")  # in the folder of a run that has begun


def check_page(path: Path | None, option: str = "--out") -> None:
    """As `check_writable`, for an HTML page. Raises ConfigError also where the page would replace a file that is none,
    such as a run's records; that of `> FILE` may have any name."""
    if path is not None and path.is_file() and not is_stdout(path) and path.suffix.lower() not in PAGES:
        raise ConfigError(f"{option} {path} is there and no page; give a file that ends in {PAGES[0]}.")
    check_writable([path], option)


def put_text(path: Path, text: str) -> None:
    """A page or figures in the place of earlier ones, as `out_file`; on stdout after what is there, which opening
    /dev/stdout removes from the file of `>> FILE`."""
    if is_stdout(path):
        with open(os.dup(STDOUT), "w", encoding="utf-8") as stream:
            stream.write(text)
        return
    with out_file(path) as part:
        part.write_text(text, encoding="utf-8")


@contextmanager
def out_file(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of an earlier file, which a full disk leaves as it was. What is no file, such
    as a pipe or /dev/null, a file that is mounted or has no name any more, and one in a folder that takes no others,
    are written as they are."""
    target = Path(os.path.realpath(path))  # what a link leads to, whose place is not for a page
    if path.exists() and not (path.is_file() and target.exists()):  # /dev/stdout may lead to what has no path
        yield path
    elif os.path.ismount(target) or not os.access(target.parent, os.W_OK | os.X_OK):
        yield target
    else:
        with whole_file(target) as part:
            yield part


def begin_list(path: Path, option: str = "--out") -> None:
    """Before a command that lists faults line by line: an earlier list goes. What is no file stays, and the file that a
    link leads to is emptied. Raises ConfigError where the list is one of a run's records, or cannot be written."""
    folders = {path.parent, Path(os.path.realpath(path)).parent}  # also where a link leads into one
    if any(all((folder / name).is_file() for name in _RUN) for folder in folders):
        raise ConfigError(
            f"{option} {path} is in the folder of a run, whose own lists have such names; give a file elsewhere."
        )
    check_writable([path], option)
    if is_no_file(path):
        return
    if path.is_symlink() and path.is_file():
        os.truncate(path, 0)
    else:
        path.unlink(missing_ok=True)


def is_no_file(path: Path) -> bool:
    """Whether something is there that is not for replacing: a pipe, a terminal, a device, what this process prints."""
    return path.exists() and (not path.is_file() or is_stdout(path))


def check_writable(files: Iterable[Path | None], option: str = "--out") -> None:
    """Before a command begins, for what it writes at its end: a mistyped --out costs no run. Makes missing folders.
    None stands for an option that was not given.

    Raises ConfigError for a file that cannot be written.
    """
    for path in files:
        if path is None:
            continue
        try:
            if path.parent.is_file():
                raise NotADirectoryError(None, f"{path.parent} is a file")
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(None, "Is a directory")
            if not os.access(path if path.exists() else path.parent, os.W_OK):
                raise PermissionError(None, "Permission denied")
        except OSError as error:
            raise ConfigError(
                f"{option} {path} cannot be written ({error.strerror}); give a file in a folder that you may write."
            ) from None
