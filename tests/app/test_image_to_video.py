"""Image to video from the command line: clips from a picture, the exported pipeline, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    CogVideoXImageToVideoPipeline,
    DiffusionPipeline,
    LTXImageToVideoPipeline,
    SkyReelsV2ImageToVideoPipeline,
    WanImageToVideoPipeline,
    WanTransformer3DModel,
)
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from app.export import export
from app.sampling.clips import (
    ClipChanges,
    ClipSettings,
    clip_requests,
    clips_of,
    first_frames,
    make_clips,
    sample_run,
)
from app.sampling.model import saved_model
from app.sampling.pictures import for_each, read_picture
from app.sampling.sample import run
from app.settings.config import RunConfig
from app.settings.resume import Change, is_refused
from app.settings.sections import RunSection, SampleConfig
from data.config import DataConfig
from ops.config import FlowConfig
from ops.flow.sampling import initial_noise, sample_latents
from ops.models.cogvideox import family as cogvideox
from ops.models.cogvideox.config import CogVideoXConfig
from ops.models.config import ImageConfig, ModelConfig, TextConfig, VAEConfig
from ops.models.families import FAMILIES
from ops.models.folders import dit_json, resolve
from ops.models.image import random_clip
from ops.models.skyreels.config import SkyReelsConfig
from ops.models.wan.config import WanBlocksConfig, WanConfig
from ops.models.wan.family import FAMILY
from ops.packed.patches import patchify, unpatchify
from ops.typed import ConfigError, as_plain
from tests.app.test_export import write_checkpoint
from tests.app.test_published_schedulers import put_scheduler
from tests.families import test_cogvideox, test_ltx
from tests.families.kit import their_class
from tests.long import in_default_run
from tests.ops import test_text_picture

DIT = WanConfig(num_layers=1, num_heads=2, head_dim=12, ffn_dim=32, freq_dim=16, first_frame="channels")
SKYREELS = SkyReelsConfig(num_layers=1, num_heads=2, head_dim=12, ffn_dim=32, freq_dim=16, first_frame="channels")
IMAGE = ImageConfig(d_model=16, num_layers=2, num_heads=2)
SHOWN = SampleConfig(prompts=("a disc",), images=("a.png",), steps=2, frames=5, height=32, width=48)


def haar_run(**dit: object) -> RunConfig:
    model = ModelConfig(
        dit=replace(DIT, **dit), vae=VAEConfig(channels=4), text=TextConfig(d_model=16, num_layers=1), image=IMAGE
    )
    return RunConfig(run=RunSection(name="tiny"), model=model, sample=SHOWN)


def save(path: Path, color: tuple[int, int, int], size: tuple[int, int] = (48, 32)) -> Path:
    Image.new("RGB", size, color).save(path)
    return path


def test_the_picture_decides_the_clip(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", haar_run())
    red, blue = save(tmp_path / "red.png", (200, 30, 30)), save(tmp_path / "blue.png", (30, 30, 200))
    saved = saved_model(tmp_path / "run")
    settings, prompts = ClipSettings.of(saved.config), ["a disc", "a square"]
    clips = [
        dict(clips_of(saved, prompts, settings, first_frames(saved.config, prompts, settings, given, "--image")))
        for given in ([red], [red, blue])
    ]
    assert np.array_equal(clips[0][0], clips[1][0]) and not np.array_equal(clips[0][1], clips[1][1])
    files = run(tmp_path / "run", ["a disc"], tmp_path / "x.mp4", images=[red])
    assert [file.name for file in files] == ["x.mp4", "x.png"]


def test_a_last_picture_decides_the_clip_too(tmp_path: Path) -> None:
    run_of = replace(haar_run(pos_embed_seq_len=2 * IMAGE.tokens), sample=replace(SHOWN, last_images=("b.png",)))
    write_checkpoint(tmp_path / "run", run_of)
    red, blue = save(tmp_path / "red.png", (200, 30, 30)), save(tmp_path / "blue.png", (30, 30, 200))
    saved, prompts = saved_model(tmp_path / "run"), ["a disc"]
    settings = ClipSettings.of(saved.config)
    first = [first_frames(saved.config, prompts, settings, [red], "--image", [last]) for last in (red, blue)]
    (_, one), (_, other) = (next(clips_of(saved, prompts, settings, pictures)) for pictures in first)
    assert not np.array_equal(one, other)
    with pytest.raises(ConfigError, match="makes clips between two pictures: give --last-image as well"):
        run(tmp_path / "run", prompts, tmp_path / "x.mp4", images=[red])
    with pytest.raises(ConfigError, match="starts from a picture: give --image"):  # not the run's own beside it
        run(tmp_path / "run", prompts, tmp_path / "x.mp4", last_images=[blue])
    (file, _) = run(tmp_path / "run", prompts, tmp_path / "x.mp4", images=[red], last_images=[blue])
    assert file.is_file()
    text = run_of.to_yaml()
    assert RunConfig.from_yaml(text) == run_of
    with pytest.raises(
        ConfigError, match=r"sample\.last_images is empty, and the transformer of model\.dit makes clips"
    ):
        RunConfig.from_yaml(text.replace("  last_images:\n  - b.png\n", ""))
    with pytest.raises(ConfigError, match=r"sample\.last_images is given, but model\.dit takes no last frame"):
        RunConfig.from_yaml(text.replace(f"pos_embed_seq_len: {2 * IMAGE.tokens}", "pos_embed_seq_len: 0"))
    write_checkpoint(tmp_path / "first", haar_run())
    with pytest.raises(ConfigError, match=r"--last-image is given, but this transformer takes no last frame"):
        run(tmp_path / "first", prompts, tmp_path / "x.mp4", images=[red], last_images=[blue])


def test_a_runs_own_pictures_are_those_of_its_own_prompts(tmp_path: Path) -> None:
    save(tmp_path / "a.png", (200, 30, 30))
    config = haar_run()
    config = replace(config, sample=replace(config.sample, images=(str(tmp_path / "a.png"),)))
    write_checkpoint(tmp_path / "run", config)
    assert sample_run(tmp_path / "run")[0].is_file()
    with pytest.raises(ConfigError, match="starts from a picture: give --image"):
        run(tmp_path / "run", ["another"], tmp_path / "x.mp4")


def test_a_picture_may_begin_a_clip_where_first_frames_were_given_in_training(tmp_path: Path) -> None:
    plain = haar_run(first_frame="none")
    plain = replace(plain, model=replace(plain.model, image=None), sample=replace(SHOWN, images=()))
    run = replace(plain, train=replace(plain.train, flow=FlowConfig(first_frame=0.2)))
    write_checkpoint(tmp_path / "run", run)
    red, blue = save(tmp_path / "red.png", (200, 30, 30)), save(tmp_path / "blue.png", (30, 30, 200))
    saved = saved_model(tmp_path / "run")
    settings, prompts = ClipSettings.of(saved.config), ["a disc"]
    clips = [
        dict(clips_of(saved, prompts, settings, first_frames(saved.config, prompts, settings, given, "--image")))[0]
        for given in ([], [red], [blue])
    ]
    assert not np.array_equal(clips[0], clips[1]) and not np.array_equal(clips[1][1:], clips[2][1:])
    for clip, color in zip(clips[1:], ((200, 30, 30), (30, 30, 200))):  # a codec of 4 channels keeps a plain colour
        assert np.abs(clip[0].reshape(-1, 3).mean(0) - color).max() < 60
    with pytest.raises(ConfigError, match=r"train\.flow\.first_frame is 0\.2, and the transformer"):
        RunConfig.from_yaml(replace(haar_run(), train=run.train).to_yaml())


def test_pictures_are_cut_to_the_clip(tmp_path: Path) -> None:
    wide = np.zeros((20, 90, 3), np.uint8)
    wide[:, 30:60] = 255
    Image.fromarray(wide).save(tmp_path / "wide.png")
    found = read_picture(tmp_path / "wide.png", "--image", 20, 30)
    assert found.shape == (20, 30, 3) and found.min() > 200
    Image.new("RGBA", (30, 20), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert read_picture(tmp_path / "clear.png", "--image", 20, 30).min() == 255


def test_greys_of_16_bits_are_scaled_as_those_of_the_training_are(tmp_path: Path) -> None:
    gradient = np.linspace(0, 65535, 30 * 20).reshape(20, 30)
    Image.fromarray(gradient.astype(np.uint16)).save(tmp_path / "grey.png")
    found = read_picture(tmp_path / "grey.png", "--image", 20, 30)
    assert np.abs(found - gradient[..., None] / 256).max() <= 1


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"no picture", "is no picture that Pillow reads"),
        (None, "cannot be read .No such file"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "PNG|picture|cannot"),
        (b"DDS " + (124).to_bytes(4, "little") + bytes(120), "cannot be read .Unknown pixel format"),
    ],
)
def test_a_broken_picture_is_one_sentence(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(ConfigError, match=f"--image .*a.png.*({sentence})"):
        read_picture(tmp_path / "a.png", "--image", 8, 8)


def test_pictures_that_do_not_fit_the_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 pictures for 3 prompts"):
        for_each(["a", "b"], [None] * 3, "--image")
    with pytest.raises(ValueError, match=r"sample\.images names 2 pictures for 1 prompt;"):
        replace(SHOWN, images=("a", "b"))
    text = haar_run().to_yaml()
    assert RunConfig.from_yaml(text) == haar_run()
    with pytest.raises(ConfigError, match=r"sample\.images is empty, and the transformer"):
        RunConfig.from_yaml(text.replace("  images:\n  - a.png\n", ""))
    with pytest.raises(ConfigError, match=r"model\.dit makes video from text alone"):
        RunConfig.from_yaml(text.replace("first_frame: channels", "first_frame: none"))
    plain = replace(haar_run(first_frame="none"), sample=replace(SHOWN, images=()))
    write_checkpoint(tmp_path / "run", replace(plain, model=replace(plain.model, image=None)))
    with pytest.raises(ConfigError, match="--image is given, but this transformer makes video from text alone"):
        run(tmp_path / "run", ["a"], tmp_path / "x.mp4", images=[tmp_path / "a.png"])


@pytest.mark.parametrize(
    ("dit", "pipeline", "last"),
    [
        (DIT, WanImageToVideoPipeline, True),
        (SKYREELS, SkyReelsV2ImageToVideoPipeline, False),
        pytest.param(DIT, WanImageToVideoPipeline, False, marks=pytest.mark.long),
        pytest.param(SKYREELS, SkyReelsV2ImageToVideoPipeline, True, marks=pytest.mark.long),
    ],
)
def test_an_exported_pipeline_makes_the_clip_of_heddle_sample(
    dit: WanBlocksConfig, pipeline: type[DiffusionPipeline], last: bool, tmp_path: Path
) -> None:
    """From a first frame, or between a first and a last one."""
    base = publish(tmp_path / "base", last, dit, pipeline)
    path = str(base)
    model = ModelConfig(
        dit=type(dit)(path=path),  # type: ignore[call-arg]  # each has a default of its architecture
        vae=VAEConfig(kind="diffusers", path=path),
        text=TextConfig(path=path, pad_to=512, max_length=512),
        image=ImageConfig(path=path),
    )
    pictures = [save(tmp_path / "a.png", (200, 120, 30)), save(tmp_path / "b.png", (30, 60, 200))]
    config = RunConfig(run=RunSection(name="tiny"), model=model, sample=SHOWN)
    write_checkpoint(tmp_path / "run", config)
    done = export.export(tmp_path / "run", tmp_path / "out")
    assert {"image_encoder", "image_processor"} <= done.components.keys()

    assert saved_model(base).config.model.dit.takes_last_frame is last
    saved = saved_model(tmp_path / "out")
    settings = ClipSettings.of(saved.config)
    (first,) = first_frames(saved.config, ["a disc"], settings, pictures[:1], "--image", pictures[1:] if last else [])
    told = saved.encode(["a disc"], "", [first])
    (clip,) = make_clips(saved.load(), told, settings, [first])

    pipe = pipeline.from_pretrained(tmp_path / "out")
    pipe.set_progress_bar_config(disable=True)
    text, negative = told.prompts[0].text, told.negative.text
    assert text.shape == (512, 16)
    expected = pipe(
        image=Image.open(pictures[0]),
        last_image=Image.open(pictures[1]) if last else None,
        prompt=None,
        prompt_embeds=text[None],
        negative_prompt_embeds=negative[None],
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=2,
        guidance_scale=settings.sampler.guidance_scale,
        latents=initial_noise(0, (4, 2, 4, 6))[None],
        output_type="np",
    ).frames[0]
    assert np.abs(clip - expected * 255).max() < 1.5  # rounding to 8 bits


@pytest.mark.parametrize(("variant", "guidance"), [("latent_concat", 2.0), ("token_replace", 6.0)])
def test_an_exported_hunyuan_pipeline_makes_the_latent_of_heddle_sample(
    variant: str, guidance: float, tmp_path: Path
) -> None:
    """Both variants: text of caption and picture, the condition, the picture in the first noise, and guidance, which
    33 channels have by a second forward with a black picture."""
    base = test_text_picture.publish(tmp_path / "base", variant)
    model = test_text_picture.settings(base, variant)
    shown = replace(SHOWN, steps=3, guidance_scale=guidance)
    config = RunConfig(run=RunSection(name="tiny"), model=model, sample=shown)
    write_checkpoint(tmp_path / "run", replace(config, train=replace(config.train, flow=FlowConfig(flow_shift=7.0))))
    done = export.export(tmp_path / "run", tmp_path / "out")
    assert {"text_encoder", "text_encoder_2", "image_processor", "vae"} <= done.components.keys()

    picture, prompt = save(tmp_path / "a.png", (200, 120, 30)), "a red disc"
    saved = saved_model(tmp_path / "out")
    settings = ClipSettings.of(saved.config)
    first = first_frames(saved.config, [prompt], settings, [picture], "--image")
    ours, told = saved.load(), saved.encode([prompt], "", first)
    (request,), away = clip_requests(ours, told, settings, first), told.negative
    (latent,) = sample_latents(
        ours.dit, [request], away.text, ours.geometry, settings.sampler, negative_pooled=away.vector
    )
    pipe = test_text_picture.theirs(tmp_path / "out")
    scale = {"guidance_scale": guidance} if ours.config.model.dit.takes_guidance else {"true_cfg_scale": guidance}
    expected = pipe(
        image=Image.open(picture),
        prompt=prompt,
        negative_prompt="",
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=3,
        latents=initial_noise(0, (4, 2, 4, 6))[None],
        output_type="latent",
        **scale,
    ).frames[0]
    shown_latent = latent[:, -expected.shape[1] :]
    torch.testing.assert_close(shown_latent, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    (clip,) = make_clips(ours, told, settings, first)
    assert len(clip) == {"latent_concat": 1, "token_replace": 5}[variant]
    assert expected.shape[1] == {"latent_concat": 1, "token_replace": 2}[variant]
    with pytest.raises(ConfigError, match="starts from a picture: give --image"):
        run(tmp_path / "out", ["another"], tmp_path / "x.mp4")
    if variant == "latent_concat":
        with pytest.raises(ConfigError, match=r"sample.frames 1: of clips of this transformer the first 4 frames"):
            make_clips(ours, told, replace(settings, frames=1), first)
    else:
        with pytest.raises(
            ConfigError, match=r"sample.frames 1: a clip of one latent .* 5 frames or more \(--frames\)"
        ):
            make_clips(ours, told, replace(settings, frames=1), first)


@dataclass(frozen=True, kw_only=True)
class FromPicture:
    """A small pipeline that makes clips from a picture, and a run that fine-tunes it."""

    publish: Callable[[Path], Path]
    model: Callable[[Path], ModelConfig]
    pipeline: type[DiffusionPipeline]
    first_frame: float  # of train.flow
    scheduler: Mapping[str, object]  # of the published folder
    guidance: tuple[float, float | None] = (4.0, None)
    size: tuple[int, int, int] = (5, 32, 48)  # frames, height, width
    noise: tuple[int, int, int, int] = (4, 2, 4, 6)
    tokens: bool = False  # the pipeline's latents are tokens
    frames_first: bool = False  # they are [t, C, h, w]
    filled_up: int = 0  # of the noise's frames, those in front that are not shown


UNIPC = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 5.0}
DDIM = {"num_train_timesteps": 1000, **cogvideox.FAMILY.scheduler(CogVideoXConfig(), FlowConfig()).settings}
FROM_PICTURES = {
    "Wan2.2 TI2V-5B": FromPicture(
        publish=lambda base: publish_wan22(base, VAE_OF_5B, replace(DIT, first_frame="none"), expand_timesteps=True),
        model=lambda base: wan_model(base),
        pipeline=WanImageToVideoPipeline,
        first_frame=0.2,
        scheduler=UNIPC,
        size=(5, 64, 96),
    ),
    "Wan2.2 A14B": FromPicture(
        publish=lambda base: publish_wan22(base, VAE_OF_14B, DIT, boundary_ratio=0.9),
        model=lambda base: wan_model(base, first_frame="channels", expert="both"),
        pipeline=WanImageToVideoPipeline,
        first_frame=0.0,
        scheduler=UNIPC,
        guidance=(4.0, 1.5),
    ),
    "CogVideoX-5B-I2V": FromPicture(
        publish=lambda base: publish_cogvideox(base, "5b i2v"),
        model=lambda base: test_cogvideox.settings(base, first_frame="channels"),
        pipeline=CogVideoXImageToVideoPipeline,
        first_frame=0.0,
        scheduler=DDIM,
        noise=(4, 2, 4, 6),
        frames_first=True,
    ),
    "CogVideoX1.5-5B-I2V": FromPicture(
        publish=lambda base: publish_cogvideox(base, "1.5 i2v"),
        model=lambda base: test_cogvideox.settings(base, first_frame="channels"),
        pipeline=CogVideoXImageToVideoPipeline,
        first_frame=0.0,
        scheduler=DDIM,
        size=(9, 32, 48),
        noise=(4, 4, 4, 6),
        filled_up=1,
        frames_first=True,
    ),
    "LTX-Video": FromPicture(
        publish=lambda base: publish_ltx(base),
        model=test_ltx.settings,
        pipeline=LTXImageToVideoPipeline,
        first_frame=0.2,
        scheduler={"use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05, "shift_terminal": 0.1},
        size=(9, 32, 64),
        noise=(8, 3, 2, 4),
        tokens=True,
    ),
}
VAE_OF_14B = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
VAE_OF_5B = {**VAE_OF_14B, "is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2}
VAE_OF_5B |= {"decoder_base_dim": 4, "scale_factor_spatial": 16}


def wan_model(base: Path, **dit: object) -> ModelConfig:
    path = str(base)
    return ModelConfig(
        dit=WanConfig(path=path, **dit),  # type: ignore[arg-type]
        vae=VAEConfig(kind="diffusers", path=path),
        text=TextConfig(path=path, pad_to=512, max_length=512),
    )


def publish_wan22(base: Path, vae: Mapping[str, object], dit: WanConfig, **index: object) -> Path:
    """A small image-to-video pipeline of Wan2.2 as Diffusers itself saves it, without an image encoder."""
    torch.manual_seed(0)
    fitted = dit.fitted(4, (4, 8, 8), 16, 0)
    config = {key: value for key, value in dit_json(fitted).items() if not key.startswith("_")}
    WanImageToVideoPipeline(
        tokenizer=ByT5Tokenizer(),
        text_encoder=UMT5EncoderModel(
            UMT5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        vae=AutoencoderKLWan(**vae, latents_mean=[0.1, 0.0, -0.2, 0.0], latents_std=[1.0, 2.0, 0.5, 1.0]),
        transformer=their_class(fitted),
        transformer_2=WanTransformer3DModel(**config) if "boundary_ratio" in index else None,
        scheduler=diffusers.UniPCMultistepScheduler(),
        **index,
    ).save_pretrained(base)
    return base


def publish_cogvideox(base: Path, variant: str) -> Path:
    """As Diffusers itself saves it; 1.5's first frames are divided by the autoencoder's factor."""
    more = {"text_dim": 16, "text_rows": test_cogvideox.ROWS}
    test_cogvideox.publish(base, replace(test_cogvideox.CASES.variants[variant], **more))
    file = base / "vae" / "config.json"
    factor = {"scaling_factor": 0.7, "invert_scale_latents": True} if variant.startswith("1.5") else {}
    file.write_text(json.dumps(json.loads(file.read_text()) | factor))
    index = base / "model_index.json"
    index.write_text(index.read_text().replace("CogVideoXPipeline", "CogVideoXImageToVideoPipeline"))
    return base


def publish_ltx(base: Path) -> Path:
    """With latents that are not scaled, as published: its image-to-video pipeline scales those of clips alone."""
    file = test_ltx.publish(base) / "vae" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"scaling_factor": 1.0}))
    return base


def picture_latent(folder: Path, case: FromPicture, picture: Path) -> torch.Tensor:
    """What `heddle sample` makes of a picture before it decodes."""
    saved = saved_model(folder, device="cpu")
    (frames, height, width), (scale, scale_2) = case.size, case.guidance
    asked = ClipChanges(frames=frames, height=height, width=width, seed=3, steps=4)
    asked = replace(asked, guidance_scale=scale, guidance_scale_2=scale_2)
    settings = ClipSettings.of(saved.config, saved.scheduler).changed(asked)
    first = first_frames(saved.config, ["a dot"], settings, [picture], "--image")
    told, model = saved.encode(["a dot"], "", first), saved.load()
    requests, negative = clip_requests(model, told, settings, first), told.negative.text
    return sample_latents(model.dit, requests, negative, model.geometry, settings.sampler, low=model.low)[0]


def pipeline_latent(folder: Path, case: FromPicture, picture: Path) -> torch.Tensor:
    """The same by Diffusers' own pipeline; LTX-Video's, which takes noise with the first frame in it, encodes that
    itself before."""
    pipe, saved = case.pipeline.from_pretrained(folder), saved_model(folder, device="cpu")
    told = saved.encode(["a dot"], "")
    pipe.set_progress_bar_config(disable=True)
    (frames, height, width), (scale, scale_2) = case.size, case.guidance
    shown, noise = Image.open(picture), initial_noise(3, case.noise)[None]
    if case.frames_first:
        noise = noise.transpose(1, 2)
    if not case.tokens:
        call = {"prompt_embeds": told.prompts[0].text[None], "negative_prompt_embeds": told.negative.text[None]}
        call |= {} if scale_2 is None else {"guidance_scale_2": scale_2}
    else:
        pixels = pipe.video_processor.preprocess(shown, height=height, width=width)
        first, mask = pipe.prepare_latents(pixels, 1, case.noise[0], height, width, frames, dtype=torch.float32)
        noise = torch.where(mask[..., None] > 0, first, patchify(noise[0], (1, 1, 1))[None])
        call = {"prompt": "a dot", "negative_prompt": "", "frame_rate": saved.config.model.dit.clip_rate}
        call |= {"max_sequence_length": saved.config.model.text.max_length}
    made = pipe(
        image=shown,
        height=height,
        width=width,
        num_frames=frames,
        num_inference_steps=4,
        guidance_scale=scale,
        latents=noise,
        output_type="latent",
        **call,
    ).frames[0]
    channels, *grid = case.noise
    if case.frames_first:
        return made.transpose(0, 1)[:, case.filled_up :]
    return unpatchify(made, tuple(grid), (1, 1, 1), channels) if case.tokens else made  # type: ignore[arg-type]


@pytest.mark.parametrize("name", in_default_run(list(FROM_PICTURES)[:2], of=FROM_PICTURES))
def test_a_clip_from_a_picture_is_that_of_diffusers_own_pipeline(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A published folder by its own scheduler, and a run on it as it is exported; another picture is another
    clip."""
    # LTXImageToVideoPipeline draws from the posterior of a first frame; here its mean is taken, as Wan's does
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    case = FROM_PICTURES[name]
    _, height, width = case.size
    drawn = np.random.default_rng(0).integers(0, 256, (2, 3, 3), dtype=np.uint8)
    picture, other = tmp_path / "a.png", save(tmp_path / "b.png", (30, 30, 200), (width, height))
    Image.fromarray(drawn).resize((width, height), Image.Resampling.BICUBIC).save(picture)
    base = case.publish(tmp_path / "base")
    scheduler = json.loads((base / "model_index.json").read_text())["scheduler"][1]
    put_scheduler(base, scheduler, case.scheduler)
    model = case.model(base)
    data = DataConfig(fps=model.dit.clip_rate or 0.0)
    config = RunConfig(run=RunSection(name="tiny"), model=model, data=data)
    flow = FlowConfig(first_frame=case.first_frame, flow_shift=3.0)
    write_checkpoint(tmp_path / "run", replace(config, train=replace(config.train, flow=flow), sample=SHOWN))
    export.export(tmp_path / "run", tmp_path / "out")
    for folder in (base, tmp_path / "out"):
        ours, theirs = picture_latent(folder, case, picture), pipeline_latent(folder, case, picture)
        assert ours.shape == (case.noise[0], case.noise[1] - case.filled_up, *case.noise[2:])
        torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=0)
        changed = picture_latent(folder, case, other) - ours
        computed = changed[:, 1:] if case.first_frame else changed  # a first latent frame that is given is the picture
        assert computed.abs().max() > 1e-3 * theirs.abs().max()


def test_an_export_keeps_a_setting_of_the_pipeline_that_its_run_did_not_train(tmp_path: Path) -> None:
    """TI2V-5B, trained from text alone: without `expand_timesteps` its pipeline from a picture does not load it."""
    case = FROM_PICTURES["Wan2.2 TI2V-5B"]
    config = RunConfig(run=RunSection(name="tiny"), model=case.model(case.publish(tmp_path / "base")))
    write_checkpoint(tmp_path / "run", config)
    assert config.train.flow.first_frame == 0
    export.export(tmp_path / "run", tmp_path / "out")
    assert WanImageToVideoPipeline.from_pretrained(tmp_path / "out").config.expand_timesteps


def publish(
    base: Path,
    last: bool = False,
    of: WanBlocksConfig = DIT,
    pipeline: type[DiffusionPipeline] = WanImageToVideoPipeline,
) -> Path:
    """A small image-to-video pipeline as Diffusers itself saves it; `last`: its clips have a last frame, too."""
    torch.manual_seed(0)
    dit = replace(of, pos_embed_seq_len=2 * IMAGE.tokens if last else 0).fitted(4, (4, 8, 8), 16, IMAGE.d_model)
    fields = {key: value for key, value in dit_json(dit).items() if not key.startswith("_")}
    transformer = getattr(diffusers, FAMILIES[of.architecture].diffusers_class)(**fields)
    if last:
        torch.nn.init.normal_(transformer.condition_embedder.image_embedder.pos_embed)
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    scheduler = FAMILY.scheduler(DIT, FlowConfig())
    missing = {} if of is DIT else {"image_encoder": None, "image_processor": None}
    pipeline(
        tokenizer=ByT5Tokenizer(),
        text_encoder=UMT5EncoderModel(
            UMT5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        vae=vae,
        transformer=transformer,
        scheduler=getattr(diffusers, scheduler.name)(**scheduler.settings),
        **missing,
    ).save_pretrained(base)
    encoder = random_clip(IMAGE, "cpu")
    encoder.encoder.save_pretrained(base / "image_encoder")
    encoder.save_processor(base / "image_processor")
    return base


def test_the_encode_of_a_first_frame_is_priced() -> None:
    """A second encode of the clip, and the image encoder, beside the VAE."""
    seconds = []
    for first_frame, image in (("none", None), ("channels", None), ("channels", ImageConfig(d_model=512))):
        model = ModelConfig(dit=replace(DIT, first_frame=first_frame), image=image)
        resolved, geometry = resolve(model)
        profile = Profile.from_flops(resolved.dit, resolved.vae, resolved.text, geometry, resolved.image, launch_s=0)
        seconds.append(profile.seconds("vae", Samples.of(2, (17, 64, 96)), 1))
    assert seconds[1] == pytest.approx(2 * seconds[0]) and seconds[2] > 1.01 * seconds[1]


def test_another_image_encoder_is_another_training(tmp_path: Path) -> None:
    here, there = publish_encoder(tmp_path / "here", 0), publish_encoder(tmp_path / "there", 0)
    other = publish_encoder(tmp_path / "other", 1)
    old = as_plain(ImageConfig(path=str(here)))
    for new, refused in (
        (as_plain(ImageConfig(path=str(there), size=999, patch=9)), False),
        (as_plain(ImageConfig(path=str(other))), True),
        (as_plain(ImageConfig()), True),
        (None, True),
    ):
        assert is_refused(Change("model.image", old, new), {}, {}) == refused


def publish_encoder(folder: Path, layers: int) -> Path:
    encoder = random_clip(replace(IMAGE, num_layers=layers + 1), "cpu")
    encoder.encoder.save_pretrained(folder / "image_encoder")
    encoder.save_processor(folder / "image_processor")
    return folder
