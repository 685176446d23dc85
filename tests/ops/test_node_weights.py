"""Frozen weights lie in a node's memory once: one process reads them, others map them, and they outlive any of these.
Real processes."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from ops.memory.lending import claim
from ops.memory.node_weights import NodeWeights, ReadTensor, _number_of
from tests.ops.weights_holder import hold, shared_kib

SIZE = 32  # MiB
PROCESSES = multiprocessing.get_context("forkserver")  # imports once what all of them need
PROCESSES.set_forkserver_preload(["tests.ops.weights_holder"])


@pytest.fixture
def key() -> str:
    """Nobody else's."""
    return secrets.token_hex(8)


class Holder:
    """One process that wants the weights (tests/ops/weights_holder.py)."""

    def __init__(self, key: str, how: str = "fills") -> None:
        self._answers, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=hold, args=(key, how, SIZE, theirs), daemon=True)
        self._process.start()
        self.pid = self._process.pid

    def says(self) -> str:
        assert self._answers.poll(120), "it says nothing"
        answer: str = self._answers.recv()
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.join()


Start = Callable[..., Holder]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[Holder] = []

    def begin(*arguments: str) -> Holder:
        made.append(Holder(*arguments))
        return made[-1]

    yield begin
    for holder in made:
        holder.end()


def never() -> Mapping[str, ReadTensor]:
    raise AssertionError("the weights are there already")


def test_one_process_reads_and_the_memory_of_all_counts_once(key: str, start: Start) -> None:
    first = start(key)
    assert (first.says(), first.says()) == ("reads", f"read {first.pid}")
    others = [start(key), start(key)]
    assert [one.says() for one in others] == [f"mapped {first.pid}"] * 2
    sizes = [shared_kib(one.pid or 0) for one in (first, *others)]
    assert all(resident >= SIZE * 1024 for resident, _ in sizes), "every process has all of it mapped"
    assert sum(share for _, share in sizes) == pytest.approx(SIZE * 1024, rel=0.02)


def test_the_weights_outlive_the_process_that_read_them(key: str, start: Start) -> None:
    """Whoever comes later maps them all the same, from one that has mapped them itself, again and again."""
    first = start(key)
    first.says(), first.says()
    wanted = f"mapped {first.pid}"
    before = first
    for _ in range(2):
        others = [start(key), start(key)]
        assert [one.says() for one in others] == [wanted] * 2
        before.end()
        later = start(key)
        assert later.says() == wanted, "weights were read again"
        others[0].end()
        before = others[1]


def test_the_end_of_a_process_that_reads_lets_another_one_read(key: str, start: Start) -> None:
    hanging = start(key, "hangs")
    assert hanging.says() == "reads"
    found: list[NodeWeights] = []
    waiting = threading.Thread(target=lambda: found.append(NodeWeights.of(key, lambda: numbers())))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "it waits for who reads"
    hanging.end()
    waiting.join(60)
    assert found and found[0].read_here


def numbers() -> dict[str, ReadTensor]:
    whole, square = torch.arange(6, dtype=torch.float32).view(2, 3), torch.arange(9, dtype=torch.float32).view(3, 3)
    return {
        "weight": ReadTensor(whole, torch.bfloat16),
        "tied": ReadTensor(whole, torch.bfloat16),
        "transposed": ReadTensor(whole.T, torch.float32),
        "square": ReadTensor(square, torch.float32),
        "square transposed": ReadTensor(square.T, torch.float32),
        "square in bf16": ReadTensor(square, torch.bfloat16),
        "scale": ReadTensor(torch.tensor(2.5), torch.float32),
        "none": ReadTensor(torch.zeros(0, 4), torch.float32),
        "ids": ReadTensor(torch.arange(5), torch.int64),
    }


def test_tensors_come_as_they_were_read_in_the_dtypes_that_were_asked_for(key: str) -> None:
    for held in (NodeWeights.of(key, numbers), NodeWeights.of(key, never)):
        assert list(held.tensors) == list(numbers())
        for name, (tensor, dtype, *_) in numbers().items():
            assert torch.equal(held.tensors[name], tensor.to(dtype)) and held.tensors[name].dtype == dtype
        assert held.tensors["weight"].data_ptr() == held.tensors["tied"].data_ptr()
        assert all(tensor.data_ptr() % 64 == 0 for tensor in held.tensors.values() if tensor.numel())


def test_what_one_process_holds_is_the_memory_of_the_others(key: str) -> None:
    first, second = NodeWeights.of(key, numbers), NodeWeights.of(key, never)
    assert first.read_here and not second.read_here
    first.tensors["ids"][2] = 99  # nobody does this; it shows that there is one memory
    assert second.tensors["ids"][2] == 99


def test_a_read_that_fails_is_told_and_may_be_tried_again(key: str) -> None:
    with pytest.raises(AssertionError, match="there already"):
        NodeWeights.of(key, never)
    assert NodeWeights.of(key, numbers).read_here


def test_another_key_is_other_weights(key: str) -> None:
    kept = NodeWeights.of(key, numbers)
    assert NodeWeights.of(f"{key} in another dtype", numbers).read_here and kept.read_here


def test_an_address_that_lends_nothing_is_named(key: str) -> None:
    squatter = claim(_number_of(key))
    assert squatter is not None
    with pytest.raises(ConnectionError, match="has the address of these weights and does not lend them"):
        NodeWeights.of(key, never, tries=2, patience_s=0.05)
    squatter.close()


def test_processes_of_another_user_have_an_address_of_their_own(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lend nothing to this one, which could not begin."""
    theirs = claim(_number_of(key))
    assert theirs is not None
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    assert NodeWeights.of(key, numbers, tries=2, patience_s=0.05).read_here
    theirs.close()
