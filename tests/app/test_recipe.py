"""Where a run differs from what its published weights were trained with it says so, and nowhere else."""

from __future__ import annotations

import inspect
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import diffusers
import pytest

from actors.config import TrainConfig
from app.settings.config import RunConfig
from app.settings.notes import notes
from data.config import BucketsConfig
from ops.config import FlowConfig
from ops.flow.objective import draw_sigma
from ops.models.base.family import PipelineFiles
from ops.models.config import ModelConfig, TextConfig
from ops.models.families import FAMILIES
from ops.models.folders import dit_json
from ops.models.ltx.config import CONDITION_PIPELINE
from ops.models.recipe import EXPORTED
from ops.typed import as_plain

CONFIGS = Path(__file__).parents[2] / "configs"
VELOCITIES = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
PUBLISHED: dict[str, dict[str, Any]] = {  # scheduler_config.json by preset: what counts of the published files
    "models/wan2.1-i2v-14b-480p": {"flow_shift": 3.0},
    "runs/wan2.1-14b-lora-80gb": {"flow_shift": 3.0},
    "runs/skyreels-v2-df-1.3b-lora-80gb": {"flow_shift": 8.0},
    "runs/wan2.2-t2v-a14b-both-lora-80gb": {"flow_shift": 3.0},
    "runs/hunyuan-13b-lora-80gb": {"shift": 7.0},
    "runs/hunyuan-i2v-13b-lora-80gb": {"shift": 7.0},
    "runs/hunyuan1.5-8b-lora-80gb": {"shift": 5.0},
    "runs/hunyuan1.5-i2v-8b-lora-80gb": {"shift": 5.0},
    "runs/kandinsky5-lite-lora-80gb": {"shift": 5.0},
    "runs/flux.1-dev-lora-80gb": {"use_dynamic_shifting": True, "base_image_seq_len": 256, "max_image_seq_len": 4096},
    "models/flux.1-schnell": {"use_dynamic_shifting": False, "shift": 1.0},
    "runs/ltx-2b-lora-24gb": {
        **{"use_dynamic_shifting": True, "base_image_seq_len": 1024, "max_image_seq_len": 4096},
        **{"base_shift": 0.95, "max_shift": 2.05},
    },
    "runs/ltx2-19b-lora-80gb": {
        **{"use_dynamic_shifting": True, "base_image_seq_len": 1024, "max_image_seq_len": 4096},
        **{"base_shift": 0.95, "max_shift": 2.05, "shift_terminal": 0.1},
    },
    "models/ltx-2b-0.9.5": {"use_dynamic_shifting": False, "shift": 1.0},
    "runs/ltx-13b-lora-80gb": {"use_dynamic_shifting": False, "shift": 1.0},
    "runs/cogvideox-2b-lora-24gb": {**VELOCITIES, "snr_shift_scale": 3.0},
    "runs/cogvideox-5b-lora-80gb": {**VELOCITIES, "snr_shift_scale": 1.0},
    "runs/latte-1-lora-24gb": {"beta_schedule": "linear", "prediction_type": "epsilon"},
    "runs/mochi-1-lora-80gb": {"invert_sigmas": True, "shift": 1.0},
    "models/stdit-xl2": {},
}
USUAL_BUT_WRONG = {  # in a run of the folder alone, with the defaults of all other settings
    "wan": ("model.text.max_length 512 (here 226)", "model.text.pad_to 512 (here 0)"),
    "skyreels": ("model.text.max_length 512 (here 226)", "model.text.pad_to 512 (here 0)"),
    "hunyuan": ("model.text.kind hunyuan (here t5)", "train.flow.flow_shift 7.0 (here 3.0)"),
    "hunyuan15": ("model.text.kind hunyuan15 (here t5)", "max_length 1000 (here 226)"),
    "kandinsky": ("model.text.kind kandinsky (here t5)", "max_length 256 (here 226)", "train.flow.flow_shift 5.0"),
    "flux": (
        "model.text.kind flux (here t5)",
        "train.flow.token_shift {law: line, base_tokens: 256, max_tokens: 4096, base: 0.5, max: 1.15} (here null)",
    ),
    "ltx": ("model.text.unmasked 128 (here 0)", "train.flow.token_shift {law: line, base_tokens: 1024, "),
    "ltx2": ("model.text.kind ltx2 (here t5)", "max_length 1024 (here 226)", "train.flow.token_shift {law: line, "),
    "cogvideox": ("model.text.unmasked 226 (here 0)", "pad_to 226 (here 0)", "model.dit.snr_shift 3.0 (here 1.0)"),
    "latte": ("model.text.cleaned lower (here true)",),
    "mochi": ("cleaned false (here true)", "empty none (here encoded)", "train.flow.flow_shift 1.0 (here 3.0)"),
    "stdit3": (
        "model.text.cleaned lower (here true)",
        "model.text.empty none (here encoded)",
        "train.flow.token_shift {law: root, base_tokens: 1024} (here null)",
    ),
}


def load(preset: str) -> RunConfig:
    return RunConfig.load(CONFIGS / f"{preset}.yaml", ["run.name=loom"])


def published(preset: str, folder: Path) -> RunConfig:
    """The preset on a pipeline of its numbers, as far as JSON files say what it is."""
    config = load(preset)
    dit = config.model.dit
    files = {
        "transformer/config.json": dit_json(dit),
        "scheduler/scheduler_config.json": PUBLISHED[preset],
        "model_index.json": {"_class_name": "Pipeline", "force_zeros_for_empty_prompt": True},
    }
    for name, fields in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(fields))
    return replace(config, model=replace(config.model, dit=replace(dit, path=str(folder))))


def told(config: RunConfig) -> list[str]:
    return [note for note in notes(config) if "were trained with" in note]


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_trains_weights_as_they_were_trained(preset: str, tmp_path: Path) -> None:
    assert told(published(preset, tmp_path)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_weights_alone_is_told_all_that_differs(family: str, tmp_path: Path) -> None:
    preset = next(name for name in PUBLISHED if load(name).model.dit.architecture == family)
    config = published(preset, tmp_path)
    dit = FAMILIES[family].settings(path=str(tmp_path))
    bare = replace(config, model=ModelConfig(dit=dit), train=TrainConfig())  # type: ignore[arg-type]
    (sentence,) = told(bare)
    assert sentence.startswith(f"the weights of {tmp_path} were trained with model.")
    for difference in USUAL_BUT_WRONG[family]:
        assert difference in sentence
    (tmp_path / EXPORTED).write_text("")  # an export was trained as its own run was
    assert told(bare) == []


@pytest.mark.parametrize("preset", [path.stem for path in sorted((CONFIGS / "models").glob("*.yaml"))])
def test_samples_of_a_preset_are_as_its_pipeline_makes_them(preset: str) -> None:
    """But for sizes of weights that are for 720p alone."""
    config = load(f"models/{preset}")
    dit, sample = config.model.dit, as_plain(config.sample)
    family = FAMILIES[dit.architecture]
    if config.model.vae.kind == "haar":  # for trials
        return
    index: dict[str, Any] = {"transformer_2": ["diffusers", "WanTransformer3DModel"]} if dit.two_experts else {}
    wanted = dict(family.published(index, {**family.class_defaults, **dit_json(dit)}).clips)
    if preset.endswith("-720p"):
        wanted |= {"height": 720, "width": 1280}
    if dit.clip_rate is not None:
        sample["fps"] = dit.clip_rate
    assert {name: sample[name] for name in wanted} == wanted


@pytest.mark.parametrize("run", [path.stem for path in sorted((CONFIGS / "runs").glob("*.yaml"))])
def test_clips_of_a_run_on_published_weights_are_as_fast_as_its_samples(run: str) -> None:
    """Whatever the rate of its data is: weights that were trained at 8 frames per second know motion at that. Those
    that get the rate of each clip know others."""
    config = load(f"runs/{run}")
    if config.model.dit.path and not config.model.dit.images_only:
        own = {0.0} if config.model.dit.clip_rate else set()
        assert config.data.fps in {config.model.dit.clip_rate or config.sample.fps, *own}


@pytest.mark.parametrize(
    ("preset", "rate"),
    [
        *((f"runs/{name}-lora-80gb", 16.0) for name in ("wan2.1-14b", "wan2.2-t2v-a14b-both")),
        *((f"runs/{name}-lora-80gb", 24.0) for name in ("hunyuan-13b", "hunyuan1.5-8b", "kandinsky5-lite")),
        *((f"runs/{name}", 8.0) for name in ("cogvideox-5b-lora-80gb", "latte-1-lora-24gb")),
        ("runs/mochi-1-lora-80gb", 30.0),
    ],
)
def test_clips_of_another_rate_than_that_of_the_weights_are_told(preset: str, rate: float, tmp_path: Path) -> None:
    config = published(preset, tmp_path)
    for fps, here in ((12.0, "12.0"), (0.0, "0, the rate of each clip")):
        data = replace(config.data, fps=fps)
        (sentence,) = told(replace(config, data=data))
        assert f"were trained with data.fps {rate} (here {here});" in sentence
        pictures = replace(data, buckets=BucketsConfig(table=("1x480x832",)))
        assert told(replace(config, data=pictures)) == []


@pytest.mark.parametrize("preset", [*(f"models/ltx-{which}" for which in ("2b", "2b-0.9.5", "13b")), "models/ltx2-19b"])
def test_clips_of_ltx_keep_their_rate_as_in_its_own_trainer(preset: str) -> None:
    """Brought to 25 per second, of every 25 frames of a clip of 24 one is there twice."""
    name = preset.removeprefix("models/")
    runs = [f"runs/{path.stem}" for path in (CONFIGS / "runs").glob(f"{name}-lora-*.yaml")]
    for config in map(load, [preset, *runs]):
        assert config.data.fps == 0 and config.model.dit.clip_rate
    assert runs or name == "ltx-2b-0.9.5"


def test_weights_that_are_told_the_rate_of_each_clip_have_seen_several(tmp_path: Path) -> None:
    """LTX-Video and Open-Sora's; of SkyReels-V2 those with sample_info, which a folder says, and a run need not."""
    for preset in ("runs/ltx-2b-lora-24gb", "models/stdit-xl2", "runs/skyreels-v2-df-1.3b-lora-80gb"):
        config = published(preset, tmp_path)
        assert told(replace(config, data=replace(config.data, fps=0.0))) == []
    untold = replace(config.model.dit, sample_info=False)  # type: ignore[call-arg]
    other = replace(config, model=replace(config.model, dit=untold), data=replace(config.data, fps=16.0))
    assert told(other) == []


def test_the_shift_of_hunyuan_1_5_is_that_of_its_training(tmp_path: Path) -> None:
    """Its authors' train.py draws with 3, whatever the size, and their pipelines sample with 5, 7 or 9."""
    config = published("runs/hunyuan1.5-8b-lora-80gb", tmp_path)
    assert (config.train.flow.flow_shift, config.sample.flow_shift) == (3.0, 5.0)
    as_sampled = replace(config, train=TrainConfig(flow=FlowConfig(flow_shift=5.0)))
    (sentence,) = told(as_sampled)
    assert "train.flow.flow_shift 3.0 (here 5.0)" in sentence


def test_weights_without_their_pipeline_are_told_what_their_family_is(tmp_path: Path) -> None:
    """Without a scheduler beside them, nothing is said of noise levels."""
    config = published("runs/cogvideox-2b-lora-24gb", tmp_path)
    (tmp_path / "scheduler" / "scheduler_config.json").unlink()
    (tmp_path / "model_index.json").unlink()
    for path in (tmp_path, tmp_path / "transformer"):
        dit = replace(config.model.dit, path=str(path), snr_shift=1.0)  # type: ignore[call-arg]
        plain = replace(config, model=replace(config.model, dit=dit))
        assert told(plain) == []
        (sentence,) = told(replace(plain, model=replace(plain.model, text=ModelConfig().text)))
        assert "model.text.unmasked 226 (here 0)" in sentence and "snr_shift" not in sentence


def test_a_scheduler_of_another_training_is_told(tmp_path: Path) -> None:
    config = published("runs/mochi-1-lora-80gb", tmp_path)
    (tmp_path / "scheduler" / "scheduler_config.json").write_text('{"shift": 1.0}')
    assert any("its scheduler has no invert_sigmas" in note for note in notes(config))


def described(name: str) -> list[tuple[str, PipelineFiles]]:
    """Its pipelines of text to video, with what tells them apart."""
    family = FAMILIES[name]
    fields = {**family.class_defaults, "image_condition_type": None, "task_type": "t2v"}
    usual = family.pipeline_class(family.settings()), PipelineFiles(transformer=fields)
    later = CONDITION_PIPELINE, PipelineFiles(index={"_class_name": CONDITION_PIPELINE}, transformer=fields)
    return [usual, later] if name == "ltx" else [usual]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.own_code is None])
def test_captions_are_cleaned_where_their_pipeline_cleans_them(name: str) -> None:
    for pipeline, files in described(name):
        text = TextConfig(**FAMILIES[name].recipe(files).text)  # type: ignore[arg-type]
        cleans = text.recipe.cleaned if text.recipe else bool(text.cleaned and not text.unmasked)
        source = inspect.getsource(sys.modules[getattr(diffusers, pipeline).__module__])
        assert cleans == any(call in source for call in ("prompt_clean(", "_text_preprocessing(")), pipeline


def test_mochis_noise_levels_are_drawn_evenly() -> None:
    """As demos/fine_tuner/train.py of genmoai/mochi draws them: torch.rand, without a shift."""
    flow = load("runs/mochi-1-lora-80gb").train.flow
    drawn = sorted(draw_sigma(flow, 0, step, "clip", tokens=44_520) for step in range(4000))
    assert all(abs(level - (place + 0.5) / 4000) < 0.03 for place, level in enumerate(drawn))


@pytest.mark.parametrize("tokens", [1024, 2048, 4096, 8192])
def test_noise_levels_of_ltx_video_are_those_of_its_trainer(tokens: int) -> None:
    """src/ltxv_trainer/timestep_samplers.py of Lightricks/LTX-Video-Trainer: a sigmoid of normal numbers around a line
    through 0.95 at 1,024 tokens and 2.05 at 4,096."""
    flow, middle = load("runs/ltx-13b-lora-80gb").train.flow, 0.95 + (2.05 - 0.95) * (tokens - 1024) / (4096 - 1024)
    drawn = sorted(draw_sigma(flow, 0, step, "clip", tokens) for step in range(4000))
    for place in (0.1, 0.5, 0.9):
        wanted = 1 / (1 + math.exp(-(middle + NormalDist().inv_cdf(place))))
        assert drawn[int(place * 4000)] == pytest.approx(wanted, abs=0.02)


@pytest.mark.parametrize(("frames", "latents"), [(1, 1), (51, 15), (102, 30), (204, 60)])
def test_noise_levels_of_open_sora_are_those_of_its_scheduler(frames: int, latents: int) -> None:
    """opensora/schedulers/rf/rectified_flow.py of Open-Sora 1.2: the root of the pixels over those of 512x512, times
    that of the latent frames, five for 17 frames."""
    flow = load("models/stdit-xl2").train.flow
    assert latents == (1 if frames == 1 else frames // 17 * 5)
    for height, width in ((240, 416), (512, 512), (720, 1280)):
        ratio = math.sqrt(height * width / (512 * 512)) * math.sqrt(latents)
        assert flow.shift_at(height // 16 * width // 16 * latents) == pytest.approx(ratio)


@pytest.mark.parametrize(("preset", "shift"), [("hunyuan-13b", 7.0), ("hunyuan-i2v-13b", 7.0), ("hunyuan1.5-8b", 3.0)])
def test_noise_levels_of_hunyuan_are_those_of_its_authors(preset: str, shift: float) -> None:
    """train_image2video_lora.py of HunyuanVideo-I2V (--flow-shift 7.0 --flow-reverse, lognorm) and train.py of
    HunyuanVideo-1.5 (train_timestep_shift 3.0, lognorm): a sigmoid of normal numbers, then the shift."""
    flow = load(f"models/{preset}").train.flow
    drawn = sorted(draw_sigma(flow, 0, step, "clip", tokens=1000) for step in range(4000))
    for place in (0.1, 0.5, 0.9):
        plain = 1 / (1 + math.exp(-NormalDist().inv_cdf(place)))
        assert drawn[int(place * 4000)] == pytest.approx(shift * plain / (1 + (shift - 1) * plain), abs=0.03)


def test_weights_in_another_form_are_refused_once_and_not_noted(tmp_path: Path) -> None:
    """The start refuses them with the reason."""
    config, file, cache = load("runs/wan2.1-14b-lora-80gb"), tmp_path / "a.safetensors", tmp_path / "models--a--b"
    file.write_bytes(b"x")
    part = cache / "snapshots" / "1" / "transformer"
    part.mkdir(parents=True)
    (part / "config.json").write_text("{}")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text('{"_class_name": "WanModel"}')
    for path in (file, cache, theirs):
        model = replace(config.model, dit=replace(config.model.dit, path=str(path)))
        assert [note for note in notes(replace(config, model=model)) if str(path) in note] == []
