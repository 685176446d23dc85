"""`heddle bench families` times two transformers that compute the same."""

from __future__ import annotations

import pytest
import torch

from app.bench.families import UniformBatch, run, stacked
from ops.models.families import FAMILIES
from ops.typed import ConfigError


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.own_code is None])
def test_both_sides_of_every_family_agree_on_a_whole_batch_and_are_timed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contest = UniformBatch.of(name, layers=1, heads=2, head_dim=32, grid=(2, 2, 3), batch=2)
    found = contest.run(rounds=1)
    assert found.ours_s > 0 and found.ratio == pytest.approx(found.theirs_s / found.ours_s)
    frames = contest.clips[0].latent.shape[1] // contest.config.patch[0]
    assert found.tokens == 2 * frames * 6 and (frames == 1) == contest.config.images_only
    ours = UniformBatch.ours

    def wrong(self: UniformBatch, weights: dict[str, torch.Tensor]) -> object:
        return ours(self, {key: 1.01 * value for key, value in weights.items()})

    monkeypatch.setattr(UniformBatch, "ours", wrong)
    with pytest.raises(RuntimeError, match=f"{name}: velocities differ"):
        contest.run(rounds=1)


def test_arguments_of_samples_become_those_of_a_batch() -> None:
    made = stacked([{"x": torch.full((1, 3), n), "rope": torch.ones(4, 2), "size": 7} for n in range(3)])
    assert made["x"].tolist() == [[n] * 3 for n in range(3)] and made["rope"].shape == (4, 2) and made["size"] == 7


def test_an_unknown_family_and_a_wrong_size_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"--families has stdit3, allegro; Diffusers has wan"):
        run(families="wan,stdit3,allegro")
    with pytest.raises(ConfigError, match="--size 4x8 is no size"):
        run(size="4x8")
