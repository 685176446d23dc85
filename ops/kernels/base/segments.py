"""Which row of the modulation tables each token uses: the one index structure of the fused ops.

A *run* is a range of consecutive tokens that share one row of the [S, D] modulation tables. Dense batches (B runs),
per-frame timesteps (B*F runs) and packed sequences of any lengths are the same thing here, so every op has one code
path and the tables are never expanded to [N, D]. Built once per micro-batch on the host, shared by all layers; no op
that takes it synchronises with the device.

N tokens, R runs, S table rows.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

INDEX_SCHEMA = "Tensor? run, Tensor? cu, Tensor? run2mod, Tensor? mod_off, Tensor? mod_runs"
IndexTensors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True, eq=False, slots=True)
class Segments:
    """Runs of tokens and their table rows, all int32 on one device. Make it with the class methods below.

    `mod_off` and `mod_runs` invert `run2mod` (CSR): the runs of table row s are mod_runs[mod_off[s]:mod_off[s + 1]],
    in ascending order, which fixes the order in which the backward adds up partial sums.
    """

    run: Tensor  # [N] run of each token
    cu: Tensor  # [R + 1] first token of each run, then N
    run2mod: Tensor  # [R] table row of each run; rows may repeat and come in any order
    mod_off: Tensor  # [S + 1]
    mod_runs: Tensor  # [R]

    @property
    def num_rows(self) -> int:
        return self.run.shape[0]

    @property
    def num_runs(self) -> int:
        return self.run2mod.shape[0]

    @property
    def num_mods(self) -> int:
        return self.mod_off.shape[0] - 1

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The five index tensors in the order of the custom ops' arguments."""
        return self.run, self.cu, self.run2mod, self.mod_off, self.mod_runs

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Segments:
        """The same segments on another device."""
        return Segments(*(t.to(device, non_blocking=non_blocking) for t in self.tensors()))

    @classmethod
    def packed(
        cls,
        lengths: Sequence[int],
        mod_rows: Sequence[int] | None = None,
        num_mods: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Segments:
        """Run i has lengths[i] tokens (0 is allowed) and uses table row mod_rows[i] (default: i) of num_mods rows.

        Segments.packed([5, 3, 2], mod_rows=[1, 0, 1]) -> tokens 0-4 and 8-9 use row 1, tokens 5-7 row 0.
        """
        counts = [operator.index(length) for length in lengths]
        rows = list(range(len(counts))) if mod_rows is None else [operator.index(row) for row in mod_rows]
        if len(rows) != len(counts):
            raise ValueError(f"{len(counts)} lengths but {len(rows)} mod_rows; each run needs one table row.")
        if any(count < 0 for count in counts):
            raise ValueError(f"negative run length {min(counts)}; lengths count tokens.")
        size = max(rows, default=-1) + 1 if num_mods is None else num_mods
        if any(not 0 <= row < size for row in rows):
            bad = next(row for row in rows if not 0 <= row < size)
            raise ValueError(f"table row {bad} is outside 0..{size - 1}; raise num_mods or correct mod_rows.")
        if sum(counts) >= 2**31:
            raise ValueError(f"{sum(counts)} tokens do not fit the int32 index; split the micro-batch.")
        # NumPy, which neither a default device nor a mode of PyTorch reaches
        run2mod = np.array(rows, dtype=np.int64)
        index = (
            np.repeat(np.arange(len(rows)), counts),
            np.cumsum([0, *counts]),
            run2mod,
            np.cumsum([0, *np.bincount(run2mod, minlength=size)]),
            np.argsort(run2mod, kind="stable"),
        )
        return cls(*(torch.tensor(array.astype(np.int32), device=device) for array in index))

    @classmethod
    def dense(cls, batch: int, tokens: int, device: torch.device | str = "cpu") -> Segments:
        """A [batch, tokens, D] tensor with one table row per sample. Reads no values, as FakeTensorMode wants it."""
        if batch * tokens >= 2**31:
            raise ValueError(f"{batch * tokens} tokens do not fit the int32 index; split the micro-batch.")
        ends = torch.arange(batch + 1, dtype=torch.int32, device=device)
        samples = ends[:batch]
        return cls(samples.repeat_interleave(tokens), ends * tokens, samples, ends, samples)


def as_segments(
    run: Tensor | None, cu: Tensor | None, run2mod: Tensor | None, mod_off: Tensor | None, mod_runs: Tensor | None
) -> Segments | None:
    """The five index arguments of an op; all None when the tables have one row or one row per token.

    int32 [N], [R + 1], [R], [S + 1], [R].
    """
    if run is None or cu is None or run2mod is None or mod_off is None or mod_runs is None:
        return None
    return Segments(run, cu, run2mod, mod_off, mod_runs)
