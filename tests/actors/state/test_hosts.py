"""What training takes of a node's own memory is known before the first step, and a node without it is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.config import SnapshotConfig
from actors.messages import WorkerInfo
from actors.plan.types import PlanError
from actors.state.hosts import (
    HostNeed,
    aside_gib,
    asides_at_once,
    host_need,
    needs_of_hosts,
    refuse_short_hosts,
    refuse_short_stores,
    shortages,
)
from actors.state.keeper import forecast_bytes
from actors.state.pulling import AHEAD, PIECE

STATE_GIB = 212.0  # of 14.2 thousand million weights at 16 bytes


def info(worker: str, node: str, room_gib: float | None, on_host: bool = True, gradients: str = "own") -> WorkerInfo:
    return WorkerInfo(
        worker=worker,
        node=node,
        host=f"host-{node}",
        pid=1,
        device="cuda:0",
        gradients=gradients,
        state_on_host=on_host,
        host_room_gib=room_gib,
    )


def needs(*infos: WorkerInfo) -> list[HostNeed]:
    return [need for _, need, _ in needs_of_hosts(infos, STATE_GIB, 16, SnapshotConfig())]


def test_a_node_holds_two_versions_of_its_workers_state_and_of_what_it_copies() -> None:
    need = host_need(STATE_GIB, 16, SnapshotConfig(), here=8, workers=16, nodes=2, node_gradient=True)
    assert (need.state, need.copies, need.gradient) == (STATE_GIB, STATE_GIB, STATE_GIB / 4)
    assert need.total == need.state + need.copies + need.gradient + need.store
    weights = int(STATE_GIB * 2**30 / 16)
    forecast = forecast_bytes(weights, weight_bytes=16, copies=1, num_keepers=2) / 2**30
    assert need.state + need.copies == pytest.approx(forecast)


@pytest.mark.parametrize("copies", [1, 2, 5])
@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
def test_no_node_ever_needs_more_than_two_states(nodes: int, copies: int) -> None:
    """14 B weights on one node of eight GPUs: 424 GiB, not the 1,916 that copies in three places took."""
    snapshot = SnapshotConfig(copies=copies)
    need = host_need(STATE_GIB, 16, snapshot, here=8, workers=8 * nodes, nodes=nodes, node_gradient=False)
    assert need.state + need.copies <= 2 * STATE_GIB * 1.0001
    assert need.store <= 10, "pieces on their way, however large the state"
    if nodes == 1:
        assert need.total == 2 * STATE_GIB and need.describe() == "two versions of the optimizer state 424.00"


def test_without_snapshots_nothing_is_copied_for_others() -> None:
    off = SnapshotConfig(enabled=False)
    need = host_need(STATE_GIB, 16, off, here=8, workers=16, nodes=2, node_gradient=False)
    assert (need.state, need.copies, need.store) == (STATE_GIB, 0, 0)
    assert "copies" not in need.describe()


def test_pieces_on_their_way_are_those_of_each_worker_to_each_copy_and_those_that_come() -> None:
    """Eight workers send to two other nodes, and two shards come in."""
    snapshot = SnapshotConfig(copies=2)
    need = host_need(STATE_GIB, 16, snapshot, here=8, workers=24, nodes=3, node_gradient=False)
    assert need.store == AHEAD * PIECE * 16 / 2**30 * (8 * 2 + 2)


def test_of_workers_that_take_unlike_amounts_the_most_counts_for_their_node() -> None:
    """Weights lie on every node alike, whoever has told of them; encoders that one has loaded are still to be loaded by
    another."""
    told = [(1.0, 5.0, 0.25), (3.0, 2.0, 0.75), (2.0, 4.0, 0.5)]
    infos = [
        replace(info(f"w{n}", "aab"[n], None), host_weights_gib=weights, host_encoders_gib=encoders, uploads_gib=sent)
        for n, (weights, encoders, sent) in enumerate(told)
    ]
    assert [(need.parameters, need.encoders, need.uploads) for need in needs(*infos)] == [(3, 5, 1.5), (3, 4, 0.5)]


@pytest.mark.parametrize(("gradients", "shared"), [("own", False), ("node", True), ("host", True)])
def test_cpus_that_add_into_one_gradient_hold_it_in_the_node(gradients: str, shared: bool) -> None:
    cpu = replace(info("w0", "a", 1e6, gradients=gradients), device="cpu")
    assert needs(cpu)[0].gradient == (STATE_GIB / 4 if shared else 0.0)


def test_state_takes_as_much_of_the_node_wherever_it_is_updated() -> None:
    on_device, on_host = (needs(info("w0", "a", 1e6, on_host=on))[0] for on in (False, True))
    assert on_device == on_host and on_host.state == 2 * STATE_GIB


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
    tight = [(node, need, room and need.total - 0.5) for node, need, room in found]
    assert asides_at_once(tight) == 1, "a node without room for another makes one, not any number"
    short = [(node, need, need.total - 1) for node, need, _ in found]
    with pytest.raises(
        PlanError, match=r"snapshot\.copies, set sample\.every and validation\.every to 0, or train fewer"
    ):
        refuse_short_hosts(short)


def test_the_task_that_writes_lora_files_is_counted_on_every_node_and_can_be_left_out() -> None:
    infos = [info("w0", "a", 2000.0), info("w1", "b", 1000.0)]
    plain = needs_of_hosts(infos, STATE_GIB, 16, SnapshotConfig())
    found = needs_of_hosts(infos, STATE_GIB, 16, SnapshotConfig(), lora_files_gib=3.5)
    for (_, without, _), (_, need, _) in zip(plain, found, strict=True):
        assert need.total == pytest.approx(without.total + 3.5) and "LoRA files 3.50" in need.describe()
    assert not shortages((node, need, need.total) for node, need, _ in found)
    short = shortages((node, need, need.total - 1) for node, need, _ in found)
    assert len(short) == 2 and "lower snapshot.copies, set checkpoint.lora_files to off, or train fewer" in short[0]


def test_every_short_node_is_named_with_what_it_needs_and_what_helps() -> None:
    infos = [info(f"w{n}", "abc"[n // 2], (2000.0, 200.0, 250.0)[n // 2] - n) for n in range(6)]
    found = needs_of_hosts(infos, STATE_GIB, 16, SnapshotConfig())
    assert [(node, room) for node, _, room in found] == [
        ("node host-a", 1999.0),
        ("node host-b", 197.0),
        ("node host-c", 245.0),
    ]
    with pytest.raises(PlanError) as refused:
        refuse_short_hosts(found)
    first, second = str(refused.value).split("\n")
    assert first.startswith("node host-b has 197.0 GiB") and second.startswith("node host-c has 245.0 GiB")
    assert "takes 283.4 GiB" in first and "lower snapshot.copies" in first


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
        (None, 0.0625, ""),
        (0.76, 500.0, ""),
        (0.76, 0.8, ""),
        (0.76, None, ""),  # no /dev/shm here
        (0.7, 500.0, "an object store of 0.70 GiB, and copies of the state of its 2 workers take 0.75 GiB of it"),
        (2.0, 0.0625, "a /dev/shm of 0.06 GiB, less than its object store of 2.00 GiB"),
    ],
)
def test_a_node_whose_object_store_or_shared_memory_is_too_small_for_copies_is_named(
    store_gib: float | None, shared_gib: float | None, says: str
) -> None:
    roomy = [replace(info(f"w{n}", "a", None), store_gib=1e4, shared_gib=2e4) for n in (0, 1)]
    infos = [*roomy, *(replace(info(f"w{n}", "b", None), store_gib=store_gib, shared_gib=shared_gib) for n in (2, 3))]
    assert needs(*infos)[1].store == 0.75
    if not says:
        return refuse_short_stores(infos, STATE_GIB, 16, SnapshotConfig())
    with pytest.raises(PlanError) as refused:
        refuse_short_stores(infos, STATE_GIB, 16, SnapshotConfig())
    sentences = str(refused.value).split("\n")
    assert len(sentences) == 1 and sentences[0].startswith(f"node host-b has {says}")
    remedy = "--shm-size=2g" if "shm of" in says else f"--object-store-memory={int(1.25 * 0.75 * 2**30)}"
    assert remedy in sentences[0]
    refuse_short_stores(infos, STATE_GIB, 16, SnapshotConfig(enabled=False))
    refuse_short_stores(infos[2:], STATE_GIB, 16, SnapshotConfig())  # a single node sends nothing


def test_a_small_state_goes_through_a_small_shared_memory_without_a_word() -> None:
    docker = [replace(info("w0", node, None), store_gib=7.0, shared_gib=0.0625) for node in "ab"]
    refuse_short_stores(docker, 0.005, 16, SnapshotConfig())


def test_weights_that_a_node_holds_for_its_gpus_are_named() -> None:
    infos = [replace(info(f"w{n}", "a", 700.0, on_host=False), host_weights_gib=57.0) for n in range(2)]
    off = SnapshotConfig(enabled=False)
    ((node, need, _),) = needs_of_hosts(infos, STATE_GIB, 16, off)
    assert need.parameters == 57.0 and "weights 57.00" in need.describe()
    without = replace(need, parameters=0.0)
    refuse_short_hosts([(node, without, without.total + 1)])
    with pytest.raises(PlanError, match=r"host-a has .* \(.*weights 57\.00"):
        refuse_short_hosts([(node, need, without.total + 1)])


def test_pinned_memory_of_uploads_counts_for_each_worker_of_a_node() -> None:
    infos = [replace(info(f"w{i}", "aab"[i], 700.0), uploads_gib=0.6875) for i in range(3)]
    first, second = (need for _, need, _ in needs_of_hosts(infos, STATE_GIB, 16, SnapshotConfig()))
    assert (first.uploads, second.uploads) == (1.375, 0.6875) and "uploads 1.38" in first.describe()
    assert first.total == pytest.approx(replace(first, uploads=0.0).total + 1.375)


def test_what_gradients_and_updates_pin_counts_for_each_worker_of_a_node() -> None:
    infos = [replace(info(f"w{i}", "aab"[i], 700.0), pinned_gib=1.375) for i in range(3)]
    ((node, first, _), (_, second, _)) = needs_of_hosts(infos, STATE_GIB, 16, SnapshotConfig())
    assert (first.pinned, second.pinned) == (2.75, 1.375)
    assert first.total == pytest.approx(replace(first, pinned=0.0).total + 2.75)
    with pytest.raises(PlanError, match=r"gradients and updates on their way 2\.75"):
        refuse_short_hosts([(node, first, first.total - 1)])


def test_encoders_that_are_not_loaded_yet_count_once_for_all_workers_of_a_node() -> None:
    infos = [replace(info(f"w{i}", "ab"[i // 2], 2000.0), host_encoders_gib=10.6 if i < 2 else 0.0) for i in range(4)]
    needs = [need for _, need, _ in needs_of_hosts(infos, STATE_GIB, 16, SnapshotConfig())]
    assert [need.encoders for need in needs] == [10.6, 0.0]
    assert needs[0].total == pytest.approx(needs[1].total + 10.6) and "encoders 10.60" in needs[0].describe()


def test_a_node_that_is_short_beside_encoders_is_told_what_it_takes_without_them() -> None:
    """A filled cache lowers what LoRA on Wan2.1-14B takes of a desktop from 39 GiB to 28."""
    held = HostNeed(state=1.0, gradient=0.0, copies=0.0, store=0.0, parameters=27.0, encoders=10.6)
    (said,) = shortages([("node a", held, 30.0)])
    assert "encoders 10.60). Train from a cache that `heddle data cache` has filled (data.cache.only: true)" in said
    assert "without encoders it takes at most 28.0 GiB. Or add memory or nodes" in said
    (said,) = shortages([("node a", replace(held, encoders=0.0), 20.0)])
    assert "heddle data cache" not in said and "27.00). Add memory or nodes" in said
