"""The engine without Ray: a few decode processes of this machine over the same plan. For laptops and tests."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace

from data.config import DataConfig
from data.dataset.dataset import Dataset
from data.engines.child import DecodeProcess, DecoderDied, DecoderHung, decode_isolated
from data.engines.machine import DecodeNode, number_of, settled
from data.ledger import LedgerRecord
from data.types import Batch, DecodeJob, NeedsPixels
from ops.cores import usable_cores

log = logging.getLogger(__name__)

RECYCLE_AFTER = 500  # jobs; a decoder that leaks is replaced before it matters


class PoolEngine:
    """See `data.engines.engine.Engine`. `batches` returns Batches."""

    def __init__(
        self, dataset: Dataset, config: DataConfig | None = None, needs_pixels: NeedsPixels = lambda item: True
    ) -> None:
        """`needs_pixels` is asked as the work on an item begins."""
        here = [DecodeNode(cpus=usable_cores())]
        self.dataset, self._needs_pixels = dataset, needs_pixels
        self.config = settled((config or dataset.config).engine, here)
        self.processes = [DecodeProcess() for _ in range(number_of(self.config.decode_workers))]
        self._work: queue.Queue[tuple[DecodeJob, Future[Batch]] | None] = queue.Queue()
        self._steps: dict[int, list[Future[Batch]]] = {}
        self._threads: list[threading.Thread] = []

    def start(self, first_step: int, avoid: Sequence[str] = ()) -> None:
        self._drop(list(self._steps))
        self.dataset.rewind_draws(first_step)
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._serve, args=(process,), daemon=True, name=f"decode-{number}")
                for number, process in enumerate(self.processes)
            ]
            for thread in self._threads:
                thread.start()
        for step in range(first_step, first_step + self.config.lookahead + 1):
            self._submit(step)

    def batches(self, step: int) -> list[Batch]:
        if not self._threads:
            raise RuntimeError("PoolEngine.batches before start.")
        for ahead in range(step, step + self.config.lookahead + 1):
            self._submit(ahead)
        found = [self._wait(step, slot, future) for slot, future in enumerate(self._steps[step])]
        faults = [fault for batch in found for fault in batch.faults]
        self.dataset.count_draws(step, faults)
        return found

    def release(self, step: int) -> None:
        self._drop([held for held in self._steps if held <= step])

    def counts(self) -> LedgerRecord:
        return self.dataset.ledger.summary()

    def stop(self) -> None:
        self._drop(list(self._steps))
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(timeout=self.config.clip_timeout_s)
        self._threads = []
        for process in self.processes:
            process.close()

    def _submit(self, step: int) -> None:
        if step in self._steps:
            return
        futures: list[Future[Batch]] = []
        for item in self.dataset.step(step).items:
            future: Future[Batch] = Future()
            futures.append(future)
            self._work.put((replace(item.job, pixels=self._needs_pixels(item)), future))
        self._steps[step] = futures

    def _drop(self, steps: Sequence[int]) -> None:
        for step in steps:
            for future in self._steps.pop(step):
                future.cancel()

    def _wait(self, step: int, slot: int, future: Future[Batch]) -> Batch:
        waited = 0.0
        while True:
            try:
                return future.result(timeout=self.config.stall_s)
            except FutureTimeout:
                waited += self.config.stall_s
                log.warning("data stall: item s%d.%d is not decoded after %.0f s", step, slot, waited)

    def _serve(self, process: DecodeProcess) -> None:
        done = 0
        while (work := self._work.get()) is not None:
            job, future = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._decode(process, job))
            except Exception as error:  # raised where this batch is awaited
                future.set_exception(error)
            done += 1
            if done % RECYCLE_AFTER == 0:
                process.close()

    def _decode(self, process: DecodeProcess, job: DecodeJob) -> Batch:
        """A job whose process died is decoded clip by clip, so that the clip at fault is named and skipped."""
        try:
            return process.decode(job, self.config.clip_timeout_s * len(job.clips))
        except (DecoderDied, DecoderHung) as error:
            log.warning("%s in item %s; its clips are decoded one by one", error, job.item)
            return decode_isolated(job, self.config.clip_timeout_s)
