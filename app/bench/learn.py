"""`heddle bench learn`: does training teach anything? Samples of every colour, and how often they show it.

    heddle bench learn                                   # makes the data, trains configs/runs/learn.yaml, measures
    heddle bench learn --checkpoint runs/learn           # measures a run that is there

The measure is fixed here, not judged by eye: each pixel of a clip counts for the nearest of the dataset's colours
(those of shapes and of backgrounds); the shape colour with most pixels is what the clip names. Guessing gives 1 in 8.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from app.drawing.video import contact_sheet
from app.settings.config import RunConfig
from app.settings.run_folder import run_dir
from data.tools.synthetic import BACKGROUNDS, COLORS, DIRECTIONS, SHAPES, Scene, SynthConfig, synthesize
from ops.typed import ConfigError

_LEAST_SHARE = 0.01  # of the pixels; a clip with less of every shape colour names none


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """The result of one measurement."""

    rate: float  # share of clips that name the prompted colour
    named: int
    samples: int
    chance: float  # 1 / number of colours
    independent: float  # the rate that the same answers would have if they had nothing to do with the prompts
    answers: list[tuple[str, str]]  # (prompted, named) of each clip; "" names none
    step: int
    guidance_scale: float
    seed: int


def run(
    checkpoint: Annotated[Path | None, typer.Option(help="Run or checkpoint; without it, --config is trained.")] = None,
    config: Annotated[Path, typer.Option(help="What is trained.")] = Path("configs/runs/learn.yaml"),
    samples: Annotated[int, typer.Option(help="Clips made.", min=1)] = 32,
    seed: Annotated[int, typer.Option(help="Of the first clip.")] = 1000,
    at_least: Annotated[float, typer.Option(help="Fail below this rate.")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="JSON; a contact sheet goes beside it.")] = None,
) -> None:
    """Train if asked to, sample every colour, and count how often the samples show the prompted colour."""
    from app.sampling.model import load_model

    if checkpoint is None:
        checkpoint = _train(config)
    model = load_model(checkpoint)
    proof, videos, prompts = prove(model, samples, seed)
    target = out or _folder(checkpoint) / "learn.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(asdict(proof), indent=1) + "\n", encoding="utf-8")
    titles = [f"{prompt} -> {answer or 'none'}" for prompt, (_, answer) in zip(prompts, proof.answers, strict=True)]
    contact_sheet(target.with_suffix(".png"), videos, titles, columns=4)
    print(
        f"{proof.named} of {proof.samples} samples name the prompted colour: {proof.rate:.0%} (chance "
        f"{proof.chance:.1%}, same answers to shuffled prompts {proof.independent:.1%})"
    )
    print(f"answers   {target}\npictures  {target.with_suffix('.png')}")
    if proof.rate < at_least:
        print(f"below the {at_least:.0%} that was asked for")
        raise typer.Exit(1)


def prove(model: object, samples: int, seed: int) -> tuple[Proof, list[np.ndarray], list[str]]:
    """Sample `samples` prompts, all colours equally often, with the run's own sampler settings."""
    from app.sampling.clips import ClipSettings, make_clips
    from app.sampling.model import Model

    assert isinstance(model, Model)
    settings = replace(ClipSettings.of(model.config), seed=seed)
    scenes = prompted_scenes(samples, settings.frames, settings.height, settings.width)
    prompts = [scene.caption for scene in scenes]
    videos = make_clips(model, prompts, settings)
    answers = [(scene.color, shown_color(video)) for scene, video in zip(scenes, videos, strict=True)]
    named = sum(asked == answer for asked, answer in answers)
    proof = Proof(
        rate=named / samples,
        named=named,
        samples=samples,
        chance=1 / len(COLORS),
        independent=independent_rate(answers),
        answers=answers,
        step=model.step,
        guidance_scale=settings.sampler.guidance_scale,
        seed=seed,
    )
    return proof, videos, prompts


def prompted_scenes(count: int, frames: int, height: int, width: int) -> list[Scene]:
    """Scenes whose captions are the prompts: colours in turn; shape, direction and background change with strides
    that share no factor with the number of colours, so no colour is tied to one of them."""
    colors, shapes, directions, backgrounds = list(COLORS), list(SHAPES), list(DIRECTIONS), list(BACKGROUNDS)
    return [
        Scene(
            number=i,
            color=colors[i % len(colors)],
            shape=shapes[(i + 2 * (i // 8)) % len(shapes)],
            direction=directions[(i + i // 8) % len(directions)],
            background=backgrounds[(i // 2 + i // 8) % len(backgrounds)],
            height=height,
            width=width,
            frames=frames,
            fps=8 if frames > 1 else 0,
        )
        for i in range(count)
    ]


def shown_color(video: np.ndarray) -> str:
    """The colour that a clip uint8 [T, H, W, 3] names, or "" when hardly any pixel is near a shape's colour."""
    palette = np.array([*COLORS.values(), *BACKGROUNDS.values()], np.float32)
    pixels = video.reshape(-1, 3).astype(np.float32)
    nearest = ((pixels[:, None] - palette) ** 2).sum(-1).argmin(1)
    counts = np.bincount(nearest, minlength=len(palette))[: len(COLORS)]
    best = int(counts.argmax())
    return list(COLORS)[best] if counts[best] >= _LEAST_SHARE * len(pixels) else ""


def independent_rate(answers: Sequence[tuple[str, str]]) -> float:
    """Expected rate if prompts and answers were paired at random."""
    asked, named = Counter(prompt for prompt, _ in answers), Counter(answer for _, answer in answers)
    return sum(asked[color] * named[color] for color in asked) / len(answers) ** 2


def _train(path: Path) -> Path:
    """The dataset that the config reads, if it is not there yet, and the run. Returns the run's folder."""
    from app.run.launch import train

    config = RunConfig.load(path)
    source = Path(config.data.sources[0].path)
    if source.parent.name == "shards" and not source.parent.exists():
        print(f"making {source.parent.parent}")
        synthesize(source.parent.parent, SynthConfig(koala=False))
    folder = run_dir(config)
    code = train(path, [], overwrite=True)
    if code:
        raise ConfigError(f"the training of {path} ended with exit code {code}; see {folder}.")
    return folder


def _folder(checkpoint: Path) -> Path:
    """Where the answers go: the run's folder when the checkpoint belongs to one."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint
