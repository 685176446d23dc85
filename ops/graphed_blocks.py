"""CUDA graphs of transformer blocks in small passes: `model.dit.cuda_graphs`.

    transformer.graphed = GraphedBlocks(is_small, CudaGraphs(device), compared=True)

A pass of a few pictures is less work for a GPU than for its host, which asks for some 250 operators a block. Of a pass
that comes again, with the same grids and lengths of text, each block is captured twice: forward alone, and forward with
backward, as gradient checkpointing computes them. Replayed, a block costs the host two launches and the copies of what
it is given and gives. The kernels are those of blocks as written, in their order. Gradients of what all blocks share
are added up block by block: in front of the blocks, these may differ by rounding.

A graph reads and writes where it did when it was captured. So its inputs are copied into `_Slots`, its results out of
them, weights must lie where they lay, and a pass is given the layout of the one that was captured, which is equal. All
graphs share one pool of memory: they run one after the other, and none leaves anything in it.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils import _pytree as pytree

from ops.kernels.base.autograd import Context, InputGradients
from ops.packing import Layout

log = logging.getLogger(__name__)

R = TypeVar("R")
Launches = Callable[[], None]

LEAST_GAIN = 0.03  # share of a pass's seconds: captured ones have memory of their own
_WARM, _COMPARED = 1, 3  # passes as written before the capture: the first of a shape is no measure of the others
_MOST_SEEN = 256  # kinds of passes


class Capture(Protocol):
    """How work is captured."""

    def __call__(self, work: Launches) -> Launches:
        """Runs `work` once, and returns what runs the same kernels on the same memory again."""
        ...


class CudaGraphs:
    """`Capture` for a GPU. Graphs share a pool of memory, and may run one after the other alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # nothing is captured on the default one
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # with the last of which the pool goes

    def __call__(self, work: Launches) -> Launches:
        """As `Capture`. Raises RuntimeError where something of `work` cannot be captured, or memory runs out."""
        current, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        self._graphs.add(graph)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()  # makes what is made at a first call: index tensors, workspaces, kernels
            # Other threads of a worker allocate, copy and wait meanwhile.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                with suppress(RuntimeError):  # which a capture that has failed leaves out: memory would never come back
                    torch._C._cuda_endAllocateToPool(current.device_index, self._pool)
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return cast(Launches, graph.replay)


class GraphedBlocks:
    """Blocks of one transformer as graphs, in passes with a gradient on one GPU. Not thread-safe."""

    def __init__(
        self,
        is_small: Callable[[Layout], bool],
        capture: Capture,
        compared: bool = False,
        kinds: int = 8,
    ) -> None:
        """`is_small` says which passes may run by graphs. With `compared` those that turn out no faster so run as
        written again. Graphs are kept of as many `kinds` of passes; one of a block has some 100 kB."""
        self._is_small, self._capture, self._compared, self._most = is_small, capture, compared, kinds
        self._kinds: OrderedDict[Hashable, _PassKind] = OrderedDict()  # seen last at the end
        self._of_parameters: dict[Hashable, _FlatSlot] = {}  # by shapes and dtypes
        self._pass: _Pass | None = None
        self._off = False

    def begin(self, layout: Layout) -> None:
        """A forward pass begins."""
        self._pass = None
        if self._off or layout.degree > 1 or not torch.is_grad_enabled() or not self._is_small(layout):
            return
        kind = self._kind(layout)
        kind.passes += 1
        graphed = kind.passes > (_COMPARED if self._compared else _WARM) and not kind.is_slower
        if graphed and kind.captured is None:
            kind.captured = _Captured(layout)
            self._forget()
        self._pass = _Pass(kind=kind, number=kind.passes, captured=kind.captured if graphed else None)

    def __call__(self, block: nn.Module) -> Callable[..., object] | None:
        """The block as its graphs; None where this pass runs it as written."""
        captured = self._pass.captured if self._pass is not None else None
        if captured is None or self._off:
            return None

        def call(*inputs: object) -> object:
            return self._graphed(captured, block, inputs)

        return call

    def timing(self) -> Callable[[float], None]:
        """To be called with the seconds that the device took for the pass that was begun last, when they are known."""
        one, compared = self._pass, self._compared
        return lambda seconds: None if one is None or not compared else one.took(seconds)

    def _kind(self, layout: Layout) -> _PassKind:
        key = (layout.sequences, layout.text_recurs)
        kind = self._kinds.setdefault(key, _PassKind())
        self._kinds.move_to_end(key)
        if len(self._kinds) > _MOST_SEEN:
            self._kinds.popitem(last=False)
        return kind

    def _forget(self) -> None:
        """Graphs of the kinds that were not seen for the longest time."""
        captured = [kind for kind in self._kinds.values() if kind.captured is not None]
        for kind in captured[: -self._most]:
            kind.captured = None

    def _graphed(self, captured: _Captured, block: nn.Module, inputs: tuple[object, ...]) -> object:
        leaves, spec = pytree.tree_flatten(inputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        found = captured.blocks.get(block)
        if found is None or not found.serves(leaves):
            given = _BlockCall(block, leaves, spec, captured.layout)
            if not given.trained(tensors):
                return block(*inputs)
            try:
                found = given.capture(self._capture, captured.slots, self._of_parameters)
            except RuntimeError as error:
                log.warning("model.dit.cuda_graphs: blocks run as written from now on: %s", error)
                self._off = True
                self._kinds.clear()
                return block(*inputs)
            captured.blocks[block] = found
        outputs: tuple[Tensor, ...] = _Replayed.apply(found, *tensors, *found.parameters)  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten(list(outputs), found.spec)


@dataclass(slots=True)
class _PassKind:
    """Passes of equal layouts."""

    passes: int = 0
    captured: _Captured | None = None
    as_written_s: float = math.inf
    graphed_s: float = math.inf
    compared: int = 0  # passes by graphs that count

    @property
    def is_slower(self) -> bool:
        return self.compared > 1 and self.graphed_s > (1 - LEAST_GAIN) * self.as_written_s


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """One pass of its kind."""

    kind: _PassKind
    number: int
    captured: _Captured | None

    def took(self, seconds: float) -> None:
        kind = self.kind
        if self.captured is None:
            if _WARM < self.number <= _COMPARED:
                kind.as_written_s = min(kind.as_written_s, seconds)
        elif self.number > _COMPARED + 1:  # not in the one that captured
            kind.graphed_s, kind.compared = min(kind.graphed_s, seconds), kind.compared + 1
            if kind.is_slower and kind.captured is not None:
                kind.captured = None
                log.info(
                    "model.dit.cuda_graphs: a pass takes %.4g s by graphs, %.4g s as written: its kind runs as written",
                    kind.graphed_s,
                    kind.as_written_s,
                )


class _Slots:
    """Memory that graphs read and write, one after the other: those of one use, place, shape and dtype share it."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Tensor] = {}

    def like(self, use: str, tensors: Iterable[Tensor]) -> list[Tensor]:
        """A slot for each."""
        return [self._slot((use, place, one.shape, one.dtype), one) for place, one in enumerate(tensors)]

    def _slot(self, key: Hashable, like: Tensor) -> Tensor:
        if key not in self._made:
            self._made[key] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        return self._made[key]


class _FlatSlot:
    """Slots side by side, one after the other for each dtype, of which a copy is one copy for each dtype."""

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
        """What is in the slots."""
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
    slots: _Slots = field(default_factory=_Slots)
    blocks: dict[nn.Module, _Graphs] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Graphs:
    """Both graphs of a block. After `forward` the results of `inputs` are in `outputs`, after `backward` what of their
    gradient, `received`, belongs to the inputs, of those that have one, is in `gradients`, and what belongs to the
    parameters in `of_parameters`."""

    forward: Launches
    backward: Launches
    inputs: list[Tensor]
    outputs: list[Tensor]
    received: list[Tensor]
    gradients: list[Tensor | None]
    of_parameters: _FlatSlot | None
    parameters: tuple[nn.Parameter, ...]  # that are trained
    spec: pytree.TreeSpec  # of the outputs
    signature: tuple[object, ...]
    weights: tuple[Tensor, ...]
    addresses: tuple[int, ...]

    def serves(self, leaves: Sequence[object]) -> bool:
        """Whether the inputs are of the captured kind, and the weights where they were."""
        return self.signature == _signature(leaves) and self.addresses == _addresses(self.weights)


class _BlockCall:
    """A call of a block that is captured."""

    def __init__(self, block: nn.Module, leaves: Sequence[object], spec: pytree.TreeSpec, layout: Layout) -> None:
        self._block, self._leaves, self._spec = block, leaves, spec
        self._layout = layout
        self._parameters = tuple(p for p in block.parameters() if p.requires_grad)
        device = next(leaf for leaf in leaves if isinstance(leaf, Tensor)).device.type
        self._autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    def trained(self, tensors: Sequence[Tensor]) -> bool:
        """Whether anything of it has a gradient."""
        return bool(self._parameters) or any(one.requires_grad for one in tensors)

    def capture(self, capture: Capture, slots: _Slots, of_blocks: dict[Hashable, _FlatSlot]) -> _Graphs:
        """Slots for what it is given and gives, and both graphs. Blocks of a kind share those of parameters."""
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

        def forward() -> None:
            with torch.no_grad():
                torch._foreach_copy_(outputs, pytree.tree_leaves(self._run(inputs)))

        def backward() -> None:
            given = [one.detach().requires_grad_(need) for one, need in zip(inputs, needs)]
            with torch.enable_grad():
                found = pytree.tree_leaves(self._run(given))
            results = [(one, grad) for one, grad in zip(found, received) if one.requires_grad]
            made = torch.autograd.grad(
                [one for one, _ in results],
                [*(one for one in given if one.requires_grad), *self._parameters],
                [grad for _, grad in results],
                allow_unused=True,
                materialize_grads=True,
            )
            torch._foreach_copy_(wanted, list(made))

        graphs = capture(forward), capture(backward)
        left = iter(gradients)
        weights = (*self._block.parameters(), *self._block.buffers())
        return _Graphs(
            forward=graphs[0],
            backward=graphs[1],
            inputs=inputs,
            outputs=outputs,
            received=received,
            gradients=[next(left) if need else None for need in needs],
            of_parameters=of_parameters,
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
        """The block's call with these tensors for its own. Casts of weights are made anew, not taken from a cache of
        the pass at hand."""
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
    """Whose inputs are saved."""

    graphs: _Graphs


class _Replayed(Function):
    """A block by its graphs; its inputs are kept, as gradient checkpointing keeps them."""

    @staticmethod
    def forward(ctx: _OfGraphs, graphs: _Graphs, *tensors: Tensor) -> tuple[Tensor, ...]:
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
        return None, *of_inputs, *(graphs.of_parameters.copies() if graphs.of_parameters else ())


def _signature(leaves: Sequence[object]) -> tuple[object, ...]:
    """What graphs depend on of the inputs beside the numbers in them."""
    return tuple(
        (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, int | float | str | None)
        else type(leaf)
        for leaf in leaves
    )


def _addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(one.data_ptr() for one in tensors)
