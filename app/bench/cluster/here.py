"""Calls between the parts of a virtual run inside one process, in the place of Ray's: no cluster is started.

    with calls_here() as here:
        host = here.actor(Host(...))
        get(host.inventory.remote())                    # actors.ray_calls.get

What the controller does is the same; what Ray takes for a call, its copies and its processes, is not there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import ray

from actors import ray_calls

log = logging.getLogger(__name__)

_TASK_ERROR: Any = ray.exceptions.RayTaskError  # Ray gives it no types

T = TypeVar("T")
R = TypeVar("R")


class LocalCall:
    """A method of an `LocalActor`."""

    __slots__ = ("_actor", "_method")

    def __init__(self, actor: LocalActor, method: str) -> None:
        self._actor, self._method = actor, method

    def options(self, **options: object) -> LocalCall:
        return self

    def remote(self, *arguments: object) -> Future[object]:
        return self._actor.submit(self._method, arguments)


class AwaitableFuture(Future[T]):
    """A reference that a coroutine can wait for, too, with Ray's errors."""

    def __await__(self) -> Generator[object, None, T]:
        return self._value().__await__()

    async def _value(self) -> T:
        try:
            return await asyncio.shield(asyncio.wrap_future(self))
        except ray.exceptions.RayError:
            raise
        except asyncio.CancelledError:
            if self.cancelled():
                raise ray.exceptions.ActorDiedError() from None
            raise
        except Exception as error:
            raise _TASK_ERROR("here", str(error), error) from error


class Post:
    """Calls on their way to a loop, which is woken once for many of them: to wake it is a system call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._sent: deque[Coroutine[object, object, None]] = deque()
        self._woken = False
        self._running: set[asyncio.Task[None]] = set()  # a loop itself does not keep its tasks

    def send(self, call: Coroutine[object, object, T]) -> AwaitableFuture[T]:
        """The answer of `call`, which runs on the loop after those that this thread sent before."""
        answer: AwaitableFuture[T] = AwaitableFuture()
        self._sent.append(_answered(answer, call))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._begin)
        return answer

    def _begin(self) -> None:
        self._woken = False  # before the box is emptied: what comes now wakes the loop again
        while self._sent:
            task = self._loop.create_task(self._sent.popleft())
            self._running.add(task)
            task.add_done_callback(self._running.discard)


async def _answered(answer: Future[T], call: Coroutine[object, object, T]) -> None:
    try:
        answer.set_result(await call)
    except asyncio.CancelledError:
        answer.cancel()
        raise
    except Exception as error:
        answer.set_exception(error)


class LocalActor:
    """Runs the methods of an object one after the other in a thread, or those of an asynchronous one on a loop."""

    def __init__(self, plain: object, post: Post) -> None:
        self._plain, self._post = plain, post
        self._thread = ThreadPoolExecutor(1)

    def __getattr__(self, method: str) -> LocalCall:
        if method.startswith("_"):
            raise AttributeError(method)
        return LocalCall(self, method)

    def submit(self, method: str, arguments: Sequence[object]) -> Future[object]:
        bound = getattr(self._plain, method)
        if inspect.iscoroutinefunction(bound):
            return self._post.send(bound(*arguments))
        return self._thread.submit(_called, bound, arguments)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _called(method: Callable[..., object], arguments: Sequence[object]) -> object:
    """References among the arguments are there when the method begins, as values."""
    return method(*(one.result() if isinstance(one, Future) else one for one in arguments))


class LocalCalls:
    """What `actors.ray_calls` asks of Ray, for references that are futures."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, told: log.debug("%s", told))  # workers die that nobody asks any more
        self._thread = threading.Thread(target=self._loop.run_forever, name="hosts", daemon=True)
        self._thread.start()
        self._post = Post(self._loop)
        self._actors: list[LocalActor] = []

    def actor(self, plain: object) -> Any:  # the caller names its protocol, as of Ray's own handles
        """A handle of an object, by the protocols of `actors.refs`."""
        made = LocalActor(plain, self._post)
        self._actors.append(made)
        return made

    def get(self, reference: object, timeout: float | None = None) -> object:
        if isinstance(reference, list):
            return [self.get(one, timeout) for one in reference]
        if not isinstance(reference, Future):
            return reference
        try:
            return reference.result(timeout)
        except concurrent.futures.TimeoutError:
            raise ray.exceptions.GetTimeoutError("not there in time") from None
        except ray.exceptions.RayError:
            raise
        except concurrent.futures.CancelledError:
            raise ray.exceptions.ActorDiedError() from None
        except Exception as error:
            raise _TASK_ERROR("here", str(error), error) from error

    def wait(self, references: Sequence[R], *, num_returns: int, timeout: float | None) -> tuple[list[R], list[R]]:
        all_of_them = num_returns == len(references)
        when = concurrent.futures.ALL_COMPLETED if all_of_them else concurrent.futures.FIRST_COMPLETED
        if timeout != 0:
            concurrent.futures.wait([r for r in references if isinstance(r, Future)], timeout, when)
        done: list[R] = []
        waiting: list[R] = []
        for one in references:
            (waiting if isinstance(one, Future) and not one.done() else done).append(one)
        return done, waiting

    def put(self, value: T) -> Future[T]:
        made: AwaitableFuture[T] = AwaitableFuture()
        made.set_result(value)
        return made

    def kill(self, handle: LocalActor, no_restart: bool = True) -> None:
        handle.close()

    def close(self) -> None:
        """End the threads."""
        for one in self._actors:
            one.close()
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


async def _cancel_others() -> None:
    """What still runs on this loop ends."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for one in others:
        one.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@contextmanager
def calls_here() -> Iterator[LocalCalls]:
    """Inside, what `actors.ray_calls` does stays in this process."""
    here, before = LocalCalls(), ray_calls._ray
    ray_calls._ray = here
    try:
        yield here
    finally:
        ray_calls._ray = before
        here.close()
