"""What one packed cascade and the end of a step ask of a device, counted without one: kernels, copies, waits.

    python -m app.bench.gpu.counting    # at real size, without a GPU; a rehearsal counts a few blocks

The model is on PyTorch's meta device, which stands for the GPU: it has shapes but no memory, so real sizes cost
nothing. A worker alone runs on it (`actors.worker.executor`): noise, layout, forward, losses, backward, the end of the
cascade, and the end of the step. Every op on it would be at least one kernel. The host waits where a value is read,
where it waits for the stream, and in each copy to the device that is not both from pinned memory and without blocking:
CUDA copies pageable memory in the stream's order, and PyTorch waits for it. It also waits where large uploads have
taken all memory that they may: the stand-in has read it when somebody waits for it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from actors.messages import STORE, CascadeTask, FinishTask, SampleId
from actors.worker.executor import Executor
from actors.worker.handoff import EncodeResult
from actors.worker.stopwatch import HostWatch
from app.bench.gpu.measurement import Earlier, NamedFigures, Place
from app.bench.gpu.models import HUNYUAN_13B, PICTURE_256P, WAN_1_3B, build, with_layers
from app.bench.gpu.worker_alone import encoded_cascade, worker_alone
from ops.attention import varlen
from ops.attention.varlen import backend_of
from ops.comm.collectives import Group
from ops.comm.groups import Groups
from ops.flow import noise
from ops.flow.noise import NoiseKey
from ops.models.base.config import DiTConfig
from ops.models.base.transformer import PackedTransformer
from ops.models.experts import transformers
from ops.packed import uploads
from ops.packed.graphed_blocks import GraphedBlocks, Launches
from ops.packed.packing import Sequence as PackedSequence
from ops.update import sync
from ops.waiting import CancelToken, PendingCollective, Work

STAND_IN = torch.device("meta")
FEW_LAYERS = 2  # of each kind in a rehearsal: an op on the stand-in takes as long as any
PACK = [PackedSequence((5, 12, 16), 77), PackedSequence((1, 20, 20), 33), PackedSequence((21, 30, 52), 512)]
READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.is_nonzero", "aten.equal")
FREE = ("aten.detach", "aten.lift_fresh", "aten.empty", "aten.new_empty", "prim.device")  # neither kernel nor view
_PATIENCE_S = 600.0  # of members of a bag, which do the same
_PINNED = WeakIdKeyDictionary()
MAKES = (torch.tensor, torch.as_tensor)  # their copy to a device is not dispatched


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchCount:
    """One packed cascade, and the end of its step, of a model at its real size."""

    family: str
    config: DiTConfig
    estimate_s: float = 20.0

    @property
    def name(self) -> str:
        return f"counts.{self.family}"

    def why_not(self, place: Place) -> str | None:
        if place.device.type != "cpu":
            return "counts need no device: python -m app.bench.gpu.counting"
        return None

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        config = place.pick(self.config, with_layers(self.config, FEW_LAYERS))
        first, second = counted_step(config, blocks=False), counted_step(config)
        come = counted_step(config, blocks=False, published=True)
        picture, graphs = counted_picture(config)
        per_layer = (second.cascade.kernels - first.cascade.kernels) / sum(config.block_counts)
        figures: dict[str, float] = {}
        for prefix, counter in (
            ("without blocks: ", first.cascade),
            ("", second.cascade),
            ("without blocks, results of others: ", come.cascade),
            ("in a bag of two: ", counted_bag(config)[0]),
            ("end of step: ", second.finish),
            ("small picture: ", picture),
            ("small picture by graphs: ", graphs),
        ):
            figures |= {f"{prefix}{name}": value for name, value in counter.figures().items()}
        return figures | {"kernels per block": round(per_layer, 1)}


def measurements() -> list[DispatchCount]:
    return [DispatchCount(family="wan", config=WAN_1_3B), DispatchCount(family="hunyuan", config=HUNYUAN_13B)]


class DispatchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
    """Counts inside its `with`. A value that is read from the stand-in is taken to be 1."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dispatched = self.kernels = self.uploads = self.downloads = self.waits = 0
        self.uploaded_bytes = 0
        self._made = _TensorCount(self)

    def __enter__(self) -> DispatchCounter:
        self._made.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._made.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.dispatched += 1
        given = dict(kwargs or {})
        tensors = [t for t in tree_leaves((args, given)) if isinstance(t, Tensor)]
        there = any(t.device == STAND_IN for t in tensors)
        name = func._schema.name.replace("::", ".")
        if there and name in READS:
            self.waits += 1
            return 1 if name == "aten._local_scalar_dense" else func(*args, **given)
        if name in ("aten._to_copy", "aten.copy_"):
            if (moved := self._moved(name, args, given)) is not None:
                return moved
        elif there:
            for index in tensors:  # an index in host memory goes there first; a single number goes with the launch
                if index.device != STAND_IN and index.dim():
                    self.uploaded(index, blocking=True)
        out = func(*args, **given)
        there = there or any(isinstance(t, Tensor) and t.device == STAND_IN for t in tree_leaves(out))
        if there and not func.is_view and not name.startswith(FREE):
            self.kernels += _launches(name, args)
        return out

    def launched(self) -> None:
        """One call of the host, whatever it runs on the device."""
        self.dispatched += 1
        self.kernels += 1

    def uploaded(self, source: Tensor, blocking: bool) -> None:
        """A copy to the device has begun; with `blocking` the host waits until all queued before it has ended."""
        self.uploads += 1
        self.uploaded_bytes += source.numel() * source.element_size()
        self.waits += blocking

    def _moved(self, name: str, args: tuple[object, ...], given: Mapping[str, object]) -> Tensor | None:
        """The result of a download (uploads are only counted); None where the op can run unchanged."""
        source, first, device = args[1 if name == "aten.copy_" else 0], args[0], given.get("device")
        assert isinstance(source, Tensor) and isinstance(first, Tensor)
        target = torch.device(device) if isinstance(device, str | torch.device) else first.device
        freely = bool(args[2] if name == "aten.copy_" and len(args) > 2 else given.get("non_blocking", False))
        if source.device != STAND_IN and target == STAND_IN:
            self.uploaded(source, blocking=not (freely and is_pinned(source)))
        if source.device == STAND_IN and target != STAND_IN:
            self.downloads += 1
            self.waits += not freely
            asked = given.get("dtype")
            dtype = asked if isinstance(asked, torch.dtype) else source.dtype
            return torch.ones(source.shape, dtype=dtype)
        return None

    def figures(self) -> dict[str, float]:
        return {
            "ops dispatched": self.dispatched,
            "kernels": self.kernels,
            "host to device": self.uploads,
            "host to device bytes": self.uploaded_bytes,
            "device to host": self.downloads,
            "synchronisations": self.waits,
        }


def _launches(name: str, args: tuple[object, ...]) -> int:
    """Kernels of one op: one, but of lists of tensors as many as ATen's `multi_tensor_apply` makes: each takes at most
    64 tensors of either list, and 320 chunks of 65,536 elements. Lists of several dtypes go tensor by tensor."""
    if not name.startswith("aten._foreach_"):
        return 1
    lists = [one for one in args if isinstance(one, list | tuple)]
    tensors = [one for one in lists[0] if isinstance(one, Tensor)]
    if len({one.dtype for one in tree_leaves(lists) if isinstance(one, Tensor)}) > 1:
        return len(tensors)
    chunks = sum(-(-one.numel() // 65_536) for one in tensors)
    return max(-(-len(tensors) // 64), -(-chunks // 320))


class _TensorCount(TorchFunctionMode):
    """Counts tensors made of numbers on the stand-in: each is a copy from pageable memory."""

    def __init__(self, counter: DispatchCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        made = any(func is make for make in MAKES) and not isinstance(args[0], Tensor)
        if made and isinstance(out, Tensor) and out.device == STAND_IN:
            self._counter.uploaded(out, blocking=True)
        return out


def is_pinned(source: Tensor) -> bool:
    """Whether it is what stands for pinned memory, which PyTorch makes only beside a GPU."""
    return source in _PINNED or (source._base is not None and source._base in _PINNED)


class _LateCopy:
    """Where a copy from a block of pinned memory has been made: the device has come there when the host waits."""

    def __init__(self, there: Tensor) -> None:
        self._there, self._made = there.view(-1)[:1], False

    def query(self) -> bool:
        return self._made

    def synchronize(self) -> None:
        if not self._made:
            self._there.item()  # which is counted as the wait that it stands for
        self._made = True


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What a step of one cascade asks of a device: the cascade, and the end of the step."""

    cascade: DispatchCounter
    finish: DispatchCounter


def counted_step(config: DiTConfig, blocks: bool = True, published: bool = False) -> StepCounts:
    """The second step of a worker alone, of one packed cascade; the first makes what is kept. Without `blocks` the
    model has none of them; with `published` results other workers have encoded, they come through the object store."""
    with as_on_a_gpu():
        worker = _worker(config, blocks)
        _run(worker, 0, DispatchCounter(), DispatchCounter(), published)
        counts = StepCounts(DispatchCounter(), DispatchCounter())
        _run(worker, 1, counts.cascade, counts.finish, published)
        worker.leave()
    return counts


class _OneLaunchEach:
    """Stands for graphs: the work is done when it is captured, and then counted as one launch."""

    def __init__(self, counter: DispatchCounter) -> None:
        self._counter = counter

    def prepare(self) -> None: ...

    def __call__(self, work: Launches) -> Launches:
        work()
        return self._counter.launched


def counted_picture(config: DiTConfig) -> tuple[DispatchCounter, DispatchCounter]:
    """A cascade of one small picture with blocks as written, and the third of its kind by CUDA graphs, of which each is
    one launch, whatever is in it."""
    found = DispatchCounter(), DispatchCounter()
    with as_on_a_gpu():
        for graphs, counter in zip((False, True), found, strict=True):
            worker = _worker(config, blocks=True)
            if graphs:
                (dit,) = transformers(worker.modules.dit)
                assert isinstance(dit, PackedTransformer)
                dit.graphed = GraphedBlocks(lambda layout: 1.0, _OneLaunchEach(counter), warm_up=1)
            for step in range(2):
                _run(worker, step, DispatchCounter(), DispatchCounter(), pack=[PICTURE_256P])
            _run(worker, 2, counter, DispatchCounter(), pack=[PICTURE_256P])
            worker.leave()
    return found


def counted_bag(config: DiTConfig) -> list[DispatchCounter]:
    """What a packed cascade asks of each member's device, in the second step of a bag of two. Both members have encoded
    a share of the texts and clips. Hosts meet as ever; what their devices exchange is left out."""
    counters, store, failed = [DispatchCounter() for _ in range(2)], dist.HashStore(), CancelToken()
    bag = (0, 1)

    def member(rank: int) -> None:
        try:
            groups = _StandInGroups(store, rank, bag, "gloo", 0, _PATIENCE_S, failed, "127.0.0.1")
            worker = _worker(config, blocks=True, groups=groups)
            for step in range(2):
                task, fetched = _cascade_of(worker, step, bag=bag)
                counter = counters[rank] if step else DispatchCounter()
                with patch.object(worker, "watch", _CountedWatch(counter)), counter:
                    worker.dit(task, fetched)
            worker.leave()
        except BaseException as error:
            failed.set(f"member {rank}: {error!r}")
            raise

    with as_on_a_gpu(), ThreadPoolExecutor(len(bag)) as threads:
        for one in [threads.submit(member, rank) for rank in bag]:
            one.result()
    return counters


class _StandInGroup(Group):
    """Its devices exchange nothing. On NCCL no host waits for what they do."""

    on_device = True

    def _begin(
        self,
        name: str,
        tensor: Tensor,
        launch: Callable[[dist.ProcessGroup], Work],
        finish: Callable[[], None] | None = None,
    ) -> PendingCollective:
        return PendingCollective(None, None, name, finish)


class _StandInGroups(Groups):
    """Its bags are such groups; each worker has the state alone."""

    def world_group(self) -> Group:
        return Group.solo(self.rank, self._cancel)

    def _connect(self, members: tuple[int, ...], name: str) -> Group:
        store = dist.PrefixStore(name, self._store)
        return _StandInGroup(None, members, members.index(self.rank), _PATIENCE_S, self._cancel, store=store)


def _run(
    worker: Executor,
    step: int,
    cascade: DispatchCounter,
    finish: DispatchCounter,
    published: bool = False,
    pack: Sequence[PackedSequence] = PACK,
) -> None:
    task, fetched = _cascade_of(worker, step, published, pack)
    watch = _CountedWatch(cascade)
    with patch.object(worker, "watch", watch):
        with cascade:
            worker.dit(task, fetched)
        watch.counter = finish
        with finish:
            worker.finish(FinishTask(generation=0, step=step, export=False, cascades=("d",), weight=1.0))


def _cascade_of(
    worker: Executor,
    step: int,
    published: bool = False,
    pack: Sequence[PackedSequence] = PACK,
    bag: tuple[int, ...] = (0,),
) -> tuple[CascadeTask, dict[tuple[str, SampleId], EncodeResult]]:
    """A cascade, and what came for it through the object store. Encode results are in place, as after encodes on the
    workers of the bag, in turns, or `published` by others."""
    if worker.modules.config.dit.images_only:
        pack = [replace(one, grid=(1, *one.grid[1:])) for one in pack]
    task = encoded_cascade(worker, step, "d", pack, torch.empty)
    fetched = {}
    places = tuple(STORE if published else i % len(bag) for i in range(len(pack)))
    assert worker.groups is not None
    for module, (sample, place) in itertools.product(task.sources, zip(task.samples, places, strict=True)):
        if place != worker.groups.rank:
            rows = torch.ones(worker.store.take(module, sample.id).rows.shape)
            if published:
                fetched[module, sample.id] = EncodeResult(id=sample.id, rows=rows)
    return replace(task, bag=bag, sources=dict.fromkeys(task.sources, places)), fetched


class _CountedWatch(HostWatch):
    """Counts the waits of a host that is ahead of its device: what is queued has ended only when it was waited for."""

    def __init__(self, counter: DispatchCounter) -> None:
        self.counter, self._ended = counter, False

    def mark(self) -> float:
        self._ended = False
        return super().mark()

    def has_come(self, mark: object) -> bool:
        return self._ended

    def wait(self, mark: object) -> None:
        self.settle()

    def settle(self) -> None:
        self.counter.waits += not self._ended
        self._ended = True


def _worker(config: DiTConfig, blocks: bool, groups: Groups | None = None) -> Executor:
    """In a generation of its own, unless it gets the `groups` of one."""
    dit = build(config, STAND_IN)
    if not blocks:
        for name, child in list(dit.named_children()):
            if isinstance(child, nn.ModuleList):
                setattr(dit, name, nn.ModuleList())
    dit.register_forward_pre_hook(as_autocast)
    return worker_alone(dit, config, groups=groups)


def as_autocast(module: nn.Module, args: tuple[object, ...]) -> tuple[object, ...]:
    """The casts of tokens and text in front of the first products, which `torch.autocast` makes of a real device."""
    tokens, times, text, *others = args
    assert isinstance(tokens, Tensor) and isinstance(text, Tensor)
    return tokens.bfloat16(), times, text.bfloat16(), *others


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Attention as on a GPU (variable-length flash), noise in one launch, updates in buckets of its size; autocast does
    not know the stand-in, and weights are bf16. Sums of weights are read from it, and no weights."""
    flash = backend_of("flash")
    autocast = torch.autocast

    def quiet(
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> AbstractContextManager[object]:
        if device_type == STAND_IN.type:
            return nullcontext()
        return autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    def drawn(key: NoiseKey, first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.randn(count, device=device)

    def pinned(size: int, device: torch.device) -> Tensor:
        memory = torch.empty(size, dtype=torch.uint8)
        _PINNED[memory] = True
        return memory

    def copied(there: Tensor, staged: Tensor) -> uploads.Mark:
        uploads_as_ever(there, staged)
        return _LateCopy(there)

    uploads_as_ever = uploads.queue_copy
    with (
        patch.object(varlen, "choose", lambda q, lengths, table: flash),
        patch.object(noise, "normal", drawn),
        patch.object(sync, "_BUCKET_CPU", sync._BUCKET_CUDA),
        patch.object(sync, "check_weight", lambda *weights: None),
        patch.object(uploads, "staging", pinned),
        patch.object(uploads, "queue_copy", copied),
        patch.dict(uploads.large_by_device, clear=True),
        patch.object(torch, "autocast", quiet),
        patch.object(torch, "is_autocast_enabled", lambda device_type=None: False),
        patch.object(torch, "get_autocast_dtype", lambda device_type: torch.bfloat16),
    ):
        yield


def main() -> None:
    """Prints a line of figures for each model."""
    for one in measurements():
        figures = one.run(Place(device=torch.device("cpu"), rehearse=False), {})
        print(json.dumps({"name": one.name, **figures}), flush=True)


if __name__ == "__main__":
    main()
