"""What the workers of a generation compute with, for the event that says it. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from actors.messages import WorkerInfo
from actors.records.events import EnvironmentSeen
from ops.counted import first_of

GPU = "gpu"  # the name of a worker's GPU in what it says of its environment


def environment_of(
    infos: Sequence[WorkerInfo], from_step: int, before: EnvironmentSeen | None
) -> EnvironmentSeen | None:
    """The event with the environments that these workers report, and what has changed since the event `before`. None if
    no worker reports one, as in benchmarks."""
    told = [(info.host, dict(info.environment)) for info in infos if info.environment]
    if not told:
        return None
    names = sorted({name for _, one in told for name in one} - {GPU})
    found = EnvironmentSeen(
        from_step=from_step,
        software={name: _value([(host, one.get(name, "none")) for host, one in told]) for name in names},
        gpus=dict(sorted(Counter(one[GPU] for _, one in told if GPU in one).items())),
        hosts=tuple(dict.fromkeys(host for host, _ in told)),
    )
    return found if before is None else found.after(before)


def _value(told: Sequence[tuple[str, str]]) -> str:
    """The value that all hosts have; else that of most, and each other one with its hosts."""
    hosts: dict[str, dict[str, None]] = defaultdict(dict)
    for host, value in told:
        hosts[value][host] = None
    most, *others = sorted(hosts, key=lambda value: (-len(hosts[value]), value))
    return " or ".join([most, *(f"{value} ({first_of(list(hosts[value]))})" for value in others)])
