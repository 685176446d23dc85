"""What a cascade of any family asks of a GPU beside its kernels, counted on the stand-in of one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from app.bench.gpu.counting import STAND_IN, DispatchCounter, as_autocast, as_on_a_gpu, counted_bag, counted_step
from app.bench.gpu.models import build
from ops.config import ForcingSchedule
from ops.flow.forced_sampling import sample_forced
from ops.flow.sampling import SamplerConfig, SampleRequest, sample_latents
from ops.geometry import Geometry
from ops.models.base.config import DiTConfig
from ops.models.config import TextConfig
from ops.models.families import TEXT_RECIPES
from ops.models.load import build_text
from tests.families.registry import ONE_EACH, VARIANTS
from tests.long import in_default_run


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_a_cascade_uploads_its_layout_and_its_levels_and_waits_for_nothing(config: DiTConfig) -> None:
    """The first step tells which parts of a layout a family uses; from the second on they go in one copy. The end of
    the step waits for the cascade's end, and reads losses and sums."""
    counts = counted_step(config)
    assert (counts.cascade.uploads, counts.cascade.downloads, counts.cascade.waits) == (2, 0, 0)
    assert counts.finish.waits == 3


def test_results_of_other_workers_go_to_the_device_in_one_copy_that_nobody_waits_for() -> None:
    cascade = counted_step(VARIANTS["wan"], published=True).cascade
    assert (cascade.uploads, cascade.downloads, cascade.waits) == (3, 0, 0)


@pytest.mark.parametrize("case", in_default_run(ONE_EACH, of=VARIANTS))
def test_a_cascade_of_a_bag_waits_for_nothing_either(case: str) -> None:
    """Hosts tell each other how long their texts are, without their devices: before, each waited twice for its own."""
    for member in counted_bag(VARIANTS[case]):
        assert (member.uploads, member.downloads, member.waits) == (2, 0, 0)


TEXTS = {kind: TextConfig(kind=kind, max_length=64, picture_every=4) for kind in TEXT_RECIPES} | {
    "t5": TextConfig(max_length=64),
    "t5 that sees its padding": TextConfig(max_length=64, unmasked=64, pad_to=64),
}


@pytest.mark.parametrize("config", TEXTS.values(), ids=TEXTS)
def test_an_encode_of_texts_waits_for_nothing(config: TextConfig) -> None:
    """Captions of many lengths, with what they quote and what they show. Before, each batch of a T5 waited until it
    was known whether anything is hidden, and of a Llama whether its positions go on."""
    captions = ["a red circle", "a blue square moves to the right", "a wide triangle", 'a sign "open"', "x" * 300]
    pictures = [np.zeros((32, 32, 3), np.uint8)] * len(captions) if config.sees_picture else []
    text = build_text(config, STAND_IN)
    with as_on_a_gpu(), DispatchCounter() as counter:
        text.encode(captions, pictures)
    assert counter.uploads > 0 and (counter.downloads, counter.waits) == (0, 0)


FORCING = ForcingSchedule(ar_step=1, base_num_frames=17, overlap_history=5, addnoise_condition=20)


@pytest.mark.parametrize("forcing", [None, FORCING], ids=["all at once", "in windows"])
@pytest.mark.parametrize("given", [False, True], ids=["of noise", "of a first frame"])
def test_sampling_of_clips_waits_for_nothing(given: bool, forcing: ForcingSchedule | None) -> None:
    """Two windows of two clips, of which texts and first frames come from the host. Before, each forward waited for the
    times of its frames, and for the noise of those that a window takes over."""
    config, geometry = VARIANTS["skyreels df"], Geometry(vae_stride=(4, 8, 8), patch=(1, 2, 2))
    text, first = torch.ones(5, config.text_dim), torch.ones(4, 4 * config.out_channels) if given else None
    dit = build(config, STAND_IN)
    dit.register_forward_pre_hook(as_autocast)
    requests = [SampleRequest(text=text, frames=33, height=32, width=32, seed=seed, first=first) for seed in range(2)]
    settings = SamplerConfig(steps=3, forcing=forcing)
    sample = sample_forced if forcing else sample_latents
    with as_on_a_gpu(), DispatchCounter() as counter:
        sample(dit, requests, text, geometry, settings)
    assert counter.uploads > 0 and (counter.downloads, counter.waits) == (0, 0)


def test_gradients_of_a_block_reach_the_sum_by_few_launches() -> None:
    """Small ones by three: a copy into one piece, its cast, an addition. Before, each by one of its own."""
    config = VARIANTS["wan"]
    more = counted_step(replace(config, num_layers=config.num_layers + 1)).cascade.kernels
    block = more - counted_step(config).cascade.kernels
    parameters = len(list(build(config, STAND_IN).all_blocks()[0].parameters()))
    assert parameters == 27
    assert block <= 106 - (parameters - 3), "106 with an addition for each"


def test_lists_of_tensors_are_as_many_kernels_as_become_of_them() -> None:
    def kernels(count: int, elements: int, other: torch.dtype = torch.float32) -> int:
        into = [torch.empty(elements, device=STAND_IN) for _ in range(count)]
        added = [torch.empty(elements, dtype=other, device=STAND_IN) for _ in range(count)]
        with DispatchCounter() as counter:
            torch._foreach_add_(into, added)
        return counter.kernels

    assert [kernels(1, 8), kernels(64, 8), kernels(65, 8)] == [1, 1, 2]
    assert [kernels(1, 320 * 65_536), kernels(1, 320 * 65_536 + 1)] == [1, 2]
    assert kernels(27, 8, torch.bfloat16) == 27, "of two dtypes each goes alone"
