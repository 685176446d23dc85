"""What memory workers would lack to train together, before a generation of them forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.config import SnapshotConfig
from actors.messages import WorkerInfo
from actors.plan.costs.needs import BAG, SOLO, NeedLine, Needs
from actors.plan.places import Places
from actors.plan.types import PlanError
from actors.planning.demand import Demand
from actors.planning.room import GenerationRoom
from actors.run.shortage import Shortage
from actors.state.hosts import aside_gib, needs_of_hosts
from ops.geometry import Geometry
from tests.actors.run.test_forming import SIZES, ready

HD = (81, 720, 1280)
NEEDS = Needs(predicted={("dit", kind): NeedLine(fixed_gib=0.2, gib_per_unit=6.7e-4) for kind in (SOLO, BAG)})
SNAPSHOT = SnapshotConfig()


def shortage_of(places: Places) -> Shortage:
    sizes = replace(SIZES, places=places)
    return Shortage(
        snapshot=SNAPSHOT,
        room=GenerationRoom(sizes=sizes, degrees=(1, 2, 4, 8), bag_peers=11),
        demand=Demand(geometry=Geometry(), clips=(HD,), text_tokens=512, bag_peers=11),
        needs=NEEDS,
    )


def gpus(counts: tuple[int, ...], places: Places, room_gib: float, host_gib: float | None = None) -> list[WorkerInfo]:
    """Workers on nodes with these counts, with `room_gib` of each GPU when they have loaded."""
    nodes = [f"n{node}" for node, count in enumerate(counts) for _ in range(count)]
    return [
        replace(
            ready(rank, node, replace(SIZES, places=places)),
            room_gib=room_gib,
            host=f"h-{node}",
            host_room_gib=host_gib,
        )
        for rank, node in enumerate(nodes)
    ]


def test_a_worker_that_is_alone_on_its_node_lacks_the_memory_for_its_whole_gradient() -> None:
    """Wan2.1-14B on GPUs of 80 GB: 50 GiB are left when it has loaded, and the node's gradient takes 53."""
    places = Places("node", "host")
    infos = gpus((8, 1), places, room_gib=50.0)
    found = shortage_of(places)
    assert found.of(infos[:8]) == ""
    assert found.of(infos[:9]).startswith("a clip of some bucket needs 6.6 GiB, and of 9 workers w8 has -")
    assert found.of(infos[:4]) == "", "half of the GPUs hold twice the part"


def test_fewer_workers_lack_it_for_the_optimizer_s_state() -> None:
    places = Places("node", "device")
    infos = gpus((8,), places, room_gib=50.0)
    found = shortage_of(places)
    assert found.of(infos[:8]) == "" and "of 4 workers w0 has" in found.of(infos[:4])


def test_workers_without_a_limit_lack_nothing() -> None:
    infos = [replace(info, room_gib=None) for info in gpus((1,), Places("own", "device"), 1.0)]
    assert shortage_of(Places("own", "device")).of(infos) == ""
    unpredicted = replace(shortage_of(Places("own", "device")), demand=None)
    assert unpredicted.of(gpus((1,), Places("own", "device"), 1.0)) == ""


def of_each(nodes: int, places: Places) -> float:
    """GiB that each of `nodes` nodes of eight needs."""
    infos = gpus((8,) * nodes, places, 50.0, 1e6)
    (_, need, _), *_ = needs_of_hosts(infos, SIZES.state_gib, SIZES.state_bytes, SNAPSHOT)
    return need.total


def test_a_run_that_loses_a_node_lacks_the_memory_of_the_others() -> None:
    places = Places("node", "host")
    infos = gpus((8, 8, 8), places, room_gib=50.0, host_gib=1.1 * of_each(3, places))
    found = shortage_of(places)
    assert found.of(infos[:16]) == "", "nothing has begun: that is refused with a sentence for each node"
    found.begin(infos, fresh=True)
    assert found.of(infos[:24]) == ""
    assert found.of(infos[:16]).startswith("node h-n0 has ")


def test_one_node_of_two_has_the_memory_to_go_on_alone() -> None:
    """Alone it owns all of the state, of which it owned and copied a half each."""
    places = Places("node", "host")
    infos = gpus((8, 8), places, room_gib=50.0, host_gib=1.01 * of_each(2, places))
    found = shortage_of(places)
    found.begin(infos, fresh=True)
    assert found.of(infos[:8]) == ""


def test_a_worker_that_comes_later_does_not_make_its_node_look_full() -> None:
    """It sees what is left beside the state; what the node could spare before that counts."""
    places = Places("node", "host")
    infos = gpus((8, 8), places, room_gib=50.0, host_gib=1.1 * of_each(2, places))
    found = shortage_of(places)
    found.begin(infos, fresh=True)
    infos.append(replace(infos[0], worker="w16", host_room_gib=3.0))
    assert found.of(infos[1:17]) == ""
    infos += [replace(info, worker=f"w{n + 17}", node="n2", host_room_gib=3.0) for n, info in enumerate(infos[:8])]
    assert "GiB of host memory" in found.of(infos[:25]), "of a node that is new it is all that there is"
    joined = shortage_of(places)
    joined.begin(infos[:16], fresh=True)
    joined.begin(infos, fresh=False)
    assert "GiB of host memory" in joined.of(infos), "also when a generation with it has begun"


def test_nodes_that_hold_state_already_are_not_judged_by_what_is_left() -> None:
    """A controller that is started again finds keepers there."""
    places = Places("node", "host")
    infos = gpus((8,), places, room_gib=50.0, host_gib=3.0)
    found = shortage_of(places)
    found.begin(infos, fresh=False)
    assert found.of(infos[:8]) == ""


def test_a_fresh_run_is_refused_with_a_sentence_for_each_node() -> None:
    places = Places("node", "host")
    infos = gpus((8, 8), places, room_gib=50.0, host_gib=3.0)
    with pytest.raises(PlanError) as refused:
        shortage_of(places).begin(infos, fresh=True)
    assert [line.split(" has ")[0] for line in str(refused.value).splitlines()] == ["node h-n0", "node h-n1"]


def test_every_node_must_have_memory_for_a_sample_and_may_make_as_many_at_a_time_as_it_has_memory_for() -> None:
    """What it could spare before it had the run's state counts, also in later generations."""
    places = Places("node", "host")
    sample = aside_gib(SIZES.state_gib, SIZES.state_bytes, SIZES.parameter_bytes, gpu=True)
    plain, found = shortage_of(places), replace(shortage_of(places), samples=True)
    infos = gpus((8, 8), places, room_gib=50.0, host_gib=of_each(2, places) + 3.5 * sample)
    for shortage in (plain, found):
        shortage.begin(infos, fresh=True)
    full = [replace(info, host_room_gib=3.0) for info in infos]
    assert plain.asides_at_once(full) is None and found.asides_at_once(full) == 3
    short = gpus((8, 8), places, room_gib=50.0, host_gib=of_each(2, places) + 0.5 * sample)
    shortage_of(places).begin(short, fresh=True)
    with pytest.raises(PlanError, match=r"set sample\.every and validation\.every to 0"):
        replace(shortage_of(places), samples=True).begin(short, fresh=True)


def test_every_node_must_have_memory_for_the_task_that_writes_lora_files() -> None:
    places = Places("node", "host")
    infos = gpus((8, 8), places, room_gib=50.0, host_gib=of_each(2, places) + 1.0)
    replace(shortage_of(places), lora_files_gib=0.9).begin(infos, fresh=True)
    with pytest.raises(PlanError, match=r"LoRA files 1\.10.*set checkpoint\.lora_files to off"):
        replace(shortage_of(places), lora_files_gib=1.1).begin(infos, fresh=True)


def test_nodes_of_which_nothing_is_known_may_make_any_number_of_samples() -> None:
    places = Places("node", "host")
    infos, found = gpus((8,), places, room_gib=50.0), replace(shortage_of(places), samples=True)
    found.begin(infos, fresh=True)
    assert found.asides_at_once(infos) is None
