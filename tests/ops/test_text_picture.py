"""HunyuanVideo's text of captions and first frames: its image-to-video pipeline's rows and vector, by a small LLaVA."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoImageToVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from actors.plan.costs.point import Samples
from actors.plan.costs.profile import Profile
from ops.models.config import ModelConfig, TextConfig, VAEConfig
from ops.models.families import FAMILIES
from ops.models.folders import dit_json, resolve
from ops.models.forecast import text_need
from ops.models.hunyuan.config import HunyuanConfig
from ops.models.load import build_text, token_counter
from ops.models.text_pair import recipe_of, split
from ops.models.text_pair_load import save_random_pair

RECIPE = FAMILIES["hunyuan"].texts["hunyuan_i2v"]
CAPTIONS = ["a red disc", "", "two  blue squares\n&amp; a dot " * 4, "a red disc"]
VARIANTS = {"latent_concat": 288, "token_replace": 144}  # rows of 576 patches
ATOL = 1e-5
DIT = HunyuanConfig(
    num_layers=1,
    num_single_layers=1,
    num_refiner_layers=1,
    num_heads=2,
    head_dim=16,
    ffn_dim=128,
    rope_theta=256.0,
)


def tokenizer(bos: str, eos: str, end: bool) -> PreTrainedTokenizerFast:
    """Words, marks and single characters: the picture's token is the sixth, as in Llama 3's own."""
    pieces = re.findall(r"<[a-z|_]+>|[A-Za-z]+", RECIPE.template + " ".join(CAPTIONS))
    characters = [chr(code) for code in range(32, 127)] + ["\n", "\n\n"]
    words = list(dict.fromkeys(["<pad>", bos, eos, "<unk>", *pieces, *characters]))
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"<[a-z|_]+>|\n\n|[A-Za-z]+|[^A-Za-z]"), "isolated")
    special = [(word, words.index(word)) for word in (bos, eos)]
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}" if end else f"{bos} $A", special_tokens=special
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token=bos, eos_token=eos, unk_token="<unk>", padding_side="right"
    )


def picture(seed: int) -> np.ndarray:
    """A smooth one: resizing of noise would say little."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return np.array(Image.fromarray(small).resize((48, 32), Image.Resampling.BICUBIC))


def publish(root: Path, variant: str) -> Path:
    """A small image-to-video pipeline as Diffusers itself saves it."""
    torch.manual_seed(0)
    tokens, clip_tokens = tokenizer("<s>", "</s>", end=False), tokenizer("<start>", "<end>", end=True)
    llama = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    vision = CLIPVisionConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=48,
        patch_size=2,
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
    image = tokens.convert_tokens_to_ids("<image>")
    llava = LlavaConfig(
        vision_config=vision, text_config=llama, image_token_index=image, pad_token_id=tokens.pad_token_id
    )
    dit = replace(DIT, first_frame=variant, guidance_embeds=variant == "token_replace", pooled_dim=8)
    dit = dit.fitted(4, (4, 8, 8), 24, 0)
    transformer = HunyuanVideoTransformer3DModel(
        **{key: value for key, value in dit_json(dit).items() if not key.startswith("_")}
    )
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    HunyuanVideoImageToVideoPipeline(
        text_encoder=LlavaForConditionalGeneration(llava),
        tokenizer=tokens,
        text_encoder_2=CLIPTextModel(clip),
        tokenizer_2=clip_tokens,
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 48}, crop_size={"height": 48, "width": 48}),
        transformer=transformer,
        vae=AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    ).save_pretrained(root)
    return root


def settings(folder: Path, variant: str = "token_replace") -> ModelConfig:
    return ModelConfig(
        dit=HunyuanConfig(path=str(folder), first_frame=variant),  # type: ignore[arg-type]  # one of its names
        vae=VAEConfig(kind="diffusers", path=str(folder)),
        text=TextConfig(kind="hunyuan_i2v", path=str(folder), max_length=256),
    )


def theirs(folder: Path) -> HunyuanVideoImageToVideoPipeline:
    pipe = HunyuanVideoImageToVideoPipeline.from_pretrained(folder)
    pipe.image_processor = CLIPImageProcessorPil.from_pretrained(folder / "image_processor")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("pictures")
    return {variant: publish(made / variant, variant) for variant in VARIANTS}


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_and_vector_are_those_of_the_pipeline(variant: str, folders: dict[str, Path]) -> None:
    model, _ = resolve(settings(folders[variant], variant))
    rows_of_picture = VARIANTS[variant]
    assert (model.text.picture_tokens, model.text.picture_rows) == (576, rows_of_picture) and model.text.tail == 1
    encoder = build_text(model.text)
    pictures = [picture(seed) for seed in (0, 1, 2, 1)]
    texts, vectors = split(encoder.encode(CAPTIONS, pictures), model.text)
    assert vectors is not None
    pipe = theirs(folders[variant])
    for text, vector, caption, shown in zip(texts, vectors, CAPTIONS, pictures, strict=True):
        with torch.no_grad():
            wanted, pooled, mask = pipe.encode_prompt(
                Image.fromarray(shown), caption, image_embed_interleave=model.dit.picture_every
            )
        seen = wanted[0][mask[0].bool()]
        assert len(text) == len(seen) == encoder.count(caption)
        torch.testing.assert_close(text, seen, atol=ATOL * float(seen.abs().max()), rtol=0)
        torch.testing.assert_close(vector, pooled[0], atol=ATOL, rtol=0)
    assert not torch.allclose(texts[0][-1], texts[3][-1], atol=1e-2), "the text after a picture depends on it"


def test_long_captions_are_cut_as_by_the_pipeline(folders: dict[str, Path]) -> None:
    """Before the mark, and between the caption's end and the mark."""
    folder = folders["token_replace"]
    model, _ = resolve(settings(folder))
    encoder, pipe = build_text(model.text), theirs(folder)
    room = 256 + RECIPE.crop - len(encoder.tokenizer(RECIPE.template.format("")).input_ids)  # type: ignore[attr-defined]
    for caption in ("a b" * 700, " ".join("a" * 256)[: room + 2], " ".join("a" * 256)[: room + 1]):
        (text,), _ = split(encoder.encode([caption], [picture(0)]), model.text)
        with torch.no_grad():
            rows, _, mask = pipe.encode_prompt(Image.fromarray(picture(0)), caption, image_embed_interleave=4)
        assert len(text) == int(mask.sum()) == encoder.count(caption) == 144 + 256 - 4
        torch.testing.assert_close(text, rows[0][mask[0].bool()], atol=ATOL * float(text.abs().max()), rtol=0)
        assert token_counter(model.text)(caption) > 256


def test_weights_by_their_newer_names_are_the_same(folders: dict[str, Path], tmp_path: Path) -> None:
    """Published folders have the language model's head inside of it; a LLaVA may also be saved as it stands in code."""
    copy = shutil.copytree(folders["token_replace"], tmp_path / "copy")
    file = copy / "text_encoder" / "model.safetensors"
    newer = {}
    for name, tensor in load_file(file).items():
        inside = re.sub(r"^language_model\.model\.", "language_model.", name)
        newer["lm_head.weight" if name == "language_model.lm_head.weight" else f"model.{inside}"] = tensor
    assert "model.language_model.layers.0.mlp.up_proj.weight" in newer and "lm_head.weight" in newer
    save_file(newer, file, {"format": "pt"})
    found = [build_text(resolve(settings(folder))[0].text) for folder in (folders["token_replace"], copy)]
    one, other = (encoder.encode(["a red disc"], [picture(0)])[0] for encoder in found)
    assert torch.equal(one, other)


def test_the_random_encoder_tells_captions_and_pictures_apart() -> None:
    model, _ = resolve(
        ModelConfig(
            dit=replace(DIT, first_frame="latent_concat"),
            text=TextConfig(kind="hunyuan_i2v", max_length=40, d_model=16, num_heads=2, num_layers=1, pooled_dim=20),
        )
    )
    config = model.text
    assert (config.picture_rows, config.least_tokens, config.most_tokens) == (8, 8, 48)
    encoder, shown = build_text(config), [picture(seed) for seed in (0, 0, 1, 2)]
    captions = ["a red disc", "a blue disc", "a red disc", "x" * 100]
    texts, vectors = split(encoder.encode(captions, shown), config)
    again, _ = split(build_text(config).encode(captions, shown), config)
    assert vectors is not None and all(torch.equal(a, b) for a, b in zip(texts, again))
    # the caption, the byte and the end after the last mark
    assert [len(text) for text in texts] == [8 + 12, 8 + 13, 8 + 12, 8 + 36] == [encoder.count(c) for c in captions]
    assert [token_counter(config)(c) - 4 for c in captions] == [12, 13, 12, 102], "before any is cut"
    assert torch.equal(texts[0][:8], texts[1][:8]) and not torch.allclose(texts[0], texts[2], atol=1e-3)
    assert not torch.allclose(texts[0][8:18], texts[1][8:18], atol=1e-2)
    for caption, one, text in zip(captions, shown, texts, strict=True):
        (alone,), _ = split(build_text(config).encode([caption], [one]), config)
        torch.testing.assert_close(alone, text, atol=ATOL, rtol=0)
    with pytest.raises(ValueError, match=r"2 captions and 1 pictures: this text encoder sees the first frame"):
        encoder.encode(["a", "b"], shown[:1])


def test_an_exported_random_encoder_is_one_to_the_pipeline(tmp_path: Path) -> None:
    """Its rows, by the template of which `heddle export` tells."""
    model, _ = resolve(
        ModelConfig(
            dit=replace(DIT, first_frame="token_replace"),
            text=TextConfig(kind="hunyuan_i2v", max_length=40, d_model=16, num_heads=2, num_layers=1, pooled_dim=16),
        )
    )
    save_random_pair(model.text, tmp_path)
    recipe, rows = recipe_of(model.text), model.text.picture_tokens
    pipe = HunyuanVideoImageToVideoPipeline(
        text_encoder=LlavaForConditionalGeneration.from_pretrained(tmp_path / "text_encoder"),
        tokenizer=AutoTokenizer.from_pretrained(tmp_path / "tokenizer"),
        text_encoder_2=CLIPTextModel.from_pretrained(tmp_path / "text_encoder_2"),
        tokenizer_2=AutoTokenizer.from_pretrained(tmp_path / "tokenizer_2"),
        image_processor=CLIPImageProcessorPil.from_pretrained(tmp_path / "image_processor"),
        transformer=None,
        vae=None,
        scheduler=None,
    )
    template = {"template": recipe.template, "crop_start": recipe.crop}
    template |= {"image_emb_start": 1, "image_emb_end": 1 + rows, "image_emb_len": rows}
    for caption in ("a red disc", "", "x" * 100):
        with torch.no_grad():
            wanted, pooled, mask = pipe.encode_prompt(
                Image.fromarray(picture(1)),
                caption,
                prompt_template=template,
                max_sequence_length=40,
                image_embed_interleave=4,
            )
        (text,), vectors = split(build_text(model.text).encode([caption], [picture(1)]), model.text)
        assert vectors is not None
        torch.testing.assert_close(text, wanted[0][mask[0].bool()], atol=1e-4, rtol=0)
        torch.testing.assert_close(vectors, pooled, atol=1e-4, rtol=0)


def test_what_it_needs_and_takes_is_predicted_without_weights(folders: dict[str, Path]) -> None:
    """All 576 rows of a picture are computed, of which 144 are text."""
    model, geometry = resolve(settings(folders["token_replace"]))
    need = text_need(model.text, 2, model.text.most_tokens, torch.float32)
    held = sum(p.numel() * 4 for p in build_text(model.text).parameters())
    assert need.weights_gib * 2**30 == pytest.approx(held, rel=0.01)
    assert need.peak_gib > text_need(model.text, 1, model.text.most_tokens, torch.float32).peak_gib > 0
    assert model.text.encoded_tokens == 256 + 103 + 576 and model.text.most_tokens == 256 + 144
    alone = replace(model.text, kind="hunyuan", path=None)
    cost, plain = (Profile.from_flops(model.dit, model.vae, text, geometry, launch_s=0) for text in (model.text, alone))
    caption = Samples.of(1, (5, 32, 48), 400)
    ratio = cost.seconds("text", caption, 1) / plain.seconds("text", caption, 1)
    assert ratio == pytest.approx((256 + 103 + 576) / 400)


def test_folders_that_do_not_fit_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    config = settings(folders["token_replace"])
    with pytest.raises(ValueError, match=r"sees it in the text, too.*kind hunyuan does not show.*to hunyuan_i2v"):
        resolve(
            ModelConfig(dit=replace(DIT, first_frame="token_replace"), text=TextConfig(kind="hunyuan", pooled_dim=64))
        )
    with pytest.raises(ValueError, match=r"shows the first frame of a clip to its encoder.*takes none"):
        resolve(ModelConfig(dit=DIT, text=TextConfig(kind="hunyuan_i2v")))
    with pytest.raises(ValueError, match=r"is a llava encoder; model.text.kind hunyuan needs the llama"):
        resolve(replace(config, text=replace(config.text, kind="hunyuan")))
    with pytest.raises(ValueError, match=r"max_length 400 and the 679 tokens before it are more than the 1024"):
        resolve(replace(config, text=replace(config.text, max_length=400)))
    with pytest.raises(ValueError, match=r"picture_tokens 8 is no square"):
        TextConfig(picture_tokens=8)
    copy = shutil.copytree(folders["token_replace"], tmp_path / "copy")
    shutil.rmtree(copy / "image_processor")
    with pytest.raises(FileNotFoundError, match=r"shows first frames to its encoder. Download image_processor/, too"):
        resolve(settings(copy))
    shutil.copytree(folders["token_replace"] / "image_processor", copy / "image_processor")
    shutil.rmtree(copy / "tokenizer")
    shutil.copytree(copy / "tokenizer_2", copy / "tokenizer")
    file = copy / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text().replace("<image>", "<other>"))
    with pytest.raises(ValueError, match=r"103 are dropped, and token \d+ of the picture has to be among these"):
        build_text(resolve(settings(copy))[0].text)
