"""The relay of a node: calls in their order, answers of a step together, and failures as soon as they are known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.aside_turns import TurnReport, TurnTask
from actors.letters import (
    FINISH,
    TURN,
    CommitCall,
    Failures,
    KeeperCall,
    Letter,
    NodeAnswer,
    RelayedCall,
    RelayedResult,
    RelaySeat,
    held,
)
from actors.messages import CascadeTask, MemoryExceeded, OutOfMemory, StaleGeneration
from actors.plan.types import Module
from actors.run import relay_book, steps
from actors.run.relay import ENDED_S, Relay
from actors.run.relay_book import NodeRelay, Relays, groups_of
from tests.actors.fakes import Handle

TASK_ERROR: Any = ray.exceptions.RayTaskError


class Crew:
    """Workers by rank, whose answers are futures that the test resolves; `order` has their calls as they came."""

    def __init__(self, ranks: int = 2, node: str = "a") -> None:
        self.node = node
        self.order: list[tuple[str, str]] = []
        self.answers: dict[tuple[str, str], asyncio.Future[Any]] = {}
        self.given: dict[tuple[str, str], tuple[Any, ...]] = {}
        self.seats = {
            n: RelaySeat(name=f"w{n}", handle=self._handle(f"w{n}"), publishes_later=False) for n in range(ranks)
        }
        self.formed = tuple(self._future() for _ in range(ranks))

    def _future(self) -> Any:
        return asyncio.get_running_loop().create_future()

    def _handle(self, worker: str) -> Any:
        crew = self

        class Handle:
            def __getattr__(self, method: str) -> Any:
                def remote(*arguments: Any) -> Any:
                    what = getattr(arguments[0], "cascade", method)
                    crew.order.append((worker, what))
                    crew.given[worker, what] = arguments
                    crew.answers[worker, what] = crew._future()
                    return crew.answers[worker, what]

                return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=remote))

        return Handle()

    def letter(self, number: int, *calls: RelayedCall, generation: int = 1) -> Letter:
        first = number == 0
        return Letter(
            node=self.node,
            relay=self.node,
            generation=generation,
            number=number,
            step=number,
            calls=calls,
            seats=self.seats if first else {},
            forming=self.formed if first else (),
        )

    def form(self) -> None:
        for one in self.formed:
            one.set_result(None)


def started(handle: Any) -> NodeRelay:
    return NodeRelay(address="", handle=handle)


def task_of(name: str, module: Module) -> CascadeTask:
    return CascadeTask(generation=1, step=0, cascade=name, name=f"{module} {name}", module=module, bag=(0,), samples=(),
                       pieces=(), planned_start_s=0.0, planned_end_s=1.0)  # fmt: skip


def dit(rank: int, name: str = "d", **more: Any) -> RelayedCall:
    return RelayedCall(rank=rank, method="dit", name=f"dit {name}", arguments=(task_of(name, "dit"),), **more)


def encode(rank: int, name: str = "v", step: int = 0, **more: Any) -> RelayedCall:
    task = replace(task_of(name, "vae"), step=step)
    return RelayedCall(rank=rank, method="encode_vae", name=f"vae {name}", arguments=(task,),
                       reads_data=True, **more)  # fmt: skip


def finish(rank: int) -> RelayedCall:
    return RelayedCall(rank=rank, method=FINISH, name="finish", arguments=(SimpleNamespace(),))


def play(case: Callable[[Relay, Crew], Any], ended_s: float = ENDED_S) -> None:
    async def run() -> None:
        await asyncio.wait_for(case(Relay(ended_s=ended_s), Crew()), 20)

    asyncio.run(run())


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_letters_are_sent_in_their_order_once_the_workers_have_formed() -> None:
    async def case(relay: Relay, crew: Crew) -> None:
        second = asyncio.ensure_future(relay.step(crew.letter(1, dit(0, "b"), finish(0))))
        first = asyncio.ensure_future(relay.step(crew.letter(0, dit(0, "a"), encode(1, "v"))))
        await settled()
        assert crew.order == [], "nobody has formed the generation"
        crew.form()
        await settled()
        assert crew.order == [("w0", "a"), ("w1", "v"), ("w0", "b"), ("w0", FINISH)]
        crew.answers["w0", "a"].set_result(None)
        assert (await first).ends == {}
        crew.answers["w0", FINISH].set_result(("report", None))
        await settled()
        assert not second.done(), "its DiT cascade has not ended"
        crew.answers["w0", "b"].set_result(None)
        answer = await second
        assert answer.ends == {0: ("report", None)} and not answer.has_failed

    play(case)


async def answer_to(relay: Relay, crew: Crew, *calls: RelayedCall, **errors: Exception) -> NodeAnswer:
    """The answer when these calls of w0 or w1 fail, and no other ever ends."""
    crew.form()
    asked = asyncio.ensure_future(relay.step(crew.letter(0, *calls)))
    await settled()
    for name, error in errors.items():
        worker, _, what = name.partition("_")
        crew.answers[worker, what].set_exception(error)
    return await asked


def test_a_dead_worker_is_named_without_waiting_for_the_others() -> None:
    async def case(relay: Relay, crew: Crew) -> None:
        gone = ray.exceptions.ActorDiedError()
        found = await answer_to(relay, crew, dit(1), finish(0), finish(1), w1_d=gone, w1_finish_step=gone)
        assert found == NodeAnswer(failures=Failures(dead=["w1"]))

    play(case)


def test_why_a_cascade_did_not_run_is_told_and_what_exceeded_the_memory() -> None:
    exceeded = MemoryExceeded(
        worker="w0", step=0, name="dit", module="dit", degree=1, pieces=(), peak_gib=3.0, room_gib=2.0
    )

    async def case(relay: Relay, crew: Crew) -> None:
        error = TASK_ERROR("dit", "", OutOfMemory(exceeded))
        found = await answer_to(relay, crew, dit(0), finish(0), w0_d=error)
        failures = found.failures
        assert failures.exceeded == [exceeded] and not failures.dead
        assert failures.failed["w0"].startswith("dit d did not run: ") and not failures.pixels_lost

    play(case)


def test_pixels_that_are_lost_are_told_at_once_and_other_faults_of_an_encode_by_who_needs_it() -> None:
    async def lost(relay: Relay, crew: Crew) -> None:
        error = ray.exceptions.ObjectLostError("00" * 28, None, "")
        found = await answer_to(relay, crew, encode(0), finish(0), w0_v=error)
        assert found.failures.pixels_lost and list(found.failures.failed) == ["w0"]

    async def other(relay: Relay, crew: Crew) -> None:
        crew.form()
        asked = asyncio.ensure_future(relay.step(crew.letter(0, encode(0), dit(0), finish(0))))
        await settled()
        crew.answers["w0", "v"].set_exception(TASK_ERROR("vae", "", ValueError("bad clip")))
        await settled()
        assert not asked.done()
        crew.answers["w0", "d"].set_exception(TASK_ERROR("dit", "", ValueError("no latents")))
        assert (await asked).failures.failed == {"w0": "dit d did not run: no latents"}

    play(lost)
    play(other)


def test_who_could_not_form_is_named_and_gets_no_call() -> None:
    async def case(relay: Relay, crew: Crew) -> None:
        crew.formed[0].set_exception(ray.exceptions.ActorDiedError())
        crew.formed[1].set_exception(TASK_ERROR("form", "", RuntimeError("a peer has gone")))
        found = await relay.step(crew.letter(0, dit(0), finish(0)))
        assert found.failures.dead == ["w0"] and "a peer has gone" in found.failures.failed["w1"] and crew.order == []

    play(case)


def test_a_dit_call_that_never_answers_does_not_hold_a_step_up_for_ever() -> None:
    async def case(relay: Relay, crew: Crew) -> None:
        crew.form()
        asked = asyncio.ensure_future(relay.step(crew.letter(0, dit(1), finish(0), finish(1))))
        await settled()
        for worker in ("w0", "w1"):
            crew.answers[worker, FINISH].set_result(("report", None))
        assert (await asked).failures.failed == {
            "w1": "dit d has not answered, although its worker has finished the step"
        }

    play(case, ended_s=0.05)


def test_what_an_encode_publishes_is_had_from_the_relay_also_before_its_letter_has_come() -> None:
    async def case(relay: Relay, crew: Crew) -> None:
        asked = [asyncio.ensure_future(relay.published(1, name)) for name in ("v", "x")]
        await settled()
        crew.form()
        step = asyncio.ensure_future(
            relay.step(crew.letter(0, encode(0, publishes=True), encode(1, "x", publishes=True)))
        )
        await settled()
        crew.answers["w0", "v"].set_result(["latents"])
        crew.answers["w1", "x"].set_exception(TASK_ERROR("vae", "", ValueError("bad clip")))
        assert await asked[0] == ["latents"]
        with pytest.raises(ValueError, match="bad clip"):
            await asked[1]
        await step
        assert await relay.published(1, "v") == ["latents"], "members of a bag may be on several nodes"

    play(case)


def test_what_was_published_goes_when_its_step_has_ended() -> None:
    async def case(relay: Relay, crew: Crew) -> None:
        crew.form()
        await relay.step(crew.letter(0, encode(0, publishes=True), encode(1, "x", step=1, publishes=True)))
        await relay.step(crew.letter(1))
        assert list(relay._made) == ["v", "x"], "step 0 may still run"
        await relay.step(crew.letter(2))
        assert list(relay._made) == ["x"]
        await relay.step(crew.letter(3))
        assert relay._made == {}

    play(case)


def test_letters_and_questions_of_a_generation_that_is_over_are_refused() -> None:
    async def case(relay: Relay, crew: Crew) -> None:
        crew.form()
        await relay.step(crew.letter(0))
        waiting = asyncio.ensure_future(relay.published(1, "v"))
        never = asyncio.ensure_future(relay.step(crew.letter(2, dit(0))))
        await settled()
        await relay.step(replace(crew.letter(0), generation=2))
        for one in (waiting, never, relay.published(1, "v"), relay.step(crew.letter(1))):
            with pytest.raises(StaleGeneration, match="generation 1 has ended"):
                await one
        assert crew.order == []

    play(case)


def test_a_letter_whose_generation_ends_before_its_workers_have_formed_is_not_sent() -> None:
    async def case(relay: Relay, crew: Crew) -> None:
        late = asyncio.ensure_future(relay.step(crew.letter(0, dit(0), encode(1, publishes=True))))
        await settled()
        formed, crew.formed = crew.formed, (crew._future(), crew._future())
        crew.form()
        await relay.step(crew.letter(0, generation=2))
        for one in formed:
            one.set_result(None)
        with pytest.raises(StaleGeneration, match="generation 1 has ended"):
            await late
        assert crew.order == [] and relay._made == {}, "its calls and results are none of the next generation's"

    play(case)


def turn(rank: int) -> RelayedCall:
    work: Any = SimpleNamespace(name="a")
    task = TurnTask(generation=1, step=0, aside=work, gap_s=0.0, share=0.05)
    return RelayedCall(rank=rank, method=TURN, name="aside", arguments=(task,))


def test_turns_of_asides_are_sent_in_their_place_and_end_no_step() -> None:
    async def case(relay: Relay, crew: Crew) -> None:
        crew.form()
        calls = (dit(0), turn(0), finish(0), turn(1), finish(1))
        asked = asyncio.ensure_future(relay.step(crew.letter(0, *calls)))
        await settled()
        assert crew.order == [("w0", "d"), ("w0", TURN), ("w0", FINISH), ("w1", TURN), ("w1", FINISH)]
        crew.answers["w0", TURN].set_result(TurnReport(aside="a", took_s=0.5))
        crew.answers["w1", TURN].set_exception(TASK_ERROR("turn", "no file", ValueError("no file")))
        crew.answers["w0", "d"].set_result(None)
        for worker in ("w0", "w1"):
            crew.answers[worker, FINISH].set_result(("report", None))
        answer = await asked
        assert not answer.has_failed and answer.turns[0] == TurnReport(aside="a", took_s=0.5)
        assert answer.turns[1].ended and "no file" in answer.turns[1].failed

    play(case)


def test_a_relay_that_does_not_answer_is_known_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    answered: set[str] = set()
    monkeypatch.setattr(relay_book, "wait", lambda refs, num_returns, timeout: ([r for r in refs if r in answered], []))
    monkeypatch.setattr(Relays, "_end", lambda self, relay: None)
    book = Relays(least=4, start=lambda node: started(Handle(here=lambda: node)))
    book.of(tuple(SimpleNamespace(node=node) for node in "aabb"))  # type: ignore[misc]
    answered |= {"a", "b"}
    assert not book.silent(0.0) and not book.silent(5.0)
    answered.remove("a")
    found = [set(book.silent(float(now))) for now in range(10, 130, 5)]
    assert found.index({"a"}) == 15 and found[:15] == [set()] * 15, "heard of at 5 s, asked at 25 s"
    book.lose("a", 130.0)
    assert not book.silent(200.0)


def test_a_relay_whose_letters_are_answered_is_not_asked_for_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(relay_book, "wait", lambda refs, num_returns, timeout: (list(refs), []))
    book = Relays(least=4, start=lambda node: started(Handle(here=lambda: asked.append(node) or node)))  # type: ignore[func-returns-value]
    book.of(tuple(SimpleNamespace(node=node) for node in "aabb"))  # type: ignore[misc]
    for now in range(0, 100, 5):
        book.hear(["a", "gone"], float(now))
        book.silent(float(now))
    assert asked == ["b"] * 4, "at 0, 25, 50 and 75 s"


def test_when_a_relay_is_lost_all_that_are_gone_are_lost_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"b": ray.exceptions.ActorDiedError(), "c": None, "d": ray.exceptions.ActorDiedError()}
    monkeypatch.setattr(relay_book, "wait", lambda refs, num_returns, timeout: ([r for r in refs if r in gone], ["a"]))

    def get(node: str) -> None:
        if (error := gone[node]) is not None:
            raise error

    monkeypatch.setattr(relay_book, "get", get)
    monkeypatch.setattr(Relays, "_end", lambda self, relay: None)
    book = Relays(least=4, start=lambda node: started(Handle(here=lambda: node)))
    book.of(tuple(SimpleNamespace(node=node) for node in "aabbccddee"))  # type: ignore[misc]
    assert set(book.gone()) == {"b", "d"} and all(book.gone().values()), "a and e may only be slow"
    running: Any = SimpleNamespace(letters={"letters": ("e", "b")}, heard=set(), answers={})
    runner: Any = SimpleNamespace(relays=book)
    monkeypatch.setattr(
        steps, "_taken", lambda fresh, answers: answers.update(letters=NodeAnswer(lost={"e": "gone"})) or True
    )
    found = steps.StepRunner._hear(runner, running, {"letters"})  # type: ignore[arg-type]
    assert (
        not found.dead
        and set(found.failed) == {f"relay of node {node}" for node in "bde"}
        and set(book.known) == {"a", "c"}
    )
    assert Relays().gone() == {}


class LaterBook(Relays):
    """Relays whose references are nodes, which the test has answer; `begun` and `ended` are their numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.answers: dict[str, Exception | None] = {}  # by relay
        self.letters: list[Letter] = []

        def get(relay: str) -> None:
            if (error := self.answers[relay]) is not None:
                raise error

        def ready(refs: list[str], num_returns: int = 1, timeout: float = 0) -> Any:
            return [ref for ref in refs if ref in self.answers], []

        monkeypatch.setattr(relay_book, "wait", ready)
        monkeypatch.setattr(relay_book, "get", get)
        super().__init__(least=4, start=self._begin)

    def _begin(self, node: str) -> NodeRelay:
        name = f"{node}{sum(one.startswith(node) for one in self.begun)}"
        self.begun.append(name)
        return NodeRelay(address=name, handle=Handle(here=lambda: name, deliver=self._delivered))  # type: ignore[arg-type]

    def _end(self, relay: Any) -> None:
        self.ended.append(relay.here.remote())

    def _delivered(self, letters: list[Letter]) -> str:
        self.letters += letters
        return letters[0].relay

    def addresses(self, nodes: str) -> list[str]:
        """Addresses of the relays of a generation on these nodes."""
        world: Any = tuple(SimpleNamespace(node=node) for node in nodes)
        return [one.address for one in self.of(world).values()]


def test_a_node_that_lost_its_relay_has_another_after_a_while_once_that_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    book = LaterBook(monkeypatch)
    assert book.addresses("aabb") == ["a0", "b0"]
    book.lose("a", 100.0)
    assert book.addresses("aabb") == ["b0"], "at once it goes on without"
    book.renew(159.0)
    assert book.begun == ["a0", "b0"]
    book.renew(165.0)
    assert book.begun == ["a0", "b0", "a1"] and not book.renewed and book.addresses("aabb") == ["b0"]
    book.answers["a1"] = None
    book.renew(170.0)
    assert book.renewed == ["a"] and book.addresses("aabb") == ["a1", "b0"] and not book.renewed
    book.answers = {"b0": None}
    book.silent(171.0)  # asks b0
    assert [sorted(book.silent(t)) for t in (191.0, 196.0, 246.0, 251.0)] == [[], [], [], ["a"]], "heard of at 170 s"
    book.lose("a", 300.0)
    book.renew(419.0)
    assert book.begun[3:] == []
    book.renew(425.0)
    assert book.begun[3:] == ["a2"], "after 60 s twice as long"
    book.close()
    assert book.ended[:2] == ["a0", "a1"] and sorted(book.ended[2:]) == ["a2", "b0"]


def test_a_new_relay_that_does_not_answer_or_whose_node_has_gone_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    book = LaterBook(monkeypatch)
    book.addresses("aabbcc")
    for node in "abc":
        book.lose(node, 0.0)
    book.renew(60.0)
    book.answers |= {"a1": ray.exceptions.ActorDiedError(), "c1": None}
    book.renew(65.0)
    assert book.ended == ["a0", "b0", "c0", "a1"] and book.renewed == ["c"]
    book.addresses("aabbde")
    assert not book.renewed, "one worker of c is left"
    book.renew(70.0)
    book.renew(660.0)
    assert book.ended[4:] == ["c1", "b1"], "b1 had 600 s"
    assert book.begun[6:] == ["a2"], "a is tried again 120 s after its second"
    book.renew(845.0)
    assert book.begun[7:] == ["b2"] and len(book.begun) == 8


def test_a_node_that_comes_and_goes_pays_for_its_losses_alone_and_is_forgotten_at_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    book = LaterBook(monkeypatch)
    book.addresses("aabb")
    book.lose("b", 0.0)
    book.renew(60.0)
    for now in (100.0, 200.0):
        book.addresses("aacc")
        book.renew(now)
        book.addresses("aabb")
        book.renew(now + 5.0)
    assert book.begun == ["a0", "b0", "b1", "c0", "b2", "c1", "b3"], "its second is wanted at once"
    book.lose("a", 210.0)
    book.renew(270.0)
    assert book.begun[7:] == ["a1"]
    book.addresses("dd")
    for now in (300.0, 3895.0):
        book.renew(now)
        assert set(book._without) == {"a", "b"}
    book.renew(3900.0)
    assert not book._without and not book._times


def test_a_relay_that_a_node_has_again_is_taken_up_when_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    book = LaterBook(monkeypatch)
    world: Any = tuple(SimpleNamespace(node=node, name=node, handle=None, publishes_later=False) for node in "aabb")
    ended: list[str] = []
    monkeypatch.setattr(steps, "wait", lambda refs, num_returns, timeout: ([], [r for r in refs if r not in ended]))
    parts: dict[str, Any] = dict.fromkeys(("cluster", "source", "planner", "exports", "waits", "asides"))
    forming: Any = [f"formed {n}" for n in range(4)]
    runner = steps.StepRunner(
        generation=1, world=world, forming=forming, relays=book, next_step=0, last_step=9, budget_s=0.0, lookahead=0,
        **parts,
    )  # fmt: skip

    def send(step: int) -> list[Letter]:
        runner._submitter.begin()
        book.letters.clear()
        runner._submitter.send_letters(step)
        return list(book.letters)

    book.lose("b", 0.0)
    runner._submitter.take_up_relays()
    for step in range(3):
        send(step)
    book.renew(60.0)
    book.answers["b1"] = None
    book.renew(65.0)
    assert runner.awaits_quiet
    runner.running = ["a step"]  # type: ignore[list-item]
    runner.take_up_relays()
    assert list(runner._submitter.relay_of) == ["a"] and runner.awaits_quiet
    runner.running = []
    runner._outlasting_calls = [SimpleNamespace(reference="end of an encode")]  # type: ignore[list-item]
    runner.take_up_relays()
    assert list(runner._submitter.relay_of) == ["a"] and not runner.awaits_quiet, "steps go on meanwhile"
    runner._relays_at = 0.0
    lost = book._known.pop("a")
    assert not runner.awaits_quiet, "steps do not wait for what cannot be"
    runner.take_up_relays()
    assert list(runner._submitter.relay_of) == ["a"]
    book._known["a"] = lost
    ended.append("end of an encode")
    runner.take_up_relays()
    assert list(runner._submitter.relay_of) == ["a", "b"] and not runner.awaits_quiet
    a, b = send(3)
    assert (a.number, a.seats, a.forming) == (3, {}, ())
    assert (b.number, list(b.seats), b.forming) == (0, [2, 3], ("formed 2", "formed 3")), "its first letter"


def test_a_relay_has_as_long_to_start_as_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_book, "wait", lambda refs, num_returns, timeout: ([], list(refs)))
    book = Relays(least=2, start=lambda node: started(Handle(here=lambda: node)))
    book.of(tuple(SimpleNamespace(node=node) for node in "aa"))  # type: ignore[misc]
    assert not book.silent(0.0) and not book.silent(599.0) and book.silent(605.0) == {"a": 605.0}


def test_nodes_of_several_workers_have_relays_from_a_number_of_workers_on_until_theirs_is_lost() -> None:
    begun: list[str] = []
    ended: list[Any] = []

    class Book(Relays):
        def _end(self, relay: Any) -> None:
            ended.append(relay)

    def world(*nodes: str) -> Any:
        return tuple(SimpleNamespace(node=node) for node in nodes)

    def start(node: str) -> Any:
        begun.append(node)
        return started(node)

    def nodes(found: Any) -> dict[str, str]:
        return {node: relay.handle for node, relay in found.items()}

    book = Book(least=4, start=start)
    assert book.of(world("a", "a", "b")) == {} and Book().of(world(*"aabb")) == {}
    assert nodes(book.of(world(*"aabbc"))) == {"a": "a", "b": "b"}
    assert nodes(book.of(world(*"aabbc"))) == {"a": "a", "b": "b"} and begun == ["a", "b"]
    book.lose("a", 0.0)
    assert nodes(book.of(world(*"aabbc"))) == {"b": "b"}, "its workers are called directly"
    assert nodes(book.of(world(*"aacc"))) == {"c": "c"} and ended == ["a", "b"], "b is gone with its node"
    book.close()
    assert ended == ["a", "b", "c"] and book.known == {}


class Nodes:
    """Relays that find each other, each with a crew of its own."""

    def __init__(self, *names: str) -> None:
        self.crews = {name: Crew(node=name) for name in names}
        self.relays = {name: Relay(self._at) for name in names}
        self.gone: set[str] = set()
        self.asked: list[tuple[str, str]] = []

    def _at(self, address: str) -> Any:
        if address in self.gone:
            raise ValueError(f"no actor {address}")
        nodes = self

        def call(method: str) -> Any:
            def remote(*arguments: Any) -> Any:
                nodes.asked.append((address, method))
                return asyncio.ensure_future(nodes._answer(getattr(nodes.relays[address], method), arguments))

            return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=remote))

        return SimpleNamespace(step=call("step"), published=call("published"))

    async def _answer(self, method: Any, arguments: Any) -> Any:
        try:
            return await method(*arguments)
        except Exception as error:
            raise TASK_ERROR("relay", str(error), error) from error

    def form(self) -> None:
        for crew in self.crews.values():
            crew.form()


def among(*names: str) -> Callable[[Callable[[Nodes], Any]], None]:
    def play_it(case: Callable[[Nodes], Any]) -> None:
        async def run() -> None:
            await asyncio.wait_for(case(Nodes(*names)), 20)

        asyncio.run(run())

    return play_it


def test_every_node_is_in_one_group_and_neither_groups_nor_nodes_of_one_are_many() -> None:
    for count in (0, 1, 2, 3, 16, 17, 128, 1250):
        nodes = [f"n{n}" for n in range(count)]
        groups = groups_of(nodes)
        assert sorted(node for group in groups for node in group) == sorted(nodes) and all(groups)
        assert len(groups) <= count**0.5 + 1 and max(map(len, groups), default=0) <= count**0.5 + 1
    assert groups_of(["a", "b"]) == [["a"], ["b"]]


def test_a_group_is_answered_for_when_the_workers_of_all_its_nodes_have_ended_the_step() -> None:
    async def case(nodes: Nodes) -> None:
        nodes.form()
        letters = [nodes.crews[name].letter(0, finish(rank)) for rank, name in enumerate("ab")]
        asked = asyncio.ensure_future(nodes.relays["a"].deliver(letters))
        await nodes_settled(nodes, "b")
        nodes.crews["a"].answers["w0", FINISH].set_result(("report a", None))
        await settled()
        assert not asked.done() and nodes.asked == [("b", "step")]
        nodes.crews["b"].answers["w1", FINISH].set_result(("report b", None))
        assert await asked == NodeAnswer(ends={0: ("report a", None), 1: ("report b", None)})  # type: ignore[dict-item]

    among("a", "b")(case)


async def nodes_settled(nodes: Nodes, *names: str) -> None:
    """Until the workers of these nodes have been called: relays are found in threads."""
    while not all(nodes.crews[name].order for name in names):
        await asyncio.sleep(0.001)


def test_what_is_heard_after_a_failure_changes_no_answer_that_is_on_its_way() -> None:
    async def case(nodes: Nodes) -> None:
        nodes.form()
        letters = [nodes.crews["a"].letter(0, finish(0), finish(1)), nodes.crews["b"].letter(0, finish(0))]
        group = asyncio.ensure_future(nodes.relays["a"].deliver(letters))
        await nodes_settled(nodes, "a", "b")
        nodes.crews["a"].answers["w0", FINISH].set_exception(ray.exceptions.ActorDiedError())
        found = await group
        nodes.crews["a"].answers["w1", FINISH].set_result(("report", None))
        nodes.crews["b"].answers["w0", FINISH].set_exception(ray.exceptions.ActorDiedError())
        await asyncio.sleep(0.01)
        assert found == NodeAnswer(failures=Failures(dead=["w0"]))

    among("a", "b")(case)


@pytest.mark.parametrize("dead", ["a", "b"])
def test_a_group_says_at_once_which_worker_has_died_on_whichever_node(dead: str) -> None:
    async def case(nodes: Nodes) -> None:
        nodes.form()
        letters = [nodes.crews[name].letter(0, finish(rank)) for rank, name in enumerate("ab")]
        asked = asyncio.ensure_future(nodes.relays["a"].deliver(letters))
        await nodes_settled(nodes, "a", "b")
        worker = f"w{'ab'.index(dead)}"
        nodes.crews[dead].answers[worker, FINISH].set_exception(ray.exceptions.ActorDiedError())
        assert (await asked).failures.dead == [worker]

    among("a", "b")(case)


def test_a_relay_that_is_gone_is_named_by_its_node_and_one_that_fails_too() -> None:
    async def case(nodes: Nodes) -> None:
        nodes.form()
        nodes.gone.add("b")
        broken = replace(
            nodes.crews["c"].letter(0), seats={}, forming=(nodes.crews["c"].formed[0],), calls=(finish(0),)
        )
        letters = [nodes.crews["a"].letter(0, finish(0)), nodes.crews["b"].letter(0), replace(broken, seats={7: None})]  # type: ignore[dict-item]
        found = await nodes.relays["a"].deliver(letters)
        assert found.lost["b"] == "no actor b" and "c" in found.lost and found.has_failed and not found.failures

    among("a", "b", "c")(case)


def test_letters_of_a_generation_that_is_over_are_refused_for_the_group() -> None:
    async def case(nodes: Nodes) -> None:
        nodes.form()
        await nodes.relays["a"].step(replace(nodes.crews["a"].letter(0), generation=2))
        with pytest.raises(StaleGeneration, match="generation 1 has ended"):
            await nodes.relays["a"].deliver([nodes.crews[name].letter(0) for name in "ab"])

    among("a", "b")(case)


def test_what_an_encode_of_another_node_leaves_is_asked_of_its_relay_once_for_all_that_need_it() -> None:
    async def case(nodes: Nodes) -> None:
        nodes.form()
        made = asyncio.ensure_future(nodes.relays["a"].step(nodes.crews["a"].letter(0, encode(0, publishes=True))))
        needs = (RelayedResult(relay="a", cascade="v"),)
        calls = [dit(rank, f"d{rank}", references=needs) for rank in (0, 1)]
        running = asyncio.ensure_future(nodes.relays["b"].step(nodes.crews["b"].letter(0, *calls)))
        await nodes_settled(nodes, "a", "b")
        assert nodes.asked == [("a", "published")] and nodes.crews["b"].order == [("w0", "d0"), ("w1", "d1")]
        nodes.crews["a"].answers["w0", "v"].set_result(["latents"])
        assert await nodes.crews["b"].given["w0", "d0"][-1] == ["latents"] and (await made).ends == {}
        assert not running.done(), "its DiT calls have not ended"
        assert nodes.crews["b"].given["w0", "d0"][-1] is nodes.crews["b"].given["w1", "d1"][-1]

    among("a", "b")(case)


def test_what_an_encode_of_the_same_node_leaves_needs_no_question_and_a_relay_that_is_gone_is_told() -> None:
    async def case(nodes: Nodes) -> None:
        nodes.form()
        crew = nodes.crews["a"]
        needs = (RelayedResult(relay="a", cascade="v"),)
        calls = (encode(0, publishes=True), dit(1, references=needs))
        running = asyncio.ensure_future(nodes.relays["a"].step(crew.letter(0, *calls)))
        await nodes_settled(nodes, "a")
        assert not running.done()
        assert crew.given["w1", "d"][-1] is crew.answers["w0", "v"] and not nodes.asked
        nodes.gone.add("b")
        lost = dit(1, references=(RelayedResult(relay="b", cascade="x"),))
        found = await nodes.relays["a"].step(crew.letter(1, lost))
        assert found.failures.failed == {"w1": "dit d did not run: no actor b"}

    among("a", "b")(case)


def keeper_call(node: str, answer: Any) -> KeeperCall:
    async def answered(shards: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return KeeperCall(keeper=Handle(put=answered), node=node, method="put", shards=(node,))


def test_keepers_that_a_relay_calls_hold_all_shards_or_one_says_why_not() -> None:
    async def case(relay: Relay, crew: Crew) -> None:
        assert await relay.hold([keeper_call("a", True), keeper_call("b", True)])
        assert not await relay.hold([keeper_call("a", True), keeper_call("b", False)])
        gone = TASK_ERROR("put", "", MemoryError("no room"))
        with pytest.raises(RuntimeError, match="the keeper of node b: MemoryError: no room"):
            await relay.hold([keeper_call("a", True), keeper_call("b", gone)])

    play(case)


def test_keepers_hear_of_a_commit_by_a_relay_which_names_one_that_is_gone_at_once() -> None:
    async def case(relay: Relay, crew: Crew) -> None:
        heard: list[tuple[str, Any]] = []

        async def hears(name: str, *commit: Any) -> None:
            heard.append((name, commit))
            if name == "gone":
                raise ray.exceptions.ActorDiedError()
            if name == "away":
                raise ray.exceptions.ActorUnavailableError("", b"0" * 16)
            if name == "frozen":
                await crew.formed[0]

        def call(*names: str) -> CommitCall:
            keepers = {name: Handle(commit=partial(hears, name)) for name in names}
            return CommitCall(keepers=keepers, generation=4, step=7, position={"at": 7}, pinned=(6,))

        assert await relay.commit(call("a", "away", "b")) == []
        assert heard == [(name, (4, 7, {"at": 7}, (6,))) for name in ("a", "away", "b")]
        assert await relay.commit(call("frozen", "a", "gone")) == ["gone"]
        assert await relay.commit(call()) == []

    play(case)


def test_a_keeper_that_fails_is_told_of_while_another_waits_for_its_shard() -> None:
    async def case(relay: Relay, crew: Crew) -> None:
        waiting = replace(keeper_call("b", True), keeper=Handle(put=lambda shards: crew.formed[0]))
        with pytest.raises(RuntimeError, match="the keeper of node a: MemoryError: no room"):
            await relay.hold([waiting, keeper_call("a", TASK_ERROR("put", "", MemoryError("no room")))])
        assert not await relay.hold([waiting, keeper_call("a", False)])

    play(case)


def test_keepers_are_called_by_the_first_relay_of_their_group_and_directly_where_that_is_lost() -> None:
    asked: list[tuple[str, tuple[str, ...]]] = []

    def start(node: str) -> Any:
        return started(Handle(hold=lambda calls: asked.append((node, tuple(call.node for call in calls))) or node))  # type: ignore[func-returns-value]

    class Book(Relays):
        def _end(self, relay: Any) -> None: ...

    book = Book(least=4, start=start)
    book.of(tuple(SimpleNamespace(node=node) for node in "aabbcc"))  # type: ignore[misc]
    assert book.groups == [["a", "c"], ["b"]]
    calls = [KeeperCall(keeper=Handle(put=lambda shards: shards), node=n, method="put", shards=(n,)) for n in "abcd"]
    assert held(calls, book) == [("d",), "a", "b"], "d has no relay"
    assert asked == [("a", ("a", "c")), ("b", ("b",))]
    book.lose("a", 0.0)
    assert held(calls, book) == [("a",), ("c",), ("d",), "b"]
    assert held(calls) == [("a",), ("b",), ("c",), ("d",)]
