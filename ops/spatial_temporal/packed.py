"""Packed sequences on their way into spatial-temporal layers: from a bag's chunks to the layout at rest, and back.

A `Layout` gives each rank one contiguous chunk of every sequence; spatial-temporal layers begin and end with all frames
of a rank's own positions. Sequences of one grid go through the layers together, as a stack [B, T, s, C].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ops.attention.lengths import Lengths
from ops.comm.collectives import Group
from ops.kernels.base.autograd import Context, InputGradients
from ops.packed.packing import Layout
from ops.spatial_temporal.choice import SlicingRule
from ops.spatial_temporal.schedule import Grid


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Sequences of one token grid."""

    members: tuple[int, ...]  # places in the layout
    grid: tuple[int, int, int]  # t, h, w
    split: Grid  # what each rank holds of T and of S = h w
    positions: Tensor  # int64 [s]: this rank's positions at rest, in their order
    index: Tensor  # int64 [B]: `members`
    text: Lengths  # rows of text of each

    @property
    def rows(self) -> int:
        """Rows of this rank at rest."""
        return len(self.members) * self.split.frames * len(self.positions)


@dataclass(frozen=True, slots=True)
class Rest:
    """How rows go between chunks and rest. This rank has n rows in chunks, n' at rest, where stack follows stack."""

    stacks: tuple[Stack, ...]
    leaving: Tensor  # int64 [n]: local rows of the layout, in the order in which they are sent
    returned: Tensor  # int64 [n]: the inverse of `leaving`
    arriving: Tensor  # int64 [n']: row of the received buffer that belongs at each place at rest
    departing: Tensor  # int64 [n']: the inverse of `arriving`
    sent: tuple[int, ...]  # rows to each rank
    received: tuple[int, ...]  # rows from each rank

    @staticmethod
    def of(layout: Layout, how: SlicingRule, no_text: int = 0) -> Rest:
        """The rest for the rank and degree of the layout, each stack by its own schedule, in host memory
        (`Layout.made`). `no_text` rows stand for a text without rows."""
        texts = [rows or no_text for rows in layout.text_lengths]
        stacks = tuple(
            Stack(
                members=members,
                grid=grid,
                split=split,
                positions=torch.from_numpy(_positions(split)),
                index=torch.tensor(members),
                text=Lengths.of([texts[member] for member in members], recur=layout.text_recurs),
            )
            for members, grid, split in _stacks(layout, how, layout.rank)
        )
        starts = np.cumsum((0, *layout.lengths))
        total = int(starts[-1])
        holder, place = np.empty(total, np.int64), np.empty(total, np.int64)  # at rest, of every row of the bag
        for rank in range(layout.degree):
            rows = _rows_at_rest(_stacks(layout, how, rank), starts)
            holder[rows], place[rows] = rank, np.arange(len(rows))
            if rank == layout.rank:
                resting = rows
        owner = np.empty(total, np.int64)  # in the layout
        for index, start in enumerate(starts[:-1]):
            for rank in range(layout.degree):
                chunk = layout.chunk(index, rank)
                owner[start + chunk.start : start + chunk.stop] = rank
        own = np.flatnonzero(owner == layout.rank)
        leaving = np.lexsort((place[own], holder[own]))
        departing = np.argsort(owner[resting], kind="stable")  # each sender's rows come in the order of rest
        counts = [
            tuple(np.bincount(ranks, minlength=layout.degree).tolist()) for ranks in (holder[own], owner[resting])
        ]
        return Rest(
            stacks=stacks,
            leaving=torch.from_numpy(leaving),
            returned=torch.from_numpy(np.argsort(leaving)),
            arriving=torch.from_numpy(np.argsort(departing)),
            departing=torch.from_numpy(departing),
            sent=counts[0],
            received=counts[1],
        )


def to_rest(rows: Tensor, rest: Rest, group: Group) -> list[Tensor]:
    """Local rows [n, C] of the layout -> one [B, T, s, C] per stack. Collective, forward and backward."""
    moved: Tensor = _ToRest.apply(rest, group, rows)  # type: ignore[no-untyped-call]
    parts = moved.split([stack.rows for stack in rest.stacks])
    return [
        part.view(len(stack.members), stack.split.frames, len(stack.positions), -1)
        if part.numel()
        else part.new_empty(len(stack.members), stack.split.frames, 0, rows.shape[1])
        for stack, part in zip(rest.stacks, parts)
    ]


def from_rest(stacks: Sequence[Tensor], rest: Rest, group: Group) -> Tensor:
    """The inverse: one [B, T, s, C] per stack -> local rows [n, C] of the layout."""
    rows: Tensor = _FromRest.apply(rest, group, torch.cat([stack.flatten(0, 2) for stack in stacks]))  # type: ignore[no-untyped-call]
    return rows


_Members = tuple[tuple[int, ...], tuple[int, int, int], Grid]  # of a stack, on some rank


def _stacks(layout: Layout, how: SlicingRule, rank: int) -> list[_Members]:
    members: dict[tuple[int, int, int], list[int]] = {}
    for index, sequence in enumerate(layout.sequences):
        members.setdefault(sequence.grid, []).append(index)
    return [(tuple(indices), grid, _split(layout, grid, indices, how, rank)) for grid, indices in members.items()]


def _split(layout: Layout, grid: tuple[int, int, int], members: Sequence[int], how: SlicingRule, rank: int) -> Grid:
    """What a rank holds of a stack. All ranks find the same schedule: it depends on nothing but the layout and `how`,
    which all of them are given alike."""
    frames, positions, samples = grid[0], grid[1] * grid[2], len(members)
    text = round(sum(layout.text_lengths[member] for member in members) / samples)
    schedule = how.stack(frames, positions, samples, text, layout.degree)
    return Grid(frames=frames, positions=positions, schedule=schedule, degree=layout.degree, rank=rank)


def _positions(split: Grid) -> np.ndarray:
    """int64 [s]: positions of a rank at rest."""
    return np.concatenate([np.arange(part.start, part.stop) for part in split.positions_of_slices])


def _rows_at_rest(stacks: Sequence[_Members], starts: np.ndarray) -> np.ndarray:
    """int64 [n']: which row of all sequences, one after the other, lies at each place."""
    rows = []
    for members, _, split in stacks:
        frames = np.arange(split.frames)[:, None] * split.positions
        rows.append((starts[list(members)][:, None, None] + frames + _positions(split)).ravel())
    return np.concatenate(rows)


def _move(
    rows: Tensor, pick: Tensor, put: Tensor, sent: Sequence[int], received: Sequence[int], group: Group
) -> Tensor:
    moved = rows.index_select(0, pick)
    if group.size > 1:
        moved, ready = rows.new_empty(sum(received), *rows.shape[1:]), moved
        group.all_to_all(moved, ready, list(received), list(sent))
    return moved.index_select(0, put)


class _Way(Context, Protocol):
    """What backward needs: between which ranks rows were moved."""

    rest: Rest
    group: Group


class _ToRest(torch.autograd.Function):
    """Both directions only move rows, so each one's backward is the other one's forward."""

    @staticmethod
    def forward(ctx: _Way, rest: Rest, group: Group, rows: Tensor) -> Tensor:
        ctx.rest, ctx.group = rest, group
        return _move(rows, rest.leaving, rest.arriving, rest.sent, rest.received, group)

    @staticmethod
    def backward(ctx: _Way, grad: Tensor) -> InputGradients:
        rest = ctx.rest
        return None, None, _move(grad, rest.departing, rest.returned, rest.received, rest.sent, ctx.group)


class _FromRest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Way, rest: Rest, group: Group, rows: Tensor) -> Tensor:
        ctx.rest, ctx.group = rest, group
        return _move(rows, rest.departing, rest.returned, rest.received, rest.sent, group)

    @staticmethod
    def backward(ctx: _Way, grad: Tensor) -> InputGradients:
        rest = ctx.rest
        return None, None, _move(grad, rest.leaving, rest.arriving, rest.sent, rest.received, ctx.group)
