"""GPUs are named and timed where they are, once for a run's folder; never taken for a CPU, nor silently for an H100."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch

from actors.config import PlannerConfig, WorkersConfig
from actors.plan.costs.point import Samples
from actors.plan.devices import device_speed
from actors.planning.learned import refuse_other, setting_of
from actors.planning.options import profile_of
from actors.pool import device as device_module
from actors.pool.device import DEVICE, SeenGpu, WorkersDevice, gpu_kinds, look_at, workers_device
from actors.ray_calls import given_gpu
from ops.geometry import Geometry
from ops.models.config import ModelConfig
from tests.actors.fakes import config_of
from tests.rays import local_ray

MODEL = ModelConfig()
H100 = SeenGpu(name="NVIDIA H100 PCIe")
BROKEN = SeenGpu(name="", unusable="GPU 0 of h: no driver")
UNLISTED = SeenGpu(name="NVIDIA RTX PRO 7000 Server Edition", tflops=250.0)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What Ray says that the cluster has."""
    has = {"CPU": 64.0, "GPU": 8.0}
    monkeypatch.setattr(device_module, "resources", lambda free: has)
    monkeypatch.setattr(device_module, "uses_gpu", lambda workers: workers.device != "cpu")
    return has


class Looks:
    """GPUs by their kinds, and which were looked at."""

    def __init__(self, **gpus: SeenGpu | None) -> None:
        self.gpus = {kind.replace("_", "-"): gpu for kind, gpu in gpus.items()}
        self.asked: list[str] = []

    def __call__(self, kind: str) -> SeenGpu | None:
        self.asked.append(kind)
        return self.gpus.get(kind)


def seconds(device: WorkersDevice) -> float:
    """Seconds of a clip by the profile that a run on it begins with."""
    profile = profile_of(PlannerConfig(), MODEL, Geometry(), device.name, measured=device.measured)
    return profile.seconds("dit", Samples.of(1, (81, 480, 832), 100), 1)


def test_a_gpu_is_named_by_its_driver_and_looked_at_once(cluster: dict[str, float], tmp_path: Path) -> None:
    cluster["accelerator_type:H100"] = 1.0
    config, looks = config_of(workers=WorkersConfig(device="cuda")), Looks(H100=H100)
    found = workers_device(config, tmp_path, looks)
    assert found == WorkersDevice(name="NVIDIA H100 PCIe", kinds=("H100",)) and not found.assumed
    found.keep(tmp_path)
    assert workers_device(config, tmp_path, looks) == found and looks.asked == ["H100"]
    assert seconds(found) > seconds(WorkersDevice(name="H100")), "a PCIe card is slower"


def test_a_resume_on_the_same_gpus_has_the_same_figures_and_on_others_its_own(
    cluster: dict[str, float], tmp_path: Path
) -> None:
    cluster["accelerator_type:RTX-PRO-7000"] = 1.0
    config = config_of(workers=WorkersConfig(device="auto"))
    first = workers_device(config, tmp_path, Looks(RTX_PRO_7000=UNLISTED))
    first.keep(tmp_path)
    noisy = Looks(RTX_PRO_7000=SeenGpu(name=UNLISTED.name, tflops=180.0))
    assert workers_device(config, tmp_path, noisy) == first and noisy.asked == []
    del cluster["accelerator_type:RTX-PRO-7000"]
    cluster["accelerator_type:H100"] = 1.0
    assert workers_device(config, tmp_path, Looks(H100=H100)).name == H100.name
    (tmp_path / DEVICE).write_text('{"name": 3')
    assert WorkersDevice.kept(tmp_path) is None, "a damaged file"


@pytest.mark.parametrize("before", [WorkersDevice(name="cpu"), WorkersDevice(name="cuda")])
def test_what_was_a_cpu_or_nobody_knew_is_looked_at_again(
    cluster: dict[str, float], tmp_path: Path, before: WorkersDevice
) -> None:
    """The first GPU of an autoscaled cluster comes because it is looked for."""
    before.keep(tmp_path)
    looks = Looks()
    looks.gpus[""] = H100
    found = workers_device(config_of(workers=WorkersConfig(device="cuda")), tmp_path, looks)
    assert found.name == H100.name and looks.asked == [""]


def test_a_profile_of_an_a100_is_not_refused_for_the_two_names_that_ray_gives_it(cluster: dict[str, float]) -> None:
    cluster |= {"accelerator_type:A100": 1.0, "accelerator_type:A100-80G": 1.0}
    profile = profile_of(PlannerConfig(), MODEL, Geometry(), "NVIDIA A100-SXM4-80GB")
    profile.setting = replace(setting_of(MODEL, "x"), device="NVIDIA A100-SXM4-80GB")
    (kind,) = gpu_kinds()
    refuse_other(profile, setting_of(MODEL, kind), "p.json")


def test_an_unlisted_gpu_is_priced_by_what_was_measured(cluster: dict[str, float], tmp_path: Path) -> None:
    cluster["accelerator_type:RTX-PRO-7000"] = 1.0
    found = workers_device(config_of(workers=WorkersConfig(device="cuda")), tmp_path, Looks(RTX_PRO_7000=UNLISTED))
    assert found.measured == {UNLISTED.name: 250.0} and not found.assumed
    quick = WorkersDevice(name=UNLISTED.name, measured={UNLISTED.name: 500.0})
    assert 1.9 < seconds(found) / seconds(quick) < 2.1
    profile = profile_of(PlannerConfig(), MODEL, Geometry(), found.name, measured=found.measured)
    assert any("250 TFLOP/s" in note and "measured" in note for note in profile.notes)


def test_of_a_mixed_cluster_the_slowest_counts(cluster: dict[str, float], tmp_path: Path) -> None:
    a100 = SeenGpu(name="NVIDIA A100-SXM4-80GB")
    cluster |= {f"accelerator_type:{kind}": 1.0 for kind in ("A100", "A100-80G", "H100")}
    assert gpu_kinds() == ("A100", "H100"), "Ray names an A100 twice"
    looks = Looks(A100=a100, H100=SeenGpu(name="NVIDIA H100 80GB HBM3"))
    found = workers_device(config_of(workers=WorkersConfig(device="cuda")), tmp_path, looks)
    assert found.name == "NVIDIA A100-SXM4-80GB+NVIDIA H100 80GB HBM3" and not found.assumed
    assert seconds(found) == seconds(WorkersDevice(name=a100.name))
    slow = {UNLISTED.name: 30.0}
    assert seconds(WorkersDevice(name=f"H100+{UNLISTED.name}", measured=slow)) == seconds(
        WorkersDevice(name=UNLISTED.name, measured=slow)
    )


@pytest.mark.parametrize("kinds", [("RTX-6000",), ()])
def test_a_gpu_that_nobody_can_look_at_is_assumed_and_said_so(
    cluster: dict[str, float], tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    """Ray's word for an RTX 6000 Ada, an RTX 6000 Blackwell and a Quadro is the same."""
    cluster |= {f"accelerator_type:{kind}": 1.0 for kind in kinds}
    found = workers_device(config_of(workers=WorkersConfig(device="cuda")), tmp_path, Looks())
    assert found.name == ("RTX-6000" if kinds else "cuda") and found.assumed
    assert seconds(found) == seconds(WorkersDevice(name="H100")) < 1e-2 * seconds(WorkersDevice(name="cpu"))
    profile = profile_of(PlannerConfig(), MODEL, Geometry(), found.name, measured=found.measured)
    assert any("an H100's FLOPs are assumed" in note for note in profile.notes)


def test_where_no_gpu_has_come_yet_nobody_waits_for_one_to_be_looked_at(
    cluster: dict[str, float], tmp_path: Path
) -> None:
    del cluster["GPU"]
    looks = Looks()
    found = workers_device(config_of(workers=WorkersConfig(device="cuda")), tmp_path, looks)
    assert found == WorkersDevice(name="cuda") and found.assumed and looks.asked == []


def test_with_a_measured_profile_names_are_enough(cluster: dict[str, float], tmp_path: Path) -> None:
    cluster["accelerator_type:H100"], looks = 1.0, Looks(H100=H100)
    config = config_of(workers=WorkersConfig(device="cuda"), planner=PlannerConfig(profile="p.json"))
    assert workers_device(config, tmp_path, looks).name == "H100" and looks.asked == []
    assert workers_device(config_of(workers=WorkersConfig(device="cpu")), tmp_path, looks).name == "cpu"


def test_names_of_several_devices_are_looked_up_one_by_one() -> None:
    both = device_speed("A100+H100")
    assert both == device_speed("A100") and both == device_speed("H100 + A100-80G")
    assert device_speed("H100+Foo 1") is None
    assert device_speed("H100+Foo 1", {"Foo 1": 5.0}) == device_speed("Foo 1", {"Foo 1": 5.0})
    assert device_speed("RTX-6000") is None and device_speed("NVIDIA RTX 6000 Ada Generation") is not None


def test_gpus_are_unusable_when_all_that_were_looked_at_are(cluster: dict[str, float], tmp_path: Path) -> None:
    cluster["accelerator_type:H100"] = cluster["accelerator_type:A100"] = 1.0
    config = config_of(workers=WorkersConfig(device="cuda"))
    found = workers_device(config, tmp_path, Looks(H100=BROKEN, A100=BROKEN))
    assert (found.name, found.unusable) == ("cpu", "GPU 0 of h: no driver")
    some = workers_device(config, tmp_path, Looks(H100=BROKEN, A100=SeenGpu(name="NVIDIA A100-SXM4-80GB")))
    assert (some.name, some.unusable) == ("H100+NVIDIA A100-SXM4-80GB", "")
    found.keep(tmp_path)
    assert workers_device(config, tmp_path, Looks(H100=H100, A100=H100)).name == H100.name, "looked at again"


@pytest.mark.parametrize(
    ("looks", "found", "asked"),
    [
        ([[H100]], H100, [1]),
        ([[BROKEN], [BROKEN, H100, BROKEN]], H100, [1, 8]),  # one of many has failed
        ([[BROKEN], [BROKEN] * 8], BROKEN, [1, 8]),
        ([[BROKEN], []], BROKEN, [1, 8]),  # others have the rest
        ([[]], None, [1]),
    ],
)
def test_a_gpu_that_has_failed_does_not_speak_for_the_others(
    cluster: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    looks: list[list[SeenGpu]],
    found: SeenGpu | None,
    asked: list[int],
) -> None:
    counts: list[int] = []

    def looked(kind: str, count: int, patience_s: float, tell: object = None) -> Iterator[SeenGpu]:
        counts.append(count)
        return iter(looks[len(counts) - 1])

    monkeypatch.setattr(device_module, "_looks", looked)
    assert look_at("H100") == found and counts == asked


@pytest.mark.parametrize(("name", "tflops"), [("NVIDIA H100 PCIe", 0.0), ("NVIDIA Foo 1", 123.0)])
def test_only_a_gpu_that_no_table_lists_is_timed(monkeypatch: pytest.MonkeyPatch, name: str, tflops: float) -> None:
    monkeypatch.setattr("ops.gpu_check.why_unusable", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: name)
    monkeypatch.setattr("ops.matmul.matmul_tflops", lambda device, dtype, seconds: 123.0)
    assert device_module._seen() == SeenGpu(name=name, tflops=tflops)


@pytest.mark.cluster
@pytest.mark.long
def test_a_gpu_is_looked_at_by_an_actor_on_it(tmp_path: Path) -> None:
    """Ray has a GPU that torch does not see, then one that somebody else has, which leaves a name."""
    config = config_of(workers=WorkersConfig(device="auto"))
    with local_ray(num_cpus=1, num_gpus=1, resources={"accelerator_type:Foo-1": 1}, log_to_driver=False):
        seen = look_at("Foo-1")
        assert seen is not None and not seen.name and f"GPU 0 of {socket.gethostname()}: PyTorch" in seen.unusable
        found = workers_device(config, tmp_path)
        assert found == WorkersDevice(name="cpu", kinds=("Foo-1",), unusable=seen.unusable) and not found.assumed

        @ray.remote(num_cpus=0, num_gpus=1)
        class Taken:
            def here(self) -> bool:
                return True

        taken = Taken.remote()
        assert ray.get(taken.here.remote())
        assert look_at("Foo-1", patience_s=1.0) is None
        told: list[str] = []
        found = workers_device(config, tmp_path, lambda kind: look_at(kind, patience_s=1.0, tell=told.append))
        assert told == ["waiting for a GPU Foo-1 that is free, to see what it is; at most 0 s"]
        assert (found.name, found.unusable) == ("Foo-1", "") and found.assumed
        ray.kill(taken)


def seen_of_three() -> SeenGpu:
    """A GPU of a node whose first two of three have failed."""
    gpu = given_gpu()
    return SeenGpu(name="", unusable=f"GPU {gpu}") if gpu in "01" else SeenGpu(name="NVIDIA H100 PCIe")


@pytest.mark.cluster
@pytest.mark.long
def test_others_are_looked_at_where_the_first_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_seen", seen_of_three)
    with local_ray(num_cpus=1, num_gpus=3, log_to_driver=False):
        assert look_at("") == H100, "auto would train a whole cluster on CPUs for one GPU"
