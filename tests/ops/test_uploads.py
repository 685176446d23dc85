"""Copies of small tensors to a device: `ops/uploads.py`, and what layouts send with it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops import uploads
from ops.packing import Layout, Sequence
from ops.spatial_temporal.choice import SlicingRule
from ops.spatial_temporal.packed import Rest
from ops.spatial_temporal.slicing import WHOLE_LAYERS
from ops.uploads import upload, upload_all, upload_numbers

DTYPES = (torch.int64, torch.int32, torch.float64, torch.bfloat16, torch.bool, torch.uint8)
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=6), st.integers(0, 99))
def test_tensors_that_travel_together_arrive_as_they_were(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sent = [torch.randint(0, 2, shape, generator=generator).to(dtype) for shape, dtype in kinds]
    got = uploads._together(sent, torch.device("cpu"))
    assert len(got) == len(sent)
    for one, other in zip(got, sent):
        assert one.dtype == other.dtype and torch.equal(one, other)
        assert one.storage_offset() * one.element_size() % 256 == 0, "kernels read whole words"


def test_what_is_held_twice_travels_once_and_numbers_keep_their_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def together(tensors: list[torch.Tensor], device: object) -> list[torch.Tensor]:
        sent.append(len(tensors))
        return uploads._together(tensors, torch.device("cpu"))

    monkeypatch.setattr(uploads, "upload", together)
    one, other = torch.arange(3), torch.arange(4)
    found = upload_all({"a": one, "b": [other, one], "c": 5}, "meta")
    assert sent == [2] and found["c"] == 5
    assert found["a"] is found["b"][1] and torch.equal(found["a"], one) and torch.equal(found["b"][0], other)  # type: ignore[index]
    levels, weights = upload_numbers([[0.5, 0.25], [1.0]], torch.float64, "meta")
    assert levels.tolist() == [0.5, 0.25] and weights.tolist() == [1.0] and weights.dtype == torch.float64


def test_on_the_cpu_nothing_is_copied() -> None:
    tensor = torch.arange(3)
    assert upload([tensor], "cpu")[0] is tensor


MIXED = [Sequence((2, 4, 4), 5, clean_frames=1), Sequence((1, 3, 3), 0), Sequence((3, 2, 4), 7, image_tokens=2)]


@pytest.mark.parametrize("degree", [1, 3])
def test_parts_sent_beforehand_are_those_that_follow_one_by_one(degree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in of a device keeps values here, so that they can be compared."""
    copies: list[int] = []

    def together(tensors: list[torch.Tensor], device: torch.device | str) -> list[torch.Tensor]:
        if torch.device(device).type == "cpu":  # the layout in host memory
            return tensors
        copies.append(len(tensors))
        return uploads._together(tensors, torch.device("cpu"))

    properties = [name for name in vars(Layout) if type(vars(Layout)[name]).__name__ == "cached_property"]
    every = [name for name in properties if not name.startswith("_")]
    families = ((longest_text, (3,)), (Rest.of, (SlicingRule(slicing=WHOLE_LAYERS), 4)))
    assert len(every) > 12 and Layout(MIXED).asked == frozenset()
    for rank in range(degree):
        plain = Layout(MIXED, degree, rank)
        wanted = {name: getattr(plain, name) for name in every}
        made = [plain.made(make, *settings) for make, settings in families]
        assert plain.asked == frozenset([*every, *families])
        with monkeypatch.context() as patch:
            patch.setattr(uploads, "upload", together)
            sent = Layout(MIXED, degree, rank, "meta", beforehand=plain.asked)
        assert sent.asked == frozenset(every), "a family's parts that nobody has used yet are not asked for again"
        for name, part in wanted.items():
            assert_same(getattr(sent, name), part)
        for (make, values), part in zip(families, made, strict=True):
            assert_same(sent.made(make, *values), part)
        assert sent.asked == plain.asked
    assert len(copies) == degree, "one for all parts of a layout, those of families included"


def longest_text(layout: Layout, times: int) -> torch.Tensor:
    """A part that a family makes, as one tensor."""
    assert layout.device.type == "cpu"
    return torch.tensor([times * max(layout.text_lengths)])


def assert_same(one: object, other: object) -> None:
    if isinstance(other, torch.Tensor):
        assert isinstance(one, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(other, list | tuple):
        assert isinstance(one, list | tuple) and len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif is_dataclass(other):
        for field in fields(other):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif not hasattr(other, "shape"):
        assert one == other
