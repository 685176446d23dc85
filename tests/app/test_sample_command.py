"""`heddle sample`: which options there are, what each of them asks for, and what is refused before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from app.cli import app
from app.sampling.clips import ClipChanges

# In the order of the help; those of one line belong to one part of it.
OPTIONS = """
--checkpoint --after --from --lora --lora-scale --prompt --prompts --image --last-image --other
--out --ema/--no-ema
--frames --height --width --steps --timesteps --guidance-scale --guidance-scale-2 --flow-shift
--decode-timestep --decode-noise-scale
--base-num-frames --overlap-history --addnoise-condition --ar-step --causal-block-size --no-forcing
--negative-prompt --seed --fps
--long-prompts --device
--workers --together --cluster
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the command has called its body with, by the names of the arguments."""
    found: dict[str, object] = {}

    def run(checkpoint: Path, prompts: list[str], out: Path, **named: object) -> None:
        found.update(checkpoint=checkpoint, prompts=prompts, out=out, **named)

    monkeypatch.setattr("app.sampling.sample.run", run)
    return found


def sample(*words: str) -> str:
    """What the command says on stderr, as one line."""
    return " ".join(CliRunner().invoke(app, ["sample", *words]).stderr.split())


def test_the_command_has_these_options_in_this_order() -> None:
    click = typer.main.get_command(app)
    context = click.make_context("heddle", ["sample"], resilient_parsing=True)
    command = click.get_command(context, "sample")
    found = ["/".join([*one.opts, *one.secondary_opts]) for one in command.get_params(context)]
    assert found == [*OPTIONS.split(), "--help"]


def test_without_options_nothing_is_changed(asked: Mapping[str, object], tmp_path: Path) -> None:
    assert not sample("--checkpoint", str(tmp_path), "--out", "clips")
    assert asked == {
        "checkpoint": tmp_path,
        "prompts": [],
        "out": Path("clips"),
        "changes": ClipChanges(),
        "images": [],
        "last_images": [],
        "other": None,
        "loras": [],
        "ema": True,
        "device": "auto",
        "long_prompts": None,
        "crew": None,
    }


def test_every_option_asks_for_what_it_says(asked: Mapping[str, object], tmp_path: Path) -> None:
    (tmp_path / "model_index.json").touch()
    (tmp_path / "prompts.txt").write_text("a fox\na hen\n")
    words = (
        f"--from {tmp_path} --prompt fox --prompt hen --prompts {tmp_path}/prompts.txt --image a.png --image b.png "
        "--last-image c.png --other low --out clips --no-ema --frames 5 --height 16 --width 32 --timesteps 900,500.5 "
        "--guidance-scale 3 --guidance-scale-2 4 --decode-timestep 0.1 --decode-noise-scale 0.2 --base-num-frames 9 "
        "--overlap-history 3 --addnoise-condition 20 --ar-step 5 --causal-block-size 2 --negative-prompt blur "
        "--seed 7 --fps 12 --long-prompts cut --device cpu"
    )
    assert not sample(*words.split())
    assert asked == {
        "checkpoint": tmp_path,
        "prompts": ["fox", "hen", "a fox", "a hen"],
        "out": Path("clips"),
        "changes": ClipChanges(
            frames=5,
            height=16,
            width=32,
            fps=12.0,
            seed=7,
            timesteps=(900.0, 500.5),
            guidance_scale=3.0,
            guidance_scale_2=4.0,
            negative_prompt="blur",
            decode_timestep=0.1,
            decode_noise_scale=0.2,
            forcing={
                "base_num_frames": 9,
                "overlap_history": 3,
                "addnoise_condition": 20.0,
                "ar_step": 5,
                "causal_block_size": 2,
            },
        ),
        "images": [Path("a.png"), Path("b.png")],
        "last_images": [Path("c.png")],
        "other": Path("low"),
        "loras": [],
        "ema": False,
        "device": "cpu",
        "long_prompts": "cut",
        "crew": None,
    }


def test_steps_a_shift_and_no_forcing_are_asked_for(asked: Mapping[str, object], tmp_path: Path) -> None:
    assert not sample("--checkpoint", str(tmp_path), "--out", "x", "--steps", "3", "--flow-shift", "2", "--no-forcing")
    assert asked["changes"] == ClipChanges(steps=3, flow_shift=2.0, no_forcing=True)


def test_workers_make_the_clips_where_some_are_asked_for(asked: Mapping[str, object], tmp_path: Path) -> None:
    assert not sample("--checkpoint", str(tmp_path), "--out", "x", "--workers", "2", "--together")
    assert callable(asked["crew"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "give --checkpoint RUN or --from FOLDER, one of the two."),
        ("--checkpoint a --from b", "give --checkpoint RUN or --from FOLDER, one of the two."),
        ("--from nowhere", "has no model_index.json"),
        ("--checkpoint a --long-prompts keep", "--long-prompts keep is none of cut, refuse."),
        ("--checkpoint a --steps 2 --timesteps 900", "give --steps or --timesteps, one of the two."),
        ("--checkpoint a --flow-shift 2 --timesteps 900", "--timesteps are not shifted: leave --flow-shift out."),
        ("--checkpoint a --together", "--together and --cluster need --workers N."),
        ("--checkpoint a --cluster auto", "--together and --cluster need --workers N."),
        ("--checkpoint a --timesteps 500,900", "--timesteps 500,900 must be falling numbers above 0, with commas"),
        ("--checkpoint a --no-forcing --ar-step 5", "give --no-forcing or --ar-step, one of the two."),
    ],
)
def test_what_does_not_go_together_is_refused(asked: Mapping[str, object], words: str, sentence: str) -> None:
    assert sentence in sample(*words.split())
    assert not asked
