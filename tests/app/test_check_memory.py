"""A run that cannot fit its cluster is refused before anything is loaded, by what its nodes say of themselves."""

from __future__ import annotations

import ctypes
import re
from ctypes import CFUNCTYPE, POINTER, c_int, c_uint, c_void_p
from dataclasses import replace
from typing import Any

import pytest

import ops.memory.node_room
from actors.plan.types import PlanError
from actors.planning.forecasts import Forecasts
from actors.planning.memory import MemoryForecast
from actors.pool.device import WorkersDevice
from app.inputs.memory import filled
from app.run import memory
from app.run.cluster import check_device, on_usable
from app.run.memory import NodeSizes, check_memory
from app.settings.config import RunConfig
from ops.memory.node_room import gpu_sizes
from ops.typed import ConfigError
from tests.app.test_big_models import known

GIB = 2**30
RUN = """
run: {name: fits}
data:
  sources: [{path: clips.tar}]
  buckets: {table: [1x480x832, 81x720x1280]}
  batch: {text_tokens: 512}
model: {dit: {gradient_checkpointing: true, num_heads: 40}, text: {max_length: 512}}
train: {parameter_dtype: bfloat16, autocast: bfloat16, memory: {gradients: node, state: host}}
workers: {min: 8, max: 64, device: cuda, cpus_per_worker: 8}
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> list[NodeSizes]:
    """Nodes of eight GPUs with room for eight workers; tests say what each answers."""
    nodes: list[NodeSizes] = []

    def listed() -> list[dict[str, object]]:
        offers = {"CPU": 96.0, "GPU": 8.0}
        return [{"NodeID": f"{n}", "Alive": True, "Resources": offers} for n in range(len(nodes))]

    monkeypatch.setattr("actors.ray_calls.nodes", listed)
    monkeypatch.setattr("actors.pool.workers.resources", lambda free: {"GPU": 8.0})
    monkeypatch.setattr(memory, "_asked", lambda ids: {node: nodes[int(node)] for node in ids})
    monkeypatch.setattr(Forecasts, "of", lambda self, *changed: known("wan2.1-14b-full", self._clips))
    monkeypatch.setattr("app.inputs.memory.sizes_of", lambda *changed: known("wan2.1-14b-full", []))
    return nodes


H100 = WorkersDevice(name="NVIDIA H100 80GB HBM3")


def sizes(gib: float, room_gib: float = 4000.0, host: str = "here") -> NodeSizes:
    return NodeSizes(host=host, gpus=(int(gib * GIB),) * 8, room=int(room_gib * GIB))


def config(**workers: Any) -> RunConfig:
    """The run with other settings of its workers."""
    made = RunConfig.from_yaml(RUN)
    return replace(made, workers=replace(made.workers, **workers))


def test_a_run_that_fits_says_nothing(cluster: list[NodeSizes]) -> None:
    cluster += [sizes(79.2)] * 2
    check_memory(config(), H100)


def test_gpus_that_are_too_small_are_refused_with_what_would_fit(cluster: list[NodeSizes]) -> None:
    cluster += [sizes(79.2), sizes(31.5)]
    with pytest.raises(PlanError, match=r"a GPU of 31.5 GiB lacks [\d.]+ GiB on 64 workers before any cascade runs"):
        check_memory(config(), H100)


def test_fewer_workers_than_hold_the_gradient_are_refused_before_a_run_shrinks_to_them(
    cluster: list[NodeSizes],
) -> None:
    cluster += [sizes(79.2)]
    with pytest.raises(PlanError, match=r"workers.min 1 is too few: .* 79.2 GiB only on [2-4] workers or more"):
        check_memory(config(min=1), H100)


def test_a_node_without_the_memory_for_its_part_is_named_also_for_as_few_as_may_be_left(
    cluster: list[NodeSizes],
) -> None:
    """Eight nodes share the state of 213 GiB and what is kept of it; one alone has it all."""
    cluster += [sizes(79.2, host=f"h{n}") for n in range(8)]
    check_memory(config(), H100)
    cluster[3] = sizes(79.2, room_gib=20.0, host="h3")
    with pytest.raises(PlanError, match=r"^node h3 has 20\.0 GiB of host memory for training"):
        check_memory(config(), H100)
    check_memory(config(), H100, fresh=False)
    cluster[:] = [sizes(79.2, room_gib=1.0, host=f"h{n}") for n in range(8)]
    with pytest.raises(PlanError) as refused:
        check_memory(config(min=64), H100)
    of_eight = [float(gib) for gib in re.findall(r"takes ([\d.]+) GiB", str(refused.value))]
    assert len(of_eight) == 8 and max(of_eight) == min(of_eight)
    cluster[:] = [sizes(79.2, room_gib=1.05 * of_eight[0], host=f"h{n}") for n in range(8)]
    check_memory(config(min=64), H100)
    with pytest.raises(PlanError, match=r"^node h0 has .* takes [\d.]+ GiB of it [^\n]*$"):
        check_memory(config(), H100)
    del cluster[2:]
    with pytest.raises(
        PlanError, match=r"^node h0 has [^\n]*\nnode h1 has"
    ):  # two are there of the eight that may come
        check_memory(config(min=16), H100)


def test_a_node_that_does_not_answer_is_not_refused(cluster: list[NodeSizes], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster += [sizes(1.0)]
    monkeypatch.setattr(memory, "_asked", lambda ids: {})
    check_memory(config(), H100)


def test_workers_on_cpus_are_checked_where_their_memory_has_a_limit(
    cluster: list[NodeSizes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(ids: object) -> dict[str, NodeSizes]:
        raise AssertionError("a node of CPUs is asked for its GPUs")

    def on_cpu(self: Forecasts, *changed: object) -> MemoryForecast:
        return replace(known("wan2.1-14b-full", self._clips), cuda=False)

    cluster += [sizes(1.0)]
    monkeypatch.setattr(memory, "_asked", never)
    monkeypatch.setattr(Forecasts, "of", on_cpu)
    check_memory(config(device="cpu"), H100)
    with pytest.raises(PlanError, match=r"a worker of 1 GiB lacks"):
        check_memory(config(device="cpu", memory_gib=1.0), H100)


def test_settings_for_gpus_are_refused_where_auto_finds_none(
    cluster: list[NodeSizes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shared(device: str) -> RunConfig:
        made = config(device=device)
        return replace(made, train=replace(made.train, memory=replace(made.train.memory, gradients="host")))

    check_device(shared("auto"))  # the cluster's nodes have GPUs
    monkeypatch.setattr("actors.pool.workers.resources", lambda free: {"CPU": 8.0})
    check_device(shared("cuda"))  # they may come
    check_device(config(device="auto"))
    with pytest.raises(ConfigError, match=r"auto is cpu on this cluster \(no node has a GPU\)\. .*gradients to node"):
        check_device(shared("auto"))


def test_gpus_that_cannot_be_used_are_told_and_auto_goes_on_without(capsys: pytest.CaptureFixture[str]) -> None:
    unusable = WorkersDevice(name="cpu", kinds=("H100",), unusable="GPU 0 of h: PyTorch cannot use it: too old")
    made = config(device="auto")
    assert on_usable(made, H100) is made and not capsys.readouterr().out
    plain = replace(made, train=replace(made.train, memory=replace(made.train.memory, gradients="own")))
    assert on_usable(plain, unusable).workers.device == "cpu"
    assert "warning: workers.device auto is cpu, as the cluster's GPUs cannot be used. GPU 0 of h: " in (
        capsys.readouterr().out
    )
    with pytest.raises(ConfigError, match=r"workers\.device cuda: .* GPU 0 of h: .* --set workers\.device=cpu"):
        on_usable(config(device="cuda"), unusable)


@pytest.mark.parametrize(
    ("rooms", "workers", "nodes"),
    [([8, 8, 2], 10, (8, 2)), ([8], 20, (8, 8, 4)), ([], 4, (4,)), ([4, 4], 8, (4, 4)), ([2, 1], 9, (2, 1, 2, 2, 2))],
)
def test_nodes_are_filled_one_after_the_other_and_more_come_like_the_largest(
    rooms: list[int], workers: int, nodes: tuple[int, ...]
) -> None:
    assert filled(rooms, workers) == nodes


class Nvml:
    """What NVML answers, through the C calling convention."""

    def __init__(self, count: int, total: int, reserved: int, fails: str = "") -> None:
        self._kept: list[object] = []

        def counted(number: Any) -> int:
            number[0] = count
            return 0

        def handle(index: int, device: Any) -> int:
            device[0] = 1000 + index
            return 0

        def told(device: int, found: Any) -> int:
            one = found.contents
            assert one.version == 40 | 2 << 24 and 1000 <= device < 1000 + count, "nvmlMemory_v2"
            one.total, one.reserved = total, reserved
            return int(fails == "memory")

        self._offer("nvmlInit_v2", CFUNCTYPE(c_int), lambda: int(fails == "init"))
        self._offer("nvmlDeviceGetCount_v2", CFUNCTYPE(c_int, POINTER(c_uint)), counted)
        self._offer("nvmlDeviceGetHandleByIndex_v2", CFUNCTYPE(c_int, c_uint, POINTER(c_void_p)), handle)
        self._offer(
            "nvmlDeviceGetMemoryInfo_v2", CFUNCTYPE(c_int, c_void_p, POINTER(ops.memory.node_room._GpuMemory)), told
        )

    def _offer(self, name: str, prototype: Any, function: Any) -> None:
        made = prototype(function)
        self._kept.append(made)
        setattr(self, name, ctypes.CDLL(None)._FuncPtr(ctypes.cast(made, c_void_p).value))


@pytest.mark.parametrize(("fails", "found"), [("", [79 * GIB] * 3), ("init", []), ("memory", [])])
def test_gpus_are_as_large_as_processes_may_use(fails: str, found: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, real = Nvml(3, 80 * GIB, GIB, fails), ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml if name == "libnvidia-ml.so.1" else real(name))
    assert gpu_sizes() == found


def test_a_node_without_the_driver_has_no_gpus() -> None:
    assert gpu_sizes("libnvidia-of-no-node.so.1") == []
