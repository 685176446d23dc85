"""Frozen modules of a folder: made without weights, which then go from their files to where and in what they compute.

    module = frozen(Source(folder, read, bare), torch.bfloat16, home)             # for this process alone
    module = frozen(Source(folder, read, bare), torch.bfloat16, home, shared=True)  # once in host memory of the node

The library that wrote a folder reads it, as it knows what names of weights have become. It is asked for the dtype of
the files: then it maps them and copies nothing, and each weight is copied once, to its place, through the page cache
that all processes of a node share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ops.memory.cuda_memory import pin
from ops.memory.node_weights import NodeWeights, ReadTensor
from ops.models.files import check_files, variant_of, weight_files
from ops.models.weights import describe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

T = TypeVar("T", bound="PreTrainedModel")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A folder of weights. `read` makes the module with them, in the dtype it is given; `bare` the same without."""

    folder: Path
    read: Callable[[torch.dtype], nn.Module]
    bare: Callable[[], nn.Module]
    variant: str = ""  # what of the folder's module it is, if not all


def frozen(
    source: Source,
    dtype: torch.dtype,
    home: torch.device,
    shared: bool = False,
    reader: torch.device | None = None,
) -> nn.Module:
    """The module with weights of `dtype` at `home`. `shared`: where that is host memory, all processes of the node
    that ask for it have the same; a GPU that copies them from there is the `reader`. Raises what `read` raises, and
    MemoryError where the node has no room."""
    stored = stored_dtype(source.folder)
    if shared and home.type == "cpu":
        try:
            held = NodeWeights.of(f"{_stamp(source)} {dtype}", lambda: _tensors_of(source.read(stored), dtype))
        except ConnectionError as error:
            log.warning("%s: %s; this process has a copy of its own", source.folder, error)
        else:
            return _with(held, source, reader)
    module = source.read(stored)
    for weight in module.parameters():  # one at a time; a copy, as a file may change
        weight.data = weight.data.to(home, dtype, copy=True)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(home, copy=True)
    return module


def read_whole(
    kind: type[T],
    folder: Path,
    shape: PreTrainedConfig | None,
    dtype: torch.dtype,
    names: dict[str, str] | None = None,
) -> T:
    """A module of Transformers with the weights of a folder, of its config.json or of another `shape`. `names`: what
    names of weights in the files match -> what stands there in those of the class.

    Raises ValueError where some of them are missing, which Transformers draws at random.
    """
    check_files(folder)
    loaded: Any = kind.from_pretrained(  # with its report, which the annotation leaves out
        folder,
        config=shape,
        local_files_only=True,
        dtype=dtype,
        use_safetensors=True,
        variant=variant_of(folder),
        output_loading_info=True,
        key_mapping=names,
    )
    model: T
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise lacks(folder, missing)
    return model


def lacks(folder: Path, missing: list[str]) -> ValueError:
    """What is raised for a folder without some of its weights."""
    return ValueError(f"{folder} lacks {len(missing)} of its weights, the first {missing[0]}. Download it whole.")


def _with(held: NodeWeights, source: Source, reader: torch.device | None) -> nn.Module:
    """The module with weights of the node."""
    if reader is not None and reader.type == "cuda":
        pin(held.bytes, reader)
    with without_data():
        module = source.bare()
    module.load_state_dict(held.tensors, assign=True)
    _tie(module)
    return module


def stored_dtype(folder: Path) -> torch.dtype:
    """What a folder's weights are stored in; where that differs, what holds all of them exactly."""
    dtypes = {tensor.dtype for tensor in describe(folder).values() if tensor.is_floating_point()}
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32


@contextmanager
def without_data() -> Iterator[None]:
    """Parameters of modules that are made here have shapes and no data; buffers have theirs. Not for two threads."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _tie(module: nn.Module) -> None:
    """Parameters that share their memory are one again."""
    first: dict[tuple[int, tuple[int, ...]], nn.Parameter] = {}
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None and weight.numel():
                part._parameters[name] = first.setdefault((weight.data_ptr(), tuple(weight.shape)), weight)


def _tensors_of(module: nn.Module, dtype: torch.dtype) -> dict[str, ReadTensor]:
    """All that its state dict has: parameters as `dtype`, buffers as they are."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {
        name: ReadTensor(tensor, dtype if name in parameters else tensor.dtype)
        for name, tensor in module.state_dict().items()
    }


def _stamp(source: Source) -> str:
    """Which files they are of, and who reads them: others have another stamp, and so have these once they have changed.
    Another version of a library may have other names for what it reads."""
    stats = [file.stat() for file in weight_files(source.folder)]
    files = [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) for one in stats]
    return f"{files} {source.variant} {[version(library) for library in ('diffusers', 'transformers')]}"
