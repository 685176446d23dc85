"""Attention by backend, head size and lengths, forward and backward: products per second."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._functorch import config as functorch_config

from app.bench.gpu.measurement import Earlier, NamedFigures, Place
from ops.attention.lengths import Lengths
from ops.attention.names import BackendName
from ops.attention.varlen import backend_of, choose

WIDTH = 1536  # heads x head size, as in Wan2.1-1.3B
PACKS = {  # lengths of the real run, then of the rehearsal; keys are as long, or 512 per sequence in a cross case
    "one-32760": ((32760,), (24,)),
    "packed-32k": ((10155, 7207, 5569, 3931, 2948, 1965, 985), (9, 8, 4, 3)),
    "4x8190": ((8190,) * 4, (6,) * 4),
    "16x1024": ((1024,) * 16, (3,) * 8),
    "packed-8k": ((2304, 1536, 1536, 1024, 768, 576, 256), (5, 4, 2)),
    "cross-32760": ((32760,), (24,)),
}
TEXT = 512
DTYPE = torch.bfloat16
BACKWARD_PRODUCTS = 2.5  # of the forward's: five matrix products instead of two


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpeed:
    """One backend on one pack, with head sizes 128, 64 and 72."""

    backend: BackendName
    pack: str

    @property
    def name(self) -> str:
        return f"attention.{self.backend}.{self.pack}"

    @property
    def estimate_s(self) -> float:
        return 25.0 if self.backend == "flex" else 3.5  # which is compiled for each length

    @property
    def is_cross(self) -> bool:
        """Whether keys are those of captions."""
        return self.pack.startswith("cross")

    def why_not(self, place: Place) -> str | None:
        q_lengths, k_lengths = self._lengths(place)
        probe = torch.empty(0, 12, 128, dtype=DTYPE, device=place.device)
        return backend_of(self.backend).why_not(probe, (q_lengths, k_lengths))

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        figures: dict[str, float | str] = {}
        # what is compiled for FlexAttention gives its inputs away otherwise, and a backward runs here once only
        with functorch_config.patch(donated_buffer=False):
            for size in place.pick((128, 64, 72), (16,)):
                figures |= self._measure(place, size)
        return figures

    def _measure(self, place: Place, size: int) -> dict[str, float | str]:
        q_lengths, k_lengths = self._lengths(place)
        heads, backend = place.pick(WIDTH // size, 2), backend_of(self.backend)
        q, k, v = (
            torch.randn(n.total, heads, size, device=place.device, dtype=DTYPE)
            for n in (q_lengths, k_lengths, k_lengths)
        )
        products = 4.0 * heads * size * sum(a * b for a, b in zip(q_lengths.host, k_lengths.host, strict=True))
        repeats = place.pick(10, 2)
        with torch.no_grad():
            forward = place.seconds(lambda: backend.run(q, k, v, q_lengths, k_lengths), repeats, warm_up=2)
        found: dict[str, float | str] = {
            f"d{size} auto is": choose(q, (q_lengths, k_lengths)).name,
            f"d{size} forward ms": 1e3 * forward.seconds,
            f"d{size} forward TFLOP/s": products / forward.seconds / 1e12,
        }
        leaves = [x.requires_grad_() for x in (q, k, v)]
        if backend.why_not(q, (q_lengths, k_lengths)):
            return found  # forward only
        out = backend.run(q, k, v, q_lengths, k_lengths)
        seed = torch.randn_like(out)
        backward = place.seconds(lambda: torch.autograd.grad(out, leaves, seed, retain_graph=True), repeats, warm_up=2)
        found[f"d{size} backward ms"] = 1e3 * backward.seconds
        found[f"d{size} backward TFLOP/s"] = BACKWARD_PRODUCTS * products / backward.seconds / 1e12
        return found

    def _lengths(self, place: Place) -> tuple[Lengths, Lengths]:
        host = place.pick(*PACKS[self.pack])
        keys = (place.pick(TEXT, 5),) * len(host) if self.is_cross else host
        return Lengths.of(host, place.device), Lengths.of(keys, place.device)


def measurements() -> list[AttentionSpeed]:
    order: tuple[BackendName, ...] = ("flash", "cudnn", "flash3", "flex")
    real = [AttentionSpeed(backend=name, pack=pack) for pack in PACKS for name in order]
    return [*real, *(AttentionSpeed(backend="sdpa", pack=pack) for pack in PACKS)]
