"""What is said of a controller that nobody hears of."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from actors.refs import RayNode
from app.run.controller_watch import ControllerWatch
from app.run.lock import Stamp, lock_path


def node(host: str, address: str, alive: bool = True) -> RayNode:
    return RayNode(
        NodeID=host,
        Alive=alive,
        Resources={},
        NodeManagerAddress=address,
        NodeManagerHostname=host,
        NodeManagerPort=1,
    )


def begins_on(host: str, folder: Path) -> None:
    stamp = Stamp(token="t", host=host, kernel="k", pid=7, beat=0, since="now")
    lock_path(folder, "controller").write_text(json.dumps(asdict(stamp)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_a_controller_that_ray_does_not_start_is_said_once_with_the_addresses_of_the_nodes(folder: Path) -> None:
    told: list[str] = []
    nodes = [node("host1", "10.99.0.1"), node("host2", "10.77.0.2"), node("host3", "10.77.0.3", alive=False)]
    watch = ControllerWatch(folder, lambda: nodes, lambda: "", told.append)
    began = watch.since
    watch.look(began + 29.0)
    assert told == []
    watch.look(began + 31.0)
    watch.look(began + 60.0)
    (said,) = told
    assert "has not begun in 31 s" in said and "host1 (10.99.0.1), host2 (10.77.0.2)." in said
    assert "--node-ip-address" in said and "host3" not in said


def test_on_a_machine_alone_it_is_busy_and_no_address_is_doubted(folder: Path) -> None:
    told: list[str] = []
    nodes = [node("host1", "10.99.0.1"), node("host1", "10.99.0.1", alive=False)]
    watch = ControllerWatch(folder, lambda: nodes, lambda: "", told.append)
    watch.look(watch.since + 31.0)
    (said,) = told
    assert "has not begun in 31 s" in said and "a machine that is busy" in said
    assert "address" not in said and "10.99.0.1" not in said


def test_what_the_controller_cannot_write_is_said_once_as_its_monitor_has_it(folder: Path) -> None:
    told: list[str] = []
    trouble = ["", "no room", "no room", "", "no room, for 600 s by now"]
    watch = ControllerWatch(folder, lambda: [node("host1", "10.77.0.1")], lambda: trouble.pop(0), told.append)
    begins_on("host1", folder)
    for _ in range(5):
        watch.look(watch.since)
    assert told == ["no room", "no room, for 600 s by now"]


def test_a_controller_whose_node_is_gone_is_said_once_and_so_is_its_successor(folder: Path) -> None:
    told: list[str] = []
    nodes = [node("host1", "10.77.0.1"), node("host2", "10.77.0.2")]
    watch = ControllerWatch(folder, lambda: nodes, lambda: "", told.append)
    begins_on("host2", folder)
    watch.look(watch.since + 600.0)
    assert told == []
    nodes[1] = node("host2", "10.77.0.2", alive=False)
    for _ in range(3):
        watch.look(watch.since + 700.0)
    assert len(told) == 1 and told[0].startswith("host2, where the controller runs, does not answer Ray any more")
    begins_on("host1", folder)
    watch.look(watch.since + 800.0)
    assert len(told) == 1
    nodes.append(node("host2", "10.77.0.2"))  # it is back
    begins_on("host2", folder)
    watch.look(watch.since + 900.0)
    assert len(told) == 1
