"""`heddle`: parses, checks, and calls the function of a command (`app/commands/`).

Exit codes are those of `actors.outcome.Exit`; the help names them, docs/records.md explains them.
An error of our own is one sentence on stderr; `--debug` anywhere on the line shows its traceback.
"""

from __future__ import annotations

import inspect
import io
import re
import sys
from typing import Annotated, cast

import typer

from app.commands.bench import app as bench_app
from app.commands.check import check
from app.commands.compare import compare
from app.commands.convert import convert
from app.commands.data import app as data_app
from app.commands.export import export
from app.commands.families import families
from app.commands.plan import plan
from app.commands.profile import profile
from app.commands.prove import prove
from app.commands.report import report
from app.commands.sample import sample
from app.commands.settings import settings
from app.commands.train import train
from app.commands.validate import validate
from app.commands.workers import app as workers_app
from app.settings.terminal import answer, debug_wanted, say, set_up_logging
from app.settings.written_by import VERSION

# Click's, or that of a Typer with a copy of it
_USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])

app = typer.Typer(
    name="heddle",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,  # its boxes cut names of options, and break the words of an error
    context_settings={"max_content_width": 120},
    help="Elastic, exact training of text-to-video diffusion transformers on Ray.",
    epilog="Add --debug to any command to see the traceback of an error. Exit codes: 0 done, 1 failure, 2 usage or "
    "config, 3 no legal plan or not enough memory, 4 data rejected, 75 stopped, and --resume goes on (of heddle "
    "workers: what it waited for has not come), 130 interrupted.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"heddle {VERSION}, torch {version('torch')}, ray {version('ray')}")
        raise typer.Exit


@app.callback()
def _heddle(
    shows: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Show the versions of Heddle, PyTorch and Ray."
        ),
    ] = False,
) -> None:
    pass


for _command in (
    *(train, check, plan, profile, prove, sample, validate),
    *(export, convert, report, compare, families, settings),
):
    app.command()(_command)
app.add_typer(data_app, name="data", help="Make, index, check, convert and encode data sets.")
app.add_typer(bench_app, name="bench", help="Measure against published systems: the figures of docs/results.md.")
app.add_typer(workers_app, name="workers", help="Look at, drain, add, scale, kill or stop the workers of a live run.")


def _unwrap_helps(group: typer.Typer) -> None:
    """Typer breaks the lines of a docstring's later paragraphs where the source does, and a terminal once more; and it
    cuts the first one in a list of commands to a line of 45 letters, unless a short help is given."""
    for command in group.registered_commands:
        text = command.help or inspect.getdoc(command.callback) or ""
        paragraphs = text.split("\n\n")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        command.short_help = " ".join(paragraphs[0].split())
    for one in group.registered_groups:
        one.short_help = one.help
        if one.typer_instance is not None:
            _unwrap_helps(one.typer_instance)


_unwrap_helps(app)


def main() -> None:
    """The command, imported. Ends the process with the documented exit code."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1 or debug_wanted()
    set_up_logging(debug)
    try:
        code = app(args=arguments, prog_name="heddle", standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:  # the last line of defence
        code = _answer_usage(error) or answer(error, debug)
    sys.exit(code)


def _answer_usage(error: BaseException) -> int | None:
    """Say what is wrong with the words of a command as other errors are said, not with Typer's "Error:". Returns the
    exit code; None where it is something else."""
    if not isinstance(error, _USAGE_ERROR):
        return None
    told = io.StringIO()
    error.show(told)
    say(re.sub(r"^Error: ", "error: ", told.getvalue().rstrip("\n"), count=1, flags=re.MULTILINE), sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    main()
