"""`heddle bench headroom`: the memory of GPUs that train the published models, without one: what does it leave free?

    heddle bench headroom --models wan2.1-14b,hunyuan-13b --workers 8,64

For every model of `configs/models/`, trained in full and by LoRA, on some numbers of workers, with one clip of each
size per cascade: states with gradients, optimizer state and parameters in each place (a gradient on each GPU or one per
node, state on the device or the host, blocks on each GPU or fetched from their node), the cascades, what communicators
take, and what stays free where `auto` puts them.
*Measured* is the project's own code at full size and depth on tensors without data (`ops.models.forecast`), storage by
storage.
*Planned* is what the planner takes from the config: sums of weights, and lines through two short models. The last
column compares the two. The places are the first in which a clip fits at some degree, and it runs at the smallest of
these; beside it stand the degree that leaves most free, and the smallest one at which `--leave` GiB stay free with the
places in which they do, once with all weights on each GPU and once with their blocks fetched. Trained in full on one
node at 720p a model should leave 20 GiB.

With `--keep FILE` every model and mode is written there when it is done, and not computed again the next time.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, get_args

import typer

from actors.config import PlannerConfig, TrainConfig
from actors.plan.costs.needs import footprint
from actors.plan.costs.point import Samples
from actors.plan.places import ParameterPlace, Places, StatePlace, gpu_places
from actors.plan.types import USABLE, Module
from actors.planning.forecasts import forecast
from actors.planning.memory import CONTEXT_GIB, MemoryForecast, communicators_gib
from app.settings.config import RunConfig
from app.settings.out_files import check_writable
from ops.geometry import Geometry, PixelShape
from ops.models.base.config import DiTConfig
from ops.models.config import ModelConfig
from ops.models.families import FAMILIES
from ops.models.folders import resolve
from ops.typed import build, node_of

MODELS = Path(__file__).parent.parent.parent / "configs" / "models"
CLIPS: dict[str, PixelShape] = {"480p81": (81, 480, 832), "720p81": (81, 720, 1280), "720p129": (129, 720, 1280)}
WAYS = gpu_places("auto", "auto", ("replicated", "node"))
BESIDE = sum(way.parameters == "replicated" for way in WAYS)  # those that every model can have
PER_NODE = 8  # GPUs
_STATES: tuple[StatePlace, ...] = ("device", "host")
WANTED_GIB = 20.0  # that full training at 720p on the GPUs of one node leaves
_RANK = 16  # of LoRA
_MOST = 8  # degrees stay within a node


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """GiB of one GPU. `states`, in each of `WAYS` that the model can have, has the frozen encoders that stay on it;
    `communicators` in each of them has CUDA's context. `fetched` is the DiT where its blocks are; 0: they cannot be."""

    states: tuple[float, ...]
    dit: float
    vae: float
    text: float
    communicators: tuple[float, ...]
    fetched: float = 0.0

    def free(self, memory_gib: float, way: int = 0) -> float:
        """GiB free beside everything, and beside what is left for fragments."""
        dit = self.dit if WAYS[way].parameters == "replicated" else self.fetched
        worst = max(dit, self.vae, self.text)
        return USABLE * (memory_gib - self.communicators[way]) - self.states[way] - worst


@dataclass(frozen=True, kw_only=True, slots=True)
class Roomy:
    """The smallest degree at which enough stays free, and the first of the ways (`WAYS`) in which it does."""

    degree: int
    way: int
    measured: Figures
    planned: Figures


@dataclass(frozen=True, kw_only=True, slots=True)
class Headroom:
    """One row: a model and mode on some workers, with clips of one size. `way` is what `auto` takes."""

    model: str
    lora: bool
    workers: int
    clip: str
    degree: int
    way: int
    measured: Figures
    planned: Figures
    best_degree: int = 1  # at which most stays free, and how much by what is planned
    best_gib: float = 0.0
    leave_gib: float = WANTED_GIB  # that should stay free
    roomy: tuple[Roomy, ...] = ()  # where they do: with all weights on each GPU, with blocks fetched; none: nowhere

    def leaving(self, parameters: ParameterPlace) -> Roomy | None:
        """Where enough stays free with the parameters in this place."""
        return next((one for one in self.roomy if WAYS[one.way].parameters == parameters), None)

    @property
    def over(self) -> float:
        """How far what is planned lies above what is measured, as a share of it; the part of it that is furthest."""
        return max(self._shares())

    @property
    def under(self) -> float:
        """The part that is least above: negative where the planner promises too much."""
        return min(self._shares())

    def _shares(self) -> list[float]:
        pairs = [
            pair
            for planned, measured in (
                (self.planned, self.measured),
                *((one.planned, one.measured) for one in self.roomy),
            )
            for pair in (
                *zip(planned.states, measured.states, strict=True),
                (planned.dit, measured.dit),
                (planned.vae, measured.vae),
                (planned.text, measured.text),
                *([(planned.fetched, measured.fetched)] if measured.fetched else []),
            )
        ]
        return [planned / measured - 1 for planned, measured in pairs]

    @property
    def short(self) -> str:
        """A sentence where a model that is trained in full on one node should leave more; "" elsewhere."""
        if self.lora or self.workers != PER_NODE or not self.clip.startswith("720p") or self.roomy:
            return ""
        return (
            f"{self.model} in full on {self.workers} GPUs leaves {self.best_gib:.1f} GiB at {self.clip}, and should "
            f"leave {self.leave_gib:g}"
        )


def published(name: str, folder: Path, lora: bool, text: str) -> tuple[ModelConfig, Geometry, TrainConfig]:
    """A model of `configs/models/` with encoders as published: their numbers alone are written to `folder`."""
    rank = [f"model.dit.lora_rank={_RANK}", "train.optimizer.ema_decay=0"] if lora else []
    paths = [f"model.{part}.path={folder}" for part in ("vae", "text")]
    paths.append(f"model.text.place={text}")
    config = RunConfig.load(MODELS / f"{name}.yaml", [*paths, "run.name=headroom", "workers.device=cuda", *rank])
    write_numbers(folder, config.model.dit)
    return *resolve(config.model), config.train


def write_numbers(folder: Path, dit: DiTConfig) -> None:
    """The config.json of each frozen part of the published pipelines that have such a transformer."""
    import diffusers

    family = FAMILIES[dit.architecture]
    kind = getattr(diffusers, family.vae.name)
    usual = {name: one.default for name, one in inspect.signature(kind).parameters.items()}
    vae = {**usual, **family.parts.vae(dit), "_class_name": kind.__name__}
    for part, fields in {"vae": vae, **family.parts.text}.items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / "config.json").write_text(json.dumps(fields))


class ModelFigures:
    """One model's figures on tensors without data; each is computed once."""

    def __init__(self, model: ModelConfig, geometry: Geometry, train: TrainConfig) -> None:
        import torch

        from ops.models.forecast import Precision

        self._model, self._geometry, self._train = model, geometry, train
        self._text_tokens = model.text.most_tokens
        self._precision = Precision(
            parameters=getattr(torch, train.parameter_dtype), autocast=train.autocast == "bfloat16", cuda=True
        )
        self._known: dict[tuple[object, ...], float] = {}

    def figures(self, shape: PixelShape, workers: int, degree: int) -> Figures:
        """Figures with one clip of this shape per cascade."""
        import torch

        from ops.models.forecast import pass_bytes, states_bytes, text_need, vae_need
        from ops.packed.packing import Sequence as PackedSequence
        from ops.units import GIB

        model = self._model
        dtype = getattr(torch, model.text.dtype_on("cuda"))
        text = text_need(model.text, 1, self._text_tokens, dtype)
        sequence = PackedSequence(self._geometry.token_grid(*shape), self._text_tokens)
        if ("dit", shape, degree) not in self._known:
            for fetched in (False, True) if model.dit.fetchable else (False,):
                peak, _ = pass_bytes(model.dit, [sequence], degree, self._precision, fetched)
                self._known["fetched" if fetched else "dit", shape, degree] = peak / GIB
        if ("vae", shape) not in self._known:
            vae = vae_need(model.vae, 1, *shape, device="cuda")
            self._known["vae", shape], self._known["vae",] = vae.peak_gib, vae.weights_gib
        ways = WAYS if model.dit.fetchable else WAYS[:BESIDE]
        for way in ways:
            if (way, workers) not in self._known:
                per_node, fetched = 0 if way.gradients == "own" else min(workers, PER_NODE), way.parameters == "node"
                found = states_bytes(model.dit, self._train.optimizer, workers, self._precision, per_node, fetched)
                for state, one in zip(_STATES, found, strict=True):
                    self._known[replace(way, state=state), workers] = one / GIB
        encoders = self._known["vae",] + text.weights_gib
        return Figures(
            states=tuple(self._known[way, workers] + encoders for way in ways),
            dit=self._known["dit", shape, degree],
            vae=self._known["vae", shape],
            text=text.peak_gib,
            communicators=(0.0,) * len(ways),
            fetched=self._known.get(("fetched", shape, degree), 0.0),
        )


def _planned(
    found: MemoryForecast,
    geometry: Geometry,
    shape: PixelShape,
    text_tokens: int,
    workers: int,
    degree: int,
    bags_gib: float,
) -> Figures:
    one = [Samples.of(1, shape, text_tokens)]
    at: tuple[tuple[Module, int], ...] = (("dit", degree), ("vae", 1), ("text", 1))
    dit, vae, text = (
        found.needs.gib(footprint(module, one, bag, geometry.tokens, found.needs)) or 0.0 for module, bag in at
    )
    ways = [replace(found, places=way, per_node=PER_NODE) for way in (WAYS if found.in_blocks else WAYS[:BESIDE])]
    return Figures(
        states=tuple(one.states(workers).total for one in ways),
        dit=dit,
        vae=vae,
        text=text,
        communicators=tuple(CONTEXT_GIB + bags_gib + one.exchange_gib(workers) for one in ways),
        fetched=dit if found.in_blocks else 0.0,
    )


def roomy(planned: Mapping[int, Figures], memory_gib: float, leave_gib: float) -> list[tuple[int, int]]:
    """(Degree, way) where so much of a GPU stays free by what is planned of each degree: the smallest degree, and of
    its ways the fastest, with all weights on each GPU and with blocks fetched."""
    every = range(len(next(iter(planned.values())).states))
    return [
        found
        for place in get_args(ParameterPlace)
        if (
            found := next(
                (
                    (degree, way)
                    for degree, figures in sorted(planned.items())
                    for way in every
                    if WAYS[way].parameters == place and figures.free(memory_gib, way) >= leave_gib
                ),
                None,
            )
        )
    ]


def rows(
    name: str,
    lora: bool,
    counts: Sequence[int],
    clips: Sequence[str],
    memory_gib: float,
    text: str,
    leave_gib: float,
) -> list[Headroom]:
    """All rows of one model in one mode. Takes about ten seconds of one core for each size of clip and degree."""
    with tempfile.TemporaryDirectory() as folder:
        model, geometry, train = published(name, Path(folder), lora, text)
        degrees = model.dit.degrees(_MOST)
        found = forecast(model, geometry, train, [CLIPS[clip] for clip in clips], degrees, cuda=True)
        text_tokens = model.text.most_tokens
        measured, made = ModelFigures(model, geometry, train), []
        for workers in counts:
            legal = [degree for degree in degrees if degree <= workers]
            bags_gib = communicators_gib(degrees, workers, PlannerConfig().bag_peers)
            for clip in clips:
                at = {d: _planned(found, geometry, CLIPS[clip], text_tokens, workers, d, bags_gib) for d in legal}
                ways = range(len(at[1].states))
                way = next((w for w in ways if any(at[d].free(memory_gib, w) >= 0 for d in legal)), ways[-1])
                degree = next((d for d in legal if at[d].free(memory_gib, way) >= 0), legal[-1])
                best = max(legal, key=lambda d: at[d].free(memory_gib, way))

                def counted(
                    degree: int, workers: int = workers, clip: str = clip, at: dict[int, Figures] = at
                ) -> Figures:
                    real = measured.figures(CLIPS[clip], workers, degree)
                    return replace(real, communicators=at[degree].communicators)

                made.append(
                    Headroom(
                        model=name,
                        lora=lora,
                        workers=workers,
                        clip=clip,
                        degree=degree,
                        way=way,
                        measured=counted(degree),
                        planned=at[degree],
                        best_degree=best,
                        best_gib=at[best].free(memory_gib, way),
                        leave_gib=leave_gib,
                        roomy=tuple(
                            Roomy(degree=enough, way=place, measured=counted(enough), planned=at[enough])
                            for enough, place in roomy(at, memory_gib, leave_gib)
                        ),
                    )
                )
        return made


def table(found: Sequence[Headroom], memory_gib: float) -> str:
    """Markdown, in GiB: what was measured / what is planned."""
    leave = f"{found[0].leave_gib:g} free from degree"
    lines = [
        f"| model | trained | GPUs | clip, degree | {' | '.join(_short(way) for way in WAYS)} | DiT | fetched | VAE "
        "| text | CUDA, communicators | auto takes | free | most free, at degree "
        f"| {leave} | {leave}, blocks fetched | planned above measured |",
        f"|{'---|' * (15 + len(WAYS))}",
    ]
    for row in found:
        real, plan = row.measured, row.planned
        states = " | ".join(f"{one:.2f} / {other:.2f}" for one, other in zip(real.states, plan.states, strict=True))
        states += " | -" * (len(WAYS) - len(real.states))
        fetched = f"{real.fetched:.2f} / {plan.fetched:.2f}" if real.fetched else "-"
        lines.append(
            f"| {row.model} | {'LoRA' if row.lora else 'full'} | {row.workers} | {row.clip}, {row.degree} | "
            f"{states} | {real.dit:.2f} / {plan.dit:.2f} | {fetched} | {real.vae:.2f} / {plan.vae:.2f} | "
            f"{real.text:.2f} / {plan.text:.2f} | {plan.communicators[row.way]:.2f} | {_short(WAYS[row.way])} | "
            f"{real.free(memory_gib, row.way):.1f} / {plan.free(memory_gib, row.way):.1f} | "
            f"{row.best_gib:.1f}, {row.best_degree} | "
            f"{_leaving(row, 'replicated', memory_gib)} | {_leaving(row, 'node', memory_gib)} | "
            f"{100 * row.under:.1f} to {100 * row.over:.1f} % |"
        )
    return "\n".join(lines)


def _leaving(row: Headroom, parameters: ParameterPlace, memory_gib: float) -> str:
    """The degree, the places and what stays free of a row where that is enough."""
    found = row.leaving(parameters)
    if found is None:
        return "-"
    real, planned = (figures.free(memory_gib, found.way) for figures in (found.measured, found.planned))
    return f"{found.degree}: {_short(WAYS[found.way])}: {real:.1f} / {planned:.1f}"


def _short(way: Places) -> str:
    return f"{way.gradients}, {way.state}{', fetched' if way.parameters == 'node' else ''}"


def _kept(keep: Path | None, make: Callable[[], list[Headroom]], key: str) -> list[Headroom]:
    """What the file has for the key, or else what is made, which is written to it."""
    lines = keep.read_text().splitlines() if keep is not None and keep.exists() else []
    known = {found["key"]: found["rows"] for found in map(json.loads, lines)}
    if key in known:
        return [build(Headroom, node_of(one)) for one in known[key]]
    made = make()
    if keep is not None:
        with keep.open("a") as file:
            file.write(json.dumps({"key": key, "rows": [asdict(row) for row in made]}) + "\n")
    return made


def run(
    models: Annotated[str, typer.Option(help="Names in configs/models.")] = "wan2.1-1.3b,wan2.1-14b,hunyuan-13b",
    workers: Annotated[str, typer.Option(help="Numbers of GPUs.")] = "1,8,16,64",
    clips: Annotated[str, typer.Option(help="Sizes of clip, one per cascade.")] = ",".join(CLIPS),
    memory_gib: Annotated[float, typer.Option(help="Memory of a GPU in GiB.")] = 79.2,
    text: Annotated[str, typer.Option(help="Where text encoders lie: device or host.")] = "host",
    leave: Annotated[float, typer.Option(help="GiB that should stay free: from which degree on do they?")] = WANTED_GIB,
    keep: Annotated[Path | None, typer.Option(help="A file of what has been computed, to go on from.")] = None,
    out: Annotated[Path | None, typer.Option(help="A Markdown file for the table, besides the terminal.")] = None,
) -> None:
    """Prints the table; exit code 1 if the planner says less than is needed, or more than a tenth more, or if a model
    that is trained in full on one node leaves too little at 720p."""
    check_writable([out])
    found: list[Headroom] = []
    for name in models.split(","):
        for lora in (False, True):
            found += _kept(
                keep,
                lambda name=name, lora=lora: rows(  # type: ignore[misc]
                    name, lora, [int(count) for count in workers.split(",")], clips.split(","), memory_gib, text, leave
                ),
                f"{name} {lora} {workers} {clips} {memory_gib} {text} {leave:g}",
            )
    shown = table(found, memory_gib)
    print(shown)
    if out is not None:
        out.write_text(shown + "\n")
    short = [row.short for row in found if row.short]
    print("\n".join(short) or f"in full on {PER_NODE} GPUs at 720p {leave:g} GiB and more stay free")
    if short or any(row.under < -1e-6 or row.over > 0.1 for row in found):
        raise typer.Exit(1)
