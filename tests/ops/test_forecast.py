"""What a cascade needs is predicted without a device: compared with tensors that have data, and with deeper models."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ops.comm.collectives import Group
from ops.config import FlowConfig, OptimizerConfig
from ops.flow.objective import FlowObjective
from ops.flow.train_pass import PassClip, PassSettings, train_pass
from ops.kernels.push.reference import ALIGN
from ops.models import forecast
from ops.models.base.config import DiTConfig
from ops.models.config import TEXT_BATCH_TOKENS, ImageConfig, TextConfig, VAEConfig
from ops.models.forecast import (
    Precision,
    dit_need_gib,
    image_need,
    pass_bytes,
    states_bytes,
    text_need,
    vae_need,
)
from ops.models.frozen_blocks import bytes_of_blocks
from ops.models.image import CLIPImages, vision_rows
from ops.models.load import build_dit, build_image, build_text, build_vae, dit_skeleton
from ops.models.wan.config import WanConfig
from ops.packed.packing import Layout, Sequence
from ops.shards import STAGE, padding
from ops.storages import StorageCount
from ops.units import GIB
from ops.update.parameters import blocks_in
from tests.families.registry import ONE_EACH, VARIANTS
from tests.long import in_default_run

WAN = WanConfig(num_layers=2, num_heads=4, head_dim=16, ffn_dim=128, freq_dim=32, text_dim=24)
CLIPS = [Sequence((3, 8, 10), 12), Sequence((1, 6, 6), 5)]


def clips_for(config: DiTConfig) -> list[Sequence]:
    """Pictures alone where the transformer takes nothing else."""
    return [replace(clip, grid=(1, *clip.grid[1:])) for clip in CLIPS] if config.images_only else CLIPS


def real_peak(config: DiTConfig, autocast: bool, by_frame: bool = False) -> int:
    """The peak of the same pass on tensors with data; with a level for each frame."""
    dit = build_dit(config, seed=0).train()
    for parameter in dit.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    sequences = [replace(clip, frame_times=by_frame) for clip in clips_for(config)]
    layout, width = Layout(sequences), config.in_channels * math.prod(config.patch)
    clips = [
        PassClip(
            rows=torch.randn(s.tokens, width),
            text=torch.randn(s.text_tokens, config.text_dim),
            key=str(s.tokens),
            weight=0.5,
        )
        for s in sequences
    ]
    with StorageCount() as count:
        train_pass(
            dit,
            clips,
            layout,
            Group.solo(),
            PassSettings(
                objective=FlowObjective(FlowConfig()),
                seed=0,
                step=0,
                latent_width=width,
                dtype=torch.float32,
                autocast=autocast,
            ),
        )
    return count.peak_bytes


def test_a_pass_is_run_once_for_all_who_ask_whatever_runs_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(WAN, eps=3e-6)  # of no other test
    found = pass_bytes(config, CLIPS, 1, Precision())
    for otherwise in (replace(config, compile=True), replace(config, cuda_graphs="auto")):
        assert forecast._of_pass(otherwise, tuple(CLIPS), 1, Precision(), False) == found, "it changes nothing"

    def refuse(*arguments: object) -> None:
        raise AssertionError("it was run again")

    monkeypatch.setattr(forecast, "train_pass", refuse)
    for asked in (config, replace(config, cuda_graphs="auto"), replace(config, compile=True, attention="sdpa")):
        assert pass_bytes(asked, list(CLIPS), 1, Precision()) == found
    for others in ({"num_heads": 2}, {"gradient_checkpointing": True}):
        with pytest.raises(AssertionError, match="run again"):
            pass_bytes(replace(config, **others), CLIPS, 1, Precision())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dora", "autocast"),
    [
        (True, True),
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((False, False), (False, True), (True, False))),
    ],
)
def test_beside_8_bits_too(dora: bool, autocast: bool) -> None:
    config = replace(WAN, lora_rank=2, lora_dora=dora, frozen_dtype="float8", gradient_checkpointing=True)
    predicted, _ = pass_bytes(config, CLIPS, 1, Precision(autocast=autocast))
    assert predicted == pytest.approx(real_peak(config, autocast), rel=0.01)


@pytest.mark.parametrize(
    ("checkpointing", "autocast"),
    [(False, False), (True, True), *(pytest.param(one, not one, marks=pytest.mark.long) for one in (False, True))],
)
@pytest.mark.parametrize("case", in_default_run(["wan"], of=ONE_EACH))
def test_the_prediction_is_what_tensors_with_data_take(case: str, checkpointing: bool, autocast: bool) -> None:
    config = replace(VARIANTS[case], num_layers=2, gradient_checkpointing=checkpointing)
    predicted, _ = pass_bytes(config, clips_for(config), 1, Precision(autocast=autocast))
    # spatial-temporal: index tensors that NumPy made are counted in the prediction alone
    assert predicted == pytest.approx(real_peak(config, autocast), rel=0.02 if config.spatial_temporal else 0.01)


@pytest.mark.parametrize("case", ["ltx", "skyreels df at a frame rate"])
def test_the_prediction_holds_with_a_level_for_each_frame(case: str) -> None:
    config = replace(VARIANTS[case], num_layers=2, gradient_checkpointing=True)
    clips = [replace(clip, frame_times=True) for clip in CLIPS]
    predicted, _ = pass_bytes(config, clips, 1, Precision())
    assert predicted == pytest.approx(real_peak(config, False, by_frame=True), rel=0.01)


OF_ONE_KIND = [case for case in ONE_EACH if len(VARIANTS[case].block_counts) == 1]


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", OF_ONE_KIND)
def test_short_models_stand_for_a_deep_one(case: str, checkpointing: bool) -> None:
    deep = replace(VARIANTS[case], num_layers=9, gradient_checkpointing=checkpointing)
    precision = Precision(parameters=torch.bfloat16, autocast=True, cuda=True)
    for degree, clips in ((1, CLIPS), (2, CLIPS), (2, CLIPS[:1] * 2)):
        whole, _ = pass_bytes(deep, clips, degree, precision)
        assert dit_need_gib(deep, clips, degree, precision) * GIB == pytest.approx(whole, rel=1e-9)


@pytest.mark.long
def test_the_need_is_a_line_over_the_rows_of_a_rank() -> None:
    precision = Precision(parameters=torch.bfloat16, autocast=True, cuda=True)
    config = replace(WAN, gradient_checkpointing=True)

    def need(frames: int, degree: int) -> tuple[int, float]:
        sequence = Sequence((frames, 16, 16), 16)
        return (sequence.tokens + 16) // degree, dit_need_gib(config, [sequence], degree, precision)

    for degree in (1, 2):
        (a, low), (b, middle), (c, high) = (need(frames, degree) for frames in (4, 8, 16))
        assert middle == pytest.approx(low + (high - low) * (b - a) / (c - a), rel=0.01)


def test_the_states_are_counted_too() -> None:
    _, held = pass_bytes(WAN, CLIPS, 1, Precision(parameters=torch.bfloat16))
    weights = sum(p.numel() for p in build_dit(WAN, 0).parameters())
    assert held == 6 * (weights + padding(weights)), "bf16 parameters and an fp32 gradient"


def test_of_factors_the_states_are_counted_and_what_dora_keeps_besides() -> None:
    peaks = []
    for dora in (False, True):
        lora = replace(WAN, lora_rank=2, lora_dora=dora)
        module = build_dit(lora, 0)
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        peak, held = pass_bytes(lora, CLIPS, 1, Precision(parameters=torch.bfloat16))
        frozen = sum(p.numel() for p in module.parameters()) - trained
        assert held == 2 * frozen + 6 * (trained + padding(trained))
        peaks.append(peak)
    assert peaks[1] > 1.02 * peaks[0], "the backward of magnitudes needs every projection's result"


@pytest.mark.parametrize("workers", [1, 3])
def test_the_states_of_one_of_many_workers_are_weights_gradient_and_its_shard(workers: int) -> None:
    weights = sum(p.numel() for p in build_dit(WAN, 0).parameters())
    for dtype, each, shared in ((torch.bfloat16, 6, 16), (torch.float32, 8, 12)):
        found, without_state = states_bytes(WAN, OptimizerConfig(), workers, Precision(parameters=dtype))
        assert without_state == (weights + padding(weights)) * each
        assert found == pytest.approx(weights * (each + shared / workers), rel=0.01)


@pytest.mark.parametrize(("workers", "per_node", "held"), [(3, 3, 1 / 3), (4, 2, 1 / 2), (4, 1, 1)])
def test_of_a_node_s_gradient_a_gpu_holds_its_part_and_two_staging_buffers(
    workers: int, per_node: int, held: float
) -> None:
    weights = sum(p.numel() for p in build_dit(WAN, 0).parameters())
    found, without_state = states_bytes(WAN, OptimizerConfig(), workers, Precision(parameters=torch.bfloat16), per_node)
    staged = 2 * 2 * (STAGE + 2 * ALIGN)
    assert without_state - staged == pytest.approx(weights * (2 + 4 * held), rel=0.03)
    assert found - without_state == pytest.approx(weights * 16 / workers, rel=0.01)


@pytest.mark.parametrize(("workers", "per_node", "held"), [(1, 0, 1), (4, 2, 1 / 2)])
def test_where_blocks_are_fetched_a_gpu_has_two_of_them_and_what_lies_outside(
    workers: int, per_node: int, held: float
) -> None:
    deep = replace(WAN, num_layers=7, gradient_checkpointing=True)
    skeleton = dit_skeleton(deep)
    weights = sum(p.numel() for p in skeleton.parameters())
    block, *others = (sum(p.numel() for p in one.parameters()) for one in blocks_in(skeleton))
    assert set(others) == {block} and len(others) == 6
    precision = Precision(parameters=torch.bfloat16)
    found, without_state = states_bytes(deep, OptimizerConfig(), workers, precision, per_node, fetched=True)
    staged = 2 * 2 * (STAGE + 2 * ALIGN) if per_node else 0
    assert without_state - staged == pytest.approx(2 * (weights - 5 * block) + 4 * held * weights, rel=0.02)
    assert found - without_state == pytest.approx(weights * 16 / workers, rel=0.01)


@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_pass_needs_no_more_where_its_blocks_are_fetched(degree: int) -> None:
    """Beside the buffers, which are states: gradients of a block go as they come, as those of replicated ones do."""
    deep = replace(WAN, num_layers=3, gradient_checkpointing=True)
    precision = Precision(parameters=torch.bfloat16, autocast=True, cuda=True)
    (peak, held), (fetched, less) = (pass_bytes(deep, CLIPS, degree, precision, way) for way in (False, True))
    assert fetched == pytest.approx(peak, rel=0.01) and less < held


@pytest.mark.parametrize("fetched", [False, pytest.param(True, marks=pytest.mark.long)])
def test_autocast_keeps_no_copy_of_a_block_that_has_run(fetched: bool) -> None:
    """A pass with checkpointing casts each weight in fp32 once in the forward, and once more in the backward."""
    wide = replace(WAN, num_heads=16, head_dim=64, ffn_dim=4096, gradient_checkpointing=True)
    block = next(iter(blocks_in(dit_skeleton(wide))))
    clips, cast_bytes = [Sequence((1, 2, 2), 5)], 2 * sum(p.numel() for p in block.parameters())
    few, more = (
        pass_bytes(replace(wide, num_layers=layers), clips, 1, Precision(autocast=True), fetched)[0]
        for layers in (2, 6)
    )
    assert more - few < 0.1 * cast_bytes


@pytest.mark.parametrize(
    "changes",
    [{}, *(pytest.param(one, marks=pytest.mark.long) for one in ({"frozen_dtype": "float8"}, {"expert": "both"}))],
    ids=str,
)
def test_beside_lora_a_gpu_has_two_blocks_of_frozen_weights_and_a_pass_needs_no_more(
    changes: dict[str, object],
) -> None:
    deep = replace(WAN, num_layers=3, gradient_checkpointing=True, lora_rank=4)
    deep = replace(deep, **changes)  # type: ignore[arg-type]
    precision = Precision(parameters=torch.bfloat16, cuda=True)
    (peak, _), (fetched, _) = (pass_bytes(deep, CLIPS, 1, precision, way) for way in (False, True))
    assert fetched == pytest.approx(peak, rel=0.01)
    blocks = bytes_of_blocks(dit_skeleton(deep), 2, frozen=True)
    assert len(blocks) == 3 * len(deep.experts)
    spared = [
        here - there
        for here, there in zip(
            *(states_bytes(deep, OptimizerConfig(), 3, precision, fetched=way) for way in (False, True)), strict=True
        )
    ]
    assert spared == pytest.approx([sum(blocks) - 2 * max(blocks)] * 2, rel=1e-3)


def test_an_image_encoder_needs_what_it_takes_on_tensors_with_data() -> None:
    config = ImageConfig(size=64, patch=8, d_model=48, num_layers=3)
    images = build_image(config)
    assert isinstance(images, CLIPImages)
    pixels = torch.zeros(2, 3, 64, 64)
    with StorageCount() as count, torch.no_grad():
        vision_rows(images.encoder, pixels.to("cpu", copy=True))
    need = image_need(config, 2)
    assert need.peak_gib * GIB == pytest.approx(count.peak_bytes, rel=0.02)
    assert need.weights_gib * GIB == sum(4 * p.numel() for p in images.encoder.parameters())


@pytest.mark.parametrize("shape", [(2, 5, 32, 48), (1, 1, 64, 64)])
def test_an_autoencoder_needs_what_it_takes_on_tensors_with_data(shape: tuple[int, int, int, int]) -> None:
    config = VAEConfig(kind="haar", temporal=4, spatial=8, channels=16)
    vae, video = build_vae(config), torch.zeros(*shape, 3, dtype=torch.uint8)
    with StorageCount() as count:
        vae.encode(video.to("cpu", copy=True))
    assert vae_need(config, *shape).peak_gib * GIB == pytest.approx(count.peak_bytes, rel=0.05)


def test_a_text_encoder_needs_what_it_takes_on_tensors_with_data() -> None:
    """The captions have different lengths: where nothing is padded, Transformers makes no mask and takes less."""
    config = TextConfig(max_length=40, d_model=32, num_layers=1, num_heads=2)
    text = build_text(config)
    peaks = []
    for shortest in (37, 39):  # 40 tokens are 39 bytes and the end
        with StorageCount() as count:
            rows = [row.float() for row in text.encode(["x" * 39, "x" * 39, "x" * shortest])]
        assert [len(row) for row in rows] == [40, 40, shortest + 1]
        peaks.append(count.peak_bytes)
    need = text_need(config, 3, 40, torch.float32)
    assert need.peak_gib * GIB == pytest.approx(peaks[0], rel=0.02)
    assert peaks[1] < peaks[0]
    assert need.weights_gib * GIB == sum(4 * p.numel() for p in text.encoder.parameters())
    away = text_need(replace(config, place="host"), 3, 40, torch.float32)
    assert (away.weights_gib, away.peak_gib) == (0.0, need.weights_gib + need.peak_gib)
    visitor = build_text(replace(config, place="host"))
    with StorageCount() as count:
        visitor.encode(["x" * 39, "x" * 39, "x" * 37])
    assert away.peak_gib * GIB == pytest.approx(count.peak_bytes, rel=0.02), "copies of the weights count"
    most, more = (text_need(config, count * TEXT_BATCH_TOKENS // 64, 64, torch.float32) for count in (1, 2))
    assert more.peak_gib < 1.5 * most.peak_gib, "beyond the tokens of one batch only the results grow"
