"""A profile is taken for the device that it was measured on, by whatever name that goes."""

from __future__ import annotations

import pytest

from actors.plan.costs.profile import Profile
from actors.plan.costs.setting import ProfiledSetting
from actors.plan.types import PlanError
from actors.planning.learned import refuse_other
from ops.geometry import Geometry
from ops.models.config import ModelConfig

H100 = "NVIDIA H100 80GB HBM3"


def refused(have: str, want: str) -> bool:
    model = ModelConfig()
    profile = Profile.from_flops(model.dit, model.vae, model.text, Geometry(), model.image)
    profile.setting = ProfiledSetting(model="m", device=have, attention="auto")
    try:
        refuse_other(profile, ProfiledSetting(model="m", device=want, attention="auto"), "p.json")
    except PlanError as error:
        assert have in str(error) and want in str(error)
        return True
    return False


@pytest.mark.parametrize("want", [H100, "H100", "cuda", ""])
def test_one_device_has_several_names(want: str) -> None:
    """A driver's, Ray's, and none on a machine that plans for a GPU it does not have."""
    assert not refused(H100, want) and not refused(want, H100)


@pytest.mark.parametrize(
    ("one", "other"),
    [("NVIDIA H200", "H20"), ("NVIDIA L40S", "L4"), ("NVIDIA A100-SXM4-80GB", "A10"), (H100, "A100"), (H100, "cpu"),
     ("cpu", "cuda")],
)  # fmt: skip
def test_a_name_that_begins_like_another_is_another_device(one: str, other: str) -> None:
    assert refused(one, other) and refused(other, one)


def test_what_ray_makes_of_names_with_small_letters_is_known() -> None:
    assert not refused("NVIDIA GeForce RTX 4090", "G") and not refused("NVIDIA A100-SXM4-80GB", "A100")
