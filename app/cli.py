"""`heddle`: parses, checks, and calls one function per command. Heavy imports come after parsing.

Exit codes: 0 ok, 1 failure, 2 usage or config, 3 plan infeasible, 4 data rejected, 75 stopped but resumable.
An error of our own is one sentence on stderr; `--debug` anywhere on the line shows its traceback.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from actors.outcome import Exit
from actors.plan.registry import STRATEGIES
from app.cli_bench import app as bench_app
from app.cli_workers import app as workers_app
from app.data import app as data_app
from app.errors import exit_code, is_ours, unwrap

app = typer.Typer(
    name="heddle",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Elastic, exact training of text-to-video diffusion transformers on Ray.",
    epilog="Add --debug to any command to see the traceback of an error.",
)
app.add_typer(data_app, name="data", help="Make, index, check and convert data sets.")
app.add_typer(bench_app, name="bench", help="Measure against published systems; figures go into docs/results.md.")
app.add_typer(workers_app, name="workers", help="Look at, drain, scale or stop the workers of a live run.")

Config = Annotated[Path, typer.Option("--config", "-c", help="YAML of the run, e.g. configs/runs/demo.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. train.steps=100. Repeatable."),
]


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the latest checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start again in an existing folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Resolve, open the data, plan, show, stop.")] = False,
) -> None:
    """Train a model as the config says."""
    if dry_run:
        from app.dry_run import dry_run as preview

        preview(config, overrides or [])
        return
    from app.train import main as run

    raise typer.Exit(run(config, overrides or [], resume=resume, overwrite=overwrite) or 0)


@app.command()
def plan(
    workload: Annotated[Path | None, typer.Option("--workload", help="JSON: items of consecutive steps.")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Plan this run's buckets instead.")] = None,
    overrides: Overrides = None,
    from_data: Annotated[
        bool, typer.Option("--from-data", help="Open the config's data: real items, and an account of every sample.")
    ] = False,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Measured latencies; with --config optional.")
    ] = None,
    cluster: Annotated[str, typer.Option("--cluster", metavar="SPEC", help="NODESxGPUS, e.g. 2x8, or YAML.")] = "",
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy",
            help=f"One of {', '.join(STRATEGIES)}; default: the config's.",
        ),
    ] = "",
    compare: Annotated[str, typer.Option("--compare", help="Several strategies, separated by commas.")] = "",
    budget: Annotated[float | None, typer.Option("--budget", help="Planning seconds per step.", min=0)] = None,
    steps: Annotated[int, typer.Option(help="With --config: steps planned; default 8.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="With --config: of the drawn buckets.", min=0)] = 0,
    shares: Annotated[
        list[str] | None,
        typer.Option(
            "--share",
            metavar="BUCKET=SHARE",
            help="With --config: how "
            "often a bucket is drawn, e.g. 33x32x48=0.5; the others "
            "share what is left. Repeatable.",
        ),
    ] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the plan here.")] = None,
    gantt: Annotated[Path | None, typer.Option("--gantt", help="Write a PNG here.")] = None,
    page: Annotated[Path | None, typer.Option("--html", help="Write a page here.")] = None,
) -> None:
    """Preview: step times, idle share, memory and the account of the data, before a GPU is touched."""
    from app.plan import PlanRequest, run_plan

    strategies = [name.strip() for name in compare.split(",") if name.strip()] or [strategy] * bool(strategy)
    run_plan(
        PlanRequest(
            workload=workload,
            config=config,
            overrides=overrides or [],
            from_data=from_data,
            profile=profile,
            cluster=cluster,
            strategies=strategies,
            budget_s=budget,
            steps=steps,
            seed=seed,
            shares=shares or [],
        ),
        out=json_out,
        gantt=gantt,
        page=page,
    )


@app.command()
def profile(
    config: Config,
    out: Annotated[Path, typer.Option("--out", help="Profile JSON to write.")] = Path("profile.json"),
    overrides: Overrides = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each point; the median is kept.", min=1)] = 3,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """Measure text, VAE and DiT cascades of the config's buckets on this device, and fit their costs."""
    from app.profile import run_profile

    run_profile(config, overrides or [], out=out, repeats=repeats, device=device)


@app.command()
def sample(
    checkpoint: Annotated[
        Path, typer.Option("--checkpoint", help="Run folder (its latest), a checkpoint, or an exported folder.")
    ],
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="What to show. Repeatable; default: sample.prompts of the run's config."),
    ] = None,
    prompts_file: Annotated[
        Path | None, typer.Option("--prompts", help="Text file, one prompt per line, after those of --prompt.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="x.mp4, or a folder; default: RUN/samples.")] = None,
    ema: Annotated[bool, typer.Option(help="Averaged weights, where the run keeps them.")] = True,
    frames: Annotated[int | None, typer.Option(min=1)] = None,
    height: Annotated[int | None, typer.Option(min=1)] = None,
    width: Annotated[int | None, typer.Option(min=1)] = None,
    steps: Annotated[int | None, typer.Option(help="Euler steps.", min=1)] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="1 switches guidance off.")] = None,
    flow_shift: Annotated[float | None, typer.Option(help="Default: that of the training.")] = None,
    negative_prompt: Annotated[str, typer.Option()] = "",
    seed: Annotated[int | None, typer.Option()] = None,
    fps: Annotated[float | None, typer.Option()] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """Make clips from a checkpoint: MP4s and a contact sheet."""
    from app.prompts import read_prompts
    from app.sample import default_out, run

    texts = [*(prompts or []), *(read_prompts(prompts_file) if prompts_file else [])]
    run(
        checkpoint,
        texts,
        out or default_out(checkpoint, texts),
        ema=ema,
        frames=frames,
        height=height,
        width=width,
        steps=steps,
        guidance_scale=guidance_scale,
        flow_shift=flow_shift,
        negative_prompt=negative_prompt,
        seed=seed,
        fps=fps,
        device=device,
    )


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Option("--checkpoint", help="Run folder (its latest) or a checkpoint.")],
    to: Annotated[Path, typer.Option("--to", help="Folder to write; it must not exist.")],
    base: Annotated[
        Path | None,
        typer.Option("--base", help="Diffusers folder that the frozen parts come from; default: those the run used."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    ema: Annotated[bool, typer.Option(help="Averaged weights, where the run keeps them.")] = True,
) -> None:
    """Write a Diffusers pipeline folder, load it back, and compare before reporting success."""
    from app.export import run

    run(checkpoint, to, base=base, dtype=dtype, ema=ema)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run directory, e.g. runs/demo.")],
    out: Annotated[Path | None, typer.Option("--out", help="HTML file; default RUN/report.html.")] = None,
) -> None:
    """One self-contained HTML of a run: loss, planned against measured time, buckets, events, samples."""
    from app.report import write_report
    from app.rundir import RunDir
    from app.timeline import write_timeline

    folder = RunDir.open(run)
    timeline = write_timeline(folder)
    page = write_report(folder, out)
    print(f"report    {page}")
    print(f"timeline  {timeline}  (open it at ui.perfetto.dev)")


def main() -> None:
    """Console script. Ends the process with the documented exit code."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1 or os.environ.get("HEDDLE_DEBUG", "") not in ("", "0")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for package in ("app", "actors", "data", "ops"):
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
            print(f"error: {one_line(unwrap(error))}", file=sys.stderr)
        sys.exit(exit_code(error))


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    main()
