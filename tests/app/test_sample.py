"""`heddle sample`: clips from a checkpoint folder, the right weights in them, files that open, errors in a sentence."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import av
import numpy as np
import pytest
import torch
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from PIL import Image, ImageDraw
from typer.testing import CliRunner

from actors.config import TrainConfig
from actors.state import checkpoint_files as checkpoint
from app.cli import app
from app.drawing.text import font_of, lines_of
from app.drawing.video import SHEET_CLIPS, contact_sheet, read_mp4, sheet_frames, write_mp4
from app.records import progress
from app.sampling import clips, sample
from app.sampling import model as sampled
from app.sampling.clips import (
    ClipChanges,
    ClipOrder,
    ClipSettings,
    clip_files,
    clips_of,
    is_clip_folder,
    make_clips,
    sample_run,
    write_clips,
)
from app.sampling.model import SavedModel, saved_model
from app.sampling.sample import default_out, run
from app.settings.config import RunConfig
from app.settings.notes import sample_notes
from app.settings.prompts import prompt_notes, read_prompts
from app.settings.rules import check_frame_rate
from app.settings.sections import RunSection, SampleConfig
from data.config import DataConfig
from ops.config import ForcingSchedule
from ops.flow.sampling import SampleRequest, sample_latents
from ops.geometry import Geometry
from ops.models.added_lora import LoraFile
from ops.models.base.config import DiTConfig
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.flux.config import FluxConfig
from ops.models.folders import resolve
from ops.models.load import build_dit, build_text, build_vae
from ops.models.stdit3.config import STDiT3Config
from ops.models.text import TextEncoder
from ops.models.wan.config import WanConfig
from ops.shards import ShardState
from ops.typed import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["a red circle", "a blue square moving up"]


def tiny_run(**model: object) -> RunConfig:
    dit = WanConfig(
        num_layers=1, num_heads=2, head_dim=12, ffn_dim=32, freq_dim=16, text_dim=16, in_channels=8, out_channels=8
    )
    modules = ModelConfig(dit=dit, vae=VAEConfig(spatial=4, channels=8), text=TextConfig(d_model=16, num_layers=1))
    return RunConfig(
        run=RunSection(name="tiny"),
        model=modules,
        sample=SampleConfig(prompts=("a disc",), steps=2, frames=5, height=16, width=24),
    )


def write_checkpoint(run: Path, config: RunConfig, step: int = 3) -> Path:
    """A checkpoint of two shards whose weights are those of seed 1, and their EMA those of seed 2."""
    folder = checkpoint.step_folder(run / "checkpoints", step)
    checkpoint.begin(folder)
    resolved, _ = resolve(config.model)
    flat = {}
    for name, seed in [("master", 1), ("ema", 2)]:
        module = build_dit(resolved.dit, seed)
        flat[name] = torch.cat([p.detach().flatten() for p in module.parameters()]).numpy()
    total = len(flat["ema"])
    half = total // 2
    for lo, hi in [(0, half), (half, total)]:
        checkpoint.write_shard(
            folder,
            ShardState(
                updates=step, lo=lo, hi=hi, total=total, arrays={name: array[lo:hi] for name, array in flat.items()}
            ),
        )
    parameters = [{"name": name, "shape": list(p.shape)} for name, p in module.named_parameters()]
    checkpoint.seal(folder, {"step": step, "parameters": parameters, "config": config.to_yaml()})
    return folder


def decode(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def weights_of(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_ema_weights_by_default_and_raw_ones_when_asked(tmp_path: Path) -> None:
    config = tiny_run()
    write_checkpoint(tmp_path, config)
    resolved, _ = resolve(config.model)
    assert torch.equal(weights_of(saved_model(tmp_path).load().dit), weights_of(build_dit(resolved.dit, 2)))
    assert torch.equal(weights_of(saved_model(tmp_path, ema=False).load().dit), weights_of(build_dit(resolved.dit, 1)))


@pytest.mark.parametrize("what", ["encode", "load", "modules"])
def test_what_makes_clips_attends_as_the_workers_of_a_run(what: str, tmp_path: Path, cudnn_attention: None) -> None:
    write_checkpoint(tmp_path, tiny_run())
    saved = saved_model(tmp_path)
    {"encode": lambda: saved.encode(PROMPTS, ""), "load": saved.load, "modules": saved.modules}[what]()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_attention_that_this_device_lacks_becomes_auto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_run()
    dit = replace(config.model.dit, attention="flash3")
    write_checkpoint(tmp_path, replace(config, model=replace(config.model, dit=dit)))
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert saved_model(tmp_path).load().config.model.dit.attention == "auto"
    assert "flash3 needs a CUDA device" in capsys.readouterr().out


def test_several_prompts_make_numbered_clips_and_one_sheet(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_run())
    files = run(tmp_path, PROMPTS, tmp_path / "out" / "x.mp4", changes=ClipChanges(steps=1, frames=9, seed=4))
    assert [file.name for file in files] == ["x-00.mp4", "x-01.mp4", "x.png"]
    assert decode(files[0]).shape == (9, 16, 24, 3)
    assert Image.open(files[2]).size[0] > 2 * 24


def test_a_clip_is_a_file_and_is_told_before_the_next_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path, tiny_run())
    whole, sampled = clips.sample_latents, list[SampleRequest]()

    def until_interrupted(dit: torch.nn.Module, batch: list[SampleRequest], *given: Any) -> list[torch.Tensor]:
        if len(sampled) == 3:
            raise KeyboardInterrupt
        sampled.extend(batch)
        return whole(dit, batch, *given)

    monkeypatch.setattr(clips, "sample_latents", until_interrupted)
    monkeypatch.setattr(clips, "batch_limit", lambda *given: 1)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, ["a", "b --f 9", "c", "d"], tmp_path / "out" / "x.mp4", changes=ClipChanges(steps=1))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["x-00.mp4", "x-02.mp4", "x-03.mp4"]
    begun, *lines = capsys.readouterr().out.splitlines()
    assert begun == "making    4 clips of 5x16x24, 9x16x24"
    left = [re.fullmatch(r"(\d)/4 clips, 0:\d\d:\d\d left", line) for line in lines]
    assert [found and found[1] for found in left] == ["1", "2", "3"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("moves", [False, True], ids=["log", "terminal"])
def test_steps_of_the_only_clip_are_shown(moves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 14B takes minutes for them."""
    write_checkpoint(tmp_path, tiny_run())
    out, err = io.StringIO(), Terminal() if moves else io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    seconds = count(0, 12)  # of which each step takes one
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    run(tmp_path, ["a"], tmp_path / "x.mp4", changes=ClipChanges(steps=6), device="cpu")
    begun, *lines, clip, sheet = out.getvalue().splitlines()
    assert begun == "making    1 clip of 5x16x24" and (clip, sheet) == (f"{tmp_path}/x.mp4", f"{tmp_path}/x.png")
    assert lines == ([] if moves else ["steps of 1 clip: 3/6, 0:00:36 left", "steps of 1 clip: 6/6, 0:00:00 left"])
    assert ("6/6" in err.getvalue()) == moves


def test_clips_are_of_the_checkpoint_that_names_them_while_a_run_writes_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, tiny_run())
    read, orders, steps, later = sample.saved_model, list[ClipOrder](), list[int](), count(9)

    def beside_a_run(path: Path, **given: Any) -> SavedModel:
        write_checkpoint(tmp_path, tiny_run(), step=next(later))
        saved = read(path, **given)
        write_checkpoint(tmp_path, tiny_run(), step=next(later))
        steps.append(saved.step)
        return saved

    def crew(order: ClipOrder) -> list[Path]:
        orders.append(order)
        return []

    monkeypatch.setattr(sample, "saved_model", beside_a_run)
    ended = CliRunner().invoke(app, ["sample", "--checkpoint", str(tmp_path), "--device", "cpu", "--steps", "1"])
    assert ended.exit_code == 0 and (tmp_path / "samples" / "step-3.mp4").is_file() and steps == [3]
    run(tmp_path, [], tmp_path / "x.mp4", crew=crew)
    assert orders[0].checkpoint == tmp_path / "checkpoints" / f"step-{steps[1]}", "as its settings"


def test_command_and_library_make_the_same_clip(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_run())
    file, sheet = sample_run(tmp_path)
    assert (file.parent, file.name, sheet.name) == (tmp_path / "samples", "step-3.mp4", "step-3.png")
    command = run(tmp_path / "checkpoints" / "step-3", [], tmp_path / "y.mp4")
    assert np.array_equal(decode(file), decode(command[0]))


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=len)
def test_clips_of_typed_prompts_replace_none_of_the_run(tmp_path: Path, prompts: list[str]) -> None:
    write_checkpoint(tmp_path, tiny_run())
    own = sample_run(tmp_path)
    typed = run(tmp_path, prompts, default_out(tmp_path, prompts), changes=ClipChanges(steps=1))
    assert default_out(tmp_path) == own[0]
    assert not set(own) & set(typed)
    assert json.loads((tmp_path / "samples" / "step-3.json").read_text()) == ["a disc"]
    assert json.loads(default_out(tmp_path, prompts).with_suffix(".json").read_text()) == prompts


def test_clips_of_typed_prompts_replace_none_of_other_prompts(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_run())
    typed = [
        ["A red Circle!"],
        ["a red circle"],
        ["a red circle", "b"],
        ["红色的圆"],
        ["?"],
        ["01"],
        ["w" * 500 + "/../x"],
    ]
    names = [default_out(tmp_path, prompts).name for prompts in typed]
    assert names[0].startswith("step-3-a-red-circle-") and names[3].startswith("step-3-红色的圆-")
    assert len(set(names)) == len(typed)
    assert names == [default_out(tmp_path, prompts).name for prompts in typed]
    assert all("/" not in name for name in names)


@pytest.mark.parametrize("letter", ["x", "я", "猫", "𠀋"])  # of 1 to 4 bytes
def test_names_of_prompts_are_cut_by_bytes_and_within_no_letter(tmp_path: Path, letter: str) -> None:
    """Or a clip that has been made could not be written: a file system counts bytes."""
    write_checkpoint(tmp_path, tiny_run())
    files = [LoraFile(path=f"{letter * many}.safetensors", scale=0.8) for many in (200, 201)]
    for shift in range(4):
        prompts = ["x" * shift + letter * 20 + f" {letter * 200}" * 5]
        names = [default_out(tmp_path, prompts, loras).name for loras in ((), files[:1], files[1:])]
        assert len(set(names)) == 3 and all(100 < len(os.fsencode(name)) <= 154 for name in names)
        assert set("".join(names)) <= {*"step-3.mp4x", letter, *"0123456789abcdef"}


def test_a_name_that_is_too_long_is_refused_before_the_work(tmp_path: Path) -> None:
    for letters in ("x" * 240, "猫" * 80):
        with pytest.raises(ConfigError, match=r"\.mp4 cannot be written \(File name too long\).* or a shorter name"):
            run(tmp_path / "none", ["a disc"], tmp_path / f"{letters}.mp4")
    assert not any(tmp_path.iterdir())


def test_seed_of_a_prompt_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_run())
    saved = saved_model(tmp_path)
    settings = ClipSettings.of(saved.config)
    both = dict(clips_of(saved, PROMPTS, settings))
    alone = dict(clips_of(saved, PROMPTS[:1], settings))
    assert np.abs(both[0].astype(int) - alone[0].astype(int)).max() <= 1  # rounding to 8 bits
    assert not np.array_equal(both[0], both[1])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"prompts": [], "out": "x.avi"}, r"must end in \.mp4"),
        (
            {"prompts": PROMPTS, "out": "x.mp4", "changes": ClipChanges(frames=6)},
            r"clips of 6 x 16 x 24 .* cannot be made: 6 frames: a causal VAE of temporal stride 4 takes 4\*k\+1",
        ),
        ({"prompts": PROMPTS, "out": "x.mp4", "changes": ClipChanges(steps=0)}, "0 sampling steps"),
        ({"prompts": PROMPTS, "out": "x.mp4", "device": "gpu"}, "--device 'gpu' is not one of auto, cpu, cuda"),
        pytest.param(
            {"prompts": PROMPTS, "out": "x.mp4", "device": "cuda"},
            "no GPU of this machine can be used",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
    ],
)
def test_wrong_requests_are_one_sentence(tmp_path: Path, arguments: dict[str, object], sentence: str) -> None:
    write_checkpoint(tmp_path, tiny_run())
    out = tmp_path / str(arguments.pop("out"))
    with pytest.raises(ValueError, match=sentence):
        run(tmp_path, out=out, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "changes"), [("a disc", ClipChanges(steps=1001)), ("a disc --s 1001", None), ("a disc", None)]
)
def test_more_steps_than_diffusion_has_times_are_refused_before_any_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: str, changes: ClipChanges | None
) -> None:
    """Also of a run of before that was known."""
    monkeypatch.setattr(sample, "write_clips", lambda *given: pytest.fail("clips are made"))
    config = RunConfig.load(ROOT / "configs" / "runs" / "cogvideox-tiny.yaml")
    own = 20 if changes or "--s" in prompt else 1001
    write_checkpoint(tmp_path / "run", replace(config, sample=replace(config.sample, steps=own)))
    with pytest.raises(ConfigError, match=r"clips of 1001 steps .* cannot be made: .* with 1000 times"):
        run(tmp_path / "run", [prompt], tmp_path / "out", changes=changes, device="cpu")


def test_torn_and_missing_checkpoints_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tiny_run())
    (folder / checkpoint.COMPLETE).unlink()
    with pytest.raises(ConfigError, match="is no complete checkpoint and holds none"):
        saved_model(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        saved_model(tmp_path / "elsewhere")


def test_mp4_keeps_colours_and_frames(tmp_path: Path) -> None:
    video = np.zeros((7, 32, 48, 3), np.uint8)
    video[:, :, :24] = (200, 60, 40)
    video[:, :, 24:] = (30, 90, 210)
    write_mp4(tmp_path / "v.mp4", video, fps=12.5)
    back = decode(tmp_path / "v.mp4")
    assert back.shape == video.shape
    assert np.abs(back[:, 4:-4, 4:20].astype(int) - video[:, 4:-4, 4:20]).max() < 12  # 8-bit YUV, lossy
    with av.open(str(tmp_path / "v.mp4")) as container:
        assert float(container.streams.video[0].average_rate or 0) == 12.5


def test_mp4_is_in_bt709_and_says_so(tmp_path: Path) -> None:
    colour = (30, 200, 40)
    write_mp4(tmp_path / "v.mp4", np.full((3, 720, 1280, 3), colour, np.uint8), fps=24.0)
    with av.open(str(tmp_path / "v.mp4")) as container:
        context = container.streams.video[0].codec_context
        assert (context.colorspace, context.color_range) == (Colorspace.ITU709, ColorRange.MPEG)
        assert (context.color_primaries, context.color_trc) == (ColorPrimaries.BT709, ColorTrc.BT709)
        luma = next(container.decode(video=0)).to_ndarray()[:720]
    expected = 16 + 219 / 255 * np.dot((0.2126, 0.7152, 0.0722), colour)  # of BT.601 128, not 147
    assert np.abs(luma - expected).max() <= 2
    assert np.abs(read_mp4(tmp_path / "v.mp4").astype(int) - colour).max() <= 3


def test_contact_sheet_shows_the_frames(tmp_path: Path) -> None:
    videos = [np.full((5, 96, 64, 3), shade, np.uint8) for shade in (10, 200)]
    contact_sheet(tmp_path / "s.png", videos, ["dark", "bright and a long title " * 20])
    pixels = np.asarray(Image.open(tmp_path / "s.png"))
    assert ((pixels == 10).all(-1).sum(), (pixels == 200).all(-1).sum()) >= (5 * 96 * 64, 5 * 96 * 64)


def test_a_contact_sheet_of_many_large_clips_takes_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = list[np.ndarray]()

    def sheet(path: Path, videos: Sequence[np.ndarray], titles: Sequence[str], columns: int) -> None:
        kept.extend(videos)
        contact_sheet(path, [video[:, ::8, ::8] for video in videos], titles, columns)

    monkeypatch.setattr(clips, "write_mp4", lambda path, video, fps: path.touch())
    monkeypatch.setattr(clips, "contact_sheet", sheet)
    large = np.full((8, 720, 1280, 3), 90, np.uint8)
    *files, page = write_clips(tmp_path / "x", ((number, large) for number in range(200)), ["a disc"] * 200, 8.0)
    assert len(files) == 200 and all(file.is_file() for file in files)
    assert len(kept) == SHEET_CLIPS and all(video.nbytes <= 3 << 20 for video in kept)
    assert np.array_equal(sheet_frames(kept[0]), kept[0]) and (kept[0] == 90).all()
    picture = np.zeros((1, 1024, 1024, 3), np.uint8)
    assert sheet_frames(picture).shape == picture.shape, "a picture stays as it is"
    contact_sheet(tmp_path / "all.png", [video[:, ::8, ::8] for video in kept], ["a disc"] * SHEET_CLIPS, 2)
    assert Image.open(page).height > Image.open(tmp_path / "all.png").height, "a line says how many more there are"


def test_text_of_pictures_has_the_letters_of_a_font_and_keeps_to_its_width() -> None:
    font = font_of("grünes Квадрат")

    def drawn(letter: str) -> bytes:
        picture = Image.new("L", (16, 16))
        ImageDraw.Draw(picture).text((1, 1), letter, fill=255, font=font)
        return picture.tobytes()

    assert all(drawn(letter) != drawn("\uffff") for letter in "üКа")
    text = "绿色的方块在黑色背景上移动" * 9 + " a word"
    lines = lines_of(text, 200, font_of(text))
    assert all(font_of(text).getlength(line) <= 200 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "") and lines[-1].endswith("word")


def test_contact_sheet_refuses_what_is_no_clip(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be uint8 \[T, H, W, 3\]; this one is float64"):
        contact_sheet(tmp_path / "s.png", [np.zeros((1, 8, 8, 3))], ["x"])


def test_clips_are_made_with_the_autocast_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """In `heddle sample` and in the samples of a run, which share these settings: products run in bfloat16."""
    config = RunConfig(run=RunSection(name="t"), train=TrainConfig(autocast="bfloat16"))
    assert not ClipSettings.of(RunConfig(run=RunSection(name="t"))).sampler.autocast
    sampler = replace(ClipSettings.of(config).sampler, steps=1)
    seen = set()

    class Probe(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(64))

        def forward(self, x: torch.Tensor, *rest: object) -> torch.Tensor:
            y = x @ self.weight[: x.shape[1], : x.shape[1]]
            seen.add(y.dtype)
            return y

    probe = Probe()
    probe.config = SimpleNamespace(
        out_channels=16, patch=(1, 2, 2), takes_guidance=False, diffusion=None, in_halves=None
    )
    request = SampleRequest(text=torch.zeros(2, 8), frames=1, height=16, width=16, seed=0)
    sample_latents(probe, [request], torch.zeros(1, 8), Geometry(patch=(1, 2, 2)), sampler)
    assert seen == {torch.bfloat16}


def test_a_prompts_file_has_one_prompt_per_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a red disc\n\n  a blue square \n", encoding="utf-8")
    assert read_prompts(file) == ["a red disc", "a blue square"]
    file.write_text(" \n")
    with pytest.raises(ConfigError, match="has no prompt; write one on each line"):
        read_prompts(file)
    with pytest.raises(ConfigError, match=r"nothing\.txt cannot be read \(No such file or directory\)"):
        read_prompts(tmp_path / "nothing.txt")


def test_a_place_that_cannot_be_written_is_refused_before_the_work() -> None:
    with pytest.raises(ConfigError, match=r"--out /proc/x\.mp4 cannot be written"):
        run(Path("no-checkpoint-is-looked-at"), ["a"], Path("/proc/x.mp4"))


@pytest.mark.parametrize("out", ["new/deep", "new/x.mp4", "there/new"])
def test_what_is_refused_leaves_no_folder(tmp_path: Path, out: str) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError):
        run(tmp_path / "no-checkpoint", ["a"], tmp_path / out)
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_a_prompt_that_is_too_long_is_cut_or_refused() -> None:
    text = TextConfig(max_length=8)
    prompts = ["a disc", "a red circle", "a red circle"]
    (note,) = prompt_notes(prompts, text, "cut")
    assert note.startswith("prompt 'a red circle'... has 13 tokens; those beyond model.text.max_length 8 are cut")
    with pytest.raises(ConfigError, match=r"has 13 tokens, and model\.text\.max_length is 8\. Shorten it, or have"):
        prompt_notes(prompts, text, "refuse")
    assert prompt_notes(prompts, TextConfig(max_length=13), "refuse") == []


def test_guidance_moves_away_from_the_negative_prompt_of_the_run_where_none_is_given() -> None:
    config = tiny_run()
    settings = ClipSettings.of(replace(config, sample=replace(config.sample, negative_prompt="blurred")))
    assert settings.negative_prompt == settings.changed(ClipChanges()).negative_prompt == "blurred"
    assert settings.changed(ClipChanges(negative_prompt="")).negative_prompt == ""
    assert ClipSettings.of(config).negative_prompt == ""


def test_a_folder_that_is_there_may_have_a_dot_in_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "wan2.1"
    assert not is_clip_folder(folder)
    folder.mkdir()
    assert clip_files(folder, 2)[0] == [folder / "sample-00.mp4", folder / "sample-01.mp4"]
    assert clip_files(tmp_path / "wan2.2.mp4", 1)[0] == [tmp_path / "wan2.2.mp4"]


def test_forcing_is_changed_or_left_out_by_options() -> None:
    config = tiny_run()
    config = replace(config, sample=replace(config.sample, forcing=ForcingSchedule(ar_step=5)))
    settings = ClipSettings.of(config)
    changed = settings.changed(ClipChanges(forcing={"causal_block_size": 2})).sampler.forcing
    assert changed == ForcingSchedule(ar_step=5, causal_block_size=2)
    assert settings.changed(ClipChanges(no_forcing=True)).sampler.forcing is None
    both = CliRunner().invoke(app, ["sample", "--checkpoint", "x", "--no-forcing", "--ar-step", "5"])
    assert both.exit_code == 2 and "--ar-step, one of the two" in both.output


def test_the_command_and_the_start_of_a_run_refuse_what_is_too_long(tmp_path: Path) -> None:
    config = tiny_run()
    config = replace(config, model=replace(config.model, text=replace(config.model.text, max_length=16)))
    strict = replace(config.sample, prompts=("a disc that is far too long",), long_prompts="refuse", every=4)
    write_checkpoint(tmp_path, replace(config, sample=strict))
    with pytest.raises(ConfigError, match=r"prompt 'a disc that is far too long'\.\.\. has 28 tokens"):
        run(tmp_path, [], tmp_path / "x.mp4")
    assert run(tmp_path, ["a disc"], tmp_path / "x.mp4")
    with pytest.raises(ConfigError, match="prompt 'a negative prompt'"):
        run(tmp_path, ["a disc"], tmp_path / "x.mp4", changes=ClipChanges(negative_prompt="a negative prompt"))
    assert run(tmp_path, [], tmp_path / "x.mp4", long_prompts="cut")
    with pytest.raises(ConfigError, match="has 28 tokens"):
        sample_notes(replace(config, sample=strict))
    (note,) = sample_notes(replace(config, sample=replace(strict, long_prompts="cut")))
    assert note.endswith("those beyond model.text.max_length 16 are cut.")
    assert sample_notes(replace(config, sample=replace(strict, every=0))) == []
    away = replace(strict, prompts=("a disc",), negative_prompt="a disc that is far too blurred")
    with pytest.raises(ConfigError, match=r"prompt 'a disc that is far too blurred'\.\.\. has 31 tokens"):
        sample_notes(replace(config, sample=away))


def test_an_empty_prompt_is_named() -> None:
    (note,) = prompt_notes(["a disc", " ", ""], TextConfig(), "refuse")
    assert note == "prompts 2, 3 are empty: their clips are what the model makes without any text."


def test_a_frame_rate_goes_to_a_transformer_that_takes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not only the file has it: the clip is another one, as with a model of that rate."""
    dit = STDiT3Config(num_layers=1, num_heads=2, head_dim=12, ffn_dim=96, frame_rate=6.0)
    config = tiny_run()
    config = replace(config, model=replace(config.model, dit=dit))
    write_checkpoint(tmp_path, config)
    saved = saved_model(tmp_path, device="cpu")
    own, other = ClipSettings.of(saved.config), ClipSettings.of(saved.config).changed(ClipChanges(fps=24.0))
    assert own.fps == 6.0, "not the 8 of sample.fps"
    told = saved.encode(PROMPTS[:1], "")
    clips = [make_clips(saved.at_rate(fps).load(), told, own)[0] for fps in (6.0, 24.0)]
    assert not np.array_equal(*clips)
    file, _ = run(tmp_path, PROMPTS[:1], tmp_path / "x.mp4", changes=ClipChanges(fps=24.0), device="cpu")
    assert "note: the transformer gets 24 frames per second" in capsys.readouterr().out
    plain = tmp_path / "plain.mp4"
    write_mp4(plain, clips[1], other.fps)
    assert np.array_equal(decode(file), decode(plain))
    with pytest.raises(ConfigError, match=r"sample\.fps is 24, and the transformer of model\.dit gets 6 frames"):
        check_frame_rate(config.model, DataConfig(fps=6.0), SampleConfig(fps=24.0))


def test_a_transformer_of_pictures_makes_pictures(tmp_path: Path) -> None:
    dit = FluxConfig(num_layers=1, num_single_layers=1, num_heads=2, head_dim=16, ffn_dim=128, guidance_embeds=True)
    text = TextConfig(kind="flux", d_model=16, num_heads=2, num_layers=1, pooled_dim=8, max_length=12)
    model = ModelConfig(dit=dit, vae=VAEConfig(temporal=1, spatial=4, channels=8), text=text)
    config = replace(tiny_run(), model=model, sample=SampleConfig(steps=2, height=16, width=24))
    folder = write_checkpoint(tmp_path / "run", config)
    video, sheet = run(folder, ["a disc"], tmp_path / "out", device="cpu")
    with av.open(str(video)) as file:
        assert len(list(file.decode(video=0))) == 1
    assert Image.open(sheet).width > 0
    with pytest.raises(ConfigError, match="--frames is 5, and this transformer makes pictures"):
        run(folder, ["a disc"], tmp_path / "out", changes=ClipChanges(frames=5), device="cpu")


# What is in memory, and in which precision --------------------------------------------------------------------------


class Counted:
    """A text encoder that counts its calls and the encoders that are there."""

    calls: ClassVar[list[int]] = []
    alive = 0

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder, self.dim = encoder, encoder.dim
        Counted.alive += 1

    def __del__(self) -> None:
        Counted.alive -= 1

    def encode(self, captions: list[str], pictures: Sequence[np.ndarray] = ()) -> list[torch.Tensor]:
        Counted.calls.append(len(captions))
        return self._encoder.encode(captions, pictures)


def test_prompts_are_encoded_once_and_the_encoder_is_gone_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, tiny_run())
    plain = run(tmp_path, [*PROMPTS, "a dot"], tmp_path / "x.mp4")
    alive: list[int] = []
    Counted.calls.clear()
    monkeypatch.setattr(sampled, "build_text", lambda config, device: Counted(build_text(config, device)))

    def counted(*given: object) -> torch.nn.Module:
        alive.append(Counted.alive)
        return build_dit(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(sampled, "build_dit", counted)
    files = run(tmp_path, [*PROMPTS, "a dot"], tmp_path / "y.mp4")
    assert (Counted.calls, alive) == ([4], [0])  # three prompts and the empty one
    assert all(np.array_equal(decode(one), decode(other)) for one, other in zip(plain[:3], files[:3], strict=True))


@pytest.mark.parametrize(
    ("train", "dtype"),
    [
        (TrainConfig(), torch.float32),
        (TrainConfig(autocast="bfloat16"), torch.bfloat16),
        (TrainConfig(parameter_dtype="bfloat16"), torch.bfloat16),
    ],
)
def test_weights_lie_on_a_gpu_in_the_precision_that_they_multiply_in(
    train: TrainConfig, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read straight to it, and frozen: nothing of them is there twice. The GPU is the CPU here."""
    write_checkpoint(tmp_path, replace(tiny_run(), train=train))
    asked: list[tuple[torch.dtype, torch.device]] = []

    def on_cpu(config: DiTConfig, seed: int, dtype: torch.dtype, device: torch.device, *rest: bool) -> torch.nn.Module:
        asked.append((dtype, device))
        return build_dit(config, seed, dtype)

    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(sampled, "pick_device", lambda name: cuda)
    monkeypatch.setattr(sampled, "build_dit", on_cpu)
    monkeypatch.setattr(sampled, "build_vae", lambda config, device: build_vae(config))
    model = saved_model(tmp_path).load()
    assert asked == [(dtype, cuda)] and model.device == cuda
    assert {p.dtype for p in model.dit.parameters()} == {dtype}
    assert not any(p.requires_grad for p in model.dit.parameters())


def test_a_clip_of_weights_in_bfloat16_is_near_that_of_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_run()
    write_checkpoint(tmp_path, replace(config, train=TrainConfig(autocast="bfloat16")))
    saved = saved_model(tmp_path, device="cpu")
    settings = ClipSettings.of(saved.config)
    assert settings.sampler.autocast
    told = saved.encode(PROMPTS, "")
    plain = replace(settings, sampler=replace(settings.sampler, autocast=False))
    expected, casts = (make_clips(saved.load(), told, chosen) for chosen in (plain, settings))
    monkeypatch.setattr(sampled, "weights_dtype", lambda train, device: torch.bfloat16)
    model = saved.load()
    assert next(model.dit.parameters()).dtype == torch.bfloat16
    for half in (make_clips(model, told, settings), make_clips(model, told, plain)):
        for one, cast, clip in zip(half, casts, expected, strict=True):
            away, cast_away = (np.abs(found.astype(int) - clip).mean() for found in (one, cast))
            assert away < 3 and cast_away < 3, (away, cast_away)
    assert np.abs(expected[0].astype(int) - expected[1]).mean() > 10, "another prompt is another clip"
