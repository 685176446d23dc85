"""Frozen weights of blocks once in host memory of a node, fetched block by block: LoRA of a model that its GPU does not
hold.

    module = build_dit(config, seed, dtype, device, blocks_on_host=True)     # ops.models.load

What is trained (factors, magnitudes) and what is outside of blocks lies on the device as ever. The frozen rest of each
block goes from its file into memory that all processes of the node map (ops.memory.node_weights), and nobody writes
into it. A CPU computes with it there. A GPU has two buffers of a block's size (`BlockBuffers`): a block's weights are
copied for its forward and again for its backward, where its activations are computed again, while the block before it
runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ops.memory.node_weights import NodeWeights, ReadTensor
from ops.models.added_lora import AddedLora
from ops.models.base.config import DiTConfig
from ops.models.experts import parts_of, transformers
from ops.models.files import weight_files
from ops.models.float8 import SCALE, in_8_bits, in_float8, row_scales
from ops.models.folders import component
from ops.models.weights import read_whole
from ops.update.node_parameters import BlockPlace, bytes_laid_out
from ops.update.parameter_places import place_on
from ops.update.parameters import BlockModule, blocks_in


def frozen_in_blocks(module: nn.Module) -> list[str]:
    """Names of the weights of blocks that are not trained, in the order of the module. Raises ValueError where there
    are none."""
    inside = {id(p) for one in transformers(module) for block in blocks_in(one) for p in block.parameters()}
    names = [name for name, p in module.named_parameters() if id(p) in inside and not p.requires_grad]
    if not names:
        raise ValueError(
            "train.memory.parameters node with model.dit.train_only keeps frozen weights of blocks in host memory, and "
            "all of those are trained, or there are no blocks. Set parameters to auto or replicated."
        )
    return names


def bytes_of_blocks(module: nn.Module, wide_bytes: int, frozen: bool) -> list[int]:
    """Bytes of each block's weights in a buffer, of the frozen ones or of all: those in 8 bits and their scales as they
    are, the others of `wide_bytes` each."""
    kept = {id(p) for name, p in module.named_parameters() if p.dtype == torch.float8_e4m3fn or name.endswith(SCALE)}
    wide = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[wide_bytes]

    def alike(p: nn.Parameter) -> Tensor:
        return torch.empty(p.shape, dtype=p.dtype if id(p) in kept else wide, device="meta")

    blocks = [block for one in transformers(module) for block in blocks_in(one)]
    return [
        bytes_laid_out([alike(p) for p in block.parameters() if not (frozen and p.requires_grad)]) for block in blocks
    ]


def put_on_host(
    module: nn.Module,
    config: DiTConfig,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    added: Sequence[AddedLora],
) -> NodeWeights:
    """Give the frozen weights of the module's blocks their values, in memory of the node. Those of a folder are on the
    meta device, and read by one process of the node, with what is `added` to those of each transformer; random ones
    have values already. Raises MemoryError where the node has no room, ConnectionError where another process holds the
    address."""
    names = frozen_in_blocks(module)
    if config.path:
        files = [component(config.path, one.part) for one in config.experts]
        stats = [file.stat() for folder in files for file in weight_files(folder)]
        what = str([(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) for one in stats])
        what += "".join(one.key for one in added)
        read = partial(_of_folders, module, config, names, dtype, device, added)
    else:
        what, read = f"{config} {seed}", partial(_of_module, module, names, dtype)
    held = NodeWeights.of(f"blocks of {what} {config.frozen_dtype} {dtype} {names}", read)
    module.load_state_dict(held.tensors, strict=False, assign=True)
    return held


def _of_module(module: nn.Module, names: Collection[str], dtype: torch.dtype) -> dict[str, ReadTensor]:
    parameters = dict(module.named_parameters())
    small = in_8_bits(module)
    stays = {*small, *(name.removesuffix(".weight") + SCALE for name in small)}
    return {
        name: ReadTensor(parameters[name].detach(), parameters[name].dtype if name in stays else dtype)
        for name in names
    }


def _of_folders(
    module: nn.Module,
    config: DiTConfig,
    names: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    added: Sequence[AddedLora],
) -> dict[str, ReadTensor]:
    """What files have, mapped and not read: each is rounded, on the device, when its turn comes, with what is added to
    it."""
    stored: dict[str, Tensor] = {}
    changed: dict[str, Callable[[Tensor], Tensor]] = {}
    for part, one, lora in zip(parts_of(module), config.experts, added, strict=True):
        state = read_whole(component(config.path or "", one.part))
        stored |= {f"{part}{name}": tensor for name, tensor in state.items()}
        changed |= {f"{part}{name}": partial(lora.over, name, device=device) for name in state if lora.changes(name)}
    small, found = in_8_bits(module), {}
    assert not (small and changed), "files are added to plain weights, of which none are in 8 bits"
    for name in names:
        if name in small:
            scale = name.removesuffix(".weight") + SCALE
            wide = stored[name]
            found[name] = ReadTensor(wide, torch.float8_e4m3fn, None, lambda wide: in_float8(wide.to(device))[0])
            found[scale] = ReadTensor(wide, torch.float32, (len(wide),), lambda wide: row_scales(wide.to(device)))
        elif not name.endswith(SCALE):
            found[name] = ReadTensor(stored[name], dtype, made=changed.get(name))
    return found


def fetch_from_host(module: nn.Module, held: NodeWeights, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The module on its device, but for the weights that are `held`, which it fetches when a block runs."""
    there = {tensor.data_ptr() for tensor in held.tensors.values()}

    def moved(tensor: Tensor) -> Tensor:
        return (
            tensor if tensor.data_ptr() in there else tensor.to(device, dtype if tensor.is_floating_point() else None)
        )

    module._apply(moved)  # type: ignore[no-untyped-call]  # as nn.Module.to
    if (place := place_on(device)).computes_there:
        return module
    FrozenBlocks(transformers(module), place, held.bytes)
    return module


class FrozenBlocks:
    """Runs the blocks of transformers with frozen weights that are fetched; the trained ones are the blocks' own."""

    def __init__(self, modules: Sequence[nn.Module], place: BlockPlace, memory: Tensor) -> None:
        """`memory` is what their frozen weights lie in, in host memory."""
        self._place = place
        self._blocks = [block for module in modules for block in blocks_in(module)]
        self._numbers = {id(block): number for number, block in enumerate(self._blocks)}
        frozen = [dict(_frozen_of(block)) for block in self._blocks]
        self._names = [tuple(of_block) for of_block in frozen]
        values = [[p.data for p in of_block.values()] for of_block in frozen]
        place.hold(memory, values.__getitem__, max(map(bytes_laid_out, values)))
        for module in modules:
            assert isinstance(module, BlockModule)
            first = next(module.parameters())
            assert all(first is not p for of_block in frozen for p in of_block.values()), "it says where the module is"
            module.fetched = self.fetched
        weakref.finalize(modules[0], place.let_go).atexit = False

    def fetched(self, block: nn.Module) -> Callable[..., object]:
        """What runs this block with its frozen weights on the device."""
        return partial(self._run, self._numbers[id(block)])

    def _run(self, number: int, *inputs: object) -> object:
        weights = dict(zip(self._names[number], self._place.fetch(number), strict=True))
        # no weight of a block has two names, and to look for such takes as long as all else here
        found: object = functional_call(self._blocks[number], weights, inputs, tie_weights=False)
        return found


def _frozen_of(block: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in block.named_parameters() if not p.requires_grad)
