"""Settings of Wan's transformer. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ops.models.base.config import DiTConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class WanConfig(DiTConfig):
    """Wan2.1 text to video."""

    architecture: Literal["wan"] = "wan"
    cross_attn_norm: bool = True

    @property
    def rope_split(self) -> tuple[int, int, int]:
        """Wan's 44, 42, 42 of 128: a third of the pairs each for h and w, the rest for t."""
        spatial = 2 * (self.head_dim // 6)
        return self.head_dim - 2 * spatial, spatial, spatial
