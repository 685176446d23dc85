"""Image to video as Wan's pipeline does it: the condition from the first frame, and a whole sampling, to its
numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanTransformer3DModel
from PIL import Image
from transformers import CLIPVisionModel

from ops.comm.collectives import Group
from ops.config import FlowConfig
from ops.flow.noise import NoiseKey, ScaledNoise
from ops.flow.sampling import SamplerConfig, SampleRequest, initial_noise, sample_latents
from ops.geometry import Geometry
from ops.models.base.vae import DiffusersVAE
from ops.models.config import ImageConfig, ModelConfig, TextConfig, VAEConfig
from ops.models.first_frame import FirstFrame
from ops.models.folders import dit_json, resolve
from ops.models.image import CLIPImages, folder_clip, random_clip
from ops.models.load import build_dit
from ops.models.vae import vae_of
from ops.models.wan.config import WanConfig
from ops.models.wan.family import FAMILY
from ops.packed.conditions import Conditions
from ops.packed.packing import Layout, Sequence
from ops.packed.patches import patchify
from tests.families.kit import their_class

torch.set_num_threads(1)
FRAMES, HEIGHT, WIDTH = 5, 32, 48
DIT = WanConfig(num_layers=2, num_heads=2, head_dim=12, ffn_dim=32, freq_dim=16, first_frame="channels")
IMAGE = ImageConfig(size=32, patch=16, d_model=16, num_layers=2, num_heads=2)


@pytest.fixture(scope="module")
def vae() -> DiffusersVAE:
    torch.manual_seed(0)
    model = AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    return vae_of(model, VAEConfig(kind="diffusers", path="-"), "cpu")


@pytest.fixture(scope="module")
def clip_encoder() -> CLIPImages:
    return random_clip(IMAGE, "cpu")


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    """Resolved by hand: the VAE is not in a folder."""
    vae = VAEConfig(kind="haar", channels=16, temporal=4, spatial=8)
    return resolve(ModelConfig(dit=DIT, vae=vae, text=TextConfig(d_model=8, num_heads=2), image=IMAGE))[0]


def pipeline_of(model: ModelConfig, vae: DiffusersVAE, clip_encoder: CLIPImages) -> WanImageToVideoPipeline:
    scheduler = FAMILY.scheduler(DIT, FlowConfig(flow_shift=3.0))
    transformer = their_class(model.dit)
    assert isinstance(transformer, WanTransformer3DModel)
    return WanImageToVideoPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae.model,
        scheduler=getattr(diffusers, scheduler.name)(num_train_timesteps=1000, **scheduler.settings),
        image_processor=clip_encoder.processor,
        image_encoder=clip_encoder.encoder,
        transformer=transformer,
    )


def picture(seed: int = 0) -> np.ndarray:
    """A smooth picture: CLIP's resizing of noise would say little."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 6, 3), dtype=np.uint8))
    return np.array(small.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))


def test_an_image_to_video_model_takes_the_channels_of_its_conditions(model: ModelConfig) -> None:
    assert (model.dit.in_channels, model.dit.out_channels, model.dit.image_width) == (16 + 4 + 16, 16, 16)
    frame = FirstFrame.of(model)
    assert frame.width == 36 * 4 and frame.tail == 1 and frame.image_tokens == 5


@pytest.mark.parametrize("last", [False, True])
def test_what_is_told_of_given_frames_is_what_the_pipeline_tells(
    last: bool, model: ModelConfig, vae: DiffusersVAE, clip_encoder: CLIPImages
) -> None:
    model = replace(model, dit=replace(model.dit, pos_embed_seq_len=10 if last else 0))
    frame, pipe = FirstFrame.of(model), pipeline_of(model, vae, clip_encoder)
    video = torch.from_numpy(np.stack([picture(i) for i in range(FRAMES)]))[None]
    before = video.clone()
    joined = frame.joined(vae.encode(video)[0], vae.encode(frame.still(video))[0])
    assert torch.equal(video, before), "the clip itself is not changed"
    shown = [Image.fromarray(picture(n)) for n in ((0, FRAMES - 1) if last else (0,))]
    first, *others = (pipe.video_processor.preprocess(one, height=HEIGHT, width=WIDTH) for one in shown)
    _, expected = pipe.prepare_latents(
        first,
        1,
        height=HEIGHT,
        width=WIDTH,
        num_frames=FRAMES,
        dtype=torch.float32,
        latents=torch.zeros(1, 16, 2, 4, 6),
        last_image=others[0] if last else None,
    )
    torch.testing.assert_close(joined[16:], expected[0], atol=1e-5, rtol=1e-5)
    image = clip_encoder.encode(frame.pictures(video)).flatten(0, 1)
    torch.testing.assert_close(image, pipe.encode_image(shown, "cpu").flatten(0, 1), atol=1e-5, rtol=1e-5)

    rows = patchify(joined, (1, 2, 2))
    packed = frame.packed(rows, image)
    assert packed.shape == (len(rows) + frame.tail, frame.width)
    assert torch.equal(packed[: len(rows)], rows) and torch.equal(frame.image_of(packed[len(rows) :]), image)


@pytest.mark.parametrize("case", ["alone", "first", "first and last"])
def test_noise_is_on_the_pictures_that_are_given_alone(case: str, model: ModelConfig) -> None:
    frame = replace(FirstFrame.of(model), alone=case == "alone", last=case == "first and last")
    clips = torch.full((2, FRAMES, 64, 64, 3), 100, dtype=torch.uint8)
    keys = [ScaledNoise(0.5, NoiseKey.of(0, 0, "a")), ScaledNoise(0.0, NoiseKey.of(0, 0, "b"))]
    plain, still = frame.still(clips).float(), frame.still(clips, keys)
    assert (clips == 100).all() and still.dtype == torch.float32
    added = still - plain
    given = [0, FRAMES - 1] if frame.last else [0]
    assert not added[1].any() and not added[0, [t for t in range(len(added[0])) if t not in given]].any()
    for picture in added[0, given]:
        assert picture.std() == pytest.approx(0.5 * 127.5, rel=0.03) and abs(picture.mean()) < 2
    assert len(given) == 1 or not torch.equal(added[0, 0], added[0, -1])
    assert torch.equal(frame.still(clips[:1], keys[:1]), still[:1]), "whatever clips are beside it"
    assert torch.equal(frame.still(clips), plain) or frame.alone


def test_a_sampled_clip_is_the_one_of_the_pipeline(
    model: ModelConfig, vae: DiffusersVAE, clip_encoder: CLIPImages
) -> None:
    frame, pipe = FirstFrame.of(model), pipeline_of(model, vae, clip_encoder)
    dit = build_dit(model.dit, 0)
    dit.load_state_dict(pipe.transformer.state_dict())
    numbers = torch.Generator().manual_seed(2)
    text, negative = torch.randn(2, 512, 8, generator=numbers)
    still = frame.still(torch.from_numpy(picture())[None, None].expand(1, FRAMES, -1, -1, -1))
    told = frame.joined(torch.zeros(0, 2, 4, 6), vae.encode(still)[0])
    request = SampleRequest(
        text=text,
        frames=FRAMES,
        height=HEIGHT,
        width=WIDTH,
        seed=7,
        condition=patchify(told, model.dit.patch),
        image=clip_encoder.encode(torch.from_numpy(picture())[None])[0],
    )
    config = SamplerConfig(steps=3, guidance_scale=2.0, flow_shift=3.0, whole_times=FAMILY.whole_times)
    (latent,) = sample_latents(dit, [request], negative, resolve(model)[1], config)
    expected = pipe(
        image=Image.fromarray(picture()),
        prompt_embeds=text[None],
        negative_prompt_embeds=negative[None],
        height=HEIGHT,
        width=WIDTH,
        num_frames=FRAMES,
        num_inference_steps=3,
        guidance_scale=2.0,
        latents=initial_noise(7, (16, 2, 4, 6))[None],
        output_type="latent",
    ).frames[0]
    torch.testing.assert_close(latent, expected, atol=1e-4, rtol=1e-4)


def test_a_clip_from_a_clean_first_frame_is_the_one_of_the_pipeline(vae: DiffusersVAE) -> None:
    """Wan2.2 TI2V-5B: `expand_timesteps`, without further channels and without an image encoder."""
    plain = replace(DIT, first_frame="none", in_channels=16, out_channels=16, text_dim=8)
    transformer = their_class(plain)
    scheduler = FAMILY.scheduler(DIT, FlowConfig(flow_shift=3.0))
    assert isinstance(transformer, WanTransformer3DModel)
    pipe = WanImageToVideoPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae.model,
        scheduler=getattr(diffusers, scheduler.name)(num_train_timesteps=1000, **scheduler.settings),
        transformer=transformer,
        **FAMILY.index(FlowConfig(first_frame=0.2), "encoded"),
    )
    dit = build_dit(plain, 0)
    dit.load_state_dict(transformer.state_dict())
    text, negative = torch.randn(2, 512, 8, generator=torch.Generator().manual_seed(2))
    first = patchify(vae.encode(torch.from_numpy(picture())[None, None])[0], plain.patch)
    request = SampleRequest(text=text, frames=FRAMES, height=HEIGHT, width=WIDTH, seed=7, first=first)
    config = SamplerConfig(steps=3, guidance_scale=2.0, flow_shift=3.0, whole_times=FAMILY.whole_times)
    (latent,) = sample_latents(dit, [request], negative, Geometry(), config)
    expected = pipe(
        image=Image.fromarray(picture()),
        prompt_embeds=text[None],
        negative_prompt_embeds=negative[None],
        height=HEIGHT,
        width=WIDTH,
        num_frames=FRAMES,
        num_inference_steps=3,
        guidance_scale=2.0,
        latents=initial_noise(7, (16, 2, 4, 6))[None],
        output_type="latent",
    ).frames[0]
    torch.testing.assert_close(latent, expected, atol=1e-4, rtol=1e-4)


def test_an_image_encoder_comes_back_from_its_folder(tmp_path: Path, clip_encoder: CLIPImages) -> None:
    encoder = clip_encoder.encoder
    assert isinstance(encoder, CLIPVisionModel)
    encoder.save_pretrained(tmp_path / "image_encoder")
    clip_encoder.save_processor(tmp_path / "image_processor")
    found = resolve(ModelConfig(dit=DIT, image=ImageConfig(path=str(tmp_path))))[0].image
    assert found is not None and (found.size, found.patch, found.d_model, found.tokens) == (32, 16, 16, 5)
    pictures = torch.from_numpy(np.stack([picture(0), picture(1)]))
    again = folder_clip(found, "cpu").encode(pictures)
    assert torch.equal(again[:1], clip_encoder.encode(pictures[:1])), "whatever else is in its batch"


def test_folders_that_do_not_belong_together_are_named(tmp_path: Path, model: ModelConfig) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dit_json(model.dit)))
    with_path = WanConfig(path=str(tmp_path))
    with pytest.raises(ValueError, match=r"listens to image embeddings of width 16.*Set model.image.path"):
        resolve(ModelConfig(dit=with_path, vae=model.vae, text=model.text))
    with pytest.raises(ValueError, match=r"expects image embeddings of width 16, model.image makes 32"):
        resolve(ModelConfig(dit=with_path, vae=model.vae, text=model.text, image=ImageConfig()))
    with pytest.raises(ValueError, match=r"takes 36 and gives 16 latent channels, model.vae makes 8"):
        resolve(ModelConfig(dit=with_path, vae=VAEConfig(channels=8), text=model.text, image=IMAGE))
    with pytest.raises(ValueError, match=r"model.dit.first_frame is none"):
        resolve(ModelConfig(dit=WanConfig(), image=IMAGE))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_lower_precision_stays_near_fp32(model: ModelConfig, weights: torch.dtype, autocast: bool) -> None:
    """The image embedding comes in fp32, whatever the blocks compute in."""
    numbers = torch.Generator().manual_seed(3)
    tokens, text, image = (torch.randn(*size, generator=numbers) for size in ((4, 144), (3, 8), (5, 16)))
    layout, dit = Layout([Sequence((1, 2, 2), 3, 5)]), build_dit(model.dit, 0)
    call = (tokens, torch.tensor([500.0]), text, layout, Group.solo(), Conditions(image=image))
    with torch.no_grad():
        expected = dit(*call)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = dit.to(weights)(*call).float()
    assert (found - expected).norm() < 0.03 * expected.norm()


def test_a_transformer_without_its_image_says_so(model: ModelConfig) -> None:
    layout = Layout([Sequence((1, 2, 2), 3, 5)])
    with pytest.raises(ValueError, match=r"image None does not fit the layout"):
        build_dit(model.dit, 0)(torch.zeros(4, 144), torch.zeros(1), torch.zeros(3, 8), layout, Group.solo())
