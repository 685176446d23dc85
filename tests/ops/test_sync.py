"""Sync engines against one plain optimizer: uneven work, clipping, EMA, schedules, bad samples, NaN, resizing.

FlatSync's ranks are threads; its sum starts at the end, after the last backward or inside it, in turns; its gradients
are each worker's own, or those of one, two or more nodes. DeepSpeed needs torch.distributed's default group: its ranks
are processes that run this file as a script, once for all cases.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ops.comm.collectives import Group
from ops.comm.groups import Groups
from ops.config import OptimizerConfig, ProdigyConfig
from ops.shards import Distance, ShardState, cut
from ops.update.engine import StepIncomplete, Sync
from ops.update.flat_vector import initial_shard, trainable
from ops.update.gradient_places import GradientMemory, GradientsOf
from ops.update.optimizer import lr_at
from ops.update.shard_export import CopyWait
from ops.update.sync import FlatSync, _round_into
from ops.update.sync_places import StateLocation
from ops.waiting import CancelToken
from tests.long import in_default_run
from tests.nccl_rules import nccl_rules
from tests.ops.exported import own_shard
from tests.ops.peers import HostCopies, in_host, in_peers
from tests.ops.placed import placed

torch.set_num_threads(1)
REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 120.0  # of a wait for others that come
SUM_ELEMENTS = 40  # the 174 + 70 + 70 elements of Net are several buckets
SAMPLES, TOTAL_STEPS = 12, 20
# Against an fp64 reference after 8 steps of size 1e-2; fp32 alone is 2e-7 off.
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2}
_STEEP = 485  # what Muon multiplies a rounding error by where a singular value is tiny: 3.4445^5


class Net(nn.Module):
    """Two branches of odd sizes: a sample touches one, so ranks hold gradients of different parameters. Stem and left
    branch are its blocks."""

    fetched = None

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 13)
        self.left = nn.Linear(13, 5)
        self.right = nn.Linear(13, 5)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def all_blocks(self) -> list[nn.Module]:
        return [self.stem, self.left]

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return (self.left if left else self.right)(torch.tanh(self.stem(x)))


generator = torch.Generator().manual_seed(0)
torch.manual_seed(0)
START = Net().double()
X = torch.randn(SAMPLES, 7, dtype=torch.float64, generator=generator)
Y = torch.randn(SAMPLES, 5, dtype=torch.float64, generator=generator)


def sample_loss(model: nn.Module, index: int, step: int) -> Tensor:
    """One sample's part of the step's loss: weighted for all samples of the step, known to every worker."""
    dtype = next(model.parameters()).dtype
    x, y = (X[index] + 0.1 * step).to(dtype), Y[index].to(dtype)
    return (model(x, index % 2 == 0) - y).square().sum() / (5 * SAMPLES)


@dataclass(frozen=True)
class Case:
    """A run: workers per generation, steps per generation, and what goes wrong."""

    sizes: tuple[int, ...]
    config: OptimizerConfig
    steps: int = 2
    bad: dict[int, set[int]] = field(default_factory=dict)  # step -> samples that failed to decode
    infinite: int = -1  # the step whose gradient is infinite on one worker


PLAIN = OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.0, ema_decay=0.0)
FULL = OptimizerConfig(
    learning_rate=1e-2, max_grad_norm=0.2, ema_decay=0.5, lr_scheduler="cosine", lr_warmup_steps=3, lr_min_ratio=0.1
)
PRODIGY = replace(FULL, kind="prodigy", learning_rate=1.0, betas=(0.9, 0.99), prodigy=ProdigyConfig(d0=1e-3))
SAFE_PRODIGY = replace(
    PRODIGY,
    weight_decay=0.1,
    prodigy=ProdigyConfig(d0=1e-3, d_coef=2.0, growth_rate=1.5, use_bias_correction=True, safeguard_warmup=True),
)
CASES = {
    "three workers, some without work": Case((3,), PLAIN, steps=4),
    "infinite gradient": Case((2,), FULL, infinite=1, steps=4),
    "2 -> 3 -> 1 -> 2 workers": Case((2, 3, 1, 2), FULL, bad={3: {1, 7}}, steps=2),
}
FLAT_ONLY = {
    "one worker": Case((1,), PLAIN, steps=4),
    "clip, cosine, EMA": Case((2,), FULL, steps=6),
    "bad samples": Case((3,), FULL, bad={1: {0, 5}, 2: {3}}, steps=4),
    "four workers": Case((4,), FULL, steps=4),
    "3 -> 4 -> 2 -> 1 workers": Case((3, 4, 2, 1), FULL, steps=2),
    "Muon, one worker": Case((1,), replace(PLAIN, kind="muon"), steps=4),
    "Muon, infinite gradient": Case((2,), replace(FULL, kind="muon"), infinite=1, steps=4),
    "Muon, 3 -> 4 -> 2 -> 1 workers": Case((3, 4, 2, 1), replace(FULL, kind="muon"), bad={3: {1, 7}}, steps=2),
    "Prodigy, infinite gradient": Case((2,), SAFE_PRODIGY, infinite=1, steps=8),
    "Prodigy, 3 -> 4 -> 2 -> 1 workers": Case((3, 4, 2, 1), PRODIGY, bad={3: {1, 7}}, steps=2),
}
ROUNDED = ("2 -> 3 -> 1 -> 2 workers", "Muon, infinite gradient", "Prodigy, 3 -> 4 -> 2 -> 1 workers")


def deal(step: int, size: int) -> list[list[int]]:
    """Samples of each worker: uneven, in changing order, and some workers have none."""
    order = np.random.default_rng(step).permutation(SAMPLES)
    workers = [r for r in range(size) if size < 3 or r != step % size]
    cuts = np.sort(np.random.default_rng(step + 99).integers(0, SAMPLES + 1, len(workers) - 1))
    shares: list[list[int]] = [[] for _ in range(size)]
    for worker, part in zip(workers, np.split(order, cuts)):
        shares[worker] = [int(i) for i in part]
    return shares


def run_generation(
    sync: Sync, model: nn.Module, case: Case, group: Group, shards: Sequence[ShardState] | None, first: int
) -> tuple[list[dict[str, Any]], ShardState]:
    """The steps of one generation on one rank, and the state it leaves."""
    sync.form(group, shards)
    records = []
    for step in range(first, first + case.steps):
        sync.begin_step()
        total, weight = 0.0, 0
        mine = deal(step, group.size)[group.rank]
        good = [i for i in mine if i not in case.bad.get(step, set())]
        start = ("at the end", "behind", "inside")[(step + group.rank) % 3 if isinstance(sync, FlatSync) else 0]
        for index in good:
            if start == "inside" and index == good[-1]:
                sync.watch_backward()
            loss = sample_loss(model, index, step)
            (loss * math.inf if step == case.infinite and index == 4 else loss).backward()
            total, weight = total + loss.item(), weight + 1
        if start != "at the end":
            sync.start_sum()
        phases: list[str] = []
        bad, last = len(mine) - weight, step == first + case.steps - 1
        result = sync.finish_step(step, total, weight, SAMPLES, phases.append, bad_weight=bad, export=last)
        skipped = ["reduce"] if isinstance(sync, FlatSync) else ["reduce", "gather"]  # DeepSpeed does all in one call
        expected = ["reduce", "update", "gather"] if result.applied else skipped
        assert phases == [*expected, "snapshot"] if last else phases == expected
        assert result.applied == (step != case.infinite)
        records.append(
            {
                "loss": result.loss,
                "norm": result.grad_norm,
                "lr": result.lr,
                "d": result.d,
                "applied": result.applied,
                "w": result.weight,
            }
        )
    assert result.export is not None
    result.export.wait()
    return records, result.export.shard


@dataclass
class Outcome:
    """What a run leaves on every rank of its last generation."""

    records: list[dict[str, Any]]
    weights: list[np.ndarray]
    state: ShardState


def flat_weights(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().double().flatten() for _, p in trainable(model)]).numpy()


def singular_values_near_one(matrix: Tensor) -> Tensor:
    """What five rounds of Muon's polynomial make of the singular values of a matrix, by its decomposition."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ values.diag() @ right


class PlainMuon:
    """Muon on whole matrices; its momentum has the name that torch's AdamW gives it."""

    def __init__(self, matrices: Sequence[nn.Parameter], config: OptimizerConfig) -> None:
        self.config = config
        self.state = {p: {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)} for p in matrices}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for p, state in self.state.items():
            state["exp_avg"] = 0.95 * state["exp_avg"] + 0.05 * p.grad
            ahead = 0.05 * p.grad + 0.95 * state["exp_avg"]
            p -= lr * self.config.weight_decay * p
            p -= lr * 0.2 * max(p.shape) ** 0.5 * singular_values_near_one(ahead)


class PlainProdigy:
    """Algorithm 4 of arXiv 2306.06101 as its authors' implementation has it, on one vector of all weights."""

    def __init__(self, parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> None:
        self.parameters, self.config, self.k = parameters, config, 0
        self.d = self.d_max = config.prodigy.d0
        self.numerator = 0.0
        self.p0 = self.flat()
        self.exp_avg, self.exp_avg_sq, self.s = (torch.zeros_like(self.p0) for _ in range(3))

    def flat(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.parameters])

    @torch.no_grad()
    def step(self, lr: float) -> None:
        d0, found, (beta1, beta2) = self.config.prodigy.d0, self.config.prodigy, self.config.betas
        p, g, d = self.flat(), torch.cat([p.grad.flatten() for p in self.parameters]), self.d
        self.k += 1
        dlr = d * lr
        if found.use_bias_correction:
            dlr *= (1 - beta2**self.k) ** 0.5 / (1 - beta1**self.k)
        self.exp_avg = beta1 * self.exp_avg + (1 - beta1) * d * g
        self.exp_avg_sq = beta2 * self.exp_avg_sq + (1 - beta2) * d**2 * g**2
        self.s = beta2**0.5 * self.s + d / d0 * (d if found.safeguard_warmup else dlr) * g
        along = (g.double() @ (self.p0 - p).double()).item()
        self.numerator = beta2**0.5 * self.numerator + d / d0 * dlr * along
        d_hat = found.d_coef * self.numerator / self.s.double().abs().sum().item()
        if d == d0:
            self.d = max(d, d_hat)
        self.d_max = max(self.d_max, d_hat)
        self.d = min(self.d_max, self.d * (found.growth_rate or math.inf))
        p = p - self.config.weight_decay * dlr * p
        p = p - dlr * self.exp_avg / (self.exp_avg_sq.sqrt() + self.d * self.config.adam_eps)
        for parameter, values in zip(self.parameters, p.split([p.numel() for p in self.parameters]), strict=True):
            parameter.copy_(values.view_as(parameter))


def reference(case: Case, dtype: torch.dtype = torch.float64) -> Outcome:
    """One process, torch's own AdamW and clipping."""
    model, config = copy.deepcopy(START).to(dtype), case.config
    parameters = [p for p in model.parameters() if p.requires_grad]
    prodigy = PlainProdigy(parameters, config) if config.kind == "prodigy" else None
    matrices = [model.stem.weight, model.left.weight] if config.kind == "muon" else []
    muon = PlainMuon(matrices, config)
    others = [p for p in parameters if not any(p is matrix for matrix in matrices)]
    optimizer = torch.optim.AdamW(
        others, betas=config.betas, eps=config.adam_eps, weight_decay=config.weight_decay, foreach=False
    )
    ema, updates, records = torch.from_numpy(flat_weights(model)), 0, []
    for step in range(case.steps * len(case.sizes)):
        model.zero_grad()
        good = [i for i in range(SAMPLES) if i not in case.bad.get(step, set())]
        loss = torch.stack([sample_loss(model, i, step) for i in good]).sum() * SAMPLES / len(good)
        loss.backward()
        lr = lr_at(config, step, TOTAL_STEPS)
        norm = torch.cat([p.grad.flatten() for p in parameters]).norm().item()
        applied = step != case.infinite
        used = lr * (prodigy.d if prodigy else 1.0)
        if applied:
            if config.max_grad_norm:
                torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = lr
            if prodigy:
                prodigy.step(lr)
            else:
                optimizer.step()
                muon.step(lr)
            updates += 1
            decay = min(config.ema_decay, (1 + updates) / (10 + updates))
            ema = decay * ema + (1 - decay) * torch.from_numpy(flat_weights(model))
        d = prodigy.d if prodigy else None
        records.append({"loss": loss.item(), "norm": norm, "lr": used, "d": d, "applied": applied, "w": len(good)})
    weights = flat_weights(model)
    arrays = {"master": weights}
    for name in ("exp_avg", "exp_avg_sq", "s", "p0") if prodigy else ():
        arrays[name] = getattr(prodigy, name).double().numpy()
    for name in () if prodigy else ("exp_avg", "exp_avg_sq"):
        states = {**optimizer.state, **muon.state}
        arrays[name] = torch.cat([states[p][name].flatten() for p in parameters]).numpy()
    if config.ema_decay:
        arrays["ema"] = ema.numpy()
    total = len(weights)
    distances = (Distance(d=prodigy.d, d_max=prodigy.d_max, numerator=prodigy.numerator),) if prodigy else ()
    state = ShardState(updates=updates, lo=0, hi=total, total=total, arrays=arrays, distances=distances)
    return Outcome(records, [weights], state)


def on_threads(
    size: int, work: Callable[[int, Group], Any], generation: int = 0, nodes: Sequence[int] | None = None
) -> list[Any]:
    store, token = dist.HashStore(), CancelToken()
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        groups = Groups(store, rank, tuple(range(size)), "gloo", generation, LIMIT_S, token, "127.0.0.1", nodes)
        try:
            results[rank] = work(rank, groups.world_group())
        except BaseException as error:
            errors.append(error)
            token.set(str(error))
        finally:
            groups.close()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    if errors:
        raise errors[0]
    return results


# The gradients, and the node of each of four workers.
MEMORIES: dict[str, tuple[GradientMemory | GradientsOf, tuple[int, ...]]] = {
    "own": ("own", (0, 0, 0, 0)),
    "one node": ("node", (0, 0, 0, 0)),
    "two nodes": ("node", (0, 0, 0, 1)),
    "three nodes": ("node", (0, 1, 1, 2)),
    "own, state in host memory": ("own", (0, 0, 0, 0)),
    "one node, state in host memory": ("node", (0, 0, 0, 0)),
    "one node of GPUs": (in_peers, (0, 0, 0, 0)),
    "three nodes of GPUs, state in host memory": (in_peers, (0, 1, 1, 2)),
    "two nodes of GPUs that do not reach each other": (in_host, (0, 0, 0, 1)),
}


def run_flat(case: Case, dtype: torch.dtype = torch.float32, memory: str = "own") -> Outcome:
    gradients, nodes = MEMORIES[memory]
    models = [copy.deepcopy(START).to(dtype) for _ in range(max(case.sizes))]
    beside: dict[str, Any] = {"copies": HostCopies(), "update_elements": 32} if "host" in memory else {}
    places = placed(gradients, state="host" if "host" in memory else "device", sum_elements=SUM_ELEMENTS)
    syncs = [FlatSync(model, case.config, TOTAL_STEPS, places=places, **beside) for model in models]
    records: list[dict[str, Any]] = []
    shards: list[ShardState] | None = None
    for number, size in enumerate(case.sizes):
        first, given = number * case.steps, shards

        def work(rank: int, group: Group, first: int = first, given: list[ShardState] | None = given) -> Any:
            return run_generation(syncs[rank], models[rank], case, group, given, first)

        done = on_threads(size, work, generation=number, nodes=nodes[:size])
        for rank_records, _ in done:
            np.testing.assert_equal(rank_records, done[0][0])  # here NaN equals NaN
        records += done[0][0]
        shards = [shard for _, shard in done]
    assert shards is not None
    weights = [flat_weights(model) for model in models[: case.sizes[-1]]]
    return Outcome(records, weights, cut(shards, 0, shards[0].total))


# DeepSpeed: processes that run this file ----------------------------------------------------------------------------


def save_shard(folder: Path, key: str, shard: ShardState) -> None:
    meta = np.array([shard.updates, shard.lo, shard.hi, shard.total])
    np.savez(folder / f"{key}.npz", meta=meta, **shard.arrays)


def load_shard(folder: Path, key: str) -> ShardState:
    with np.load(folder / f"{key}.npz") as file:
        step, lo, hi, total = (int(n) for n in file["meta"])
        return ShardState(
            updates=step, lo=lo, hi=hi, total=total, arrays={n: file[n] for n in file.files if n != "meta"}
        )


def deepspeed_ranks(port: int, folder: Path) -> None:
    """Three processes, for which DeepSpeed and the compiler that it wants are imported once. Does not return."""
    from ops.update.deepspeed_sync import _prepare_environment

    _prepare_environment(torch.device("cpu"))
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  decorates with torch.compile, imported by `initialize`

    gc.freeze()
    children = []
    for rank in range(3):
        if (child := os.fork()) == 0:
            deepspeed_rank(rank, port, folder)
            sys.exit()
        children.append(child)
    ends = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(ends))


def deepspeed_rank(rank: int, port: int, folder: Path) -> None:
    from ops.update.deepspeed_sync import DeepSpeedSync

    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=300))
    generation = 0
    descriptors = []
    for number, case in enumerate(CASES.values()):
        model = copy.deepcopy(START).float()
        sync = DeepSpeedSync(model, case.config, TOTAL_STEPS)
        records, before = [], None
        for index, size in enumerate(case.sizes):
            generation += 1
            if rank < size:
                shards = None
                if before is not None:
                    store.wait([f"{before[0]}/{r}" for r in range(before[1])])
                    shards = [load_shard(folder, f"{before[0]}-{r}") for r in range(before[1])]
                groups = Groups(store, rank, tuple(range(size)), "gloo", generation, 300.0, CancelToken(), "127.0.0.1")
                done, shard = run_generation(sync, model, case, groups.world_group(), shards, index * case.steps)
                groups.close()
                records += done
                save_shard(folder, f"{generation}-{rank}", shard)
                np.save(folder / f"weights-{number}-{rank}.npy", flat_weights(model))
                store.set(f"{generation}/{rank}", "done")
            before = (generation, size)
        del sync
        gc.collect()
        if rank == 0:
            (folder / f"records-{number}.json").write_text(json.dumps(records))
            (folder / f"last-{number}.json").write_text(json.dumps(before))
            descriptors.append(len(os.listdir("/proc/self/fd")))
    if rank == 0:
        (folder / "descriptors.json").write_text(json.dumps(descriptors))


@pytest.fixture(scope="module")
def deepspeed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, str(store.port), str(folder)]
    ranks = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output = ranks.communicate(timeout=380)[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
    assert ranks.returncode == 0, output[-3000:]
    return folder


def run_deepspeed(folder: Path, name: str) -> Outcome:
    number = list(CASES).index(name)
    generation, size = json.loads((folder / f"last-{number}.json").read_text())
    shards = [load_shard(folder, f"{generation}-{rank}") for rank in range(size)]
    weights = [np.load(folder / f"weights-{number}-{rank}.npy") for rank in range(size)]
    records = json.loads((folder / f"records-{number}.json").read_text())
    return Outcome(records, weights, cut(shards, 0, shards[0].total))


def assert_same_training(found: Outcome, expected: Outcome, case: Case, tolerance: float) -> None:
    assert [(r["applied"], r["w"]) for r in found.records] == [(r["applied"], r["w"]) for r in expected.records]
    for step, (one, other) in enumerate(zip(found.records, expected.records, strict=True)):
        if other["d"] is None:
            assert one["d"] is None and one["lr"] == pytest.approx(other["lr"], rel=1e-12)
        else:
            assert (one["d"], one["lr"]) == pytest.approx((other["d"], other["lr"]), rel=10 * tolerance)
        assert one["loss"] == pytest.approx(other["loss"], rel=tolerance)
        if step == case.infinite:
            assert not math.isfinite(one["norm"])
        else:
            assert one["norm"] == pytest.approx(other["norm"], rel=10 * tolerance)
    for weights in found.weights:
        np.testing.assert_array_equal(weights, found.weights[0], err_msg="workers hold different parameters")
        np.testing.assert_allclose(weights, expected.weights[0], rtol=0, atol=tolerance)
    assert found.state.updates == expected.state.updates and set(found.state.arrays) == set(expected.state.arrays)
    for name, array in expected.state.arrays.items():
        np.testing.assert_allclose(found.state.arrays[name], array, rtol=0, atol=tolerance, err_msg=name)
    for of_part, like in zip(found.state.distances, expected.state.distances, strict=True):
        assert astuple(of_part) == pytest.approx(astuple(like), rel=10 * tolerance)


RESIZED = ("2 -> 3 -> 1 -> 2 workers", "Muon, 3 -> 4 -> 2 -> 1 workers", "Prodigy, 3 -> 4 -> 2 -> 1 workers")
USUAL = {(name, torch.float64, "own") for name in (*CASES, *FLAT_ONLY)}  # fp64 hides least
USUAL |= {(name, torch.float64, memory) for name in RESIZED for memory in MEMORIES}
USUAL |= {
    (name, torch.float32, memory) for name in ROUNDED for memory in ("own", "three nodes of GPUs, state in host memory")
}


@pytest.mark.parametrize(
    ("name", "dtype", "memory"),
    in_default_run(USUAL, of=product((*CASES, *FLAT_ONLY), (torch.float64, torch.float32), MEMORIES)),
)
def test_flat_sync_equals_one_plain_optimizer(name: str, dtype: torch.dtype, memory: str) -> None:
    case = {**CASES, **FLAT_ONLY}[name]
    tolerance = TOLERANCE[dtype] * (_STEEP if case.config.kind == "muon" else 1)
    # Prodigy's d is 1e-3 off where its first small steps are rounded: beside an fp64 reference fp32 trains another way.
    expected = reference(case, dtype if case.config.kind == "prodigy" else torch.float64)
    assert_same_training(run_flat(case, dtype, memory), expected, case, tolerance)


@pytest.mark.parametrize(
    "name", ["three workers, some without work", "3 -> 4 -> 2 -> 1 workers", "2 -> 3 -> 1 -> 2 workers"]
)
def test_by_nccls_rules_gradients_and_parameters_go_in_one_equal_collective_each(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No range of another length, which NCCL would reduce to one rank after the other or gather through a copy."""
    case = {**CASES, **FLAT_ONLY}[name]
    with nccl_rules(monkeypatch) as rules:
        found = run_flat(case)
    assert_same_training(found, reference(case), case, TOLERANCE[torch.float32])
    crowds = [size for size in case.sizes if size > 1]
    continued = crowds[1:] if case.sizes[0] > 1 else crowds
    assert rules.kinds == {
        "allreduce": (case.steps + 1) * sum(crowds),  # of norm, loss and weights; before, of where gradients lie
        "reduce_scatter": case.steps * sum(crowds),
        "all_gather": case.steps * sum(crowds) + sum(continued),
        "broadcast": sum(crowds) - sum(continued),
    }


@pytest.mark.timeout(400)  # importing DeepSpeed takes seconds, or a minute on a machine that is busy otherwise
@pytest.mark.parametrize("name", CASES)
def test_deepspeed_sync_equals_one_plain_adamw(deepspeed_folder: Path, name: str) -> None:
    case = CASES[name]
    assert_same_training(run_deepspeed(deepspeed_folder, name), reference(case), case, TOLERANCE[torch.float32])


@pytest.mark.timeout(400)
def test_deepspeed_generations_do_not_pile_up_descriptors(deepspeed_folder: Path) -> None:
    counts = json.loads((deepspeed_folder / "descriptors.json").read_text())
    assert counts[-1] <= counts[0] + 12, f"open files after each case: {counts}"


@pytest.mark.parametrize(
    "memory", ["own", "two nodes", "own, state in host memory", "three nodes of GPUs, state in host memory"]
)
def test_bfloat16_parameters_accumulate_and_update_in_fp32(memory: str) -> None:
    case = FLAT_ONLY["four workers"]
    outcome = run_flat(case, torch.bfloat16, memory)
    master = outcome.state.arrays["master"]
    assert master.dtype == np.float32
    rounded = torch.from_numpy(master).bfloat16().double().numpy()
    np.testing.assert_array_equal(outcome.weights[0], rounded)
    np.testing.assert_allclose(outcome.weights[0], reference(case).weights[0], atol=TOLERANCE[torch.bfloat16], rtol=0)


def test_what_a_device_gets_back_leaves_a_part_alone_that_saw_nothing() -> None:
    """The room for what goes back to a device has other values before."""
    model = copy.deepcopy(START).bfloat16()
    sync = FlatSync(
        model,
        FULL,
        TOTAL_STEPS,
        places=placed(state="host"),
        copies=HostCopies(),
        update_elements=13,
        parts=("stem", "left", "right"),
    )
    sync.form(Group.solo(), None)
    sync.begin_step()
    model.left(torch.relu(model.stem(X[0].bfloat16()))).square().sum().backward()
    sync.finish_step(0, 1.0, 1.0, 1.0, phase=lambda name: None, part_weights=[1.0, 1.0, 0.0])
    first = dict(copy.deepcopy(START).bfloat16().named_parameters())
    moved = {name: not torch.equal(now, first[name]) for name, now in trainable(model)}
    assert moved == {name: not name.startswith("right") for name in moved}


@pytest.mark.parametrize("gradients", ["own", "node"])
def test_bfloat16_gradients_of_many_passes_do_not_lose_small_parts(gradients: GradientMemory) -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    sync = FlatSync(model, PLAIN, TOTAL_STEPS, places=placed(gradients=gradients, sum_elements=SUM_ELEMENTS))
    sync.form(Group.solo(), None)
    sync.begin_step()
    for _ in range(1000):  # a bf16 sum stops growing at 256
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    assert sync.gradient().tolist() == [1000.0]


@pytest.mark.parametrize("config", [FULL, PRODIGY], ids=lambda config: config.kind)
def test_shards_of_any_cut_continue_bit_equal_at_the_same_size(config: OptimizerConfig) -> None:
    case = Case((2, 2), config, steps=3)
    whole = run_flat(Case((2,), config, steps=6))
    np.testing.assert_array_equal(run_flat(case).weights[0], whole.weights[0])


@pytest.mark.parametrize("config", [FULL, PRODIGY], ids=lambda config: config.kind)
def test_state_in_host_memory_gives_the_same_bits_and_continues_from_either_place(config: OptimizerConfig) -> None:
    """On a CPU both places compute alike, so whatever is lost or taken twice would show."""
    case = Case((3, 2), config, steps=3)
    device, host = run_flat(case), run_flat(case, memory="own, state in host memory")
    for one, other in zip(device.weights, host.weights, strict=True):
        np.testing.assert_array_equal(one, other)
    assert device.state.arrays.keys() == host.state.arrays.keys()
    for name, array in device.state.arrays.items():
        np.testing.assert_array_equal(array, host.state.arrays[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_moves_between_host_memory_and_device_in_the_middle_of_a_run(dtype: torch.dtype) -> None:
    def run(*places: StateLocation) -> ShardState:
        shards: list[ShardState] | None = None
        for number, place in enumerate(places):
            model = copy.deepcopy(START).to(dtype)
            sync = FlatSync(model, FULL, TOTAL_STEPS, places=placed(state=place, sum_elements=SUM_ELEMENTS))
            _, shard = run_generation(sync, model, Case((1,), FULL, steps=2), Group.solo(), shards, 2 * number)
            shards = [shard]
            np.testing.assert_array_equal(
                flat_weights(model), torch.from_numpy(shard.arrays["master"]).to(dtype).double().numpy()
            )
        assert shards is not None
        return shards[0]

    whole, moved = run("device", "device", "device"), run("host", "device", "host")
    for name, array in whole.arrays.items():
        np.testing.assert_array_equal(array, moved.arrays[name])


def test_export_is_a_copy() -> None:
    model = copy.deepcopy(START).float()
    sync = FlatSync(model, FULL, TOTAL_STEPS, places=placed(sum_elements=SUM_ELEMENTS))
    sync.form(Group.solo(), None)
    exported = own_shard(sync)
    before = {name: array.copy() for name, array in exported.arrays.items()}
    sync.begin_step()
    sample_loss(model, 0, 0).backward()
    sync.finish_step(0, 1.0, SAMPLES, SAMPLES, lambda phase: None)
    for name, array in exported.arrays.items():
        np.testing.assert_array_equal(array, before[name])


def test_an_update_waits_for_the_copy_of_the_state_that_it_changes() -> None:
    """The copy begins after one step and reads nothing before the next update asks for it."""
    model = copy.deepcopy(START).float()
    sync = FlatSync(model, FULL, TOTAL_STEPS, places=placed(sum_elements=SUM_ELEMENTS))
    late = LateCopy()
    sync.state.copy_arrays = late
    sync.form(Group.solo(), None)
    for step in range(2):
        sync.begin_step()
        sample_loss(model, 0, step).backward()
        result = sync.finish_step(step, 1.0, SAMPLES, SAMPLES, lambda phase: None, export=step == 0)
        if step == 0:
            before, export = flat_weights(model), result.export
            assert export is not None and late.waited == 0 and np.isnan(export.shard.arrays["master"]).all()
    assert result.export is None and result.held_up_s >= late.takes_s
    assert late.waited == 1 and sync.updates == 2 and export.shard.updates == 1
    assert not np.array_equal(before, flat_weights(model))
    np.testing.assert_array_equal(export.shard.arrays["master"], before)
    sync.begin_export(1)
    sync.begin_export(1)
    assert late.waited == 2, "two copies at once: the update would wait for the later one alone"
    sync.form(Group.solo(), [export.shard])
    assert late.waited == 3, "a state that is replaced has been read, too"


class LateCopy:
    """Copies when somebody waits for them."""

    takes_s = 0.02

    def __init__(self) -> None:
        self.waited = 0

    def __call__(self, arrays: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> CopyWait:
        for target in into.values():
            target.fill_(math.nan)

        def wait() -> None:
            time.sleep(self.takes_s)
            self.waited += 1
            for name, array in arrays.items():
                into[name].copy_(array)

        return wait

    def release(self) -> None: ...


@pytest.mark.parametrize("gradients", ["own", "node"])
def test_a_step_without_a_single_good_sample_changes_nothing(gradients: GradientMemory) -> None:
    model = copy.deepcopy(START).float()
    sync = FlatSync(model, FULL, TOTAL_STEPS, places=placed(gradients=gradients, sum_elements=SUM_ELEMENTS))
    sync.form(Group.solo(), None)
    before = flat_weights(model)
    sync.begin_step()
    result = sync.finish_step(0, 0.0, 0, SAMPLES, lambda phase: None, bad_weight=SAMPLES)
    assert not result.applied and sync.updates == 0
    np.testing.assert_array_equal(flat_weights(model), before)


@pytest.mark.parametrize("gradients", ["own", "node"])
def test_the_norm_of_a_million_numbers_is_that_of_fp64(gradients: GradientMemory) -> None:
    """By which all are clipped: it may not depend on how many a worker has, nor on where they lie."""
    module = nn.Linear(1 << 10, 1 << 10, bias=False)
    sync = FlatSync(module, PLAIN, TOTAL_STEPS, places=placed(gradients=gradients))
    sync.form(Group.solo(), None)
    sync.begin_step()
    given = torch.randn(1 << 10, 1 << 10, generator=torch.Generator().manual_seed(1))
    (module.weight * given).sum().backward()
    found = sync.finish_step(0, loss=1.0, weight=1.0, planned_weight=1.0, phase=lambda _: None).grad_norm
    sync.leave()
    assert found == pytest.approx(given.double().norm().item(), rel=1e-6)


def test_a_step_whose_samples_are_not_all_accounted_for_is_applied_by_no_worker() -> None:
    """Rank 1 has lost a sample and does not know it: everybody sees the sum, nobody updates."""
    models = [copy.deepcopy(START).float() for _ in range(2)]

    def work(rank: int, group: Group) -> None:
        sync = FlatSync(models[rank], FULL, TOTAL_STEPS, places=placed(sum_elements=SUM_ELEMENTS))
        sync.form(group, None)
        sync.begin_step()
        share = SAMPLES // 2
        for index in range(rank * share, rank * share + share - rank):
            sample_loss(models[rank], index, 0).backward()
        with pytest.raises(StepIncomplete, match=f"good samples of weight {SAMPLES - 2} and bad ones of 1"):
            sync.finish_step(0, 1.0, share - 1, SAMPLES, lambda phase: None, bad_weight=1 - rank)
        assert sync.updates == 0

    on_threads(2, work)
    for model in models:
        np.testing.assert_array_equal(flat_weights(model), flat_weights(START.float()))


def test_fresh_start_takes_the_weights_of_rank_0() -> None:
    models = [copy.deepcopy(START).float() for _ in range(3)]
    for rank, model in enumerate(models):
        with torch.no_grad():
            model.stem.weight.add_(rank)
    on_threads(
        3,
        lambda rank, group: FlatSync(models[rank], PLAIN, TOTAL_STEPS, places=placed(sum_elements=SUM_ELEMENTS)).form(
            group, None
        ),
    )
    for model in models:
        np.testing.assert_array_equal(flat_weights(model), flat_weights(START.float()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trained_sync_begins_again_from_the_first_weights(dtype: torch.dtype) -> None:
    model, first = copy.deepcopy(START).to(dtype), copy.deepcopy(START).to(dtype)
    sync = FlatSync(model, FULL, TOTAL_STEPS, places=placed(sum_elements=SUM_ELEMENTS))
    sync.form(Group.solo(), None)
    fresh = own_shard(sync)
    sync.begin_step()
    sample_loss(model, 0, 0).backward()
    sync.finish_step(0, 1.0, SAMPLES, SAMPLES, lambda phase: None)
    assert not np.array_equal(flat_weights(model), flat_weights(first))
    sync.form(Group.solo(), [initial_shard(trainable(first), *part) for part in ((0, 100), (100, sync.total))])
    again = own_shard(sync)
    assert again.updates == 0
    np.testing.assert_array_equal(flat_weights(model), flat_weights(first))
    for name, array in fresh.arrays.items():
        np.testing.assert_array_equal(again.arrays[name], array)


@pytest.mark.parametrize("config", [FULL, PRODIGY], ids=lambda config: config.kind)
def test_what_is_trained_after_a_new_begin_is_what_was_trained_first(config: OptimizerConfig) -> None:
    """All of a state was lost: nothing that was learned by it, as Prodigy's d, goes on."""
    model, first = copy.deepcopy(START).float(), copy.deepcopy(START).float()
    sync = FlatSync(model, config, TOTAL_STEPS, places=placed(sum_elements=SUM_ELEMENTS))
    found = []
    for _ in range(2):
        sync.form(Group.solo(), [initial_shard(trainable(first), 0, sync.total)])
        for step in range(5):
            sync.begin_step()
            sum(sample_loss(model, index, step) for index in range(SAMPLES)).backward()
            sync.finish_step(step, 1.0, SAMPLES, SAMPLES, lambda phase: None)
        found.append((flat_weights(model), own_shard(sync).distances))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_state_of_another_model_and_mixed_dtypes_are_refused() -> None:
    sync = FlatSync(nn.Linear(3, 3), PLAIN, TOTAL_STEPS, places=placed(sum_elements=SUM_ELEMENTS))
    arrays = {name: np.zeros(500, np.float32) for name in ("master", "exp_avg", "exp_avg_sq")}
    with pytest.raises(ValueError, match="500 parameters, the model 12"):
        sync.form(Group.solo(), [ShardState(updates=1, lo=0, hi=500, total=500, arrays=arrays)])
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    with pytest.raises(ValueError, match="cast the module to one dtype"):
        FlatSync(mixed, PLAIN, TOTAL_STEPS, places=placed(sum_elements=SUM_ELEMENTS))
    with pytest.raises(ValueError, match="no trainable parameter"):
        FlatSync(nn.Linear(2, 2).requires_grad_(False), PLAIN, TOTAL_STEPS, places=placed(sum_elements=SUM_ELEMENTS))


if __name__ == "__main__":
    deepspeed_ranks(int(sys.argv[1]), Path(sys.argv[2]))


class Crossings(TorchDispatchMode):
    """Notes the dtype of what is copied to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            self.dtypes.append(args[1].dtype)
        return func(*args, **(kwargs or {}))


def test_weights_on_the_host_are_rounded_before_they_leave_the_device() -> None:
    """PyTorch would copy fp32 into memory that it takes for that, which is not pinned, and round on the host."""
    with FakeTensorMode(), Crossings() as crossings:
        _round_into(torch.empty(8, dtype=torch.bfloat16), torch.empty(8, device="cuda"))
    assert crossings.dtypes == [torch.bfloat16]
