"""`heddle bench headroom`: the memory of GPUs that train the published models, without one: what does it leave free?

    heddle bench headroom --models wan2.1-14b,hunyuan-13b --workers 8,64

For every model of `configs/models/`, trained in full and by LoRA, on some numbers of workers, with one clip of each
size per cascade: states with gradients and optimizer state in each place (a gradient on each GPU or one per node, state
on the device or the host), the cascades, what communicators take, and what stays free where `auto` puts them.
*Measured* is the project's own code at full size and depth on tensors without data (`ops.models.forecast`), storage by
storage.
*Planned* is what the planner takes from the config: sums of weights, and lines through two short models. The last
column compares the two. A clip runs at the smallest degree at which it fits in the place that takes least of a GPU.

With `--keep FILE` every model and mode is written there when it is done, and not computed again the next time.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from actors.config import PlannerConfig, TrainConfig
from actors.plan.costs.needs import Samples, footprint
from actors.plan.places import Places, gpu_places
from actors.plan.types import USABLE, Module
from actors.planning.memory import CONTEXT_GIB, MemoryForecast, Shape, communicators_gib, forecast
from app.settings.config import RunConfig
from ops.geometry import Geometry
from ops.models.config import ModelConfig
from ops.models.families import FAMILIES
from ops.models.folders import resolve

MODELS = Path(__file__).parent.parent.parent / "configs" / "models"
CLIPS: dict[str, Shape] = {"480p81": (81, 480, 832), "720p81": (81, 720, 1280), "720p129": (129, 720, 1280)}
WAYS = gpu_places("auto", "auto")
PER_NODE = 8  # GPUs
_RANK = 16  # of LoRA
_MOST = 8  # degrees stay within a node
_UMT5 = {"model_type": "umt5", "vocab_size": 256384, "d_model": 4096, "d_ff": 10240, "num_heads": 64, "num_layers": 24}
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128320,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
_CLIP = {
    "model_type": "clip_text_model",
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
}
_T5 = {**_UMT5, "model_type": "t5", "vocab_size": 32128}
_GATED = {"feed_forward_proj": "gated-gelu"}
_TEXT: dict[str, dict[str, dict[str, object]]] = {  # encoders by the folders of the published pipelines
    "wan": {"text_encoder": {**_UMT5, **_GATED}},
    "hunyuan": {"text_encoder": {**_LLAMA}, "text_encoder_2": {**_CLIP}},
    "flux": {"text_encoder": {**_CLIP}, "text_encoder_2": {**_T5, **_GATED}},
    **{family: {"text_encoder": {**_T5, **_GATED}} for family in ("ltx", "cogvideox", "mochi", "latte", "stdit3")},
}
_PICTURES: dict[str, object] = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
}
_VAE: dict[str, dict[str, object]] = {  # where it is not its class's default
    "flux": {**_PICTURES, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False},
    "latte": _PICTURES,
    "stdit3": _PICTURES,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """GiB of one GPU. `states`, in each of `WAYS`, has the frozen encoders that stay on it."""

    states: tuple[float, ...]
    dit: float
    vae: float
    text: float
    communicators: float

    @property
    def worst(self) -> float:
        return max(self.dit, self.vae, self.text)

    def free(self, memory_gib: float, way: int = 0) -> float:
        """Beside everything, and beside what is left for fragments."""
        return USABLE * (memory_gib - self.communicators) - self.states[way] - self.worst


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
            *zip(self.planned.states, self.measured.states, strict=True),
            (self.planned.dit, self.measured.dit),
            (self.planned.vae, self.measured.vae),
            (self.planned.text, self.measured.text),
        ]
        return [planned / measured - 1 for planned, measured in pairs]


def published(name: str, folder: Path, lora: bool, text: str) -> tuple[ModelConfig, Geometry, TrainConfig]:
    """A model of `configs/models/` with encoders as published: their numbers alone are written to `folder`."""
    family = "hunyuan" if name.startswith("hunyuan") else "wan"
    _write_numbers(folder / family, family)
    rank = [f"model.dit.lora_rank={_RANK}", "train.optimizer.ema_decay=0"] if lora else []
    paths = [f"model.{part}.path={folder / family}" for part in ("vae", "text")]
    paths.append(f"model.text.place={text}")
    config = RunConfig.load(MODELS / f"{name}.yaml", [*paths, "run.name=headroom", "workers.device=cuda", *rank])
    return *resolve(config.model), config.train


def _write_numbers(folder: Path, family: str) -> None:
    import diffusers

    kind = getattr(diffusers, FAMILIES[family].vae.name)
    numbers = {name: one.default for name, one in inspect.signature(kind).parameters.items()} | _VAE.get(family, {})
    for part, fields in {"vae": {**numbers, "_class_name": kind.__name__}, **_TEXT[family]}.items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / "config.json").write_text(json.dumps(fields))


class Measured:
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

    def figures(self, shape: Shape, workers: int, degree: int) -> Figures:
        """With one clip of this shape per cascade."""
        import torch

        from ops.models.forecast import GIB, pass_bytes, states_bytes, text_need, vae_need
        from ops.packing import Sequence as PackedSequence

        model = self._model
        dtype = getattr(torch, model.text.dtype_on("cuda"))
        text = text_need(model.text, 1, self._text_tokens, dtype)
        sequence = PackedSequence(self._geometry.token_grid(*shape), self._text_tokens)
        if ("dit", shape, degree) not in self._known:
            peak, _ = pass_bytes(model.dit, [sequence], degree, self._precision)
            self._known["dit", shape, degree] = peak / GIB
        if ("vae", shape) not in self._known:
            vae = vae_need(model.vae, 1, *shape, device="cuda")
            self._known["vae", shape], self._known["vae",] = vae.peak_gib, vae.weights_gib
        if ("own", "device", workers) not in self._known:
            for place, per_node in (("own", 0), ("node", min(workers, PER_NODE))):
                found = states_bytes(model.dit, self._train.optimizer, workers, self._precision, per_node)
                for state, one in zip(("device", "host"), found, strict=True):
                    self._known[place, state, workers] = one / GIB
        encoders = self._known["vae",] + text.weights_gib
        return Figures(
            states=tuple(self._known[way.gradients, way.state, workers] + encoders for way in WAYS),
            dit=self._known["dit", shape, degree],
            vae=self._known["vae", shape],
            text=text.peak_gib,
            communicators=0.0,
        )


def _planned(
    found: MemoryForecast, geometry: Geometry, shape: Shape, text_tokens: int, workers: int, degree: int, other: float
) -> Figures:
    frames, height, width = shape
    one = [Samples(count=1, frames=frames, height=height, width=width, text_tokens=text_tokens)]
    at: tuple[tuple[Module, int], ...] = (("dit", degree), ("vae", 1), ("text", 1))
    dit, vae, text = (
        found.needs.gib(footprint(module, one, bag, geometry.tokens, found.needs)) or 0.0 for module, bag in at
    )
    states = tuple(replace(found, places=way, per_node=PER_NODE).states(workers).total for way in WAYS)
    return Figures(states=states, dit=dit, vae=vae, text=text, communicators=other)


def rows(
    name: str, lora: bool, counts: Sequence[int], clips: Sequence[str], memory_gib: float, text: str
) -> list[Headroom]:
    """All rows of one model in one mode. Takes about ten seconds of one core for each size of clip and degree."""
    with tempfile.TemporaryDirectory() as folder:
        model, geometry, train = published(name, Path(folder), lora, text)
        degrees = model.dit.degrees(_MOST)
        found = forecast(model, geometry, train, [CLIPS[clip] for clip in clips], degrees, cuda=True)
        text_tokens = model.text.most_tokens
        measured, made = Measured(model, geometry, train), []
        for workers in counts:
            legal = [degree for degree in degrees if degree <= workers]
            other = CONTEXT_GIB + communicators_gib(degrees, workers, PlannerConfig().bag_peers)
            for clip in clips:
                ways = {d: _planned(found, geometry, CLIPS[clip], text_tokens, workers, d, other) for d in legal}
                degree = next((d for d in legal if ways[d].free(memory_gib, -1) >= 0), legal[-1])
                fits = [number for number in range(len(WAYS)) if ways[degree].free(memory_gib, number) >= 0]
                real = replace(measured.figures(CLIPS[clip], workers, degree), communicators=other)
                made.append(
                    Headroom(
                        model=name,
                        lora=lora,
                        workers=workers,
                        clip=clip,
                        degree=degree,
                        way=next(iter(fits), len(WAYS) - 1),
                        measured=real,
                        planned=ways[degree],
                    )
                )
        return made


def table(found: Sequence[Headroom], memory_gib: float) -> str:
    """Markdown, in GiB: what was measured / what is planned."""
    lines = [
        f"| model | trained | GPUs | clip, degree | {' | '.join(_short(way) for way in WAYS)} | DiT | VAE | text "
        "| communicators | auto takes | free | planned above measured |",
        f"|{'---|' * (11 + len(WAYS))}",
    ]
    for row in found:
        real, plan = row.measured, row.planned
        states = " | ".join(f"{one:.2f} / {other:.2f}" for one, other in zip(real.states, plan.states, strict=True))
        lines.append(
            f"| {row.model} | {'LoRA' if row.lora else 'full'} | {row.workers} | {row.clip}, {row.degree} | "
            f"{states} | {real.dit:.2f} / {plan.dit:.2f} | {real.vae:.2f} / {plan.vae:.2f} | "
            f"{real.text:.2f} / {plan.text:.2f} | {plan.communicators:.2f} | {_short(WAYS[row.way])} | "
            f"{real.free(memory_gib, row.way):.1f} / {plan.free(memory_gib, row.way):.1f} | "
            f"{100 * row.under:.1f} to {100 * row.over:.1f} % |"
        )
    return "\n".join(lines)


def _short(way: Places) -> str:
    return f"{way.gradients}, {way.state}"


def _kept(keep: Path | None, make: Callable[[], list[Headroom]], key: str) -> list[Headroom]:
    """What the file has for the key, or else what is made, which is written to it."""
    lines = keep.read_text().splitlines() if keep is not None and keep.exists() else []
    known = {found["key"]: found["rows"] for found in map(json.loads, lines)}
    if key in known:
        return [_row(one) for one in known[key]]
    made = make()
    if keep is not None:
        with keep.open("a") as file:
            file.write(json.dumps({"key": key, "rows": [asdict(row) for row in made]}) + "\n")
    return made


def _row(fields: dict[str, Any]) -> Headroom:
    figures = {
        name: Figures(**{**fields[name], "states": tuple(fields[name]["states"])}) for name in ("measured", "planned")
    }
    return Headroom(**{**fields, **figures})


def run(
    models: Annotated[str, typer.Option(help="Names in configs/models.")] = "wan2.1-1.3b,wan2.1-14b,hunyuan-13b",
    workers: Annotated[str, typer.Option(help="Numbers of GPUs.")] = "1,8,16,64",
    clips: Annotated[str, typer.Option(help="Sizes of clip, one per cascade.")] = ",".join(CLIPS),
    memory_gib: Annotated[float, typer.Option(help="Memory of a GPU in GiB.")] = 79.2,
    text: Annotated[str, typer.Option(help="Where text encoders lie: device or host.")] = "host",
    keep: Annotated[Path | None, typer.Option(help="A file of what has been computed, to go on from.")] = None,
    out: Annotated[Path | None, typer.Option(help="A Markdown file for the table, besides the terminal.")] = None,
) -> None:
    """Prints the table; exit code 1 if the planner says less than is needed, or more than a tenth more."""
    found: list[Headroom] = []
    for name in models.split(","):
        for lora in (False, True):
            found += _kept(
                keep,
                lambda name=name, lora=lora: rows(  # type: ignore[misc]
                    name, lora, [int(count) for count in workers.split(",")], clips.split(","), memory_gib, text
                ),
                f"{name} {lora} {workers} {clips} {memory_gib} {text}",
            )
    shown = table(found, memory_gib)
    print(shown)
    if out is not None:
        out.write_text(shown + "\n")
    if any(row.under < -1e-6 or row.over > 0.1 for row in found):
        raise typer.Exit(1)
