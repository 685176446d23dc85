"""Transformer blocks of small passes as CUDA graphs: `model.dit.cuda_graphs`.

    transformer.graphed = GraphedBlocks(work, CudaGraphs(device), compared=True)

In a pass of a few pictures the GPU waits for its host, which launches some 250 operators for each block. When a pass
comes again, with the same token grids and lengths of text, each block is captured as two graphs: its forward, and its
forward with the backward, as gradient checkpointing computes them. To replay them costs the host two launches, and the
copies of inputs and results. They run the kernels of the block as written, that is without graphs, in the same order.
Only the gradients of inputs that all blocks share, such as the embedding of the timestep, are added up block by block
here; so gradients of layers before the blocks may differ by rounding.

A graph reads and writes at the addresses of its capture. So inputs are copied into slots of memory before a replay and
results out of them after it (`_Slots`); weights must stay at their addresses; and the layout of the pass that was
captured, which is equal, stands for that of every later one. All graphs share one pool of memory, as they run one after
the other and none leaves anything in it.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils import _pytree as pytree

from ops.kernels.base.autograd import Context, InputGradients
from ops.packed.packing import Layout

log = logging.getLogger(__name__)

R = TypeVar("R")
Launches = Callable[[], None]

LEAST_GAIN = 0.03  # share of a pass's seconds: captured ones have memory of their own
_MOST_SEEN = 256  # kinds of passes
_MOST_ROOM = 16.0  # times the first pass that has graphs, which may be tiny


class Capture(Protocol):
    """Makes launches repeatable: `CudaGraphs`, or what a test has in its place."""

    def prepare(self) -> None:
        """Called before several captures, which allocate memory."""
        ...

    def __call__(self, work: Launches) -> Launches:
        """Run `work`. Returns a function that runs the same kernels on the same memory again."""
        ...


_captures: weakref.WeakSet[CudaGraphs] = weakref.WeakSet()


class CudaGraphs:
    """`Capture` for a GPU. Its graphs share a pool of memory: no two may run at the same time.

    A graph is never destroyed, not even one whose capture failed: workspaces of cuBLAS would go with it that all graphs
    use which were captured in the same stream (from PyTorch 2.12 on; pytorch/pytorch#193402).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # nothing is captured on the default one
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._held, self._counted = 0, 0  # bytes of the pool, and the graphs that there were when it was asked
        _captures.add(self)

    def held(self, device: torch.device) -> int:
        """Bytes of the device that only its graphs use."""
        if device != self._device:
            return 0
        if self._counted != len(self._graphs):
            self._counted = len(self._graphs)
            segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]  # of all pools: some milliseconds
            self._held = sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) == self._pool)
        return self._held

    def prepare(self) -> None:
        """As `Capture.prepare`: during a capture the allocator cannot use what it keeps for other streams."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def __call__(self, work: Launches) -> Launches:
        """As `Capture`. Raises RuntimeError where something of `work` cannot be captured, or memory runs out."""
        current, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work()  # makes what is made at a first call: workspaces, kernels
                self._captured(work, graph)
        finally:
            current.wait_stream(self._stream)
        return cast(Launches, graph.replay)

    def _captured(self, work: Launches, graph: torch.cuda.CUDAGraph) -> None:
        # Other threads of a worker allocate, copy and wait meanwhile.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            # Which a failed capture leaves out in some versions of PyTorch: memory would not come back. The name is not
            # public, and without it blocks run as written all the same.
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
            raise
        graph.capture_end()


def held_by_graphs(device: torch.device) -> int:
    """Bytes of the device that PyTorch's allocator keeps for graphs of this process and has for nothing else."""
    return sum(one.held(device) for one in list(_captures))


class GraphedBlocks:
    """Chooses, block by block, whether one transformer runs by graphs. Passes with a gradient must begin one after the
    other; those without one, also in another thread, and those of several GPUs run as written."""

    def __init__(
        self,
        work: Callable[[Layout], float],
        capture: Capture,
        compared: bool = False,
        kinds: int = 8,
        warm_up: int = 9,
    ) -> None:
        """`work` gives the size of a pass as a share of the most that one by graphs may have. Passes of equal layouts
        are of one kind; a kind that has come more than `warm_up` times gets graphs, for good, until `kinds` of them
        have some. With `compared` a kind whose passes turn out no faster by graphs runs as written again."""
        self._work, self._capture, self._compared = work, capture, compared
        self._most, self._warm_up = kinds, warm_up
        self._seen: OrderedDict[Hashable, _PassKind] = OrderedDict()  # without graphs; seen last at the end
        self._graphed: dict[Hashable, _PassKind] = {}
        self._slots = _Slots()
        self._of_parameters: dict[Hashable, _FlatSlot] = {}  # by shapes and dtypes
        self._pass: _Pass | None = None
        self._off = False
        self.captures = 0  # blocks that were captured by now

    def begin(self, layout: Layout) -> None:
        """A forward pass begins. Ask for its blocks, and for its `timing`, before the next `begin`."""
        if not torch.is_grad_enabled():
            return
        self._pass = None
        if self._off or layout.degree > 1 or self._work(layout) > 1:
            return
        kind = self._kind(layout)
        kind.passes += 1
        self._pass = _Pass(kind=kind, number=kind.passes, warm_up=self._warm_up)

    @property
    def by_graphs(self) -> bool:
        """Whether the pass that was begun last runs by graphs."""
        return not self._off and self._pass is not None and self._pass.by_graphs

    def __call__(self, block: nn.Module, inputs: tuple[object, ...]) -> Callable[..., object] | None:
        """What to call in place of this block with these inputs: its graphs, which are captured now if it has none for
        this kind of pass. None: call the block itself."""
        if not torch.is_grad_enabled() or not self.by_graphs:
            return None
        assert self._pass is not None and self._pass.kind.captured is not None
        leaves, spec = pytree.tree_flatten(inputs)
        weights = any(parameter.requires_grad for parameter in block.parameters())
        if not weights and not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            return None
        captured = self._pass.kind.captured
        found = captured.blocks.get(block) or self._captured(captured, block, leaves, spec)
        if found is not None and found.has_moved:
            self._give_up("weights have moved")
            return None
        return found if found is not None and found.serves(leaves) else None

    def timing(self) -> Callable[[float], None]:
        """A function to call with the seconds that the device took for the pass that was begun last, once they are
        known, also after the next `begin`."""
        one, compared = self._pass, self._compared
        return lambda seconds: None if one is None or not compared else one.took(seconds)

    def _kind(self, layout: Layout) -> _PassKind:
        key = (layout.sequences, layout.text_recurs)
        if (known := self._graphed.get(key)) is not None:
            return known
        kind = self._seen.setdefault(key, _PassKind())
        self._seen.move_to_end(key)
        if kind.passes >= self._warm_up and len(self._graphed) < self._most:
            self._capture.prepare()
            kind.captured = _Captured(layout)
            self._graphed[key] = self._seen.pop(key)
        if len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        return kind

    def _captured(
        self, captured: _Captured, block: nn.Module, leaves: Sequence[object], spec: pytree.TreeSpec
    ) -> _BlockGraphs | None:
        """Capture the block. Returns None where that fails: it leaves nothing in memory, and no block is captured or
        replayed from then on."""
        self.captures += 1
        try:
            call = _BlockCall(block, leaves, spec, captured.layout)
            self._slots.room = min(1 / self._work(captured.layout), _MOST_ROOM)
            captured.blocks[block] = call.capture(self._capture, self._slots, self._of_parameters)
        except RuntimeError as error:
            why = str(error)
        else:
            return captured.blocks[block]
        self._give_up(why)
        return None

    def _give_up(self, why: str) -> None:
        """Graphs stay: backward passes may be under way that run by them."""
        if not self._off:
            log.warning("model.dit.cuda_graphs: blocks run as written from now on: %s", why)
        self._off = True


@dataclass(slots=True)
class _PassKind:
    """Passes of equal layouts: how many there were, their graphs, and the least seconds that one took in each way."""

    passes: int = 0
    captured: _Captured | None = None
    as_written_s: float = math.inf
    graphed_s: float = math.inf
    compared: int = 0  # passes by graphs that count

    @property
    def is_slower(self) -> bool:
        return self.compared > 1 and self.graphed_s > (1 - LEAST_GAIN) * self.as_written_s


class _Pass:
    """One pass of its kind."""

    def __init__(self, kind: _PassKind, number: int, warm_up: int) -> None:
        self.kind, self._number, self._warm_up = kind, number, warm_up
        self.by_graphs = kind.captured is not None and not kind.is_slower

    def took(self, seconds: float) -> None:
        """Take in the seconds of this pass. The first one of a kind does not count, nor the one that captures: they
        take longer than the others."""
        kind = self.kind
        if not self.by_graphs:
            if 1 < self._number <= self._warm_up:
                kind.as_written_s = min(kind.as_written_s, seconds)
        elif self._number > self._warm_up + 1 and not kind.is_slower:
            kind.graphed_s, kind.compared = min(kind.graphed_s, seconds), kind.compared + 1
            if kind.is_slower:
                log.info(
                    "model.dit.cuda_graphs: a pass takes %.4g s by graphs, %.4g s as written: its kind runs as written",
                    kind.graphed_s,
                    kind.as_written_s,
                )


class _Slots:
    """Memory that graphs read and write. As they run one after the other, tensors of the same use, place among the
    arguments and dtype share a slot, of all blocks and kinds of passes."""

    def __init__(self) -> None:
        self.room = 1.0  # times as large as what is asked for first: for passes that have more rows
        self._made: dict[Hashable, Tensor] = {}

    def like(self, use: str, tensors: Iterable[Tensor]) -> list[Tensor]:
        """A slot for each tensor. `use` sets apart, say, inputs and results."""
        return [self._slot((use, place, one.dtype), one) for place, one in enumerate(tensors)]

    def _slot(self, key: Hashable, like: Tensor) -> Tensor:
        made = self._made.get(key)
        if made is None or made.numel() < like.numel():  # the graphs that have the smaller one keep it
            elements = math.ceil(like.numel() * self.room)
            made = self._made[key] = torch.zeros(elements, dtype=like.dtype, device=like.device)
        return made[: like.numel()].view(like.shape)


class _FlatSlot:
    """Slots for several tensors, as views of one flat tensor for each dtype: one copy of that copies them all."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, one in enumerate(like):
            by_dtype.setdefault(one.dtype, []).append(place)
        self._shapes = [one.shape for one in like]
        self._flat = [
            (places, torch.zeros(sum(like[place].numel() for place in places), dtype=dtype, device=like[0].device))
            for dtype, places in by_dtype.items()
        ]
        self.slots = self._cut([flat for _, flat in self._flat])

    def copies(self) -> list[Tensor]:
        """Copies of what is in the slots."""
        return self._cut([flat.clone() for _, flat in self._flat])

    def _cut(self, flats: Sequence[Tensor]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for (places, _), flat in zip(self._flat, flats, strict=True):
            sizes = [math.prod(self._shapes[place]) for place in places]
            found |= zip(places, flat.split(sizes), strict=True)
        return [found[place].view(shape) for place, shape in enumerate(self._shapes)]


@dataclass(slots=True)
class _Captured:
    """The graphs of a kind of pass."""

    layout: Layout
    blocks: dict[nn.Module, _BlockGraphs] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _BlockGraphs:
    """Both graphs of a block, and the slots that they read and write.

    `forward` computes `outputs` from `inputs`. `backward` computes, from `inputs` and the gradients `received` of the
    results, the `gradients` of the inputs (None for one without) and, in `of_parameters`, those of trained parameters.
    """

    forward: Launches
    backward: Launches
    inputs: list[Tensor]
    outputs: list[Tensor]
    received: list[Tensor]
    gradients: list[Tensor | None]
    of_parameters: _FlatSlot | None
    unused: frozenset[int]  # places of parameters that have no part in the results
    parameters: tuple[nn.Parameter, ...]  # that are trained
    spec: pytree.TreeSpec  # of the outputs
    signature: tuple[object, ...]
    weights: tuple[Tensor, ...]
    addresses: tuple[int, ...]

    def __call__(self, *inputs: object) -> object:
        tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        outputs: tuple[Tensor, ...] = _Replayed.apply(self, *tensors, *self.parameters)  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten(list(outputs), self.spec)

    def serves(self, leaves: Sequence[object]) -> bool:
        """Whether these inputs differ from the captured ones in nothing but the numbers in tensors."""
        return self.signature == _signature(leaves)

    @property
    def has_moved(self) -> bool:
        """Whether weights are elsewhere than when they were captured."""
        return self.addresses != _addresses(self.weights)


class _BlockCall:
    """One call of a block, of which both graphs are captured."""

    def __init__(self, block: nn.Module, leaves: Sequence[object], spec: pytree.TreeSpec, layout: Layout) -> None:
        self._block, self._leaves, self._spec = block, leaves, spec
        self._layout = layout
        self._parameters = tuple(p for p in block.parameters() if p.requires_grad)
        self._autocast = _autocast(leaves)

    def capture(self, capture: Capture, slots: _Slots, of_blocks: dict[Hashable, _FlatSlot]) -> _BlockGraphs:
        """Make slots for inputs, results and gradients, and capture both graphs. Blocks whose trained parameters are of
        the same shapes and dtypes share the slots of their gradients, `of_blocks`."""
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        needs = [one.requires_grad for one in tensors]
        inputs = slots.like("in", tensors)
        torch._foreach_copy_(inputs, [one.detach() for one in tensors])
        with torch.no_grad():
            example = self._run(inputs)
        flat, spec = pytree.tree_flatten(example)
        outputs, received = slots.like("out", flat), slots.like("received", flat)
        gradients = slots.like("gradient", [one for one, need in zip(inputs, needs) if need])
        of_parameters = self._of_parameters(of_blocks)
        wanted = [*gradients, *(of_parameters.slots if of_parameters else [])]
        unused: set[int] = set()

        def results() -> tuple[list[Tensor], list[Tensor]]:
            given = [one.detach().requires_grad_(need) for one, need in zip(inputs, needs)]
            with torch.enable_grad():
                return given, pytree.tree_leaves(self._run(given))

        def forward() -> None:  # with a gradient, by which attention takes its kernel
            torch._foreach_copy_(outputs, [one.detach() for one in results()[1]])

        def backward() -> None:
            given, found = results()
            pairs = [(one, grad) for one, grad in zip(found, received) if one.requires_grad]
            with torch.autocast(self._autocast[0], enabled=False):  # as a backward pass has none
                made = torch.autograd.grad(
                    [one for one, _ in pairs],
                    [*(one for one in given if one.requires_grad), *self._parameters],
                    [grad for _, grad in pairs],
                    allow_unused=True,
                )
            unused.update(place for place, one in enumerate(made) if one is None)
            torch._foreach_copy_(wanted, [slot if one is None else one for slot, one in zip(wanted, made, strict=True)])

        graphs = capture(forward), capture(backward)
        left = iter([None if place in unused else slot for place, slot in enumerate(gradients)])
        weights = (*self._block.parameters(), *self._block.buffers())
        return _BlockGraphs(
            forward=graphs[0],
            backward=graphs[1],
            inputs=inputs,
            outputs=outputs,
            received=received,
            gradients=[next(left) if need else None for need in needs],
            of_parameters=of_parameters,
            unused=frozenset(place - len(gradients) for place in unused),
            parameters=self._parameters,
            spec=spec,
            signature=_signature(self._leaves),
            weights=weights,
            addresses=_addresses(weights),
        )

    def _of_parameters(self, known: dict[Hashable, _FlatSlot]) -> _FlatSlot | None:
        if not self._parameters:
            return None
        key = tuple((one.shape, one.dtype) for one in self._parameters)
        if key not in known:
            known[key] = _FlatSlot(self._parameters)
        return known[key]

    def _run(self, tensors: Sequence[Tensor]) -> object:
        """The block's call with these tensors in place of its own. Without autocast's cache, as the graph must make its
        casts of weights anew, and not read those of the pass in which it is captured."""
        left = iter(tensors)
        leaves = [self._own(leaf, left) for leaf in self._leaves]
        device, dtype, enabled = self._autocast
        with torch.autocast(device, dtype, enabled=enabled, cache_enabled=False):
            return self._block(*pytree.tree_unflatten(leaves, self._spec))

    def _own(self, leaf: object, tensors: Iterable[Tensor]) -> object:
        if isinstance(leaf, Tensor):
            return next(iter(tensors))
        return self._layout if isinstance(leaf, Layout) else leaf


class _OfGraphs(Context, Protocol):
    """What stays of a forward pass for its backward pass, beside the inputs."""

    graphs: _BlockGraphs


class _Replayed(Function):
    """A block that runs by its graphs. As with gradient checkpointing, only its inputs are kept for backward, which
    computes forward again."""

    @staticmethod
    def forward(ctx: _OfGraphs, graphs: _BlockGraphs, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = tensors[: len(graphs.inputs)]
        ctx.graphs = graphs
        ctx.save_for_backward(*inputs)
        torch._foreach_copy_(graphs.inputs, list(inputs))
        graphs.forward()
        return tuple(one.clone() for one in graphs.outputs)

    @staticmethod
    def backward(ctx: _OfGraphs, *received: Tensor) -> InputGradients:
        graphs = ctx.graphs
        torch._foreach_copy_([*graphs.inputs, *graphs.received], [*ctx.saved_tensors, *received])
        graphs.backward()
        # all are copies: the next block writes its own there, before these have been added up
        of_inputs = [None if one is None else one.clone() for one in graphs.gradients]
        copies = graphs.of_parameters.copies() if graphs.of_parameters else []
        return None, *of_inputs, *(None if n in graphs.unused else one for n, one in enumerate(copies))


def _signature(leaves: Sequence[object]) -> tuple[object, ...]:
    """What a graph depends on of its inputs, beside the numbers in tensors."""
    return _autocast(leaves), *(
        (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, int | float | str | None)
        else type(leaf)
        for leaf in leaves
    )


def _addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(one.data_ptr() for one in tensors)


def _autocast(leaves: Sequence[object]) -> tuple[str, torch.dtype, bool]:
    """Autocast of the device of the tensors among them: its type, the dtype, and whether it is on."""
    device = next(leaf for leaf in leaves if isinstance(leaf, Tensor)).device.type
    return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
