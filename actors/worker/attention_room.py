"""Whether a cascade keeps what attention gives (ops.packed.kept_attention): where it has room beside the rest.

Each rank of a bag decides alone: what is computed again has the same bits, and its exchanges come in the same order
either way. Plans do not count on it: what a cascade needs is what it takes without, unless it is to be kept always.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from actors.plan.places import AttentionMemory
from ops.models.base.config import DiTConfig
from ops.packed.packing import Layout
from ops.units import GIB

log = logging.getLogger(__name__)

WORTH_ROWS = 8192  # of the longest sequence: below, the host takes as long for it as the device for the attention
MOST_SIZES = 4096  # that are remembered, those that came last: with captions of any length hardly two are alike
SHARE = 0.9  # of the room that is left; blocks of the allocator are not as large as what lies in them


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSize:
    """What a pass's need of memory depends on, on one rank."""

    degree: int
    rows: int
    text_rows: int

    @classmethod
    def of(cls, layout: Layout) -> PassSize:
        return cls(degree=layout.degree, rows=layout.local_tokens, text_rows=sum(layout.text_lengths))


@dataclass(kw_only=True, slots=True)
class AttentionRoom:
    """Decides whether a pass keeps what attention gives, by the memory that earlier passes of its size took. `begin`
    and `end` bracket a pass."""

    setting: AttentionMemory
    gib_per_row: float
    cuda: bool
    _needs: dict[PassSize, float] = field(default_factory=dict, init=False)  # GiB without it
    _full: set[PassSize] = field(default_factory=set, init=False)  # with it the allocator had to try again
    _off: bool = field(default=False, init=False)
    _size: PassSize | None = field(default=None, init=False)
    _room_gib: float | None = field(default=None, init=False)
    keeps: bool = False  # in the pass that was begun and has not ended

    @classmethod
    def of(cls, dit: DiTConfig, setting: AttentionMemory, element_bytes: int, cuda: bool) -> AttentionRoom:
        """Decisions for a transformer whose activations have elements of `element_bytes`."""
        if not dit.gradient_checkpointing:
            setting = "recomputed"  # nothing is: without checkpointing everything is kept
        return cls(setting=setting, gib_per_row=dit.kept_bytes(element_bytes) / GIB, cuda=cuda)

    def begin(self, layout: Layout, room_gib: float | None) -> bool:
        """Whether this pass keeps what attention gives; `room_gib` is for the whole pass (None: no limit is known)."""
        self._size, self._room_gib = PassSize.of(layout), room_gib
        self.keeps = self.setting == "kept" or (self.setting == "auto" and self._fits(layout, room_gib))
        return self.keeps

    def _fits(self, layout: Layout, room_gib: float | None) -> bool:
        size = self._size
        need = self._needs.get(size) if size is not None else None
        if not self.cuda or self._off or size is None or size in self._full or need is None or room_gib is None:
            return False
        kept = self.gib_per_row * (size.rows + size.text_rows)
        return max(layout.lengths, default=0) >= WORTH_ROWS and kept <= SHARE * (room_gib - need)

    def end(self, need_gib: float | None) -> float | None:
        """The pass took `need_gib` (None: memory is not counted). Returns the need that plans are to count on: what was
        kept because there was room is not part of it."""
        (size, self._size), (kept, self.keeps) = (self._size, None), (self.keeps, False)
        if size is None or need_gib is None or self.setting == "kept":
            return need_gib
        if not kept:
            self._needs[size] = max(need_gib, self._needs.pop(size, 0.0))
            if len(self._needs) > MOST_SIZES:
                oldest = next(iter(self._needs))
                del self._needs[oldest]
                self._full.discard(oldest)
            return need_gib
        if self._room_gib is not None and need_gib >= self._room_gib:
            self._full.add(size)
        return self._needs.get(size)

    def failed(self) -> None:
        """The pass has failed, or none was begun."""
        self._size, self.keeps = None, False

    def give_up(self) -> None:
        """Memory ran out in a pass that kept what attention gives: no later pass of this worker keeps it."""
        log.warning(
            "memory ran out in a pass that kept what attention gives; this worker computes it again from now on"
        )
        self.failed()
        self._off = True
        if self.setting == "kept":
            self.setting = "auto"
