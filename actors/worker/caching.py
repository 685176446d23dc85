"""Keeps a worker's encode results for later epochs and other runs, written while it computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from actors.messages import CascadeTask
from actors.worker.handoff import CopyInFlight, EncodeResult
from data.cache import CacheWriter, EntryKind


class ResultCache:
    """Takes the results of every encode cascade that this worker leads (`Encoding`'s `on_encoded`). The writer's thread
    waits for their copies, the cascade for none."""

    def __init__(
        self,
        writer: CacheWriter,
        copy: Callable[[torch.Tensor], CopyInFlight],
        check_of: Callable[[CascadeTask], Callable[[], None]] = lambda task: lambda: None,
    ) -> None:
        """`copy` begins a copy to host memory. When it has come, what `check_of` the task gave is called: it raises
        where the device may have left anything there."""
        self._writer, self._copy, self._check_of = writer, copy, check_of

    def __call__(self, task: CascadeTask, results: list[EncodeResult]) -> None:
        kind: EntryKind = "latents" if task.module == "vae" else "text"
        config = self._writer.cache.config
        if not (config.latents if kind == "latents" else config.text):
            return
        check = self._check_of(task)
        for sample, result in zip(task.samples, results, strict=True):
            key = sample.latent_key if kind == "latents" else sample.text_key
            if result.ok and key:
                rows = result.rows.float()
                self._writer.submit_later(kind, key, partial(_come, self._copy(rows), check), rows.nbytes)


def host_copy(rows: torch.Tensor) -> CopyInFlight:
    """A copy in host memory of what lies there."""
    return CopyInFlight(host=rows.clone(), wait=lambda: None)


def _come(copying: CopyInFlight, check: Callable[[], None]) -> np.ndarray:
    copying.wait()
    check()
    found: np.ndarray = copying.host.numpy()
    return found
