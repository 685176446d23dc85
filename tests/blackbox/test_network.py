"""A cluster of hosts whose network fails: the run goes on with those that reach each other, and is the same run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.blackbox.compare import Truth, config_of, deviations
from tests.blackbox.episode import reference
from tests.blackbox.hosted import SETTINGS, HostedPlace, wait_for_generation
from tests.blackbox.network import why_not
from tests.blackbox.place import Place
from tests.blackbox.processes import wait_for
from tests.blackbox.run import START_S, Run

pytestmark = [pytest.mark.faults, pytest.mark.cluster, pytest.mark.timeout(2400)]
STEPS = 80
_GOES_ON_S = 300.0  # of which Ray takes some 40 s to give up a host, and a lost decoding task as long
_END_S = 300.0


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Truth]:
    with closing(Place(tmp_path_factory.mktemp("calm"), STEPS)) as place:
        yield reference(place)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[HostedPlace]:
    if why := why_not():
        pytest.skip(why)
    with closing(HostedPlace(tmp_path, STEPS, hosts=4)) as found:
        yield found


@pytest.fixture
def run(place: HostedPlace) -> Iterator[Run]:
    """A run on three hosts that has begun to train."""
    with closing(Run(place, "hosted", SETTINGS)) as found:
        found.start()
        assert found.wait_for_step(5, START_S), found.said()[-2000:]
        yield found


def assert_ends_as(truth: Truth, run: Run) -> None:
    code = run.code(_END_S)
    assert code == 0, f"{code}: {run.said()[-3000:]}"
    folders = {"run.dir": run.place.runs, "data.sources": config_of(run.folder)["data"]["sources"]}
    assert deviations(run, truth, {**SETTINGS, **folders}) == [], run.said()[-3000:]


def test_two_hosts_that_do_not_reach_each_other_are_not_trained_on_together(
    place: HostedPlace, run: Run, truth: Truth
) -> None:
    """Both reach the head, so Ray knows of nothing."""
    main = place.controller_of(run)
    one, other = [host for host in place.workers_of(run).values() if host is not main][:2]
    since = time.time()
    one.deafen([other])
    other.deafen([one])
    assert wait_for_generation(run, 2, since, _GOES_ON_S), run.said()[-3000:]
    (left_out, *_) = run.events("left_out")
    assert one.name in left_out["why"] and other.name in left_out["why"] and "does not reach" in left_out["why"]
    assert run.alive
    assert_ends_as(truth, run)
    for host in place.network.hosts:
        left = [line for line in host.processes().values() if line.startswith(("ray::Worker", "ray::Keeper"))]
        assert left == [], host.name
        assert host.shared_memory() == []


def test_before_a_run_the_check_names_hosts_that_do_not_reach_each_other(place: HostedPlace) -> None:
    command = place.head.command(sys.executable, "-m", "app.cli", "check", "--json")
    environment = place.environment()

    def checked() -> tuple[int, dict[str, object]]:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_END_S)
        assert done.stdout.startswith("{"), done.stdout + done.stderr
        return done.returncode, json.loads(done.stdout)

    code, told = checked()
    assert code == 0 and told["findings"] == [], told
    one, other = place.others[:2]
    one.deafen([other])
    code, told = checked()
    texts = [finding["text"] for finding in told["findings"]]  # type: ignore[attr-defined]
    assert code == 1 and any(f"{one.name} does not reach {other.name}" in text for text in texts), texts
    assert told["seen"]["talk"] is None, "nothing is tried that would hang"  # type: ignore[index]


def test_a_free_host_takes_the_place_of_one_out_of_reach(tmp_path: Path, truth: Truth) -> None:
    if why := why_not():
        pytest.skip(why)
    with (
        closing(HostedPlace(tmp_path, STEPS, hosts=5)) as place,
        closing(Run(place, "hosted", SETTINGS)) as run,
    ):
        run.start()
        assert run.wait_for_step(5, START_S), run.said()[-2000:]
        before = place.workers_of(run)
        assert len(before) == 3, "of four hosts"
        main = place.controller_of(run)
        one, other = [host for host in before.values() if host is not main][:2]
        since = time.time()
        one.deafen([other])
        other.deafen([one])
        assert wait_for_generation(run, 3, since, _GOES_ON_S), run.said()[-3000:]
        after = set(place.workers_of(run).values())
        assert len(after & {one, other}) == 1 and len(after - set(before.values())) == 1
        (drained, *_) = run.events("drain")
        assert before[drained["worker"]] in {one, other} - after and "do not reach it" in drained["why"]
        assert_ends_as(truth, run)


def test_a_host_that_is_cut_off_without_a_word_is_gone_on_without(place: HostedPlace, run: Run, truth: Truth) -> None:
    main = place.controller_of(run)
    cut = next(host for host in place.workers_of(run).values() if host is not main)
    since = time.time()
    place.network.cut(cut)
    assert wait_for_generation(run, 2, since, _GOES_ON_S), run.said()[-3000:]
    assert cut not in place.workers_of(run).values()
    assert_ends_as(truth, run)


def test_a_host_that_loses_packets_is_named_and_gone_on_without(place: HostedPlace, run: Run, truth: Truth) -> None:
    """A third of them, either way: TCP sends them again after ever longer times, so that a step takes minutes, while
    Ray and the heartbeats come through."""
    main = place.controller_of(run)
    lossy = next(host for host in place.workers_of(run).values() if host is not main)
    since = time.time()
    lossy.lose(0.3)
    assert wait_for_generation(run, 2, since, _GOES_ON_S), run.said()[-3000:]
    assert lossy not in place.workers_of(run).values()
    (ended, *_) = run.events("end")  # its worker is left out, or replaced where its heartbeats are lost as well
    assert "packets are lost between" in ended["why"] and lossy.name in ended["why"]
    lossy.listen()
    assert_ends_as(truth, run)


def test_a_host_whose_network_is_slow_is_named(place: HostedPlace, run: Run, truth: Truth) -> None:
    """Nothing fails, and everything takes longer: no other part of the run would say why."""
    slow = next(iter(place.workers_of(run).values()))
    slow.slow_down(3e5)
    assert wait_for(lambda: bool(run.events("slow_link")), _GOES_ON_S), run.said()[-3000:]
    slow.hurry()
    found = run.events("slow_link")
    assert {event["host"] for event in found} == {slow.name}
    assert all(event["mib_per_s"] < 1 < event["usual_mib_per_s"] for event in found)
    assert_ends_as(truth, run)
    assert not run.events("dead") and not run.events("left_out")


def test_a_run_whose_controllers_host_is_cut_off_goes_on_by_another(place: HostedPlace, run: Run, truth: Truth) -> None:
    """The old controller lives on there and holds the folder, until the new one asks for it."""
    cut, since = place.controller_of(run), time.time()
    place.network.cut(cut)
    assert wait_for_generation(run, 2, since, _GOES_ON_S), run.said()[-3000:]
    assert cut not in place.workers_of(run).values()
    assert "does not answer Ray any more" in run.said()
    assert_ends_as(truth, run)
