"""Samples during training come from checkpoints, one round at a time, and their failure never ends the run."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from actors.aside_turns import TurnReport, TurnTask
from actors.records.events import SamplesFailed, SamplesMade
from actors.worker.aside import Asides
from actors.worker.loading import Modules
from app.drawing.video import mp4_of
from app.run.asides import RunAsides
from app.sampling.clip_worker import MadeClip
from app.sampling.clips import ClipSettings, clips_of
from app.sampling.live import LiveSamples
from app.sampling.live_clip import LiveClip
from app.sampling.model import saved_model
from app.settings.config import RunConfig
from app.validation.work import HeldOutPart, HeldOutWork
from ops.models.folders import resolve
from ops.models.load import build_dit, build_text, build_vae
from tests.app.test_sample import tiny_run, write_checkpoint

DEMO = Path(__file__).parent.parent.parent / "configs" / "runs" / "demo.yaml"


def samples(folder: Path, every: int = 40, *changes: str) -> LiveSamples:
    prompts = 'sample.prompts=["a disc", "a square"]'
    settings = [f"sample.every={every}", f"checkpoint.every={every}", prompts, *changes]
    return LiveSamples(RunConfig.load(DEMO, settings), folder)


def report(clip: Any, **told: Any) -> TurnReport:
    made = MadeClip(mp4=clip.name.encode(), shown=np.zeros((4, 8, 8, 3), np.uint8))
    return TurnReport(aside=clip.name, ended=True, **{"made": made, **told})


def test_clips_are_wanted_at_multiples_of_every_one_round_at_a_time(tmp_path: Path) -> None:
    live = samples(tmp_path)
    live.on_checkpoint(19)
    assert live.wanted() == []
    live.on_checkpoint(39)
    assert [(clip.step, clip.number) for clip in live.wanted()] == [(39, 0), (39, 1)]
    assert live.on_checkpoint(79) is None and live.wanted() == []


def test_a_checkpoint_that_was_taken_late_stands_for_the_multiple_that_was_put_off(tmp_path: Path) -> None:
    """Where writing takes longer than checkpoint.every steps, few are of multiples themselves."""

    def wanted(asides: RunAsides, step: int) -> bool:
        assert asides.on_checkpoint(step) == []
        clips = asides.wanted()
        for clip in clips:
            asides.ended(report(clip))
        return bool(clips)

    asides = RunAsides([samples(tmp_path, 100)], 0.05, before=-1)
    taken = (39, 99, 230, 280, 361, 399)  # 280: the run was asked to stop
    assert [step for step in taken if wanted(asides, step)] == [99, 230, 361, 399]
    resumed = RunAsides([samples(tmp_path, 100)], 0.05, before=410)
    assert [step for step in (499, 523, 699, 830) if wanted(resumed, step)] == [499, 699, 830]
    unknown = RunAsides([samples(tmp_path, 100)], 0.05)
    assert [step for step in (840, 910) if wanted(unknown, step)] == [910]


def test_clips_of_the_first_weights_come_before_those_of_checkpoints_where_they_are_asked_for(tmp_path: Path) -> None:
    live = samples(tmp_path, 40, "sample.first=true")
    assert live.open(begins=True) == []
    first, second = live.wanted()
    assert (first.step, first.folder) == (-1, "")
    assert live.on_checkpoint(39) is None and live.wanted() == []
    assert live.ended(report(first)) is None
    event = live.ended(report(second))
    assert isinstance(event, SamplesMade) and event.describe().startswith("samples after 0 steps: samples/first.png")
    files = ["first-00.mp4", "first-01.mp4", "first.json", "first.png"]
    assert sorted(path.name for path in (tmp_path / "samples").glob("f*")) == files
    assert [clip.step for clip in live.wanted()] == [39, 39]
    goes_on, not_asked = samples(tmp_path, 40, "sample.first=true"), samples(tmp_path)
    assert goes_on.open(begins=False) == [] == not_asked.open(begins=True)
    assert goes_on.wanted() == [] == not_asked.wanted()


def test_what_ray_and_workers_take_to_start_is_no_time_of_the_first_clips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("app.sampling.rounds.time.monotonic", lambda: now)
    live = samples(tmp_path, 40, "sample.first=true")
    live.open(begins=True)
    now = 60.0  # until the first step is dealt
    clips = live.wanted()
    now = 90.0
    *_, event = [live.ended(report(clip)) for clip in clips]
    assert isinstance(event, SamplesMade) and event.seconds == 30.0


def test_a_checkpoint_that_waits_for_its_turn_counts_from_when_it_was_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 5.0
    monkeypatch.setattr("app.sampling.rounds.time.monotonic", lambda: now)
    live = samples(tmp_path)
    live.on_checkpoint(39)
    first = live.wanted()
    live.on_checkpoint(79)
    now = 65.0
    for clip in first:
        live.ended(report(clip))
    now = 95.0
    *_, event = [live.ended(report(clip)) for clip in live.wanted()]
    assert isinstance(event, SamplesMade) and (event.step, event.seconds) == (79, 90.0)


def test_first_clips_without_room_are_told_and_left_out(tmp_path: Path) -> None:
    """No task can make them: it reads checkpoints."""
    live = samples(tmp_path, 40, "sample.first=true")
    live.open(begins=True)
    clip, *_ = live.wanted()
    assert live.ended(report(clip, failed="no memory", no_room=True)) == SamplesFailed(step=-1, why="no memory")
    pictures = samples(tmp_path, 40, "sample.first=true", "sample.images=[nowhere.png]", "train.flow.first_frame=0.5")
    (event,) = pictures.open(begins=True)
    assert isinstance(event, SamplesFailed) and "nowhere.png" in event.why and pictures.wanted() == []


def test_of_checkpoints_that_come_faster_the_newest_waits(tmp_path: Path) -> None:
    for step in (79, 119):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step}" / "weights").write_text("")
    (tmp_path / "samples" / ".checkpoint-7").mkdir(parents=True)  # of a run that was killed
    live = samples(tmp_path)
    live.on_checkpoint(39)
    first, second = live.wanted()
    live.on_checkpoint(79)
    late = live.on_checkpoint(119)
    assert late == SamplesFailed(step=79, why="the next are due and they have not begun")
    assert [path.name for path in (tmp_path / "samples").glob(".*")] == [".checkpoint-119-3"]
    live.ended(report(first))
    assert isinstance(live.ended(report(second)), SamplesMade)
    waited = live.wanted()
    assert [(clip.step, clip.number) for clip in waited] == [(119, 0), (119, 1)]
    assert live.ended(report(waited[0], failed="no")) == SamplesFailed(step=119, why="no")
    assert live.wanted() == [] and not list((tmp_path / "samples").glob(".*"))


def test_files_appear_as_they_are_made_and_the_last_one_is_told(tmp_path: Path) -> None:
    live, folder = samples(tmp_path), tmp_path / "samples"
    live.on_checkpoint(39)
    first, second = live.wanted()
    white = MadeClip(mp4=b"", shown=np.full((4, 8, 8, 3), 255, np.uint8))
    assert live.ended(report(second, made=white)) is None
    assert [path.name for path in folder.iterdir()] == ["step-39-01.mp4"]
    event = live.ended(report(first))
    sheet = np.asarray(Image.open(folder / "step-39.png"), float)
    half = len(sheet) // 2
    assert sheet[:half].mean() < sheet[half:].mean(), "in the order of the prompts"
    assert isinstance(event, SamplesMade) and event.step == 39
    files = ["samples/step-39-00.mp4", "samples/step-39-01.mp4", "samples/step-39.png"]
    assert list(event.samples) == files and all((tmp_path / file).is_file() for file in files)
    assert json.loads((folder / "step-39.json").read_text()) == ["a disc", "a square"]
    assert live.ended(report(first)) is None, "it has been reported"
    live.on_checkpoint(79)
    assert len(live.wanted()) == 2


def test_a_failure_is_told_once_and_the_next_round_is_made(tmp_path: Path) -> None:
    live = samples(tmp_path)
    live.on_checkpoint(39)
    first, second = live.wanted()
    assert live.ended(report(first, failed="step-39 is damaged")) == SamplesFailed(step=39, why="step-39 is damaged")
    assert live.dropped() == {first.name, second.name}
    assert live.ended(report(second)) is None and not (tmp_path / "samples").exists()
    live.on_checkpoint(79)
    assert len(live.wanted()) == 2


def test_samples_of_a_checkpoint_that_is_made_again_are_made_where_the_first_ones_failed(tmp_path: Path) -> None:
    """Training may go back to before a checkpoint that is damaged: the clips that were dropped are not those of now."""
    live = samples(tmp_path)
    folder = write_checkpoint(tmp_path, tiny_run(), 39)
    live.on_checkpoint(39)
    first, second = live.wanted()
    live.on_checkpoint(39)  # before it has ended
    live.ended(report(first, failed="step-39 is damaged"))
    again = live.wanted()
    assert not any(clip.name in live.dropped() for clip in again) and live.ended(report(second)) is None
    assert all((Path(clip.folder) / "COMPLETE").exists() and clip.folder != str(folder) for clip in again)
    assert live.ended(report(again[0])) is None and isinstance(live.ended(report(again[1])), SamplesMade)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    live = samples(tmp_path)
    live.on_checkpoint(39)
    (tmp_path / "samples").write_text("a file")
    event = live.ended(report(live.wanted()[0]))
    assert isinstance(event, SamplesFailed) and str(tmp_path / "samples") in event.why


@pytest.mark.parametrize("waits", [False, True])
def test_a_contact_sheet_that_cannot_be_written_is_told_of_its_own_round(tmp_path: Path, waits: bool) -> None:
    """The next round goes on, if one waits."""
    live = samples(tmp_path)
    live.on_checkpoint(39)
    first, second = live.wanted()
    if waits:
        live.on_checkpoint(79)
    live.ended(report(first))
    (tmp_path / "samples" / "step-39.json").mkdir()
    event = live.ended(report(second))
    assert isinstance(event, SamplesFailed) and event.step == 39
    if not waits:
        live.on_checkpoint(79)
    later = live.wanted()
    assert [clip.step for clip in later] == [79, 79] and not {clip.name for clip in later} & set(live.dropped())
    live.ended(report(later[0]))
    assert isinstance(live.ended(report(later[1])), SamplesMade)


def test_pictures_that_cannot_be_read_leave_samples_out(tmp_path: Path) -> None:
    live = samples(tmp_path, 40, "sample.images=[nowhere.png]", "train.flow.first_frame=0.5")
    event = live.on_checkpoint(39)
    assert isinstance(event, SamplesFailed) and event.step == 39 and "nowhere.png" in event.why
    assert live.wanted() == []


class Task:
    """Stands for a remote function: keeps what is asked for."""

    def options(self, **options: Any) -> Task:
        self.gpus = options["num_gpus"]
        return self

    def remote(self, run_dir: str, device: str) -> str:
        self.device = device
        return "running"


@pytest.mark.parametrize(("device", "gpus", "used"), [("auto", 1, "cuda"), ("cuda", 1, "cuda"), ("cpu", 0, "cpu")])
def test_where_workers_have_no_room_a_task_asks_for_the_gpu_that_it_uses(
    device: str, gpus: int, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import ray

    import actors.pool.workers  # noqa: F401  before ray.remote is another

    task = Task()
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(ray, "remote", lambda function: task)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []))

    def failed(reference: object) -> None:
        raise ray.exceptions.RayError("the node is gone")

    monkeypatch.setattr(ray, "get", failed)
    write_checkpoint(tmp_path, tiny_run(), 79)
    live = samples(tmp_path, 40, f"workers.device={device}")
    live.on_checkpoint(39)
    clips = live.wanted()
    live.on_checkpoint(79)
    event = live.ended(report(clips[0], failed="2.00 GiB are missing.", no_room=True))
    assert live.wanted() == [] and set(live.dropped()) == {clip.name for clip in clips}
    assert not list((tmp_path / "samples").glob(".checkpoint*")), "nor is the one that has waited held"
    ending = "2.00 GiB are missing. A task of its own makes them"
    if gpus:  # those of the cluster are its workers'
        ending += " once the run has ended, as its workers hold all GPUs"
    assert isinstance(event, SamplesFailed) and event.why.endswith(ending)
    assert (task.gpus, task.device) == (gpus, used)
    with caplog.at_level(logging.WARNING):
        live.close()
    assert "sampling failed: the node is gone" in caplog.text


def test_a_checkpoint_that_the_run_removes_stays_until_its_last_clip(tmp_path: Path) -> None:
    run = tiny_run()
    prompts = ("a disc", "a square")
    config = replace(
        run, sample=replace(run.sample, prompts=prompts, every=4), checkpoint=replace(run.checkpoint, every=4)
    )
    folder = write_checkpoint(tmp_path, config)
    modules: Any = SimpleNamespace(dit=build_dit(resolve(config.model)[0].dit, 5))
    live = LiveSamples(config, tmp_path)
    live.on_checkpoint(3)
    first, second = live.wanted()
    before = first.weights(modules)
    shutil.rmtree(folder)
    after = second.weights(modules)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert live.ended(report(first)) is None
    assert isinstance(live.ended(report(second)), SamplesMade)
    assert not any(path.name.startswith(".") for path in (tmp_path / "samples").iterdir()), "its disk space is free"


@pytest.mark.parametrize(
    ("ema_decay", "init_moments", "seed"), [(0.9, True, 2), (0.9, False, 1), (0.0, True, 1), (0.0, False, 1)]
)
def test_the_first_weights_are_those_of_the_checkpoint_that_a_run_begins_with(
    tmp_path: Path, ema_decay: float, init_moments: bool, seed: int
) -> None:
    """Its EMA (of seed 2) where the run goes on with that, as later clips and losses are of the EMA; else its weights
    (of seed 1). The run's own seed draws nothing."""
    run = tiny_run()
    folder = write_checkpoint(tmp_path, run)
    model, geometry = resolve(run.model)
    text, vae = build_text(model.text, torch.device("cpu")), build_vae(model.vae, torch.device("cpu"))
    modules = Modules(config=model, geometry=geometry, dit=build_dit(model.dit, 7), vae=vae, text=text)
    optimizer = replace(run.train.optimizer, ema_decay=ema_decay)
    train = replace(run.train, init_from=str(folder), init_moments=init_moments, optimizer=optimizer)
    config, expected = replace(run, train=train), dict(build_dit(model.dit, seed).named_parameters())
    clip = LiveClip(folder="", step=-1, round=1, number=0, config=config, first=())
    part = HeldOutPart(train=train, draws=1, timeout_s=60, clips=())
    work = HeldOutWork(folder="", step=-1, round=1, number=0, part=part)
    for found in (clip.weights(modules), work.weights(modules)):
        assert set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_worker_makes_the_clips_of_heddle_sample(tmp_path: Path) -> None:
    """With the checkpoint's EMA, by its own modules, whose weights are another step's."""
    run = tiny_run()
    config = replace(run, sample=replace(run.sample, prompts=("a disc", "a square")))
    folder = write_checkpoint(tmp_path, config)
    model, geometry = resolve(config.model)
    modules = Modules(
        config=model,
        geometry=geometry,
        dit=build_dit(model.dit, 5).train(),
        vae=build_vae(model.vae),
        text=build_text(model.text),
    )
    before = [p.detach().clone() for p in modules.dit.parameters()]
    asides = Asides(modules, torch.device("cpu"))
    wanted = clips_of(saved_model(folder, device="cpu"), config.sample.prompts, ClipSettings.of(config))
    for number, video in wanted:
        clip = LiveClip(folder=str(folder), step=3, round=1, number=number, config=config, first=())
        done = asides.turn(TurnTask(generation=1, step=9, aside=clip, gap_s=0.0, share=0.0, whole=True))
        assert not done.failed and isinstance(done.made, MadeClip)
        assert done.made.mp4 == mp4_of(video, config.sample.fps)
    assert modules.dit.training
    assert all(torch.equal(one, p) for one, p in zip(before, modules.dit.parameters(), strict=True))
