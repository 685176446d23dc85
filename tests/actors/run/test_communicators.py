"""Bags that stay connected: never more peers than the limit, and all members know when a bag is closed."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from actors.plan.costs.profile import Profile
from actors.plan.schedule.problem import PlanOptions, Problem
from actors.plan.types import Cluster, Item
from actors.planning.memory import PEER_GIB, communicators_gib
from actors.run.communicators import Communicators
from ops.degrees import BagRanks
from ops.models.wan.config import WanConfig


def test_random_steps_never_have_more_peers_than_the_limit() -> None:
    """Replayed as workers do it: closed before the step, made at the first use, left after a cascade."""
    source, account = random.Random(0), Communicators(7)
    opened: set[tuple[int, ...]] = set()
    made = 0

    def peers() -> int:
        return max(sum(len(bag) - 1 for bag in opened if worker in bag) for worker in range(8))

    for _ in range(300):
        bags = [
            tuple(sorted(source.sample(range(8), source.choice([1, 2, 3, 4, 6, 8]))))
            for _ in range(source.randint(1, 9))
        ]
        step = account.step(bags)
        assert opened.issuperset(step.closed)
        opened.difference_update(step.closed)
        assert opened.isdisjoint(step.connected)
        opened.update(step.connected)
        for position, bag in enumerate(bags):
            if len(bag) > 1 and bag not in opened:
                opened.add(bag)
                made += 1
            assert peers() <= 7
            if position in step.left:
                opened.remove(bag)
        made += len(step.connected)
        assert step.made >= len(step.connected)
        assert all(account.peers(w) == sum(len(bag) - 1 for bag in opened if w in bag) for w in range(8))
    assert account.most_seen == 7 and made > 300


class _Told(Communicators):
    """Which bags go, as the definition says it: those that come last in what is left of the step, or not at all."""

    def __init__(self, most_peers: int) -> None:
        super().__init__(most_peers)
        self.coming: list[BagRanks] = []
        self.went: list[BagRanks] = []
        self.should: list[BagRanks] = []

    def _room_for(self, bag: BagRanks, next_use: Mapping[BagRanks, int], never: int) -> list[BagRanks]:
        while self.coming[0] != bag:
            del self.coming[0]
        copy = Communicators(self._most)
        copy._open, copy._peers = set(self._open), dict(self._peers)
        copy._of = {worker: dict(own) for worker, own in self._of.items()}
        for worker in bag:
            while copy.peers(worker) + len(bag) - 1 > copy._most and (own := list(copy._of.get(worker, ()))):
                coming = self.coming
                victim = max(own, key=lambda one: coming.index(one) if one in coming else len(coming))
                copy._close(victim)
                self.should.append(victim)
        gone = super()._room_for(bag, next_use, never)
        self.went += gone
        return gone


@pytest.mark.parametrize("seed", range(5))
def test_bags_that_go_are_those_that_the_step_uses_last_on_random_steps(seed: int) -> None:
    source, account = random.Random(seed), _Told(7)
    for _ in range(100):
        bags = [tuple(sorted(source.sample(range(12), source.choice([1, 2, 2, 3, 4, 6])))) for _ in range(12)]
        account.coming = list(bags)
        account.step(bags)
    assert account.went == account.should and len(account.went) > 300


class _Counted(tuple[int, ...]):
    """A bag that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        _Counted.compared += 1
        return tuple.__eq__(self, other)

    __hash__ = tuple.__hash__


def test_a_step_of_many_workers_looks_for_no_bag_in_all_of_its_cascades() -> None:
    source, account = random.Random(0), Communicators(16)
    for _ in range(3):
        bags = [_Counted(sorted(source.sample(range(256), 4))) for _ in range(1000)]
        account.step(bags)
    assert _Counted.compared < 20_000  # looked for in all of the step: 6.7 million


def test_without_a_limit_nothing_is_closed() -> None:
    account = Communicators(0)
    pairs = [(a, b) for a in range(8) for b in range(a + 1, 8)]
    first, second = account.step(pairs), account.step(pairs)
    assert set(first.connected) == set(pairs) and not first.left and not first.closed
    assert second.made == 0 and account.peers(0) == 7


def test_what_the_step_uses_again_is_closed_last_and_of_the_rest_the_oldest() -> None:
    account = Communicators(3)
    account.step([(0, 1), (0, 2), (0, 3)])
    assert account.step([(0, 4), (0, 1)]).closed == ((0, 2),)  # the oldest, (0, 1), comes in this step


def test_a_bag_above_the_limit_has_its_workers_for_itself() -> None:
    account = Communicators(2)
    account.step([(0, 1), (2, 3)])
    assert account.step([(0, 1, 2, 3)]).closed == ((0, 1), (2, 3))
    assert account.step([(0, 1)]).closed == ((0, 1, 2, 3),)


@pytest.mark.parametrize(("peers", "degrees"), [(0, {1, 2, 4, 8}), (3, {1, 2, 4}), (1, {1, 2})])
def test_degrees_with_too_many_peers_are_not_planned(peers: int, degrees: set[int]) -> None:
    profile = Profile.from_flops(WanConfig(num_heads=8), degrees=(1, 2, 4, 8))
    item = Item(id="a", batch=1, frames=17, height=256, width=256)
    problem = Problem([[item]], profile, Cluster(nodes=(8,)), PlanOptions(bag_peers=peers))
    assert {degree for degree, _ in problem.modes("dit", item, 1)} == degrees


def test_where_no_smaller_bag_is_legal_a_larger_one_is_planned() -> None:
    profile = Profile.from_flops(WanConfig(num_heads=8), degrees=(4, 8))
    item = Item(id="a", batch=1, frames=17, height=256, width=256)
    problem = Problem([[item]], profile, Cluster(nodes=(8,)), PlanOptions(bag_peers=1))
    assert [degree for degree, _ in problem.modes("dit", item, 1)] == [4]


def test_the_memory_of_communicators_is_that_of_the_limit() -> None:
    assert communicators_gib((1,), 8, 11) == 0
    assert communicators_gib((1, 2), 2, 11) == PEER_GIB  # the one pair that exists
    assert communicators_gib((1, 2, 4, 8), 8, 11) == 11 * PEER_GIB
    assert communicators_gib((8,), 8, 3) == 7 * PEER_GIB  # alone, and above the limit
    assert communicators_gib((1, 2), 8, 0) == 7 * PEER_GIB
