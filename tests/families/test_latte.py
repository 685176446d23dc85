"""Latte: its cases for the tests of all families; packs, bags, and a run of its pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers import AutoencoderKL, LattePipeline
from transformers import ByT5Tokenizer, T5Config, T5EncoderModel

from ops.comm.collectives import Group
from ops.config import FlowConfig
from ops.flow.sampling import SamplerConfig, SampleRequest, initial_noise, sample_latents
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.folders import dit_config, dit_json, resolve
from ops.models.latte.config import LatteConfig
from ops.models.latte.family import FAMILY
from ops.models.load import build_dit, build_text
from ops.packed.packing import Layout, Sequence
from ops.spatial_temporal.choice import SliceRates
from ops.spatial_temporal.packed import Rest
from ops.spatial_temporal.schedule import Schedule
from tests.families.kit import FamilyCases, SmallPipeline, small, their_class, whole

torch.set_num_threads(1)
DIT = LatteConfig(
    num_layers=2,
    num_heads=4,
    head_dim=8,
    ffn_dim=128,
    text_dim=16,
    in_channels=4,
    out_channels=4,
    sample_size=8,
    video_length=5,
)
CLIPS = [Sequence((5, 2, 3), 4), Sequence((1, 3, 3), 0), Sequence((5, 2, 3), 7), Sequence((2, 4, 2), 1)]


def publish(folder: Path) -> Path:
    """A small pipeline as Diffusers itself saves it."""
    torch.manual_seed(0)
    scheduler = FAMILY.scheduler(DIT, FlowConfig())
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[4, 4, 4, 4],
        layers_per_block=1,
        norm_num_groups=1,
        latent_channels=4,
    )
    t5 = T5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    LattePipeline(
        tokenizer=ByT5Tokenizer(),
        text_encoder=T5EncoderModel(t5),
        vae=vae,
        transformer=their_class(DIT),
        scheduler=getattr(diffusers, scheduler.name)(num_train_timesteps=1000, **scheduler.settings),
    ).save_pretrained(folder)
    return folder


def settings(folder: Path, **dit: object) -> ModelConfig:
    path = str(folder)
    return ModelConfig(
        dit=LatteConfig(path=path, **dit),  # type: ignore[arg-type]
        vae=VAEConfig(kind="diffusers", path=path),
        text=TextConfig(path=path, max_length=120, cleaned="lower"),
    )


def clip(pipeline: LattePipeline) -> torch.Tensor:
    """Without guidance, for which the pipeline wants both prompts to have equal rows."""
    size = {"height": 32, "width": 48, "video_length": 5, "num_inference_steps": 3}
    latents = initial_noise(3, (4, 5, 4, 6))[None]
    return pipeline("a dot", guidance_scale=1.0, latents=latents, output_type="latent", **size).frames[0]


CASES = FamilyCases(
    variants={
        "": small(LatteConfig, video_length=3, sample_size=8),
        "of a size beyond 64": small(LatteConfig, video_length=3, sample_size=128, patch=(1, 4, 4)),
    },
    models={  # clips have fewer frames than some bags have workers
        "": whole(LatteConfig(num_layers=1, num_heads=3, head_dim=16, ffn_dim=192, temporal_slices=3, sample_size=4))
    },
    presets={"latte-1": 1.06},
    lora=("attn1.to_q", "attn2.to_v", "ff.net.2"),
    pipeline=SmallPipeline(
        publish=publish,
        model=settings,
        sampled=settings,
        request={"prompt": "a dot", "frames": 5, "height": 32, "width": 48, "guidance_scale": 1.0},
        clip=clip,
        scheduler="DDIM, of predicted noise",
        note="video_length=5",
    ),
)


def test_an_export_says_how_prompts_of_its_pipeline_are_those_of_the_training() -> None:
    pipe = inspect.signature(LattePipeline.__call__).parameters
    assert pipe["clean_caption"].default is True
    assert any("call it with clean_caption=False" in note for note in FAMILY.export_notes(DIT, 0))


def test_a_sampled_clip_is_the_one_of_the_pipeline(tmp_path: Path) -> None:
    """The prompt in its true length, guidance, DDIM of predicted noise, frames that are latents each by itself."""
    folder = publish(tmp_path)
    model, geometry = resolve(settings(folder))
    assert replace(model.dit, path=None) == DIT
    text, negative = build_text(model.text).encode(["  A RED Dot", "blur"])
    pipe = LattePipeline.from_pretrained(folder)
    with torch.no_grad():
        wanted, _ = pipe.encode_prompt("  A RED Dot", clean_caption=False, do_classifier_free_guidance=False)
    torch.testing.assert_close(text, wanted[0], atol=1e-5, rtol=0)
    negative = torch.nn.functional.pad(negative, (0, 0, 0, len(text) - len(negative)))  # the pipeline wants equal rows
    request = SampleRequest(text=text, frames=5, height=32, width=48, seed=5)
    module = build_dit(model.dit, 0).eval()
    (ours,) = sample_latents(module, [request], negative, geometry, SamplerConfig(steps=3, guidance_scale=4.0))
    theirs = pipe(
        prompt_embeds=text[None],
        negative_prompt_embeds=negative[None],
        negative_prompt=None,
        height=32,
        width=48,
        video_length=5,
        num_inference_steps=3,
        guidance_scale=4.0,
        latents=initial_noise(5, (4, 5, 4, 6))[None],
        output_type="latent",
    ).frames[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=0)
    (without,) = sample_latents(module, [request], negative, geometry, SamplerConfig(steps=3, guidance_scale=1.0))
    assert (without - ours).abs().max() > 0.01 * theirs.abs().max()


def test_a_pack_on_a_bag_gives_what_each_clip_gives_alone(run_ranks: Callable) -> None:
    """Three grids, of which two are a stack, text of any length; more ranks than frames; several schedules."""
    module = build_dit(DIT, 0).double().eval()
    numbers = torch.Generator().manual_seed(0)
    tokens = [torch.randn(clip.tokens, 16, dtype=torch.float64, generator=numbers) for clip in CLIPS]
    text = [torch.randn(clip.text_tokens, 16, dtype=torch.float64, generator=numbers) for clip in CLIPS]
    times = torch.tensor([999.0, 3.0, 500.0, 20.0], dtype=torch.float64)
    with torch.no_grad():
        alone = [
            module(tokens[i], times[i : i + 1], text[i], Layout([clip]), Group.solo()) for i, clip in enumerate(CLIPS)
        ]

    def work(group: Group) -> float:
        layout = Layout(CLIPS, group.size, group.rank)
        with torch.no_grad():
            found = module(layout.local(tokens), times, torch.cat(text), layout, group)
        return float((found - layout.local(alone)).abs().max())

    for degree, slices in ((1, 1), (2, 3), (4, 2)):
        module.config = replace(DIT, temporal_slices=slices, spatial_slices=slices)
        assert max(run_ranks(degree, work)) < 1e-10


def test_a_bag_of_any_size_slices_each_stack_by_what_it_costs(run_ranks: Callable) -> None:
    """Five ranks for four heads, five frames and fewer; `auto` by the rates that all ranks got. By Ulysses, which
    deals out heads instead, the same."""
    module = build_dit(DIT, 0).double()
    numbers = torch.Generator().manual_seed(0)
    tokens = [torch.randn(clip.tokens, 16, dtype=torch.float64, generator=numbers) for clip in CLIPS]
    text = torch.randn(sum(clip.text_tokens for clip in CLIPS), 16, dtype=torch.float64, generator=numbers)
    times = torch.tensor([999.0, 3.0, 500.0, 20.0], dtype=torch.float64)
    module.rates = SliceRates(row_s=1e-3, key_s=1e-5, moved_s=5e-3, slice_s=1e-4, part_s=1e-5, backward=2.0)
    alone = Layout(CLIPS)
    expected = module(alone.local(tokens), times, text, alone, Group.solo())
    expected.square().sum().backward()
    wanted = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    whole = list(expected.detach().split([clip.tokens for clip in CLIPS]))
    modules = {}

    def work(group: Group) -> float:
        own = modules.setdefault(group.rank, deepcopy(module))
        own.zero_grad()
        layout = Layout(CLIPS, group.size, group.rank)
        splits = [stack.split for stack in Rest.of(layout, own.how_sliced()).stacks]
        assert {split.schedule for split in splits} != {Schedule()}, "chosen, not the paper's"
        found = own(layout.local(tokens), times, text, layout, group)
        found.square().sum().backward()
        return float((found.detach() - layout.local(whole)).abs().max())

    for degree, mode in ((3, "sliced"), (5, "sliced"), (2, "ulysses"), (7, "ulysses")):
        module.config = replace(DIT, bag_mode=mode)
        modules.clear()
        assert max(run_ranks(degree, work)) < 1e-10
        for name, gradient in wanted.items():
            summed = sum(dict(modules[rank].named_parameters())[name].grad for rank in range(degree))
            torch.testing.assert_close(summed, gradient, atol=1e-10 * float(gradient.abs().max() + 1), rtol=0)


def test_published_variants_that_are_not_computed_are_refused() -> None:
    fields = {**dit_json(DIT), "_class_name": "LatteTransformer3DModel"}
    with pytest.raises(ValueError, match="out_channels 4 is not twice in_channels 4"):
        dit_config({**fields, "out_channels": 4}, DIT, "here")
    with pytest.raises(ValueError, match="norm_type 'layer_norm'; only 'ada_norm_single'"):
        dit_config({**fields, "norm_type": "layer_norm"}, DIT, "here")
    with pytest.raises(ValueError, match=r"model.dit: temporal_lead 3 of temporal_slices 2: a lead lies in"):
        replace(DIT, temporal_slices=2, temporal_lead=3)
