"""`heddle compare`. Heavy imports come after parsing."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from app.commands.options import Overrides
from ops.typed import ConfigError


def compare(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Two to four run directories; the first is the reference.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="HTML file.")] = Path("runs/compare.html"),
    peak_tflops: Annotated[
        float, typer.Option("--peak-tflops", min=0.0, help="Peak of a worker's device, to show MFU; 989 for an H100.")
    ] = 0.0,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Instead of runs: train this one by each --strategy first.")
    ] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option("--strategy", metavar="NAME", help="A planner strategy to train with. Repeatable, two to four."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Steps of each run; default: the config's.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with runs that were begun.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start again: all that is in the folders of the runs is deleted.")
    ] = False,
) -> None:
    """Loss, step time, idle share and FLOPs of two to four runs, on one HTML page.

    With --config and --strategy the runs are made first, one after the other, on the same data.
    """
    from app.report.compare import write_comparison
    from app.settings.out_files import check_page
    from app.settings.standard_out import talk_beside
    from ops.standard_out import is_stdout

    folders = list(runs or [])
    words = ["heddle", "compare", *map(str, folders)]
    if config is not None:
        if folders:
            raise ConfigError(f"give either run directories, such as {folders[0]}, or --config with --strategy.")
        check_page(out)
        if is_stdout(out):  # where the runs print
            raise ConfigError(f"--out {out} is for runs that are there; give a file.")
        folders = _trained(config, strategies or [], steps, overrides or [], resume, overwrite)
        words += _training_words(config, strategies or [], steps, overrides or [])
    elif strategies or steps is not None or overrides or resume or overwrite:
        raise ConfigError(
            "--strategy, --steps, --set, --resume and --overwrite are for runs that are still to be made: give "
            "--config as well."
        )
    words += ["--peak-tflops", f"{peak_tflops:g}"] if peak_tflops else []
    with talk_beside(out):
        for line in write_comparison(folders, out, peak_tflops, shlex.join(words)):
            print(line)
        print(f"page      {out}")


def _trained(
    config: Path, strategies: list[str], steps: int | None, overrides: list[str], resume: bool, overwrite: bool
) -> list[Path]:
    """The folders of the runs; ends the command with the code of one that ended early."""
    from app.run.strategies import train_each

    settings = [*overrides, *([f"train.steps={steps}"] if steps is not None else [])]
    folders, code = train_each(config, strategies, settings, resume=resume, overwrite=overwrite)
    if code:
        print("not compared: a run has ended early. The same command with --resume goes on with it.")
        raise typer.Exit(code)
    return folders


def _training_words(config: Path, strategies: list[str], steps: int | None, overrides: list[str]) -> list[str]:
    """The options that make the runs."""
    words = ["--config", str(config), *(word for name in strategies for word in ("--strategy", name))]
    words += ["--steps", str(steps)] if steps is not None else []
    return [*words, *(word for setting in overrides for word in ("--set", setting))]
