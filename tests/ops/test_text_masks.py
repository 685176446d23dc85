"""Masks that Transformers takes as they are give the states that it makes of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaModel, T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

from ops.models.config import TextConfig
from ops.models.load import build_text
from ops.models.text_masks import causal_mask, padding_mask

FP32_ATOL = 1e-5
CAPTIONS = ["a green cube", "a red cube", "a blue one"]  # one batch of a T5, of three lengths


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("config_class", "model_class"), [(T5Config, T5EncoderModel), (UMT5Config, UMT5EncoderModel)])
def test_captions_of_a_batch_have_the_states_of_a_mask_with_two_axes(
    config_class: type, model_class: type, attention: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    shape = config_class(vocab_size=384, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    model = model_class(shape).eval()
    model.save_pretrained(tmp_path / "text_encoder")
    ByT5Tokenizer().save_pretrained(tmp_path / "tokenizer")
    text = build_text(TextConfig(path=str(tmp_path), max_length=20))
    for one in (model, text.encoder):  # type: ignore[attr-defined]
        one.set_attn_implementation(attention)
    batch = ByT5Tokenizer()(CAPTIONS, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
        unmasked = model(input_ids=batch.input_ids).last_hidden_state
    assert not torch.allclose(unmasked[1, :11], expected[1, :11], atol=100 * FP32_ATOL), "the mask matters"
    for states, rows, mask in zip(text.encode(CAPTIONS), expected, batch.attention_mask.bool(), strict=True):
        assert torch.equal(states, rows[mask])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_llama_sees_by_the_causal_mask_what_it_sees_by_none(dtype: torch.dtype, attention: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaModel(LlamaConfig(vocab_size=384, num_key_value_heads=2, **sizes)).eval().to(dtype)
    model.set_attn_implementation(attention)
    ids = torch.randint(0, 384, (3, 21))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).last_hidden_state
        mask = causal_mask(21, dtype, torch.device("cpu"))
        states = model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    atol = FP32_ATOL if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(states, expected, atol=atol, rtol=0)


def test_captions_of_one_length_need_no_mask() -> None:
    assert padding_mask([7, 7], 7, torch.float32) is None
    mask = padding_mask([7, 5], 7, torch.bfloat16)
    assert mask is not None and mask.dtype == torch.bfloat16 and mask.shape == (2, 1, 1, 7)
    assert torch.equal(mask[:, 0, 0] < -1e38, torch.tensor([[False] * 7, [False] * 5 + [True] * 2]))
