"""Trained parameters once per node: one flat vector in host memory that its workers map, fetched block by block.

Each worker writes the new values of its own range straight into its node's vector; inside a node nothing is sent. Of
other nodes' ranges each goes once to one worker of this node, which writes it there for all. Where workers compute with
host memory itself (CPUs) a parameter is a view of the vector. A GPU has the parameters outside of blocks as copies, and
a block's while it runs: forward and, where its activations are computed again, backward fetch them (`BlockPlace`).
The gradients of a block's parameters go to the gradient as backward makes them, and stay nowhere.

Who reads half-written values? Nobody. Owners write when all workers have voted, after their last backward pass, and no
worker computes before all have met after the writing. The vector is new in each generation: what a worker that died or
was stopped in the middle left half-written, or writes later, is in no vector that is read again. State comes from
shards, whose copies are their keepers'.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ops.comm.collectives import Group
from ops.counted import counted
from ops.shards import Bounds, Slot
from ops.update.node_routes import exchange_windows, routes, splits
from ops.update.node_sum import fellows_of, meet, share
from ops.update.parameters import BlockModule, Received, blocks_in

log = logging.getLogger(__name__)

_ALIGNED = 16  # bytes to a multiple of which a parameter begins in a buffer: what vector instructions like


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldBlock:
    """A block whose parameters lie in the node's memory: their names in it, their places in the layout."""

    module: nn.Module
    names: tuple[str, ...]
    indices: tuple[int, ...]


Held = Callable[[int], list[Tensor]]
"""A block's parameters where they lie now: in the node's vector, or those that samples have lent it."""


class BlockPlace(Protocol):
    """How the parameters of a block come to the device that computes."""

    @property
    def computes_there(self) -> bool:
        """Whether the device computes with the node's memory itself."""
        ...

    def hold(self, memory: Tensor, held: Held, largest: int) -> None:
        """The memory of the node, where the parameters of each block are, and the bytes of the largest block
        (`bytes_laid_out`)."""
        ...

    def let_go(self) -> None:
        """Nothing reads that vector any more. Any number of times."""
        ...

    def fetch(self, block: int) -> list[Tensor]:
        """The values of a block's parameters for what is launched next, until two other blocks are fetched."""
        ...

    def settle(self) -> None:
        """As `Parameters.settle`."""
        ...


class NodeParameters:
    """The `Parameters` of a worker whose node has one vector of them."""

    def __init__(
        self,
        module: nn.Module,
        named: Sequence[tuple[str, nn.Parameter]],
        layout: Sequence[Slot],
        place: BlockPlace,
        received: Received,
    ) -> None:
        """`named` are the trained parameters; `received` is called with the gradients of those in blocks. Raises
        ValueError for a module that does not run in blocks, or of whose blocks some parameters are not trained."""
        self._parameters, self._layout = [parameter for _, parameter in named], layout
        self._device = self._parameters[0].device
        self._place, self._received = place, received
        self._blocks = blocks_of(module, self._parameters)
        self._numbers = {id(block.module): number for number, block in enumerate(self._blocks)}
        in_blocks = {index for block in self._blocks for index in block.indices}
        assert 0 not in in_blocks, "whoever asks the first parameter for the device means the one that computes"
        self._copied = [] if place.computes_there else [i for i in range(len(layout)) if i not in in_blocks]
        self._group = Group.solo()
        self._bounds: Bounds = [(0, layout[-1].hi)]
        self._sends = routes(self._group.nodes)
        self._flat = torch.empty(0, dtype=self._parameters[0].dtype)
        self._taken_up = False  # whether parameters are those of `_flat`
        assert isinstance(module, BlockModule)
        module.fetched = self.fetched

    @property
    def own(self) -> Tensor:
        """As `Parameters.own`, in host memory."""
        return self._flat[slice(*self._bounds[self._group.rank])]

    def form(self, group: Group, bounds: Bounds, current: bool) -> None:
        """As `Parameters.form`."""
        values = [parameter.detach().clone() for parameter in self._parameters] if current else []
        self._let_go()
        meet(group, self._device)  # all have let go of the last vector: the node need not have room for both
        self._group, self._bounds, self._sends = group, bounds, routes(group.nodes)
        num_bytes = self._layout[-1].hi * self._flat.element_size()
        memory = share(group, "parameters", num_bytes, self._device)
        self._flat = torch.frombuffer(memory.buffer, dtype=self._flat.dtype)
        memory.close()
        self._place.hold(self._flat, self._held, max(map(bytes_laid_out, map(self._values_of, self._blocks))))
        log.info("parameters of %s lie in host memory of their nodes", counted(group.size, "worker"))
        if current:
            first = group.rank == fellows_of(group)[0]
            for value, slot in zip(values, self._layout, strict=True):
                value = value.to(self._device)
                group.broadcast(value, source_rank=0)
                if first:
                    self._flat[slot.lo : slot.hi].copy_(value.flatten())
            self._meet()

    def settle(self) -> None:
        """As `Parameters.settle`."""
        self._place.settle()

    def changed(self, pieces: Bounds) -> None:
        """Nothing yet: the node's workers read what is written when all have met."""

    def gather(self) -> None:
        """Have other nodes' ranges written here, and meet."""
        if len(set(self._group.nodes)) > 1:
            for pieces in exchange_windows(self._bounds, self._device):
                self._exchange(pieces)
        self._meet()

    def fetched(self, block: nn.Module) -> Callable[..., Any]:  # blocks take and return what they like
        """A function that runs this block with parameters fetched at each call."""
        return partial(self._run, self._numbers[id(block)])

    # -- a block -------------------------------------------------------------------------------------------------------

    def _run(self, number: int, *inputs: object) -> Any:  # as the block
        block = self._blocks[number]
        weights = self._place.fetch(number)
        if torch.is_grad_enabled():
            weights = [self._leaf(index, weight) for index, weight in zip(block.indices, weights, strict=True)]
        named = dict(zip(block.names, weights, strict=True))
        return functional_call(block.module, named, inputs, tie_weights=False)  # no weight of a block has two names

    def _held(self, number: int) -> list[Tensor]:
        return self._values_of(self._blocks[number])

    def _values_of(self, block: HeldBlock) -> list[Tensor]:
        return [self._parameters[index].data for index in block.indices]

    def _leaf(self, index: int, weight: Tensor) -> Tensor:
        """The weight as the graph of one pass knows it; its gradient is given away."""
        leaf = weight.detach().requires_grad_()

        def give(leaf: Tensor) -> None:
            assert leaf.grad is not None, "backward has just made it"
            gradient, leaf.grad = leaf.grad, None
            self._received(index, gradient)

        leaf.register_post_accumulate_grad_hook(give)
        return leaf

    # -- memory --------------------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Let go of the last vector, or of the parameters that came with the module. They keep their shapes, and no
        values."""
        self._place.settle()
        self._place.let_go()
        for index, parameter in enumerate(self._parameters):
            if index not in self._copied:
                parameter.data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        self._flat, self._taken_up = self._flat[:0].clone(), False

    def _meet(self) -> None:
        """Returns when all have written, with parameters that have these values."""
        meet(self._group, self._device)
        self._take_up()

    def _take_up(self) -> None:
        views = [self._flat[slot.lo : slot.hi].view(slot.shape) for slot in self._layout]
        if not self._taken_up:
            for index, parameter in enumerate(self._parameters):
                if index not in self._copied:
                    parameter.data = views[index]
            self._taken_up = True
        with torch.no_grad():
            for index in self._copied:
                self._parameters[index].copy_(views[index])

    def _exchange(self, pieces: Bounds) -> None:
        """Send this rank's piece to a worker of each other node, and write those that come: the way of a node's
        gradients (`routes`), back."""
        go, come = splits(self._sends, self._group.rank, pieces)
        mine = self._flat[slice(*pieces[self._group.rank])].to(self._device)
        received = mine.new_empty(sum(come))
        self._group.all_to_all(received, mine.repeat(sum(n > 0 for n in go)), come, go)
        for part, (lo, hi) in zip(received.split([n for n in come if n]), [p for p, n in zip(pieces, come) if n]):
            self._flat[lo:hi].copy_(part)


def bytes_laid_out(sources: Sequence[Tensor]) -> int:
    """What `laid_out` takes of a buffer."""
    return sum(-(-source.nbytes // _ALIGNED) * _ALIGNED for source in sources)


def laid_out(sources: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
    """Views of a buffer of bytes, one after the other, with the shapes and dtypes of the sources."""
    found, at = [], 0
    for source in sources:
        found.append(buffer[at : at + source.nbytes].view(source.dtype).view(source.shape))
        at += -(-source.nbytes // _ALIGNED) * _ALIGNED
    return found


def blocks_of(module: nn.Module, trained: Sequence[nn.Parameter]) -> list[HeldBlock]:
    """The blocks of a module by its trained parameters. Raises ValueError where there are none, or where some of their
    parameters are not trained."""
    blocks = blocks_in(module)
    if not blocks:
        raise ValueError(
            f"train.memory.parameters node is for transformers that run in blocks, and {type(module).__name__} does "
            f"not. Set it to replicated."
        )
    places = {id(parameter): index for index, parameter in enumerate(trained)}
    found = []
    for block in blocks:
        named = list(block.named_parameters())
        if frozen := [name for name, parameter in named if id(parameter) not in places]:
            raise ValueError(
                f"parameters once per node are trained ones, and {frozen[0]} of a block is frozen. Build the module "
                f"with blocks_on_host, and leave its trained parameters replicated."
            )
        indices = tuple(places[id(parameter)] for _, parameter in named)
        found.append(HeldBlock(module=block, names=tuple(name for name, _ in named), indices=indices))
    return found
