"""How the calls of a step reach the workers of a generation: each by itself or, on nodes with a relay, in letters.

    submitter.begin()                               # of a dispatch
    submitter.connect(bags)                         # and then `submit`, `relay_turn`, `submit_finishes`, `submit_end`
    answers = submitter.send_letters(step)          # the calls to nodes with a relay go out here

It decides neither what is called nor in which order: `actors/run/dispatch.py` and `actors/run/steps.py` do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from actors.aside_turns import TurnTask
from actors.letters import FINISH, TURN, Answer, Letter, NodeAnswer, RelayedCall, RelayedResult, RelaySeat
from actors.messages import FinishTask, PublishedResult
from actors.plan.types import Module
from actors.refs import Ref
from actors.run.communicators import StepBags
from actors.run.dispatch import Call
from actors.run.relay_book import NodeRelay, Relays
from actors.step import Seat, StepData, SubmittedCall
from ops.degrees import BagRanks

CACHED = "cache/"  # first part of the names of results that came out of the cache
_METHODS: dict[Module, str] = {"text": "encode_text", "vae": "encode_vae", "dit": "dit"}  # of a worker


@dataclass(kw_only=True)
class Submitter:
    """Makes the calls of one generation's steps, and knows where each published result can be had."""

    generation: int
    world: tuple[Seat, ...]
    relays: Relays
    forming: tuple[Ref[None], ...]  # by rank: resolve when the workers have formed the generation
    results: dict[str, Ref[list[PublishedResult]]] = field(default_factory=dict)  # by the cascade that publishes them
    # by node; workers of other nodes are called directly
    relay_of: Mapping[str, NodeRelay] = field(default_factory=dict, init=False)
    # published by a call of a letter: cascade -> node
    _at_relays: dict[str, str] = field(default_factory=dict, init=False)
    _letters: dict[str, list[RelayedCall]] = field(default_factory=dict, init=False)  # by node: of the present dispatch
    _num_sent: Counter[str] = field(default_factory=Counter, init=False)  # letters to each node
    _ranks: dict[str, list[int]] = field(default_factory=dict, init=False)  # by node
    _seats: list[RelaySeat] = field(init=False)
    _groups: Sequence[Sequence[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.take_up_relays()
        self._seats = [
            RelaySeat(name=seat.name, handle=seat.handle, publishes_later=seat.publishes_later) for seat in self.world
        ]
        for rank, seat in enumerate(self.world):
            self._ranks.setdefault(seat.node, []).append(rank)

    def take_up_relays(self) -> None:
        """Call workers through all relays that there are now. Only while no step runs."""
        self.relay_of = self.relays.of(self.world)
        self._groups = self.relays.groups

    def begin(self) -> None:
        """A dispatch begins, with an empty letter to each node that has a relay."""
        self._letters = {node: [] for node in self.relay_of}

    def connect(self, bags: StepBags) -> None:
        """Have the members of bags close those that make room, and connect new ones while they work."""
        connected, closed = _by_member(bags.connected), _by_member(bags.closed)
        for rank in sorted({*connected, *closed}):
            arguments = (self.generation, tuple(connected.get(rank, ())), tuple(closed.get(rank, ())))
            if not self._relay(RelayedCall(rank=rank, method="prepare", name="prepare", arguments=arguments)):
                self.world[rank].handle.prepare.remote(*arguments)

    def submit(self, call: Call, data: Mapping[int, StepData]) -> SubmittedCall | None:
        """Call a worker for its part of a cascade; `data` by step. None where the call went into a letter, whose answer
        says what becomes of it."""
        seat, task = self.world[call.rank], call.task
        name, publishes = _bar_name(task.name), bool(task.publish) and not task.outlasts
        is_dit = task.module == "dit"
        pixels = [] if is_dit else [data[task.step].batches[item] for item in call.items]
        reads_data = not is_dit or any(source.startswith(CACHED) for source in call.needs)
        if seat.node in self._letters:
            relayed = RelayedCall(
                rank=call.rank,
                method=_METHODS[task.module],
                name=name,
                arguments=(task,),
                references=tuple(pixels or map(self._named, call.needs)),
                reads_data=reads_data,
                publishes=publishes,
            )
            self._relay(relayed)
            return None
        reference: Ref[object]
        if is_dit:
            results = [self._result(source) for source in call.needs]
            reference = seat.handle.dit.options(name=name).remote(task, *results)
        else:
            method = seat.handle.encode_text if task.module == "text" else seat.handle.encode_vae
            encoded = method.options(name=name).remote(task, *pixels)
            reference = encoded
            if publishes:
                self._publish(call, encoded)
        return SubmittedCall(
            worker=seat.name, name=task.name, module=task.module, reference=reference, reads_data=reads_data
        )

    def relay_turn(self, rank: int, task: TurnTask) -> bool:
        """Put a turn of an aside into the letter to its worker's node. False where there is none: nobody has been
        called then."""
        return self._relay(RelayedCall(rank=rank, method=TURN, name="aside", arguments=(task,)))

    def submit_finishes(self, tasks: Sequence[FinishTask]) -> dict[Ref[Answer], int]:
        """End the step on all workers; `tasks` by rank. Returns the answers to come with their ranks, but for workers
        whose call is in a letter."""
        finishes: dict[Ref[Answer], int] = {}
        for rank, (seat, task) in enumerate(zip(self.world, tasks, strict=True)):
            if not self._relay(RelayedCall(rank=rank, method=FINISH, name="finish", arguments=(task,))):
                finishes[seat.handle.finish_step.options(name="finish").remote(task)] = rank
        return finishes

    def submit_end(self, call: Call, end_s: float) -> SubmittedCall | None:
        """The end of an encode that outlasts its step, which ends at `end_s`: after the update in its worker's queue.
        It counts with the next step, and its planned times are from that step's start. None where it is in a letter."""
        seat, planned = self.world[call.rank], call.task
        start_s, over_s = planned.planned_start_s - end_s, planned.planned_end_s - end_s
        task = replace(planned, planned_start_s=start_s, planned_end_s=over_s)
        name, publishes = f"end of {_bar_name(planned.name)}", bool(task.publish)
        if self._relay(
            RelayedCall(rank=call.rank, method="outlasted", name=name, arguments=(task,), publishes=publishes)
        ):
            return None
        ended = seat.handle.outlasted.options(name=name).remote(task)
        if publishes:
            self._publish(call, ended)
        return SubmittedCall(worker=seat.name, name=task.name, module=task.module, reference=ended, reads_data=False)

    def send_letters(self, step: int) -> dict[Ref[NodeAnswer], tuple[str, ...]]:
        """Send the calls of a step to the nodes that have a relay, by the first of each group. Returns the answers to
        come, with the nodes of the group."""
        sent: dict[Ref[NodeAnswer], tuple[str, ...]] = {}
        for group in self._groups:
            letters = [self._letter(node, step) for node in group]
            sent[self.relay_of[group[0]].handle.deliver.options(name="letters").remote(letters)] = tuple(group)
        self._num_sent.update(iter(self.relay_of))
        self._letters = {}
        return sent

    def forget_but(self, cascades: Collection[str]) -> None:
        """No later call needs what other cascades have published."""
        self.results = {cascade: r for cascade, r in self.results.items() if cascade in cascades}
        self._at_relays = {cascade: node for cascade, node in self._at_relays.items() if cascade in cascades}

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _relay(self, call: RelayedCall) -> bool:
        """Put a call into the letter to its worker's node. False where there is none."""
        node = self.world[call.rank].node
        if node not in self._letters:
            return False
        self._letters[node].append(call)
        if call.publishes:
            self._at_relays[call.cascade_task.cascade] = node
        return True

    def _letter(self, node: str, step: int) -> Letter:
        is_first = not self._num_sent[node]
        here = self._ranks[node] if is_first else []
        return Letter(
            node=node,
            relay=self.relay_of[node].address,
            generation=self.generation,
            number=self._num_sent[node],
            step=step,
            calls=tuple(self._letters[node]),
            seats={rank: self._seats[rank] for rank in here},
            forming=tuple(self.forming[rank] for rank in here),
        )

    def _publish(self, call: Call, encode: Ref[list[PublishedResult]]) -> None:
        """Remember where the results of an encode that was called here can be had."""
        task = call.task
        self.results[task.cascade] = self._seats[call.rank].published(task, _bar_name(task.name), encode)

    def _result(self, source: str) -> Ref[list[PublishedResult]]:
        """What a cascade has published, for a call that is made here."""
        if source not in self.results:
            asked = self.relay_of[self._at_relays[source]].handle.published.options(name="handoff by relay")
            self.results[source] = asked.remote(self.generation, source)
        return self.results[source]

    def _named(self, source: str) -> Ref[list[PublishedResult]] | RelayedResult:
        """What a cascade has published, for a call in a letter: a result that another relay has is only named."""
        if (node := self._at_relays.get(source)) is None:
            return self.results[source]
        return RelayedResult(relay=self.relay_of[node].address, cascade=source)


def _by_member(bags: Collection[BagRanks]) -> dict[int, list[BagRanks]]:
    """The bags of each rank, in one order on all."""
    found: dict[int, list[BagRanks]] = {}
    for bag in sorted(bags):
        for rank in bag:
            found.setdefault(rank, []).append(bag)
    return found


def _bar_name(name: str) -> str:
    """Name of a call: that of its cascade without the step, which its bar on Ray's timeline has (`ray_calls.bar`)."""
    return name.rpartition(" s")[0]
