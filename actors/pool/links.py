"""Which links between hosts are slow, from what workers send over them. Pure: heartbeats and time in, findings out.

The rule: a link is slow where data moves at less than a quarter of the speed that the fastest quarter of the other
links has at least, and where the difference has taken a quarter of the last while. Links are compared with each other
alone, as nobody knows what a network ought to give: two hosts whose ways to each other are equally slow are not found.
Where more than a third are slow, and no host is at an end of all of these, the network is built so, as between racks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from actors.progress import LinkUse
from ops.units import MIB

_SLOWER = 4.0  # times
_NOTICEABLE = 0.25  # share of the time that it takes
_LEAST_BYTES = MIB  # in a window, to know how fast a link is
_USUAL = 75  # percentile of the others: a slow host makes several links slow
_FEW = 1 / 3  # of all links, unless they have a host in common
_AGAIN_S = 3600.0  # a link that is still slow is named again
_GATHER_S = 25.0  # from the first that is found: a worker tells of it for 30 s, and by then most others have told


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowLink:
    """A link that is slow, with what it gives and what others give, in bytes per second."""

    host: str
    other: str
    rate: float
    usual: float
    busy_s: float
    over_s: float


@dataclass
class LinkWatch:
    """Remembers which links it has already named.

    Workers tell of their links one after the other: of a slow host that would be an event for each of them, and a few
    workers do not show what is usual. So all that are slow are named together, `_GATHER_S` after some have been found.
    """

    _named_at: dict[tuple[str, str], float] = field(default_factory=dict, init=False)
    _found_at: float | None = field(default=None, init=False)  # since when there have been some to name

    def look(self, uses: Iterable[LinkUse], now: float) -> list[SlowLink]:
        """Slow links that have not been named within the hour; `now` in seconds of any clock, which may begin anew, as
        that of a monitor does which is started again on another host."""
        self._named_at = {link: at for link, at in self._named_at.items() if 0 <= now - at < _AGAIN_S}
        fresh = [one for one in slow_links(uses) if (one.host, one.other) not in self._named_at]
        if not fresh:
            self._found_at = None
            return []
        if self._found_at is None or now < self._found_at:
            self._found_at = now
        if now - self._found_at < _GATHER_S:
            return []
        self._found_at = None
        self._named_at.update({(one.host, one.other): now for one in fresh})
        return fresh


def slow_links(uses: Iterable[LinkUse]) -> list[SlowLink]:
    """The slow ones among the links that workers have used, the slowest first."""
    by_link: dict[tuple[str, str], list[LinkUse]] = defaultdict(list)
    for use in uses:
        by_link[use.host, use.other].append(use)
    sent = {link: sum(use.num_bytes for use in some) for link, some in by_link.items()}
    known = {link: some for link, some in by_link.items() if sent[link] >= _LEAST_BYTES}
    rates = {link: _rate_of(some) for link, some in known.items()}
    in_order = sorted(rates.values())
    found: list[SlowLink] = []
    for link, some in known.items() if len(known) > 1 else ():
        rate, usual = rates[link], _usual_beside(rates[link], in_order)
        busiest = max(some, key=lambda use: use.busy_s)
        lost_s = busiest.busy_s - sent[link] / usual
        if busiest.fills and rate * _SLOWER < usual and lost_s >= _NOTICEABLE * busiest.over_s:
            host, other = link
            busy_s, over_s = busiest.busy_s, busiest.over_s
            found.append(SlowLink(host=host, other=other, rate=rate, usual=usual, busy_s=busy_s, over_s=over_s))
    if len(found) > _FEW * len(known) and not shared_end(found):
        return []
    return sorted(found, key=lambda one: one.rate)


def shared_end(links: Sequence[SlowLink]) -> str:
    """The host at an end of all of these, the one that sends if it is both; "" where there is none."""
    ends = [{one.host, one.other} for one in links]
    shared = set.intersection(*ends) if ends else set()
    return links[0].host if links and links[0].host in shared else next(iter(sorted(shared)), "")


def _rate_of(uses: Sequence[LinkUse]) -> float:
    """Bytes per second of a link, at least: what its workers have sent may have gone at the same time, and each of them
    has seen its share alone."""
    longest_s = max(use.busy_s for use in uses)
    together = sum(use.num_bytes for use in uses) / longest_s if longest_s else 0.0
    return max(together, *(use.rate for use in uses))


def _usual_beside(rate: float, in_order: Sequence[float]) -> float:
    """The percentile of the others; `in_order` are all. Without a sort for each of them: of thousands it would take the
    controller seconds."""
    own, last = bisect_left(in_order, rate), len(in_order) - 2
    low = int(last * _USUAL / 100)
    first, second = (in_order[place + (place >= own)] for place in (low, min(low + 1, last)))
    return first + (second - first) * (last * _USUAL / 100 - low)
