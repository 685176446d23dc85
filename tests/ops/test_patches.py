"""Latents as token rows, and back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.packed.patches import patchify, unpatchify


def test_patchify_is_what_a_strided_convolution_reads() -> None:
    latent, weight = torch.randn(3, 4, 6, 8), torch.randn(5, 3, 2, 3, 2)
    expected = F.conv3d(latent[None], weight, stride=(2, 3, 2))[0].flatten(1).T
    torch.testing.assert_close(patchify(latent, (2, 3, 2)) @ weight.flatten(1).T, expected, atol=1e-5, rtol=1e-5)


@given(st.tuples(*[st.integers(1, 3)] * 3), st.tuples(*[st.integers(1, 3)] * 3), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_unpatchify_is_the_inverse(grid: tuple[int, int, int], patch: tuple[int, int, int], channels: int) -> None:
    latent = torch.randn(channels, *(g * p for g, p in zip(grid, patch)))
    assert torch.equal(unpatchify(patchify(latent, patch), grid, patch, channels), latent)


def test_patches_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple of patch"):
        patchify(torch.zeros(3, 4, 5, 6), (1, 2, 2))
    with pytest.raises(ValueError, match="do not fit grid"):
        unpatchify(torch.zeros(3, 12), (1, 2, 2), (1, 2, 2), 3)
