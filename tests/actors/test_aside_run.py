"""Samples of a real run are made by the workers that train: beside its steps, and without changing them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from actors.records.events import HeldOutMeasured, SamplesMade
from actors.state.checkpoint_files import model_state
from actors.worker.worker import Worker
from app.bench.lab import OPEN_END, Lab, LabRun
from app.drawing.video import mp4_of, read_mp4
from app.run.asides import RunAsides
from app.sampling.clips import ClipSettings, clips_of
from app.sampling.live import LiveSamples
from app.sampling.model import saved_model
from app.settings.config import RunConfig
from app.settings.sections import ValidationConfig
from app.validation.checkpoint import validate
from app.validation.live import LiveHeldOut
from data.config import SourceConfig
from data.tools.synthetic import SynthConfig, synthesize
from tests.actors import chaos

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

STEPS, EVERY = 24, 8
PROMPTS = ["a red disc", "a green square", "a blue disc", "a white square"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("asides")) as lab:
        lab.add_node(workers=3)  # which take all its CPUs
        yield lab


def config_of(
    lab: Lab, name: str, dit: Mapping[str, object] = MappingProxyType({}), steps: int = STEPS, **sample: Any
) -> RunConfig:
    return lab.config(
        name,
        model={"dit": dit},
        train={"steps": steps},
        workers={"min": 3, "max": 3},
        planner={"strategy": "static"},  # its plans do not depend on what a run has measured
        checkpoint={"every": EVERY, "keep_last": 0},  # all
        sample={"prompts": PROMPTS, "steps": 6, "frames": 9, "height": 64, "width": 96, **sample},
    )


def started(lab: Lab, config: RunConfig, worker_class: type[Worker] | None = None) -> LabRun:
    folder = Path(config.run.dir) / config.run.name
    asides = RunAsides([LiveHeldOut(config, folder), LiveSamples(config, folder)], config.sample.share)
    run = lab.start(config, worker_class, asides=asides)

    def on_checkpoint(folder: Path, step: int) -> None:
        asides.on_checkpoint(step)

    run.on_checkpoint = on_checkpoint  # type: ignore[method-assign]
    return run


def made(run: LabRun) -> list[SamplesMade]:
    return [event for event in run.events if isinstance(event, SamplesMade)]


def assert_clips(run: LabRun, step: int) -> None:
    """Those of `heddle sample`, but for rounding before 8 bits and H.264."""
    saved = saved_model(run.run_dir / "checkpoints" / f"step-{step}", device="cpu")
    for number, clip in clips_of(saved, PROMPTS, ClipSettings.of(run.config)):
        plain = run.run_dir / "plain.mp4"
        plain.write_bytes(mp4_of(clip, run.config.sample.fps))
        file = read_mp4(run.run_dir / "samples" / f"step-{step}-{number:02d}.mp4")
        assert np.abs(file.astype(int) - read_mp4(plain).astype(int)).mean() < 3


KINDS: dict[str, tuple[dict[str, object], type[Worker] | None]] = {
    "one transformer": ({}, None),
    "both experts": ({"expert": "both", "boundary": 0.7}, None),
    "full workers": ({}, chaos.FullWorker),
    "full workers of both": ({"expert": "both", "boundary": 0.7}, chaos.FullWorker),
}


@pytest.mark.parametrize("kind", KINDS)
def test_samples_appear_while_the_run_goes_on_and_change_no_bit_of_it(lab: Lab, kind: str) -> None:
    """Also by workers that hold a pair of experts, and by those that have no room for a sample's weights: theirs are
    written over for each turn. Both runs end with the same weights, to the last bit."""
    dit, worker_class = KINDS[kind]
    name = kind.replace(" ", "-")
    run = started(lab, config_of(lab, f"{name}-with", dit, OPEN_END, every=EVERY, share=0.5), worker_class)
    run._poll(lambda: bool(made(run)), "samples while steps go on", 600)  # at the pace of its steps
    run.stop()
    steps = len(run.losses())
    plain = lab.start(config_of(lab, f"{name}-without", dit, steps), worker_class)
    assert plain.join(600).code == 0
    assert run.losses() == plain.losses()
    ended = [model_state(one.run_dir / "checkpoints" / f"step-{steps - 1}", ema=False) for one in (run, plain)]
    assert all(torch.equal(tensor, ended[1][key]) for key, tensor in ended[0].items())
    first, *_ = made(run)
    assert first.step % EVERY == EVERY - 1, "of a checkpoint, the first that was not overtaken by the next"
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


def test_held_out_losses_are_those_of_their_checkpoints_also_after_a_kill(lab: Lab, tmp_path: Path) -> None:
    """By workers that are full: weights are written over for each turn."""
    synthesize(tmp_path, SynthConfig(clips=12, images=3, shards=1, seed=1, koala=False))
    held_out = ValidationConfig(sources=(SourceConfig(path=str(tmp_path / "shards")),), every=EVERY, draws=2)
    config = replace(config_of(lab, "validated", share=0.02), validation=held_out)
    run = started(lab, config, chaos.FullWorker)
    run.wait_for(lambda: run.controller is not None and bool(run.controller.asides._queue.held), "an aside")
    name = next(iter(run.controller.asides._queue.held))
    os.kill(dict(run.active())[name], signal.SIGKILL)
    assert run.join(800).code == 0
    assert run.steps() == list(range(STEPS)) and run.generations() > 1
    measured = [event for event in run.events if isinstance(event, HeldOutMeasured)]
    assert measured and measured[0].step == EVERY - 1 and measured[-1].step == STEPS - 1
    for event in measured:
        found = validate(run.run_dir / "checkpoints" / f"step-{event.step}", device="cpu")
        assert event.loss == pytest.approx(found.loss, rel=1e-6) and event.clips == found.clips
