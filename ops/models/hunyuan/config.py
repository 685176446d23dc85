"""Settings of HunyuanVideo's transformer. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ops.models.base.joint_config import JointDiTConfig
from ops.ranges import between, check_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class HunyuanConfig(JointDiTConfig):
    """HunyuanVideo text to video."""

    architecture: Literal["hunyuan"] = "hunyuan"
    num_refiner_layers: int = 2  # self-attention blocks over the text

    def __post_init__(self) -> None:
        JointDiTConfig.__post_init__(self)
        check_numbers("model.dit", self, num_refiner_layers=between(0, 1000))
