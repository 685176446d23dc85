"""Prodigy's own rules. That it trains as the published algorithm does, on any workers: test_sync."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.config import TrainConfig
from ops.comm.collectives import Group
from ops.config import OptimizerConfig, ProdigyConfig
from ops.shards import ARRAYS, Distance, bytes_per_weight, state_names
from ops.update.flat_vector import trainable
from ops.update.prodigy import first_distance, next_distance, update_rate
from ops.update.sync import FlatSync
from tests.nccl_rules import nccl_rules
from tests.ops.exported import own_shard
from tests.ops.test_sync import (
    FLAT_ONLY,
    PRODIGY,
    START,
    TOLERANCE,
    TOTAL_STEPS,
    assert_same_training,
    reference,
    run_flat,
    sample_loss,
)

PLAIN = replace(PRODIGY, max_grad_norm=0.0, lr_scheduler="constant", lr_warmup_steps=0)


def formed(config: OptimizerConfig = PLAIN, parts: tuple[str, ...] = ("",)) -> FlatSync:
    sync = FlatSync(copy.deepcopy(START), config, TOTAL_STEPS, parts=parts)
    sync.form(Group.solo(), None)
    return sync


def train(sync: FlatSync, steps: int, first: int = 0, part_weights: list[float] | None = None) -> list[float]:
    """d after each step."""
    found = []
    for step in range(first, first + steps):
        sync.begin_step()
        for index in range(4):
            sample_loss(sync._module, index, 0).backward()
        result = sync.finish_step(step, 1.0, 1.0, 1.0, lambda phase: None, part_weights=part_weights)
        assert result.d is not None
        found.append(result.d)
    return found


def test_d_grows_from_d0_to_what_the_way_is_long_and_the_rate_of_an_update_is_d_of_before_it() -> None:
    sync = formed(replace(PLAIN, prodigy=ProdigyConfig()))
    found = train(sync, 25)
    assert found[0] == 1e-6 and sorted(found) == found and 1e-3 < found[-1] < 1
    assert train(sync, 20, 25)[-1] < 3 * found[-1], "it ends to grow"
    sync.begin_step()
    sample_loss(sync._module, 0, 0).backward()
    (last,) = {one.d for one in sync._distances}
    assert sync.finish_step(45, 1.0, 1.0, 1.0, lambda phase: None).lr == last * PLAIN.learning_rate


def test_by_nccls_rules_all_agree_on_d_by_one_sum_more(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(FLAT_ONLY["Prodigy, 3 -> 4 -> 2 -> 1 workers"], sizes=(4, 2), bad={})
    with nccl_rules(monkeypatch) as rules:
        found = run_flat(case)
    assert_same_training(found, reference(case, torch.float32), case, TOLERANCE[torch.float32])
    assert rules.kinds["allreduce"] == (2 * case.steps + 1) * sum(case.sizes)


def test_each_expert_finds_a_d_of_its_own_and_one_that_saw_nothing_stays_as_it_is() -> None:
    sync = formed(parts=("stem", "left", "right"))
    train(sync, 3)
    before = own_shard(sync)
    left = next((slot.lo, slot.hi) for slot in sync.layout if slot.name == "left.weight")
    train(sync, 3, 3, part_weights=[1.0, 0.0, 1.0])
    after = own_shard(sync)
    assert len({one.d for one in after.distances}) == 3
    same = [one == other for one, other in zip(before.distances, after.distances, strict=True)]
    assert same == [False, True, False] and after.part_updates == (6, 3, 6)
    for name, array in before.arrays.items():
        np.testing.assert_array_equal(array[slice(*left)], after.arrays[name][slice(*left)], err_msg=name)


def test_the_rate_of_an_expert_is_corrected_by_its_own_updates() -> None:
    """One that saw nothing in the first steps begins as if it were alone."""
    config = replace(PLAIN, prodigy=ProdigyConfig(d0=1e-3, use_bias_correction=True))
    late, alone = (formed(config, ("stem", "left", "right")) for _ in range(2))
    train(late, 3, part_weights=[0.0, 0.0, 1.0])
    for sync in (late, alone):
        train(sync, 3, 3, part_weights=[0.0, 1.0, 0.0])
    left = slice(*next((slot.lo, slot.hi) for slot in late.layout if slot.name == "left.weight"))
    one, other = own_shard(late), own_shard(alone)
    assert one.distances[1] == other.distances[1]
    for name, array in one.arrays.items():
        np.testing.assert_array_equal(array[left], other.arrays[name][left], err_msg=name)


@pytest.mark.parametrize("seen", [0.0, 1.0])
def test_without_a_gradient_or_a_rate_weights_and_d_stay(seen: float) -> None:
    sync = formed(replace(PLAIN, lr_scheduler="linear", lr_min_ratio=0.0, ema_decay=0.0))
    train(sync, 2)
    before = own_shard(sync).copy()
    if seen:  # after its last step the rate is 0
        train(sync, 1, TOTAL_STEPS)
    else:
        sync = formed()
        before = own_shard(sync).copy()
        sync.begin_step()
        sync.finish_step(0, 1.0, 1.0, 1.0, lambda phase: None)
    after = own_shard(sync)
    for name, array in before.arrays.items():
        np.testing.assert_array_equal(array, after.arrays[name], err_msg=name)
    assert after.distances == (before.distances or (first_distance(PLAIN),))


def test_its_start_is_kept_from_the_first_weights_on_through_every_generation() -> None:
    sync, start = formed(), torch.cat([p.detach().flatten() for _, p in trainable(START)]).numpy()
    for generation in range(3):
        train(sync, 2, 2 * generation)
        shard = own_shard(sync).copy()
        np.testing.assert_array_equal(shard.arrays["p0"], start)
        sync = FlatSync(copy.deepcopy(START), PLAIN, TOTAL_STEPS)
        sync.form(Group.solo(), [shard])
        assert own_shard(sync).distances == shard.distances
    assert np.abs(shard.arrays["master"] - start).max() > 1e-3


def test_growth_is_bounded_and_catches_up_with_the_largest_estimate() -> None:
    config = replace(PLAIN, prodigy=ProdigyConfig(d0=1e-3, growth_rate=2.0))
    grown = Distance(d=2e-3, d_max=1.0, numerator=0.0)
    assert next_distance(config, grown, 1e-3, along=0.0, length=1.0).d == 4e-3
    assert next_distance(config, replace(grown, d=0.9), 1e-3, along=-1.0, length=1.0).d == 1.0


def test_bias_correction_is_that_of_adam() -> None:
    config = replace(PLAIN, betas=(0.9, 0.999), prodigy=ProdigyConfig(d0=1e-3, use_bias_correction=True))
    assert update_rate(config, first_distance(config), 1.0, 1) == pytest.approx(1e-3 * 0.001**0.5 / 0.1)


def test_its_state_takes_two_arrays_more() -> None:
    assert [bytes_per_weight(replace(PRODIGY, ema_decay=ema)) for ema in (0.9, 0.0)] == [24, 20]
    assert state_names(PRODIGY) == ARRAYS == tuple(own_shard(formed()).arrays)


def test_what_is_not_of_its_kind_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"learning_rate is 0\.0001; .* from 0\.1 to 10\. Set it to 1, or leave it"):
        OptimizerConfig(kind="prodigy", learning_rate=1e-4)
    with pytest.raises(ValueError, match=r"train\.optimizer\.kind is adamw\. Set kind to prodigy, or leave"):
        OptimizerConfig(prodigy=ProdigyConfig(d_coef=2.0))
    with pytest.raises(ValueError, match=r"growth_rate is 0\.5, and d would never grow\. Set it above 1"):
        ProdigyConfig(growth_rate=0.5)
    with pytest.raises(ValueError, match=r"d0 is 0; it must be larger than 0"):
        ProdigyConfig(d0=0)
    with pytest.raises(ValueError, match=r"deepspeed has AdamW alone.* Set kind to adamw"):
        TrainConfig(sync="deepspeed", optimizer=PRODIGY)
