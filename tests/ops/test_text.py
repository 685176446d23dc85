"""Text encoders: true lengths, independent of the batch, deterministic from the seed, loadable from a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import ByT5Tokenizer, T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

from ops.models.config import TEXT_BATCH_TOKENS, TextConfig
from ops.models.load import build_text, token_counter
from ops.models.place import visiting
from ops.models.text import T5Text, length_groups, prepared

FP32_ATOL = 1e-5
CAPTIONS = [
    "a red circle",
    "",
    "a blue square moves to the right over a dark background",
    "kleines grünes Dreieck",
    "a red circle",
    "x" * 500,
]


def test_batch_equals_captions_one_by_one() -> None:
    text = build_text(TextConfig(max_length=64))
    together = text.encode(CAPTIONS)
    for caption, states in zip(CAPTIONS, together):
        torch.testing.assert_close(states, text.encode([caption])[0], atol=FP32_ATOL, rtol=0)


@pytest.mark.parametrize("kind", ["t5", "hunyuan"])
def test_weights_in_host_memory_come_for_a_call_and_go(kind: Literal["t5", "hunyuan"]) -> None:
    config = TextConfig(kind=kind, max_length=64)
    staying, visiting = build_text(config), build_text(replace(config, place="host"))
    homes = [weight.data_ptr() for weight in visiting.parameters()]
    for one, other in zip(staying.encode(CAPTIONS), visiting.encode(CAPTIONS), strict=True):
        assert torch.equal(one, other)
    assert [weight.data_ptr() for weight in visiting.parameters()] == homes


def test_lengths_are_true_and_cut() -> None:
    text = build_text(TextConfig(max_length=64))
    lengths = [len(states) for states in text.encode(CAPTIONS)]
    # bytes + end of sequence; umlauts are two bytes
    assert lengths == [13, 1, 56, 24, 13, 64]
    assert lengths == [text.count(caption) for caption in CAPTIONS]


def test_padding_is_zeros_up_to_the_asked_length() -> None:
    padded = build_text(TextConfig(pad_to=20, max_length=20)).encode(["a red circle", "x" * 30])
    assert [len(states) for states in padded] == [20, 20]
    assert padded[0][12].abs().sum() > 0
    assert not padded[0][13:].any()


def test_equal_seeds_give_equal_encoders() -> None:
    captions = ["a yellow star"]
    first = build_text(TextConfig(seed=3)).encode(captions)[0]
    torch.manual_seed(99)
    assert torch.equal(first, build_text(TextConfig(seed=3)).encode(captions)[0])
    assert not torch.allclose(first, build_text(TextConfig(seed=4)).encode(captions)[0])


def test_building_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_text(TextConfig())
    assert torch.equal(torch.rand(3), expected)


def test_white_space_and_entities_are_cleaned_as_in_diffusers_pipelines() -> None:
    text = build_text(TextConfig())
    plain, dirty = text.encode(["a red & blue ball", "  a red &amp;amp; blue\n ball "])
    torch.testing.assert_close(plain, dirty, atol=FP32_ATOL, rtol=0)


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        (TextConfig(cleaned=False), " A  RED &amp; blue\n Dot"),
        (TextConfig(), "A RED & blue Dot"),
        (TextConfig(cleaned="lower"), "a red & blue dot"),
        (TextConfig(cleaned="lower", max_length=40, unmasked=40), " a  red &amp; blue\n dot"),
    ],
)
def test_a_caption_is_prepared_as_it_is_asked_and_counted_so(settings: TextConfig, seen: str) -> None:
    caption = " A  RED &amp; blue\n Dot"
    assert prepared(caption, settings) == seen
    assert token_counter(settings)(caption) == len(seen) + 1 == build_text(settings).count(caption)


def test_length_groups_cover_all_with_bounded_padding() -> None:
    lengths = [5, 100, 98, 7, 7, 60, 1, 100]
    groups = list(length_groups(lengths))
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(lengths[i] >= 0.75 * lengths[group[0]] for group in groups for i in group)


def test_text_without_a_mask_is_computed_some_rows_at_a_time() -> None:
    """All rows that are seen count, not those of the captions alone."""
    text, rows = build_text(TextConfig(unmasked=256, pad_to=256, max_length=256)), []
    assert isinstance(text, T5Text)
    text.encoder.register_forward_pre_hook(
        lambda module, inputs, named: rows.append(named["input_ids"].numel()), with_kwargs=True
    )
    text.encode(["a red disc"] * 40)
    assert sum(rows) == 40 * 256 and max(rows) <= TEXT_BATCH_TOKENS


@pytest.mark.parametrize(("config_class", "model_class"), [(T5Config, T5EncoderModel), (UMT5Config, UMT5EncoderModel)])
def test_folder_gives_the_states_of_its_own_class(config_class: type, model_class: type, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = model_class(config_class(vocab_size=384, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)).eval()
    model.save_pretrained(tmp_path / "text_encoder")
    ByT5Tokenizer().save_pretrained(tmp_path / "tokenizer")
    text = build_text(TextConfig(path=str(tmp_path), max_length=20))
    ids = ByT5Tokenizer()("a green cube", return_tensors="pt").input_ids
    with torch.no_grad():
        expected = model(input_ids=ids).last_hidden_state[0]
    assert text.dim == 32
    torch.testing.assert_close(text.encode(["a green cube", "a"])[0], expected, atol=FP32_ATOL, rtol=0)


def test_a_folder_whose_weights_are_a_pickle_is_refused(tmp_path: Path) -> None:
    model = T5EncoderModel(T5Config(vocab_size=384, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4))
    model.config.save_pretrained(tmp_path)
    ByT5Tokenizer().save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, a pickle"):
        build_text(TextConfig(path=str(tmp_path)))


def test_missing_folder_and_foreign_encoder_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        build_text(TextConfig(path=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(ValueError, match="is a 'clip' encoder; supported are t5 and umt5"):
        build_text(TextConfig(path=str(tmp_path)))


def test_random_encoder_tells_words_apart_by_their_neighbours() -> None:
    text = build_text(TextConfig(num_layers=1))
    base, near, far = text.encode(["a red disc moves here", "a rod disc moves here", "a red disc moves hers"])
    letter = 4  # the d of red
    assert (base[letter] - near[letter]).norm() > 5 * (base[letter] - far[letter]).norm()


class _Copies(TorchDispatchMode):
    """Says of each copy of a tensor whether the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # PyTorch's
        if func is torch.ops.aten._to_copy.default:
            self.waits.append(not (kwargs or {}).get("non_blocking"))
        return func(*args, **(kwargs or {}))


def test_a_host_stays_ahead_of_a_device_to_which_an_encoder_comes() -> None:
    """A wait for each weight would be one for all cascades that are queued before."""
    module = torch.nn.Linear(3, 2)
    home = module.weight.data_ptr()
    with _Copies() as copies, visiting([module], "host", torch.device("cpu")):
        assert module.weight.data_ptr() != home
    assert copies.waits == [False, False] and module.weight.data_ptr() == home
