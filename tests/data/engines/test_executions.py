from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

from data.engines.executions import ExecutionNames, call_it, forget_oldest, growing, remove_log


def test_a_name_is_of_one_execution_at_a_time_and_comes_again() -> None:
    names, others = ExecutionNames(), ExecutionNames()
    first, second = names.take(), names.take()
    assert len({first, second, others.take()}) == 3
    names.give_back(first)
    assert names.take() == first
    assert names.take() not in (first, second), "those are taken"


def test_the_newest_of_a_cache_stay() -> None:
    cache: dict[object, object] = {number: str(number) for number in range(10)}
    forget_oldest(cache, kept=3)
    assert list(cache) == [7, 8, 9]
    forget_oldest(cache, kept=3)
    assert list(cache) == [7, 8, 9]


def test_a_cache_that_this_ray_does_not_have_is_an_empty_one() -> None:
    assert growing("data.engines.executions", "GROWING") == {}, "no dictionary"
    assert growing("data.engines.executions", "ExecutionNames.cache") == {}
    assert growing("data.engines.no_such_module", "CACHE") == {}


@pytest.mark.parametrize("module", [None, ModuleType("logging")])
def test_where_this_ray_keeps_its_logs_elsewhere_they_stay(
    module: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the stream when all blocks had come."""
    monkeypatch.setitem(sys.modules, "ray.data._internal.logging", module)
    remove_log("dataset_drawn_0")


@dataclass
class Named:
    """A dataset of a Ray that lets its name be set."""

    uuid: str = "drawn"

    def get_dataset_id(self) -> str:
        return f"dataset_{self.uuid}_0"

    def _set_uuid(self, uuid: str) -> None:
        self.uuid = uuid


class Unnamed:
    """A dataset of a Ray that does not."""

    def get_dataset_id(self) -> str:
        return "dataset_drawn_0"


def test_an_execution_is_renamed_where_ray_allows_it() -> None:
    named, unnamed = Named(), Unnamed()
    call_it(named, "again")
    call_it(unnamed, "again")
    assert named.get_dataset_id() == "dataset_again_0"
    assert unnamed.get_dataset_id() == "dataset_drawn_0"
