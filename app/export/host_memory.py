"""The memory of this host that a whole export takes, before anything is loaded."""

from __future__ import annotations

from ops.models.base.config import DiTConfig
from ops.models.load import dit_skeleton, kept_skeleton
from ops.models.weights import is_lora
from ops.typed import ConfigError
from ops.units import GIB

_BESIDE_BYTES = 3 << 29  # libraries, one layer in fp64, text encoders that are written anew


def check_memory(dit: DiTConfig, room_bytes: int) -> None:
    """Raises ConfigError where a host that can spare `room_bytes` cannot hold what a whole export of this resolved
    transformer takes."""
    needed = needed_bytes(dit)
    if needed <= room_bytes:
        return
    remedy = "export on a host that has it"
    if dit.lora_rank:
        remedy = f"write the factors alone, which takes none of it (--lora-only), or {remedy}"
    raise ConfigError(
        f"a whole export needs {_gib(needed)} GiB of host memory, for its transformer in fp32 ({_gib(_largest(dit))} "
        f"GiB), and this host can spare {_gib(room_bytes)} GiB: {remedy}."
    )


def needed_bytes(dit: DiTConfig) -> int:
    """Bytes of memory at the peak: one transformer in fp32; both experts where all of their weights are random, or
    trained, which are read together."""
    return int(1.1 * _largest(dit)) + _BESIDE_BYTES


def _largest(dit: DiTConfig) -> int:
    sizes = []
    for expert in dit.experts:
        weights = {**dit_skeleton(expert).state_dict(), **kept_skeleton(expert)}
        sizes.append(4 * sum(weight.numel() for name, weight in weights.items() if not is_lora(name)))
    return max(sizes) if dit.path and (dit.lora_rank or dit.train_only) else sum(sizes)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
