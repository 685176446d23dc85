"""How encode results reach the DiT cascade that needs them: in place, through the bag's group, or the object store.

A published result leaves a CUDA worker in three parts that overlap with the cascades after it: a copy to pinned memory
on a side stream, which the task thread only queues (`HostCopies.start`); the wait for that copy and the write into the
object store, both in the actor's "io" thread (`HostCopies.take`, called by Worker.published). The task thread never
waits for a copy. Published results that come here go to the device from pinned memory, without a wait of the host.

S samples, P = width of a row of the VAE's results, E text width. Latents travel as token rows `[tokens, P]` so that
each rank of a bag receives its chunk only; text is needed whole by every rank, and so are the `tail` rows that may
stand after those of the tokens (ops/models/first_frame.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from actors.messages import STORE, SampleId, StepSample
from ops.chunks import chunk_bounds
from ops.comm.collectives import Group
from ops.packed.uploads import upload_all


class HandoffError(ValueError):
    """An encode result that the DiT cannot take, or that is not where the plan says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeResult:
    """One sample's encode result. `rows` is [tokens + tail, P] for the VAE, [text_tokens, E] for text."""

    id: SampleId
    rows: torch.Tensor
    ok: bool = True


class EncodeStore:
    """Encode results that wait on this worker for their DiT cascade. Each is taken exactly once."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, SampleId], EncodeResult] = {}

    def keep(self, module: str, encoded: EncodeResult) -> None:
        self._held[module, encoded.id] = encoded

    def take(self, module: str, sample: SampleId) -> EncodeResult:
        found = self._held.pop((module, sample), None)
        if found is None:
            raise HandoffError(f"{module} result of sample {sample} is not on this worker; the plan says it is.")
        return found

    def drop_before(self, step: int) -> None:
        """Free what no later cascade can ask for."""
        self._held = {key: value for key, value in self._held.items() if key[1][0] >= step}

    def clear(self) -> None:
        self._held.clear()

    def __len__(self) -> int:
        return len(self._held)


# On the way to other workers ----------------------------------------------------------------------------------------


CascadeKey = tuple[int, str]  # generation, cascade


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyInFlight:
    """A copy in flight: `host` may be read once `wait` has returned."""

    host: torch.Tensor
    wait: Callable[[], None]


class PinnedCopy:
    """Copies to pinned host memory on a stream of its own, after what the current stream has queued so far.

    Nothing but the end of a step bounds what waits there, all that a worker publishes meanwhile: 8 MiB of a caption of
    512 rows of 4096, 32 MiB of a clip of 129x720x1280 with 16 channels (29, rounded up to a power of two). Of large
    clips a host is a few ahead at most (`ops/upload_room.py`). What a cache keeps is bounded by its writer.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, rows: torch.Tensor) -> CopyInFlight:
        if not rows.is_cuda:
            return CopyInFlight(host=rows, wait=lambda: None)
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # its waiter sleeps, without the GIL
        self._stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(self._stream):
            host.copy_(rows, non_blocking=True)
            done.record(self._stream)
        rows.record_stream(self._stream)  # its memory is not given out again before the copy has read it
        return CopyInFlight(host=host, wait=done.synchronize)


class HostCopies:
    """Results that consumers elsewhere wait for, by generation and cascade. Each is taken once. Thread-safe."""

    def __init__(self, copy: Callable[[torch.Tensor], CopyInFlight]) -> None:
        self._copy = copy
        self._changed = threading.Condition()
        self._started: dict[CascadeKey, list[tuple[EncodeResult, CopyInFlight]]] = {}

    def start(self, key: CascadeKey, results: list[EncodeResult]) -> None:
        """Queue the copies of a cascade's results; returns at once."""
        copies = [self._copy(result.rows) for result in results]
        started = [(replace(result, rows=copying.host), copying) for result, copying in zip(results, copies)]
        with self._changed:
            self._started[key] = started
            self._changed.notify_all()

    def take(self, key: CascadeKey, timeout_s: float) -> list[EncodeResult] | None:
        """The results in host memory, when their copies have ended. None if the cascade has not run by then."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._started, timeout_s):
                return None
            started = self._started.pop(key)
        for _, copying in started:
            copying.wait()
        return [result for result, _ in started]

    def clear(self) -> None:
        """The generation has ended: no worker will ask for what is left."""
        with self._changed:
            self._started.clear()

    def __len__(self) -> int:
        with self._changed:
            return len(self._started)


# In front of the DiT -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a rank of a bag holds when the DiT starts."""

    rows: list[torch.Tensor]  # per sample: this rank's chunk of the latent's token rows [n_local, P]
    tails: list[torch.Tensor]  # per sample: what stands after the token rows, whole [tail, P]
    text: list[torch.Tensor]  # per sample: the whole text [text_tokens, E]
    ok: list[bool]
    bytes_received: int  # through the bag's group
    bytes_fetched: int  # through the object store


def gather_inputs(
    samples: Sequence[StepSample],
    sources: dict[str, tuple[int, ...]],
    store: EncodeStore,
    fetched: dict[tuple[str, SampleId], EncodeResult],
    group: Group,
    device: torch.device,
    widths: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    tail: int = 0,
) -> Inputs:
    """Collect every sample's latent chunk and text on this rank. All ranks of the bag call it together.

    `widths` is (P, E), `tail` the rows after those of the tokens. Results a rank produced go to the others through the
    group in one exchange for each kind of rows, after one of their lengths between the hosts; nothing is exchanged when
    every result is in place or came from the store.
    """
    mine = {
        module: {
            i: (store.take(module, s.id) if source[i] == group.rank else fetched[module, s.id])
            for i, s in enumerate(samples)
            if source[i] in (group.rank, STORE)
        }
        for module, source in sources.items()
    }
    for module, width in (("vae", widths[0]), ("text", widths[1])):
        for i, encoded in mine[module].items():
            _check(module, samples[i], encoded.rows, width, tail)
    shared = group.size > 1 and any(rank != STORE for source in sources.values() for rank in source)
    text_lengths, ok = _agree(mine, sources, samples, group) if shared else _local_facts(mine, samples)

    def rows_of(module: str, spans: list[list[tuple[int, int]]]) -> _SharedRows:
        own = {i: encoded.rows for i, encoded in mine[module].items()}
        width = widths[0] if module == "vae" else widths[1]
        return _SharedRows(source=sources[module], own=own, width=width, spans=spans)

    tokens = [s.grid[0] * s.grid[1] * s.grid[2] for s in samples]
    ranks = range(group.size)
    kinds = {"rows": rows_of("vae", [[chunk_bounds(n, group.size, r, i) for r in ranks] for i, n in enumerate(tokens)])}
    if tail:
        kinds["tails"] = rows_of("vae", [[(n, n + tail) for _ in ranks] for n in tokens])
    kinds["text"] = rows_of("text", [[(0, n) for _ in ranks] for n in text_lengths])
    here = dict(zip(kinds, _there([kind.of_rank(group.rank) for kind in kinds.values()], device, dtype), strict=True))
    received = sum(_exchange(kind, group, device, dtype, here[name]) for name, kind in kinds.items())
    whole = {name: [found[i] for i in range(len(samples))] for name, found in here.items()}
    return Inputs(
        rows=whole["rows"],
        tails=whole.get("tails", []),
        text=whole["text"],
        ok=ok,
        bytes_received=received,
        bytes_fetched=sum(
            mine[m][i].rows.nbytes for m, source in sources.items() for i in mine[m] if source[i] == STORE
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _SharedRows:
    """One kind of rows that the ranks of a bag get of every sample."""

    source: tuple[int, ...]  # of each sample: the rank that has the result; STORE: all have it
    own: dict[int, torch.Tensor]  # by sample: the results that are here, whole
    width: int
    spans: list[list[tuple[int, int]]]  # of each sample: rows of the result that each rank gets

    def of_rank(self, rank: int) -> dict[int, torch.Tensor]:
        """What the rank gets of the results that are here, by sample."""
        return {i: rows[slice(*self.spans[i][rank])] for i, rows in self.own.items()}


def _there(
    parts: Sequence[dict[int, torch.Tensor]], device: torch.device, dtype: torch.dtype
) -> list[dict[int, torch.Tensor]]:
    """These rows on the device, in `dtype`; what lies in host memory goes there by one copy, for which nobody waits."""
    on_host = [{i: rows for i, rows in part.items() if rows.device.type == "cpu"} for part in parts]
    sent = upload_all(on_host, device)
    return [
        {i: there.get(i, rows).to(device, dtype) for i, rows in part.items()}
        for part, there in zip(parts, sent, strict=True)
    ]


def _check(module: str, sample: StepSample, rows: torch.Tensor, width: int, tail: int) -> None:
    """What was handed over must be what the model takes; a wrong tensor would only be noticed far from its cause."""
    tokens = sample.grid[0] * sample.grid[1] * sample.grid[2] + tail
    right = rows.dim() == 2 and rows.shape[1] == width and (module == "text" or rows.shape[0] == tokens)
    if not right or not rows.dtype.is_floating_point:
        wanted = f"[{tokens if module == 'vae' else 'text tokens'}, {width}] of a floating-point dtype"
        raise HandoffError(
            f"{module} result of sample {sample.key} (item {sample.item}) is {list(rows.shape)} {rows.dtype}; "
            f"the model takes {wanted}. The encoder and the transformer do not belong together."
        )


def _local_facts(
    mine: dict[str, dict[int, EncodeResult]], samples: Sequence[StepSample]
) -> tuple[list[int], list[bool]]:
    order = range(len(samples))
    lengths = [mine["text"][i].rows.shape[0] for i in order]
    return lengths, [mine["vae"][i].ok and mine["text"][i].ok for i in order]


def _agree(
    mine: dict[str, dict[int, EncodeResult]],
    sources: dict[str, tuple[int, ...]],
    samples: Sequence[StepSample],
    group: Group,
) -> tuple[list[int], list[bool]]:
    """Text lengths and ok flags are known to the host where the result is: share them over the bag.

    A sample is ok where both of its results are: of a first frame that did not decode, the latent may lie in a cache.
    """
    facts = np.zeros((len(samples), 3), np.int64)
    for i in range(len(samples)):
        speaks = {module: source[i] if source[i] != STORE else 0 for module, source in sources.items()}
        if speaks["text"] == group.rank:
            facts[i, 0] = mine["text"][i].rows.shape[0]
        for place, (module, rank) in enumerate(speaks.items(), start=1):
            if rank == group.rank:
                facts[i, place] = int(mine[module][i].ok)
    agreed = np.sum(group.exchange_numbers(facts.ravel().tolist()), axis=0).reshape(facts.shape)
    return agreed[:, 0].tolist(), agreed[:, 1:].all(axis=1).tolist()


def _exchange(
    rows: _SharedRows, group: Group, device: torch.device, dtype: torch.dtype, out: dict[int, torch.Tensor]
) -> int:
    """One all-to-all: each producer sends every other rank its rows of the samples that it has; they are put into
    `out`. Returns bytes received. Nothing is exchanged where all results came from the store."""
    me = group.rank
    if group.size == 1 or all(rank == STORE for rank in rows.source):
        return 0
    produced = [i for i, rank in enumerate(rows.source) if rank == me]
    pieces, input_splits = [], []
    for r in range(group.size):
        parts = [rows.own[i][slice(*rows.spans[i][r])].to(device, dtype) for i in produced] if r != me else []
        pieces.extend(parts)
        input_splits.append(sum(p.shape[0] for p in parts))
    expected = [[i for i, rank in enumerate(rows.source) if rank == r and r != me] for r in range(group.size)]
    lengths = [hi - lo for lo, hi in (spans[me] for spans in rows.spans)]
    output_splits = [sum(lengths[i] for i in of) for of in expected]
    sent = torch.cat(pieces) if pieces else torch.empty(0, rows.width, dtype=dtype, device=device)
    received = torch.empty(sum(output_splits), rows.width, dtype=dtype, device=device)
    group.all_to_all(received, sent, output_splits, input_splits)
    coming = [i for of in expected for i in of]
    for i, part in zip(coming, received.split([lengths[i] for i in coming]), strict=True):
        out[i] = part
    return received.nbytes
