"""The population search's inner loop in C: some 10 times as many candidates per second as the vectorised one.

`annealer.c` is built when Heddle is installed, if there is a C compiler. If there was none, or a problem is larger than
its fixed arrays, `improve` searches with `anneal` instead.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import logging
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np

from actors.plan.strategies.search.space import NEVER, BagCosts, SearchResult, Space

log = logging.getLogger(__name__)

BUILT = Path("actors", "plan", "strategies", "search", f"_annealer{sysconfig.get_config_var('EXT_SUFFIX')}")
TREE = Path(__file__).parents[4]
VERSION = 3  # of what crosses to C, as in annealer.c
JOBS, NODES, SIZE, EDGES = 96, 32, 64, 128  # of the arrays in annealer.c
# Calibration on one busy core: seconds that placing one job takes, and that looking at one node adds to it.
JOB_S, NODE_S = 6.2e-8, 6e-9
NAMED_JOB_S, NAMED_NODE_S = 1.1e-7, 2e-8  # where workers are placed by name
PACED_JOB_S, PACED_NODE_S = 2.8e-7, 2.2e-8  # where they are of unequal speed; the latter for every speed of a node
LENGTH = 30  # a restart has this many evaluations, times the square of the number of jobs
ENOUGH = 4  # a budget allows at least this many restarts: where it is small, restarts are shorter
PATIENCE = 4  # a search ends after twice the restarts that its best plan took, and this many more for every job
HEATS = (0.03, 0.008)  # first temperature, as a share of the makespan: of a step alone; with encodes of later steps
# A search always has the same number of threads, so that the plan does not depend on the machine. A budget below
# WORTH_THREADS_S is over before two of them pay.
THREADS, WORTH_THREADS_S = 2, 0.1
SECOND_SEED = 0x5EED


class _Space(ctypes.Structure):
    _fields_ = [
        (name, kind)
        for kind, names in (
            (ctypes.c_int, "jobs nodes size modes chains reversible ahead"),
            (
                ctypes.c_void_p,
                "num_modes degree span seconds pred_from preds succ_from succs chain_from chain release "
                "worth slack free counts waits encode",
            ),
            (ctypes.c_double, "barrier workers"),
            (ctypes.c_int, "named holds rails paces"),
            (
                ctypes.c_void_p,
                "who delay early_from early_end early_bag over detour fall rail island_from island pace quick",
            ),
        )
        for name in names.split()
    ]


@functools.cache
def library(tree: Path = TREE, version: int = VERSION) -> ctypes.CDLL | None:
    """The compiled search of this version, or None where this installation has none. It may lie in the `tree`; else in
    the installed one, as what `ray job submit` uploads has no built files."""
    for folder in itertools.chain([tree], _installed()):
        try:
            found = ctypes.CDLL(str(folder / BUILT))
        except OSError:
            continue
        found.annealer_version.restype = ctypes.c_int
        if found.annealer_version() != version:
            log.warning("%s was built from another version of Heddle. Install it again (make install).", folder / BUILT)
            continue
        found.anneal.restype = ctypes.c_long
        return found
    log.info(
        "the C search was not built: plans are searched with numpy, about 10 times slower. Where there is a C "
        "compiler, installing Heddle again builds it."
    )
    return None


def _installed() -> Iterator[Path]:
    """Trees of the installed Heddle."""
    try:
        installed = distribution("heddle")
    except PackageNotFoundError:
        return
    yield Path(str(installed.locate_file("")))
    origin = json.loads(installed.read_text("direct_url.json") or "{}")  # of an installation that points to a tree
    if (url := urlsplit(origin.get("url", ""))).scheme == "file":
        yield Path(unquote(url.path))


def fits(space: Space) -> bool:
    """Whether the C search can take this problem."""
    nodes, size = space.nodes.shape
    if space.bags is not None:
        most = max(len(early) for early in space.bags.early) + space.num_jobs
        if most > EDGES or len(space.bags.rails[0]) > SIZE:
            return False
    return space.num_jobs <= JOBS and nodes <= NODES and size <= SIZE and library() is not None


def evaluations_for(space: Space, budget_s: float) -> int:
    """How many candidates a budget buys. A constant calibration, deliberately not a measurement."""
    nodes = space.nodes.shape[0]
    if space.bags is None:
        job_s, node_s = JOB_S, NODE_S
    elif len(space.bags.paces) == 1:
        job_s, node_s = NAMED_JOB_S, NAMED_NODE_S
    else:
        job_s, node_s = PACED_JOB_S, PACED_NODE_S
        nodes = sum(len(set(words) - {0}) for words in zip(*space.bags.quick, strict=True))
    return max(1, int(budget_s / (space.num_jobs * (job_s + node_s * nodes))))


def anneal(
    space: Space,
    starts: Sequence[tuple[np.ndarray, np.ndarray]],
    budget_s: float,
    seed: int,
    bound: float,
    seconds: float,
) -> SearchResult | None:
    """Restarts from the starting candidates (keys [J], modes [J]) and from random ones, until the budget's evaluations
    are spent, more of them promise nothing, or `bound` is met. None when `seconds` of wall clock end before that.

    A budget of WORTH_THREADS_S or more is spent twice at the same time, by threads with different seeds.
    """
    compiled = library()
    assert compiled is not None, "fits() was not asked"
    given, arrays, before = _given(space)
    num_jobs = space.num_jobs
    keys = np.ascontiguousarray([start[0] for start in starts], dtype=float)
    modes = np.ascontiguousarray([start[1] for start in starts], dtype=np.int32)
    evaluations = evaluations_for(space, budget_s)
    longest = max(50, min(LENGTH * num_jobs**2, evaluations // ENOUGH))

    def search(number: int) -> _SearchOutput:
        one = _SearchOutput(
            np.zeros((num_jobs, 3)),
            np.zeros((num_jobs, NODES), dtype=np.uint64),
            np.zeros(num_jobs, dtype=np.int32),
            np.zeros(4),
        )
        one.evaluations = compiled.anneal(
            ctypes.byref(given),
            _pointer(keys),
            _pointer(modes),
            len(starts),
            ctypes.c_long(evaluations),
            ctypes.c_long(longest),
            PATIENCE * num_jobs,
            ctypes.c_double(HEATS[given.ahead]),
            ctypes.c_double(bound),
            ctypes.c_double(seconds),
            ctypes.c_uint64(seed + SECOND_SEED * number),
            _pointer(one.result),
            _pointer(one.bags),
            _pointer(one.order),
            _pointer(one.figures),
        )
        return one

    if budget_s < WORTH_THREADS_S:
        searches = [search(0)]
    else:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="plan search") as threads:
            searches = list(threads.map(search, range(THREADS)))
    del arrays  # until here the compiled code reads them
    found = [one for one in searches if one.makespan > 0]
    if not found:
        return None
    best = min(found, key=lambda one: one.cost if given.ahead else one.makespan)
    return _result_of(space, best, before, sum(one.evaluations for one in searches))


def _result_of(space: Space, best: _SearchOutput, before: Sequence[Sequence[int]], evaluations: int) -> SearchResult:
    """The schedule of a search, without encodes of later steps that would begin after its end."""
    starts = best.result[:, 0]
    placing = [int(j) for j in best.order]
    if best.is_backward:  # in forward order of start, encodes first
        placing = sorted(range(space.num_jobs), key=lambda j: (starts[j], bool(before[j]), j))
    return SearchResult(
        best.makespan,
        best.cost,
        order=[j for j in placing if space.counts[j] or not space.worth[j] or starts[j] < best.makespan - 1e-9],
        degree=[int(k) for k in best.result[:, 2]],
        nodes=[tuple(int(n) for n in np.flatnonzero(row)) for row in best.bags],
        start=starts.tolist(),
        rounds=evaluations,
        bags=_bags(space, best.bags) if space.bags is not None else [],
    )


def _bags(space: Space, words: np.ndarray) -> list[tuple[int, ...]]:
    """Workers of words [J, NODES]."""
    sizes = (space.nodes < NEVER).sum(axis=1)
    first = [int(sizes[:node].sum()) for node in range(len(sizes))]
    return [
        tuple(first[n] + w for n in range(len(first)) for w in range(SIZE) if int(row[n]) >> w & 1) for row in words
    ]


@dataclass(slots=True)
class _SearchOutput:
    """What one run of the compiled search left: see `anneal` in annealer.c."""

    result: np.ndarray
    bags: np.ndarray
    order: np.ndarray
    figures: np.ndarray
    evaluations: int = 0

    @property
    def makespan(self) -> float:
        """0: the wall clock ended it before it had any."""
        return float(self.figures[0])

    @property
    def cost(self) -> float:
        return float(self.figures[1])

    @property
    def is_backward(self) -> bool:
        """The schedule was found from its end."""
        return bool(self.figures[2])


def _given(space: Space) -> tuple[_Space, dict[str, np.ndarray], list[list[int]]]:
    """(the problem as the compiled code reads it, the arrays that it points to, predecessors of every job)."""
    num_jobs, width = space.seconds.shape
    nodes, size = space.nodes.shape
    before = [[int(p) for p in row if p < num_jobs] for row in space.preds]
    after = [[job for job, preds in enumerate(before) if pred in preds] for pred in range(num_jobs)]
    chains = [[int(j) for j in row[:length]] for row, length in zip(space.chain_jobs, space.chain_length)]
    idle = bool((space.nodes[space.nodes < NEVER] == 0).all()) and space.barrier == 0 and not space.release.any()
    idle = idle and (space.bags is None or not any(space.bags.early))
    ahead = bool(space.worth.any())
    alone = [bool((space.span[j, : space.num_modes[j]] == 1).any()) for j in range(num_jobs)]
    arrays = {
        "num_modes": space.num_modes.astype(np.int32),
        "degree": space.degree.astype(np.int32),
        "span": np.maximum(space.span, 1).astype(np.int32),
        "seconds": np.ascontiguousarray(space.seconds),
        "release": space.release.astype(float),
        "worth": space.worth.astype(float),
        "slack": space.slack.astype(float),
        "free": np.ascontiguousarray(space.nodes),
        "counts": space.counts.astype(np.int32),
        "waits": space.waits.astype(np.int32),
        "encode": (~space.waits & np.array(alone)).astype(np.int32),
    }
    for offsets, values, rows in (
        ("pred_from", "preds", before),
        ("succ_from", "succs", after),
        ("chain_from", "chain", chains),
    ):
        arrays[offsets] = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int32)
        arrays[values] = np.array([j for row in rows for j in row] or [0], dtype=np.int32)
    if space.bags is not None:
        arrays |= _named(space.bags)
    given = _Space(
        jobs=num_jobs,
        nodes=nodes,
        size=size,
        modes=width,
        chains=len(chains),
        ahead=ahead,
        reversible=idle and not ahead and bool(space.counts.any()),
        barrier=space.barrier,
        workers=float((space.nodes < NEVER).sum()),
        named=space.bags is not None,
        holds=space.bags is not None and space.bags.holds,
        rails=len(space.bags.rails[0]) if space.bags is not None else 0,
        paces=len(space.bags.paces) if space.bags is not None else 1,
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    return given, arrays, before


def _named(bags: BagCosts) -> dict[str, np.ndarray]:
    """The arrays that only a search by name reads."""
    early = [one for of in bags.early for one in of]
    return {
        "who": bags.who.astype(np.int32),
        "delay": bags.delay.astype(float),
        "early_from": np.cumsum([0, *(len(of) for of in bags.early)]).astype(np.int32),
        "early_end": np.array([end for end, _ in early] or [0.0]),
        "early_bag": np.array([words for _, words in early] or [[0]], dtype=np.uint64),
        "over": np.ascontiguousarray(bags.over),
        "detour": np.ascontiguousarray(bags.detour),
        "fall": np.ascontiguousarray(bags.fall),
        "rail": np.array(bags.rails, dtype=np.uint64),
        "island_from": np.cumsum([0, *(len(own) for own in bags.islands)]).astype(np.int32),
        "island": np.array([island for own in bags.islands for island in own] or [0], dtype=np.uint64),
        "pace": np.array(bags.paces),
        "quick": np.array(bags.quick, dtype=np.uint64),
    }


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
