"""Trains one run. On a cluster:  ray job submit --working-dir . -- python -m app.train --config configs/runs/demo.yaml

The run itself is `app/run/launch.py`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from actors.outcome import Exit
from app.run.apart import is_inner, join_lifeline
from app.run.launch import train
from app.run.live_runs import leave
from app.settings.errors import PACKAGES, exit_code, is_ours, one_line


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m app.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", "-c", required=True, help="YAML of the run")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="start again in an existing folder")
    return parser.parse_args(arguments)


def _main() -> int:
    """The process of its own that a run of this machine has, and that of a submitted job. Returns the exit code."""
    if is_inner():
        join_lifeline()
    given = parse()
    debug = os.environ.get("HEDDLE_DEBUG", "") not in ("", "0")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.DEBUG if debug else logging.INFO)
    try:
        return train(given.config, given.overrides, resume=given.resume, overwrite=given.overwrite)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    except Exception as error:
        if debug or not is_ours(error):
            traceback.print_exc()
        else:
            print(f"error: {one_line(error)}", file=sys.stderr)
        return exit_code(error)


if __name__ == "__main__":
    leave(_main())
