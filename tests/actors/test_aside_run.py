"""Samples of a real run are made by the workers that train: beside its steps, and without changing them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.records.events import SamplesMade
from app.bench.lab import Lab, LabRun
from app.drawing.video import read_mp4
from app.sampling.clips import ClipSettings, clips_of
from app.sampling.live import LiveSamples
from app.sampling.model import saved_model
from app.sampling.spread import mp4_of
from app.settings.config import RunConfig

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

STEPS, EVERY = 24, 8
PROMPTS = ["a red disc", "a green square", "a blue disc", "a white square"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("asides")) as lab:
        lab.add_node(workers=3)  # which take all its CPUs
        yield lab


def config_of(lab: Lab, name: str, **sample: Any) -> RunConfig:
    return lab.config(
        name,
        train={"steps": STEPS},
        workers={"min": 3, "max": 3},
        planner={"strategy": "static"},  # its plans do not depend on what a run has measured
        checkpoint={"every": EVERY, "keep_last": 10},
        sample={"prompts": PROMPTS, "steps": 6, "frames": 9, "height": 64, "width": 96, **sample},
    )


def started(lab: Lab, config: RunConfig) -> LabRun:
    live = LiveSamples(config, Path(config.run.dir) / config.run.name)
    run = lab.start(config, asides=live)
    run.on_checkpoint = lambda folder, step: live.on_checkpoint(step)  # type: ignore[method-assign]
    return run


def made(run: LabRun) -> list[SamplesMade]:
    return [event for event in run.events if isinstance(event, SamplesMade)]


def assert_clips(run: LabRun, step: int) -> None:
    """Those of `heddle sample`, but for rounding before 8 bits and H.264."""
    saved = saved_model(run.run_dir / "checkpoints" / f"step-{step}", device="cpu")
    clips = clips_of(saved, PROMPTS, ClipSettings.of(run.config))
    for number, clip in enumerate(clips):
        plain = run.run_dir / "plain.mp4"
        plain.write_bytes(mp4_of(clip, run.config.sample.fps))
        file = read_mp4(run.run_dir / "samples" / f"step-{step}-{number:02d}.mp4")
        assert np.abs(file.astype(int) - read_mp4(plain).astype(int)).mean() < 3


def test_samples_appear_while_the_run_goes_on_and_change_no_loss(lab: Lab) -> None:
    run = started(lab, config_of(lab, "with", every=EVERY, share=0.5))
    assert run.join(600).code == 0
    plain = lab.start(config_of(lab, "without"))
    assert plain.join(600).code == 0
    assert run.losses() == plain.losses() and len(run.losses()) == STEPS
    first, *_ = made(run)
    last_step = max(span.end for span in run.spans)
    assert first.step == EVERY - 1 and first.time < last_step
    assert_clips(run, first.step)


def test_a_killed_worker_loses_no_step_and_no_prompt(lab: Lab) -> None:
    run = started(lab, config_of(lab, "killed", every=EVERY, share=0.02))
    run.wait_for(lambda: run.controller is not None and bool(run.controller.asides._queue.held), "an aside")
    name = next(iter(run.controller.asides._queue.held))
    os.kill(dict(run.active())[name], signal.SIGKILL)
    assert run.join(800).code == 0
    assert run.steps() == list(range(STEPS)) and run.generations() > 1
    assert made(run) and made(run)[0].step == EVERY - 1
    assert_clips(run, EVERY - 1)
