"""`heddle sample --lora`: factors of other programs, added to the weights of a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from app.cli import app
from app.export import export
from app.export.parity import our_velocity, parity_sample, their_velocity
from app.sampling.model import saved_model
from app.sampling.sample import default_out
from ops.models.added_lora import LoraFile
from ops.models.load import build_dit
from ops.typed import ConfigError
from tests.app import test_two_experts
from tests.app.test_export import haar_run, pipeline_run, write_checkpoint
from tests.families.test_wan import publish

FP32 = {"atol": 1e-5, "rtol": 1e-5}
PYTORCH, COMFYUI = "pytorch_lora_weights.safetensors", "comfyui_lora_weights.safetensors"


def weights_of(folder: Path, *loras: LoraFile) -> dict[str, torch.Tensor]:
    return saved_model(folder, device="cpu", loras=loras).load().dit.state_dict()


def of_peft(base: Path, out: Path, seed: int, rank: int, dora: bool = False) -> Path:
    """Factors that PEFT and Diffusers have made and written, with an alpha of their own."""
    pipeline = WanPipeline.from_pretrained(base)
    layers = ["to_q", "to_out.0", "ffn.net.2"]
    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers, use_dora=dora)
    pipeline.transformer.add_adapter(settings)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in pipeline.transformer.named_parameters():
            if "lora_" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    found = peft.get_peft_model_state_dict(pipeline.transformer)
    said = peft.LoraConfig(**settings.to_dict()).to_dict()
    said["target_modules"] = layers
    WanPipeline.save_lora_weights(out, transformer_lora_layers=found, transformer_lora_adapter_metadata=said)
    return out / PYTORCH


def of_export(file: str) -> Callable[[Path, Path], Path]:
    def write(base: Path, out: Path) -> Path:
        run = write_checkpoint(out / "run", pipeline_run(base, lora_rank=2, lora_alpha=3.0))
        return export.export(run, out / "out", lora_only=True).folder / file

    return write


def of_kohya(base: Path, out: Path) -> Path:
    """As musubi-tuner writes them, with an alpha that is not the rank."""
    given, written = load_file(of_export(COMFYUI)(base, out)), {}
    for name, tensor in given.items():
        layer, ending = name.removeprefix("diffusion_model.").split(".lora_")
        layer = "lora_unet_" + layer.replace(".", "_")
        written[layer + {"A.weight": ".lora_down.weight", "B.weight": ".lora_up.weight"}[ending]] = tensor
        written[layer + ".alpha"] = torch.tensor(0.5)
    save_file(written, out / "kohya.safetensors")
    return out / "kohya.safetensors"


KINDS: dict[str, Callable[[Path, Path], Path]] = {
    "PEFT": lambda base, out: of_peft(base, out, seed=1, rank=3),
    "DoRA of PEFT": lambda base, out: of_peft(base, out, seed=1, rank=3, dora=True),
    "our own, by Diffusers' names": of_export(PYTORCH),
    "our own, by ComfyUI's names": of_export(COMFYUI),
    "kohya": of_kohya,
}


def assert_as_diffusers(base: Path, loras: list[LoraFile]) -> None:
    """The transformer of the folder with the files computes what that of its pipeline does with them."""
    pipeline = WanPipeline.from_pretrained(base)
    names = [f"file{number}" for number in range(len(loras))]
    plain = saved_model(base, device="cpu").load().dit
    config = plain.config
    sample = parity_sample(config)
    for name, lora in zip(names, loras, strict=True):
        file = Path(lora.path)
        pipeline.load_lora_weights(file.parent, weight_name=file.name, adapter_name=name)
    pipeline.set_adapters(names, [lora.scale for lora in loras])
    with torch.no_grad():
        ours = our_velocity(saved_model(base, device="cpu", loras=loras).load().dit, sample)
        theirs = their_velocity(pipeline.transformer.eval(), config, sample)
        without = our_velocity(plain, sample)
    torch.testing.assert_close(ours, theirs, **FP32)
    assert (ours - without).abs().max() > 0.01 * theirs.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_with_a_file_is_the_pipeline_with_it_and_the_same_scale(kind: str, tmp_path: Path) -> None:
    base = publish(tmp_path / "base")
    file = KINDS[kind](base, tmp_path / "lora")
    assert_as_diffusers(base, [LoraFile(path=str(file), scale=0.8)])


@pytest.mark.parametrize("beginning", ["", "pipe.dit."])
def test_a_file_of_diffsynth_means_what_it_means_by_other_names(beginning: str, tmp_path: Path) -> None:
    """It has the names of the original code, with that of PEFT's one adapter."""
    base = publish(tmp_path / "base")
    file = of_export(COMFYUI)(base, tmp_path / "lora")
    named = {
        beginning + name.removeprefix("diffusion_model.").replace(".weight", ".default.weight"): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(named, tmp_path / "diffsynth.safetensors")
    wanted = weights_of(base, LoraFile(path=str(file)))
    found = weights_of(base, LoraFile(path=str(tmp_path / "diffsynth.safetensors")))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_several_files_of_several_ranks_are_added_each_with_its_scale(tmp_path: Path) -> None:
    base = publish(tmp_path / "base")
    files = [of_peft(base, tmp_path / f"{rank}", seed=rank, rank=rank) for rank in (2, 4)]
    assert_as_diffusers(base, [LoraFile(path=str(files[0]), scale=0.8), LoraFile(path=str(files[1]), scale=-0.5)])
    dora = of_peft(base, tmp_path / "dora", seed=1, rank=2, dora=True)
    with pytest.raises(ValueError, match=r"is DoRA, .* and 2 LoRA files are given: .* Give it alone\."):
        saved_model(base, loras=[LoraFile(path=str(file)) for file in (files[0], dora)])


def test_weights_that_are_fetched_from_host_memory_have_the_files_added(tmp_path: Path) -> None:
    """And another file is other memory of the node."""
    base = publish(tmp_path / "base")
    file = str(of_peft(base, tmp_path / "lora", seed=1, rank=2))
    config = saved_model(base, device="cpu").config.model.dit
    for loras in ((), (LoraFile(path=file),), (LoraFile(path=file, scale=0.5),)):
        plain, hosted = (
            build_dit(config, 0, blocks_on_host=on_host, trains=False, loras=loras).state_dict()
            for on_host in (False, True)
        )
        assert all(torch.equal(tensor, plain[name]) for name, tensor in hosted.items())


def test_a_folder_of_two_files_is_for_two_experts(tmp_path: Path) -> None:
    base = test_two_experts.publish(tmp_path / "base")
    high = saved_model(base, device="cpu").config.model.dit.experts[0]
    loras = tmp_path / "loras"
    loras.mkdir()
    made = of_export_of_both(base, tmp_path)
    for name in ("high", "low"):
        (loras / f"pytorch_lora_weights_{name}.safetensors").write_bytes(
            (made / f"pytorch_lora_weights_{name}.safetensors").read_bytes()
        )
    ours = saved_model(base, device="cpu", loras=[LoraFile(path=str(loras))]).load()
    whole = saved_model(made.parent / "whole", device="cpu").load()
    assert ours.low is not None and whole.low is not None
    for one, other in ((ours.dit, whole.dit), (ours.low.dit, whole.low.dit)):
        found = other.state_dict()
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(tensor, found[name], **FP32)
    (loras / "pytorch_lora_weights_low.safetensors").unlink()
    alone = saved_model(base, device="cpu", loras=[LoraFile(path=str(loras))]).load()
    plain = saved_model(base, device="cpu").load()
    assert alone.low is not None and plain.low is not None and high.expert_name == "high"
    assert all(torch.equal(t, plain.low.dit.state_dict()[n]) for n, t in alone.low.dit.state_dict().items())
    assert all(torch.equal(t, ours.dit.state_dict()[n]) for n, t in alone.dit.state_dict().items())
    with pytest.raises(ValueError, match=r"is one file, and this model has two experts. Give a folder with pytorch"):
        saved_model(base, loras=[LoraFile(path=str(loras / "pytorch_lora_weights_high.safetensors"))])


def of_export_of_both(base: Path, folder: Path) -> Path:
    """Factors of a run of both experts; beside them the whole export."""
    config = test_two_experts.run_of(base, "both")
    dit = replace(config.model.dit, lora_rank=2)
    config = replace(config, model=replace(config.model, dit=dit))
    run = write_checkpoint(folder / "run", config)
    export.export(run, folder / "whole")
    return export.export(run, folder / "made", lora_only=True).folder


def test_a_file_of_another_model_is_refused_before_any_work(tmp_path: Path) -> None:
    base = publish(tmp_path / "base")
    good = load_file(of_peft(base, tmp_path / "lora", seed=1, rank=2))
    name = "transformer.blocks.0.attn1.to_q.lora_A.weight"

    def refused(tensors: dict[str, torch.Tensor], match: str) -> None:
        save_file(tensors, tmp_path / "other.safetensors")
        with pytest.raises(ValueError, match=match):
            saved_model(base, loras=[LoraFile(path=str(tmp_path / "other.safetensors"))])

    refused(
        {**good, name: good[name][:, :4].clone()}, r"other\.safetensors has factors \[24, 2\] and \[2, 4\] of blocks"
    )
    refused(
        {**good, name: good[name][:1].clone()}, r"of blocks\.0\.attn1\.to_q, whose weight is \[24, 24\] here\. Give"
    )
    far = {key.replace("blocks.1.", "blocks.30."): tensor for key, tensor in good.items()}
    refused(far, r"has factors of blocks\.30\.\S+, and this transformer \(wan, 2 layers\) has no such layer\. Give")
    refused(
        {key: tensor for key, tensor in good.items() if key != name},
        r"one of the two factors of blocks\.0\.attn1\.to_q",
    )
    refused({**good, "text_encoder.x.weight": torch.ones(1)}, "holds text_encoder.x.weight beside factors")
    refused({"x": torch.ones(1)}, "holds no factors named")
    with pytest.raises(FileNotFoundError, match=r"LoRA file \S+ does not exist. Give a .safetensors file"):
        saved_model(base, loras=[LoraFile(path=str(tmp_path / "none.safetensors"))])
    with pytest.raises(FileNotFoundError, match=r"holds no pytorch_lora_weights.safetensors. Give the .safetensors"):
        saved_model(base, loras=[LoraFile(path=str(tmp_path))])
    run = write_checkpoint(tmp_path / "run", haar_run())
    with pytest.raises(
        ConfigError, match=r"--lora \S+ is added to the weights of a folder, and \S+ is a run. Give --from"
    ):
        saved_model(run, loras=[LoraFile(path=str(tmp_path / "lora" / PYTORCH))])


def test_the_command_adds_files_and_names_its_clip_by_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = publish(tmp_path / "base")
    file = of_peft(base, tmp_path / "lora", seed=1, rank=2)
    monkeypatch.chdir(tmp_path)
    size = ["--frames", "5", "--height", "16", "--width", "16", "--steps", "2", "--device", "cpu", "--prompt", "a disc"]

    def clip(*options: str) -> bytes:
        result = CliRunner().invoke(app, ["sample", "--from", str(base), *size, *options])
        assert result.exit_code == 0, result.output
        return Path(next(line for line in result.stdout.split("\n") if line.endswith(".mp4"))).read_bytes()

    plain, added = clip(), clip("--lora", str(file), "--lora-scale", "0.8")
    assert plain != added
    named = default_out(base, ["a disc"], [LoraFile(path=str(file), scale=0.8)])
    assert named.name.startswith("base-pytorch_lora_weights-0.8-a-disc-") and named.read_bytes() == added
    assert clip("--lora", str(file), "--lora-scale", "0") == plain

    def fault(*options: str) -> str:
        result = CliRunner().invoke(app, ["sample", "--from", str(base), *options])
        assert result.exit_code == 2
        return " ".join(result.output.split())

    assert "--lora-scale needs --lora FILE" in fault("--lora-scale", "0.5")
    assert "--lora-scale is given 3 times and --lora 2 times" in fault(
        *["--lora", "a", "--lora", "b", *["--lora-scale", "1"] * 3]
    )
