"""Options on the line of a prompt: clips of several sizes in one run, and lines that are refused at the start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from actors.aside_turns import TurnReport, TurnTask
from actors.records.events import SamplesMade
from actors.worker.aside import Asides
from actors.worker.loading import Modules
from app.cli import app
from app.drawing.video import contact_sheet, read_mp4
from app.export.export import export
from app.inputs.batches import with_limits_of
from app.inputs.checkpoints import run_config
from app.records.rundir import RunDir
from app.report.media import samples_html
from app.sampling import crew as crews
from app.sampling.chunk_limit import ChunkLimit
from app.sampling.clip_worker import ClipJob, ClipWorker
from app.sampling.clips import ClipSettings, clips_of, first_frames, groups_of
from app.sampling.live import LiveSamples
from app.sampling.model import saved_model
from app.sampling.prompt_queue import PromptQueue
from app.sampling.spread import check_alike
from app.settings.config import RunConfig, check_read, from_here
from app.settings.prompt_line import PromptLine, with_pictures
from app.settings.prompts import prompt_notes, read_prompts
from data.config import BatchConfig
from ops.models.config import TextConfig
from ops.models.folders import resolve
from ops.models.load import build_dit, build_text, build_vae
from ops.typed import ConfigError
from tests.app import test_image_to_video
from tests.app.test_sample import tiny_run, write_checkpoint

DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.yaml"
LINES = (
    "a disc",
    "a wide disc --w 32 --h 16 --f 9 --d 7",
    "a picture --f 1",
    "a square --d 42 --n a blurred square",
    "a last disc",
)


DASHES = ("a cat \u2014 832 of them", "so \u2014i love it", "a cat\u2014w 3", "\u2014s 'a' and", "\u2013 w 832")


def mixed_run(prompts: tuple[str, ...] = LINES) -> RunConfig:
    config = tiny_run()
    return replace(config, sample=replace(config.sample, prompts=prompts))


def started(*overrides: str) -> RunConfig:
    """The demo's config, checked as at a start."""
    config = RunConfig.load(DEMO, overrides)
    check_read(config)
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("mixed")
    write_checkpoint(run, mixed_run())
    (run / "config.yaml").write_text(mixed_run().to_yaml())
    return run


def test_a_line_is_a_text_and_what_it_says_instead_of_the_settings() -> None:
    line = "a cat --w 832 --h 480 --f 81 --d 42 --s 20 --g 5.0 --fs 3 --n blurred, cut off --i cat.png --ei end cat.png"
    assert PromptLine.of(line) == PromptLine(
        text="a cat",
        width=832,
        height=480,
        frames=81,
        seed=42,
        steps=20,
        guidance_scale=5.0,
        flow_shift=3.0,
        negative_prompt="blurred, cut off",
        image="cat.png",
        last_image="end cat.png",
    )
    assert PromptLine.of("a cat --l 1.5").guidance_scale == 1.5 and PromptLine.of("--F 1") == PromptLine(
        text="", frames=1
    )


@pytest.mark.parametrize(
    "text", [" a cat ", "a well--known cat", "a cat -- it sleeps", "a cat --", "--- a cat", "-w 3", *DASHES]
)
def test_a_text_without_options_stays_as_it_is(text: str) -> None:
    assert PromptLine.of(text) == PromptLine(text=text) and not PromptLine.of(text).has_options


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("a cat --q 3", " 'a cat --q 3': --q is no option of a prompt; there are --w and --h (pixels), --f"),
        ("a cat --width 832", "--width is no option of a prompt"),
        ("a cat --w=832", "--w=832 is no option of a prompt"),
        ("a cat --furry and small", "Leave it out, or put a space after the dashes where they are text."),
        ("a cat --cn control.mp4", "--cn is no option of a prompt"),
        ("a cat --w", "--w has no value; give a whole number, or leave it out."),
        ("a cat --l --w 16", "--l has no value; give a number, or leave it out."),
        ("a cat --w 832 on a wall", "'832 on a wall' is no whole number; options stand at the end, after the text."),
        ("a cat --f 8.5", "--f '8.5' is no whole number; write digits 0 to 9 alone."),
        ("a cat --w 832.0", "--w '832.0' is no whole number; write digits 0 to 9 alone."),
        ("a cat --w 8_32", "--w '8_32' is no whole number; write digits 0 to 9 alone."),
        ("a cat --d \u0664\u0662", "is no whole number; write digits 0 to 9 alone."),
        ("a cat --l 1_0.5", "--l '1_0.5' is no number; write digits 0 to 9, with a point for a part of one."),
        ("a cat --l \u0665", "is no number; write digits 0 to 9, with a point for a part of one."),
        ("a cat \u2014w 832", "'\u2014w' begins with a dash, and options with two hyphens; write --w, or put a space"),
        ("a cat \u2013w 832 --h 480", "write --w, or put a space after the dash where it is text."),
        ("a cat --h 480 \u2014fs 3.5", "write --fs, or put a space"),
        ("a cat \u2014n blurred", "write --n, or put a space"),
        ("a cat \u2014i a cat.png", "write --i, or put a space"),
        ("a cat --f 0", "--f is 0; it must be at least 1."),
        ("a cat --d -1", "--d is -1; it must be at least 0."),
        ("a cat --fs nan", "--fs is nan; it must be a number."),
        ("a cat --fs 0", "--fs is 0; it must be larger than 0."),
        ("a cat --w 16 --w 32", "--w is given twice. Leave one out."),
        ("a cat --g 6 --l 5", "--l is given twice. --g and --l are one setting here. Leave one out."),
        ("a cat --n --w 16", "--n has no value; give a text, or leave it out."),
        ("a cat --i", "--i has no value; give a picture, or leave it out."),
    ],
)
def test_what_is_wrong_with_a_line_is_one_sentence_before_the_start(line: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        PromptLine.of(line)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    (tmp_path / "prompts.txt").write_text(f"# comment --q\na dog\n{line}\n")
    with pytest.raises(ConfigError) as refused:
        started(f"sample.prompts={tmp_path}/prompts.txt")
    assert said in str(refused.value) and f"{tmp_path}/prompts.txt, line 3, 'a cat " in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        started(f"sample.prompts={['a dog', line]}")
    assert said in str(refused.value) and str(refused.value).startswith("prompt 2 'a cat ")
    asked = ["sample", "--checkpoint", str(tmp_path), "--prompts", str(tmp_path / "prompts.txt")]
    answer = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "x.mp4")])
    assert answer.exit_code != 0 and said in str(answer.exception) and "line 3" in str(answer.exception)
    answer = CliRunner().invoke(app, [*asked[:3], "--prompt", "a dog", "--prompt", line])
    assert answer.exit_code != 0 and said in str(answer.exception) and "prompt 2 'a cat" in str(answer.exception)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("a cat --f 16", "prompt 2 'a cat --f 16': sample.frames/height/width cannot be generated: 16 frames"),
        ("a cat --h 63", "prompt 2 'a cat --h 63': sample.frames/height/width cannot be generated: "),
        ("a cat --i a.png", "prompt 2 'a cat --i a.png': sample.images is given, but model.dit makes video from text"),
        ("a cat --ei a.png", "prompt 2 'a cat --ei a.png': sample.last_images is given, but model.dit takes no last"),
    ],
)
def test_what_the_model_cannot_make_is_said_of_its_prompt(prompt: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        started(f"sample.prompts=['a dog', '{prompt}']")
    assert str(caught.value).startswith(said)


def test_a_shift_beside_given_times_needs_steps_too() -> None:
    given = "sample.timesteps=[1000, 500]"
    with pytest.raises(ConfigError, match=r"prompt 1 'a cat --fs 2': sample.flow_shift is 2, and sample.timesteps are"):
        started(given, "sample.prompts=['a cat --fs 2']")
    config = started(given, "sample.prompts=['a cat --fs 2 --s 5', 'a cat --s 5', 'a cat']")
    first, second, third = ClipSettings.of(config).of_each(config.sample.prompts)
    assert (first.sampler.steps, first.sampler.timesteps, first.sampler.flow_shift) == (5, (), 2.0)
    assert (second.sampler.steps, second.sampler.timesteps) == (5, ()) and third.sampler.timesteps == (1000.0, 500.0)


def test_a_size_that_no_prompt_takes_from_the_settings_may_be_any() -> None:
    sizes = ["sample.frames=16", "sample.prompts=['a cat --f 17', 'a dog --f 1']"]
    assert started(*sizes).sample.frames == 16
    with pytest.raises(ConfigError, match="16 frames"):
        RunConfig.load(DEMO, [*sizes[:1], "sample.prompts=['a cat --f 17', 'a dog']"])


def test_settings_of_prompts_without_options_are_those_of_the_run_with_the_seeds_that_follow() -> None:
    settings = replace(ClipSettings.of(tiny_run()), seed=5)
    assert settings.of_each(["a", "b"]) == [settings, replace(settings, seed=6)]
    own = settings.of_each(LINES)
    assert [one.seed for one in own] == [5, 7, 7, 42, 9]
    assert [(one.frames, one.height, one.width) for one in own] == [
        *((5, 16, 24), (9, 16, 32), (1, 16, 24), (5, 16, 24), (5, 16, 24))
    ]
    assert [one.negative_prompt for one in own] == ["", "", "", "a blurred square", ""]


def test_a_run_keeps_its_lines_and_files_of_pictures_become_absolute(tmp_path: Path) -> None:
    config = mixed_run()
    assert RunConfig.from_yaml(config.to_yaml()).sample.prompts == LINES
    line = "a  cat --i a cat.png --w 32 --ei b.png"
    assert with_pictures(line, lambda path: f"/x/{path}") == "a  cat --i /x/a cat.png --w 32 --ei /x/b.png"
    quoted = "a --ei 'b c.png' --i \"a cat.png\""
    assert (PromptLine.of(quoted).image, PromptLine.of(quoted).last_image) == ("a cat.png", "b c.png")
    assert with_pictures(quoted, lambda path: f"/x/{path}") == "a --ei /x/b c.png --i /x/a cat.png"
    found = from_here(mixed_run(("a cat", line))).sample.prompts
    assert found == ("a cat", f"a  cat --i {Path.cwd()}/a cat.png --w 32 --ei {Path.cwd()}/b.png")


OLD = "a robot types git commit --amend"  # as a run has it that is of before there were options


def test_what_an_earlier_run_has_kept_is_read_whatever_its_prompts_say(tmp_path: Path) -> None:
    config = mixed_run((OLD, "a sign --w 833", "a disc"))
    checkpoint = write_checkpoint(tmp_path, config)
    meta = {"config": config.to_yaml()}
    assert run_config(meta, checkpoint) == RunConfig.from_yaml(meta["config"]) == config
    assert from_here(config).sample.prompts == config.sample.prompts
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    resumed = replace(config, run=replace(config.run, dir=str(tmp_path.parent), name=tmp_path.name))
    resumed = replace(resumed, data=replace(config.data, batch=BatchConfig(auto=True)))
    assert with_limits_of(resumed, tmp_path).data.batch.auto
    export(checkpoint, tmp_path / "exported")
    assert saved_model(tmp_path / "exported", device="cpu").config.sample.prompts == config.sample.prompts
    asked = ["sample", "--checkpoint", str(tmp_path), "--device", "cpu", "--out", str(tmp_path / "x.mp4")]
    answer = CliRunner().invoke(app, [*asked, "--prompt", "a disc"])
    assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize(
    ("old", "said"),
    [
        (OLD, "--amend is no option of a prompt"),
        ("a sign --w 833", "clips of 5 x 16 x 833"),
        ("a jet \u2014f 16", "write --f, or put a space"),
    ],
)
def test_sample_says_how_to_do_without_a_prompt_that_a_run_has_kept(old: str, said: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, mixed_run((old,)))
    answer = CliRunner().invoke(app, ["sample", "--checkpoint", str(tmp_path), "--out", str(tmp_path / "x.mp4")])
    error = str(answer.exception)
    assert said in error and error.endswith("It is in sample.prompts of the run: give --prompt instead.")


def test_a_start_refuses_what_no_folder_of_the_model_needs_to_say(tmp_path: Path) -> None:
    config = mixed_run((OLD,))
    model = replace(config.model, text=replace(config.model.text, path=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="--amend is no option of a prompt"):
        check_read(replace(config, model=model))


def test_a_prompt_file_may_have_comments(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("# prompt 1: for a cat\na cat --w 640 --h 480\n\n#a dog\na dog #1\n")
    assert read_prompts(file) == ["a cat --w 640 --h 480", "a dog #1"]
    file.write_text("# a mark of UTF-8 is before this\na cat\n", encoding="utf-8-sig")
    assert read_prompts(file) == ["a cat"]
    file.write_text("a cat\n", encoding="utf-8-sig")
    assert read_prompts(file) == ["a cat"]
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="has no prompt"):
        read_prompts(file)


def test_a_prompt_ends_at_the_end_of_its_line_alone(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("a\u2028cat\r\na\x85dog\ra\x0bbird\na\x1cfish".encode())
    assert read_prompts(file) == ["a\u2028cat", "a\x85dog", "a\x0bbird", "a\x1cfish"]


def test_tokens_are_those_of_texts_and_of_negative_prompts(tmp_path: Path) -> None:
    assert prompt_notes(["a disc --w 32 --h 32 --d 1234567"], TextConfig(max_length=8), "refuse") == []
    with pytest.raises(ConfigError, match=r"prompt 'a negative one'\.\.\. has 15 tokens"):
        prompt_notes(["a --n a negative one"], TextConfig(max_length=8), "refuse")
    (note,) = prompt_notes(["a", "--w 32"], TextConfig(), "refuse")
    assert note.startswith("prompt 2 is empty")


def test_clips_of_a_mixed_run_are_those_that_each_prompt_has_alone(folder: Path) -> None:
    """And a prompt without options has the clip that it had before there were others, bit for bit."""
    saved = saved_model(folder, device="cpu")
    settings = ClipSettings.of(saved.config)
    clips = dict(clips_of(saved, LINES, settings))
    assert [clips[number].shape for number in range(5)] == [
        *((5, 16, 24, 3), (9, 16, 32, 3), (1, 16, 24, 3), (5, 16, 24, 3), (5, 16, 24, 3))
    ]
    plain = dict(clips_of(saved, [LINES[0], "b", "c", "d", LINES[4]], settings))
    assert np.array_equal(clips[0], plain[0]) and np.array_equal(clips[4], plain[4])
    wide = replace(settings, frames=9, height=16, width=32, seed=7)
    assert np.array_equal(clips[1], dict(clips_of(saved, ["a wide disc"], wide))[0])
    away = replace(settings, seed=42, negative_prompt="a blurred square")
    assert np.array_equal(clips[3], dict(clips_of(saved, ["a square"], away))[0])
    assert not np.array_equal(clips[3], dict(clips_of(saved, ["a square"], replace(away, negative_prompt="")))[0])


def test_prompts_that_differ_in_text_and_seed_alone_are_made_together() -> None:
    settings = ClipSettings.of(tiny_run())
    assert [group.numbers for group in groups_of(LINES, settings)] == [(0, 4), (1,), (2,), (3,)]
    (group,) = groups_of(["a", "b --d 9", "c"], settings)
    assert (group.numbers, group.texts, group.seeds) == ((0, 1, 2), ("a", "b", "c"), (0, 9, 2))
    picture = np.zeros((1, 16, 24, 3), np.uint8)
    assert [(one.numbers, len(one.first)) for one in groups_of("abc", settings, [None, picture, None])] == [
        *(((0, 2), 0), ((1,), 1))
    ]


def test_the_command_makes_them_from_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("# two\na disc\na wide disc --w 32 --f 9\n")
    asked = ["sample", "--checkpoint", str(folder), "--prompts", str(tmp_path / "prompts.txt"), "--height", "24"]
    answer = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "x.mp4")])
    assert answer.exit_code == 0, answer.output
    assert read_mp4(tmp_path / "x-00.mp4").shape == (5, 24, 24, 3)
    assert read_mp4(tmp_path / "x-01.mp4").shape == (9, 24, 32, 3)
    assert json.loads((tmp_path / "x.json").read_text()) == ["a disc", "a wide disc --w 32 --f 9"]
    refused = CliRunner().invoke(app, [*asked[:3], "--prompt", "a disc --f 6", "--out", str(tmp_path / "y.mp4")])
    assert refused.exit_code != 0 and "prompt 1 'a disc --f 6': clips of 6 x 16 x 24" in str(refused.exception)


def test_samples_of_a_live_run_are_the_same_clips_with_their_lines_in_every_place(tmp_path: Path) -> None:
    lines = LINES[:3]
    run = mixed_run(lines)
    config = replace(run, sample=replace(run.sample, every=4), checkpoint=replace(run.checkpoint, every=4))
    write_checkpoint(tmp_path, config)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    model, geometry = resolve(config.model)
    modules = Modules(
        config=model,
        geometry=geometry,
        dit=build_dit(model.dit, 5).train(),
        vae=build_vae(model.vae),
        text=build_text(model.text),
    )
    asides, live = Asides(modules, torch.device("cpu")), LiveSamples(config, tmp_path)
    live.on_checkpoint(3)
    event = None
    for clip in live.wanted():
        done = asides.turn(TurnTask(generation=1, step=9, aside=clip, gap_s=0.0, share=0.0, whole=True))
        assert isinstance(done, TurnReport) and not done.failed
        event = live.ended(done)
    assert isinstance(event, SamplesMade)
    names = ["samples/step-3-00.mp4", "samples/step-3-01.mp4", "samples/step-3-02.mp4", "samples/step-3.png"]
    assert list(event.samples) == names
    shapes = [read_mp4(tmp_path / name).shape for name in names[:3]]
    assert shapes == [(5, 16, 24, 3), (9, 16, 32, 3), (1, 16, 24, 3)]
    assert json.loads((tmp_path / "samples" / "step-3.json").read_text()) == list(lines)
    page = samples_html(RunDir.open(tmp_path))
    assert all(f"step-3: {line}" in page for line in lines)


def test_a_contact_sheet_of_several_sizes_has_room_for_the_widest_and_titles_that_may_be_read(tmp_path: Path) -> None:
    videos = [np.full((9, 96, 160, 3), 10, np.uint8), np.full((1, 96, 32, 3), 200, np.uint8)]
    title = "a picture of one frame with a title that is much wider than it is --f 1 --w 32"
    contact_sheet(tmp_path / "s.png", videos, ["a clip", title])
    pixels = np.asarray(Image.open(tmp_path / "s.png"))
    assert pixels.shape[1] == 6 * (160 + 4) - 4 + 2 * 4
    assert ((pixels == 10).all(-1).sum(), (pixels == 200).all(-1).sum()) >= (6 * 96 * 160, 96 * 32)
    assert pixels.shape[0] < 2 * 96 + 4 * 24, "the title is one line"


def test_each_picture_is_cut_to_the_clip_of_its_prompt(tmp_path: Path) -> None:
    for name, color in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
        test_image_to_video.save(tmp_path / f"{name}.png", color)
    config = test_image_to_video.haar_run()
    settings = ClipSettings.of(config)
    prompts = ["a disc", f"a wide disc --w 64 --i {tmp_path}/blue.png"]
    red, blue = first_frames(config, prompts, settings, [tmp_path / "red.png"], "--image")
    assert red is not None and blue is not None and (red.shape, blue.shape) == ((1, 32, 48, 3), (1, 32, 64, 3))
    assert red[..., 0].mean() > 150 and blue[..., 2].mean() > 150
    (alone,) = first_frames(config, prompts[1:], settings)
    assert alone is not None and np.array_equal(alone, blue)
    with pytest.raises(ConfigError, match="starts from a picture: give --image"):
        first_frames(config, prompts, settings)
    with pytest.raises(ConfigError, match=r"prompt 1 .*none.png cannot be read"):
        first_frames(config, [f"a disc --i {tmp_path}/none.png"], settings)
    plain = tiny_run()
    with pytest.raises(
        ConfigError,
        match=r"prompt 2 'a wide disc --w 64 --i .* has --i, and this transformer makes video from",
    ):
        first_frames(plain, prompts, ClipSettings.of(plain))


class Handle:
    """A worker, called at once in this process; rows and clips are what it answers."""

    def __init__(self, worker: ClipWorker) -> None:
        self.make = SimpleNamespace(remote=worker.make)


class Crew:
    """In place of Ray's."""

    def __init__(self, worker: ClipWorker, job: ClipJob) -> None:
        self.worker, self.job, self.counts = worker, job, list[int]()

    def encode(self, prompts: list[str], first: list[np.ndarray | None], count: int, max_losses: int) -> list[Any]:
        self.counts.append(count)
        return list(self.worker.encode(self.job, prompts, first))


def test_workers_that_share_prompts_make_each_with_its_own_settings(folder: Path) -> None:
    saved = saved_model(folder, device="cpu")
    settings = ClipSettings.of(saved.config)
    expected = dict(clips_of(saved, LINES, settings))
    worker, job = ClipWorker(), ClipJob(checkpoint=str(folder), ema=True, device="cpu", settings=settings)
    crew: Any = Crew(worker, job)
    encoded = crews.EncodedJob.of(crew, LINES, [], [0, 1, 2, 3, 4], 3)
    assert crew.counts == [5 + 4], "a negative prompt for each group"
    worker.load(job)
    queue = PromptQueue(5, (), 4)
    queue.group_of = encoded.groups.__getitem__
    handle: Any = Handle(worker)
    while chunk := queue.take(1):
        made: Any = encoded.begin(handle, chunk)
        for index, clip in zip(chunk, made, strict=True):
            assert np.array_equal(clip.shown[0], expected[index][0]) and np.array_equal(
                clip.shown[-1], expected[index][-1]
            )


def test_a_chunk_is_of_one_kind_of_clips() -> None:
    queue = PromptQueue(12, (), 4)
    queue.group_of = lambda index: index >= 2
    assert [queue.take(1) for _ in range(2)] == [[0, 1], [2, 3, 4, 5]]


def test_a_large_clip_is_waited_for_after_small_ones_and_small_ones_as_ever() -> None:
    limit = ChunkLimit()
    limit.took(1, 10.0, work=1.0)
    assert limit.seconds(1, work=20.0) == 900 + 5 * 10 * 400 and limit.seconds(1, work=0.5) == 900 + 5 * 10
    limit.took(1, 600.0, work=20.0)
    assert limit.seconds(1, work=20.0) == 900 + 5 * 4000 and limit.seconds(2, work=1.0) == 900 + 2 * 5 * 600
    settings = ClipSettings.of(tiny_run())
    wide, unguided = settings.of_each(["a --w 48 --s 4", "a --l 1"])
    assert (wide.work, unguided.work) == (4 * settings.work, settings.work / 2)


def test_all_workers_together_make_clips_of_one_kind() -> None:
    settings = ClipSettings.of(tiny_run())
    check_alike(["a disc", "a square --d 7 --n blurred"], settings)
    with pytest.raises(ConfigError, match=r"prompt 2 'a square --w 48' asks for another clip .* leave out --together"):
        check_alike(["a disc", "a square --w 48"], settings)


def test_the_command_refuses_others_together_before_ray_starts(folder: Path, tmp_path: Path) -> None:
    asked = ["sample", "--checkpoint", str(folder), "--prompt", "a disc --w 48", "--out", str(tmp_path / "x.mp4")]
    answer = CliRunner().invoke(app, [*asked, "--device", "cpu", "--workers", "2", "--together"])
    assert answer.exit_code != 0 and "prompt 1 'a disc --w 48' asks for another clip" in str(answer.exception)
