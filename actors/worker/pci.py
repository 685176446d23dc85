"""GPUs and network cards of this machine with their way through PCIe, from sysfs. No torch, no Ray.

/sys/bus/pci/devices/0000:18:00.0 is a link to /sys/devices/pci0000:15/0000:15:01.0/.../0000:18:00.0: the folders in
between are the host bridge and the bridges below it. A container sees those of the whole machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")
_NVIDIA, _DISPLAY, _BRIDGE = "0x10de", "0x03", "0x0680"  # vendor; first digits of the class of GPUs, and of NVSwitches


@dataclass(frozen=True, kw_only=True, slots=True)
class PciDevice:
    """One device: see `actors.plan.types.PciPlace`."""

    name: str  # of a network card its own, such as mlx5_0; else its address
    address: str  # such as 0000:18:00.0
    bridges: tuple[str, ...]
    numa: int | None


def gpus(root: Path) -> list[PciDevice]:
    """NVIDIA's GPUs by address, which is the order of `nvidia-smi`."""
    found = _of_nvidia(root, _DISPLAY)
    return sorted(found, key=lambda device: device.address)


def has_nvswitch(root: Path) -> bool:
    """Whether any GPU of the machine reaches any other over NVLink."""
    return any(True for _ in _of_nvidia(root, _BRIDGE))


def nics(root: Path, rdma: str = "", ethernet: str = "") -> list[PciDevice]:
    """Network cards by address that NCCL would use: those for RDMA with an active port or, where there is none, those
    for Ethernet that are up. `rdma` and `ethernet` choose them as NCCL_IB_HCA and NCCL_SOCKET_IFNAME do."""
    cards = _cards(root / "class" / "infiniband", rdma, _has_active_port)
    cards = cards or _cards(root / "class" / "net", ethernet, _is_up)
    return sorted(cards, key=lambda card: card.address)


def is_chosen(name: str, choice: str) -> bool:
    """Whether a list of NCCL's names this card: prefixes separated by commas, `=` in front for whole names, `^` for all
    but these; `mlx5_0:1` is port 1 of mlx5_0. An empty list names every card."""
    names = choice.lstrip("^=")
    if not names:
        return True
    listed = [one.partition(":")[0] for one in names.split(",")]
    exact = "=" in choice[: len(choice) - len(names)]
    found = any(name == one if exact else name.startswith(one) for one in listed)
    return found != choice.startswith("^")


def _of_nvidia(root: Path, kind: str) -> Iterator[PciDevice]:
    for link in _children(root / "bus" / "pci" / "devices"):
        if _text(link / "vendor") == _NVIDIA and _text(link / "class").startswith(kind):
            yield _device(root, link, link.name)


def _cards(folder: Path, choice: str, works: Callable[[Path], bool]) -> list[PciDevice]:
    root = folder.parent.parent
    return [
        _device(root, card / "device", card.name)
        for card in _children(folder)
        if (card / "device" / "vendor").is_file() and works(card) and is_chosen(card.name, choice)
    ]


def _has_active_port(card: Path) -> bool:
    return any("ACTIVE" in _text(port / "state") for port in _children(card / "ports"))


def _is_up(card: Path) -> bool:
    return _text(card / "operstate") == "up"


def _device(root: Path, link: Path, name: str) -> PciDevice:
    folder = link.resolve()
    *bridges, address = folder.relative_to((root / "devices").resolve()).parts
    numa = _text(folder / "numa_node")
    return PciDevice(name=name, address=address, bridges=tuple(bridges), numa=int(numa) if numa.isdecimal() else None)


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # not there, or only for root
        return ""
