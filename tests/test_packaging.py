"""What a stranger's machine sees: pins, make targets, container files that keep ports on loopback and the token on."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from setuptools import find_packages

ROOT = Path(__file__).parent.parent


def pinned() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pin = r"([A-Za-z0-9._-]+)==[^\s;]+(; .+)?"  # a version, where need be for some machines only
    found = [re.fullmatch(pin, line) for line in lines if line and not line.startswith("#")]
    assert all(found), "constraints.txt: every line pins one version"
    return {normal(match[1]) for match in found if match}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    wanted = {normal(Requirement(name).name) for name in names} - {project["name"]}
    assert wanted <= pinned(), wanted - pinned()


def test_triton_is_asked_for_only_where_it_has_wheels() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    (triton,) = (needed for needed in map(Requirement, names) if needed.name == "triton")
    assert triton.marker is not None
    assert triton.marker.evaluate({"platform_system": "Linux"})
    assert not triton.marker.evaluate({"platform_system": "Darwin"})


def test_every_folder_with_code_is_a_package_that_gets_installed() -> None:
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    present = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for layer in ("app", "actors", "data", "ops")
        for path in (ROOT / layer).rglob("*.py")
    }
    assert set(find_packages(ROOT, include=find["include"])) == present


def test_the_container_cluster_publishes_on_loopback_and_asks_for_the_token() -> None:
    compose = yaml.safe_load((ROOT / "docker" / "docker-compose.yaml").read_text())
    for name, service in compose["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert service["environment"]["RAY_AUTH_MODE"] == "token", name
        assert "ray_token" in service["secrets"], name


def test_the_kubernetes_job_scales_its_workers_and_asks_for_the_token() -> None:
    job = yaml.safe_load((ROOT / "docker" / "rayjob.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["authOptions"] == {"mode": "token"}
    assert job["spec"]["backoffLimit"] >= 100, "preemptions and faults of a month"
    group = cluster["workerGroupSpecs"][0]
    assert group["minReplicas"] <= group["replicas"] < group["maxReplicas"]
    ray_pin = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("ray=="))
    assert cluster["rayVersion"] == ray_pin.removeprefix("ray==")


def test_the_kubernetes_job_starts_a_shipped_config() -> None:
    entrypoint = yaml.safe_load((ROOT / "docker" / "rayjob.yaml").read_text())["spec"]["entrypoint"].split()
    config = Path(entrypoint[entrypoint.index("--config") + 1])
    assert (ROOT / config.relative_to("/heddle")).is_file()


def test_the_pods_of_the_kubernetes_job_are_whole_machines_and_its_pool_is_counted_in_their_gpus() -> None:
    job = yaml.safe_load((ROOT / "docker" / "rayjob.yaml").read_text())["spec"]
    (group,) = job["rayClusterSpec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    assert limits == requests, "a pod that may be given less of a machine is evicted first"
    gpus = int(limits["nvidia.com/gpu"])
    assert gpus == 8 and int(limits["cpu"]) >= 8 * gpus
    assert any(name.startswith("rdma/") for name in limits) and "IPC_LOCK" in str(container["securityContext"])
    assert pod["hostNetwork"] is True and pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    words = job["entrypoint"].split()
    settings = dict(setting.split("=") for setting in words if setting.startswith("workers."))
    assert settings == {
        "workers.min": str(group["minReplicas"] * gpus),
        "workers.max": str(group["maxReplicas"] * gpus),
    }


def test_the_shared_memory_of_a_pod_holds_its_object_store() -> None:
    """Ray takes 30 % of a pod's memory, and leaves a /dev/shm that is smaller."""
    cluster = yaml.safe_load((ROOT / "docker" / "rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        (shm,) = (volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm")
        assert shm["medium"] == "Memory" and {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        memory = int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
        assert 0.3 * memory <= int(shm["sizeLimit"].removesuffix("Gi")) < memory


def test_the_kubernetes_job_works_where_its_claim_holds_data_and_models() -> None:
    cluster = yaml.safe_load((ROOT / "docker" / "rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        claims = {volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume}
        for container in pod["containers"]:
            mounts = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in claims]
            assert mounts == [container["workingDir"]], container["name"]


def test_pods_of_the_kubernetes_job_may_use_what_they_are_given_and_write_the_same_files() -> None:
    """A capability that is added goes to processes of root alone; the image's own user has none of it."""
    (uid,) = re.findall(r"useradd .*--uid (\d+)", (ROOT / "docker" / "Dockerfile").read_text())
    cluster = yaml.safe_load((ROOT / "docker" / "rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    users = set()
    for pod in pods:
        assert pod["securityContext"]["fsGroup"] == int(uid), "a claim of root's is not written by the image's user"
        for container in pod["containers"]:
            own = pod["securityContext"] | container.get("securityContext", {})
            users.add(own.get("runAsUser", int(uid)))
            assert own.get("runAsUser") == 0 or not own.get("capabilities", {}).get("add"), container["name"]
    assert len(users) == 1, "head and workers write to the run's folder"


def stages() -> dict[str, str]:
    """Text of each stage of the Dockerfile, with that of the stage it starts from."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    found: dict[str, str] = {}
    for origin, name, body in re.findall(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL):
        found[name] = found.get(origin, "") + body
    return found


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_image_is_made_of_the_pinned_versions_and_all_that_is_shipped(target: str) -> None:
    stage = stages()[target]
    (install,) = re.findall(r"^RUN pip install (.*)$", stage, re.MULTILINE)
    assert "--constraint constraints.txt" in install and install.endswith("--editable .")
    copied = {name for line in re.findall(r"^COPY (.*)$", stage, re.MULTILINE) for name in line.split()[:-1]}
    assert {"pyproject.toml", "constraints.txt", "app", "actors", "data", "ops", "configs"} <= copied
    assert all((ROOT / name).exists() for name in copied)
    assert stage.rstrip().endswith("USER heddle")
    assert ("ARG PIP_EXTRA_INDEX_URL" in stage) is (target == "cpu")


def test_container_files_ask_for_an_image_that_the_dockerfile_makes() -> None:
    compose = yaml.safe_load((ROOT / "docker" / "docker-compose.yaml").read_text())
    for service in compose["services"].values():
        assert service["image"] == f"heddle:{service['build']['target']}" and service["build"]["target"] in stages()
        assert set(service["build"]["args"]) == {"PIP_EXTRA_INDEX_URL"}
    cluster = yaml.safe_load((ROOT / "docker" / "rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    images = {
        container["image"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
        for container in group["template"]["spec"]["containers"]
    }
    assert images == {"heddle:cuda"} and "cuda" in stages()


def test_the_image_has_what_the_probes_of_kuberay_call() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    installed = re.search(r"apt-get install -y --no-install-recommends ([^\\]+)", dockerfile)
    assert installed is not None and "wget" in installed[1].split()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["demo", "test", "faults", "long", "kernels", "lowest", "resolve", "lint", "bench"])
def test_make_targets_exist(target: str) -> None:
    result = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_an_environment_without_pip_is_made_again(tmp_path: Path) -> None:
    """Debian's venv leaves one without pip where python3-venv is not installed."""
    inside = script(tmp_path / "venv" / "bin" / "python", "exit 1")
    whole = script(tmp_path / "whole", "exit 0")
    outside = script(tmp_path / "python", f'case "$*" in "-m venv"*) cp {whole} {inside};; esac')
    result = subprocess.run(
        ["make", "install", f"PYTHON={outside}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "venv" / ".installed").is_file()


def test_no_file_names_a_machine() -> None:
    """Paths of the machine it was written on, in any text that is shipped."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    if listed.returncode:
        pytest.skip("not a git checkout")
    suspects = re.compile(r"/(work|root|opt)/[a-z]")
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".yaml", ".toml", ".txt", ""} and path.is_file() and path != Path(__file__):
            found = suspects.search(path.read_text(encoding="utf-8", errors="replace"))
            assert not found, f"{name}: {found[0] if found else ''}"


def test_files_that_the_readme_names_exist() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`((?:app|actors|data|ops|tests|configs|docker)/[A-Za-z0-9_./-]*)`", text))
    named |= set(re.findall(r"(?<![\w/.])(configs/runs/[\w.-]+\.yaml)", text))
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    "document",
    ["README.md", "docs/settings.md", "docs/first-lora.md", "docs/models.md", "docs/clusters.md", "docs/records.md"],
)
def test_commands_that_a_document_names_exist(document: str) -> None:
    from typer.main import get_command

    from app.cli import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    text = (ROOT / document).read_text()
    for name in set(re.findall(r"heddle ([a-z]+)", text)):
        assert name in commands, f"heddle {name}"
    for group, names in re.findall(r"`heddle (data|workers) ([a-z]+(?: / [a-z]+)+)`", text):
        for name in names.split(" / "):
            assert name in commands[group].commands, f"heddle {group} {name}"


def test_a_submitted_job_carries_all_that_the_program_is_made_of_and_no_more(tmp_path: Path) -> None:
    from ray._private.runtime_env.packaging import create_package  # what `ray job submit --working-dir .` calls

    create_package(str(ROOT), tmp_path / "upload.zip", include_gitignore=True)
    with zipfile.ZipFile(tmp_path / "upload.zip") as upload:
        names = set(upload.namelist())
    wanted = {
        str(path.relative_to(ROOT))
        for part in ("app", "actors", "data", "ops", "configs")
        for path in (ROOT / part).rglob("*")
        if path.suffix in (".py", ".c", ".yaml", ".json")
    }
    assert wanted <= names
    assert not {name for name in names if name.startswith((".venv/", "tests/", "runs/", "datasets/", ".git/"))}
