"""`heddle`: parses, checks, and calls the function of a command (`app/commands/`).

Exit codes: 0 ok, 1 failure, 2 usage or config, 3 plan infeasible, 4 data rejected, 75 stopped but resumable.
An error of our own is one sentence on stderr; `--debug` anywhere on the line shows its traceback.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback

import typer

from actors.outcome import Exit
from app.commands.bench import app as bench_app
from app.commands.compare import compare
from app.commands.data import app as data_app
from app.commands.export import export
from app.commands.families import families
from app.commands.plan import plan
from app.commands.profile import profile
from app.commands.report import report
from app.commands.sample import sample
from app.commands.train import train
from app.commands.workers import app as workers_app
from app.settings.errors import PACKAGES, exit_code, is_ours, one_line

app = typer.Typer(
    name="heddle",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Elastic, exact training of text-to-video diffusion transformers on Ray.",
    epilog="Add --debug to any command to see the traceback of an error.",
)
for _command in (train, plan, profile, sample, export, report, compare, families):
    app.command()(_command)
app.add_typer(data_app, name="data", help="Make, index, check and convert data sets.")
app.add_typer(bench_app, name="bench", help="Measure against published systems; figures go into docs/results.md.")
app.add_typer(workers_app, name="workers", help="Look at, drain, scale or stop the workers of a live run.")


def main() -> None:
    """Console script. Ends the process with the documented exit code."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1 or os.environ.get("HEDDLE_DEBUG", "") not in ("", "0")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.DEBUG if debug else logging.INFO)
    try:
        app(args=arguments, prog_name="heddle")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(Exit.INTERRUPTED)
    except Exception as error:  # the last line of defence: it ends as a sentence or a traceback
        if debug or not is_ours(error):
            traceback.print_exc()
        else:
            print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
