import json
from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.buckets import Choice
from data.dataset import order, order_state, order_token
from data.dataset.order import SampleOrder, uniform
from data.dataset.order_state import BatchDraw, BatchSizes, OrderState, Population, Stage
from data.errors import DataError
from data.types import Bucket

SMALL, LARGE, RARE = Bucket(1, 64, 96), Bucket(17, 64, 96), Bucket(33, 64, 96)


def choice(bucket: Bucket, keep: float = 1.0) -> Choice:
    return Choice(bucket=bucket, keep=keep, step_down=1.0, resolution="64px")


def population(shapes: list[int], shards: int = 3, window: int = 2, name: str = "clips") -> Population:
    bounds = np.linspace(0, len(shapes), shards + 1).astype(np.int64)
    return Population(name=name, shard_bounds=bounds, shape=np.array(shapes, np.int32), window=window)


def stage(**changes: object) -> Stage:
    usual = Stage(
        until_step=0,
        choices=((choice(SMALL),), (choice(LARGE),), (choice(RARE),)),
        batch={SMALL: 5, LARGE: 3, RARE: 4},
        tokens={SMALL: 10, LARGE: 100, RARE: 200},
        weights=(1.0,),
        items_per_step=2,
        max_wait=10**9,
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def run(planner: SampleOrder, state: OrderState, steps: int) -> list[list[BatchDraw]]:
    return [planner.advance(state) for _ in range(steps)]


def rows_of(steps: list[list[BatchDraw]]) -> list[tuple[int, int, int]]:
    return [(d.source, d.epoch, d.row) for micros in steps for micro in micros for d in micro.draws]


shapes = st.lists(st.integers(-1, 2), min_size=4, max_size=60).filter(lambda codes: max(codes) >= 0)


@given(shapes, st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_every_admitted_row_comes_exactly_once_per_epoch(codes: list[int], shards: int, window: int, seed: int) -> None:
    planner = SampleOrder([population(codes, min(shards, len(codes)), window)], [stage(max_wait=20)], seed)
    state = planner.start()
    drawn = rows_of(run(planner, state, 120))
    waiting = [
        (d.source, d.epoch, d.row) for queue in [*state.queues.values(), *(m.draws for m in state.ready)] for d in queue
    ]
    counts = Counter(drawn + waiting)
    assert set(counts.values()) == {1}
    admitted = {row for row, code in enumerate(codes) if code >= 0}
    for epoch in range(state.cursors[0].epoch):
        assert {row for _, when, row in counts if when == epoch} == admitted


@given(shapes, st.integers(0, 40), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_a_restored_plan_continues_where_it_stopped(codes: list[int], stop: int, seed: int) -> None:
    sources = [population(codes), population(codes[::-1], name="others")]
    planner = SampleOrder(sources, [stage(weights=(0.3, 0.7), max_wait=15)], seed)
    state = planner.start()
    run(planner, state, stop)
    token = json.loads(json.dumps(planner.token(state)))
    fresh = SampleOrder(sources, [stage(weights=(0.3, 0.7), max_wait=15)], seed)
    assert run(fresh, fresh.restore(token), 30) == run(planner, state, 30)


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_the_mixture_is_exact_to_less_than_one_draw_at_every_prefix(shares: list[float], seed: int) -> None:
    weights = tuple(share / sum(shares) for share in shares)
    planner = SampleOrder([population([0, 0, 1], 1) for _ in weights], [stage(weights=weights)], seed)
    state = planner.start()
    drawn: list[int] = []
    while len(drawn) < 300:
        drawn += [draw.source for micro in planner.advance(state) for draw in micro.draws]
    order = sorted(
        (d for ms in run(planner, planner.start(), state.step) for m in ms for d in m.draws),
        key=lambda draw: draw.number,
    )
    taken = np.zeros(len(weights))
    for count, draw in enumerate(order, 1):
        if draw.number != count - 1:  # rows that still wait in a queue: prefixes end here
            break
        taken[draw.source] += 1
        assert np.abs(taken - np.array(weights) * count).max() < 1


def test_a_mixture_by_tokens_shares_tokens() -> None:
    planner = SampleOrder(
        [population([0] * 20), population([1] * 20, name="videos")], [stage(weights=(0.5, 0.5), by_tokens=True)], 0
    )
    state = planner.start()
    run(planner, state, 200)
    images, videos = (cursor.tokens for cursor in state.cursors)
    assert abs(images - videos) <= 100


def test_full_batches_have_the_size_of_their_bucket() -> None:
    planner = SampleOrder([population([0, 1, 2] * 20)], [stage()], 0)
    for micros in run(planner, planner.start(), 50):
        assert [len(m.draws) for m in micros] == [{SMALL: 5, LARGE: 3, RARE: 4}[m.bucket] for m in micros]


def test_a_rare_bucket_is_emitted_short_instead_of_starving() -> None:
    planner = SampleOrder([population([0] * 99 + [2])], [stage(max_wait=150)], 0)
    state = planner.start()
    waits = []
    for _ in range(100):
        for micro in planner.advance(state):
            if micro.bucket == RARE:
                assert len(micro.draws) < 4
                waits.append(state.drawn - micro.draws[0].number)
    assert len(waits) >= 3
    assert max(waits) <= 150 + 2 * 5 + 1  # max_wait, and what the step it became due in drew


def test_order_depends_on_the_seed_and_differs_between_epochs() -> None:
    def order(seed: int) -> list[tuple[int, int, int]]:
        planner = SampleOrder([population([1] * 30)], [stage()], seed)
        return rows_of(run(planner, planner.start(), 20))

    assert order(1) == order(1) != order(2)
    epochs = [[row for _, epoch, row in order(1) if epoch == wanted] for wanted in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]


def test_rows_are_shuffled_within_windows_of_shards_only() -> None:
    planner = SampleOrder([population([1] * 40, shards=8, window=2)], [stage()], 0)
    rows = [row for _, epoch, row in rows_of(run(planner, planner.start(), 7)) if epoch == 0][:40]
    for start in range(0, 40, 10):
        assert len({row // 5 for row in rows[start : start + 10]}) == 2


def test_probabilities_pass_over_their_share_of_draws() -> None:
    planner = SampleOrder([population([0] * 500)], [stage(choices=((choice(SMALL, keep=0.3),), (), ()))], 0)
    state = planner.start()
    run(planner, state, 300)
    assert state.drawn / (state.drawn + state.passed) == pytest.approx(0.3, abs=0.03)


def test_at_a_border_waiting_rows_are_chosen_anew_and_none_is_lost() -> None:
    early = stage(until_step=7, choices=((choice(SMALL),), (choice(SMALL),), (choice(SMALL),)))
    planner = SampleOrder([population([0, 1, 2] * 15)], [early, stage()], 3)
    state = planner.start()
    steps = run(planner, state, 40)
    assert {micro.bucket for micros in steps[:7] for micro in micros} == {SMALL}
    assert {micro.bucket for micros in steps[7:] for micro in micros} == {SMALL, LARGE, RARE}
    waiting = [
        (d.source, d.epoch, d.row) for queue in [*state.queues.values(), *(m.draws for m in state.ready)] for d in queue
    ]
    counts = Counter(rows_of(steps) + waiting)
    assert set(counts.values()) == {1}
    for epoch in range(state.cursors[0].epoch):
        assert len([1 for _, when, _ in counts if when == epoch]) == 45


def test_later_segments_may_be_edited_while_an_earlier_one_runs() -> None:
    rows = [population([0, 1, 2] * 15)]
    planner = SampleOrder(rows, [stage(until_step=10), stage()], 0)
    state = planner.start()
    run(planner, state, 5)
    token = planner.token(state)
    edited = SampleOrder(rows, [stage(until_step=10), stage(items_per_step=4)], 0)
    assert run(edited, edited.restore(token), 5) == run(planner, state, 5)
    with pytest.raises(DataError, match="buckets changed"):
        SampleOrder(rows, [stage(until_step=10, items_per_step=4), stage()], 0).restore(token)


@given(st.integers(1, 12), st.integers(0, 4), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_a_segment_that_is_added_on_a_resume_trains_as_if_it_had_always_been_there(
    step: int, later: int, seed: int
) -> None:
    """Also at the very step where the run stands."""
    rows = [population([0, 1, 2] * 15)]
    then = stage(items_per_step=3, batch={SMALL: 2, LARGE: 2, RARE: 2})
    planner, whole = SampleOrder(rows, [stage()], seed), SampleOrder(rows, [stage(until_step=step + later), then], seed)
    state = planner.start()
    before = run(planner, state, step)
    token = json.loads(json.dumps(planner.token(state)))
    after = run(whole, whole.restore(token), 12)
    assert [*before, *after] == run(whole, whole.start(), step + 12)
    assert {len(micros) for micros in after[later:]} == {3}


def test_the_end_of_a_segment_may_move_but_not_to_before_the_steps_that_it_has_had() -> None:
    rows = [population([0, 1, 2] * 15)]
    planner = SampleOrder(rows, [stage(until_step=10), stage(items_per_step=4)], 0)
    state = planner.start()
    run(planner, state, 7)
    token = planner.token(state)
    for end in (7, 8, 20, 0):
        stages = [stage(until_step=end), stage(items_per_step=4)] if end else [stage()]
        moved = SampleOrder(rows, stages, 0)
        assert len(moved.advance(moved.restore(token))) == (4 if end == 7 else 2)
    with pytest.raises(
        DataError, match=r"ends segment 1 at step 6, and the run has 7 steps .* until_step to 7 or more"
    ):
        SampleOrder(rows, [stage(until_step=6), stage()], 0).restore(token)
    run(planner, state, 5)  # in the second one by now: the first has ended at step 10
    with pytest.raises(DataError, match="buckets changed"):
        SampleOrder(rows, [stage(until_step=11), stage(items_per_step=4)], 0).restore(planner.token(state))


def test_a_token_that_knows_the_end_of_its_segment_is_still_read() -> None:
    """As earlier versions wrote it."""
    planner = SampleOrder([population([0, 1, 2] * 15)], [stage(until_step=10), stage(items_per_step=4)], 0)
    token = planner.token(planner.start())
    token["plan"] = {**token["plan"], "buckets": planner._hash_of_stages(planner.stages[:1])}
    assert token["plan"] != planner.parts(0)
    assert len(planner.advance(planner.restore(token))) == 2


def test_whoever_changes_the_data_of_a_run_is_told_how_to_go_on() -> None:
    rows = [population([0, 1, 2] * 15)]
    planner = SampleOrder(rows, [stage()], 0, {"index": "a"})
    state = planner.start()
    run(planner, state, 4)
    token = planner.token(state)
    with pytest.raises(DataError, match=r"until_step: 4 and append another; or begin .*train\.init_from"):
        SampleOrder(rows, [stage(items_per_step=5)], 0, {"index": "a"}).restore(token)
    with pytest.raises(
        DataError, match=r"index changed since\. .* reads the same ones.* resume with the version .*init_from"
    ):
        SampleOrder(rows, [stage()], 0, {"index": "b"}).restore(token)


@pytest.mark.parametrize(("seed", "identity", "named"), [(1, {"index": "a"}, "seed"), (0, {"index": "b"}, "index")])
def test_a_token_of_another_plan_is_refused_and_what_changed_is_named(
    seed: int, identity: dict[str, str], named: str
) -> None:
    rows = [population([0, 1, 2] * 5)]
    planner = SampleOrder(rows, [stage()], 0, {"index": "a"})
    token = planner.token(planner.start())
    with pytest.raises(DataError, match=f"{named} changed since"):
        SampleOrder(rows, [stage()], seed, identity).restore(token)


def waiting_for_long(rows: int = 30_000, buckets: int = 60, batch: int = 250) -> SampleOrder:
    """Many buckets with large batches: tens of thousands of rows wait."""
    shapes = [Bucket(1, 64, 16 * width) for width in range(1, buckets + 1)]
    wide = stage(
        choices=tuple((choice(bucket),) for bucket in shapes),
        batch=dict.fromkeys(shapes, batch),
        tokens=dict.fromkeys(shapes, 1),
        items_per_step=1,
    )
    return SampleOrder([population([row % buckets for row in range(rows)], shards=30)], [wide], 0)


def test_a_token_stays_small_with_thousands_of_rows_waiting() -> None:
    planner = waiting_for_long()
    state = planner.start()
    planner.advance(state)
    token = planner.token(state)
    assert state.waiting > 10_000
    assert len(json.dumps(token)) < 2048
    restored = planner.restore(json.loads(json.dumps(token)))
    assert run(planner, restored, 3) == run(planner, state, 3)
    assert planner.token(restored) == planner.token(state)


@given(shapes, st.integers(0, 30), st.integers(0, 12), st.sampled_from([0, 3]), st.integers(1, 9), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_rows_drawn_again_are_those_that_waited(
    codes: list[int], stop: int, border: int, listed: int, every: int, seed: int
) -> None:
    sources = [population(codes), population(codes[::-1], name="others")]
    early = stage(until_step=border, weights=(0.5, 0.5), choices=((choice(SMALL, 0.6), choice(LARGE)),) * 3)
    late = stage(weights=(0.3, 0.7), max_wait=15)
    planner = SampleOrder(sources, [early, late] if border else [late], seed)
    with (
        mock.patch.object(order_token, "LISTED_MOST", listed),
        mock.patch.object(order_state, "MARK_EVERY", every),
        mock.patch.object(order, "MARKS_KEPT", 3),
    ):
        state = planner.start()
        run(planner, state, stop)
        restored = planner.restore(json.loads(json.dumps(planner.token(state))))
        assert (restored.queues, restored.ready, restored.cursors) == (state.queues, state.ready, state.cursors)
        again = planner.restore(json.loads(json.dumps(planner.token(restored))))
        assert run(planner, again, 20) == run(planner, state, 20)


def test_a_source_nothing_fits_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match="source koala has no sample"):
        SampleOrder([population([-1, -1], 1, name="koala")], [stage()], 0)


def test_a_samples_random_numbers_are_its_own_and_uniform() -> None:
    numbers = np.array([uniform(7, 0, 1, row, 0) for row in range(4000)])
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.02 and abs(np.quantile(numbers, 0.9) - 0.9) < 0.02
    assert uniform(7, 0, 1, 5, 0) == numbers[5] != uniform(7, 0, 2, 5, 0)


def test_the_order_is_the_same_in_every_release() -> None:
    """A token says how far a run is in it, and not which rows came: a change must be a decision."""
    sources = [population([0] * 6), population([0, 1] * 4, name="others")]
    mixed = stage(
        weights=(0.25, 0.75),
        choices=((choice(SMALL, 0.6), choice(LARGE)), (choice(LARGE),), (choice(RARE),)),
        batch={SMALL: 2, LARGE: 2, RARE: 2},
    )
    planner = SampleOrder(sources, [mixed], 0)
    steps = run(planner, planner.start(), 4)
    assert [(source, row) for source, _, row in rows_of(steps)] == [
        (1, 7), (0, 1), (1, 6), (1, 3), (1, 4), (0, 5), (1, 2), (1, 5), (1, 1), (1, 0), (1, 7), (1, 3), (0, 0), (0, 4),
        (1, 4), (1, 6),
    ]  # fmt: skip
    assert [micro.bucket.frames for micros in steps for micro in micros] == [17, 17, 1, 17, 17, 17, 1, 1]
    assert uniform(1, 2, 3, 4, 5) == pytest.approx(0.08414241387912047, abs=1e-15)


def test_every_source_epoch_and_window_has_an_order_of_its_own() -> None:
    planner = SampleOrder(
        [population([0] * 60, shards=6, window=3), population([0] * 60, shards=6, window=3, name="twin")],
        [stage(weights=(0.5, 0.5))],
        0,
    )
    rows = rows_of(run(planner, planner.start(), 60))
    ranks = {
        (source, epoch, window): np.argsort(
            [r for s, e, r in rows if (s, e) == (source, epoch)][window * 30 : window * 30 + 30]
        ).tolist()
        for source in (0, 1)
        for epoch in (0, 1)
        for window in (0, 1)
    }
    assert len(set(map(tuple, ranks.values()))) == len(ranks)


def test_a_samples_random_numbers_are_of_its_source_and_use_too() -> None:
    own = uniform(7, 0, 1, 5, 0)
    assert own not in {uniform(8, 0, 1, 5, 0), uniform(7, 1, 1, 5, 0), uniform(7, 0, 1, 5, 1)}


@pytest.mark.parametrize(
    "change",
    [
        {"by_tokens": True}, {"weights": (0.5,)}, {"items_per_step": 3}, {"max_wait": 9}, {"settings": "other"},
        {"batch": {SMALL: 6, LARGE: 3, RARE: 4}},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_token_of_a_segment_that_draws_otherwise_is_refused(change: dict[str, object]) -> None:
    rows = [population([0, 1, 2] * 5)]
    planner = SampleOrder(rows, [stage()], 0)
    with pytest.raises(DataError, match="buckets changed since"):
        SampleOrder(rows, [stage(**change)], 0).restore(planner.token(planner.start()))


def test_a_mixture_by_tokens_begins_anew_with_its_segment() -> None:
    """It does not make up for what another segment has drawn."""
    sources = [population([0] * 50), population([2] * 50, name="long")]
    one = {"batch": {SMALL: 1, LARGE: 1, RARE: 1}, "items_per_step": 1, "by_tokens": True}
    late = stage(weights=(0.5, 0.5), **one)
    both, alone = (
        SampleOrder(sources, [stage(until_step=40, weights=(0.1, 0.9), **one), late], 0),
        SampleOrder(sources, [late], 0),
    )
    state = both.start()
    run(both, state, 40)
    drawn = [[source for source, _, _ in rows_of(run(*of, 60))] for of in ((both, state), (alone, alone.start()))]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 2


# Sizes decided while a run goes on


def resized(planner: SampleOrder, *decisions: BatchSizes) -> SampleOrder:
    planner.adopt(decisions)
    return planner


@given(shapes, st.integers(1, 25), st.integers(0, 25), st.integers(1, 9), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_decided_sizes_are_data_of_every_resume(codes: list[int], at: int, stop: int, size: int, seed: int) -> None:
    """Whether the decision was known from the start, came with the token, or was given again: the same batches."""

    def planner() -> SampleOrder:
        return SampleOrder([population(codes)], [stage(max_wait=60)], seed)

    decision = BatchSizes(from_step=at, sizes={SMALL: size, LARGE: size + 1})
    known = resized(planner(), decision)
    steps = run(known, known.start(), 30)
    live = planner()
    state = live.start()
    before = run(live, state, at)
    live.adopt([decision])  # decided when step `at` is the first that nobody has asked for
    assert before + run(live, state, 30 - at) == steps
    half = known.start()
    run(known, half, stop)
    token = json.loads(json.dumps(known.token(half)))
    told = planner()
    assert run(told, told.restore(token), 30 - stop) == steps[stop:], "the token has the decision"
    token.pop("resized")
    old = resized(planner(), decision)  # a checkpoint of before the decision, and the run's file
    assert run(old, old.restore(token), 30 - stop) == steps[stop:]


def test_a_position_has_the_decisions_of_its_future_and_no_others() -> None:
    """With all 1,000 of a long run it took half a megabyte, and soon more than a keeper can note."""
    stages = [stage(until_step=500), stage()]
    decisions = [BatchSizes(from_step=2 * n, sizes={SMALL: n % 3 + 1, LARGE: n % 4 + 1}) for n in range(3000)]
    told = resized(SampleOrder([population([0, 1, 2] * 40)], stages, 3), *decisions)
    state = told.start()
    run(told, state, 490)
    for _ in range(30):
        token = json.loads(json.dumps(told.token(state)))
        assert len(json.dumps(token)) < 4000
        fresh = SampleOrder([population([0, 1, 2] * 40)], stages, 3)
        assert run(fresh, fresh.restore(token), 9) == run(told, state.copy(), 9)
        token["resized"] = [one.to_json() for one in decisions]  # as they were
        old = SampleOrder([population([0, 1, 2] * 40)], stages, 3)
        restored = old.restore(token)
        assert old.token(restored) == json.loads(json.dumps(told.token(state)))
        assert run(old, restored, 9) == run(told, state.copy(), 9)
        run(told, state, 1)


def test_no_row_is_lost_and_no_batch_is_larger_when_sizes_change() -> None:
    codes = [0, 1, 2] * 40
    plain = SampleOrder([population(codes)], [stage()], 3)
    new = {SMALL: 2, LARGE: 4, RARE: 1}
    decided = resized(SampleOrder([population(codes)], [stage()], 3), BatchSizes(from_step=10, sizes=new))
    one, other = plain.start(), decided.start()
    assert run(plain, one, 10) == run(decided, other, 10)
    after = run(decided, other, 40)
    assert {len(micro.draws) for micros in after for micro in micros if micro.bucket == LARGE} == {4}
    assert all(len(micro.draws) <= new[micro.bucket] for micros in after for micro in micros)
    waiting = [d for queue in other.queues.values() for d in queue] + [d for m in other.ready for d in m.draws]
    numbers = [d.number for micros in after for micro in micros for d in micro.draws] + [d.number for d in waiting]
    first = {d.number for micros in run(plain, plain.start(), 10) for micro in micros for d in micro.draws}
    assert sorted([*first, *numbers]) == list(range(other.drawn))


def test_a_decision_holds_for_its_own_segment_alone() -> None:
    stages = [stage(until_step=10), stage(batch={SMALL: 6, LARGE: 6, RARE: 6})]
    planner = resized(
        SampleOrder([population([0, 1, 2] * 40)], stages, 3),
        BatchSizes(from_step=5, sizes={SMALL: 2, LARGE: 2}),
        BatchSizes(from_step=15, sizes={SMALL: 7, LARGE: 7}),
    )
    steps = run(planner, planner.start(), 30)
    parts = (steps[:5], steps[5:10], steps[10:15], steps[15:])
    sizes = [{len(m.draws) for micros in part for m in micros} for part in parts]
    assert sizes == [{5, 3, 4}, {2, 4}, {6}, {7, 6}]


def test_a_source_without_a_fitting_sample_is_an_error_where_the_segment_draws_from_it() -> None:
    sources = [population([0] * 8), population([1, -1] * 4, name="others")]
    small = stage(choices=((choice(SMALL),), ()))
    SampleOrder(sources, [replace(small, weights=(1.0, 0.0))], 3)
    with pytest.raises(DataError, match="source others has no sample that a bucket of segment 2 takes"):
        SampleOrder(sources, [replace(small, weights=(1.0, 0.0)), replace(small, weights=(0.5, 0.5))], 3)
    with pytest.raises(DataError, match="segment 1 draws from no source"):
        SampleOrder(sources, [replace(small, weights=(0.0, 0.0))], 3)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(DataError, match="at least 1"):
        BatchSizes.from_json({"from": 3, "sizes": {"1x64x96": 0}})
