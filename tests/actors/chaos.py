"""Workers that kill themselves with SIGKILL, in given phases of a step or in the middle of an addition, of an update or
of writing parameters, workers that run out of memory, that have none left for samples, and that cannot form a
generation."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ops.memory.node_memory
from actors.messages import WorkerSettings
from actors.worker.aside import Asides
from actors.worker.executor import Executor
from actors.worker.heartbeat import Mailbox
from actors.worker.meter import NoMeter
from actors.worker.worker import Worker
from app.bench.gpu.node_peers import NodePeers
from ops.models.experts import transformers
from ops.models.frozen_blocks import FrozenBlocks
from ops.shards import Slot
from ops.update.node_gradients import NodeGradients
from ops.update.node_sum import SharedSum
from ops.update.parameter_places import BlockBuffers
from ops.update.peer_sum import PeerSum
from ops.update.sync import FlatSync
from tests.ops.block_copies import LateCopies

FOLDER = "HEDDLE_CHAOS_FOLDER"  # `order` holds one phase per line; a file per phase that has fired
SHORT = "short"  # a folder there, with a file for each kind of cascade that has run out of memory
INJECTED = 8
ARMED = "armed"  # a file there: the next worker that adds a gradient, or writes parameters, dies


class ChaosWorker(Worker):
    """Dies in the next phase of the list that it enters; of several workers, the first one to enter it."""

    def _phase(self, phase: str) -> None:
        super()._phase(phase)
        if self.executor.num_workers < 2 or self.heartbeat.progress.step < 1:
            return
        folder = Path(os.environ[FOLDER])
        order = (folder / "order").read_text().split()
        waiting = [name for name in order if not (folder / f"fired-{name}").exists()]
        if waiting and waiting[0] == phase:
            try:
                (folder / f"fired-{phase}").touch(exist_ok=False)
            except FileExistsError:  # another worker was first
                return
            os.kill(os.getpid(), signal.SIGKILL)


class HalfAddingWorker(Worker):
    """Dies when it has added half of a parameter's gradient, and rubbish, to that of its node: one worker each time
    that a file arms them."""

    def _load(self) -> Executor:
        executor = super()._load()
        gradients = executor.sync.gradients  # type: ignore[attr-defined]
        assert isinstance(gradients, NodeGradients) and isinstance(gradients.sum, SharedSum)
        add, armed = gradients.sum._add, Path(os.environ[FOLDER]) / ARMED

        def half(slot: Slot, gradient: Tensor) -> None:
            if executor.num_workers > 1 and armed.exists():
                gradients.flat[slot.lo : (slot.lo + slot.hi + 1) // 2].add_(1000.0)
                try:
                    armed.unlink()
                except FileNotFoundError:  # another worker was first: leave no rubbish
                    gradients.flat[slot.lo : (slot.lo + slot.hi + 1) // 2].sub_(1000.0)
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            add(slot, gradient)

        gradients.sum._add = half  # type: ignore[method-assign]
        return executor


class HalfWritingWorker(Worker):
    """Dies when it has written half of its new parameters, as rubbish, where those of its node lie: one worker each
    time that a file arms them."""

    def _load(self) -> Executor:
        executor = super()._load()
        sync, armed = executor.sync, Path(os.environ[FOLDER]) / ARMED
        assert isinstance(sync, FlatSync)
        update = sync._update

        def half(lr: float, factor: float) -> None:
            if executor.num_workers > 1 and armed.exists():
                try:
                    armed.unlink()
                except FileNotFoundError:  # another worker was first
                    pass
                else:
                    own = sync.parameters.own
                    own[: (len(own) + 1) // 2].fill_(1000.0)
                    os.kill(os.getpid(), signal.SIGKILL)
            update(lr, factor)

        sync._update = half  # type: ignore[method-assign]
        return executor


class FetchingWorker(Worker):
    """Fetches the frozen weights of its blocks from memory of its node as a GPU does, through two buffers."""

    def _load(self) -> Executor:
        executor = super()._load()
        assert executor.modules.blocks_on_host
        FrozenBlocks(transformers(executor.modules.dit), BlockBuffers(LateCopies()), torch.empty(1))
        return executor


class DeafWorker(Worker):
    """Its additions to memory of other workers of its node, which stands for that of GPUs, arrive nowhere."""

    def _load(self) -> Executor:
        executor = super()._load()
        sync = executor.sync
        assert isinstance(sync, FlatSync)
        dtype, parameters = torch.float32, sync._parameters
        part = PeerSum(sync.total, dtype, dtype, NodePeers(deaf=True))
        sync.gradients = NodeGradients(parameters, sync.layout, [part])
        return executor


class FullNodeWorker(Worker):
    """Its node has nothing left for memory that workers share."""

    def _load(self) -> Executor:
        ops.memory.node_memory.node_room = lambda: 10  # type: ignore[assignment]
        return super()._load()


class ShortWorker(Worker):
    """Runs out of memory in cascades drawn at random, INJECTED times in all of a run, in each kind of cascade once, and
    with one sample in each module and degree once, whatever its shape: a third time at the least ends the run."""

    def _phase(self, phase: str) -> None:
        super()._phase(phase)
        if phase not in ("encode", "forward", "backward"):
            return
        progress, folder = self.heartbeat.progress, Path(os.environ[FOLDER]) / SHORT
        if not hasattr(self, "_draws"):
            self._draws = np.random.default_rng(list(progress.worker.encode()))
        if self._draws.random() < 0.15 and len(list(folder.iterdir())) < INJECTED:
            kind = progress.activity.rpartition(" ")[0]  # "dit 9f 64x96 b1 sp2"
            module, *_, batch, degree = kind.split()
            if batch == "b1":
                kind = f"{module} {batch} {degree}"
            try:
                (folder / kind.replace(" ", "-")).touch(exist_ok=False)
            except FileExistsError:
                return
            raise torch.OutOfMemoryError("Tried to allocate 9.00 GiB")


class FullMeter(NoMeter):
    """A device of which training leaves nothing."""

    def room_gib(self) -> float | None:
        return 0.0


class DeviceAsides(Asides):
    """The CPU is a device here, whose memory is not the host's."""

    def __init__(self, *args: Any, **options: Any) -> None:  # those of Asides
        super().__init__(*args, **options)
        self._beside_host = True


class FullWorker(Worker):
    """Has no room for the weights of a sample beside its own."""

    def __init__(self, name: str, settings: WorkerSettings, monitor: Mailbox) -> None:
        super().__init__(name, settings, monitor)
        self._asides = DeviceAsides(self.executor.modules, self.device, FullMeter(), settle=self._copied)


class HalfUpdatingWorker(Worker):
    """Dies when it has written half of a piece of its next state, as rubbish, in the memory of its node: one worker
    each time that a file arms them."""

    def _load(self) -> Executor:
        executor = super()._load()
        sync, armed = executor.sync, Path(os.environ[FOLDER]) / ARMED
        assert isinstance(sync, FlatSync)
        bring = sync.state.bring

        def half(own: slice) -> dict[str, Tensor]:
            found = bring(own)
            if executor.num_workers > 1 and armed.exists():
                try:
                    armed.unlink()
                except FileNotFoundError:  # another worker was first
                    pass
                else:
                    assert sync.state.in_banks
                    for array in found.values():
                        array[: (len(array) + 1) // 2].fill_(1000.0)
                    os.kill(os.getpid(), signal.SIGKILL)
            return found

        sync.state.bring = half  # type: ignore[method-assign]
        return executor
