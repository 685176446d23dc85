"""An actor per node that makes a step's calls to the workers of its node: the controller sends a letter instead.

    relay.deliver.remote([Letter(...), ...])    # NodeAnswer: what workers have said at the end of the step
    relay.published.remote(generation, cascade) # what one of its encodes leaves for workers of other nodes

A call of Ray takes 0.2 to 0.4 ms of CPU in the process that makes it, and 1,024 workers need some 4,000 in a step. A
letter to a node of eight takes as much as one of them, and one with the letters of ten nodes hardly more: the first
relay of a group hands the others' on, and answers for all. What an encode leaves for another node goes from relay to
relay. Workers get the same calls in the same order as without a relay: it sends those of a letter at once, letters by
their numbers, and the first when its workers have formed the generation. It decides nothing. What fails is in its
answer, as soon as it is known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import cast

import ray

from actors.aside_turns import TurnReport, TurnTask
from actors.letters import (
    FINISH,
    TURN,
    CommitCall,
    KeeperCall,
    Letter,
    NodeAnswer,
    RelayedCall,
    RelayedResult,
    RelayHandle,
    RelaySeat,
)
from actors.messages import PublishedResult, StaleGeneration
from actors.names import NAMESPACE
from actors.ray_calls import FOR_GOOD, GONE, answer_of
from actors.refs import Ref
from actors.run.failures import exceeded_of, failed_turn, last_line, lost_argument, why_of

log = logging.getLogger(__name__)

ENDED_S = 60.0  # a worker that has finished a step has ended its calls; their answers may arrive this much later
_GRACE_S = 0.2  # after the first failure, for others that say more of it: that a worker is gone


def relay_at(address: str) -> RelayHandle:
    """The relay with this address. Raises ValueError where there is none any more."""
    found: RelayHandle = ray.get_actor(address, namespace=NAMESPACE)
    return found


class Relay:
    """Plain class with asynchronous methods; `actors.run.relay_book` makes the actor of it."""

    def __init__(self, find: Callable[[str], RelayHandle] = relay_at, *, ended_s: float = ENDED_S) -> None:
        """`find` gives another relay by its address; it may take a moment, and is called in a thread. `ended_s`: how
        much later than the end of a step on a worker its other answers may arrive."""
        self._find, self._ended_s = find, ended_s
        self._others: dict[str, RelayHandle] = {}  # by address
        self._generation, self._next = -1, 0  # the letter that is to be sent next
        self._changed = asyncio.Condition()
        self._seats: dict[int, RelaySeat] = {}
        self._made: dict[str, asyncio.Future[Ref[list[PublishedResult]]]] = {}  # by cascade, of this generation
        self._steps: dict[str, int] = {}  # of the cascades in `_made` that have been sent
        self._watching: set[asyncio.Task[None]] = set()  # a loop itself does not keep its tasks

    async def deliver(self, letters: Sequence[Letter]) -> NodeAnswer:
        """The letters of a group of nodes: the first is this relay's own, it hands on the others. Answers when all have
        been answered, or when something has failed. Raises StaleGeneration as `step`."""
        own, *others = letters
        if not others:
            return await self.step(own)
        answer, failed, raised = NodeAnswer(), asyncio.Event(), list[Exception]()

        async def answered(letter: Letter) -> None:
            try:
                answer.add(await (self.step(letter) if letter is own else self._handed_on(letter)))
            except (ray.exceptions.RayError, ValueError) as error:
                answer.lost[letter.node] = last_line(str(error)) or type(error).__name__
            except Exception as error:
                raised.append(error)
            if answer.has_failed or raised:
                failed.set()

        sent, failure = [self._keep(answered(one)) for one in letters], self._keep(_is_set(failed))
        await _until(sent, failure)
        if failed.is_set() and not raised:
            await asyncio.sleep(0.0 if answer.failures.dead else _GRACE_S)
        failure.cancel()
        if raised:
            raise raised[0]
        return answer.by_now()

    async def step(self, letter: Letter) -> NodeAnswer:
        """Make the calls of a letter after those before it. Answers when its workers have ended the step and their DiT
        cascades, or when something has failed. Raises StaleGeneration once another generation has begun."""
        await self._turn_of(letter)
        answer = NodeAnswer()
        for rank, forming in zip(letter.seats, letter.forming, strict=True):
            await self._formed(letter.seats[rank].name, forming, answer)
        if letter.generation != self._generation:  # it was over before its workers had formed it
            raise StaleGeneration(f"generation {letter.generation} has ended: the relay serves {self._generation}.")
        self._forget_before(letter.step - 1)
        results = {} if answer.has_failed else await self._asked_for(letter, answer)
        if letter.generation != self._generation:
            raise StaleGeneration(f"generation {letter.generation} has ended: the relay serves {self._generation}.")
        sent = [] if answer.has_failed else [(call, self._send(call, results)) for call in letter.calls]
        async with self._changed:
            if letter.generation == self._generation:
                self._next += 1
            self._changed.notify_all()
        return answer if answer.has_failed else await self._watched(sent, answer)

    async def published(self, generation: int, cascade: str) -> list[PublishedResult]:
        """What an encode of a letter leaves for other workers; may be asked for before the letter has come. Raises what
        the encode has raised, and StaleGeneration once another generation has begun."""
        if generation > self._generation:
            async with self._changed:
                await self._changed.wait_for(lambda: generation <= self._generation)
        if generation < self._generation:
            raise StaleGeneration(f"generation {generation} has ended: the relay serves {self._generation}.")
        try:
            return await answer_of(await self._result(cascade))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    async def hold(self, calls: Sequence[KeeperCall]) -> bool:
        """Have keepers hold shards. Whether all do. Does not wait for the others, which may wait for that shard, once
        one does not: answers False, or raises RuntimeError with what has failed."""
        said = asyncio.Queue[tuple[KeeperCall, bool | Exception]]()

        async def asked(call: KeeperCall) -> None:
            try:
                said.put_nowait((call, await answer_of(call.made())))
            except Exception as error:
                said.put_nowait((call, error))

        for call in calls:
            self._keep(asked(call))
        for _ in calls:
            call, answer = await said.get()
            if isinstance(answer, Exception):
                cause = answer.cause if isinstance(answer, ray.exceptions.RayTaskError) else answer
                why = last_line(str(cause))
                raise RuntimeError(f"the keeper of node {call.node[:8]}: {type(cause).__name__}: {why}")
            if not answer:
                return False
        return True

    async def commit(self, call: CommitCall) -> list[str]:
        """Tell keepers of a commit. Answers when all have heard of it, or with the first that is gone for good."""
        said = asyncio.Queue[str]()

        async def told(name: str) -> None:
            lost = ""
            try:
                await answer_of(call.made(name))
            except FOR_GOOD:
                lost = name
            except Exception as error:
                log.debug("keeper %s may not have heard of step %d: %s", name, call.step, error)
            said.put_nowait(lost)

        for name in call.keepers:
            self._keep(told(name))
        for _ in call.keepers:
            if lost := await said.get():
                return [lost]
        return []

    async def here(self) -> None:
        """Answers at once, whatever it waits for: a sign of life."""

    # -- parts ---------------------------------------------------------------------------------------------------------

    async def _other(self, address: str) -> RelayHandle:
        if address not in self._others:
            self._others[address] = await asyncio.to_thread(self._find, address)
        return self._others[address]

    async def _handed_on(self, letter: Letter) -> NodeAnswer:
        relay = await self._other(letter.relay)
        return await answer_of(relay.step.options(name="letter").remote(letter))

    async def _asked_for(self, letter: Letter, answer: NodeAnswer) -> dict[RelayedResult, Ref[object]]:
        """What calls of the letter need of encodes that other relays have sent, each asked for once. References may
        still wait for it; `answer` says which relay is gone."""
        found: dict[RelayedResult, Ref[object]] = {}
        for call in letter.calls:
            for one in call.references:
                if isinstance(one, RelayedResult) and one.relay != letter.relay and one not in found:
                    try:
                        relay = await self._other(one.relay)
                    except ValueError as error:
                        answer.failures.failed[self._seats[call.rank].name] = f"{call.name} did not run: {error}"
                        return {}
                    asked = relay.published.options(name="handoff by relay")
                    found[one] = asked.remote(letter.generation, one.cascade)
        return found

    async def _turn_of(self, letter: Letter) -> None:
        """Returns when all letters before this one have been sent."""

        def is_next() -> bool:
            if letter.number == 0 and letter.generation > self._generation:
                return True
            stale = letter.generation < self._generation
            return stale or (letter.generation == self._generation and letter.number == self._next)

        async with self._changed:
            await self._changed.wait_for(is_next)
            if letter.generation > self._generation:
                self._begin(letter)
                self._changed.notify_all()
        if letter.generation < self._generation:
            raise StaleGeneration(f"generation {letter.generation} has ended: the relay serves {self._generation}.")

    def _begin(self, letter: Letter) -> None:
        for waiting in self._made.values():
            if not waiting.done():
                waiting.set_exception(StaleGeneration(f"generation {self._generation} has ended."))
        self._generation, self._next, self._made, self._seats = letter.generation, 0, {}, letter.seats
        self._steps = {}

    def _forget_before(self, step: int) -> None:
        """Drop the encode results of earlier steps. No worker needs them: a letter comes when all workers have ended
        the step two before its own."""
        for cascade in [cascade for cascade, of in self._steps.items() if of < step]:
            del self._steps[cascade], self._made[cascade]

    async def _formed(self, worker: str, forming: Ref[None], answer: NodeAnswer) -> None:
        try:
            await answer_of(forming)
        except GONE as error:
            log.debug("%s is gone: %s", worker, error)
            answer.failures.dead.append(worker)
        except ray.exceptions.RayError as error:
            why = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            answer.failures.failed[worker] = f"could not form the generation: {last_line(str(why))}"

    def _result(self, cascade: str) -> asyncio.Future[Ref[list[PublishedResult]]]:
        return self._made.setdefault(cascade, asyncio.get_running_loop().create_future())

    def _send(self, call: RelayedCall, results: Mapping[RelayedResult, Ref[object]]) -> Ref[object]:
        seat, references = self._seats[call.rank], list[object]()
        for one in call.references:
            if isinstance(one, RelayedResult):  # of this node: its encode stood before it
                references.append(results[one] if one in results else self._made[one.cascade].result())
            else:
                references.append(one)
        method = getattr(seat.handle, call.method).options(name=call.name)
        reference: Ref[object] = method.remote(*call.arguments, *references)
        if call.publishes:
            task, encode = call.cascade_task, cast(Ref[list[PublishedResult]], reference)
            self._steps[task.cascade] = task.step
            self._result(task.cascade).set_result(seat.published(task, call.name, encode))
        return reference

    async def _watched(self, sent: list[tuple[RelayedCall, Ref[object]]], answer: NodeAnswer) -> NodeAnswer:
        """Returns the answer once the end calls, the DiT calls and the turns have ended well, or one call has failed.
        Of an encode only missing pixels count as a failure: any other one reaches the DiT call that waits for the
        result."""
        failed = asyncio.Event()

        def watch(method: str) -> list[asyncio.Task[None]]:
            return [self._keep(self._watch(call, one, answer, failed)) for call, one in sent if call.method == method]

        turns = watch(TURN)
        ends, dits, failure = watch(FINISH), watch("dit"), self._keep(_is_set(failed))
        for encode in ("encode_text", "encode_vae"):
            watch(encode)
        await _until(ends, failure)
        late = [] if failed.is_set() else await _until(dits, failure, self._ended_s)
        if not failed.is_set():
            await _until(turns, failure, self._ended_s)
        if failed.is_set():
            await asyncio.sleep(0.0 if answer.failures.dead else _GRACE_S)
        elif late:
            call = next(
                call for (call, _), task in zip([s for s in sent if s[0].method == "dit"], dits) if task in late
            )
            name = self._seats[call.rank].name
            answer.failures.failed[name] = f"{call.name} has not answered, although its worker has finished the step"
        failure.cancel()
        return answer.by_now()

    async def _watch(
        self, call: RelayedCall, reference: Ref[object], answer: NodeAnswer, failed: asyncio.Event
    ) -> None:
        worker = self._seats[call.rank].name
        try:
            value = await answer_of(reference)
        except ray.exceptions.RayError as error:
            _note(call, worker, error, answer)
            if answer.has_failed:
                failed.set()
        else:
            if call.method == FINISH:
                assert isinstance(value, tuple), "a report and a snapshot"
                answer.ends[call.rank] = value
            elif call.method == TURN:
                assert isinstance(value, TurnReport)
                answer.turns[call.rank] = value

    def _keep(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)
        return task


def _note(call: RelayedCall, worker: str, error: ray.exceptions.RayError, answer: NodeAnswer) -> None:
    """What the error of a worker's call says of the step."""
    found = answer.failures
    if call.method == FINISH:
        if isinstance(error, GONE):
            log.debug("%s is gone: %s", worker, error)
            found.dead.append(worker)
            return
        own = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
        found.failed[worker] = last_line(str(error)) if own is None else str(own)
        found.exceeded += exceeded_of(error)
        return
    if call.method == TURN:  # of an aside, which ends no step
        task = call.arguments[0]
        assert isinstance(task, TurnTask), "only a turn is asked for with one"
        if not isinstance(error, GONE):
            answer.turns[call.rank] = failed_turn(task.aside.name, error)
        return
    lost = call.reads_data and lost_argument(error)
    found.pixels_lost |= lost
    if (call.method == "dit" or lost) and (why := why_of(error)):
        found.failed.setdefault(worker, f"{call.name} did not run: {why}")
        found.exceeded += exceeded_of(error)


async def _is_set(event: asyncio.Event) -> None:
    await event.wait()


async def _until(
    tasks: list[asyncio.Task[None]], failure: asyncio.Task[None], timeout_s: float | None = None
) -> set[asyncio.Task[None]]:
    """Wait for all of these, or for a failure, at most `timeout_s`. Returns those that have not ended."""
    left = {task for task in tasks if not task.done()}
    while left and not failure.done():
        done, _ = await asyncio.wait({*left, failure}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            break
        left -= done
    return left
