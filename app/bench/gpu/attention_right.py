"""Every attention backend against softmax(q k^T) v in float64, forward and backward, on packs of real head sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from app.bench.gpu.measurement import Earlier, NamedFigures, Place, relative_error
from ops.attention.lengths import Lengths
from ops.attention.names import BACKEND_NAMES, BackendName
from ops.attention.varlen import backend_of

HALF_ERROR = 1e-2  # relative L2: probabilities and their products are rounded to bf16 (3e-3 to 6e-3 in published tests)
CASES = {  # lengths of queries, lengths of keys: of the real run, then of the rehearsal
    "one": (((1031,), (1031,)), ((19,), (19,))),
    "equal": (((512,) * 3, (512,) * 3), ((7,) * 3, (7,) * 3)),
    "packed": (((700, 1, 1333, 64), (700, 1, 1333, 64)), ((9, 1, 13), (9, 1, 13))),
    "cross": (((900, 333), (77, 512)), ((9, 3), (2, 5))),
}
HEAD_SIZES = (64, 72, 128)  # 72: Latte and STDiT3
HEADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCheck:
    """One backend on all packs that it accepts; the others are listed."""

    backend: BackendName

    @property
    def name(self) -> str:
        return f"attention-right.{self.backend}"

    @property
    def estimate_s(self) -> float:
        return 38.0 if self.backend == "flex" else 10.0

    def why_not(self, place: Place) -> str | None:
        probe = torch.empty(0, HEADS, 128, dtype=torch.bfloat16, device=place.device)
        return backend_of(self.backend).why_not(probe)

    def run(self, place: Place, earlier: Earlier) -> NamedFigures:
        backend = backend_of(self.backend)
        figures: dict[str, float | bool | str | None] = {"right": True}
        for case, shapes in CASES.items():
            q_lengths, k_lengths = (Lengths.of(n, place.device) for n in place.pick(*shapes))
            for size in place.pick(HEAD_SIZES, HEAD_SIZES[:2]):
                q, k, v = (_heads(n.total, size, place.device) for n in (q_lengths, k_lengths, k_lengths))
                reason = backend.why_not(q, (q_lengths, k_lengths))
                backward = reason is None
                if reason and "no backward" in reason:
                    q, k, v, reason = q.detach(), k.detach(), v.detach(), None
                if reason:
                    figures[f"{case}, refused"] = reason
                    continue
                out = backend.run(q, k, v, q_lengths, k_lengths)
                errors = _errors(out, (q, k, v), q_lengths.host, k_lengths.host, backward)
                for what, error in errors.items():
                    figures[f"{case} d{size} {what}"] = error
                    figures["right"] = bool(figures["right"]) and error <= HALF_ERROR
        return figures


def measurements() -> list[AttentionCheck]:
    order: tuple[BackendName, ...] = ("flash", "cudnn", "flash3", "sdpa", "flex")
    assert set(order) == set(BACKEND_NAMES)
    return [AttentionCheck(backend=name) for name in order]


def _heads(rows: int, size: int, device: torch.device) -> Tensor:
    return torch.randn(rows, HEADS, size, device=device, dtype=torch.bfloat16).requires_grad_()


def _errors(
    out: Tensor,
    given: tuple[Tensor, Tensor, Tensor],
    q_lengths: tuple[int, ...],
    k_lengths: tuple[int, ...],
    backward: bool,
) -> dict[str, float]:
    q, k, v = exact = tuple(x.detach().double().requires_grad_() for x in given)
    expected = softmax_attention(q, k, v, q_lengths, k_lengths)
    errors = {"forward": relative_error(out, expected)}
    if backward:
        cotangent = torch.randn_like(out)
        ours = torch.autograd.grad(out, given, cotangent)
        theirs = torch.autograd.grad(expected, exact, cotangent.double())
        for name, a, b in zip(("dq", "dk", "dv"), ours, theirs, strict=True):
            errors[name] = relative_error(a, b)
    return errors


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, q_lengths: tuple[int, ...], k_lengths: tuple[int, ...]
) -> Tensor:
    """Attention by its definition, one sequence at a time with all scores: q [Nq, H, d], k, v [Nk, H, d] -> [Nq, H,
    d]."""
    parts = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
    out = []
    for one_q, one_k, one_v in parts:
        scores = torch.einsum("qhd,khd->hqk", one_q, one_k) / math.sqrt(q.shape[-1])
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), one_v))
    return torch.cat(out)
