"""Numbers of a model from the JSON files of its folders, both ways, and what does not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX, AutoencoderKLHunyuanVideo, AutoencoderKLWan
from safetensors.torch import save

from ops.models.base.joint_config import ratio_of
from ops.models.cogvideox.config import CogVideoXConfig
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.families import FAMILIES
from ops.models.files import STEM, check_files
from ops.models.folders import check_weights, dit_config, dit_json, resolve, vae_numbers
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.hunyuan15.config import Hunyuan15Config
from ops.models.kandinsky.config import KandinskyConfig
from ops.models.load import build_text
from ops.models.wan.config import WanConfig


def write(folder: Path, **fields: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(
    "config",
    [
        WanConfig(
            num_layers=3,
            num_heads=6,
            head_dim=16,
            ffn_dim=100,
            text_dim=12,
            in_channels=4,
            out_channels=4,
            cross_attn_norm=False,
        ),
        HunyuanConfig(num_layers=2, num_single_layers=3, ffn_dim=4 * 128, rope_theta=256.0),
        HunyuanConfig(num_heads=3, head_dim=24, ffn_dim=200),  # 72 * (200 / 72) and 200 / 72 * 3 * 24 are not both 200
        Hunyuan15Config(num_heads=3, head_dim=24, ffn_dim=200),
    ],
)
def test_config_json_round_trip(config: WanConfig | HunyuanConfig | Hunyuan15Config) -> None:
    assert dit_config(dit_json(config), WanConfig(), "here") == config


def test_a_width_that_no_quotient_gives_back_is_written_as_diffusers_reads_it() -> None:
    widths = [(dim, ffn_dim) for dim in (49, 72, 3072) for ffn_dim in range(dim, 3 * dim)]
    assert any(int(dim * (ffn_dim / dim)) != ffn_dim for dim, ffn_dim in widths)
    assert all(int(dim * ratio_of(ffn_dim, dim)) == ffn_dim for dim, ffn_dim in widths)


@pytest.mark.parametrize(
    ("model_class", "settings"),
    [
        (AutoencoderKLWan, {"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}),
        (AutoencoderKLHunyuanVideo, {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 2}),
        (AutoencoderKLCogVideoX, {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 2}),
    ],
)
def test_vae_numbers_of_written_folders(model_class: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    model_class(**settings).save_config(tmp_path)
    assert vae_numbers(json.loads((tmp_path / "config.json").read_text()), "vae") == (16, (4, 8, 8))


def test_wan_vae_of_an_old_folder_has_no_scale_factors() -> None:
    fields = {"_class_name": "AutoencoderKLWan", "z_dim": 16, "temperal_downsample": [False, True, True]}
    assert vae_numbers(fields, "vae") == (16, (4, 8, 8))


def test_random_transformer_takes_its_widths_from_its_neighbours() -> None:
    model, geometry = resolve(ModelConfig(vae=VAEConfig(spatial=4, channels=24), text=TextConfig(d_model=40)))
    assert (model.dit.in_channels, model.dit.out_channels, model.dit.text_dim) == (24, 24, 40)
    assert geometry.vae_stride == (4, 4, 4)
    assert resolve(model) == (model, geometry)


def test_pipeline_folder_is_resolved(tmp_path: Path) -> None:
    write(tmp_path / "transformer", **dit_json(WanConfig(num_layers=7, text_dim=32, in_channels=4, out_channels=4)))
    write(tmp_path / "vae", _class_name="AutoencoderKLWan", z_dim=4)
    write(tmp_path / "text_encoder", model_type="umt5", d_model=32)
    path = str(tmp_path)
    vae = VAEConfig(kind="diffusers", path=path)
    asked = ModelConfig(dit=WanConfig(path=path), vae=vae, text=TextConfig(path=path))
    model, geometry = resolve(asked)
    assert (model.dit.num_layers, model.vae.channels, model.text.d_model) == (7, 4, 32)
    assert (geometry.vae_stride, geometry.patch) == ((4, 8, 8), (1, 2, 2))


def test_modules_that_do_not_fit_are_named(tmp_path: Path) -> None:
    write(tmp_path / "transformer", **dit_json(WanConfig(in_channels=16, out_channels=16, text_dim=4096)))
    dit = WanConfig(path=str(tmp_path))
    with pytest.raises(ValueError, match=r"takes 16 and gives 16 latent channels, model\.vae makes 48"):
        resolve(ModelConfig(dit=dit))
    with pytest.raises(ValueError, match=r"width 4096, model\.text makes 64"):
        resolve(ModelConfig(dit=dit, vae=VAEConfig(channels=16)))


@pytest.mark.parametrize(
    ("path", "expert", "says"),
    [
        (".", "none", "is of two transformers"),
        ("transformer", "none", "is of two transformers"),
        ("transformer_2", "none", "is of two transformers"),
        ("transformer", "both", "transformer has no transformer_2/, and"),
        ("transformer", "low", r"other noise levels than those of model\.dit\.expert low"),
        ("transformer_2", "high", r"other noise levels than those of model\.dit\.expert high"),
        ("transformer", "high", None),
        ("transformer_2", "low", None),
        (".", "both", None),
    ],
)
def test_an_expert_is_that_of_its_folder_with_the_boundary_of_the_pipeline(
    tmp_path: Path, path: str, expert: Literal["none", "high", "low", "both"], says: str | None
) -> None:
    for part in ("transformer", "transformer_2"):
        write(tmp_path / part, **dit_json(WanConfig(in_channels=16, out_channels=16)))
    (tmp_path / "model_index.json").write_text('{"boundary_ratio": 0.9}')
    model = ModelConfig(dit=WanConfig(path=str(tmp_path / path), expert=expert), vae=VAEConfig(channels=16))
    with pytest.raises(ValueError, match=says) if says else nullcontext():
        dit = resolve(model)[0].dit
        assert isinstance(dit, WanConfig) and dit.boundary == 0.9


def test_one_of_two_experts_is_known_by_the_index_where_the_other_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "transformer", **dit_json(WanConfig(in_channels=16, out_channels=16)))
    index = tmp_path / "model_index.json"
    model = ModelConfig(dit=WanConfig(path=str(tmp_path)), vae=VAEConfig(channels=16))
    index.write_text('{"boundary_ratio": null}')
    resolve(model)
    index.write_text('{"boundary_ratio": 0.875}')
    with pytest.raises(ValueError, match="is of two transformers"):
        resolve(model)


def test_a_pipeline_of_another_use_is_refused_by_its_transformer_too(tmp_path: Path) -> None:
    dit = KandinskyConfig(in_channels=16, out_channels=16)
    write(tmp_path / "transformer", **dit_json(dit))
    (tmp_path / "model_index.json").write_text('{"_class_name": "Kandinsky5I2VPipeline"}')
    for path in (tmp_path, tmp_path / "transformer"):
        with pytest.raises(ValueError, match="a Kandinsky5I2VPipeline, for"):
            resolve(ModelConfig(dit=KandinskyConfig(path=str(path)), vae=VAEConfig(channels=16)))


PARTS = {  # of published pipelines whose latents have 16 channels and whose text is 4096 wide
    "wan": (WanConfig(text_dim=4096), {"_class_name": "AutoencoderKLWan"}, "umt5"),
    "hunyuan": (HunyuanConfig(text_dim=4096), {"_class_name": "AutoencoderKLHunyuanVideo"}, "llama"),
    "cogvideox": (CogVideoXConfig(text_dim=4096), {"_class_name": "AutoencoderKLCogVideoX"}, "t5"),
}


@pytest.fixture
def published(tmp_path: Path) -> Path:
    for name, (dit, vae, text) in PARTS.items():
        write(tmp_path / name / "transformer", **dit_json(dit))
        write(tmp_path / name / "vae", **vae)
        write(tmp_path / name / "text_encoder", model_type=text, **({} if text == "llama" else {"d_model": 4096}))
    return tmp_path


@pytest.mark.parametrize(
    ("dit", "vae", "text", "says"),
    [
        ("wan", "wan", "wan", None),
        ("cogvideox", "cogvideox", "cogvideox", None),
        ("wan", None, None, None),
        (
            "wan",
            "hunyuan",
            "wan",
            r"hunyuan/vae is a AutoencoderKLHunyuanVideo, .*wan/transformer .* AutoencoderKLWan\.",
        ),
        ("wan", "cogvideox", None, "is a AutoencoderKLCogVideoX, "),
        ("hunyuan", "wan", None, r"on latents of AutoencoderKLHunyuanVideo\. Set model\.vae\.path to"),
        ("wan", "wan", "cogvideox", r"cogvideox/text_encoder is a t5 encoder, .*wan/transformer were .* a umt5 one"),
        ("cogvideox", "cogvideox", "wan", r"is a umt5 encoder, .*cogvideox/transformer .* of a t5 one\."),
        ("hunyuan", "hunyuan", "wan", r"kind is t5, .* two encoders\. Set it to hunyuan or hunyuan_i2v"),
    ],
)
def test_parts_of_another_family_are_refused_though_their_numbers_agree(
    published: Path, dit: str, vae: str | None, text: str | None, says: str | None
) -> None:
    """Parts without a folder are free, as in a test of the weights."""
    of = FAMILIES[dit].settings
    model = ModelConfig(
        dit=of(path=str(published / dit)),
        vae=VAEConfig(kind="diffusers", path=str(published / vae)) if vae else VAEConfig(channels=16),
        text=TextConfig(path=str(published / text)) if text else TextConfig(d_model=4096),
    )
    with pytest.raises(ValueError, match=says) if says else nullcontext():
        resolve(model)


def test_what_lies_in_the_pipeline_of_the_transformer_is_its_own(published: Path) -> None:
    """An export of a run that was trained from nothing holds the encoders that it was trained with."""
    write(published / "wan" / "vae", _class_name="AutoencoderKLHunyuanVideo")
    write(published / "wan" / "text_encoder", model_type="t5", d_model=4096)
    here = str(published / "wan")
    vae = VAEConfig(kind="diffusers", path=here)
    resolve(ModelConfig(dit=WanConfig(path=here), vae=vae, text=TextConfig(path=here)))
    apart = published / "wan" / "transformer"  # a folder of weights alone has no pipeline
    apart.rename(published / "wan" / "weights")
    with pytest.raises(ValueError, match="is a AutoencoderKLHunyuanVideo"):
        resolve(
            ModelConfig(dit=WanConfig(path=str(published / "wan" / "weights")), vae=vae, text=TextConfig(path=here))
        )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"qk_norm": "layer_norm"}, "has qk_norm 'layer_norm'; only 'rms_norm_across_heads' is supported"),
        ({"_class_name": "AllegroTransformer3DModel"}, "is a AllegroTransformer3DModel; known are"),
    ],
)
def test_variants_that_we_do_not_compute_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        dit_config(dit_json(WanConfig()) | changes, WanConfig(), "transformer")


def test_broken_json_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        resolve(ModelConfig(dit=WanConfig(path=str(tmp_path))))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["model.safetensors", "pytorch_model.bin"], ""),
        (["diffusion_pytorch_model.bin"], r"as diffusion_pytorch_model\.bin, a pickle.*safe_serialization=True"),
        (["config.json"], "holds no weights"),
    ],
)
def test_weights_of_a_pickle_are_refused_with_the_way_out(tmp_path: Path, files: list[str], says: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(save({"weight": torch.zeros(3)}))
    if not says:
        return check_files(tmp_path)
    with pytest.raises((FileNotFoundError, ValueError), match=says):
        check_files(tmp_path)


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder"])
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("cut", r"is not a whole safetensors file: it has 100 bytes and should have [\d,]+\. Copy it again, or wait"),
        ("begun", r"it has 5 bytes and should have"),
        ("zeros", r"its header cannot be read"),
        ("gone", r"holds no weights: .*Download them whole"),
    ],
)
def test_weights_that_are_not_all_there_are_named_before_anything_is_built(
    tmp_path: Path, part: str, fault: str, says: str
) -> None:
    """A folder whose files are still being copied, for example."""
    write(tmp_path / "vae", _class_name="AutoencoderKLWan", z_dim=4)
    write(tmp_path / "text_encoder", model_type="umt5", d_model=16)
    write(tmp_path / "transformer", **dit_json(WanConfig(in_channels=4, out_channels=4, text_dim=16)))
    here = str(tmp_path)
    model, _ = resolve(
        ModelConfig(
            dit=WanConfig(path=here), vae=VAEConfig(kind="diffusers", path=here), text=TextConfig(path=here, pad_to=512)
        )
    )
    whole = save({"weight": torch.zeros(100)}, metadata={"format": "pt"})
    for name, stem in (("transformer", STEM), ("vae", STEM), ("text_encoder", "model")):
        file = tmp_path / name / f"{stem}.safetensors"
        file.write_bytes(whole)
        if name == part:
            broken = {"cut": whole[:100], "begun": whole[:5], "zeros": bytes(len(whole)), "gone": b""}[fault]
            file.unlink() if fault == "gone" else file.write_bytes(broken)
            damaged = file
    with pytest.raises((FileNotFoundError, ValueError), match=says) as caught:
        check_weights(model)
    assert str(damaged.parent) in str(caught.value) and "\n" not in str(caught.value)
    damaged.write_bytes(whole)
    check_weights(model)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_tokenizer_that_is_cut_off_is_named_before_weights_are_read(name: str, tmp_path: Path) -> None:
    write(tmp_path / "text_encoder", model_type="umt5", d_model=16)
    (tmp_path / "text_encoder" / "model.safetensors").write_bytes(save({"weight": torch.zeros(3)}))
    (tmp_path / "tokenizer").mkdir()
    file = tmp_path / "tokenizer" / name
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    file.write_text('{"model": {"vocab"')
    text = TextConfig(path=str(tmp_path), d_model=16)
    checks: list[Callable[[], object]] = [lambda: check_weights(ModelConfig(text=text)), lambda: build_text(text)]
    for check in checks:
        with pytest.raises(ValueError, match=rf"tokenizer/{re.escape(name)} is not valid JSON"):
            check()
    file.write_text("{}")
    check_weights(ModelConfig(text=text))
