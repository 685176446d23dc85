"""Launches of the fused kernels: the one that runs today beside others around it, for rows of the launch tables.

    python -m app.bench.gpu --only launches.                   # all kernels and widths, some eight minutes
    python -m app.bench.gpu --only launches.qk_backward.d5120  # one of them

A launch that is better by more than a percent becomes a row of TABLE in the op's `triton.py`, for the architecture of
the device. A gate with and without a norm (`-alone`) shares one row: take one that serves both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import torch

from app.bench.gpu.kernels_right import without_kernels
from app.bench.gpu.measurement import Earlier, Figure, NamedFigures, Place
from app.bench.gpu.ops_speed import SMALL_WIDTH, WIDTHS
from app.bench.ops_inputs import inputs_of
from app.bench.timing import Closure, copy_of, measure
from ops.kernels.base import backend, host
from ops.kernels.base.measured import HEAD_DIM, Contest, RowLayout
from ops.kernels.base.segments import Segments
from ops.kernels.base.tuning import CHUNKS, Kernel, Launch, configuration, launched
from ops.kernels.folders import compiled_ops, contests

USES = {  # the kernel, whose launch is measured, and the op that runs it
    "forward": ("forward", "ln_modulate"),
    "backward": ("backward", "ln_modulate"),
    "gate_forward": ("gate_forward", "gate_residual_ln_modulate"),
    "gate_backward": ("gate_backward", "gate_residual_ln_modulate"),
    "gate_forward-alone": ("gate_forward", "gate_residual"),
    "gate_backward-alone": ("gate_backward", "gate_residual"),
    "qk_forward": ("qk_forward", "qk_norm_rope"),
    "qk_backward": ("qk_backward", "qk_norm_rope"),
}
ROWS, SMALL_ROWS = 32768, 5
REPEATS, REPEATS_AT_LAST = 12, 30
STAGES = (2, 3, 4)
MOST_WARPS = 16  # of all persistent programs that a multiprocessor holds at once
AS_GOOD, MOST_AS_GOOD = 1.01, 5  # times the best one's seconds; how many of these are named


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelLaunches:
    """One kernel at one width: microseconds of the launch of today and of the best one, and what that is.

    These two are measured once more at the end, since the least of many medians is also the luckiest.
    """

    use: str
    width: int

    @property
    def name(self) -> str:
        return f"launches.{self.use}.d{self.width}"

    @property
    def estimate_s(self) -> float:
        return 25.0 if "backward" in self.use else 15.0  # some twelve and seven kernels are compiled

    def why_not(self, place: Place) -> str | None:
        return without_kernels(place)

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        kernel, name = USES[self.use]
        op = next(one for one in contests(liger=False) if one.name == name)
        rows, width = place.pick((ROWS, self.width), (SMALL_ROWS, SMALL_WIDTH))
        trial = _Trial(op, kernel, RowLayout(name="one run", lengths=(rows,)), width, place.device)
        now = launch_of_today(kernel, width, place.device)
        candidates = around(now, kernel, width)
        tried = place.pick(candidates, candidates[:2])
        repeats = place.pick(REPEATS, 1)
        found = {now: trial.seconds(now, repeats)}  # whatever this raises is an error of the measurement
        for launch in tried[1:]:
            if (seconds := trial.seconds_if_it_runs(launch, repeats)) is not None:
                found[launch] = seconds
        best = min(found, key=found.__getitem__)
        repeats = place.pick(REPEATS_AT_LAST, 1)
        at_last = {launch: trial.seconds(launch, repeats) for launch in dict.fromkeys((now, best))}
        copy = copy_of(trial.moved, place.device, repeats).seconds
        figures: dict[str, Figure] = {}
        for title, launch in (("now", now), ("best", best)):
            figures[f"{title} is"] = said(launch, kernel, width)
            figures[f"{title} us"] = 1e6 * at_last[launch]
            figures[f"{title} of such a copy"] = copy / at_last[launch]
        as_good = [one for one in sorted(found, key=found.__getitem__) if found[one] <= AS_GOOD * found[best]][1:]
        return figures | {
            "gain": at_last[now] / at_last[best],
            "as good": "; ".join(said(one, kernel, width) for one in as_good[:MOST_AS_GOOD]) or None,
            "tried": len(tried),
            "failed": len(tried) - len(found),
        }


def measurements() -> list[KernelLaunches]:
    return [KernelLaunches(use=use, width=width) for width in WIDTHS for use in USES]


def launch_of_today(kernel: Kernel, width: int, device: torch.device) -> Launch:
    """What a kernel runs with in bf16 on the device: a row of its op's table, or the rule. Needs triton."""
    table = next(op.table for op in compiled_ops() if any(key[0] == kernel for key in op.table))
    return configuration(table, kernel, width, "bfloat16", host.arch(device))


def around(now: Launch, kernel: Kernel, width: int) -> list[Launch]:
    """`now` first, then launches near it: half and twice the warps, of a backward each with other rows in flight and
    other numbers of programs, and half and twice the chunk."""
    warps = (now.warps // 2, now.warps, 2 * now.warps)
    backward, many = kernel.endswith("backward"), now.per_sm
    stages = STAGES if backward else (now.stages,)
    per_sm = (many // 2, 3 * many // 4, many, many + 1, 2 * many) if backward else (many,)
    found = [replace(now, warps=w, stages=s, per_sm=p) for w, s, p in product(warps, stages, per_sm)]
    found += [replace(now, chunk=c, warps=w) for c, w in product((now.chunk // 2, 2 * now.chunk), warps)]
    return list(dict.fromkeys([now, *(one for one in found if _is_sensible(one, kernel, width))]))


def _is_sensible(launch: Launch, kernel: Kernel, width: int) -> bool:
    """Whether tiles are powers of two that fill the warps, with less than a quarter of the lanes beyond the row, and
    the programs are such that a multiprocessor may hold."""
    lanes = launch.chunk * launch.chunks(width) if launch.chunk in CHUNKS else 0
    least = max(64 * launch.warps, HEAD_DIM if kernel.startswith("qk") else 0)
    return (
        4 * (lanes - width) < lanes
        and launch.chunk >= least
        and launch.warps >= 1
        and launch.per_sm >= 1
        and launch.per_sm * launch.warps <= MOST_WARPS
    )


def said(launch: Launch, kernel: Kernel, width: int) -> str:
    """As in "1024 x 5, 4 warps, 4 stages, 1 per SM"; a forward has neither stages nor persistent programs."""
    text = f"{launch.chunk} x {launch.chunks(width)}, {launch.warps} warp{'s' if launch.warps > 1 else ''}"
    return f"{text}, {launch.stages} stages, {launch.per_sm} per SM" if kernel.endswith("backward") else text


class _Trial:
    """One use of a kernel, to be timed with any launch. Tables are fp32, as models under autocast have them."""

    def __init__(self, op: Contest, kernel: Kernel, layout: RowLayout, width: int, device: torch.device) -> None:
        self._op, self._kernel, self._layout, self._width, self._device = op, kernel, layout, width, device
        self._segments = Segments.packed(layout.lengths, device=device)
        self._backward = kernel.endswith("backward")
        self.moved = 2 * layout.tokens * width * (op.backward_T if self._backward else op.forward_T)  # bytes of a call

    def seconds(self, launch: Launch, repeats: int) -> float:
        """Median seconds of a call with this launch."""
        make: Callable[[int], Closure] = self._make_backward if self._backward else self._make_forward
        with backend.forced("triton"), launched(self._kernel, launch):
            timing = measure(make, self.moved, self._device, repeats)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # each round of calls has memory of a stream of its own
        return timing.seconds

    def seconds_if_it_runs(self, launch: Launch, repeats: int) -> float | None:
        """None for a launch that does not compile or needs more than the device has. Raises what a device raises that
        no longer answers."""
        from triton.errors import TritonError  # which not every machine has

        try:
            return self.seconds(launch, repeats)
        except (TritonError, RuntimeError):
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            return None

    def _make_forward(self, _: int) -> Closure:
        tensors = self._tensors()
        return lambda: self._op.case.ours(tensors, self._segments)

    def _make_backward(self, _: int) -> Closure:
        tensors = self._tensors()
        outs = self._op.case.ours(tensors, self._segments)
        cotangents = [torch.randn_like(out) for out in outs]
        wrt = [tensors[name] for name in self._op.case.differentiable]
        return lambda: torch.autograd.grad(outs, wrt, cotangents, retain_graph=True)

    def _tensors(self) -> dict[str, torch.Tensor]:
        kinds = self._op.case.inputs
        tensors = inputs_of(kinds, self._layout, self._width, self._device, torch.bfloat16)
        for name in (name for name, kind in kinds.items() if kind == "table"):
            tensors[name] = tensors[name].detach().float().requires_grad_()
        return tensors
