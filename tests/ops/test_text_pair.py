"""HunyuanVideo's two text encoders: its pipeline's rows and vector, and a clip sampled with them."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel, PreTrainedTokenizerFast

from ops.flow.sampling import SamplerConfig, SampleRequest, initial_noise, sample_latents
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.families import FAMILIES
from ops.models.folders import dit_json, resolve
from ops.models.forecast import text_need
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.load import build_dit, build_text, token_counter
from ops.models.text_pair import split

RECIPE = FAMILIES["hunyuan"].texts["hunyuan"]
CAPTIONS = ["a red disc", "", "two  blue squares\n&amp; a dot " * 4, "a {dot}", "a red disc"]
ATOL = 1e-5


def tokenizer(bos: str, eos: str) -> PreTrainedTokenizerFast:
    """Words and single characters: more of the template than are dropped, and room for captions."""
    pieces = re.findall(r"[A-Za-z]+", RECIPE.template + " ".join(CAPTIONS))
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    words = dict.fromkeys(["<pad>", bos, eos, "<unk>", *pieces, *characters])
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[A-Za-z]+|[^A-Za-z]"), "isolated")
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}", special_tokens=[(bos, words_index(words, bos)), (eos, words_index(words, eos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token=bos, eos_token=eos, unk_token="<unk>", padding_side="right"
    )


def words_index(words: dict[str, None], word: str) -> int:
    return list(words).index(word)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text half of a HunyuanVideo folder, small and random."""
    root = tmp_path_factory.mktemp("hunyuan")
    torch.manual_seed(0)
    llama_tokens, clip_tokens = tokenizer("<s>", "</s>"), tokenizer("<start>", "<end>")
    llama = LlamaConfig(
        vocab_size=len(llama_tokens),
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    clip = CLIPTextConfig(
        vocab_size=len(clip_tokens),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        initializer_range=0.3,
        eos_token_id=clip_tokens.eos_token_id,
    )
    LlamaModel(llama).save_pretrained(root / "text_encoder")
    CLIPTextModel(clip).save_pretrained(root / "text_encoder_2")
    llama_tokens.save_pretrained(root / "tokenizer")
    clip_tokens.save_pretrained(root / "tokenizer_2")
    return root


def settings(folder: Path) -> ModelConfig:
    dit = HunyuanConfig(
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        num_heads=2,
        head_dim=16,
        ffn_dim=128,
        rope_theta=256.0,
        guidance_embeds=True,
    )
    return ModelConfig(
        dit=dit, vae=VAEConfig(channels=16), text=TextConfig(kind="hunyuan", path=str(folder), max_length=256)
    )


def pipeline(folder: Path, transformer: HunyuanVideoTransformer3DModel | None = None) -> HunyuanVideoPipeline:
    return HunyuanVideoPipeline(
        text_encoder=LlamaModel.from_pretrained(folder / "text_encoder").eval(),
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        text_encoder_2=CLIPTextModel.from_pretrained(folder / "text_encoder_2").eval(),
        tokenizer_2=AutoTokenizer.from_pretrained(folder / "tokenizer_2"),
        transformer=transformer,
        vae=AutoencoderKLHunyuanVideo(
            latent_channels=16, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def test_rows_and_vector_are_those_of_the_pipeline(folder: Path) -> None:
    model, _ = resolve(settings(folder))
    assert model.text.tail == 1 and model.text.pooled == 8
    encoder = build_text(model.text)
    texts, vectors = split(encoder.encode(CAPTIONS), model.text)
    with torch.no_grad():
        rows, pooled, mask = pipeline(folder).encode_prompt(CAPTIONS)
    torch.testing.assert_close(vectors, pooled, atol=ATOL, rtol=0)
    assert not torch.allclose(pooled[0], pooled[1], atol=1e-2)
    for text, wanted, seen, caption in zip(texts, rows, mask, CAPTIONS, strict=True):
        assert len(text) == int(seen.sum()) == encoder.count(caption)
        torch.testing.assert_close(text, wanted[: len(text)], atol=ATOL, rtol=0)
    assert torch.equal(texts[0], texts[4]) and len(texts[1]) > 0


def test_long_captions_are_cut_as_by_the_pipeline_and_counted_whole(folder: Path) -> None:
    model, _ = resolve(settings(folder))
    encoder, caption = build_text(model.text), "a b" * 700
    (text,), _ = split(encoder.encode([caption]), model.text)
    with torch.no_grad():
        rows, _, mask = pipeline(folder).encode_prompt(caption)
    assert len(text) == int(mask.sum()) == 256
    torch.testing.assert_close(text, rows[0], atol=ATOL, rtol=0)
    assert token_counter(model.text)(caption) > 256
    assert token_counter(model.text)("a dot") == encoder.count("a dot")


@pytest.mark.parametrize("steps", [1, 3])
def test_a_sampled_clip_is_the_one_of_the_pipeline(steps: int, folder: Path) -> None:
    """Whole denoising steps: the guidance is an input, and there is no second forward."""
    model, geometry = resolve(settings(folder))
    module = build_dit(model.dit, seed=0).eval()
    torch.manual_seed(1)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    described = {key: value for key, value in dit_json(model.dit).items() if not key.startswith("_")}
    theirs = HunyuanVideoTransformer3DModel(**described).eval()
    theirs.load_state_dict(module.state_dict())
    (text,), vectors = split(build_text(model.text).encode([CAPTIONS[0]]), model.text)
    assert vectors is not None
    request = SampleRequest(text=text, pooled=vectors[0], frames=5, height=32, width=48, seed=2)
    calls = []
    module.register_forward_hook(lambda *a: calls.append(1))
    config = SamplerConfig(steps=steps, guidance_scale=6.0, flow_shift=7.0)
    (ours,) = sample_latents(module, [request], text, geometry, config)
    assert len(calls) == steps
    noise = initial_noise(2, (16, *geometry.latent_grid(5, 32, 48)))
    wanted = pipeline(folder, theirs)(
        prompt=CAPTIONS[0],
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=steps,
        guidance_scale=6.0,
        latents=noise[None].clone(),
        output_type="latent",
        return_dict=False,
    )[0][0]
    torch.testing.assert_close(ours, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0)
    (other,) = sample_latents(module, [request], text, geometry, replace(config, guidance_scale=1.0))
    assert not torch.allclose(ours, other, atol=1e-3 * float(wanted.abs().max()))


def test_the_random_pair_tells_captions_apart_and_is_equal_everywhere() -> None:
    config = TextConfig(kind="hunyuan", max_length=40, d_model=16, num_heads=2, num_layers=1, pooled_dim=20)
    captions = ["a red disc", "a blue disc", "", "x" * 100]
    torch.manual_seed(7)
    texts, vectors = split(build_text(config).encode(captions), config)
    torch.manual_seed(8)
    again, _ = split(build_text(config).encode(captions), config)
    assert vectors is not None and vectors.shape == (4, 20) and config.tail == 2
    assert [len(text) for text in texts] == [11, 12, 1, 40] == [build_text(config).count(c) for c in captions]
    assert all(torch.equal(a, b) for a, b in zip(texts, again))
    assert not torch.allclose(vectors[0], vectors[1], atol=1e-2)
    for caption, text in zip(captions, texts):
        (alone,), _ = split(build_text(config).encode([caption]), config)
        torch.testing.assert_close(alone, text, atol=ATOL, rtol=0)


def test_what_it_needs_is_predicted_without_weights(folder: Path) -> None:
    model, _ = resolve(settings(folder))
    need = text_need(model.text, 2, 256, torch.float32)
    held = sum(p.numel() * 4 for p in build_text(model.text).parameters())
    assert need.weights_gib * 2**30 == pytest.approx(held, rel=0.01)
    assert need.peak_gib > 0


def test_folders_that_do_not_fit_are_named(folder: Path, tmp_path: Path) -> None:
    config = settings(folder)
    with pytest.raises(ValueError, match=r"llama encoder; T5 and UMT5 encoders are supported; set model.text.kind"):
        resolve(replace(config, text=replace(config.text, kind="t5")))
    with pytest.raises(ValueError, match=r"max_length 500 and the 95 tokens before it are more than the 512"):
        resolve(replace(config, text=replace(config.text, max_length=500)))
    with pytest.raises(ValueError, match=r"architecture wan takes none. Use kind: t5"):
        resolve(ModelConfig(text=config.text))
    with pytest.raises(ValueError, match=r"true length. Leave both out"):
        replace(config.text, pad_to=256)
    copy = shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(copy / "text_encoder_2")
    with pytest.raises(FileNotFoundError, match=r"text_encoder_2/config.json does not exist.*needs both"):
        resolve(settings(copy))
    shutil.copytree(copy / "text_encoder", copy / "text_encoder_2")
    with pytest.raises(ValueError, match=r"is a llama encoder; model.text.kind hunyuan needs CLIP's there"):
        resolve(settings(copy))
    shutil.rmtree(copy / "text_encoder")
    shutil.copytree(folder / "text_encoder_2", copy / "text_encoder")
    with pytest.raises(ValueError, match=r"kind hunyuan needs the llama of its own pipeline"):
        resolve(settings(copy))


def test_a_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(copy / "tokenizer")
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(copy / "tokenizer")
    with pytest.raises(ValueError, match=r"makes 1 tokens of the prompt of kind hunyuan.*95 are dropped"):
        build_text(resolve(settings(copy))[0].text)


def test_a_missing_tokenizer_is_named_before_weights_are_read(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(copy / "tokenizer_2")
    for file in copy.glob("text_encoder*/*.safetensors"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r"text_encoder_2 holds no tokenizer, .* Download the tokenizers"):
        build_text(resolve(settings(copy))[0].text)


def test_weights_of_less_layers_than_config_says_are_refused(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    file = copy / "text_encoder" / "config.json"
    file.write_text(file.read_text().replace('"num_hidden_layers": 4', '"num_hidden_layers": 9'))
    with pytest.raises(ValueError, match=r"lacks .* of its weights"):
        build_text(resolve(settings(copy))[0].text)
