"""What every model family promises: its folder registers it, and loading, folders, LoRA, parity and counts work by its
facts. Its cases are declared in tests/families/test_NAME.py."""

from __future__ import annotations

import inspect
import itertools
import math
import re
import shutil
import subprocess
import sys
import typing
from dataclasses import fields, replace
from pathlib import Path

import diffusers
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from app.export.parity import (
    TOLERANCE,
    compare_files,
    compare_forward,
    load_reference,
    our_velocity,
    parity_sample,
    their_velocity,
)
from ops.comm.collectives import Group
from ops.config import FlowConfig
from ops.models.base.config import DiTConfig
from ops.models.base.family import Json, ParitySample
from ops.models.families import FAMILIES, VAE_CLASSES, AnyDiT
from ops.models.folders import dit_config, dit_json
from ops.models.load import build_dit, dit_skeleton, kept_weights, num_trained
from ops.models.wan.config import WanConfig
from ops.models.weights import write_folder
from ops.packed.conditions import Conditions
from ops.packed.packing import Layout, Sequence
from ops.packed.patches import patchify
from tests.families.kit import own_weights, their_class
from tests.families.registry import CASES, ONE_EACH, VARIANTS, declared
from tests.long import in_default_run

ROOT = Path(__file__).parent.parent.parent
NAMES = list(FAMILIES)


IN_DIFFUSERS = [case for case, config in VARIANTS.items() if FAMILIES[config.architecture].own_code is None]


def test_every_folder_is_a_family_and_wan_is_meant_where_none_is_named() -> None:
    folders = {file.parent.name for file in (ROOT / "ops" / "models").glob("*/family.py")} - {"base"}
    assert set(NAMES) == folders and NAMES[0] == "wan"
    assert typing.get_args(AnyDiT) == tuple(family.config for family in FAMILIES.values())
    assert [family.settings().architecture for family in FAMILIES.values()] == NAMES


def test_a_family_without_a_test_of_its_own_is_told_where_it_belongs() -> None:
    with pytest.raises(FileNotFoundError, match=r"tests/families/test_loom\.py does not exist: CASES there says how"):
        declared("loom")


def test_a_new_folder_is_found_by_configs_without_another_line(tmp_path: Path) -> None:
    """A copy of the models room with a family more: its name is an architecture that a config may choose."""
    shutil.copytree(ROOT / "ops", tmp_path / "ops", ignore=shutil.ignore_patterns("__pycache__"))
    models = tmp_path / "ops" / "models"
    shutil.copytree(models / "wan", models / "loom")
    for file in (models / "loom").glob("*.py"):
        file.write_text(file.read_text().replace("models.wan", "models.loom").replace('"wan"', '"loom"'))
    code = (
        "from ops.models.config import ModelConfig; from ops.typed import build, parse\n"
        "print(type(build(ModelConfig, parse('dit: {architecture: loom}')).dit).__module__)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "ops.models.loom.config", found.stderr


@pytest.mark.parametrize("case", IN_DIFFUSERS)
def test_diffusers_has_the_named_classes(case: str) -> None:
    config = VARIANTS[case]
    family = FAMILIES[config.architecture]
    shift = family.scheduler(config, FlowConfig(flow_shift=5.0))
    for cls in (family.diffusers_class, family.pipeline_class(config), family.vae.name, shift.name):
        assert hasattr(diffusers, cls), cls
    assert family.vae is VAE_CLASSES[family.vae.name]
    getattr(diffusers, shift.name)(num_train_timesteps=1000, **shift.settings)


@pytest.mark.parametrize("case", VARIANTS)
def test_every_number_of_a_folder_comes_back(case: str) -> None:
    config = VARIANTS[case]
    family = FAMILIES[config.architecture]
    assert set(family.key_map) <= {setting.name for setting in fields(family.config)}
    runtime = replace(config, gradient_checkpointing=True, lora_rank=2)
    assert dit_config(dit_json(config), runtime, "here") == runtime


@pytest.mark.parametrize("name", [name for name in NAMES if not FAMILIES[name].own_code])
def test_a_key_that_is_not_in_config_json_is_meant_as_the_class_has_it(name: str) -> None:
    family = FAMILIES[name]
    parameters = inspect.signature(getattr(diffusers, family.diffusers_class)).parameters
    keys = {*family.key_map.values(), *family.fixed_fields, *family.write_rest(family.settings())}
    defaults = {key: one.default for key, one in parameters.items() if key in keys and one.default is not None}
    assert dict(family.class_defaults) == defaults
    for key in family.key_map.values():
        known = {**defaults, **dit_json(family.settings())}
        if key in defaults:  # written out or left out, the numbers are the same
            whole, without = {**known, key: defaults[key]}, {k: value for k, value in known.items() if k != key}
            assert _config_or_refusal(without, family.settings()) == _config_or_refusal(whole, family.settings()), key
        elif key != family.key_map["out_channels"]:
            with pytest.raises(ValueError, match=f"here has no {key}, and {family.diffusers_class} no default of it"):
                dit_config({**known, key: None}, family.settings(), "here")


def _config_or_refusal(fields: Json, base: DiTConfig) -> object:
    """A number that other numbers forbid is refused either way."""
    try:
        return dit_config(fields, base, "here")
    except ValueError as refused:
        return str(refused)


def test_folders_that_leave_out_their_theta_or_numbers_get_those_of_their_class() -> None:
    hunyuan = dit_config({"_class_name": "HunyuanVideoTransformer3DModel"}, WanConfig(), "here")
    assert (hunyuan.rope_theta, hunyuan.num_layers, hunyuan.dim) == (256.0, 20, 3072)
    assert dit_config({"architectures": ["STDiT3"]}, WanConfig(), "here").num_layers == 28
    with pytest.raises(ValueError, match="here has attention_bias False; only True is supported"):
        dit_config({"_class_name": "LatteTransformer3DModel"}, WanConfig(), "here")


def test_diffusers_has_no_class_of_families_with_code_of_their_own() -> None:
    for family in (FAMILIES[name] for name in NAMES if FAMILIES[name].own_code):
        assert not hasattr(diffusers, family.diffusers_class)
        assert VAE_CLASSES[family.vae.name] is family.vae and hasattr(diffusers, family.vae.name)
        with pytest.raises(AssertionError, match="Diffusers has no class of this family"):
            family.pipeline_class(family.settings())


@pytest.mark.parametrize("case", in_default_run([case for case in ONE_EACH if case in IN_DIFFUSERS], of=IN_DIFFUSERS))
def test_a_written_folder_is_the_same_transformer_to_diffusers(case: str, tmp_path: Path) -> None:
    config = VARIANTS[case]
    state = build_dit(config, seed=0).state_dict()
    generator = torch.Generator().manual_seed(0)
    state = {key: 0.1 * torch.randn(value.shape, generator=generator) for key, value in state.items()}
    whole = {**state, **kept_weights(config)}
    write_folder(tmp_path, whole, dit_json(config))
    compare_files(tmp_path, whole)
    reference = load_reference(tmp_path, FAMILIES[config.architecture].diffusers_class)
    assert 0 < compare_forward(reference, config, case) <= TOLERANCE


@pytest.mark.parametrize("case", IN_DIFFUSERS)
def test_forward_and_gradients_are_those_of_diffusers(case: str) -> None:
    """Every parameter is random, also those that start at zero, so that a forgotten one shows."""
    compare_with_diffusers(VARIANTS[case], parity_sample(VARIANTS[case]))


FRAME_TIMES = [case for case in IN_DIFFUSERS if VARIANTS[case].frame_times]


@pytest.mark.parametrize("case", FRAME_TIMES)
def test_frames_with_a_time_of_their_own_are_those_of_diffusers(case: str) -> None:
    """Wan2.2 TI2V-5B: one time for the tokens of the first latent frame, another for the rest."""
    compare_with_diffusers(VARIANTS[case], parity_sample(VARIANTS[case], clean_frames=1))


@pytest.mark.parametrize("case", [case for case in FRAME_TIMES if not VARIANTS[case].gives_first_frame])
def test_first_frames_with_a_little_noise_are_those_of_diffusers(case: str) -> None:
    sample = parity_sample(VARIANTS[case], clean_frames=1)
    told = replace(sample.conditions, first_times=torch.tensor([120.0]))
    compare_with_diffusers(VARIANTS[case], replace(sample, conditions=told))


@pytest.mark.parametrize("case", [case for case, config in VARIANTS.items() if config.clip_rate])
def test_clips_of_a_pack_may_have_frame_rates_of_their_own(case: str) -> None:
    config = VARIANTS[case]
    module, sample = build_dit(config, 0), parity_sample(config)
    t, h, w = (size // patch for size, patch in zip(sample.latent.shape[1:], config.patch, strict=True))
    rows, solo = patchify(sample.latent, config.patch), Group.solo()
    found = []
    with torch.no_grad():
        for rates in ((12.0, 30.0), (12.0,), (30.0,)):
            pack = Layout([Sequence((t, h, w), len(sample.text), frame_rate=rate) for rate in rates])
            count = len(rates)
            inputs = [rows.repeat(count, 1), sample.timestep.repeat(count), sample.text.repeat(count, 1)]
            found.append(module(*inputs, pack, solo))
        other = build_dit(config.at_rate(30.0), 0)
        by_settings = other(rows, sample.timestep, sample.text, Layout([Sequence((t, h, w), len(sample.text))]), solo)
    torch.testing.assert_close(found[0], torch.cat(found[1:]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[2], by_settings, atol=1e-5, rtol=1e-5)
    assert (found[1] - found[2]).abs().max() > 1e-4


@pytest.mark.parametrize("case", [*ONE_EACH, "cogvideox 5b i2v", "skyreels df at a frame rate"])
def test_what_one_cascade_asked_of_its_layout_is_sent_for_the_layout_of_any_other(case: str) -> None:
    """More clips or fewer, on more workers or one. On a CPU nothing is sent beforehand, so a stand-in takes it."""
    config = VARIANTS[case]
    module, sample = build_dit(config, 0), parity_sample(config)
    t, h, w = (size // patch for size, patch in zip(sample.latent.shape[1:], config.patch, strict=True))
    image = 0 if sample.conditions.image is None else len(sample.conditions.image)
    for by_frame in (False, True)[: 1 + config.levels_by_frame]:
        clip = Sequence((t, h, w), len(sample.text), image, frame_times=by_frame)
        packs, asked = [[clip, replace(clip, grid=(t, 2 * h, w)), clip], [clip], [clip, clip]], []
        for pack in packs:
            layout, count = Layout(pack), len(pack)
            rows = torch.zeros(layout.local_tokens, config.in_channels * math.prod(config.patch))
            told = {part.name: getattr(sample.conditions, part.name) for part in fields(sample.conditions)}
            conditions = Conditions(
                **{name: None if one is None else torch.cat([one] * count) for name, one in told.items()}
            )
            with torch.no_grad():
                times = torch.full((layout.num_times,), 500.0)
                module(rows, times, sample.text.repeat(count, 1), layout, Group.solo(), conditions)
            asked.append(layout.asked)
        for parts, pack, workers in itertools.product(asked, packs, (1, 2)):
            sent = Layout(pack, workers, workers - 1, "meta", beforehand=parts)
            assert sent.asked == {part for part in parts if isinstance(part, str)}


def compare_with_diffusers(config: DiTConfig, sample: ParitySample) -> None:
    """Forward and gradients, against the largest of each."""
    reference = their_class(config)
    module = build_dit(config, seed=0)
    module.load_state_dict(own_weights(reference, config))  # strict: the same names and shapes
    ours, theirs = our_velocity(module, sample), their_velocity(reference, config, sample)
    torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.detach().abs().max()), rtol=0)
    ours.square().mean().backward()
    theirs.square().mean().backward()
    expected = {name: weight.grad for name, weight in reference.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in expected.values() if grad is not None)
    for name, weight in module.named_parameters():
        if re.search(CASES[config.architecture].unread, name):
            assert expected[name] is None and weight.grad is None, name
            continue
        assert weight.grad is not None, name
        torch.testing.assert_close(weight.grad, expected[name], atol=1e-5 * largest, rtol=1e-4, msg=name)


@pytest.mark.parametrize("case", VARIANTS)
def test_lora_reaches_the_projections_of_every_block(case: str) -> None:
    config = replace(VARIANTS[case], lora_rank=2)
    module = dit_skeleton(config)
    trained = [key for key, weight in module.named_parameters() if weight.requires_grad]
    assert trained and all(".lora_" in key for key in trained)
    for prefix in FAMILIES[config.architecture].lora_names.blocks:
        blocks = {key.removeprefix(prefix).split(".")[0] for key in module.state_dict() if key.startswith(prefix)}
        assert blocks == {key.removeprefix(prefix).split(".")[0] for key in trained if key.startswith(prefix)}
    assert num_trained(config) == sum(weight.numel() for weight in module.parameters() if weight.requires_grad)


@pytest.mark.parametrize("case", VARIANTS)
def test_what_a_forward_computes_is_what_pytorch_counts(case: str) -> None:
    """One more block, for more tokens and text: what is once per sample or outside of the blocks falls out."""
    config = VARIANTS[case]
    deeper = replace(config, num_layers=config.num_layers + 1)
    small, large = parity_sample(config), larger(config, parity_sample(config))

    def told(of: DiTConfig, sample: ParitySample) -> float:
        grid = [size // patch for size, patch in zip(sample.latent.shape[1:], of.patch, strict=True)]
        tokens, text = math.prod(grid), len(sample.text)
        return of.flops.linear(tokens, text) + of.flops.attention(tokens, text, grid[0])

    def counted(of: DiTConfig, sample: ParitySample) -> float:
        module = build_dit(of, seed=0)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            our_velocity(module, sample)
        return float(counter.get_total_flops())

    more = [f(deeper, large) - f(config, large) - f(deeper, small) + f(config, small) for f in (told, counted)]
    assert more[0] == pytest.approx(more[1], rel=5e-3) and more[0] > 0


def larger(config: DiTConfig, sample: ParitySample) -> ParitySample:
    """With twice the height, and five rows of text more."""
    latent = torch.cat([sample.latent, sample.latent], dim=2)
    return replace(sample, latent=latent, text=torch.cat([sample.text, sample.text[:5]]))
