"""The sampler: equal to a plain Euler loop over Diffusers' transformer, whatever the batch and the degree."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from diffusers.pipelines.ltx.pipeline_ltx import calculate_shift
from torch.distributed import HashStore

from ops.comm.collectives import Group
from ops.comm.groups import Groups
from ops.config import TokenShift
from ops.flow.sampling import SamplerConfig, SampleRequest, initial_noise, sample_latents, sigma_schedule
from ops.geometry import Geometry
from ops.models.base.config import DiTConfig
from ops.models.folders import dit_json
from ops.models.latte.config import LatteConfig
from ops.models.load import build_dit
from ops.models.stdit3.config import STDiT3Config
from ops.models.wan.config import WanConfig
from ops.packed.packing import Layout, Sequence
from ops.waiting import CancelToken
from tests.long import in_default_run

FP32_ATOL = 1e-4  # a few steps of a random network, whose velocities grow with guidance
DIT = WanConfig(
    num_layers=2, num_heads=2, head_dim=12, ffn_dim=40, freq_dim=16, text_dim=8, in_channels=4, out_channels=4
)
GEOMETRY = Geometry()
CONFIG = SamplerConfig(steps=3, guidance_scale=2.5, flow_shift=3.0)
# Ulysses, also where the degree does not divide the heads, and spatial-temporal parallelism
FAMILIES_ON_BAGS: dict[str, DiTConfig] = {
    "wan": DIT,
    "latte": LatteConfig(
        num_layers=1, num_heads=2, head_dim=16, ffn_dim=128, text_dim=8, in_channels=4, out_channels=4, sample_size=4
    ),
    "stdit3": STDiT3Config(
        num_layers=1, num_heads=2, head_dim=16, ffn_dim=128, text_dim=8, in_channels=4, out_channels=4, caption_rows=3
    ),
}
NEGATIVE = torch.randn(1, 8, generator=torch.Generator().manual_seed(9))


def request(seed: int, frames: int = 5, height: int = 32, width: int = 48, words: int = 6) -> SampleRequest:
    text = torch.randn(words, 8, generator=torch.Generator().manual_seed(seed))
    return SampleRequest(text=text, frames=frames, height=height, width=width, seed=seed)


def plain_euler(module: torch.nn.Module, wanted: SampleRequest, config: SamplerConfig) -> torch.Tensor:
    """x <- x + dsigma * (v_neg + g (v_text - v_neg)), sigma' = s sigma / (1 + (s - 1) sigma), by Diffusers' class."""
    fields = {key: value for key, value in dit_json(DIT).items() if not key.startswith("_")}
    reference = WanTransformer3DModel(**fields).eval()
    reference.load_state_dict(module.state_dict())
    x = initial_noise(wanted.seed, (4, *GEOMETRY.latent_grid(wanted.frames, wanted.height, wanted.width)))[None]
    raw = [1 - i / config.steps for i in range(config.steps + 1)]
    sigmas = [config.flow_shift * s / (1 + (config.flow_shift - 1) * s) for s in raw]
    with torch.no_grad():
        for sigma, following in pairwise(sigmas):
            time = torch.tensor([1000 * sigma])
            text = reference(x, time, wanted.text[None]).sample
            base = reference(x, time, NEGATIVE[None]).sample
            x = x + (following - sigma) * (base + config.guidance_scale * (text - base))
    return x[0]


def test_packed_batch_equals_plain_euler_of_each_prompt() -> None:
    dit = build_dit(DIT, seed=1)
    requests = [request(1), request(2, frames=1, height=48, width=16, words=2), request(3, frames=9, words=11)]
    latents = sample_latents(dit, requests, NEGATIVE, GEOMETRY, CONFIG)
    for wanted, latent in zip(requests, latents):
        torch.testing.assert_close(latent, plain_euler(dit, wanted, CONFIG), atol=FP32_ATOL, rtol=FP32_ATOL)


def test_each_clip_of_a_batch_has_the_shift_of_its_tokens() -> None:
    dit, line = build_dit(DIT, seed=1), TokenShift(base_tokens=2, max_tokens=20, base=0.2, max=1.5)
    requests = [request(1), request(2, frames=1, height=48, width=16, words=2)]
    latents = sample_latents(dit, requests, NEGATIVE, GEOMETRY, replace(CONFIG, token_shift=line))
    for wanted, latent, tokens in zip(requests, latents, (12, 3)):
        alone = plain_euler(dit, wanted, replace(CONFIG, flow_shift=line.at(tokens)))
        torch.testing.assert_close(latent, alone, atol=FP32_ATOL, rtol=FP32_ATOL)


def test_guidance_one_is_the_prompt_alone() -> None:
    dit = build_dit(DIT, seed=1)
    config = replace(CONFIG, guidance_scale=1.0)
    (latent,) = sample_latents(dit, [request(4)], NEGATIVE, GEOMETRY, config)
    torch.testing.assert_close(latent, plain_euler(dit, request(4), config), atol=FP32_ATOL, rtol=FP32_ATOL)


def test_seed_decides() -> None:
    dit = build_dit(DIT, seed=1)
    first, again, other = sample_latents(
        dit, [request(1), request(1), replace(request(1), seed=8)], NEGATIVE, GEOMETRY, CONFIG
    )
    assert torch.allclose(first, again, atol=FP32_ATOL)
    assert not torch.allclose(first, other, atol=0.1)


def test_between_two_steps_of_a_clip_other_weights_are_those_that_train() -> None:
    """Autocast keeps what it has cast of weights, for all threads: a step of training there would compute with it."""
    dit, wanted = build_dit(DIT, seed=1), request(1)
    made = [parameter.data for parameter in dit.parameters()]
    trained = [data + 0.5 for data in made]

    def put(weights: list[torch.Tensor]) -> None:
        for parameter, data in zip(dit.parameters(), weights, strict=True):
            parameter.data = data

    def step() -> torch.Tensor:
        put(trained)
        layout = Layout([Sequence((2, 2, 3), len(wanted.text))], 1, 0)
        tokens = torch.ones(layout.local_tokens, 16)
        with torch.autocast("cpu", torch.bfloat16):
            found: torch.Tensor = dit(tokens, torch.tensor([500.0]), wanted.text, layout, Group.solo())
        found.float().sum().backward()
        put(made)
        assert all(parameter.grad is not None for parameter in dit.parameters())
        return found.detach()

    expected, found = step(), []

    def between(done: int) -> None:
        with ThreadPoolExecutor(1) as thread:
            found.append(thread.submit(step).result())

    sample_latents(dit, [wanted], NEGATIVE, GEOMETRY, replace(CONFIG, autocast=True), progress=between)
    assert len(found) == CONFIG.steps and all(torch.equal(one, expected) for one in found)


def test_module_keeps_its_training_mode() -> None:
    dit = build_dit(DIT, seed=1).train()
    beside: list[bool] = []  # what trains between its steps: a bag of spatial-temporal ranks slices alike by it
    sample_latents(
        dit,
        [request(1)],
        NEGATIVE,
        GEOMETRY,
        replace(CONFIG, steps=2),
        progress=lambda done: beside.append(dit.training),
    )
    assert dit.training and beside == [True, True]


def on_bag(
    degree: int, halves: bool, work: Callable[[Group, Group | None], list[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """work(group, half of it) on every rank, in threads over Gloo."""
    store, members = HashStore(), tuple(range(degree))

    def member(rank: int) -> list[torch.Tensor]:
        groups = Groups(store, rank, members, "gloo", 0, 60.0, CancelToken())
        middle = degree // 2
        half = groups.get(members[:middle] if rank < middle else members[middle:]) if halves else None
        result = work(groups.get(members), half)
        groups.close()
        return result

    with ThreadPoolExecutor(degree) as pool:
        return list(pool.map(member, members))


def sampled_on(
    dit: torch.nn.Module, requests: list[SampleRequest], group: Group, half: Group | None
) -> list[torch.Tensor]:
    negative = NEGATIVE.to(requests[0].text.dtype)
    return sample_latents(dit, requests, negative, GEOMETRY, CONFIG, group, half=half)


@pytest.mark.parametrize("family", in_default_run(["wan"], of=FAMILIES_ON_BAGS))
def test_every_rank_of_a_bag_gets_the_latents_of_one_worker(family: str) -> None:
    """1 to 4 ranks as one bag, 2 and 4 also as two, of which one computes with the prompts and the other with the
    negative. What fp32 leaves between them is rounding: in fp64 it is nothing."""
    # 5 x 2 x 1 and 2 x 3 x 1 tokens: neither the lengths nor the whole divide evenly by rank
    requests = [
        request(1, frames=5, height=48, width=16),
        request(2, frames=1, height=48, width=16),
        request(3, frames=9, height=16, width=16),
    ]
    for dtype, limit in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        dit = build_dit(FAMILIES_ON_BAGS[family], seed=1).to(dtype)
        sampled = partial(sampled_on, dit, [replace(one, text=one.text.to(dtype)) for one in requests])
        alone = sampled(Group.solo(), None)
        largest = max(float(one.abs().max()) for one in alone)
        assert all(one.dtype == dtype for one in alone)
        for degree, halves in ((1, False), (2, False), (2, True), (3, False), (4, False), (4, True)):
            for latents in on_bag(degree, halves, sampled):
                off = max(float((a - b).abs().max()) for a, b in zip(latents, alone, strict=True))
                assert off < limit * largest, f"{degree} ranks, halves {halves}, {dtype}: {off / largest:.1e}"


def test_a_half_that_is_none_is_refused() -> None:
    group = Group(None, (0, 1, 2), 1, 0.0)
    with pytest.raises(ValueError, match="rank 0 of 1 is in no half of a group of 3 in which it has rank 1"):
        sample_latents(build_dit(DIT, seed=1), [request(1)], NEGATIVE, GEOMETRY, CONFIG, group, half=Group.solo())


def test_shapes_that_the_codec_cannot_make_are_refused() -> None:
    with pytest.raises(ValueError, match=r"takes 4\*k\+1 frames"):
        sample_latents(build_dit(DIT, seed=1), [request(1, frames=6)], NEGATIVE, GEOMETRY, CONFIG)


def test_schedule_is_that_of_diffusers() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(sigmas=[1 - index / 8 for index in range(8)])
    torch.testing.assert_close(torch.tensor(sigma_schedule(8, 3.0)), scheduler.sigmas, atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match="0 sampling steps"):
        sigma_schedule(0, 3.0)


@pytest.mark.parametrize("tokens", [16, 256, 1000, 4096, 20000])
def test_a_shift_by_tokens_is_that_of_the_pipelines(tokens: int) -> None:
    """LTXPipeline gives its scheduler mu of the number of tokens, on a line from 0.95 to 2.05."""
    line = TokenShift(base_tokens=1024, max_tokens=4096, base=0.95, max=2.05)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    mu = calculate_shift(tokens, 1024, 4096, 0.95, 2.05)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / 6, 6), mu=mu)
    np.testing.assert_allclose(scheduler.sigmas.numpy(), sigma_schedule(6, line.at(tokens)), atol=1e-6)
