"""`heddle bench learn`: does training teach anything? Samples of every colour, and how often they show it.

    heddle bench learn                                   # makes the data, trains configs/runs/learn.yaml, measures
    heddle bench learn --checkpoint runs/learn           # measures a run that is there

The measure is fixed here, not judged by eye: each pixel of a clip counts for the nearest of the dataset's colours
(those of shapes and of backgrounds); the shape colour with most pixels is what the clip names. Guessing gives 1 in 8.

    heddle bench learn --config configs/runs/learn-i2v.yaml

An image-to-video model is given a picture of the scene and no prompt. What counts is whether the last frame of its clip
shows the picture's colour, and whether it shows both colour and shape (that which covers the coloured pixels best). The
same measure of the scenes themselves, coded and decoded, says how far it can be trusted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
import typer

from app.drawing.video import contact_sheet
from app.settings.config import RunConfig
from app.settings.out_files import check_writable
from app.settings.run_folder import run_dir
from data.tools.synthetic import BACKGROUNDS, COLORS, DIRECTIONS, SHAPES, Scene, SynthConfig, mask, synthesize
from ops.models.base.vae import VAE
from ops.typed import ConfigError

if TYPE_CHECKING:
    from app.sampling.model import SavedModel

_SHEET = ".png"
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
    kept: int = 0  # image to video: clips whose last frame shows the picture's colour and shape
    kept_in_truth: int = 0  # the same of the scenes themselves


def run(
    checkpoint: Annotated[Path | None, typer.Option(help="Run or checkpoint; without it, --config is trained.")] = None,
    config: Annotated[Path, typer.Option(help="What is trained.")] = Path("configs/runs/learn.yaml"),
    samples: Annotated[int, typer.Option(help="Clips made.", min=1)] = 32,
    seed: Annotated[int, typer.Option(help="Of the first clip.")] = 1000,
    captions: Annotated[
        bool, typer.Option(help="Image to video: give the captions, too, which name the motion.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="JSON; a contact sheet goes beside it.")] = None,
) -> None:
    """Train if asked to, sample every colour, and count how often the samples show the prompted colour."""
    from app.sampling.model import saved_model

    check_writable([out])
    if out is not None and out.suffix == _SHEET:
        raise ConfigError(f"--out {out} is the name of the contact sheet beside the JSON; give one such as learn.json.")
    if checkpoint is None:
        checkpoint = _train(config)
    saved = saved_model(checkpoint)
    proof, videos, prompts = prove(saved, samples, seed, captions)
    target = out or _folder(checkpoint) / "learn.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(asdict(proof), indent=1) + "\n", encoding="utf-8")
    titles = [f"{prompt} -> {answer or 'none'}" for prompt, (_, answer) in zip(prompts, proof.answers, strict=True)]
    contact_sheet(target.with_suffix(_SHEET), videos, titles, columns=4)
    if saved.config.model.dit.starts_from_image:
        print(
            f"{proof.kept} of {proof.samples} last frames keep colour and shape of the first: "
            f"{proof.kept / proof.samples:.0%} (of the scenes themselves {proof.kept_in_truth / proof.samples:.0%})"
        )
    print(
        f"{proof.named} of {proof.samples} samples name the prompted colour: {proof.rate:.0%} (chance "
        f"{proof.chance:.1%}, same answers to shuffled prompts {proof.independent:.1%})"
    )
    print(f"answers   {target}\npictures  {target.with_suffix(_SHEET)}")


def prove(
    saved: SavedModel, samples: int, seed: int, captions: bool = False
) -> tuple[Proof, list[np.ndarray], list[str]]:
    """Sample `samples` prompts, all colours equally often, with the run's own sampler settings. Image to video gets the
    first frames of the scenes instead of their captions, or with them."""
    from app.sampling.clips import ClipSettings, make_clips

    settings = replace(ClipSettings.of(saved.config), seed=seed)
    scenes = prompted_scenes(samples, settings.frames, settings.height, settings.width)
    given = saved.config.model.dit.starts_from_image
    prompts = [scene.caption if captions or not given else "" for scene in scenes]
    first = [picture(scene, 0)[None] for scene in scenes] if given else []
    told = saved.encode(prompts, settings.negative_prompt, first)
    model = saved.load()
    videos = make_clips(model, told, settings, first)
    shown = [video[-1:] if given else video for video in videos]
    answers = [(scene.color, shown_color(video)) for scene, video in zip(scenes, shown, strict=True)]
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
        kept=sum(keeps(scene, video[-1]) for scene, video in zip(scenes, videos, strict=True)) if given else 0,
        kept_in_truth=sum(keeps(scene, coded(model.vae, scene)[-1]) for scene in scenes) if given else 0,
    )
    return proof, videos, prompts


def picture(scene: Scene, frame: int) -> np.ndarray:
    """uint8 [H, W, 3] of one frame of a scene."""
    inside = mask(scene, frame)[:, :, None]
    return np.where(inside, COLORS[scene.color], BACKGROUNDS[scene.background]).astype(np.uint8)


def coded(vae: VAE, scene: Scene) -> np.ndarray:
    """The scene itself as the codec gives it back, uint8 [T, H, W, 3]."""
    frames = np.stack([picture(scene, frame) for frame in range(scene.frames)])
    return vae.decode(vae.encode(torch.from_numpy(frames)[None]))[0].cpu().numpy()


def keeps(scene: Scene, frame: np.ndarray) -> bool:
    """Whether a frame shows the colour and the shape of the scene."""
    return shown_color(frame[None]) == scene.color and shown_shape(frame, scene) == scene.shape


def shown_shape(frame: np.ndarray, scene: Scene) -> str:
    """The shape of the scene's colour on its background in a frame uint8 [H, W, 3]: of all shapes of its size at
    all places, the one that covers the pixels of that colour best (intersection over union)."""
    front, back = np.array(COLORS[scene.color], float), np.array(BACKGROUNDS[scene.background], float)
    share = (frame - back) @ (front - back) / np.square(front - back).sum()
    shown = torch.from_numpy((share > 0.5).astype(np.float32))[None, None]
    best = {shape: _best_cover(shown, _template(replace(scene, shape=shape))) for shape in SHAPES}
    return max(best, key=lambda shape: best[shape])


def _template(scene: Scene) -> torch.Tensor:
    """The shape alone, [h, w]; in the middle of a frame."""
    inside = mask(replace(scene, frames=1, offset=0.0), 0)
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    return torch.from_numpy(inside[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].astype(np.float32))


def _best_cover(shown: torch.Tensor, shape: torch.Tensor) -> float:
    both = torch.nn.functional.conv2d(shown, shape[None, None], padding=(len(shape) - 1, shape.shape[1] - 1))
    return float((both / (shown.sum() + shape.sum() - both)).max())


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
    nearest = nearest_color(video)
    counts = np.bincount(nearest.ravel(), minlength=len(COLORS))[: len(COLORS)]
    best = int(counts.argmax())
    return list(COLORS)[best] if counts[best] >= _LEAST_SHARE * nearest.size else ""


def nearest_color(pixels: np.ndarray) -> np.ndarray:
    """[..., 3] -> [...]: places in the list of the colours of shapes, then of backgrounds."""
    palette = np.array([*COLORS.values(), *BACKGROUNDS.values()], np.float32)
    nearest: np.ndarray = ((pixels.astype(np.float32)[..., None, :] - palette) ** 2).sum(-1).argmin(-1)
    return nearest


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
