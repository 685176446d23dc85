"""`heddle bench NAME`: each benchmark is `run(...)` of one file; its annotations are its options."""

from __future__ import annotations

import importlib

import typer

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

BENCHMARKS = {
    "planner": ("app.bench.planner", "Plans against the published planners on their workloads."),
    "truth": ("app.bench.truth", "What a run learns of costs that it is not told, and what its plans make of it."),
    "batches": ("app.bench.batches", "Equal tokens, dual constraint, and sizes that follow measured costs."),
    "mapper": ("app.bench.mapper", "What each rule for choosing workers is worth."),
    "communicators": ("app.bench.communicators", "What the limit of open bags on a worker costs and saves."),
    "ops": ("app.bench.ops", "Fused ops and whole blocks against eager PyTorch."),
    "data": ("app.bench.data", "Indexing and decoding against other loaders on the same plan."),
    "predicted": ("app.bench.predicted", "Predicted seconds of cascades and steps beside those of real runs here."),
    "runtime": ("app.bench.runtime", "Executed against planned makespan, and dispatch overhead per cascade."),
    "ulysses": ("app.bench.ulysses", "Sequence-parallel bookkeeping per layer against per-chunk lists and attention."),
    "halves": ("app.bench.halves", "What attention hides of Ulysses' exchanges when heads travel in two halves."),
    "sequence": ("app.bench.sequence", "Ulysses, shared heads, USP and rings at every degree, as priced."),
    "scalefusion": ("app.bench.scalefusion", "Spatial-temporal layers: simulated as published, and on real ranks."),
    "elastic": ("app.bench.elastic", "Recovery and scaling times against Ray Train's elastic trainer."),
    "cluster": (
        "app.bench.cluster.command",
        "Virtual clusters of up to 1,024 workers: the real controller, losses and joins.",
    ),
    "peers": ("app.bench.peers.contest", "The same training by DDP, by Ray Train with DeepSpeed, and by Heddle."),
    "papers": ("app.bench.papers.contents", "Figures of the four papers beside Heddle's, as a page."),
    "soak": ("app.bench.soak", "A run under random faults against the same run undisturbed."),
    "optimizer": ("app.bench.optimizer", "The sharded update against a plain all-reduce and AdamW."),
    "memory": ("app.bench.gradients", "Gradients and parameters in a node's memory against those on each worker."),
    "headroom": (
        "app.bench.headroom",
        "What published models leave free on a GPU: on tensors without data, and planned.",
    ),
    "families": ("app.bench.families", "Every family's transformer against the class of Diffusers, on uniform clips."),
    "sampling": ("app.bench.sampling", "Clips a minute of workers apart, and seconds to a clip of workers together."),
    "samples": ("app.bench.samples", "What samples cost a run beside its steps, and in one call between two."),
    "learn": ("app.bench.learn", "Trains a small model and counts how often its samples show the prompted colour."),
}
FORWARD = {"allow_extra_args": True, "ignore_unknown_options": True}


def _add(name: str, module: str, summary: str) -> None:
    @app.command(name, help=summary, context_settings=FORWARD, add_help_option=False)
    def forward(context: typer.Context) -> None:
        benchmark = typer.Typer(
            add_completion=False,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
            context_settings={"max_content_width": 120},
        )
        benchmark.command(help=summary)(importlib.import_module(module).run)
        raise typer.Exit(benchmark(args=context.args, prog_name=f"heddle bench {name}", standalone_mode=False) or 0)


for _name, (_module, _summary) in BENCHMARKS.items():
    _add(_name, _module, _summary)
