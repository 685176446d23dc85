"""Which links are called slow, and when they are named."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from actors.pool.links import LinkWatch, SlowLink, shared_end, slow_links
from actors.progress import LinkUse
from actors.worker.outgoing import WINDOW_S

MIB = 2**20
HOSTS = ("a", "b", "c")
EIGHT = [f"x{n}" for n in range(8)]


def use(host: str, other: str, mib_per_s: float, mib: float = 200.0, fills: bool = True) -> LinkUse:
    return LinkUse(
        host=host,
        other=other,
        num_bytes=int(mib * MIB),
        busy_s=mib / mib_per_s,
        rate=mib_per_s * MIB,
        fills=fills,
        over_s=30.0,
    )


def all_links(mib_per_s: float, mib: float = 200.0) -> dict[tuple[str, str], LinkUse]:
    return {(a, b): use(a, b, mib_per_s, mib) for a, b in itertools.permutations(HOSTS, 2)}


def named(links: dict[tuple[str, str], LinkUse]) -> list[tuple[str, str]]:
    return [(one.host, one.other) for one in slow_links(links.values())]


def test_a_link_slower_than_the_others_is_found() -> None:
    links = all_links(1000.0)
    assert named(links) == []
    links["a", "b"] = use("a", "b", 10.0)
    (found,) = slow_links(links.values())
    assert (found.host, found.other, found.rate, found.usual) == ("a", "b", 10.0 * MIB, 1000.0 * MIB)
    assert (found.busy_s, found.over_s) == (20.0, 30.0)


def test_all_links_of_a_host_that_is_slow_either_way_are_found() -> None:
    """Four of six: the others are still what is usual."""
    links = all_links(1000.0)
    for other in ("b", "c"):
        links["a", other], links[other, "a"] = use("a", other, 8.0), use(other, "a", 9.0)
    assert sorted(named(links)) == [("a", "b"), ("a", "c"), ("b", "a"), ("c", "a")]


def test_what_hardly_costs_anything_is_no_matter() -> None:
    links = all_links(1000.0)
    links["a", "b"] = use("a", "b", 100.0, mib=500.0)  # 5 of 30 s
    assert named(links) == []
    links["a", "b"] = use("a", "b", 300.0, mib=5000.0)  # 17 of 30 s, but hardly slower
    assert named(links) == []


def test_a_link_on_which_little_messages_wait_for_each_other_may_be_as_fast_as_the_others() -> None:
    links = all_links(1000.0)
    links["a", "b"] = use("a", "b", 10.0, fills=False)
    assert named(links) == []
    others = {pair: use(*pair, 500.0, fills=False) for pair in links}
    assert named({**others, ("a", "b"): use("a", "b", 10.0)}) == [("a", "b")], "they give that much at least"


def test_links_that_are_alike_or_alone_are_not_compared_with_anything_else() -> None:
    assert named(all_links(5.0)) == []
    assert named({("a", "b"): use("a", "b", 5.0)}) == []
    assert named({("a", "b"): use("a", "b", 5.0), ("b", "a"): use("b", "a", 1000.0)}) == [("a", "b")]


def test_a_link_is_as_fast_as_the_fastest_of_its_workers() -> None:
    """One of them may send little messages alone."""
    links = [*all_links(1000.0).values(), use("a", "b", 10.0)]
    assert slow_links(links) == []


def test_workers_that_send_at_the_same_time_share_a_link() -> None:
    """Eight of them get an eighth of it each, as many bytes as one alone would send."""
    links = all_links(1000.0, mib=20_000.0)
    del links["a", "b"]
    shared = [use("a", "b", 125.0, mib=2500.0)] * 8
    assert slow_links([*links.values(), *shared]) == []
    slow = [use("a", "b", 12.5, mib=250.0)] * 8
    (found,) = slow_links([*links.values(), *slow])
    assert (found.rate, found.usual, found.busy_s) == (100.0 * MIB, 1000.0 * MIB, 20.0)


def test_each_link_is_compared_with_all_the_others() -> None:
    rates = np.random.default_rng(7).choice([1.0, 2.0, 30.0, 400.0, 5000.0], 40)
    links = [use("a", f"h{n}", rate, mib=20 * rate) for n, rate in enumerate(rates)]
    found = {one.other: one.usual / MIB for one in slow_links(links)}
    for n, rate in enumerate(rates):
        usual = np.percentile(np.delete(rates, n), 75)
        assert (f"h{n}" in found) == (4 * rate < usual)
        assert found.get(f"h{n}", usual) == pytest.approx(usual)
    assert 0 < len(found) < len(links)


def racks(between: float) -> list[LinkUse]:
    """All-to-all between two racks of eight hosts, with another speed between the racks than in them."""
    hosts = [f"{rack}{n}" for rack in "xy" for n in range(8)]
    pairs = itertools.permutations(hosts, 2)
    return [use(a, b, 100.0 if a[0] == b[0] else between, mib=500.0) for a, b in pairs]


def test_a_network_of_two_speeds_is_not_called_slow_but_a_host_in_it_is() -> None:
    assert slow_links(racks(20.0)) == []
    links = racks(20.0)
    links = [use(one.host, one.other, 1.0, mib=500.0) if "x3" in (one.host, one.other) else one for one in links]
    assert slow_links(links) == [], "a host cannot be told from the network where that has two speeds"
    links = [use(one.host, one.other, 1.0, mib=500.0) if "x3" in (one.host, one.other) else one for one in racks(100.0)]
    found = slow_links(links)
    assert len(found) == 30 and shared_end(found) == "x3"


def test_what_slow_links_have_in_common_is_the_host_that_sends() -> None:
    def link(host: str, other: str) -> SlowLink:
        return SlowLink(host=host, other=other, rate=1.0, usual=9.0, busy_s=20.0, over_s=30.0)

    assert shared_end([]) == ""
    assert shared_end([link("b", "a")]) == "b"
    assert shared_end([link("b", "a"), link("a", "c")]) == "a"
    assert shared_end([link("b", "a"), link("a", "c"), link("c", "b")]) == ""


def test_thousands_of_links_are_looked_through_in_a_moment() -> None:
    """By the controller, between two steps."""
    links = [use(f"h{n}", f"h{n + m}", 100.0 + n, mib=2000.0) for n in range(200) for m in range(1, 41)]
    began = time.thread_time()
    slow_links(links)
    assert time.thread_time() - began < 1.0  # 0.04 s; with a sort for each of them 3


def test_a_few_bytes_say_nothing_of_a_link() -> None:
    links = {**all_links(1000.0), ("a", "b"): use("a", "b", 0.01, mib=0.3)}
    assert named(links) == []
    few = {("a", "b"): use("a", "b", 10.0), ("b", "a"): use("b", "a", 1000.0, mib=0.5)}
    assert named(few) == []


def test_a_slow_link_is_named_once_in_an_hour() -> None:
    watch, links = LinkWatch(), all_links(1000.0)
    links["a", "b"] = use("a", "b", 10.0)
    assert watch.look(links.values(), 70.0) == []
    assert len(watch.look(links.values(), 100.0)) == 1
    assert watch.look(links.values(), 101.0) == []
    links["b", "c"] = use("b", "c", 9.0)
    assert watch.look(links.values(), 102.0) == []
    assert [(one.host, one.other) for one in watch.look(links.values(), 132.0)] == [("b", "c")]
    assert watch.look(links.values(), 100.0 + 3601.0) == []
    assert [one.host for one in watch.look(links.values(), 100.0 + 3631.0)] == ["a"]
    assert watch.look(links.values(), 5.0) == []
    assert len(watch.look(links.values(), 36.0)) == 2, "by another clock nobody knows when"
    assert watch.look(links.values(), 70.0) == []


def test_what_workers_tell_one_after_the_other_is_named_together() -> None:
    links = [use(a, b, 1.0 if "x3" in (a, b) else 100.0) for a, b in itertools.permutations(EIGHT, 2)]
    watch, named_at = LinkWatch(), dict[float, int]()
    for now in range(80):
        come = [one for one in links if EIGHT.index(one.host) * 3 <= now]
        if found := watch.look(come, float(now)):
            named_at[now] = len(found)
    assert list(named_at.values()) == [14] and min(named_at) < 60


def test_a_network_of_two_speeds_is_not_called_slow_while_few_have_told_of_theirs() -> None:
    links = racks(20.0)
    watch = LinkWatch()
    first = [one for one in links if one.host == "x0"]
    assert slow_links(first), "those of one host alone have it in common"
    assert all(watch.look(first if now < 3 else links, float(now)) == [] for now in range(100))


def test_a_link_that_is_slow_in_one_window_is_named_while_its_worker_tells_of_it() -> None:
    links = all_links(1000.0)
    slow, watch = {**links, ("a", "b"): use("a", "b", 10.0)}, LinkWatch()
    looks = [watch.look((slow if 10 <= now < 10 + WINDOW_S else links).values(), float(now)) for now in range(80)]
    assert sum(map(len, looks)) == 1
