"""Where this process's GPU sits in its node: what PCIe (sysfs) and `nvidia-smi` say of it, as one `GpuPlace`.

PCIe comes from sysfs, which also a container with some of the GPUs sees whole, so that rails have the same letters in
all of them; NVLink from `nvidia-smi`, else from NVSwitches among the PCIe devices. What neither shows stays unknown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from actors.plan.types import UNKNOWN_PLACE, GpuPlace, hops_between
from actors.worker.nvidia_smi import MATRIX, QUERY, LinkMatrix, ask, letter, link_matrix, listed_gpus
from actors.worker.pci import SYS, gpus, has_nvswitch, is_chosen, nics

RDMA, ETHERNET = "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"  # which cards NCCL uses


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedNode:
    """What is asked about a node."""

    root: Path = SYS
    smi: Callable[[Sequence[str]], str] = ask
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)


@dataclass(frozen=True, kw_only=True, slots=True)
class NearestCard:
    """The network card that a GPU uses."""

    name: str
    hops: int
    rail: str


def place_of(device: torch.device) -> GpuPlace:
    """The place of this process's `device`; of the CPU nothing is known."""
    if device.type != "cuda":
        return UNKNOWN_PLACE
    facts = torch.cuda.get_device_properties(device)
    bus: int | None = getattr(facts, "pci_bus_id", None)  # not in PyTorch's annotations
    address = ""
    if bus is not None:
        address = f"{getattr(facts, 'pci_domain_id', 0):04x}:{bus:02x}:{getattr(facts, 'pci_device_id', 0):02x}.0"
    return placed(address, str(facts.uuid), AskedNode())


def placed(address: str, uuid: str, machine: AskedNode) -> GpuPlace:
    """The place of the GPU with this PCI address, or where that is "" with this UUID."""
    listed, on_pci = listed_gpus(machine.smi(QUERY)), gpus(machine.root)
    mine = next((gpu for gpu in listed if gpu.address == address or (uuid and gpu.uuid.endswith(uuid))), None)
    address = mine.address if mine is not None else address
    device = next((gpu for gpu in on_pci if gpu.address == address), None)
    matrix = link_matrix(machine.smi(MATRIX))
    index = mine.index if mine is not None else None
    if index is None and device is not None:
        index = on_pci.index(device)
    card = _card(address, index, machine, matrix)
    numa = device.numa if device is not None else None
    if numa is None and matrix is not None and index is not None:
        numa = matrix.numa.get(index)
    return GpuPlace(
        index=index,
        count=len(listed) or len(on_pci),
        pci=address,
        bridges=device.bridges if device is not None else (),
        numa=numa,
        island=_island(index, machine, matrix),
        rail=card.rail if card is not None else "",
        nic=card.name if card is not None else "",
        nic_hops=card.hops if card is not None else 0,
    )


def _island(index: int | None, machine: AskedNode, matrix: LinkMatrix | None) -> str:
    if matrix is not None and index is not None and len(matrix.gpus) > 1:
        return matrix.islands().get(index, "")
    return letter(0) if has_nvswitch(machine.root) else ""


def _card(address: str, index: int | None, machine: AskedNode, matrix: LinkMatrix | None) -> NearestCard | None:
    rdma, ethernet = (machine.environment.get(name, "") for name in (RDMA, ETHERNET))
    on_pci, cards = gpus(machine.root), nics(machine.root, rdma, ethernet)
    if cards and any(gpu.address == address for gpu in on_pci):
        hops = {gpu.address: [hops_between(gpu, card) for card in cards] for gpu in on_pci}
        return dealt(hops, [card.name for card in cards])[address]
    if matrix is None or index is None:
        return None
    names = [name for name in matrix.cards if is_chosen(name, rdma)]
    known = {gpu: [found for name in names if (found := matrix.hops(gpu, name)) is not None] for gpu in matrix.gpus}
    if not names or any(len(found) < len(names) for found in known.values()):
        return None
    return dealt({str(gpu): found for gpu, found in known.items()}, names).get(str(index))


def dealt(hops: Mapping[str, Sequence[int]], cards: Sequence[str]) -> dict[str, NearestCard]:
    """The card of every GPU: the nearest; GPUs that are as near to several share them, in order. `hops` by GPU, in
    order, to each of the `cards`. Rails are the letters of the cards that are used, in order."""
    nearest = {gpu: tuple(n for n, far in enumerate(to) if far == min(to)) for gpu, to in hops.items()}
    chosen: dict[str, int] = {}
    for choice in dict.fromkeys(nearest.values()):
        alike = [gpu for gpu, own in nearest.items() if own == choice]
        for number, gpu in enumerate(alike):
            chosen[gpu] = choice[number * len(choice) // len(alike)]
    used = sorted(set(chosen.values()))
    return {
        gpu: NearestCard(name=cards[card], hops=hops[gpu][card], rail=letter(used.index(card)))
        for gpu, card in chosen.items()
    }
