"""The environment of processes with Heddle in them: where they import from, and how names of files are written."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the folder of app, actors, data and ops
UPLOADED = "/runtime_resources/working_dir_files/"  # in paths below the working directory of a submitted job


def code_path() -> str:
    """PYTHONPATH for a process that is started with `python -P`: Heddle, then the caller's PYTHONPATH, then the current
    folder, which may have a decoder of the user's own. It comes last, as an app.py or data.py there is not ours."""
    folders = [str(ROOT)]
    for folder in (*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), os.curdir):
        with suppress(FileNotFoundError):  # it is relative, and the current folder was removed
            folders.append(os.path.abspath(folder))
    return os.pathsep.join(dict.fromkeys(folders))


def python_environment() -> dict[str, str]:
    """What a process with Heddle in it has in its environment, on whatever node. In UTF-8 mode, as the locale of a node
    would decide otherwise which names of files can be read: each node would have an index of its own."""
    return {"PYTHONPATH": code_path(), "PYTHONUTF8": "1"}
