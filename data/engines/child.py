"""A decode process: jobs in, batches out, over its own pipes. A crash or a hang of libav costs the process, not us.

with DecodeProcess() as process:
    batch = process.decode(job, timeout_s=120)     # raises DecoderDied or DecoderHung; the process is gone then
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pickle
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import IO

import numpy as np

from data.decode import caption_or_empty, fault_of
from data.errors import DataIOError
from data.ledger import Fault, Reason
from data.types import Batch, DecodeJob
from ops.code_path import python_environment

HEADER = struct.Struct("<Q")
START_SECONDS = 120.0  # a decode process comes up in one second, on a busy machine in many
READY = "ready"
PIPE_BYTES = 1 << 20  # the most that Linux grants everyone


class DecoderDied(RuntimeError):
    """The decode process ended in the middle of a job."""


class DecoderHung(RuntimeError):
    """The decode process did not answer in time and was killed."""


class DecodeProcess:
    """Starts with the first job, and again after it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = self._abandoned = False

    def decode(self, job: DecodeJob, timeout_s: float) -> Batch:
        """The batch of a job. Raises DataIOError as decode_job does."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            if self._abandoned:
                process.kill()
            if not self._ready:  # its start does not count as time of the clip
                self._ready = _receive(partial(_read, process.stdout, time.monotonic() + START_SECONDS)) == READY
            _send(process.stdin, job)
            answer = _receive(partial(_read, process.stdout, time.monotonic() + timeout_s))
        except (EOFError, BrokenPipeError) as error:
            code = process.wait()
            self.close()
            raise DecoderDied(f"the decoder ended with code {code}") from error
        except TimeoutError as error:
            self.close()
            raise DecoderHung(f"no answer from the decoder in {timeout_s:g} s") from error
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Batch), f"the decoder answered {answer!r}"
        return answer

    def abandon(self) -> None:
        """No batch is wanted any more: a job that another thread waits for ends now, as each later one, by
        DecoderDied."""
        self._abandoned = True  # first: a process that starts meanwhile is ended by `decode`
        if (process := self._process) is not None:
            process.kill()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def close(self) -> None:
        process, self._process, self._ready = self._process, None, False
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # half a job may still lie in the buffer
                pipe.close()

    def __enter__(self) -> DecodeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            # pickles travel only between this process and its own child
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "data.engines.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **python_environment()},
            )
            assert self._process.stdout is not None
            with contextlib.suppress(OSError, AttributeError):  # too many pipes, not Linux: 64 KiB do, slower
                fcntl.fcntl(self._process.stdout, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        return self._process


def decode_isolated(job: DecodeJob, clip_timeout_s: float) -> Batch:
    """The same batch as decode_job, each clip in a process of its own, so that a culprit is found and named.

    A clip that kills its decoder is a `decoder_crash`, one that hangs it a `decode_timeout`.
    """
    video = np.zeros(job.shape, np.uint8)
    whole = Batch(item=job.item, video=video, captions=[], ok=[], keys=[clip.key for clip in job.clips])
    faults: list[Fault] = []
    with DecodeProcess() as process:
        for slot, clip in enumerate(job.clips):
            single = replace(job, clips=(clip,))
            try:
                batch = process.decode(single, clip_timeout_s)
                video[slot] = batch.video[0]
                caption, ok, found = batch.captions[0], batch.ok[0], batch.faults
            except (DecoderDied, DecoderHung) as error:
                reason = Reason.DECODER_CRASH if isinstance(error, DecoderDied) else Reason.DECODE_TIMEOUT
                caption, ok = caption_or_empty(clip, job), False
                found = (fault_of(clip, reason, clip.offset, str(error)),)
            whole.captions.append(caption)
            whole.ok.append(ok)
            faults += found
    whole.faults = tuple(faults)
    return whole


def _send(pipe: IO[bytes], value: object) -> None:
    """The pickle, then its arrays as they lie in memory: pixels are not copied into the pickle and out of it."""
    arrays: list[pickle.PickleBuffer] = []
    pieces = [
        memoryview(pickle.dumps(value, protocol=5, buffer_callback=arrays.append)),
        *(array.raw() for array in arrays),
    ]
    pipe.write(HEADER.pack(len(pieces)))
    for piece in pieces:
        pipe.write(HEADER.pack(piece.nbytes))
        pipe.write(piece)
    pipe.flush()


def _receive(read: Callable[[int], bytes | memoryview]) -> object:
    """What `_send` sent, through `read(count)`."""
    (count,) = HEADER.unpack(read(HEADER.size))
    head, *arrays = [read(*HEADER.unpack(read(HEADER.size))) for _ in range(count)]
    return pickle.loads(head, buffers=arrays)


def _read(pipe: IO[bytes], deadline: float, count: int) -> memoryview:
    """Exactly `count` bytes, read from the file descriptor so that the selector sees all that is there."""
    data, view = np.empty(count, np.uint8).data, 0
    with selectors.DefaultSelector() as ready:  # select() itself refuses descriptors from 1024 on
        ready.register(pipe, selectors.EVENT_READ)
        while view < count:
            if not ready.select(max(deadline - time.monotonic(), 0)):
                raise TimeoutError
            read = os.readv(pipe.fileno(), [data[view:]])
            if not read:
                raise EOFError
            view += read
    return data


def main() -> None:
    """The child's loop: until its input ends."""
    from data.decode import decode_job

    incoming = sys.stdin.buffer
    assert isinstance(incoming, io.BufferedReader)
    outgoing = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not mix with the answers
    _send(outgoing, READY)
    while incoming.peek(1):
        job = _receive(incoming.read)
        assert isinstance(job, DecodeJob)
        try:
            answer: Batch | Exception = decode_job(job)
        except (DataIOError, ValueError) as error:  # ValueError: a decoder that cannot be imported
            answer = error
        _send(outgoing, answer)
        del answer  # the next batch may have its memory


if __name__ == "__main__":
    main()
