"""Nodes on which no worker is started for a while, as those on one of their GPUs ended before their first step.

A GPU that has failed looks free to Ray: what was started in the place of its worker would be started there again, and
end again, every few seconds as long as the run lasts. Ray lets nobody choose a GPU of a node, so the node rests. Its
other workers go on: of a full node the failed GPU is the only one that is free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from actors.messages import HostGpu

_IN_A_ROW = 2  # once may be chance


@dataclass(frozen=True, slots=True)
class _Record:
    """What is known of a GPU since a worker on it has last finished a step."""

    ended: int = 0
    until: float = 0.0  # monotonic seconds
    rest_s: float = 0.0  # the last one


class Quarantine:
    """The GPUs of one run on which workers have ended before their first step.

    if (rest_s := quarantine.ended(where, now)) is not None: ...    # nobody starts on its node for so long
    quarantine.worked(where)                                        # a worker there has finished a step
    quarantine.resting(now)                                         # nodes
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        """The seconds of a first rest, each after it twice as long, and of the longest."""
        self._first_s, self._longest_s = first_s, longest_s
        self._records: dict[tuple[str, str], _Record] = {}

    def ended(self, where: HostGpu, now: float) -> float | None:
        """A worker there has ended before its first step. Returns for how long its node rests, if that begins now: one
        that was started before a rest began does not make it longer."""
        key = (where.node, where.gpu)
        before = self._records.get(key, _Record())
        if now < before.until:
            return None
        record = replace(before, ended=before.ended + 1)
        if record.ended >= _IN_A_ROW:
            longest_s = self._longest_s if where.node else self._first_s  # it keeps workers from nodes that work
            rest_s = min(2 * record.rest_s, longest_s) if record.rest_s else self._first_s
            record = replace(record, rest_s=rest_s, until=now + rest_s)
        self._records[key] = record
        return record.rest_s if record.until > now else None

    def distrust(self, where: HostGpu, now: float, rest_s: float) -> None:
        """This GPU seems to compute wrongly: its node rests for `rest_s`."""
        self._records[where.node, where.gpu] = _Record(ended=_IN_A_ROW, until=now + rest_s, rest_s=rest_s)

    def worked(self, where: HostGpu) -> None:
        """A worker there has finished a step."""
        for key in ((where.node, where.gpu), (where.node, ""), ("", "")):
            self._records.pop(key, None)

    def count(self, where: HostGpu) -> int:
        """How many workers have ended there in a row before their first step."""
        record = self._records.get((where.node, where.gpu))
        return record.ended if record is not None else 0

    def resting(self, now: float) -> set[str]:
        """The nodes on which nobody starts now; "" among them stands for all."""
        return {node for (node, _), record in self._records.items() if now < record.until}
