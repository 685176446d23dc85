"""SkyReels-V2: its cases for the tests of all families; levels by frame, and its pipelines' clips."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    DiffusionPipeline,
    SkyReelsV2DiffusionForcingImageToVideoPipeline,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2Pipeline,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
    WanPipeline,
)
from diffusers.pipelines.skyreels_v2 import (
    pipeline_skyreels_v2_diffusion_forcing,
    pipeline_skyreels_v2_diffusion_forcing_i2v,
)
from PIL import Image
from torch import nn
from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

from actors.config import CheckpointConfig
from app.sampling.clips import ClipChanges, ClipSettings, clip_requests, first_frames
from app.sampling.model import saved_model
from app.sampling.sample import run
from app.settings.config import RunConfig
from app.settings.rules import check_levels, check_sample
from app.settings.sections import SampleConfig
from ops.comm.collectives import Group
from ops.config import FlowConfig, ForcingSchedule, FrameLevels
from ops.flow.forced_sampling import history_noise, sample_forced
from ops.flow.forcing import WAITS, block_steps, windows_of
from ops.flow.sampling import SamplerConfig, SampleRequest, initial_noise, sample_latents
from ops.geometry import Geometry
from ops.models.base.config import DiTConfig
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.folders import dit_config, dit_json
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.load import build_dit
from ops.models.ltx.config import LTXConfig
from ops.models.skyreels.config import SkyReelsConfig
from ops.models.skyreels.family import FAMILY
from ops.models.wan.config import WanConfig
from ops.packed.packing import Layout, Sequence
from ops.packed.patches import patchify, unpatchify
from ops.typed import ConfigError
from tests.families import test_wan
from tests.families.kit import FamilyCases, OriginalNames, SmallPipeline, small, their_class, whole
from tests.long import in_default_run
from tests.ops.test_sampling import on_bag

torch.set_num_threads(1)
DIT = SkyReelsConfig(
    num_layers=2, num_heads=2, head_dim=12, ffn_dim=32, freq_dim=16, text_dim=16, in_channels=4, out_channels=4
)


def publish(base: Path) -> Path:
    """A small pipeline as Diffusers itself saves it."""
    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    SkyReelsV2Pipeline(
        tokenizer=ByT5Tokenizer(),
        text_encoder=encoder,
        vae=vae,
        transformer=SkyReelsV2Transformer3DModel(**fields_of(DIT)),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0),
    ).save_pretrained(base)
    return base


def fields_of(dit: SkyReelsConfig) -> dict[str, object]:
    """What the class in Diffusers is made of."""
    return {key: value for key, value in dit_json(dit).items() if not key.startswith("_")}


def settings(folder: Path, **dit: object) -> ModelConfig:
    path = str(folder)
    return ModelConfig(
        dit=SkyReelsConfig(path=path, **dit),  # type: ignore[arg-type]
        vae=VAEConfig(kind="diffusers", path=path),
        text=TextConfig(path=path, max_length=16, pad_to=16),
    )


def prompts(pipeline: DiffusionPipeline, prompt: str, rows: int) -> dict[str, torch.Tensor | None]:
    """The embeddings by WanPipeline's code, which these pipelines have copied; their own wants the package ftfy."""
    names = {"prompt_embeds": prompt, "negative_prompt_embeds": ""}
    encode = WanPipeline._get_t5_prompt_embeds
    made = {name: encode(pipeline, text, max_sequence_length=rows).detach() for name, text in names.items()}
    return {"prompt": None, **made}


def clip(pipeline: SkyReelsV2Pipeline) -> torch.Tensor:
    return pipeline(
        **prompts(pipeline, "a red disc", 16),
        height=32,
        width=48,
        num_frames=5,
        guidance_scale=5.0,
        num_inference_steps=3,
        output_type="latent",
        latents=initial_noise(3, (4, 2, 4, 6))[None],
    ).frames[0]


NARROW = SkyReelsConfig(num_layers=2, num_heads=12, head_dim=4, ffn_dim=96, freq_dim=16)
MODEL = whole(replace(NARROW, diffusion_forcing=True, sample_info=True, frame_rate=16.0))
CASES = FamilyCases(
    variants={
        "": small(SkyReelsConfig),
        "df": small(SkyReelsConfig, diffusion_forcing=True),
        "df at a frame rate": small(SkyReelsConfig, diffusion_forcing=True, sample_info=True),
        "i2v": small(SkyReelsConfig, in_channels=12, first_frame="channels", image_dim=20),
    },
    models={"": MODEL, "i2v": whole(replace(NARROW, first_frame="channels"))},
    presets={"skyreels-v2-df-1.3b": 1.43, "skyreels-v2-df-14b": 14.29, "skyreels-v2-t2v-14b": 14.29},
    lora=("ffn.net.2", "attn2.to_out.0"),
    original=OriginalNames(
        renames=(
            *test_wan.ORIGINAL,
            (r"fps_projection\.net\.0\.proj", "fps_projection.0"),
            (r"fps_projection\.net\.2", "fps_projection.2"),
        ),
        config=replace(DIT, sample_info=True),
    ),
    pipeline=SmallPipeline(
        publish=publish,
        model=settings,
        flow=FlowConfig(flow_shift=8.0),
        request={"prompt": "a red disc", "frames": 5, "height": 32, "width": 48, "guidance_scale": 5.0},
        clip=clip,
        scheduler="Euler, flow shift 8",
    ),
)
GRIDS = ((3, 2, 3), (1, 3, 2), (4, 2, 2))
TEXTS = (7, 12, 1)


@pytest.mark.parametrize("case", ["df", "df at a frame rate"])
def test_packed_clips_with_a_time_for_each_frame_equal_diffusers_one_by_one(case: str) -> None:
    """Forward and gradients, of clips of several lengths and, where the weights take it, frame rates."""
    config = CASES.variants[case]
    reference, model = their_class(config), build_dit(config, seed=0)
    model.load_state_dict(reference.state_dict())
    numbers = torch.Generator().manual_seed(1)
    latents = [torch.randn(4, t, 2 * h, 2 * w, generator=numbers) for t, h, w in GRIDS]
    texts = [torch.randn(length, 24, generator=numbers) for length in TEXTS]
    times = [1000 * torch.rand(grid[0], generator=numbers) for grid in GRIDS]
    rates = (16.0, 24.0, 16.0)
    layout = Layout(
        [
            Sequence(grid, length, frame_rate=rate, frame_times=True)
            for grid, length, rate in zip(GRIDS, TEXTS, rates, strict=True)
        ]
    )
    tokens = layout.local([patchify(latent, (1, 2, 2)) for latent in latents])
    packed = model(tokens, torch.cat(times), torch.cat(texts), layout, Group.solo())
    packed.square().sum().backward()
    for index, rows in enumerate(packed.split(layout.lengths)):
        fps = {"fps": [int(rates[index] == 24)]} if config.sample_info else {}
        inputs = latents[index][None], times[index][None], texts[index][None]
        expected = reference(*inputs, enable_diffusion_forcing=True, **fps).sample[0]
        expected.square().sum().backward()
        made = unpatchify(rows, GRIDS[index], (1, 2, 2), 4)
        torch.testing.assert_close(made, expected, atol=1e-5 * float(expected.detach().abs().max()), rtol=0)
    theirs = {name: weight.grad for name, weight in reference.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, theirs[name], atol=1e-5 * largest, rtol=1e-4, msg=name)


def test_attention_by_blocks_of_frames_is_refused_by_its_name() -> None:
    fields = dit_json(DIT) | {"num_frame_per_block": 5}
    with pytest.raises(ValueError, match="here has num_frame_per_block 5; only 1 is supported"):
        dit_config(fields, DIT, "here")


def test_a_folder_of_diffusion_forcing_is_known_by_its_pipeline() -> None:
    df = DIT.of_pipeline({"_class_name": "SkyReelsV2DiffusionForcingPipeline"})
    assert df.diffusion_forcing and FAMILY.pipeline_class(df) == "SkyReelsV2DiffusionForcingPipeline"
    assert DIT.of_pipeline({"_class_name": "SkyReelsV2Pipeline"}) == DIT
    assert FAMILY.pipeline_class(DIT) == "SkyReelsV2Pipeline"
    assert FAMILY.pipeline_class(replace(DIT, sample_info=True)) == "SkyReelsV2DiffusionForcingPipeline"
    with pytest.raises(ValueError, match="diffusion_forcing is true, and first_frame channels"):
        replace(DIT, diffusion_forcing=True, first_frame="channels")


@pytest.mark.parametrize(
    "dit",
    [replace(NARROW, first_frame="channels"), WanConfig(expert="both"), HunyuanConfig(first_frame="token_replace")],
)
def test_levels_by_frame_are_refused_where_a_clip_has_one_time(dit: DiTConfig) -> None:
    model = whole(dit)
    flow = FlowConfig(frame_levels="rising")
    with pytest.raises(ConfigError, match=r"train\.flow\.frame_levels is rising, and the transformer"):
        check_levels(model, flow)
    check_levels(whole(WanConfig()), flow)


def test_a_transformer_with_one_time_for_a_clip_takes_no_layout_with_one_for_each_frame() -> None:
    model = build_dit(small(HunyuanConfig, num_single_layers=1, pooled_dim=8), 0)
    layout = Layout([Sequence((2, 1, 1), 1, frame_times=True)])
    with pytest.raises(ValueError, match=r"a time for each frame: a transformer of architecture hunyuan"):
        model(torch.zeros(2, 16), torch.zeros(2), torch.zeros(1, 24), layout, Group.solo())


# Sampling by diffusion forcing ----------------------------------------------------------------------------------------

Sampler = Callable[[Group | None, Group | None], torch.Tensor]
SIZE = {"height": 32, "width": 48}
# forcing, and the frames of the clip
SCHEDULES = {
    "all at once": ({}, 17),
    "frame behind frame": ({"ar_step": 2}, 17),
    "block behind block": ({"ar_step": 1, "causal_block_size": 2}, 13),
    "blocks at once": ({"causal_block_size": 2}, 13),
    "three windows": ({"base_num_frames": 13, "overlap_history": 5}, 29),
    "windows with a little noise": ({"base_num_frames": 13, "overlap_history": 5, "addnoise_condition": 20.0}, 21),
    "windows of blocks": (
        {"base_num_frames": 13, "overlap_history": 5, "causal_block_size": 2, "ar_step": 1, "addnoise_condition": 20.0},
        29,
    ),
}


def publish_df(base: Path, **dit: object) -> Path:
    """A small pipeline for diffusion forcing, by UniPC as the published ones."""
    torch.manual_seed(0)
    plain = publish(base / "plain")
    transformer = SkyReelsV2Transformer3DModel(**fields_of(replace(DIT, **dit)))  # type: ignore[arg-type]
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    SkyReelsV2DiffusionForcingPipeline.from_pretrained(plain, transformer=transformer).save_pretrained(base / "df")
    return base / "df"


def give_noise(monkeypatch: pytest.MonkeyPatch, module: ModuleType, seed: int) -> None:
    """Diffusers' pipeline draws the noise of ours: of a window, and of what it takes over in each forward."""
    drawn = {"window": -1, "forward": 0}

    def of_window(shape: tuple[int, ...], **kept: object) -> torch.Tensor:
        drawn.update(window=drawn["window"] + 1, forward=0)
        return initial_noise(seed, shape[1:], drawn["window"])[None]

    def of_history(like: torch.Tensor) -> torch.Tensor:
        drawn["forward"] += 1
        return history_noise(seed, tuple(like.shape[1:]), drawn["window"], drawn["forward"] - 1)[None]

    monkeypatch.setattr(module, "randn_tensor", of_window)
    monkeypatch.setattr(torch, "randn_like", of_history)


def ours_of(
    folder: Path, frames: int, fps: float | None = None, first: tuple[np.ndarray, ...] = (), **forcing: float
) -> Sampler:
    """(group, half of it) -> what `heddle sample` makes before it decodes: four steps, seed 3."""
    saved = saved_model(folder, device="cpu")
    changes = ClipChanges(frames=frames, **SIZE, seed=3, steps=4, guidance_scale=3.0, fps=fps, forcing=forcing)
    settings = ClipSettings.of(saved.config, saved.scheduler).changed(changes)
    saved = saved.at_rate(settings.fps)
    told, model = saved.encode(["a dot"], negative="", first=first), saved.load()
    requests = clip_requests(model, told, settings, first)

    def sampled(group: Group | None, half: Group | None) -> torch.Tensor:
        given = (model.dit, requests, told.negative.text, model.geometry, settings.sampler, group)
        return sample_forced(*given, half=half)[0]

    return sampled


def theirs_of(folder: Path, pipeline: type, frames: int, **asked: object) -> torch.Tensor:
    pipe = pipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    made = pipe(
        **prompts(pipe, "a dot", 512),
        **SIZE,
        num_frames=frames,
        num_inference_steps=4,
        guidance_scale=3.0,
        output_type="latent",
        **asked,
    )
    latent: torch.Tensor = made.frames[0].detach()
    return latent


@pytest.mark.parametrize("case", in_default_run(["all at once", "windows of blocks"], of=SCHEDULES))
def test_a_clip_by_diffusion_forcing_is_the_one_of_the_pipeline(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forcing, frames = SCHEDULES[case]
    folder = publish_df(tmp_path)
    found = ours_of(folder, frames, **forcing)(None, None)
    give_noise(monkeypatch, pipeline_skyreels_v2_diffusion_forcing, 3)
    asked = {"base_num_frames": 97, "overlap_history": 17, **forcing}
    expected = theirs_of(folder, SkyReelsV2DiffusionForcingPipeline, frames, **asked)
    assert found.shape == expected.shape == (4, (frames - 1) // 4 + 1, 4, 6)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fps", [16.0, 24.0])
def test_a_clip_gets_its_frame_rate_as_in_the_pipeline(
    fps: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = publish_df(tmp_path, sample_info=True)
    found = ours_of(folder, 13, fps=fps)(None, None)
    give_noise(monkeypatch, pipeline_skyreels_v2_diffusion_forcing, 3)
    expected = theirs_of(folder, SkyReelsV2DiffusionForcingPipeline, 13, fps=int(fps))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("windows", [{}, {"base_num_frames": 13, "overlap_history": 5, "addnoise_condition": 20.0}])
def test_a_clip_that_begins_with_a_picture_is_the_one_of_the_pipeline(
    windows: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = publish_df(tmp_path)
    picture = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    found = ours_of(folder, 21, first=(picture[None],), **windows)(None, None)
    give_noise(monkeypatch, pipeline_skyreels_v2_diffusion_forcing_i2v, 3)
    asked = {"base_num_frames": 97, "overlap_history": 17, **windows, "image": Image.fromarray(picture)}
    expected = theirs_of(folder, SkyReelsV2DiffusionForcingImageToVideoPipeline, 21, **asked)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("degree", "halves"), [(2, False), (2, True), (4, True)])
def test_a_bag_makes_the_clip_of_one_worker(degree: int, halves: bool, tmp_path: Path) -> None:
    forcing, frames = SCHEDULES["windows of blocks"]
    sampled = ours_of(publish_df(tmp_path), frames, **forcing)
    alone = sampled(None, None)
    for (latent,) in on_bag(degree, halves, lambda group, half: [sampled(group, half)]):
        torch.testing.assert_close(latent, alone, atol=1e-4, rtol=1e-4)


def test_blocks_need_a_bag_that_divides_the_heads(tmp_path: Path) -> None:
    sampled = ours_of(publish_df(tmp_path), 13, causal_block_size=2)
    with pytest.raises(ValueError, match="in a bag of 3, which does not divide the 2 heads"):
        on_bag(3, False, lambda group, half: [sampled(group, half)])


@pytest.mark.parametrize(
    ("config", "geometry"),
    [
        (WanConfig(num_layers=1, text_dim=8), Geometry()),
        (LTXConfig(num_layers=1, text_dim=8), Geometry(vae_stride=(4, 8, 8), patch=(1, 1, 1))),
    ],
)
def test_euler_of_all_frames_at_once_is_sampling_with_one_level(config: DiTConfig, geometry: Geometry) -> None:
    """By runs of other families, whose own samples take no scheduler."""
    torch.manual_seed(0)
    dit = build_dit(config, 0)
    requests = [SampleRequest(text=torch.randn(3, 8), frames=9, height=32, width=48, seed=seed) for seed in (0, 1)]
    sampler = SamplerConfig(steps=3, guidance_scale=2.0, whole_times=True)
    expected = sample_latents(dit, requests, torch.zeros(1, 8), geometry, sampler)
    forced = replace(sampler, forcing=ForcingSchedule())
    for ours, theirs in zip(sample_forced(dit, requests, torch.zeros(1, 8), geometry, forced), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("steps", [1, 3, 10])
@pytest.mark.parametrize("lag", [0, 1, 3, 12])
@pytest.mark.parametrize("ready", [0, 1])
@pytest.mark.parametrize("size", [1, 3])
def test_blocks_take_their_steps_as_in_the_pipeline(blocks: int, steps: int, lag: int, ready: int, size: int) -> None:
    if ready >= blocks:
        return
    times, frames = torch.arange(steps, 0, -1) * 10, blocks * size
    matrix, _, updates, intervals = SkyReelsV2DiffusionForcingPipeline.generate_timestep_matrix(
        None, frames, times, frames, lag, ready * size, size
    )
    rows = [[step for step in row for _ in range(size)] for row in block_steps(blocks, steps, lag, ready)]
    of_step = {WAITS: 999, steps: 0, **dict(enumerate(times.tolist()))}
    assert [[of_step[step] for step in row] for row in rows] == matrix.tolist()
    assert [[0 <= step < steps for step in row] for row in rows] == updates.tolist()
    assert set(intervals) == {(0, frames)}


def test_windows_that_cannot_be_are_refused_with_what_to_choose() -> None:
    schedule = ForcingSchedule(base_num_frames=13, overlap_history=5)
    assert [(one.first, one.frames, one.history) for one in windows_of(schedule, 8, 4)] == [
        (0, 4, 0),
        (2, 4, 2),
        (4, 4, 2),
    ]
    assert [(one.first, one.frames, one.history) for one in windows_of(schedule, 3, 4)] == [(0, 3, 0)]
    with pytest.raises(ValueError, match="both 4 latent frames; a window must add some"):
        windows_of(replace(schedule, base_num_frames=16, overlap_history=14), 8, 4)
    with pytest.raises(
        ValueError, match=r"a window of 4 latent frames is not of whole blocks of 3 \(causal_block_size"
    ):
        windows_of(replace(schedule, causal_block_size=3), 8, 4)
    with pytest.raises(ValueError, match=r"overlap_history 13 must be less than base_num_frames 13"):
        ForcingSchedule(base_num_frames=13, overlap_history=13)


def test_a_long_clip_is_made_by_the_command_and_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder, out = publish_df(tmp_path), tmp_path / "out" / "x.mp4"
    changes = ClipChanges(frames=29, **SIZE, steps=2, forcing={"base_num_frames": 13, "overlap_history": 5})
    assert run(folder, ["a dot"], out, changes=changes, device="cpu")[0] == out and out.stat().st_size > 0
    with pytest.raises(ConfigError, match="a window of 4 latent frames is not of whole blocks of 3"):
        run(folder, ["a dot"], out, changes=replace(changes, forcing={**changes.forcing, "causal_block_size": 3}))
    with pytest.raises(ConfigError, match="a block would make the picture that a clip begins with anew"):
        blocks = replace(changes, forcing={**changes.forcing, "causal_block_size": 2})
        run(folder, ["a dot"], out, changes=blocks, images=[tmp_path / "x.png"])


@pytest.mark.parametrize("levels", ["independent", "rising"])
def test_a_clip_of_a_run_by_levels_of_frames_may_begin_with_a_picture(levels: FrameLevels, tmp_path: Path) -> None:
    """Whether or not first frames were given: such weights know frames with less noise than those after them."""
    Image.new("RGB", (48, 32), "red").save(tmp_path / "x.png")
    sample = SampleConfig(prompts=("a dot",), images=(str(tmp_path / "x.png"),), frames=9, **SIZE)
    config = RunConfig.from_yaml("{run: {name: usual}, model: {dit: {architecture: skyreels}}}")
    config = replace(config, sample=sample, model=MODEL)
    with pytest.raises(ConfigError, match="makes video from text alone"):
        check_sample(sample, CheckpointConfig(), MODEL, FlowConfig())
    assert first_frames(config, sample.prompts, ClipSettings.of(config)) == []
    config = replace(config, train=replace(config.train, flow=FlowConfig(frame_levels=levels)))
    check_sample(sample, CheckpointConfig(), MODEL, config.train.flow)
    (picture,) = first_frames(config, sample.prompts, ClipSettings.of(config))
    assert picture.shape == (1, 32, 48, 3)


def test_pictures_of_a_run_count_for_its_own_prompts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of frames are refused where a clip begins with a picture, and clips of other prompts begin with none."""
    saved = saved_model(publish_df(tmp_path), device="cpu")
    sample = replace(saved.config.sample, prompts=("a square",), images=("x.png",))
    saved = replace(saved, config=replace(saved.config, sample=sample))
    monkeypatch.setattr("app.sampling.sample.saved_model", lambda *given, **named: saved)
    forcing = {"base_num_frames": 13, "overlap_history": 5, "causal_block_size": 2}
    changes = ClipChanges(frames=13, **SIZE, steps=1, forcing=forcing)
    assert run(tmp_path / "df", ["a dot"], tmp_path / "x.mp4", changes=changes, device="cpu")[0].is_file()
    with pytest.raises(ConfigError, match="a block would make the picture that a clip begins with anew"):
        run(tmp_path / "df", [], tmp_path / "x.mp4", changes=changes, device="cpu")


def test_windows_of_tokens_of_several_latent_frames_are_refused_before_the_start() -> None:
    sample = SampleConfig(forcing=ForcingSchedule(), prompts=("a dot",))
    with pytest.raises(ConfigError, match=r"model\.dit\.patch \[2, 2, 2\] is of 2 latent frames"):
        check_sample(sample, CheckpointConfig(), whole(WanConfig(patch=(2, 2, 2))), FlowConfig())


class _Seen(nn.Module):
    """A transformer that predicts nothing and keeps what it is given."""

    config = WanConfig(num_layers=1, text_dim=8)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.times: list[torch.Tensor] = []
        self.tokens: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor, times: torch.Tensor, *rest: object) -> torch.Tensor:
        self.tokens.append(tokens)
        self.times.append(times)
        return torch.zeros_like(tokens)


def test_a_schedule_of_frames_is_the_same_whatever_the_times_of_the_training() -> None:
    """Frames that wait are noise, and the noise on frames that were taken over is of 1000."""
    forcing = ForcingSchedule(base_num_frames=9, overlap_history=5, addnoise_condition=20.0, ar_step=1)
    request = SampleRequest(text=torch.zeros(1, 8), frames=13, height=16, width=16, seed=0)
    usual, unit = _Seen(), _Seen()
    for dit, times in ((usual, 1000), (unit, 1)):
        sampler = SamplerConfig(steps=2, guidance_scale=1.0, num_train_timesteps=times, forcing=forcing)
        sample_forced(dit, [request], torch.zeros(1, 8), Geometry(), sampler)
    assert usual.times[0].tolist() == [1000.0, 999.0, 999.0] and usual.times[-1][0] == 20.0
    for whole_times, of_unit in zip(usual.times, unit.times, strict=True):
        torch.testing.assert_close(of_unit * 1000, whole_times)
    torch.testing.assert_close(unit.tokens, usual.tokens)


@pytest.mark.parametrize("dit", [WanConfig(first_frame="channels"), HunyuanConfig(first_frame="token_replace")])
def test_a_schedule_of_frames_is_refused_where_a_clip_has_one_level(dit: DiTConfig) -> None:
    sample = SampleConfig(forcing=ForcingSchedule(), prompts=("a dot",), images=("x.png",))
    with pytest.raises(ConfigError, match=r"sample\.forcing is given, and the transformer of model\.dit"):
        check_sample(sample, CheckpointConfig(), whole(dit), FlowConfig())


def test_a_published_clip_of_text_to_video_is_by_the_scheduler_of_its_folder(tmp_path: Path) -> None:
    folder = publish(tmp_path)
    saved = saved_model(folder, device="cpu")
    assert saved.scheduler is not None and saved.config.sample.forcing is None
    changes = ClipChanges(frames=13, **SIZE, seed=3, steps=4, guidance_scale=3.0)
    settings = ClipSettings.of(saved.config, saved.scheduler).changed(changes)
    told, model = saved.encode(["a dot"], negative=""), saved.load()
    requests = clip_requests(model, told, settings)
    (found,) = sample_latents(model.dit, requests, told.negative.text, model.geometry, settings.sampler)
    expected = theirs_of(folder, SkyReelsV2Pipeline, 13, latents=initial_noise(3, (4, 4, 4, 6))[None])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_published_clip_of_diffusion_forcing_has_the_windows_of_its_weights(tmp_path: Path) -> None:
    sample = saved_model(publish_df(tmp_path), device="cpu").config.sample
    assert sample.forcing == ForcingSchedule(base_num_frames=97, overlap_history=17)
    assert (sample.frames, sample.height, sample.width, sample.fps, sample.guidance_scale) == (97, 544, 960, 24.0, 6.0)
