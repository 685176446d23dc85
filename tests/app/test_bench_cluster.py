"""`heddle bench cluster`: the real controller on virtual workers, in this process, without Ray."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from actors.held_state import Origin
from actors.messages import FinishTask, FormTask, StaleGeneration
from actors.plan.costs.point import Samples
from actors.plan.schedule.problem import PlanOptions
from actors.plan.types import Cluster, Item
from actors.planning.make_plan import make_plan
from app.bench.cluster.command import disturbances, run, sizes_of
from app.bench.cluster.ddp import COMMON, LEAST, OWN, DdpFigures, NoDegree, ddp_figures, ddp_of
from app.bench.cluster.figures import Aftermath, ClusterFigures, VirtualRunFailed, check_steps
from app.bench.cluster.handles import NodeHandle
from app.bench.cluster.here import Post
from app.bench.cluster.host import Host, Meetings
from app.bench.cluster.page import html
from app.bench.cluster.physics import Physics
from app.bench.cluster.setups import Disturbance, Setup, workload
from app.bench.cluster.simulate import run_here
from app.bench.cluster.tables import curves_of, fitted, steps_line, thread_line, ways_of
from app.bench.cluster.watching import seconds_of_threads
from app.bench.workload import scaled_profile
from ops.typed import ConfigError
from tests.app.pages import assert_every_picture_has_a_name

FAST = Physics(speed=200.0, heartbeat_s=0.5)


@pytest.mark.parametrize("relay_from", [0, 2], ids=["direct", "by relays"])
def test_a_run_goes_on_when_a_worker_and_a_node_are_lost_and_another_joins(relay_from: int) -> None:
    lost = (
        Disturbance(step=1, what="worker"),
        Disturbance(step=4, what="node"),
        Disturbance(step=6, what="join"),
    )
    setup = Setup(nodes=3, gpus=2, steps=30, budget_s=0.01, physics=FAST, disturbances=lost, relay_from=relay_from)
    found = run_here(setup, timeout_s=120)
    assert found.steps == 30 and found.workers == 6
    assert [seen.what for seen in found.recovered] == ["worker", "node", "join"]
    assert found.recovered[0].workers == 5
    assert found.recovered[2].workers > found.recovered[1].workers
    # how much longer it takes is of the machine: at this speed 10 ms of its own are two seconds
    assert found.executed_s > 0.9 * found.planned_s and found.controller_s > 0 and found.calls >= 3


def test_a_step_that_is_missing_or_comes_twice_or_lacks_samples_is_named() -> None:
    check_steps([0, 1, 2], [1.0, 1.0, 1.0], 3)
    for steps, weights in (([0, 2], [1.0, 1.0]), ([0, 1, 1, 2], [1.0] * 4)):
        with pytest.raises(VirtualRunFailed, match="not each of 0 to 2 once"):
            check_steps(steps, weights, 3)
    with pytest.raises(VirtualRunFailed, match=r"step 1 .* weight 0\.5 of 1"):
        check_steps([0, 1, 2], [1.0, 0.5, 1.0], 3)


@pytest.mark.parametrize("given", ["0", "", "4..2", "0..8", "2,0", "a", "-1", "2..x"])
def test_sizes_that_are_none_are_refused_in_a_sentence(given: str) -> None:
    with pytest.raises(typer.BadParameter, match="no number of nodes of at least 1"):
        sizes_of(given)


def test_sizes_double_and_end_with_the_last() -> None:
    assert sizes_of("2..128") == [2, 4, 8, 16, 32, 64, 128] and sizes_of("2..5") == [2, 4, 5]
    assert sizes_of("4") == [4] and sizes_of("8, 2") == [8, 2] and sizes_of("3..3") == [3]


def test_an_unknown_strategy_and_no_speed_are_refused_in_a_sentence() -> None:
    with pytest.raises(typer.BadParameter, match="'best' is none of ddp, static, flexsp, knapsack, cascade"):
        run(strategy=["best"])
    for speed in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(typer.BadParameter, match="is not above 0"):
            run(speed=speed)


def test_short_runs_are_not_disturbed_and_one_node_is_not_lost() -> None:
    assert disturbances(9, 4) == ()
    assert [one.what for one in disturbances(50, 1)] == ["worker"]
    assert [(one.step, one.what) for one in disturbances(50, 2)] == [(10, "worker"), (20, "node"), (30, "join")]


def test_the_curve_is_the_power_law_behind_its_points() -> None:
    sizes = [16, 64, 256, 1024]
    curve = fitted("seconds", sizes, [0.01 * n**1.5 for n in sizes])
    assert curve.power == pytest.approx(1.5) and curve.at_far == pytest.approx(1e4) and curve.r2 == pytest.approx(1.0)
    assert curves_of([SimpleNamespace(workers=16), SimpleNamespace(workers=32)]) == []  # type: ignore[list-item]


def test_seconds_of_the_process_are_told_by_thread() -> None:
    def work() -> float:
        Path("/proc/thread-self/comm").write_text("counts")
        while time.thread_time() < 0.5:
            pass
        return seconds_of_threads()["counts"]

    with ThreadPoolExecutor(1) as pool:
        assert 0.3 <= pool.submit(work).result() < 5.0, "of this thread alone, in a process that has others"
    said = thread_line(SimpleNamespace(threads_s={"python": 0.3, "worker.io": 0.05, "idle": 0.001}))  # type: ignore[arg-type]
    assert said == "CPU s a step of its process by thread: python 0.300, worker.io 0.050"
    assert thread_line(SimpleNamespace(threads_s={})) == ""  # type: ignore[arg-type]


def test_who_waits_for_a_member_that_is_gone_is_told_when_the_generation_ends() -> None:
    async def play() -> None:
        meetings = Meetings()
        waiting = asyncio.ensure_future(meetings.meet((3, "bag"), 1, 2, 0.5))
        other = asyncio.ensure_future(meetings.meet((4, "bag"), 1, 2, 0.25))
        await asyncio.sleep(0)
        meetings.end(3, "closed")
        with pytest.raises(RuntimeError, match="closed"):
            await waiting
        with pytest.raises(RuntimeError, match="generation 3 has ended"):
            await meetings.meet((3, "late"), 1, 2, 0.0)
        assert await meetings.meet((4, "bag"), 1, 2, 0.5) == 0.75 and await other == 0.75

    asyncio.run(play())


def test_a_worker_runs_calls_in_their_order_and_refuses_a_step_that_it_has_not_run() -> None:
    async def play() -> None:
        host = Host(0, scaled_profile(200.0), replace(FAST, load_s=0.0, restore_s=0.0), Deaf())
        await host.know([Here(host)])
        await host.add("w0", "n0000")
        keeper: Any = NodeHandle("keeper", "n0000", host)  # type: ignore[arg-type]
        form = FormTask(generation=1, rank=0, world=1, store=("", 0), origin=Origin(step=4), home=keeper, nodes=(0,))
        finish = FinishTask(generation=1, step=0, export=False, cascades=(), weight=0.0)
        late = asyncio.ensure_future(host.call("w0", "me", 1, "finish_step", [finish]))  # before the call it follows
        await asyncio.sleep(0)
        await host.call("w0", "me", 0, "form", [form])
        report, snapshot = await late
        assert report.step == 0 and snapshot is None
        with pytest.raises(RuntimeError, match="step 1 ends with"):
            await host.call("w0", "me", 2, "finish_step", [replace(finish, step=1, cascades=("s1/dit/0",))])
        with pytest.raises(StaleGeneration):
            await host.call("w0", "me", 3, "finish_step", [replace(finish, step=1)])
        await host.end(["w0"])

    asyncio.run(play())


def test_a_loop_is_woken_once_for_all_calls_that_wait_for_it() -> None:
    loop = asyncio.new_event_loop()
    woken: list[Any] = []
    post = Post(SimpleNamespace(call_soon_threadsafe=woken.append, create_task=loop.create_task))  # type: ignore[arg-type]

    async def answer(number: int) -> int:
        if number == 7:
            raise ValueError("seven")
        return number

    sent = [post.send(answer(n)) for n in range(100)]
    assert len(woken) == 1
    loop.call_soon(woken.pop())
    loop.run_until_complete(asyncio.sleep(0.01))
    assert [one.result() for n, one in enumerate(sent) if n != 7] == [n for n in range(100) if n != 7]
    with pytest.raises(ValueError, match="seven"):
        sent[7].result()
    again = post.send(answer(1))
    assert len(woken) == 1, "what comes later wakes it again"
    loop.call_soon(woken.pop())
    loop.run_until_complete(asyncio.sleep(0.01))
    assert again.result() == 1
    loop.close()


def test_a_larger_cluster_has_more_items_and_the_same_seed_the_same() -> None:
    small, large = workload(Setup(nodes=2, steps=3)), workload(Setup(nodes=8, steps=3))
    assert [len(step) for step in small] == [4] * 3 and [len(step) for step in large] == [16] * 3
    assert small == workload(Setup(nodes=2, steps=3)) and small[0] != small[1]


def test_a_published_set_runs_as_it_is_with_its_encodes_ahead(tmp_path: Path) -> None:
    shapes = ({"batch": 1, "frames": 121}, {"batch": 6, "frames": 9})
    steps = [[{"id": f"i{n}", "height": 1280, "width": 720, **one} for n, one in enumerate(shapes)]] * 4
    path = tmp_path / "set.json"
    path.write_text(json.dumps({"cluster": "2x4", "steps": steps}))
    physics = replace(FAST, speed=20.0, noise=0.0, stragglers=0.0, link_s=0.0, update_s=0.0)
    setup = Setup.of_published(path, physics)
    assert (setup.nodes, setup.gpus, setup.steps) == (2, 4, 4)
    assert [(item.frames, item.cached) for item in workload(setup)[3]] == [(121, ("text",)), (9, ("text",))]
    found = run_here(setup, timeout_s=120)
    executed, planned = zip(*found.every_step_s, strict=True)
    assert len(executed) == 4 and planned[1] < planned[0], "the encodes of the second step run in the first"
    assert sum(executed) > 0.99 * sum(planned)
    path.write_text(json.dumps({"steps": steps}))
    with pytest.raises(ConfigError, match="must name its cluster, such as 2x8"):
        Setup.of_published(path, physics)


def test_all_steps_of_a_set_are_told_beside_what_was_planned() -> None:
    said = steps_line(figures(16))
    assert said == (
        "all 2 steps, virtual s a step: executed 31.50, planned 30.50; without the first executed 29.00, planned 28.00"
    )


def test_a_cluster_above_the_largest_is_refused_before_it_forms() -> None:
    with pytest.raises(typer.BadParameter, match="1,000 nodes of 8 are 8,000 workers; at most 1,024 are run"):
        run(nodes="1,1000")
    with pytest.raises(typer.BadParameter, match="2 nodes of 513 are 1,026 workers"):
        run(nodes="2", gpus=513)


def test_sizes_and_steps_beside_a_published_set_are_refused() -> None:
    with pytest.raises(
        typer.BadParameter, match="A-16gpu has its own cluster and steps; leave out --nodes and --steps"
    ):
        run(published="A-16gpu", nodes="4", steps=2)


def test_an_unknown_set_is_refused_and_ddp_beside_one() -> None:
    with pytest.raises(typer.BadParameter, match=r"'D-8gpu' is none of A-16gpu, B-16gpu"):
        run(published="D-8gpu")
    with pytest.raises(typer.BadParameter, match="ddp is not evaluated on published steps"):
        run(published="A-16gpu", strategy=["ddp"], calm=True)


# DDP beside them

QUIET = Physics(noise=0.0, stragglers=0.0)
CLIPS = [
    Item(id=f"i{n}", batch=batch, frames=frames, height=1280, width=720, text_tokens=226)
    for n, (batch, frames) in enumerate([(1, 121), (6, 9), (3, 41), (2, 53)])
]


def seconds_of(item: Item, degree: int) -> float:
    """Seconds of a batch in a group of this degree with QUIET, by the profile's own points."""
    batch = Samples.of(item.batch, item.shape)
    profile = scaled_profile(1.0)
    vae = min(seconds for k, seconds in profile.modes("vae", batch) if k <= degree)
    return 0.2 + vae + profile.seconds("dit", batch, degree)


def test_ddp_waits_for_the_group_that_has_most_to_do() -> None:
    cluster = Cluster(nodes=(8, 8))
    best, least, _ = ddp_figures([CLIPS], scaled_profile(1.0), QUIET, cluster)
    by_degree = {
        4: max(seconds_of(item, 4) for item in CLIPS) + 0.2,
        8: max(seconds_of(CLIPS[n], 8) + seconds_of(CLIPS[n + 2], 8) for n in (0, 1)) + 0.2,
    }
    assert least.way == LEAST and least.degrees == (4,) and least.mean_step_s == pytest.approx(by_degree[4])
    assert best.way == OWN and best.degrees == (8,) and best.mean_step_s == pytest.approx(by_degree[8])
    assert best.samples_per_s == pytest.approx(12 / by_degree[8]) and 0 < best.idle < least.idle < 1


def test_groups_that_draw_one_bucket_train_it_as_often_as_it_is_drawn() -> None:
    *_, common = ddp_figures([CLIPS], scaled_profile(1.0), QUIET, Cluster(nodes=(8, 8)))
    shares = [min((seconds_of(item, k) + 0.2) / {4: 4, 8: 2}[k] for k in (4, 8)) for item in CLIPS if item.frames != 9]
    shares.append(min((seconds_of(CLIPS[1], k) + 0.2) / {2: 8, 4: 4, 8: 2}[k] for k in (2, 4, 8)))
    assert common.way == COMMON and common.samples_per_s == pytest.approx(12 / sum(shares))
    assert common.mean_step_s == pytest.approx(sum(shares) / common.steps)


def test_ddp_pays_for_noise_stragglers_and_the_update() -> None:
    def step_s(**changed: float) -> float:
        physics = replace(QUIET, **changed)  # type: ignore[arg-type]
        return ddp_figures([CLIPS[:1]], scaled_profile(1.0), physics, Cluster(nodes=(4,)))[0].mean_step_s

    cascades = step_s(update_s=0.0)
    assert step_s(update_s=0.0, stragglers=1.0) == pytest.approx(1.5 * cascades)
    assert step_s(update_s=7.0) == pytest.approx(cascades + 7.0)
    assert step_s(update_s=0.0, noise=0.2) != pytest.approx(cascades, rel=1e-3)


@pytest.mark.long
def test_ddp_takes_what_the_virtual_workers_take_for_one_bucket(tmp_path: Path) -> None:
    shape = {"batch": 6, "frames": 9, "height": 1280, "width": 720}
    one = tmp_path / "one.json"
    one.write_text(json.dumps({"steps": [[shape]]}))
    physics = replace(QUIET, speed=8.0, link_s=1.0, update_s=1.0, load_s=0.0)
    setup = Setup(nodes=1, gpus=2, steps=6, strategy="static", static_degree=2, physics=physics, workload=one)
    ddp = ddp_of(setup)[0]
    assert ddp.degrees == (2,)
    options = PlanOptions(strategy="static", static_degree=2)
    plan = make_plan([workload(setup)[0]], scaled_profile(1.0), Cluster(nodes=(2,)), options)
    assert ddp.mean_step_s == pytest.approx(plan.steps[0].makespan_s + physics.update_s, rel=0.01)
    executed_s = run_here(setup, timeout_s=120).executed_s
    assert executed_s > 0.97 * ddp.mean_step_s, "a busy machine makes the waits of its workers longer, never shorter"


def test_ddp_is_refused_where_machines_are_lost_and_where_no_group_holds_a_bucket() -> None:
    with pytest.raises(typer.BadParameter, match="none is lost; add --calm"):
        run(strategy=["ddp"])
    with pytest.raises(typer.BadParameter, match="no sequence-parallel degree of at most 2 GPUs holds every bucket"):
        run(nodes="1", gpus=2, calm=True, strategy=["ddp"])
    with pytest.raises(NoDegree):
        ddp_figures([CLIPS], scaled_profile(1.0), QUIET, Cluster(nodes=(2,)))


def test_ways_are_compared_by_their_samples_per_second(capsys: pytest.CaptureFixture[str]) -> None:
    run(nodes="1,2", steps=6, calm=True, strategy=["ddp"])
    said = capsys.readouterr().out
    rows = [line.split(" | ") for line in said.splitlines() if line.startswith(("| 8 |", "| 16 |"))]
    assert [row[1] for row in rows if row[4] == "1.00"] == ["ddp (SP 8)"] * 2 and "executed" not in said
    assert len(rows) == 6 and all(float(row[3]) > 0 for row in rows)


# the page


def figures(workers: int, **changed: Any) -> ClusterFigures:
    plain = ClusterFigures(
        workers=workers,
        nodes=workers // 8,
        strategy="cascade",
        steps=30,
        elapsed_s=900.0,
        executed_s=31.0,
        mean_step_s=30.0,
        every_step_s=((34.0, 33.0), (29.0, 28.0)),
        samples_per_s=0.25,
        planned_s=29.0,
        steps_per_hour=120.0,
        planned_steps_per_hour=124.1,
        idle=0.1,
        planning_s=0.01,
        calls=41.0,
        dispatch_ms=4.5,
        controller_s=0.05,
        process_s=0.07,
        share=0.007,
        rss_mib=320.0,
        rss_growth_mib=1.0,
        form_s=0.02,
    )
    return replace(plain, **changed)


def test_the_page_shows_what_was_seen_with_its_command() -> None:
    ddp = DdpFigures(
        way=OWN, workers=16, degrees=(8,), steps=28, mean_step_s=33.0, samples_per_s=0.2, idle=0.2, same_steps=True
    )
    lost = Aftermath(what="node", form_s=0.34, step_s=71.0, workers=8)
    found = [figures(16), figures(16, strategy="static", samples_per_s=0.1, recovered=(lost,))]
    page = html(ways_of([ddp], found), found, [], "heddle bench cluster --nodes 2", "2 cores")
    assert "<b>1.25</b><span>of DDP&#x27;s samples per second: cascade on 16 GPUs" in page
    assert "ddp (SP 8)" in page and "0.25 (1.25 of ddp)" in page and "0.1 (0.50 of ddp)" in page
    assert "16 workers, static: a node lost" in page and "71.0, then 8" in page and "0.70%" in page
    assert_every_picture_has_a_name(page)
    assert "16 workers, ddp (SP 8)" in page and "33.0 evaluated" in page
    assert page.count("<code class=command>heddle bench cluster --nodes 2</code>") == page.count("<section>") == 4


def test_a_page_has_no_section_of_what_was_not_run(tmp_path: Path) -> None:
    plain = html([], [figures(8)], [], "heddle bench cluster", "2 cores")
    assert "Beside Dist" not in plain and "A worker lost" not in plain and "The controller" in plain
    outs = [tmp_path / "page.html", tmp_path / "figures.json"]
    run(nodes="1", steps=4, calm=True, strategy=["ddp"], out=outs)
    page = outs[0].read_text()
    assert "heddle bench cluster --nodes 1 --gpus 8 --steps 4 --strategy ddp --speed 10 --calm --seed 0" in page
    assert "The controller" not in page and page.count("<section>") == 1
    assert [one["way"] for one in json.loads(outs[1].read_text())["ddp"]] == [OWN, LEAST, COMMON]


@pytest.mark.long
def test_64_workers_commit_every_step_once_with_losses_and_joins() -> None:
    setup = Setup(nodes=8, steps=30, physics=Physics(speed=40.0), disturbances=disturbances(30, 8))
    found = run_here(setup, timeout_s=900)
    assert found.steps == 30 and [seen.what for seen in found.recovered] == ["worker", "node", "join"]
    assert found.recovered[0].workers == 63 and found.recovered[2].workers > found.recovered[1].workers


class Deaf:
    """A monitor that answers no heartbeat."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Here:
    """A handle of an object on the same loop."""

    def __init__(self, plain: object) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._plain, name))
