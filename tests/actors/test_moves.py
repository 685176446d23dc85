"""A checkpoint that was written in one mode of memory goes on in any other, as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from actors.records.events import StepsLost
from actors.state.checkpoint_files import begin, load, seal, write_shard
from app.bench.lab import Lab
from ops.comm.collectives import Group
from ops.models.base.transformer import PackedTransformer
from ops.shards import ShardState, cut
from ops.update.engine import Sync
from ops.update.sync import FlatSync
from tests.ops.block_copies import in_buffers
from tests.ops.exported import own_shard
from tests.ops.peers import in_host, in_peers
from tests.ops.placed import placed
from tests.ops.test_node_parameters import OPTIMIZER, model, on_ranks, passes

FP32 = 1e-5
SAMPLES, TOTAL_STEPS = 4, 40
WRITTEN, RESUMED = 2, 2  # steps before the checkpoint, and after it
Make = Callable[[PackedTransformer], Sync]


def flat(**places: object) -> Make:
    return lambda module: FlatSync(module, OPTIMIZER, TOTAL_STEPS, places=placed(**places))  # type: ignore[arg-type]


def deepspeed(module: PackedTransformer) -> Sync:
    from ops.update.deepspeed_sync import DeepSpeedSync

    return DeepSpeedSync(module, OPTIMIZER, TOTAL_STEPS)


MODES: dict[str, Make] = {
    "own": flat(),
    "node, host state": flat(gradients="node", state="host"),
    "parts of GPUs, host state, blocks fetched": flat(gradients=in_peers, state="host", parameters=in_buffers),
    "beside GPUs": flat(gradients=in_host),
    "own, host state": flat(state="host"),
    "node": flat(gradients="node"),
    "parts of GPUs": flat(gradients=in_peers),
    "node, parameters too": flat(gradients="node", state="host", parameters="node"),
    "deepspeed": deepspeed,
}
ROUND = list(pairwise([*list(MODES)[:4], "own"]))  # each of four to the next


def steps(
    make: Make, nodes: Sequence[int], first: int, count: int, shards: Sequence[ShardState] | None
) -> tuple[list[float], list[ShardState]]:
    """Losses of `count` steps on workers of these nodes, and the state after them."""
    losses = [[0.0] * len(nodes) for _ in range(count)]
    written: dict[int, ShardState] = {}
    dits = [model("wan") for _ in nodes]  # here: threads would draw from one seed

    def work(rank: int, group: Group) -> None:
        dit = dits[rank]
        sync = make(dit)
        sync.form(group, shards)
        for step in range(count):
            sync.begin_step()
            mine = range(rank, SAMPLES, len(nodes))
            losses[step][rank] = sum(
                passes(dit, "wan", False, 0.5 + 0.2 * sample + 0.01 * (first + step)) for sample in mine
            )
            done = sync.finish_step(first + step, 1.0, len(mine), SAMPLES, lambda phase: None)
            assert done.applied
        written[rank] = own_shard(sync)
        group.barrier()
        sync.leave()

    if len(nodes) == 1:
        work(0, Group.solo())
        if dist.is_initialized():  # DeepSpeed's
            dist.destroy_process_group()
    else:
        on_ranks(nodes, first, work)
    return [sum(each) for each in losses], [written[rank] for rank in range(len(nodes))]


def on_disk(folder: Path, step: int, shards: Sequence[ShardState]) -> Sequence[ShardState]:
    """What is read of a checkpoint of them."""
    begin(folder)
    seal(folder, {"step": step}, files=[write_shard(folder, shard) for shard in shards])
    return load(folder)[1]


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], ShardState]:
    """One worker with all of it beside its weights, which nobody stops."""
    losses, (last,) = steps(MODES["own"], [0], 0, WRITTEN + RESUMED, None)
    assert len(set(losses)) == WRITTEN + RESUMED
    return losses, last


@pytest.mark.parametrize("moves", [ROUND, pytest.param(list(permutations(MODES, 2)), marks=pytest.mark.long)], ids=len)
def test_a_checkpoint_of_any_mode_goes_on_in_any_other(
    moves: list[tuple[str, str]], expected: tuple[list[float], ShardState], tmp_path: Path
) -> None:
    losses, last = expected
    written = {}
    for number, name in enumerate(dict.fromkeys(one for one, _ in moves)):
        nodes = [0] if name == "deepspeed" else [0, 0]
        first, shards = steps(MODES[name], nodes, 0, WRITTEN, None)
        assert first == pytest.approx(losses[:WRITTEN], rel=FP32), name
        written[name] = on_disk(tmp_path / f"step-{number}", WRITTEN - 1, shards)
    for one, other in moves:
        nodes = [0] if other == "deepspeed" else [0, 0, 1]
        found, shards = steps(MODES[other], nodes, WRITTEN, RESUMED, written[one])
        assert found == pytest.approx(losses[WRITTEN:], rel=FP32), f"{one} -> {other}"
        state = cut(shards, 0, last.total)
        assert state.updates == last.updates
        for name, array in last.arrays.items():
            difference = torch.from_numpy(state.arrays[name] - array).norm() / torch.from_numpy(array).norm()
            assert difference < 10 * FP32, f"{name} of {one} -> {other}"


# -- whole runs --------------------------------------------------------------------------------------------------------

SETTINGS: tuple[dict[str, object], ...] = (
    {"memory": {"gradients": "own", "state": "device"}},
    {"memory": {"gradients": "node", "state": "host"}},
    {"sync": "deepspeed"},
    {"memory": {"gradients": "node", "state": "host", "parameters": "node"}},
    {"memory": {"gradients": "own", "state": "host"}},
    {"memory": {"gradients": "node", "state": "device"}},
    {"memory": {"gradients": "own", "state": "device", "parameters": "node"}},
)
DIT = {"num_heads": 6, "gradient_checkpointing": True}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab")) as made:
        made.add_node(workers=2)
        made.add_node(workers=1)
        yield made


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_a_run_that_is_resumed_in_one_mode_after_the_other_trains_as_one_that_is_not(lab: Lab) -> None:
    config = partial(lab.config, model={"dit": DIT}, checkpoint={"every": 3})
    alone = lab.start(config("undisturbed", train={"steps": 3 * len(SETTINGS)}, workers={"min": 1, "max": 1}))
    assert alone.join(600).code == 0
    losses = []
    for number, settings in enumerate(SETTINGS, start=1):
        workers = 2 + number % 2
        run = lab.start(
            config("moved", train={"steps": 3 * number, **settings}, workers={"min": workers, "max": workers})
        )
        assert run.join(600).code == 0 and not [event for event in run.events if isinstance(event, StepsLost)]
        assert run.steps() == list(range(3 * number - 3, 3 * number)), f"resumed with {settings}"
        losses += run.losses()
    assert losses == pytest.approx(alone.losses(), rel=FP32)
