"""Parameters once per node: the same training, bit for bit, and two blocks of them on a device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from actors.plan.costs.needs import Needs
from actors.plan.places import Places
from actors.planning.memory import MemoryForecast
from app.export.parity import our_velocity, parity_sample
from ops.comm.collectives import Group
from ops.comm.groups import Groups
from ops.config import OptimizerConfig
from ops.models.base.transformer import PackedTransformer
from ops.models.frozen_blocks import bytes_of_blocks
from ops.models.load import build_dit
from ops.shards import bytes_per_weight, cut
from ops.storages import StorageCount, storage_bytes
from ops.update.flat_vector import trainable
from ops.update.gradient_places import GradientMemory
from ops.update.node_parameters import NodeParameters
from ops.update.parameter_places import BlockBuffers, ParametersOf
from ops.update.parameters import ParameterMemory
from ops.update.sync import FlatSync
from ops.update.sync_places import StateLocation
from ops.waiting import CancelToken
from tests.families.registry import ONE_EACH, VARIANTS
from tests.ops.block_copies import LateCopies, in_buffers
from tests.ops.exported import own_shard
from tests.ops.placed import placed

GIB = 2**30
STEPS = 2
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, max_grad_norm=1.0, ema_decay=0.9)
WAYS: dict[str, ParameterMemory | ParametersOf] = {"node": "node", "buffers": in_buffers}


def model(case: str, layers: int = 2, dtype: torch.dtype = torch.float32) -> PackedTransformer:
    """Random in every parameter, so that each receives a gradient."""
    dit = build_dit(replace(VARIANTS[case], num_layers=layers, gradient_checkpointing=True), seed=0)
    torch.manual_seed(0)
    for parameter in dit.parameters():
        nn.init.normal_(parameter, std=0.1)
    assert isinstance(dit, PackedTransformer)
    return dit.to(dtype).train()


def passes(dit: PackedTransformer, case: str, autocast: bool, scale: float) -> float:
    sample = parity_sample(VARIANTS[case])
    dtype = next(dit.parameters()).dtype
    sample = replace(sample, latent=(scale * sample.latent).to(dtype), text=sample.text.to(dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        velocity = our_velocity(dit, sample)
    loss = velocity.float().square().mean()
    loss.backward()
    return float(loss.detach())


def look(dit: PackedTransformer, case: str) -> None:
    """Two steps of a sample: after the last block comes the first, and not the one before it as in training."""
    with torch.no_grad():
        for _ in range(2):
            our_velocity(dit, parity_sample(VARIANTS[case]))


def trained(
    case: str,
    parameters: ParameterMemory | ParametersOf,
    *,
    gradients: GradientMemory = "own",
    state: StateLocation = "device",
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    layers: int = 2,
    keeps: bool = False,
    optimizer: OptimizerConfig = OPTIMIZER,
) -> dict[str, Tensor]:
    """Losses, gradients before each end of a step, parameters and state of one worker after some steps."""
    dit = model(case, layers, dtype)
    dit.keeps_attention = keeps
    sync = FlatSync(dit, optimizer, STEPS, places=placed(gradients, parameters, state))
    sync.form(Group.solo(), None)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        sync.begin_step()
        losses = []
        for scale in (1.0, 0.5):  # passes add up
            if keeps:
                look(dit, case)
            sync.watch_backward()
            losses.append(passes(dit, case, autocast, scale))
        sync.start_sum()
        found[f"losses {step}"] = torch.tensor(losses)
        found[f"gradient {step}"] = sync.gradient().clone()
        assert sync.finish_step(step, 1.0, 1.0, 1.0, lambda phase: None).applied
    found |= {name: p.detach().clone() for name, p in trainable(dit)}
    shard = own_shard(sync)
    return found | {f"state {name}": torch.from_numpy(array) for name, array in shard.arrays.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert tensor.isfinite().all() and tensor.any(), f"{name} says nothing"


@pytest.mark.parametrize("case", ONE_EACH)
def test_every_family_trains_bit_for_bit_as_with_parameters_of_its_own(case: str) -> None:
    assert_equal(trained(case, in_buffers), trained(case, "replicated"))


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", VARIANTS)
def test_every_variant_trains_bit_for_bit_as_with_parameters_of_its_own(case: str, way: str) -> None:
    assert_equal(trained(case, WAYS[way]), trained(case, "replicated"))


@pytest.mark.parametrize(
    "places",
    [
        {"gradients": "node"},
        {"state": "host"},
        {"dtype": torch.bfloat16, "gradients": "node", "state": "host"},
        {"dtype": torch.float64},
        {"autocast": True},
    ],
    ids=lambda places: " ".join(map(str, places.values())),
)
@pytest.mark.parametrize("way", [pytest.param("node", marks=pytest.mark.long), "buffers"])
def test_it_is_so_wherever_gradients_and_state_lie(way: str, places: dict) -> None:
    assert_equal(trained("wan", WAYS[way], **places), trained("wan", "replicated", **places))


def test_it_is_so_with_muon_whose_updates_lie_where_gradients_do() -> None:
    muon, places = replace(OPTIMIZER, kind="muon"), {"gradients": "node", "state": "host", "dtype": torch.bfloat16}
    assert_equal(
        trained("wan", in_buffers, optimizer=muon, **places), trained("wan", "replicated", optimizer=muon, **places)
    )


@pytest.mark.parametrize("case", ["wan", "hunyuan"])
def test_so_it_is_where_attention_is_kept_and_samples_come_between_passes(case: str) -> None:
    """Operators of a block's two forwards are matched by their number, and not in both are as many weights fetched."""
    found = trained(case, in_buffers, layers=3, keeps=True)
    assert_equal(found, trained(case, "replicated", layers=3))


# -- several workers, in threads ---------------------------------------------------------------------------------------


def on_ranks(nodes: Sequence[int], generation: int, run: Callable[[int, Group], None]) -> None:
    """Every rank of a generation in a thread; raises the first error."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))
    errors: list[BaseException] = []
    everyone = tuple(range(len(nodes)))

    def guarded(rank: int) -> None:
        groups = Groups(store, rank, everyone, "gloo", generation, 60.0, CancelToken(), "127.0.0.1", nodes)
        try:
            run(rank, groups.world_group())
        except BaseException as error:
            errors.append(error)
            groups.abort()
        finally:
            groups.close()

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in everyone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def elastic_run(
    worlds: Sequence[Sequence[int]], ways: Sequence[ParameterMemory | ParametersOf], dtype: torch.dtype
) -> list[Tensor]:
    """A step in every generation, `worlds` being the nodes of its workers, which run uneven numbers of passes.
    Parameters of all workers after each step, which are the same ones."""
    dits = [model("wan", 2, dtype) for _ in ways]
    syncs = [FlatSync(dit, OPTIMIZER, 9, places=placed(parameters=way)) for dit, way in zip(dits, ways, strict=True)]
    shards = None
    found = []
    for step, nodes in enumerate(worlds):

        def run(rank: int, group: Group, step: int = step, shards: list | None = shards) -> None:
            sync, dit = syncs[rank], dits[rank]
            sync.form(group, shards)
            sync.begin_step()
            for number in range((rank + step) % 3):
                passes(dit, "wan", False, 1.0 + rank + 0.1 * number)
            sync.finish_step(step, 1.0, 1.0, float(group.size), lambda phase: None)
            group.barrier()
            sync.leave()

        on_ranks(nodes, step, run)
        here = range(len(nodes))
        values = [torch.cat([p.detach().flatten() for _, p in trainable(dits[rank])]) for rank in here]
        assert all(torch.equal(value, values[0]) for value in values)
        found.append(values[0].clone())
        shards = [own_shard(syncs[rank]) for rank in here]
        assert cut(shards, 0, syncs[0].total).updates == step + 1
    return found


WORLDS = ([0, 0, 1], [0, 1], [0, 0, 0], [0])


@pytest.mark.parametrize(
    ("ways", "dtype"),
    [
        (("node",) * 3, torch.bfloat16),
        (("replicated", in_buffers, "replicated"), torch.float32),  # where one has no room for all, none has them all
    ],
    ids=["node", "agreed"],
)
def test_workers_of_some_nodes_that_come_and_go_have_the_same_parameters(
    ways: Sequence[ParameterMemory | ParametersOf], dtype: torch.dtype
) -> None:
    found, expected = elastic_run(WORLDS, ways, dtype), elastic_run(WORLDS, ("replicated",) * 3, dtype)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_generation_that_had_no_room_leaves_nothing_that_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    dit = model("wan", 2)
    sync = FlatSync(dit, OPTIMIZER, 9, places=placed(parameters="node"))
    sync.form(Group.solo(), None)
    expected = {name: p.detach().clone() for name, p in trainable(dit)}
    shard = own_shard(sync)
    sync.leave()
    with monkeypatch.context() as short:
        short.setattr("ops.memory.node_memory.node_room", lambda: 10)
        with pytest.raises(MemoryError, match=r"no room for .* of shared memory \(parameters\)"):
            sync.form(Group.solo(), [shard])
    assert {name: p.shape for name, p in trainable(dit)} == {name: p.shape for name, p in expected.items()}
    sync.form(Group.solo(), [shard])
    for name, parameter in trainable(dit):
        assert torch.equal(parameter, expected[name]), name


# -- processes ---------------------------------------------------------------------------------------------------------


def run_processes(folder: Path, parameters: str, case: str, size: int = 3) -> list[tuple[int, list[str]]]:
    """Exit status and lines of each process of tests/ops/parameter_rank.py."""
    folder.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = [str(size), str(store.port), str(folder), parameters, case]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ops.parameter_rank", str(rank), *given],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=280)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs)]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["one", "2+1"])
def test_processes_train_bit_for_bit_as_with_parameters_of_their_own(case: str, tmp_path: Path) -> None:
    found, expected = (run_processes(tmp_path / way, way, case) for way in ("node", "replicated"))
    assert found == expected == [(0, expected[0][1])] * 3 and len(set(expected[0][1])) == 3


@pytest.mark.long
@pytest.mark.timeout(600)
def test_values_that_a_killed_process_left_half_written_are_trained_on_by_nobody(tmp_path: Path) -> None:
    """Two survivors do the step again as they do whose vector nobody has touched."""
    found, expected = (run_processes(tmp_path / way, way, "dies") for way in ("node", "replicated"))
    assert found == expected and expected.pop(1)[0] == -signal.SIGKILL
    assert [status for status, _ in expected] == [0, 0] and expected[0] == expected[1]
    digests = expected[0][1]
    assert digests[2] == "broken" and len(set(digests)) == 4


# -- what a device holds -----------------------------------------------------------------------------------------------


def in_two_buffers(
    dtype: torch.dtype = torch.float32,
) -> tuple[PackedTransformer, FlatSync, BlockBuffers, LateCopies]:
    dit = model("wan", 4, dtype)
    copies = LateCopies()
    buffers = BlockBuffers(copies)
    sync = FlatSync(
        dit, OPTIMIZER, 9, places=placed(parameters=lambda *given: NodeParameters(*given[:3], buffers, given[3]))
    )
    sync.form(Group.solo(), None)
    sync.begin_step()
    return dit, sync, buffers, copies


def test_a_device_holds_two_blocks_and_what_is_in_none() -> None:
    dit, sync, buffers, copies = in_two_buffers()
    blocks = bytes_of_blocks(dit, 4, frozen=False)
    assert [buffer.numel() for buffer in buffers.buffers] == [blocks[0]] * 2
    home = {p.untyped_storage().data_ptr() for block in dit.all_blocks() for p in block.parameters()}
    assert home == set(copies.pinned) == {sync.parameters.own.untyped_storage().data_ptr()}
    rest = sync.total - sum(blocks) // 4
    outside = [p for _, p in trainable(dit) if p.untyped_storage().data_ptr() not in home]
    assert sum(p.numel() for p in outside) == rest
    sync.parameters.settle()
    buffers.let_go()
    assert not copies.pinned and not buffers.buffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_as_much_as_is_forecast(dtype: torch.dtype) -> None:
    dit, sync, buffers, _ = in_two_buffers(dtype)
    home = sync.parameters.own.untyped_storage().data_ptr()
    held = [p for p in dit.parameters() if p.untyped_storage().data_ptr() != home]
    blocks = bytes_of_blocks(dit, dtype.itemsize, frozen=False)
    found = MemoryForecast(
        parameters=sync.total,
        trained=sync.total,
        parameter_bytes=dtype.itemsize,
        state_bytes=bytes_per_weight(OPTIMIZER),
        deepspeed=False,
        vae_gib=0.0,
        text_gib=0.0,
        image_gib=0.0,
        needs=Needs(),
        places=Places("host", "host", "node"),
        in_blocks=sum(blocks),
        largest_block=max(blocks),
    )
    assert found.states(1).total * GIB == storage_bytes([*held, *buffers.buffers])
    assert found.host_weights_gib * GIB == sync.parameters.own.untyped_storage().nbytes()


def test_a_pass_takes_no_more_than_where_all_parameters_are_there() -> None:
    peaks = []
    for way in ("replicated", in_buffers):
        dit = model("wan", 4)
        sync = FlatSync(dit, OPTIMIZER, 9, places=placed(parameters=way))
        sync.form(Group.solo(), None)
        sync.begin_step()
        with StorageCount() as count:
            passes(dit, "wan", False, 1.0)
        peaks.append(count.peak_bytes)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)


def test_the_next_block_is_copied_while_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    dit, sync, buffers, copies = in_two_buffers()
    missed: list[int] = []
    fetch = buffers.fetch

    def watched(block: int) -> list[Tensor]:
        if buffers._turn_of(block) is None:
            missed.append(block)
        return fetch(block)

    monkeypatch.setattr(buffers, "fetch", watched)
    passes(dit, "wan", False, 1.0)
    assert missed == [0, 1, 2, 3, 1, 0], "nobody knows the order yet; 3 and 2 are there when backward begins"
    missed.clear()
    copies.begun.clear()
    passes(dit, "wan", False, 1.0)
    assert not missed and len(copies.begun) == 4, "2 and 3 on the way there, 1 and 0 on the way back"
    sync.finish_step(0, 1.0, 1.0, 1.0, lambda phase: None)
    passes(dit, "wan", False, 1.0)
    assert missed == [0], "after an update nothing is there"


def test_samples_lend_the_blocks_other_weights_and_training_finds_its_own_again() -> None:
    dit, _, _, _ = in_two_buffers()
    sample = parity_sample(VARIANTS["wan"])
    own = {name: p.data for name, p in trainable(dit)}
    with torch.no_grad():
        before = our_velocity(dit, sample)
        for factor in (2.0, 0.5):
            for name, parameter in trainable(dit):
                parameter.data = factor * own[name]
            lent = our_velocity(dit, sample)
            plain = model("wan", 4)
            plain.load_state_dict({name: factor * tensor for name, tensor in own.items()})
            assert torch.equal(lent, our_velocity(plain, sample)) and not torch.equal(lent, before)
        for name, parameter in trainable(dit):
            parameter.data = own[name]
        assert torch.equal(our_velocity(dit, sample), before)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_modules_without_blocks_and_frozen_blocks_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"transformers that run in blocks, and Linear does not\. Set it to replicated"
    ):
        FlatSync(nn.Linear(2, 2), OPTIMIZER, 1, places=placed(parameters="node"))
    lora = build_dit(replace(VARIANTS["wan"], lora_rank=2), seed=0)
    with pytest.raises(ValueError, match=r"scale_shift_table of a block is frozen\. Build the module with"):
        FlatSync(lora, OPTIMIZER, 1, places=placed(parameters="node"))


@pytest.mark.parametrize("case", VARIANTS)
def test_the_blocks_of_a_family_are_what_it_runs(case: str) -> None:
    dit = model(case, 2)
    ran: list[nn.Module] = []

    def noted(block: nn.Module) -> Callable[..., object]:
        ran.append(block)
        return block

    dit.fetched = noted
    with torch.no_grad():
        our_velocity(dit, parity_sample(VARIANTS[case]))
    assert {id(block) for block in ran} == {id(block) for block in dit.all_blocks()} and ran
