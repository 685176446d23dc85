"""Trains one run. On a cluster:  ray job submit --working-dir . -- python -m app.train --config configs/runs/demo.yaml

The run itself is `app/run/launch.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from app.start import be_in_utf8, ended_by_ctrl_c, open_closed_streams


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m app.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", "-c", required=True, help="YAML of the run")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint")
    parser.add_argument("--back-to", type=int, metavar="N", help="with --resume: from the checkpoint after N steps")
    parser.add_argument(
        "--overwrite", action="store_true", help="start again: all that is in the run's folder is deleted"
    )
    return parser.parse_args(arguments)


def _main() -> int:
    """The process of one run, started by `heddle train` or by a submitted job. Returns the exit code."""
    with ended_by_ctrl_c():
        from app.run.apart import is_inner, join_lifeline
        from app.run.signals import unwinds_on_signal
        from app.settings.terminal import answer, debug_wanted, set_up_logging

        if is_inner():
            join_lifeline()
        given = parse()
        debug = debug_wanted()
        set_up_logging(debug)
    try:
        with unwinds_on_signal():
            from app.run.launch import train

            return train(
                given.config,
                given.overrides,
                resume=given.resume,
                overwrite=given.overwrite,
                back_to=given.back_to,
            )
    except SystemExit as ended:  # by a signal
        return ended.code if isinstance(ended.code, int) else 1
    except (Exception, KeyboardInterrupt) as error:
        return answer(error, debug)


if __name__ == "__main__":
    open_closed_streams()
    be_in_utf8()
    code = _main()
    from app.run.cluster import leave
    from app.run.signals import heed_no_more

    heed_no_more()
    leave(code)
