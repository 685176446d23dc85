"""Keeps a worker's encode results for later epochs and other runs, written while it computes."""

from __future__ import annotations

from actors.messages import CascadeTask
from actors.worker.handoff import EncodeResult
from data.cache import CacheWriter, EntryKind


class ResultCache:
    """Takes the results of every encode cascade that this worker leads (`Encoding`'s `on_encoded`)."""

    def __init__(self, writer: CacheWriter) -> None:
        self._writer = writer

    def __call__(self, task: CascadeTask, results: list[EncodeResult]) -> None:
        kind: EntryKind = "latents" if task.module == "vae" else "text"
        config = self._writer.cache.config
        if not (config.latents if kind == "latents" else config.text):
            return
        for sample, result in zip(task.samples, results, strict=True):
            key = sample.latent_key if kind == "latents" else sample.text_key
            if result.ok and key:
                self._writer.submit(kind, key, result.rows.float().cpu().numpy().copy())
