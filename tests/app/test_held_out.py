"""The loss of held-out clips: which clips, that it is the training's own loss, and how it reaches a run's records."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.aside_turns import MORE_ROOM, WAITS, NoMoreRoom, TurnReport, TurnTask
from actors.messages import CascadeTask, StepSample
from actors.records.events import HeldOutFailed, HeldOutMeasured, event_of
from actors.records.metrics_line import metrics_of
from actors.state import checkpoint_files
from actors.worker.aside import Asides
from app.records.metrics import Metrics
from app.report.curves import held_out_html, loss_html
from app.report.totals import StepTotals
from app.run import launch
from app.settings.config import RunConfig
from app.validation.checkpoint import _table, validate
from app.validation.clips import SEED, HeldOutClip, check_held_out, held_out_clips
from app.validation.live import LiveHeldOut, measured
from app.validation.work import ClipLoss, ClipLosses, HeldOutPart, HeldOutWork
from data.config import SourceConfig
from data.decode import decode_job
from data.errors import DataError
from data.tools.synthetic import SynthConfig, synthesize
from ops.flow.objective import draw_expert
from ops.models.folders import resolve
from ops.models.load import build_dit
from ops.models.ltx.config import LTXConfig
from ops.typed import ConfigError
from tests.actors.exactness import Host, close_hosts, make_hosts
from tests.families import test_wan
from tests.long import in_default_run

RUNS = Path(__file__).parents[2] / "configs" / "runs"
FAMILIES = ["demo", "demo-stdit", "cogvideox-tiny", "flux-tiny", "hunyuan-tiny", "latte-tiny", "ltx-tiny"]
FAMILIES += ["hunyuan15-tiny", "hunyuan15-i2v-tiny", "kandinsky5-tiny", "ltx2-tiny", "mochi-tiny", "skyreels-tiny"]
FAMILIES += ["wan2.2-both-tiny"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("held-out")
    synthesize(made, SynthConfig(clips=5, images=3, shards=2, seed=1, koala=False))
    return made


def config_of(folder: Path, run: str = "demo", *changes: str) -> RunConfig:
    sources = f"validation.sources=[{{path: {folder / 'shards'}, index: {folder / 'index'}}}]"
    return RunConfig.load(
        RUNS / f"{run}.yaml", [sources, "checkpoint.every=20", "validation.every=40", "workers.max=3", *changes]
    )


def clips_of(config: RunConfig) -> tuple[RunConfig, list[HeldOutClip]]:
    """The config with its model resolved, and its clips."""
    model, geometry = resolve(config.model)
    resolved = replace(config, model=model)
    return resolved, held_out_clips(resolved, geometry)


# -- which clips


def test_the_clips_are_the_same_whatever_else_a_run_sets_and_each_comes_once(folder: Path) -> None:
    _, clips = clips_of(config_of(folder, "demo", "validation.clips=6"))
    others = ["train.seed=7", "data.batch.memory_tokens=4000", "data.items_per_step=5", "data.caption_dropout=0.9"]
    _, again = clips_of(config_of(folder, "demo", "validation.clips=6", *others))
    assert [clip.key for clip in clips] == [clip.key for clip in again]
    _, every = clips_of(config_of(folder))
    assert len(every) == len({clip.key for clip in every}) == 8 and every[:6] == clips
    assert all(decode_job(clip.job).ok == [True] and decode_job(clip.job).captions != [""] for clip in every)
    words = check_held_out(config_of(folder))
    assert words.startswith("8 held-out clips of ") and words.endswith(" 4 noise levels each, every 40 steps")


def test_what_cannot_be_measured_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"validation\.every 30 must be a multiple of checkpoint\.every 20"):
        config_of(folder, "demo", "validation.every=30")
    with pytest.raises(ConfigError, match=r"validation\.every is 40 and validation\.sources is empty"):
        config_of(folder, "demo", "validation.sources=[]")
    with pytest.raises(ConfigError, match=r"validation\.sources weights 0\.5, 0 sum to 0\.5, not 1"):
        config_of(folder, "demo", "validation.sources=[{path: a.tar, weight: 0.5}, {path: b.tar}]")
    with pytest.raises(ConfigError, match=r"b/shards/0\.tar' is synthetic"):
        config_of(folder, "demo", "validation.sources=[{path: b/shards/0.tar, synthetic: true}]")
    with pytest.raises(ConfigError, match=r"which data\.sources trains on"):
        config_of(folder, "demo", f"data.sources=[{{path: {folder / 'shards'}}}]")
    with pytest.raises(DataError, match="no sample can be trained"):
        check_held_out(config_of(folder, "demo", "data.buckets.table=[97x64x96]"))


@pytest.mark.parametrize(
    "spelled", ["shards/{00000..00001}.tar", "shards/*.tar", "other/../shards", "shards/00001.tar"]
)
def test_clips_that_are_trained_on_are_refused_however_their_shards_are_written(folder: Path, spelled: str) -> None:
    (folder / "other").mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match=r"validation\.sources has .*/0000.\.tar, which data\.sources trains on"):
        check_held_out(config_of(folder, "demo", f"data.sources=[{{path: '{folder / spelled}'}}]"))


def test_a_start_looks_for_the_held_out_clips_where_it_measures_their_loss_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "is_on_a_cluster", lambda: False)
    (tmp_path / "trained").symlink_to(folder / "shards")
    config = config_of(folder, "demo", f"data.sources=[{{path: {tmp_path / 'trained'}}}]", "validation.every=0")
    gone = replace(config.validation, sources=(SourceConfig(path=str(tmp_path / "gone")),))
    launch._check_files(replace(config, validation=gone))
    with pytest.raises(DataError, match=r"there is no .*gone on this machine\. Check the source's path"):
        launch._check_files(replace(config, validation=replace(gone, every=20)))


def test_a_published_pipeline_without_a_run_that_trains_it_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is a published pipeline, which names no buckets\. Give --config"):
        validate(tmp_path, (str(tmp_path),), device="cpu")
    with pytest.raises(
        ConfigError, match=r"model\.dit and model\.vae and model\.text of the run's config names no folder"
    ):
        validate(tmp_path, (str(tmp_path),), config=RUNS / "demo.yaml", device="cpu")
    with pytest.raises(ConfigError, match=r"--config demo\.yaml is for a published pipeline, and .* Leave it out"):
        validate(tmp_path / "step-3", config=Path("demo.yaml"), device="cpu")


# -- its loss


@pytest.fixture
def ended() -> Iterator[None]:
    yield
    close_hosts()


def trained_loss(host: Host, clip: HeldOutClip, draw: int, resolved: RunConfig) -> float:
    """What training computes for the clip at step `draw`, by its executor."""
    batch, geometry = decode_job(clip.job), host.executor.modules.geometry
    grid = geometry.token_grid(*clip.job.shape[1:4])
    experts = [expert.sigmas for expert in resolved.model.dit.experts]
    tokens = grid[0] * grid[1] * grid[2]
    sample = StepSample(
        step=draw,
        item="one",
        index=0,
        key=clip.key,
        grid=grid,
        weight=1.0,
        expert=draw_expert(resolved.train.flow, SEED, draw, clip.key, tokens, experts),
        frame_rate=clip.own_rate,
    )
    text, vae, dit = (
        CascadeTask(
            generation=1,
            step=draw,
            cascade=f"{module}{draw}",
            name=f"{module} s{draw}",
            module=module,
            bag=(0,),
            samples=(sample,),
            pieces=(),
            planned_start_s=0.0,
            planned_end_s=0.0,
            keep=(0,) if module != "dit" else (),
            sources={"vae": (0,), "text": (0,)},
        )
        for module in ("text", "vae", "dit")
    )
    host.encoding.text(text, batch.captions, [batch.video[0, 0]] if resolved.model.text.sees_picture else [], [True])
    host.encoding.vae(vae, batch.video, [True])
    host.executor.dit(dit, {})
    loss, weight, _ = host.executor.work.take_losses(draw)
    assert weight == 1.0
    return loss


@pytest.mark.parametrize("run", in_default_run(["demo", "hunyuan15-i2v-tiny", "wan2.2-both-tiny"], of=FAMILIES))
def test_it_is_the_loss_that_training_computes_at_the_same_noise(folder: Path, run: str, ended: None) -> None:
    changes = ["train.flow.first_frame=0.5"] if run == "ltx-tiny" else []
    resolved, clips = clips_of(config_of(folder, run, f"train.seed={SEED}", *changes))
    (host,) = make_hosts(1, torch.float32, resolved.train, config=resolved.model)
    modules = host.executor.modules
    clips = sorted(clips, key=lambda clip: clip.job.bucket.frames)[-2:]
    pieces: list[str] = []
    done = work_of(resolved, clips).run(modules, CPU, pieces.append)
    assert not done.unread and not done.no_room and len(done.losses) == 4 and modules.dit.training
    made = [piece for piece in pieces if piece != WAITS]
    assert made == [f"{kind} {clip.bucket}" for clip in clips for kind in ("encode", "loss", "loss")]
    assert not any(parameter.grad is not None and parameter.grad.any() for parameter in modules.dit.parameters())
    expected = [trained_loss(host, clip, draw, resolved) for clip in clips for draw in range(2)]
    assert [one.loss for one in done.losses] == pytest.approx(expected, rel=1e-6)
    assert len({one.noise for one in done.losses}) == 4 and all(0 <= one.noise <= 1 for one in done.losses)


def work_of(config: RunConfig, clips: list[HeldOutClip], draws: int = 2) -> HeldOutPart:
    return HeldOutPart(train=config.train, draws=draws, timeout_s=60, clips=tuple(clips))


def test_a_clip_that_ends_its_decoder_counts_nowhere(
    folder: Path, ended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved, clips = clips_of(config_of(folder, "demo", "validation.clips=3"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "data"))
    monkeypatch.setenv("CRASHING_CLIPS", clips[1].job.clips[0].key)
    monkeypatch.setenv("HANGING_CLIPS", "")
    dangerous = [replace(clip, job=replace(clip.job, decoder="dangerous_decoder:decode")) for clip in clips]
    (host,) = make_hosts(1, torch.float32, resolved.train, config=resolved.model)
    done = work_of(resolved, dangerous, draws=1).run(host.executor.modules, CPU)
    assert done.unread == (clips[1].bucket,) and [one.bucket for one in done.losses] == [
        clips[0].bucket,
        clips[2].bucket,
    ]


class Full:
    """A device without memory for clips of one bucket: the second draw of each runs out of it. `has_more`: that can be
    had."""

    def __init__(self, bucket: str, has_more: bool = False) -> None:
        self.bucket, self.has_more, self.pieces, self.left = bucket, has_more, list[str](), 1

    def before(self, piece: str) -> None:
        if piece == WAITS:
            return
        self.pieces.append(piece)
        if piece == MORE_ROOM:
            if not self.has_more:
                raise NoMoreRoom
            self.bucket = ""
        elif piece.startswith("encode"):
            self.left = 1
        elif piece == f"loss {self.bucket}":
            if not self.left:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
            self.left -= 1


@pytest.fixture
def of_two_buckets(folder: Path, ended: None) -> tuple[HeldOutPart, Any, str, int]:
    """All clips, modules, the bucket of most clips, and how many clips are of others."""
    resolved, clips = clips_of(config_of(folder))
    (host,) = make_hosts(1, torch.float32, resolved.train, config=resolved.model)
    bucket, num_clips = Counter(clip.bucket for clip in clips).most_common(1)[0]
    assert 1 < num_clips < len(clips)
    return work_of(resolved, clips), host.executor.modules, bucket, len(clips) - num_clips


def test_a_clip_without_room_leaves_out_its_bucket_and_no_other(
    of_two_buckets: tuple[HeldOutPart, Any, str, int],
) -> None:
    part, modules, bucket, others = of_two_buckets
    full = Full(bucket)
    done = part.run(modules, CPU, full.before)
    assert done.no_room == {bucket: "CUDA out of memory. Tried to allocate 3.00 GiB."}
    assert len(done.losses) == 2 * others and bucket not in {one.bucket for one in done.losses}
    assert full.pieces.count(f"encode {bucket}") == 1, "what is left out is not tried again"
    whole = part.run(modules, CPU)
    assert done.losses == tuple(one for one in whole.losses if one.bucket != bucket)
    assert modules.dit.training


def test_a_clip_that_fits_where_there_is_more_room_is_measured_once(
    of_two_buckets: tuple[HeldOutPart, Any, str, int],
) -> None:
    part, modules, bucket, _ = of_two_buckets
    full = Full(bucket, has_more=True)
    assert part.run(modules, CPU, full.before) == part.run(modules, CPU)
    tried = full.pieces.index(MORE_ROOM)
    assert full.pieces[tried - 3 : tried + 3] == [
        f"encode {bucket}", f"loss {bucket}", f"loss {bucket}", MORE_ROOM, f"encode {bucket}", f"loss {bucket}"
    ]  # fmt: skip


def test_an_error_that_is_not_of_memory_leaves_nothing_out(of_two_buckets: tuple[HeldOutPart, Any, str, int]) -> None:
    part, modules, _, _ = of_two_buckets

    def fail(piece: str) -> None:
        if piece.startswith("loss"):
            raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        part.run(modules, CPU, fail)


def test_a_failure_does_not_wait_for_the_clip_that_is_decoded_ahead(
    folder: Path, ended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a run the worker waits for it within a step, and all the others for that worker."""
    resolved, clips = clips_of(config_of(folder, "demo", "validation.clips=2"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "data"))
    monkeypatch.setenv("CRASHING_CLIPS", "")
    monkeypatch.setenv("HANGING_CLIPS", clips[1].job.clips[0].key)
    dangerous = [replace(clip, job=replace(clip.job, decoder="dangerous_decoder:decode")) for clip in clips]
    (host,) = make_hosts(1, torch.float32, resolved.train, config=resolved.model)
    failed_at: list[float] = []

    def fail(piece: str) -> None:
        if piece.startswith("loss"):
            failed_at.append(time.monotonic())
            raise RuntimeError("the device failed")

    with pytest.raises(RuntimeError, match="the device failed"):
        work_of(resolved, dangerous).run(host.executor.modules, CPU, fail)
    assert time.monotonic() - failed_at[0] < 30, "the decoder may take 60 s for a clip"


# -- beside a run


def done_by(work: HeldOutWork, loss: float, unread: int = 0) -> TurnReport:
    losses = tuple(ClipLoss(bucket=clip.bucket, noise=0.3, loss=loss) for clip in work.part.clips[unread:])
    gone = tuple(clip.bucket for clip in work.part.clips[:unread])
    return TurnReport(aside=work.name, ended=True, made=ClipLosses(losses=losses, unread=gone))


def live_of(folder: Path, run_dir: Path, *changes: str) -> LiveHeldOut:
    return LiveHeldOut(config_of(folder, "demo", "validation.first=false", *changes), run_dir)


def test_the_first_weights_are_measured_once_also_where_the_controller_dies_over_it(
    folder: Path, tmp_path: Path
) -> None:
    """A checkpoint meanwhile waits for its turn."""
    checkpoint_of(tmp_path, 39)
    for end in ("killed", "closed", "measured"):
        live = LiveHeldOut(config_of(folder), tmp_path)
        assert live.open(begins=end == "killed") == []
        works = live.wanted()
        assert [(work.step, work.folder) for work in works] == [(-1, "")] * 3
        if end == "killed":
            assert live.on_checkpoint(39) is None and live.wanted() == []
        if end == "closed":
            live.close()
    *_, event = [live.ended(done_by(work, 1.0)) for work in works]
    assert isinstance(event, HeldOutMeasured) and event.describe().startswith("held-out loss after 0 steps: 1.0000 (")
    assert [work.step for work in live.wanted()] == [39, 39, 39]
    again = LiveHeldOut(config_of(folder), tmp_path)
    assert again.open(begins=False) == [] and {work.step for work in again.wanted()} == {39}
    without = live_of(folder, tmp_path / "without")
    assert without.open(begins=True) == [] and without.wanted() == []


def test_the_first_weights_are_those_before_any_update_whatever_the_worker_holds_by_now(
    folder: Path, ended: None
) -> None:
    """By a worker some steps later; its own weights are untouched by the turn."""
    resolved, clips = clips_of(config_of(folder, "demo", "train.seed=5"))
    (host,) = make_hosts(1, torch.float32, resolved.train, config=resolved.model)
    modules, parts = host.executor.modules, work_of(resolved, clips[:2])
    modules.dit.load_state_dict(build_dit(resolved.model.dit, 5).state_dict())
    expected = parts.run(modules, CPU)
    with torch.no_grad():
        for parameter in modules.dit.parameters():
            parameter.mul_(1.5)
    assert parts.run(modules, CPU) != expected
    before = [parameter.detach().clone() for parameter in modules.dit.parameters()]
    generator = torch.get_rng_state()
    work = HeldOutWork(folder="", step=-1, round=1, number=0, part=parts)
    report = Asides(modules, CPU).turn(TurnTask(generation=1, step=9, aside=work, gap_s=0, share=0, whole=True))
    assert not report.failed and report.made == expected
    assert all(torch.equal(one, other) for one, other in zip(before, modules.dit.parameters(), strict=True))
    assert torch.equal(generator, torch.get_rng_state())


def test_a_published_pipeline_is_measured_as_the_run_that_trains_it_begins(
    folder: Path, tmp_path: Path, ended: None
) -> None:
    base = test_wan.publish(tmp_path / "wan")
    table = "data.buckets.table=[1x32x48, 9x32x48]"
    config = replace(
        config_of(folder, "demo", "validation.clips=2", "sample.prompts=[]", table), model=test_wan.settings(base)
    )
    (run := tmp_path / "run").mkdir()
    with_factors = replace(config, model=test_wan.settings(base, lora_rank=2))
    (run / "config.yaml").write_text(with_factors.to_yaml())
    (moved := tmp_path / "moved").symlink_to(base)  # where the weights lie now
    found = validate(moved, config=run, device="cpu")
    resolved, clips = clips_of(config)
    (host,) = make_hosts(1, torch.float32, resolved.train, config=resolved.model)
    work = HeldOutWork(folder="", step=-1, round=1, number=0, part=work_of(resolved, clips, draws=4))
    task = TurnTask(generation=1, step=0, aside=work, gap_s=0, share=0, whole=True)
    report = Asides(host.executor.modules, CPU).turn(task)
    assert not report.failed and isinstance(report.made, ClipLosses)
    assert found.loss == pytest.approx(measured(-1, report.made, clips, 0.0).loss, rel=1e-5) and found.clips == 2
    other = replace(config, model=replace(config.model, dit=replace(LTXConfig(), path=str(base))))
    (run / "config.yaml").write_text(other.to_yaml())
    with pytest.raises(ConfigError, match=r"is wan, and model\.dit\.architecture of the run's config is ltx"):
        validate(moved, config=run, device="cpu")


def test_what_ray_and_workers_take_to_start_is_no_time_of_the_first_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("app.sampling.rounds.time.monotonic", lambda: now)
    live = LiveHeldOut(config_of(folder), tmp_path)
    live.open(begins=True)
    now = 60.0  # until the first step is dealt
    works = live.wanted()
    now = 70.0
    assert live.wanted() == []
    now = 90.0
    *_, event = [live.ended(done_by(work, 1.0)) for work in works]
    assert isinstance(event, HeldOutMeasured) and event.seconds == 30.0


def test_all_parts_of_a_checkpoint_become_one_event(folder: Path, tmp_path: Path) -> None:
    live = live_of(folder, tmp_path)
    assert live.open(begins=False) == [] and live.on_checkpoint(19) is None and live.wanted() == []
    live.on_checkpoint(39)
    works = live.wanted()
    assert sorted(len(work.part.clips) for work in works) == [2, 3, 3] and live.wanted() == []
    assert live.ended(done_by(works[2], 3.0, unread=1)) is None and live.ended(done_by(works[0], 1.0)) is None
    event = live.ended(done_by(works[1], 2.0))
    assert isinstance(event, HeldOutMeasured) and (event.step, event.clips, event.unread) == (39, 7, 1)
    parts = [len(work.part.clips) for work in works]
    assert event.loss == pytest.approx((parts[0] * 1.0 + parts[1] * 2.0 + (parts[2] - 1) * 3.0) / 7)
    assert list(event.by_noise) == ["0.25-0.5"] and not list(tmp_path.glob(".held_out/*"))


def test_the_loss_of_a_multiple_whose_checkpoint_was_put_off_is_that_of_the_next_one(
    folder: Path, tmp_path: Path
) -> None:
    live = live_of(folder, tmp_path)
    assert live.on_checkpoint(35, -1) is None and live.wanted() == []
    assert live.on_checkpoint(46, 35) is None and {work.step for work in live.wanted()} == {46}
    assert live.on_checkpoint(60, 46) is None and live._rounds.next is None


def test_of_checkpoints_that_come_too_fast_the_newest_waits(folder: Path, tmp_path: Path) -> None:
    live = live_of(folder, tmp_path)
    live.on_checkpoint(39)
    works = live.wanted()
    assert live.on_checkpoint(79) is None and live.wanted() == []
    left_out = live.on_checkpoint(119)
    assert isinstance(left_out, HeldOutFailed) and left_out.step == 79
    events = [live.ended(done_by(work, 1.0)) for work in works]
    assert isinstance(events[-1], HeldOutMeasured)
    assert {work.step for work in live.wanted()} == {119}


def test_a_part_that_fails_ends_its_checkpoint_and_not_the_next(folder: Path, tmp_path: Path) -> None:
    live = live_of(folder, tmp_path)
    live.on_checkpoint(39)
    first, second, _ = live.wanted()
    event = live.ended(TurnReport(aside=first.name, ended=True, failed="step-39 is damaged"))
    assert event == HeldOutFailed(step=39, why="step-39 is damaged")
    assert second.name in live.dropped() and live.ended(done_by(second, 1.0)) is None
    live.on_checkpoint(79)
    assert [work.step for work in live.wanted()] == [79, 79, 79]


def without(work: HeldOutWork, bucket: str, loss: float) -> TurnReport:
    """What a worker measures that has no memory for this bucket."""
    losses = [ClipLoss(bucket=c.bucket, noise=0.3, loss=loss) for c in work.part.clips if c.bucket != bucket]
    no_room = {bucket: "CUDA out of memory"}
    return TurnReport(aside=work.name, ended=True, made=ClipLosses(losses=tuple(losses), no_room=no_room))


def clips_by_bucket(works: list[HeldOutWork]) -> Counter[str]:
    return Counter(clip.bucket for work in works for clip in work.part.clips)


def test_a_bucket_that_one_worker_has_no_room_for_is_left_out_for_the_rest_of_the_run(
    folder: Path, tmp_path: Path
) -> None:
    live = live_of(folder, tmp_path)
    live.on_checkpoint(39)
    works = live.wanted()
    live.on_checkpoint(79)  # its works are made already
    all_clips = clips_by_bucket(works)
    bucket, left_out = all_clips.most_common(1)[0]
    assert any(c.bucket == bucket for work in works[1:] for c in work.part.clips), "others measure some of it"
    live.ended(without(works[0], bucket, 1.0))
    live.ended(done_by(works[1], 1.0))
    event = live.ended(done_by(works[2], 1.0))
    assert isinstance(event, HeldOutMeasured) and event.no_room == {bucket: left_out} and event.unread == 0
    assert event.clips == 8 - left_out and bucket not in event.by_bucket
    assert f"{left_out} of {bucket} left out for want of memory" in event.describe()
    for work in live.wanted():
        second = live.ended(done_by(work, 1.0, unread=1))
    assert isinstance(second, HeldOutMeasured) and (second.step, second.no_room) == (79, event.no_room)
    assert second.clips + second.unread == event.clips, "also where its worker has room by now"
    live.on_checkpoint(119)
    assert clips_by_bucket(live.wanted()) == all_clips - Counter({bucket: left_out}), "it is not tried again"
    (tmp_path / "events.jsonl").write_text(json.dumps(event.stamped(3).line()) + "\n")
    again = live_of(folder, tmp_path)
    again.open(begins=False)
    again.on_checkpoint(159)
    assert bucket not in clips_by_bucket(again.wanted()), "nor when the run goes on"


@pytest.mark.parametrize(
    "damage",
    [b'{"time": "noon", "event": "held_out"}\n', b'{"event": "held_out", "st\n', b'"held_out" \xff\x00\n', b"\n"],
)
def test_buckets_stay_left_out_whatever_has_happened_to_lines_of_the_run(
    folder: Path, tmp_path: Path, damage: bytes
) -> None:
    _, clips = clips_of(config_of(folder))
    bucket, fewer = clips[0].bucket, measured(79, losses_of(0.5), [], 1.5)
    event = measured(39, replace(losses_of(0.5), no_room={bucket: "CUDA out of memory"}), clips, 1.5)
    lines = [json.dumps(one.stamped(3).line()).encode() + b"\n" for one in (event, fewer)]
    (tmp_path / "events.jsonl").write_bytes(damage + lines[0] + damage + lines[1])
    live = live_of(folder, tmp_path)
    assert live.open(begins=False) == []
    live.on_checkpoint(119)
    left = clips_by_bucket(live.wanted())
    assert left and bucket not in left, "nor after a start whose clips were none of that bucket"


def test_where_no_clip_has_room_the_checkpoint_has_no_loss_and_the_next_is_tried(folder: Path, tmp_path: Path) -> None:
    live = live_of(folder, tmp_path)
    live.on_checkpoint(39)
    works = live.wanted()
    no_room = dict.fromkeys(clips_by_bucket(works), "CUDA out of memory")
    for work in works:
        event = live.ended(TurnReport(aside=work.name, ended=True, made=ClipLosses(losses=(), no_room=no_room)))
    assert isinstance(event, HeldOutFailed) and event.why.endswith(": CUDA out of memory")
    live.on_checkpoint(79)
    assert clips_by_bucket(live.wanted()) == clips_by_bucket(works)


def test_clips_that_cannot_be_decoded_are_not_said_to_lack_memory(folder: Path, tmp_path: Path) -> None:
    """The run has left out a bucket, and the storage of the others is gone."""
    live = live_of(folder, tmp_path)
    live.on_checkpoint(39)
    works = live.wanted()
    bucket = works[0].part.clips[0].bucket
    events = [live.ended(without(work, bucket, 1.0)) for work in works]
    assert isinstance(events[-1], HeldOutMeasured) and events[-1].clips
    live.on_checkpoint(79)
    events = [live.ended(done_by(work, 1.0, unread=len(work.part.clips))) for work in live.wanted()]
    assert isinstance(events[-1], HeldOutFailed) and "could not be decoded" in events[-1].why


def checkpoint_of(run_dir: Path, step: int) -> None:
    (folder := run_dir / "checkpoints" / f"step-{step}").mkdir(parents=True)
    (folder / "COMPLETE").write_text(json.dumps({"files": {}}))


@pytest.mark.parametrize("end", ["killed", "closed", "killed, without links"])
def test_what_a_controller_was_at_begins_again_with_the_next(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    def refused(file: Path, link: Path) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    if "without" in end:
        monkeypatch.setattr(os, "link", refused)
    checkpoint_of(tmp_path, 39)
    checkpoint_of(tmp_path, 79)
    before = live_of(folder, tmp_path)
    before.on_checkpoint(39)
    before.on_checkpoint(79)
    if end == "closed":
        before.close()
        assert not list(tmp_path.glob(".held_out/*/*")), "what is left keeps no file"
    live = live_of(folder, tmp_path)
    assert live.open(begins=False) == [HeldOutFailed(step=39, why="the run ended before it was measured")]
    works = live.wanted()
    assert {work.step for work in works} == {79} and all((Path(w.folder) / "COMPLETE").exists() for w in works)
    events = [live.ended(done_by(work, 1.0)) for work in works]
    assert isinstance(events[-1], HeldOutMeasured) and not list(tmp_path.glob(".held_out/*"))
    assert live_of(folder, tmp_path).open(begins=False) == [], "what has ended leaves nothing"


def test_a_checkpoint_that_may_not_be_read_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event named the run's folder of links."""
    checkpoint_of(tmp_path, 79)
    live_of(folder, tmp_path).on_checkpoint(79)

    def refused(checkpoint: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(checkpoint / "COMPLETE"))

    monkeypatch.setattr(checkpoint_files, "_listed", refused)
    why = f"Permission denied: {tmp_path}/checkpoints/step-79/COMPLETE"
    assert live_of(folder, tmp_path).open(begins=False) == [HeldOutFailed(step=79, why=why)]


def test_a_checkpoint_that_is_made_again_is_measured_again(folder: Path, tmp_path: Path) -> None:
    """Training may go back to before a checkpoint that is damaged: the works of its first round are not those of the
    second, which ends, with files of its own."""
    checkpoint_of(tmp_path, 39)
    live = live_of(folder, tmp_path)
    live.on_checkpoint(39)
    first = live.wanted()
    live.on_checkpoint(39)
    for work in first:
        live.ended(done_by(work, 1.0))
    second = live.wanted()
    assert len(second) == 3 and not any(work.name in live.dropped() for work in second)
    assert all((Path(work.folder) / "COMPLETE").exists() for work in second)
    events = [live.ended(done_by(work, 2.0)) for work in second]
    assert isinstance(events[-1], HeldOutMeasured) and events[-1].loss == 2.0


def test_sources_that_are_not_there_are_told_at_the_start_and_end_no_run(tmp_path: Path) -> None:
    live = live_of(tmp_path / "nowhere", tmp_path)
    (event,) = live.open(begins=False)
    assert isinstance(event, HeldOutFailed) and "nowhere" in event.describe()
    assert isinstance(live.on_checkpoint(39), HeldOutFailed) and live.wanted() == []


# -- records


def losses_of(*losses: float) -> ClipLosses:
    """Each at the noise level of its own value."""
    found = [ClipLoss(bucket="9x32x48", noise=0.1 if math.isnan(loss) else loss, loss=loss) for loss in losses]
    return ClipLosses(losses=tuple(found))


def test_it_is_drawn_at_the_step_of_its_checkpoint(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    one = measured(39, losses_of(0.1, 0.3, 1.0), [], 1.5)
    assert one.by_noise == {"0-0.25": 0.1, "0.25-0.5": 0.3, "0.75-1": 1.0}
    assert json.loads(json.dumps(one.line()))["by_bucket"] == {"9x32x48": pytest.approx(1.4 / 3)}
    with Metrics(tmp_path) as metrics:
        metrics.held_out(replace(one, time=1.0))
    accumulator = EventAccumulator(str(tmp_path / "events"))
    accumulator.Reload()
    (scalar,) = accumulator.Scalars("held_out/loss")
    assert scalar.step == 39 and scalar.value == pytest.approx(1.4 / 3)
    text = held_out_html({39: one, 79: replace(one, step=79, loss=0.25)})
    assert "<td>40</td><td>0.4667</td>" in text and "<td>80</td><td>0.2500</td>" in text and "noise 0.25-0.5" in text
    many = {step: replace(one, step=step) for step in (-1, *range(39, 840, 40))}
    shown = [int(number) for number in re.findall(r"<tr><td>(\d+)</td>", held_out_html(many))]
    assert shown == [0, *range(400, 841, 40)], "the zero line stays beside the newest"
    assert held_out_html({}) == "" and "left out" not in text
    lost = measured(39, losses_of(math.nan, 0.1), [], 1.5)
    assert lost.describe() == "held-out loss after 40 steps: not finite (0 clips, 2 s)"
    assert "<td>not finite</td>" in held_out_html({39: lost}) and "nan" not in held_out_html({39: lost})
    assert _table(lost) == ["  noise 0-0.25  not finite", "  9x32x48       not finite"]
    short = replace(one, step=79, no_room={"81x720x1280": 5})
    text = held_out_html({39: one, 79: short})
    assert "<th>left out for want of memory</th>" in text and "<td>5 of 81x720x1280</td>" in text
    whole = replace(one, by_bucket={**one.by_bucket, "81x720x1280": 0.75})
    text = held_out_html({39: whole, 79: short})
    assert "<th>81x720x1280</th>" in text and "<td>0.7500</td>" in text, "what was measured before stays in the table"
    assert "nan" not in text


def test_buckets_stand_by_their_numbers() -> None:
    names = ("17x32x48", "1x32x48", "9x32x48")
    done = ClipLosses(losses=tuple(ClipLoss(bucket=name, noise=0.1, loss=1.0) for name in names))
    one = measured(39, done, [], 1.5)
    assert list(one.by_bucket) == ["1x32x48", "9x32x48", "17x32x48"]
    before = replace(one, by_bucket=dict.fromkeys(sorted(names), 1.0))  # as records have them
    columns = re.findall(r"<th>(\d+x32x48)</th>", held_out_html({39: before}))
    assert columns == ["1x32x48", "9x32x48", "17x32x48"]
    steps = StepTotals(1)
    steps.add(metrics_of({"step": 0, "loss": 1.0, "loss_by_bucket": dict.fromkeys(names, 1.0)}))
    assert [name for name, _, _ in steps.losses_by_bucket()] == columns


def test_the_loss_curve_names_the_line_of_held_out_clips() -> None:
    one, steps = measured(39, losses_of(0.1), [], 1.5), StepTotals(1)
    steps.add(metrics_of({"step": 0, "loss": 1.0}))
    assert "Orange, dashed: held-out clips." in loss_html(steps, {39: one}) and "Orange" not in loss_html(steps, {})


def test_a_loss_that_is_not_finite_is_json(tmp_path: Path) -> None:
    one = measured(39, losses_of(math.nan), [], 1.5)
    text = json.dumps(one.line(), allow_nan=False)
    again = event_of(json.loads(text))
    assert isinstance(again, HeldOutMeasured) and math.isnan(again.loss) and math.isnan(again.by_bucket["9x32x48"])
