"""What `nvidia-smi` shows of a machine's GPUs: their addresses, and the matrix of links between them and network cards.

The matrix of `nvidia-smi topo -m` has a row and a column for each GPU and card, then a legend:

            GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity
    GPU0     X      NV4     PIX     0-31            0
    GPU1    NV4      X      SYS     0-31            0
    NIC Legend:
      NIC0: mlx5_0
"""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

PROGRAM = "nvidia-smi"
QUERY = ("--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")
MATRIX = ("topo", "-m")
HOPS = {"PIX": 0, "PXB": 1, "PHB": 2, "NODE": 3, "SYS": 4, "SOC": 4}  # as actors.plan.types.hops_between
_ANSWER_S = 30.0  # a driver without persistence wakes every GPU for it
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")  # the header is underlined


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedGpu:
    """A GPU as `nvidia-smi` lists it: of a container, those that it is given."""

    index: int
    uuid: str
    address: str  # as sysfs writes it


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkMatrix:
    """The matrix of links."""

    links: Mapping[tuple[str, str], str]  # (row, column) -> X, NV4, PIX, ...
    columns: tuple[str, ...]
    names: Mapping[str, str] = field(default_factory=dict)  # NIC0 -> mlx5_0; older drivers have the card itself there
    numa: Mapping[int, int] = field(default_factory=dict)  # memory node by GPU, where there is one

    @property
    def gpus(self) -> tuple[int, ...]:
        return tuple(int(name.removeprefix("GPU")) for name in self.columns if _is_gpu(name))

    @property
    def cards(self) -> tuple[str, ...]:
        """Network cards, by name."""
        return tuple(self.names.get(name, name) for name in self.columns if not _is_gpu(name))

    def hops(self, gpu: int, card: str) -> int | None:
        """How far a card is from a GPU."""
        column = next((name for name in self.columns if card in (name, self.names.get(name))), "")
        return HOPS.get(self.links.get((f"GPU{gpu}", column), ""))

    def islands(self) -> dict[int, str]:
        """A letter for each GPU: GPUs with the same one are joined by NVLink, directly or over others. Empty where no
        two are joined."""
        joined = {pair for pair, link in self.links.items() if re.fullmatch(r"NV\d+", link)}
        if not joined:
            return {}
        island = {gpu: gpu for gpu in self.gpus}
        for one in self.gpus:
            for other in self.gpus:
                if (f"GPU{one}", f"GPU{other}") in joined:
                    low, high = sorted((island[one], island[other]))
                    island = {gpu: low if of == high else of for gpu, of in island.items()}
        order = sorted(set(island.values()))
        return {gpu: letter(order.index(of)) for gpu, of in island.items()}


def letter(number: int) -> str:
    """A, B, ... of a rail or an island."""
    return chr(ord("A") + number) if number < 26 else f"Z{number}"


def ask(options: Sequence[str]) -> str:
    """What the program prints; "" where there is none, or it fails."""
    try:
        done = subprocess.run([PROGRAM, *options], capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("%s %s: %s", PROGRAM, " ".join(options), error)
        return ""
    return done.stdout


def listed_gpus(text: str) -> list[ListedGpu]:
    """The answer to `QUERY`, a GPU a line: `0, GPU-2f1c..., 00000000:18:00.0`."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[0].isdecimal():
            found.append(ListedGpu(index=int(cells[0]), uuid=cells[1], address=address_of(cells[2])))
    return found


def address_of(bus_id: str) -> str:
    """A PCI address as sysfs writes it: lower case, four digits of the domain."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}"


def link_matrix(text: str) -> LinkMatrix | None:
    """The answer to `MATRIX`; None where it has no matrix."""
    lines = [_ESCAPE.sub("", line) for line in text.splitlines()]
    start = next((n for n, line in enumerate(lines) if line.split()[:1] == ["GPU0"] and "X" not in line.split()), None)
    if start is None:
        return None
    columns = tuple(lines[start].partition("CPU Affinity")[0].split())
    has_numa = "NUMA Affinity" in lines[start]
    links: dict[tuple[str, str], str] = {}
    numa: dict[int, int] = {}
    names: dict[str, str] = {}
    for line in lines[start + 1 :]:
        cells = line.split()
        if cells[:1] and cells[0] in columns and len(cells) > len(columns):
            row, rest = cells[0], cells[1 + len(columns) :]
            links.update({(row, column): link for column, link in zip(columns, cells[1:])})
            if _is_gpu(row) and has_numa and len(rest) > 1 and rest[1].isdecimal():
                numa[int(row.removeprefix("GPU"))] = int(rest[1])
        elif len(cells) == 2 and cells[0].removesuffix(":") in columns:
            names[cells[0].removesuffix(":")] = cells[1]
    return LinkMatrix(links=links, columns=columns, names=names, numa=numa)


def _is_gpu(name: str) -> bool:
    return re.fullmatch(r"GPU\d+", name) is not None
