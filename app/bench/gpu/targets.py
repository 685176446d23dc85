"""The figures that were promised for one GPU, and whether the lines meet them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from app.bench.gpu.lines import ResultLine, good_figures
from app.bench.gpu.measurement import Earlier, Figure

LONG = 32_000  # tokens from which shares of the copy bandwidth are promised


@dataclass(frozen=True, kw_only=True, slots=True)
class DecidingFigure:
    """The value that decides on a target, and the measurement that gave it."""

    value: float
    where: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """`deciding` picks the value that decides, the worst or that of the best setting; None where nothing was measured.
    `least`: the goal is a floor. `of_all`: which measurements, by their names, have to be there before it is met."""

    what: str
    goal: float
    least: bool
    form: str
    deciding: Callable[[Earlier], DecidingFigure | None]
    of_all: Callable[[str], bool] = lambda name: False

    def wanted(self) -> str:
        return f"{'>=' if self.least else '<='} {self.goal:{self.form}}"

    def met(self, found: DecidingFigure) -> bool:
        return found.value >= self.goal if self.least else found.value <= self.goal


def judged(lines: Iterable[ResultLine]) -> list[tuple[Target, DecidingFigure | None]]:
    """Every target with the value that decides it. A failed measurement meets no target."""
    lines = list(lines)
    earlier = good_figures(lines) | {line.name: {"right": False} for line in lines if line.error}
    return [(target, target.deciding(earlier)) for target in TARGETS]


Picker = Callable[[Earlier], DecidingFigure | None]


def _extreme(
    choose: Callable[..., DecidingFigure],
    prefix: str,
    figure: Callable[[str], bool],
    where: Callable[[str], bool] = lambda name: True,
) -> Picker:
    """Over all figures whose key fits, of all measurements whose name begins with `prefix` and fits."""

    def pick(earlier: Earlier) -> DecidingFigure | None:
        found = [
            DecidingFigure(value=number, where=f"{name}, {key}")
            for name, figures in earlier.items()
            if name.startswith(prefix) and where(name)
            for key, value in figures.items()
            if figure(key) and (number := _number(value)) is not None
        ]
        return choose(found, key=lambda one: one.value) if found else None

    return pick


_least, _most = partial(_extreme, min), partial(_extreme, max)


def _number(value: Figure) -> float | None:
    return float(value) if isinstance(value, bool | int | float) else None


def _is(key: str) -> Callable[[str], bool]:
    return lambda name: name == key


def _ends(end: str) -> Callable[[str], bool]:
    return lambda name: name.endswith(end)


def _right(what: str, prefix: str, where: Callable[[str], bool] = lambda name: True, of_all: bool = False) -> Target:
    """Whether all measurements of these names found right what they check; with `of_all` all have to be there."""
    return Target(
        what=what,
        goal=1,
        least=True,
        form=".0f",
        deciding=_least(prefix, _is("right"), where),
        of_all=lambda name: of_all and name.startswith(prefix) and where(name),
    )


def _fetched(name: str) -> bool:
    return name.startswith("lora.") or name.endswith(".fetched-blocks")


def _of_other_code(name: str) -> bool:
    return name.endswith((".compiled-blocks", ".attention-kept"))


def _long(name: str) -> bool:
    """Whether an op was measured at a length from which shares are promised: its name ends with n<tokens>."""
    return int(name.rpartition(".n")[2]) >= 0.99 * LONG


TARGETS = (
    _right("all kernels within rounding of float64", "kernels.", of_all=True),
    _right("all attention backends within rounding of float64", "attention-right.", of_all=True),
    _right("packed DiT in bf16 like its fp32 self", "dit-right.", of_all=True),
    Target(
        what="fused ops forward, share of copy at N >= 32k (moonshot 96 %)",
        goal=0.92,
        least=True,
        form=".0%",
        deciding=_least("ops.", _ends("forward/fused of copy"), _long),
    ),
    Target(
        what="fused ops backward, share of copy at N >= 32k (moonshot 92 %)",
        goal=0.85,
        least=True,
        form=".0%",
        deciding=_least("ops.", _ends("backward/fused of copy"), _long),
    ),
    Target(
        what="fused ops forward, times eager at N >= 32k",
        goal=3.0,
        least=True,
        form=".2f",
        deciding=_least("ops.", _ends("forward/fused x eager"), _long),
    ),
    Target(
        what="fused ops backward, times eager at N >= 32k",
        goal=3.0,
        least=True,
        form=".2f",
        deciding=_least("ops.", _ends("backward/fused x eager"), _long),
    ),
    Target(
        what="Wan2.1-1.3B step at 480p81, best setting, share of the measured matmul peak (MFU)",
        goal=0.45,
        least=True,
        form=".0%",
        deciding=_most("step.wan-1.3b.", _is("MFU")),
    ),
    Target(
        what="14B block stack, best setting, share of the measured matmul peak (MFU)",
        goal=0.50,
        least=True,
        form=".0%",
        deciding=_most("step.wan-14b.", _is("MFU")),
    ),
    Target(
        what="idle share of the device between and in steps",
        goal=0.02,
        least=False,
        form=".1%",
        deciding=_most("step.", _is("idle share"), lambda name: name.endswith(".as-trained")),
    ),
    Target(
        what="a worker's cascades, small ones by graphs: idle share of the device between and in them",
        goal=0.02,
        least=False,
        form=".1%",
        deciding=_most("worker.", _is("idle share"), lambda name: name.endswith(".graphs")),
    ),
    Target(
        what="peak memory against the memory model, distance",
        goal=0.10,
        least=False,
        form=".0%",
        deciding=_most("step.", _is("memory model off by"), lambda name: name.endswith(".as-trained")),
    ),
    Target(
        what="VAE encode of one clip as a share of the 1.3B step at 480p81, best setting",
        goal=0.20,
        least=False,
        form=".0%",
        deciding=_least("vae.", _is("share of the 1.3B step")),
    ),
    Target(
        what="LoRA of 14B with blocks fetched from host memory, a clip of 480p81: more seconds than with them there",
        goal=0.05,
        least=False,
        form=".0%",
        deciding=_most("lora.wan-14b", _is("takes more, clip")),
    ),
    _right(
        "gradients of blocks that are fetched, in bf16 and in 8 bits, as of blocks on the device",
        "",
        _fetched,
        of_all=True,
    ),
    _right(
        "gradients of compiled blocks, and of attention that is kept, as of blocks as written",
        "step.",
        _of_other_code,
        of_all=True,
    ),
    Target(
        what="blocks compiled again for packs of other lengths",
        goal=0,
        least=False,
        form=".0f",
        deciding=_most("step.", _is("codes after the first")),
    ),
    _right("gradients of passes by CUDA graphs as of passes that are as written", "graphs.", of_all=True),
    _right("a snapshot that is copied beside compute has the numbers of its state", "copies"),
    _right("state updated in host memory gives the weights of state on the device", "update.host"),
    _right("Muon's updates in bf16 nearly orthogonal, as those of fp64", "update.muon"),
    _right("d that Prodigy finds in fp32, as in fp64", "update.prodigy"),
    _right("memory of another process added to exactly (CUDA IPC)", "ipc"),
    _right("collectives between the GPUs of a node exactly (NCCL)", "together"),
    _right("gradients pushed by the kernel exactly", "push"),
    Target(
        what="slow-down of compute beside a snapshot's copy to pinned memory",
        goal=0.02,
        least=False,
        form=".1%",
        deciding=_most("copies", _is("slow-down of compute")),
    ),
)
