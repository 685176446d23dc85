"""The measure of `heddle bench learn`: right on the dataset itself, at chance on noise, blind to the background."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.bench.learn import independent_rate, keeps, picture, prompted_scenes, prove, shown_color, shown_shape
from app.sampling.model import saved_model
from app.settings.config import RunConfig
from data.tools.synthetic import BACKGROUNDS, COLORS, Scene, mask
from tests.app.test_export import write_checkpoint

CONFIGS = Path(__file__).parents[2] / "configs" / "runs"


def render(scene: Scene) -> np.ndarray:
    front, back = np.array(COLORS[scene.color]), np.array(BACKGROUNDS[scene.background])
    return np.stack([np.where(mask(scene, frame)[..., None], front, back) for frame in range(scene.frames)]).astype(
        np.uint8
    )


def test_true_clips_name_their_colour() -> None:
    scenes = prompted_scenes(96, frames=5, height=32, width=48)
    assert [shown_color(render(scene)) for scene in scenes] == [scene.color for scene in scenes]


def test_noise_on_true_clips_does_not_change_the_answer() -> None:
    rng = np.random.default_rng(0)
    scenes = prompted_scenes(32, frames=5, height=32, width=48)
    noisy = [np.clip(render(scene) + rng.normal(0, 25, (5, 32, 48, 3)), 0, 255).astype(np.uint8) for scene in scenes]
    right = sum(shown_color(video) == scene.color for video, scene in zip(noisy, scenes, strict=True))
    assert right >= 30


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_background_alone_names_nothing(background: str) -> None:
    assert shown_color(np.full((3, 16, 16, 3), BACKGROUNDS[background], np.uint8)) == ""


def test_prompts_cover_all_colours_and_do_not_tie_them_to_a_background() -> None:
    scenes = prompted_scenes(32, frames=5, height=32, width=48)
    assert set(Counter(scene.color for scene in scenes).values()) == {4}
    for color in COLORS:
        mine = [scene for scene in scenes if scene.color == color]
        assert len({scene.background for scene in mine}) == 4
        assert len({scene.shape for scene in mine}) == 3
    assert scenes[0].caption == "a red circle moving to the right on a black background"


def test_rate_of_independent_answers() -> None:
    assert independent_rate([("red", "red"), ("blue", "red")]) == pytest.approx(0.5)
    assert independent_rate([("red", "blue"), ("blue", "")]) == pytest.approx(0.25)


def test_true_frames_show_their_shape_wherever_it_is() -> None:
    scenes = prompted_scenes(48, frames=5, height=32, width=48)
    for frame in (0, 4):
        assert all(shown_shape(render(scene)[frame], scene) == scene.shape for scene in scenes)
        assert all(keeps(scene, picture(scene, frame)) for scene in scenes)


def test_another_colour_or_shape_is_not_kept() -> None:
    for scene in prompted_scenes(24, frames=5, height=32, width=48):
        shape = {"circle": "triangle", "square": "circle", "triangle": "square"}[scene.shape]
        assert not keeps(scene, picture(replace(scene, shape=shape), 4))
        assert not keeps(scene, picture(replace(scene, color="red" if scene.color != "red" else "blue"), 4))
        assert not keeps(scene, np.full((32, 48, 3), BACKGROUNDS[scene.background], np.uint8))


@pytest.mark.parametrize(("name", "captions"), [("learn", False), ("learn-i2v", False), ("learn-i2v", True)])
def test_clips_of_a_run_of_the_shipped_configs_are_made_and_counted(name: str, captions: bool, tmp_path: Path) -> None:
    """The weights are untrained, so nothing of what clips show is asked."""
    config = RunConfig.load(CONFIGS / f"{name}.yaml", ["sample.steps=2"])
    proof, videos, _ = prove(saved_model(write_checkpoint(tmp_path, config)), samples=2, seed=0, captions=captions)
    assert len(videos) == proof.samples == len(proof.answers) == 2
    frames, height, width = config.sample.frames, config.sample.height, config.sample.width
    assert {video.shape for video in videos} == {(frames, height, width, 3)}
    assert proof.kept_in_truth == (2 if name == "learn-i2v" else 0)
