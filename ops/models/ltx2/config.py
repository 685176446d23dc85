"""Settings of LTX-2's transformer, of its branch for video. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from ops.models.ltx.config import LTXBlocksConfig
from ops.ranges import between, check_numbers

if TYPE_CHECKING:
    from ops.models.base.family import Json

_VIDEO_PIPELINES = ("LTX2Pipeline", "LTX2ImageToVideoPipeline", "LTX2ConditionPipeline")


@dataclass(frozen=True, kw_only=True, slots=True)
class LTX2Config(LTXBlocksConfig):
    """LTX-2 (19B), text to video, or with a first frame: the branch for video alone. That for sound, and the attention
    of each to the other, are neither loaded nor computed; exports hold them as they were.

    Positions are the middles of tokens. RoPE turns the halves of a head, each by frequencies of its own.
    """

    architecture: Literal["ltx2"] = "ltx2"
    frame_rate: float = 24.0  # of samples, and of clips by data.fps; where that is 0 each has its own
    audio_head_dim: int = 0  # of the branch for sound, which has as many heads; 0: half of head_dim, as published

    def __post_init__(self) -> None:
        LTXBlocksConfig.__post_init__(self)
        check_numbers("model.dit", self, audio_head_dim=between(0, 1024))
        if self.sound_head_dim % 2:
            raise ValueError(
                f"model.dit.head_dim {self.head_dim} and audio_head_dim {self.audio_head_dim}: heads of the branch for "
                f"sound are {self.sound_head_dim} wide, which must be even. Use a multiple of 4 for head_dim, or set "
                f"audio_head_dim."
            )

    @property
    def sound_head_dim(self) -> int:
        """Width of a head of the branch for sound."""
        return self.audio_head_dim or self.head_dim // 2

    def of_pipeline(self, index: Json) -> Self:
        """Raises ValueError for a pipeline of another use, whose transformer has the same class."""
        name = index.get("_class_name")
        if str(name).startswith("LTX2") and name not in _VIDEO_PIPELINES:
            raise ValueError(
                f"a {name}: of LTX-2 text and a first frame to video are computed. Take a folder of LTX2Pipeline."
            )
        return self
