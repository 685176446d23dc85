"""Keepers: they copy, keep two committed steps, refuse dead generations, and together know what can be recovered."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from actors.state.keeper import Keeper, forecast_bytes, place
from actors.state.recovery import newest_whole
from ops.node_room import node_room, shared_room
from ops.shards import ShardState, cut, shard_bounds

TOTAL = 1000


def shard(lo: int, hi: int, value: float = 1.0) -> ShardState:
    arrays = {name: np.full(hi - lo, value, np.float32) for name in ("master", "exp_avg", "exp_avg_sq")}
    return ShardState(updates=1, lo=lo, hi=hi, total=TOTAL, arrays=arrays)


def test_keeper_owns_its_copy() -> None:
    keeper, sent = Keeper(), shard(0, TOTAL)
    keeper.put(3, sent)
    sent.arrays["master"][:] = 7
    assert keeper.get(3)[0].arrays["master"].max() == 1
    assert keeper.held() == {3: [(0, TOTAL)]}


def test_keeper_accepts_read_only_arrays_of_the_object_store() -> None:
    sent = shard(0, TOTAL)
    for array in sent.arrays.values():
        array.flags.writeable = False
    keeper = Keeper()
    for step in range(5):
        keeper.put(step, sent)
        keeper.commit(step)
    assert keeper.get(4)[0].arrays["master"].flags.writeable


def test_two_committed_steps_and_the_one_being_filled_stay() -> None:
    keeper = Keeper()
    for step in range(6):
        keeper.put(step, shard(0, 500, step))
        keeper.put(step, shard(500, TOTAL, step))
        if step < 5:
            keeper.commit(step)
    assert sorted(keeper.held()) == [3, 4, 5]
    assert [s.arrays["master"][0] for s in keeper.get(3)] == [3, 3], "recycled buffers never alias a held step"


def test_a_restarted_controller_learns_what_is_committed_and_which_generations_are_over() -> None:
    keeper = Keeper()
    assert (keeper.standing().committed, keeper.standing().generation) == (-1, 0)
    for step in range(3):
        keeper.put(step, shard(0, TOTAL), generation=4)
    keeper.commit(1)
    keeper.rollback(1, generation=5)
    assert (keeper.standing().committed, keeper.standing().generation) == (1, 5)
    assert not keeper.put(2, shard(0, TOTAL), generation=4), "a controller that starts below 5 would save nothing"


def test_the_position_of_the_data_goes_back_with_the_training_state() -> None:
    keeper = Keeper()
    keeper.commit(7, {"step": 8})
    assert keeper.standing().position == (7, {"step": 8})
    keeper.rollback(7, generation=1)
    assert keeper.standing().position == (7, {"step": 8})
    keeper.rollback(6, generation=2)
    assert keeper.standing().position is None


def test_memory_stays_flat_over_many_steps() -> None:
    keeper = Keeper()
    used = []
    for step in range(30):
        for lo, hi in shard_bounds(TOTAL, 3):
            keeper.put(step, shard(lo, hi, step))
        keeper.commit(step)
        used.append(keeper.used_bytes())
    assert set(used[3:]) == {3 * TOTAL * 3 * 4}


def test_uncommitted_leftovers_go_with_the_next_commit() -> None:
    keeper = Keeper()
    keeper.put(1, shard(0, TOTAL))
    keeper.commit(1)
    keeper.put(2, shard(0, 500))  # never completed
    keeper.put(3, shard(0, TOTAL))
    keeper.commit(3)
    assert sorted(keeper.held()) == [1, 3]


def test_a_recomputed_step_replaces_the_first_attempt() -> None:
    keeper = Keeper()
    keeper.put(4, shard(0, 500, 1.0), generation=1)
    keeper.put(4, shard(0, 250, 2.0), generation=2)
    assert keeper.held() == {4: [(0, 250)]}
    assert not keeper.put(4, shard(500, TOTAL, 1.0), generation=1), "late message of the dead generation"
    assert keeper.held() == {4: [(0, 250)]}


def test_rollback_forgets_later_steps_and_refuses_the_dead_generation() -> None:
    keeper = Keeper()
    for step in (1, 2):
        keeper.put(step, shard(0, TOTAL), generation=1)
    keeper.commit(1)
    keeper.rollback(1, generation=2)
    assert not keeper.put(2, shard(0, TOTAL), generation=1)
    assert sorted(keeper.held()) == [1]


def test_part_of_a_step_is_cut_before_it_travels() -> None:
    keeper = Keeper()
    keeper.put(1, shard(0, 400, 1.0))
    keeper.put(1, shard(400, TOTAL, 2.0))
    parts = keeper.get(1, 300, 450)
    assert [(p.lo, p.hi, p.arrays["master"].size) for p in parts] == [(300, 400, 100), (400, 450, 50)]
    assert cut(parts, 300, 450).arrays["master"].tolist() == [1.0] * 100 + [2.0] * 50
    assert keeper.get(9) == []


def test_a_node_without_room_refuses_a_large_shard_by_name_and_takes_small_ones() -> None:
    keeper = Keeper(room=lambda: 1 << 20)
    assert keeper.put(1, shard(0, TOTAL)), "a few kB never hurt"
    large = np.zeros((80 << 20) // 4, np.float32)
    huge = ShardState(updates=1, lo=0, hi=large.size, total=large.size, arrays={"master": large})
    with pytest.raises(MemoryError, match=r"can spare 1 MiB.*snapshot\.copies"):
        keeper.put(2, huge)
    assert keeper.room()[1] == keeper.used_bytes() + (1 << 20)


def test_room_is_what_host_and_container_can_spare_less_what_the_monitor_keeps_free(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    300 kB\n")
    assert node_room(meminfo, tmp_path) == 250 * 1024
    for name, text in (("max", "204800"), ("current", "102400"), ("stat", "anon 5\ninactive_file 51200")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert node_room(meminfo, tmp_path) == int(204800 * 0.95) - 51200
    (tmp_path / "memory.max").write_text("max")
    assert node_room(meminfo, tmp_path) == 250 * 1024
    assert node_room(tmp_path / "none", tmp_path) == sys.maxsize, "unknown is no reason to refuse"


def test_room_knows_the_limit_of_a_container_of_cgroup_version_1(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in (
        ("limit_in_bytes", "204800"),
        ("usage_in_bytes", "102400"),
        ("stat", "rss 5\ntotal_inactive_file 51200"),
    ):
        (tmp_path / "memory" / f"memory.{name}").write_text(text)
    assert node_room(tmp_path / "none", tmp_path) == int(204800 * 0.95) - 51200


def test_shared_memory_is_measured_whole_however_much_of_it_is_taken(tmp_path: Path) -> None:
    whole, free = shared_room(tmp_path), shutil.disk_usage(tmp_path).free
    assert whole == shutil.disk_usage(tmp_path).total and free < whole
    assert shared_room(tmp_path / "none") is None


def test_shards_go_to_other_nodes_and_are_spread() -> None:
    workers = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}
    keepers = {"ka": "a", "kb": "b", "kc": "c"}
    chosen = place(workers, keepers)
    assert all(keepers[name] != workers[worker] for worker, names in chosen.items() for name in names)
    load = [sum(name in names for names in chosen.values()) for name in keepers]
    assert max(load) - min(load) <= 1


def test_two_copies_lie_on_two_nodes() -> None:
    keepers = {"ka": "a", "kb": "b", "kb2": "b", "kc": "c"}
    for worker, names in place({0: "a", 1: "b", 2: "c"}, keepers, copies=2).items():
        nodes = [keepers[name] for name in names]
        assert len(set(nodes)) == 2 and {0: "a", 1: "b", 2: "c"}[worker] not in nodes


def test_a_single_node_uses_its_keeper() -> None:
    assert place({0: "a", 1: "a"}, {"k": "a"}, copies=3) == {0: ("k",), 1: ("k",)}
    with pytest.raises(ValueError, match="no keeper is alive"):
        place({0: "a"}, {})


def test_a_lost_keeper_is_covered_by_the_second_copy() -> None:
    workers, keepers = dict(enumerate("abc")), {"ka": "a", "kb": "b", "kc": "c"}
    where = place(workers, keepers, copies=2)
    bounds = shard_bounds(TOTAL, 3)
    stores = {name: Keeper() for name in keepers}
    for worker, names in where.items():
        for name in names:
            stores[name].put(8, shard(*bounds[worker], value=worker), generation=4)
    for lost in keepers:
        held = [one for name, keeper in stores.items() if name != lost for one in keeper.inventory()]
        assert newest_whole(held) == (8, 4)
        parts = [part for name, keeper in stores.items() if name != lost for part in keeper.get(8, 100, 900)]
        values = cut(parts, 100, 900).arrays["master"]
        expected = np.concatenate([np.full(b - a, w) for w, (a, b) in enumerate(bounds)])[100:900]
        np.testing.assert_array_equal(values, expected)


def test_forecast_counts_three_steps_of_state() -> None:
    assert forecast_bytes(1000, ema=True, copies=1, num_keepers=2) == 3 * 1000 * 16 // 2
