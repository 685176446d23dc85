"""HunyuanVideo-1.5 from a first frame: rows of SigLIP in the text, the condition, whole clips of its pipeline."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import (
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
)
from PIL import Image
from transformers import SiglipVisionConfig, SiglipVisionModel
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from actors.config import TrainConfig
from actors.feed.encoders import Encoders
from app.export import export
from app.export.parity import their_velocity
from app.sampling.clips import ClipChanges, ClipSettings, clip_requests, first_frames
from app.sampling.model import saved_model
from app.sampling.published import published_run
from app.sampling.sample import run
from app.settings.config import RunConfig
from app.settings.notes import notes
from app.settings.sections import RunSection, SampleConfig
from ops.comm.collectives import Group
from ops.config import FlowConfig
from ops.flow.sampling import initial_noise, sample_latents
from ops.models.base.family import ParitySample
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.first_frame import FirstFrame
from ops.models.folders import dit_json, resolve
from ops.models.forecast import text_need
from ops.models.hunyuan15.config import Hunyuan15Config
from ops.models.load import build_dit, build_text, build_vae, token_counter
from ops.packed.packing import Layout, Sequence
from ops.packed.patches import patchify
from ops.typed import ConfigError
from tests.app.test_export import write_checkpoint
from tests.families import test_hunyuan15
from tests.families.kit import their_class
from tests.families.test_hunyuan15 import CAPTIONS, of_kinds

torch.set_num_threads(1)
DIT = replace(test_hunyuan15.DIT, first_frame="channels", in_channels=9, target_size=40)
ATOL = 1e-5
SIZE = {"frames": 5, "height": 32, "width": 48}  # what its pipeline makes of such a picture at target_size 40
RunRanks = Callable[[int, Callable[[Group], torch.Tensor]], list[torch.Tensor]]


def publish(folder: Path) -> Path:
    """A small image-to-video pipeline as Diffusers itself saves it."""
    test_hunyuan15.publish(folder / "t2v")
    base = test_hunyuan15.HunyuanVideo15Pipeline.from_pretrained(folder / "t2v")
    torch.manual_seed(1)
    siglip = SiglipVisionConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=24,
        patch_size=8,
    )
    tower = SiglipVisionModel(siglip).eval()
    for weight in tower.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    transformer = their_class(DIT)
    for weight in transformer.image_embedder.parameters():  # pictures count for much
        torch.nn.init.normal_(weight, std=1.0)
    HunyuanVideo15ImageToVideoPipeline(
        **{name: getattr(base, name) for name in ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "vae")},
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
        image_encoder=tower,
        feature_extractor=SiglipImageProcessorPil(size={"height": 24, "width": 24}),
    ).save_pretrained(folder / "i2v")
    return folder / "i2v"


def settings(folder: Path, **dit: object) -> ModelConfig:
    path = str(folder)
    return ModelConfig(
        dit=Hunyuan15Config(path=path, first_frame="channels", **dit),  # type: ignore[arg-type]
        vae=VAEConfig(kind="diffusers", path=path),
        text=TextConfig(kind="hunyuan15_i2v", path=path, max_length=1000),
    )


def theirs(folder: Path) -> HunyuanVideo15ImageToVideoPipeline:
    pipe = HunyuanVideo15ImageToVideoPipeline.from_pretrained(folder)
    pipe.feature_extractor = SiglipImageProcessorPil.from_pretrained(folder / "feature_extractor")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(seed: int, size: tuple[int, int] = (48, 32)) -> np.ndarray:
    """A smooth one: resizing of noise would say little."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return np.array(Image.fromarray(small).resize(size, Image.Resampling.BICUBIC))


def of_three(states: int, glyphs: int, rows: int, seed: int = 1) -> torch.Tensor:
    """A text of rows of all kinds, those of a first frame first."""
    numbers = torch.Generator().manual_seed(100 + seed)
    seen = torch.zeros(rows, DIT.text_dim + 1)
    seen[:, : DIT.image_dim] = torch.randn(rows, DIT.image_dim, generator=numbers)
    seen[:, -1] = 2
    return torch.cat([seen, of_kinds(states, glyphs, seed)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("hunyuan15_i2v"))


GRIDS, KINDS = ((3, 4, 6), (1, 6, 2), (2, 3, 3)), ((7, 3, 9), (5, 0, 9), (1, 9, 4))


def samples() -> list[ParitySample]:
    numbers = torch.Generator().manual_seed(2)
    return [
        ParitySample(
            latent=torch.randn(9, *grid, generator=numbers),
            timestep=torch.tensor([time]),
            text=of_three(*kind, seed=index),
        )
        for index, (grid, kind, time) in enumerate(zip(GRIDS, KINDS, (900.5, 3.25, 500.0)))
    ]


@pytest.mark.parametrize("degree", [1, 2])
def test_packed_samples_equal_diffusers_one_by_one(degree: int, run_ranks: RunRanks) -> None:
    """Forward and gradients, of every parameter, alone and summed over a bag."""
    reference, given = their_class(DIT), samples()
    times, text = torch.cat([one.timestep for one in given]), torch.cat([one.text for one in given])
    models = [build_dit(DIT, 0) for _ in range(degree)]

    def on_rank(group: Group) -> torch.Tensor:
        model = models[group.rank]
        model.load_state_dict(reference.state_dict())  # strict: the same names and shapes
        layout = Layout([Sequence(grid, sum(kind)) for grid, kind in zip(GRIDS, KINDS)], degree, group.rank)
        tokens = layout.local([patchify(sample.latent, (1, 1, 1)) for sample in given])
        velocity: torch.Tensor = model(tokens, times, text, layout, group)
        (velocity.square().sum() / 100).backward()
        whole = torch.zeros(sum(layout.lengths), 4)
        starts = np.cumsum((0, *layout.lengths[:-1]))
        places = [
            torch.arange(start + layout.chunk(index).start, start + layout.chunk(index).stop)
            for index, start in enumerate(starts.tolist())
        ]
        whole[torch.cat(places)] = velocity.detach()
        return whole

    packed = sum(run_ranks(degree, on_rank))
    expected = torch.cat([patchify(their_velocity(reference, DIT, sample), (1, 1, 1)) for sample in given])
    torch.testing.assert_close(packed, expected, atol=1e-5 * float(expected.detach().abs().max()), rtol=0)
    (expected.square().sum() / 100).backward()
    theirs = dict(reference.named_parameters())
    largest = max(float(weight.grad.abs().max()) for weight in theirs.values() if weight.grad is not None)
    for name, weight in models[0].named_parameters():
        parts = [part.get_parameter(name).grad for part in models]
        if theirs[name].grad is None:  # of the last block's way out for the text, which nothing reads
            assert parts == [None] * degree and name.startswith("transformer_blocks.1."), name
            continue
        found = torch.stack([part for part in parts if part is not None]).sum(0)
        torch.testing.assert_close(found, theirs[name].grad, atol=1e-5 * largest, rtol=1e-4, msg=name)
        assert weight.shape == found.shape
    assert models[0].get_parameter("image_embedder.linear_1.weight").grad.abs().max() > 0


def test_rows_are_those_of_the_pipeline(folder: Path) -> None:
    model, _ = resolve(settings(folder))
    text = model.text
    assert (text.picture_tokens, text.picture_rows, text.picture_dim, text.width) == (9, 9, 8, 25)
    assert (text.least_tokens, text.most_tokens, text.encoded_tokens) == (9, 1265, 1108)
    encoder, pipe, shown = build_text(text), theirs(folder), [picture(seed) for seed in range(len(CAPTIONS))]
    texts = encoder.encode(CAPTIONS, shown)
    with torch.no_grad():
        states, mask, glyphs, glyph_mask = pipe.encode_prompt(CAPTIONS, device="cpu", batch_size=len(CAPTIONS))
    largest = float(states.abs().max())  # other rows in a batch are other roundings
    for i, found in enumerate(texts):
        with torch.no_grad():
            seen = pipe.encode_image(Image.fromarray(shown[i]), 1, torch.device("cpu"), torch.float32)[0]
        first, rows = 9 + int(glyph_mask[i].sum()), int(mask[i].sum())
        assert found.shape == (first + rows, 25) and encoder.count(CAPTIONS[i]) == len(found)
        assert found[:, -1].tolist() == [2.0] * 9 + [1.0] * (first - 9) + [0.0] * rows
        torch.testing.assert_close(found[:9, :8], seen, atol=ATOL * float(seen.abs().max()), rtol=0)
        assert not found[:9, 8:-1].any()
        torch.testing.assert_close(found[9:first, :16], glyphs[i, : first - 9], atol=ATOL, rtol=0)
        torch.testing.assert_close(found[first:, :-1], states[i, :rows], atol=ATOL * largest, rtol=0)
    assert not torch.allclose(texts[0][:9], texts[1][:9], atol=1e-2)
    (alone,) = encoder.encode([CAPTIONS[2]], [shown[2]])
    torch.testing.assert_close(alone, texts[2], atol=ATOL * largest, rtol=0)
    assert token_counter(text)("a dot") == encoder.count("a dot") - 9
    with pytest.raises(ValueError, match="2 captions and 1 pictures: this text has rows of the first frame"):
        encoder.encode(["a", "b"], shown[:1])


def test_the_condition_is_that_of_the_pipeline(folder: Path) -> None:
    model, geometry = resolve(settings(folder))
    frame, vae, pipe = FirstFrame.of(model), build_vae(model.vae), theirs(folder)
    assert (frame.channels, frame.alone, frame.tail, model.dit.in_channels) == (5, True, 0, 9)
    video = torch.from_numpy(np.stack([picture(seed) for seed in range(5)])[None])
    latent, still = vae.encode(video)[0], vae.encode(frame.still(video))[0]
    joined = frame.joined(latent, still)
    with torch.no_grad():
        condition, mask = pipe.prepare_cond_latents_and_mask(
            latent[None], Image.fromarray(picture(0)), 1, 32, 48, torch.float32, torch.device("cpu")
        )
    assert geometry.latent_grid(5, 32, 48) == (2, 4, 6)
    wanted = torch.cat([latent, condition[0], mask[0]])
    torch.testing.assert_close(joined, wanted, atol=ATOL * float(wanted.abs().max()), rtol=0)


def our_latent(folder: Path, image: Path, prompt: str) -> torch.Tensor:
    """What `heddle sample --image` makes before it decodes."""
    saved = saved_model(folder, device="cpu")
    asked = ClipChanges(seed=3, steps=3, **SIZE)  # type: ignore[arg-type]
    sampled = ClipSettings.of(saved.config).changed(asked)
    first = first_frames(saved.config, [prompt], sampled, [image], "--image")
    told, model = saved.encode([prompt], "", first), saved.load()
    away, rows = told.prompts[0].negative, model.config.model.text.picture_rows
    assert away is not None and torch.equal(away[:rows], told.prompts[0].text[:rows])
    (request,) = clip_requests(model, told, sampled, first)
    return sample_latents(model.dit, [request], told.negative.text, model.geometry, sampled.sampler)[0]


def their_latent(pipe: HunyuanVideo15ImageToVideoPipeline, image: Path, prompt: str) -> torch.Tensor:
    """The same by Diffusers' pipeline, which chooses the size."""
    made: torch.Tensor = pipe(
        image=Image.open(image),
        prompt=prompt,
        num_frames=5,
        num_inference_steps=3,
        latents=initial_noise(3, (4, 2, 4, 6))[None],
        output_type="latent",
    ).frames[0]
    return made


@pytest.mark.long
def test_a_run_exports_what_its_pipeline_samples_as_heddle_does(folder: Path, tmp_path: Path) -> None:
    """The published folder by itself, and a run on it as it is exported; the negative prompt sees the picture, too."""
    shown, prompt = tmp_path / "a.png", 'a sign "open"'
    other = tmp_path / "b.png"
    Image.fromarray(picture(0)).save(shown)
    Image.fromarray(picture(1)).save(other)
    asked = SampleConfig(prompts=(prompt,), images=("a.png",), steps=3, guidance_scale=6.0, **SIZE)  # type: ignore[arg-type]
    config = RunConfig(run=RunSection(name="tiny"), model=settings(folder), sample=asked)
    write_checkpoint(tmp_path / "run", replace(config, train=TrainConfig(flow=FlowConfig(flow_shift=5.0))))
    done = export.export(tmp_path / "run", tmp_path / "out")
    assert {"text_encoder", "text_encoder_2", "image_encoder", "feature_extractor", "guider"} <= done.components.keys()
    assert json.loads((tmp_path / "out" / "transformer" / "config.json").read_text())["target_size"] == 40

    for where in (folder, tmp_path / "out"):
        found, wanted = our_latent(where, shown, prompt), their_latent(theirs(where), shown, prompt)
        torch.testing.assert_close(found, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0)
        assert (our_latent(where, other, prompt) - found).abs().max() > 1e-2 * wanted.abs().max()
    few = ClipChanges(steps=1, **SIZE)  # type: ignore[arg-type]
    assert run(folder, [prompt], tmp_path / "x.mp4", images=[shown], changes=few)[0].is_file()
    with pytest.raises(ConfigError, match="starts from a picture: give --image"):
        run(folder, ["another"], tmp_path / "x.mp4")


def test_clips_of_one_batch_have_each_its_own_negative(folder: Path) -> None:
    saved, shown = saved_model(folder, device="cpu"), [picture(seed)[None] for seed in (0, 1)]
    sampled = ClipSettings.of(saved.config).changed(ClipChanges(seed=3, steps=2, **SIZE))  # type: ignore[arg-type]
    model = saved.load()

    def latents(first: list[np.ndarray]) -> list[torch.Tensor]:
        told = saved.encode(["a disc"] * len(first), "", first)
        requests = [replace(one, seed=3) for one in clip_requests(model, told, sampled, first)]
        return sample_latents(model.dit, requests, told.negative.text, model.geometry, sampled.sampler)

    together, alone = latents(shown), [latents([one])[0] for one in shown]
    for found, wanted in zip(together, alone, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0)


def test_a_published_folder_is_sampled_as_its_pipeline_is_called(folder: Path) -> None:
    found = published_run(folder, False)
    assert found.model.dit.starts_from_image and found.model.image is None
    assert (found.model.text.kind, found.train.flow.flow_shift, found.sample.guidance_scale) == (
        "hunyuan15_i2v",
        5.0,
        6.0,
    )
    assert published_run(folder.parent / "t2v", False).model.text.kind == "hunyuan15"


def test_a_width_that_nobody_set_is_not_said_to_be_unused(folder: Path) -> None:
    """Wan, the usual family, has a setting of the same name and another default."""
    given = RunConfig(run=RunSection(name="tiny"), model=settings(folder))
    assert not [note for note in notes(given) if "image_dim" in note]
    (note,) = [note for note in notes(replace(given, model=settings(folder, image_dim=32))) if "image_dim" in note]
    assert note.startswith("model.dit.image_dim 32 is not used: ") and note.endswith(" has 8.")


def test_text_to_video_and_image_to_video_do_not_mix(folder: Path, tmp_path: Path) -> None:
    t2v = folder.parent / "t2v"
    wanted = (
        r"the transformer of .*i2v/transformer starts from the first frame .* Set model.text.kind to hunyuan15_i2v\."
    )
    with pytest.raises(ValueError, match=wanted):
        resolve(test_hunyuan15.settings(folder))
    with pytest.raises(ValueError, match=r"hunyuan15_i2v shows .* and the transformer of .*t2v/transformer takes none"):
        resolve(replace(settings(folder), dit=Hunyuan15Config(path=str(t2v), first_frame="channels")))
    with pytest.raises(
        FileNotFoundError, match=r"image_encoder/config.json does not exist; .* Download image_encoder/"
    ):
        resolve(settings(t2v))
    copy = shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(copy / "feature_extractor")
    with pytest.raises(FileNotFoundError, match=r"shows first frames to its encoder. Download feature_extractor/, too"):
        resolve(settings(copy))
    fields = json.loads((copy / "image_encoder" / "config.json").read_text())
    (copy / "image_encoder" / "config.json").write_text(json.dumps(fields | {"model_type": "clip_vision_model"}))
    shutil.copytree(folder / "feature_extractor", copy / "feature_extractor")
    with pytest.raises(ValueError, match=r"is a clip_vision_model encoder; .* needs a SigLIP's vision tower there"):
        resolve(settings(copy))
    wider = json.loads((copy / "transformer" / "config.json").read_text()) | {"image_embed_dim": 12}
    (copy / "transformer" / "config.json").write_text(json.dumps(wider))
    (copy / "image_encoder" / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"expects rows of the first frame of another width than the 8"):
        resolve(settings(copy))
    with pytest.raises(ValueError, match=r"rows of the first frame of 32 numbers and of captions of 24"):
        DIT.with_vision(32)
    with pytest.raises(
        ValueError, match=r"rows of the first frame, of 8 numbers, and a transformer of architecture wan"
    ):
        test_hunyuan15.FAMILIES["wan"].settings().with_vision(8)


def test_the_config_of_a_published_folder_is_read_and_written(folder: Path) -> None:
    model, _ = resolve(settings(folder))
    assert replace(model.dit, path=None) == DIT
    fields = json.loads((folder / "transformer" / "config.json").read_text())
    written = dit_json(model.dit)
    assert {key: written[key] for key in ("in_channels", "task_type", "target_size", "image_embed_dim")} == {
        **{"in_channels": 9, "task_type": "i2v", "target_size": 40, "image_embed_dim": 8}
    }
    assert {key: value for key, value in fields.items() if not key.startswith("_")} == {
        key: value for key, value in written.items() if not key.startswith("_")
    }


RANDOM = TextConfig(
    **{"kind": "hunyuan15_i2v", "max_length": 16, "d_model": 16, "num_heads": 2, "num_layers": 1},
    **{"pooled_dim": 12, "picture_dim": 8},
)
BARE = replace(DIT, text_dim=16, glyph_dim=12)


def test_the_random_encoders_tell_pictures_apart() -> None:
    model, _ = resolve(ModelConfig(dit=replace(BARE, image_dim=64), vae=VAEConfig(channels=4), text=RANDOM))
    text = model.text
    assert (model.dit.image_dim, model.dit.in_channels, text.picture_rows, text.most_tokens) == (8, 9, 16, 288)  # type: ignore[attr-defined]
    captions, shown = ["a red disc", "a blue disc", "a red disc"], [picture(0), picture(0), picture(1)]
    texts = build_text(text).encode(captions, shown)
    torch.manual_seed(8)
    assert all(torch.equal(a, b) for a, b in zip(texts, build_text(text).encode(captions, shown)))
    assert torch.equal(texts[0][:16], texts[1][:16]) and torch.equal(texts[0][16:], texts[2][16:])
    assert not torch.allclose(texts[0][:16], texts[2][:16], atol=1e-2)


def test_a_run_from_nothing_exports_a_whole_pipeline(folder: Path, tmp_path: Path) -> None:
    """With the random encoders, set up as the notes say."""
    shown = tmp_path / "a.png"
    Image.fromarray(picture(0)).save(shown)
    asked = SampleConfig(prompts=("a disc",), images=("a.png",), steps=3, guidance_scale=6.0, **SIZE)  # type: ignore[arg-type]
    model = ModelConfig(dit=BARE, vae=VAEConfig(kind="diffusers", path=str(folder)), text=RANDOM)
    write_checkpoint(tmp_path / "run", RunConfig(run=RunSection(name="tiny"), model=model, sample=asked))
    notes = export.export(tmp_path / "run", tmp_path / "out").notes
    (note,) = [note for note in notes if "system_message" in note]
    system, crop, most = re.search(r"message to '(.*)', its .* to (\d+) and .* to (\d+)", note).groups()  # type: ignore[union-attr]
    pipe = theirs(tmp_path / "out")
    pipe.system_message, pipe.prompt_template_encode_start_idx, pipe.tokenizer_max_length = system, int(crop), int(most)
    found, wanted = our_latent(tmp_path / "run", shown, "a disc"), their_latent(pipe, shown, "a disc")
    torch.testing.assert_close(found, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0)
    haar = replace(model, vae=VAEConfig(channels=4))
    write_checkpoint(tmp_path / "haar", RunConfig(run=RunSection(name="tiny"), model=haar, sample=asked))
    notes = export.export(tmp_path / "haar", tmp_path / "other").notes
    assert any("encodes the picture by its VAE: make clips of this export with `heddle sample" in one for one in notes)


def test_what_it_needs_is_predicted_without_weights(folder: Path) -> None:
    model, _ = resolve(settings(folder))
    need = text_need(model.text, 2, model.text.most_tokens, torch.float32)
    held = sum(p.numel() * 4 for p in build_text(model.text).parameters())  # type: ignore[attr-defined]
    assert need.weights_gib * 2**30 == pytest.approx(held, rel=0.01)
    plain = resolve(test_hunyuan15.settings(folder.parent / "t2v"))[0]
    assert need.weights_gib > text_need(plain.text, 2, 1256, torch.float32).weights_gib
    encoders = Encoders.of(model)
    assert (encoders.picture_rows, encoders.least_text, encoders.see_pixels) == (9, 9, ("text", "vae"))
    assert "image_encoder/config.json" in encoders.text and "feature_extractor" in encoders.text
    assert "picture_dim" not in Encoders.of(plain).text
