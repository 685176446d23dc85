"""What training takes of a node's own memory is known before the first step, and a node without it is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.config import SnapshotConfig
from actors.messages import WorkerInfo
from actors.plan.types import PlanError
from actors.state.hosts import (
    aside_gib,
    asides_at_once,
    host_need,
    needs_of_hosts,
    offered_gib,
    refuse_short_hosts,
    refuse_short_stores,
)
from actors.state.keeper import forecast_bytes

STATE_GIB = 212.0  # of 14.2 thousand million weights at 16 bytes


def info(worker: str, node: str, room_gib: float | None, on_host: bool = True, gradients: str = "own") -> WorkerInfo:
    return WorkerInfo(
        worker=worker,
        node=node,
        host=f"host-{node}",
        pid=1,
        device="cuda:0",
        gpu_memory_gib=80.0,
        gradients=gradients,
        state_on_host=on_host,
        host_room_gib=room_gib,
    )


def test_a_node_holds_its_part_of_the_state_its_snapshots_and_what_it_keeps_for_others() -> None:
    need = host_need(
        STATE_GIB, 16, SnapshotConfig(), here=8, workers=16, nodes=2, state_on_host=True, node_gradient=True
    )
    assert need.state == STATE_GIB / 2 and need.gradient == STATE_GIB / 4
    weights = int(STATE_GIB * 2**30 / 16)
    assert need.keepers == pytest.approx(forecast_bytes(weights, ema=True, copies=1, num_keepers=2) / 2**30)
    assert need.store == 3 * STATE_GIB / 2 and need.copies == STATE_GIB / 2
    assert need.total == pytest.approx(need.state + need.gradient + need.keepers + need.store + need.copies)


def test_a_gpu_copies_a_snapshot_while_the_last_one_is_handed_out() -> None:
    infos = [replace(info("w0", "a", 2000.0), publishes_later=beside) for beside in (False, True)]
    once, twice = (needs_of_hosts([one], STATE_GIB, 16, SnapshotConfig())[0][1] for one in infos)
    assert (once.copies, twice.copies) == (STATE_GIB, 2 * STATE_GIB)


def test_without_snapshots_and_with_state_on_the_gpu_little_is_left() -> None:
    off = SnapshotConfig(enabled=False)
    need = host_need(STATE_GIB, 16, off, here=8, workers=8, nodes=1, state_on_host=False, node_gradient=False)
    assert (need.state, need.gradient, need.keepers) == (0, 0, 0)
    assert "keepers" not in need.describe() and "object store" in need.describe()


def test_one_sample_is_counted_on_every_node_and_more_are_made_where_there_is_room() -> None:
    """In bf16 beside a GPU: the weights of the sample, and the trained ones in whose place they are."""
    gib = aside_gib(STATE_GIB, 16, 2, gpu=True)
    assert gib == STATE_GIB / 4 and aside_gib(STATE_GIB, 16, 4, gpu=False) == STATE_GIB / 4
    infos = [info("w0", "a", 2000.0), info("w1", "b", 1000.0), info("w2", "c", None)]
    plain = needs_of_hosts(infos, STATE_GIB, 16, SnapshotConfig())
    found = needs_of_hosts(infos, STATE_GIB, 16, SnapshotConfig(), gib)
    for (_, without, _), (_, need, _) in zip(plain, found, strict=True):
        assert need.total == pytest.approx(without.total + gib) and f"weights of a sample {gib:.2f}" in need.describe()
    spare = 1000.0 - found[1][1].total
    assert asides_at_once(found) == 1 + int(spare / gib) > 1
    assert asides_at_once(plain) is None and asides_at_once(found[2:]) is None
    short = [(node, need, need.total - 1) for node, need, _ in found]
    with pytest.raises(PlanError, match=r"set snapshot\.enabled: false or sample\.every: 0, or train fewer"):
        refuse_short_hosts(short)


def test_every_short_node_is_named_with_what_it_needs_and_what_helps() -> None:
    infos = [info(f"w{n}", "abc"[n // 2], (2000.0, 300.0, 400.0)[n // 2] - n) for n in range(6)]
    found = needs_of_hosts(infos, STATE_GIB, 16, SnapshotConfig())
    assert [(node, room) for node, _, room in found] == [
        ("node host-a", 1999.0),
        ("node host-b", 297.0),
        ("node host-c", 395.0),
    ]
    with pytest.raises(PlanError) as refused:
        refuse_short_hosts(found)
    first, second = str(refused.value).split("\n")
    assert first.startswith("node host-b has 297.0 GiB") and second.startswith("node host-c has 395.0 GiB")
    assert "takes 565.3 GiB" in first and "lower snapshot.copies" in first


def test_a_node_that_says_nothing_of_its_memory_is_not_refused() -> None:
    infos = [info("w0", "a", None), info("w1", "b", 1e6)]
    refuse_short_hosts(needs_of_hosts(infos, STATE_GIB, 16, SnapshotConfig()))


@pytest.mark.parametrize(("gradients", "gib"), [("own", 0.0), ("node", 0.0), ("host", STATE_GIB / 4)])
def test_gpus_that_add_into_one_gradient_hold_it_themselves_unless_it_lies_in_host_memory(
    gradients: str, gib: float
) -> None:
    ((_, need, _),) = needs_of_hosts([info("w0", "a", 1e6, gradients=gradients)], STATE_GIB, 16, SnapshotConfig())
    assert need.gradient == gib


@pytest.mark.parametrize(
    ("store_gib", "shared_gib", "says"),
    [
        (None, None, ""),  # Ray does not say
        (320.0, 500.0, ""),
        (320.0, 330.0, ""),
        (320.0, None, ""),  # no /dev/shm here
        (317.0, 500.0, "an object store of 317.00 GiB, and snapshots of its 2 workers take 318.00 GiB of it"),
        (400.0, 0.0625, "a /dev/shm of 0.06 GiB, less than its object store of 400.00 GiB"),
    ],
)
def test_a_node_whose_object_store_or_shared_memory_is_too_small_for_snapshots_is_named(
    store_gib: float | None, shared_gib: float | None, says: str
) -> None:
    assert offered_gib(STATE_GIB, 2, 4) == 318.0
    roomy = [replace(info(f"w{n}", "a", None), store_gib=1e4, shared_gib=2e4) for n in (0, 1)]
    infos = [*roomy, *(replace(info(f"w{n}", "b", None), store_gib=store_gib, shared_gib=shared_gib) for n in (2, 3))]
    if not says:
        return refuse_short_stores(infos, STATE_GIB)
    with pytest.raises(PlanError) as refused:
        refuse_short_stores(infos, STATE_GIB)
    sentences = str(refused.value).split("\n")
    assert len(sentences) == 1 and sentences[0].startswith(f"node host-b has {says}")
    remedy = "--shm-size=400g" if "shm of" in says else f"--object-store-memory={int(1.25 * 318 * 2**30)}"
    assert remedy in sentences[0]


def test_a_small_state_goes_through_a_small_shared_memory_without_a_word() -> None:
    docker = replace(info("w0", "a", None), store_gib=7.0, shared_gib=0.0625)
    refuse_short_stores([docker], 0.02)


def test_weights_that_a_node_holds_for_its_gpus_are_named() -> None:
    infos = [replace(info(f"w{n}", "a", 700.0, on_host=False), host_weights_gib=57.0) for n in range(2)]
    off = SnapshotConfig(enabled=False)
    ((node, need, _),) = needs_of_hosts(infos, STATE_GIB, 16, off)
    assert need.parameters == 57.0 and "weights 57.00" in need.describe()
    without = replace(need, parameters=0.0)
    refuse_short_hosts([(node, without, without.total + 1)])
    with pytest.raises(PlanError, match=r"host-a has .* \(weights 57\.00"):
        refuse_short_hosts([(node, need, without.total + 1)])


def test_encoders_that_are_not_loaded_yet_count_once_for_all_workers_of_a_node() -> None:
    infos = [replace(info(f"w{i}", "ab"[i // 2], 2000.0), host_encoders_gib=10.6 if i < 2 else 0.0) for i in range(4)]
    needs = [need for _, need, _ in needs_of_hosts(infos, STATE_GIB, 16, SnapshotConfig())]
    assert [need.encoders for need in needs] == [10.6, 0.0]
    assert needs[0].total == pytest.approx(needs[1].total + 10.6) and "encoders 10.60" in needs[0].describe()
