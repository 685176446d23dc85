"""Where a GPU sits, from a sysfs that is laid out here and from answers of `nvidia-smi` in topologies/."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from actors.plan.types import UNKNOWN_PLACE, GpuPlace, hops_between
from actors.worker.gpu_place import AskedNode, dealt, place_of, placed
from actors.worker.nvidia_smi import QUERY, address_of, link_matrix, listed_gpus
from actors.worker.pci import gpus, has_nvswitch, is_chosen, nics

TEXTS = Path(__file__).parent / "topologies"
GPU, NVSWITCH, ETHERNET, BRIDGE = "0x030200", "0x068000", "0x020000", "0x060400"


@dataclass
class Sysfs:
    """A tree of /sys. Devices are added by the folders above them."""

    root: Path
    addresses: list[str] = field(default_factory=list)

    def device(self, *bridges: str, address: str, vendor: str = "0x10de", kind: str = GPU, numa: int = 0) -> Path:
        folder = self.root.joinpath("devices", *bridges, address)
        folder.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", str(numa))):
            (folder / name).write_text(f"{text}\n")
        link = self.root / "bus" / "pci" / "devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(folder, link.parent))
        return folder

    def rdma(self, name: str, *bridges: str, address: str, numa: int = 0, state: str = "4: ACTIVE") -> None:
        folder = self.device(*bridges, address=address, vendor="0x15b3", kind=ETHERNET, numa=numa)
        card = self.root / "class" / "infiniband" / name
        (card / "ports" / "1").mkdir(parents=True)
        (card / "ports" / "1" / "state").write_text(f"{state}\n")
        (card / "device").symlink_to(os.path.relpath(folder, card))

    def ethernet(self, name: str, *bridges: str, address: str, numa: int = 0, state: str = "up") -> None:
        folder = self.device(*bridges, address=address, vendor="0x15b3", kind=ETHERNET, numa=numa)
        card = self.root / "class" / "net" / name
        card.mkdir(parents=True)
        (card / "operstate").write_text(f"{state}\n")
        (card / "device").symlink_to(os.path.relpath(folder, card))


def switch(number: int, port: int) -> tuple[str, ...]:
    """Bridges above a device on a PCIe switch of its own host bridge: upstream port, then one downstream port each."""
    return (
        f"pci0000:{number:02x}",
        f"0000:{number:02x}:01.0",
        f"0000:{number + 1:02x}:00.0",
        f"0000:{number + 2:02x}:{port:02x}.0",
    )


@pytest.fixture
def dgx(tmp_path: Path) -> Sysfs:
    """Eight GPUs with a card beside each, two cards for storage below their own host bridges, NVSwitches; a loopback
    and a card for Ethernet that is up."""
    made = Sysfs(tmp_path)
    for gpu in range(8):
        first = 0x10 + 0x10 * gpu
        made.device(*switch(first, 0), address=f"0000:{first + 3:02x}:00.0", numa=gpu // 4)
        made.rdma(f"mlx5_{gpu}", *switch(first, 1), address=f"0000:{first + 4:02x}:00.0", numa=gpu // 4)
    for number in (0, 1):
        bus = 0xA0 + 0x10 * number
        made.rdma(f"mlx5_{8 + number}", f"pci0000:{bus:02x}", address=f"0000:{bus + 1:02x}:00.0", numa=number)
    made.rdma("mlx5_10", "pci0000:a8", address="0000:a9:00.0", state="1: DOWN")
    made.device("pci0000:c0", address="0000:c1:00.0", kind=NVSWITCH)
    made.ethernet("eth0", "pci0000:d0", address="0000:d1:00.0")
    (tmp_path / "class" / "net" / "lo").mkdir()
    return made


def smi(text: str = "", addresses: Sequence[str] = ()) -> AskedNode:
    """A machine without sysfs whose nvidia-smi prints this matrix and these GPUs."""
    listed = "\n".join(f"{n}, GPU-{n}, {address}" for n, address in enumerate(addresses))
    matrix = (TEXTS / text).read_text() if text else ""
    return AskedNode(root=Path("/nowhere"), smi=lambda asked: listed if asked == QUERY else matrix, environment={})


def test_sysfs_tells_gpus_in_the_order_of_nvidia_smi(dgx: Sysfs) -> None:
    found = gpus(dgx.root)
    assert [gpu.address for gpu in found] == [f"0000:{0x13 + 0x10 * n:02x}:00.0" for n in range(8)]
    assert [gpu.numa for gpu in found] == [0] * 4 + [1] * 4
    assert found[0].bridges == ("pci0000:10", "0000:10:01.0", "0000:11:00.0", "0000:12:00.0")
    assert has_nvswitch(dgx.root) and not has_nvswitch(Path("/nowhere")) and gpus(Path("/nowhere")) == []


def test_cards_are_those_that_nccl_would_use(dgx: Sysfs) -> None:
    usual = [f"mlx5_{n}" for n in range(10)]
    assert [card.name for card in nics(dgx.root)] == usual, "of RDMA, with an active port"
    assert [card.name for card in nics(dgx.root, rdma="=mlx5_0,mlx5_1:1")] == usual[:2]
    assert [card.name for card in nics(dgx.root, rdma="^mlx5_8,mlx5_9")] == usual[:8]
    for card in (dgx.root / "class" / "infiniband").iterdir():
        (card / "ports" / "1" / "state").write_text("1: DOWN\n")
    assert [card.name for card in nics(dgx.root)] == ["eth0"], "none with a port: Ethernet"
    assert nics(dgx.root, ethernet="ib") == []


@pytest.mark.parametrize(
    ("choice", "names"),
    [("", "a1 a10 b1"), ("a1", "a1 a10"), ("=a1", "a1"), ("^a1", "b1"), ("^=a1", "a10 b1"), ("a10:1,b", "a10 b1")],
)
def test_lists_of_cards_mean_what_they_mean_to_nccl(choice: str, names: str) -> None:
    assert [name for name in ("a1", "a10", "b1") if is_chosen(name, choice)] == names.split()


def test_every_gpu_of_a_dgx_has_its_own_rail(dgx: Sysfs) -> None:
    found = [
        placed(gpu.address, "", AskedNode(root=dgx.root, smi=lambda asked: "", environment={}))
        for gpu in gpus(dgx.root)
    ]
    assert [place.index for place in found] == list(range(8)) and {place.count for place in found} == {8}
    assert "".join(place.rail for place in found) == "ABCDEFGH"
    assert [place.nic for place in found] == [f"mlx5_{n}" for n in range(8)]
    assert {place.nic_hops for place in found} == {0} and {place.island for place in found} == {"A"}
    assert [place.numa for place in found] == [0] * 4 + [1] * 4
    assert hops_between(found[0], found[1]) == 3 and hops_between(found[0], found[7]) == 4
    assert str(found[3]) == "gpu 3, numa 0, island A, rail D (mlx5_3)"


def test_the_environment_of_nccl_chooses_the_rails(dgx: Sysfs) -> None:
    """Two cards left: the GPUs of each processor share one, over its host bridges."""
    machine = AskedNode(root=dgx.root, smi=lambda asked: "", environment={"NCCL_IB_HCA": "=mlx5_1,mlx5_6"})
    found = [placed(gpu.address, "", machine) for gpu in gpus(dgx.root)]
    assert "".join(place.rail for place in found) == "AAAABBBB"
    assert [place.nic_hops for place in found] == [3, 0, 3, 3, 3, 3, 0, 3]


def test_a_container_with_one_gpu_has_the_rail_that_the_node_gives_it(dgx: Sysfs) -> None:
    """nvidia-smi shows the one, sysfs all: the letter is that of the GPU's card among all."""
    address = gpus(dgx.root)[5].address
    text = "\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPIX\t56-111\t1\nNIC0\tPIX\t X \n"
    listed = f"0, GPU-2f1c, 0000{address.upper()}\n"
    machine = AskedNode(root=dgx.root, smi=lambda asked: listed if asked == QUERY else text, environment={})
    found = placed("", "2f1c", machine)
    assert (found.index, found.count, found.pci, found.rail, found.island) == (0, 1, address, "F", "A")


@pytest.mark.parametrize(
    ("text", "islands", "rails", "hops", "numa"),
    [
        ("dgx-h100.txt", "AAAAAAAA", "ABCDEFGH", 0, "00001111"),
        ("a100-pcie-pairs.txt", "AABBCCDD", "AABBCCDD", 1, "00001111"),
        ("l40s.txt", "", "", 0, "0011"),
        ("dgx1-v100.txt", "AAAAAAAA", "AABBCCDD", 0, ""),
    ],
)
def test_the_matrix_of_nvidia_smi_alone_tells_nvlink_and_rails(
    text: str, islands: str, rails: str, hops: int, numa: str
) -> None:
    count = len(numa) or 8
    addresses = [f"00000000:{0x10 + n:02X}:00.0" for n in range(count)]
    found = [placed(address_of(address), "", smi(text, addresses)) for address in addresses]
    assert [place.index for place in found] == list(range(count))
    assert "".join(place.island for place in found) == islands
    assert "".join(place.rail for place in found) == rails
    assert {place.nic_hops for place in found} == {hops}
    assert "".join("" if place.numa is None else str(place.numa) for place in found) == numa


def test_cards_of_the_matrix_have_the_names_of_its_legend() -> None:
    matrix = link_matrix((TEXTS / "dgx-h100.txt").read_text())
    assert matrix is not None and matrix.gpus == tuple(range(8))
    assert matrix.cards[:4] == ("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5")
    assert [matrix.hops(0, card) for card in ("mlx5_0", "mlx5_3", "mlx5_2", "eth7")] == [0, 3, 4, None]
    old = link_matrix((TEXTS / "dgx1-v100.txt").read_text())
    assert old is not None and old.cards == ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3") and not old.numa


@pytest.mark.parametrize("text", ["", "No devices were found\n", "NVIDIA-SMI has failed because it couldn't ...\n"])
def test_without_a_matrix_nothing_is_taken_for_known(text: str) -> None:
    assert link_matrix(text) is None and listed_gpus(text) == []
    machine = AskedNode(root=Path("/nowhere"), smi=lambda asked: text, environment={})
    assert placed("0000:18:00.0", "", machine) == GpuPlace(pci="0000:18:00.0")


def test_a_machine_without_nvidia_smi_is_asked_once_and_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert placed("", "", AskedNode(root=Path("/nowhere"))) == UNKNOWN_PLACE
    assert place_of(torch.device("cpu")) == UNKNOWN_PLACE


def test_gpus_as_near_to_several_cards_share_them() -> None:
    """As in a DGX A100: two cards below the same switches as two GPUs, here beside one that is near one card alone."""
    hops = {"a": [1, 1, 4], "b": [1, 1, 4], "c": [4, 4, 0]}
    found = dealt(hops, ["x", "y", "z"])
    assert [(found[gpu].name, found[gpu].rail, found[gpu].hops) for gpu in hops] == [
        ("x", "A", 1),
        ("y", "B", 1),
        ("z", "C", 0),
    ]
    one = dealt({"a": [2, 2], "b": [2, 2], "c": [2, 2], "d": [2, 2]}, ["x", "y"])
    assert "".join(card.rail for card in one.values()) == "AABB"
