"""The legality check, against a legal plan of two steps on two workers, written by hand and broken in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from actors.plan.costs.profile import Profile
from actors.plan.costs.profile_json import read_profile
from actors.plan.schedule.check import check
from actors.plan.types import Cascade, Cluster, EarlyEncode, Item, Module, Part, Plan, PlanError, StepPlan

TWO = Cluster(nodes=(2,))
STEPS = (
    (Item(id="a", batch=2, frames=17, height=64, width=64),),
    (Item(id="b", batch=1, frames=17, height=64, width=64),),
)
Plans = dict[str, Cascade]


def profile(scale: float = 1.0, handoff_s: float = 0.0) -> Profile:
    """A clip's encode takes a second, its DiT two, or one on both workers."""
    known: list[tuple[Module, int, int, float]] = [
        ("vae", 1, 1, 1.0),
        ("vae", 2, 1, 2.0),
        ("dit", 1, 1, 2.0),
        ("dit", 2, 1, 4.0),
        ("dit", 1, 2, 1.0),
        ("dit", 2, 2, 2.0),
    ]
    latency = [
        {"module": m, "batch": n, "frames": 17, "height": 64, "width": 64, "degree": k, "seconds": s * scale}
        for m, n, k, s in known
    ]
    degrees = {"vae": [1], "dit": [1, 2]}
    data = {"latency": latency, "degrees": degrees, "extrapolate": False, "handoff": {"latency_s": handoff_s}}
    return read_profile(data)


def cascade(
    name: str, workers: tuple[int, ...], start_s: float, end_s: float, first: int = 0, count: int = 1
) -> Cascade:
    """`name`: item, module, number."""
    item, module, _ = name.split("/")
    part = Part(item=item, first=first, count=count)
    return Cascade(
        id=name, module="vae" if module == "vae" else "dit", step=int(item == "b"), parts=(part,),
        degree=len(workers), workers=workers, start_s=start_s, end_s=end_s,
    )  # fmt: skip


def legal() -> Plans:
    """Both workers encode a clip of `a`, train both, and then the one of `b`."""
    cascades = (
        cascade("a/vae/0", (0,), 0.0, 1.0),
        cascade("a/vae/1", (1,), 0.0, 1.0, first=1),
        cascade("a/dit/0", (0, 1), 1.0, 3.0, count=2),
        cascade("b/vae/0", (0,), 3.0, 4.0),
        cascade("b/dit/0", (0, 1), 4.0, 5.0),
    )
    return {one.id: one for one in cascades}


def checked(
    cascades: Sequence[Cascade],
    costs: Profile | None = None,
    steps: Sequence[Sequence[Item]] = STEPS,
    done: Sequence[EarlyEncode] = (),
) -> None:
    plans = tuple(
        StepPlan(step=n, cascades=tuple(c for c in cascades if c.step == n), makespan_s=9.0, lower_bound_s=0.0,
                 planning_s=0.0, idle_ratio=0.0)
        for n in range(2)
    )  # fmt: skip
    check(Plan(strategy="x", steps=plans), steps, costs or profile(), TWO, done)


def moved(one: Cascade, seconds: float) -> Cascade:
    return replace(one, start_s=one.start_s + seconds, end_s=one.end_s + seconds)


def part_of(one: Cascade, **changes: object) -> Cascade:
    return replace(one, parts=(replace(one.parts[0], **changes),))  # type: ignore[arg-type]


def test_a_legal_plan_passes_in_whichever_order_it_lists_its_cascades() -> None:
    checked(tuple(legal().values()))
    checked(tuple(reversed(legal().values())))


@pytest.mark.parametrize(
    ("name", "broken", "sentence"),
    [
        ("a/dit/0", lambda c: replace(c, workers=(1, 1)), r"has degree 2 but workers \[1, 1\]"),
        ("a/dit/0", lambda c: replace(c, degree=1), r"has degree 1 but workers \[0, 1\]"),
        ("a/dit/0", lambda c: replace(c, workers=(0, 2)), r"uses a worker outside 0\.\.1: \[0, 2\]"),
        ("a/dit/0", lambda c: replace(c, workers=(-1, 1)), r"uses a worker outside 0\.\.1: \[-1, 1\]"),
        ("a/dit/0", lambda c: replace(c, parts=()), "a/dit/0 has no samples"),
        ("b/dit/0", lambda c: part_of(c, item="a"), r"runs samples 0\.\.0 of item 'a', which do not exist"),
        ("b/dit/0", lambda c: part_of(c, first=1), r"runs samples 1\.\.1 of item 'b', which do not exist"),
        ("a/dit/0", lambda c: part_of(c, first=-1), r"runs samples -1\.\.0 of item 'a', which do not exist"),
        ("a/vae/0", lambda c: part_of(c, count=0), r"runs samples 0\.\.-1 of item 'a', which do not exist"),
        ("b/vae/0", lambda c: replace(c, workers=(0, 1), degree=2), "degree 2 is not legal for vae of batch 1"),
        ("a/dit/0", lambda c: replace(c, end_s=2.9), r"lasts 1\.900000 s, the profile says 2\.000000 s"),
        ("b/dit/0", lambda c: replace(c, end_s=5.1), r"lasts 1\.100000 s, the profile says 1\.000000 s"),
        ("a/vae/1", lambda c: part_of(c, first=0), r"item 'a': vae runs \[2, 0\] times per sample, it must run 1"),
        ("a/dit/0", lambda c: part_of(replace(c, end_s=2.0), count=1), r"dit runs \[1, 0\] times per sample"),
        ("b/dit/0", lambda c: replace(c, id="b/vae/0"), "2 cascades of step 1 are called b/vae/0"),
        ("a/dit/0", lambda c: moved(c, -0.001), "worker 0 runs a/vae/0 and a/dit/0 at the same time"),
        ("b/vae/0", lambda c: moved(replace(c, workers=(1,)), -0.5), "worker 1 runs a/dit/0 and b/vae/0 at the same"),
        ("b/vae/0", lambda c: moved(c, 2.0), r"b/dit/0 starts at 4\.000 s, before b/vae/0 has delivered at 6\.000 s"),
    ],
)  # fmt: skip
def test_what_breaks_a_plan_is_told(name: str, broken: Callable[[Cascade], Cascade], sentence: str) -> None:
    plan = legal()
    with pytest.raises(PlanError, match=sentence):
        checked(tuple((plan | {name: broken(plan[name])}).values()))


def test_a_step_trains_when_the_step_before_has_ended_and_encodes_before() -> None:
    one = legal()
    alone = (
        replace(one["a/vae/0"], parts=(Part(item="a", first=0, count=2),), end_s=2.0),
        replace(one["a/dit/0"], workers=(0,), degree=1, start_s=2.0, end_s=6.0),
        replace(one["b/vae/0"], workers=(1,), start_s=0.0, end_s=1.0),
    )
    after = replace(one["b/dit/0"], workers=(1,), degree=1, start_s=6.0, end_s=8.0)
    checked((*alone, after))
    with pytest.raises(PlanError, match=r"step 1 starts its dit at 5\.999 s, before step 0 ends at 6\.000 s"):
        checked((*alone, moved(after, -0.001)))
    halves = (
        replace(alone[1], id="a/dit/0", parts=(Part(item="a", first=0, count=1),), end_s=4.0),
        replace(alone[1], id="a/dit/1", parts=(Part(item="a", first=1, count=1),), start_s=4.0, end_s=6.0),
    )
    checked((alone[0], *halves, alone[2], after))
    with pytest.raises(PlanError, match=r"before step 0 ends at 6\.000 s"):
        checked((alone[0], *halves, alone[2], moved(after, -1.0)))


def test_results_of_other_workers_take_the_handoff_and_own_ones_do_not() -> None:
    """`b` is encoded where it is trained; moved to the other worker, its rows take half a second more."""
    one, slow = legal(), profile(handoff_s=0.5)
    trained = replace(one["b/dit/0"], workers=(0,), degree=1, end_s=6.0)
    first = [one[name] for name in ("a/vae/0", "a/vae/1", "a/dit/0")]
    checked((*first, one["b/vae/0"], trained), slow)
    elsewhere = replace(one["b/vae/0"], workers=(1,))
    checked((*first, elsewhere, moved(trained, 0.5)), slow)
    with pytest.raises(PlanError, match=r"b/dit/0 starts at 4\.499 s, before b/vae/0 has delivered at 4\.500 s"):
        checked((*first, elsewhere, moved(trained, 0.499)), slow)


def test_what_ran_early_keeps_its_worker_until_it_ends_and_runs_once() -> None:
    plan = legal()
    early = [EarlyEncode(item="a", module="vae", workers=(1,), end_s=1.0)]
    rest = [plan[name] for name in ("a/dit/0", "b/vae/0", "b/dit/0")]
    checked(rest, done=early)
    with pytest.raises(PlanError, match=r"item 'a': vae runs \[1, 0\] times per sample, it must run 0 times"):
        checked((plan["a/vae/0"], *rest), done=early)
    late = [replace(early[0], end_s=1.001)]
    with pytest.raises(PlanError, match=r"worker 1 runs a/dit/0 at 1\.000 s, before its encode of the step before"):
        checked(rest, done=late)
    cached = ((replace(STEPS[0][0], cached=("vae",)),), STEPS[1])
    checked(rest, steps=cached)
    with pytest.raises(PlanError, match="it must run 0 times"):
        checked(tuple(plan.values()), steps=cached)


def test_a_piece_that_ran_early_elsewhere_is_waited_for() -> None:
    """The piece that lies on a worker of the bag is there; the other one takes half a second."""
    one, slow = legal(), profile(handoff_s=0.5)
    early = [EarlyEncode(item="a", module="vae", workers=(n,), first=n, count=1) for n in (0, 1)]
    trained = replace(one["a/dit/0"], workers=(0,), degree=1, start_s=0.5, end_s=4.5)
    rest = [moved(one[name], 2.0) for name in ("b/vae/0", "b/dit/0")]
    checked((trained, *rest), slow, done=early)
    with pytest.raises(
        PlanError, match=r"a/dit/0 starts at 0\.400 s, before an earlier encode has delivered at 0\.500"
    ):
        checked((moved(trained, -0.1), *rest), slow, done=early)


def test_rounding_is_forgiven_by_the_length_of_a_cascade_and_no_more() -> None:
    """1e-6 of a second, or of a long cascade's time."""
    plan = legal()
    near = {name: moved(one, -5e-7) if name == "b/dit/0" else one for name, one in plan.items()}
    checked(tuple(near.values()))
    with pytest.raises(PlanError, match="lasts"):
        checked(tuple((plan | {"b/dit/0": replace(plan["b/dit/0"], end_s=5.0 + 3e-6)}).values()))
    long = {name: replace(one, start_s=1e3 * one.start_s, end_s=1e3 * one.end_s) for name, one in plan.items()}
    off = replace(long["b/dit/0"], end_s=5e3 + 5e-4)
    checked(tuple((long | {"b/dit/0": off}).values()), profile(1e3))
    short = {name: replace(one, start_s=1e-3 * one.start_s, end_s=1e-3 * one.end_s) for name, one in plan.items()}
    off = replace(short["b/dit/0"], end_s=5e-3 + 5e-7)
    checked(tuple((short | {"b/dit/0": off}).values()), profile(1e-3))
