"""What `make install` will do where there is nothing but the public package index: it resolves, to what is pinned.

The default run asks uv, which reads no more than metadata, for every Python; `make resolve` asks pip, for its own.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from app.bench.gpu.__main__ import LEAST_TORCH, LEAST_TRITON
from tests.long import in_default_run

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("xgboost", "wandb", "mlflow")
SOURCE_ONLY = {"deepspeed"}  # published without wheels
RESOLVE_SECONDS = 900
UNANSWERED = (  # what uv says of a network; what it says of versions has none of these
    r"failed to fetch|error sending request|connection|timed? ?out|dns error|HTTP status (server error|client error "
    r"\(429)|failed to download|end of file"
)
_lost: list[str] = []  # what it said when it stopped answering

pytestmark = pytest.mark.timeout(RESOLVE_SECONDS + 100)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """Name and version of every line of constraints.txt that holds for this machine."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    found = [pin for pin in map(Requirement, lines) if pin.marker is None or pin.marker.evaluate()]
    return {normal(pin.name): str(pin.specifier).removeprefix("==") for pin in found}


def declared(*extras: str) -> list[str]:
    """The requirements of the project with the extras, an extra of its own that one of them names included."""
    wanted = list(PROJECT["dependencies"])
    for extra in extras:
        for line in PROJECT["optional-dependencies"][extra]:
            needed = Requirement(line)
            wanted += declared(*needed.extras)[len(PROJECT["dependencies"]) :] if needed.name == "heddle" else [line]
    return wanted


def nccls(names: Iterable[str]) -> list[str]:
    """The packages that bring an NCCL. All of them write nvidia/nccl/lib/libnccl.so.2, so there may be one."""
    return sorted(name for name in names if re.fullmatch(r"nvidia-nccl-cu\d+", name))


def alone() -> dict[str, str]:
    """An environment in which an installer asks the package index and nothing that only this machine has."""
    mine = re.compile(r"(PIP|UV)_.*(FIND_LINKS|INDEX|CONSTRAINT|REQUIREMENT|CONFIG)")
    return {name: value for name, value in os.environ.items() if not mine.fullmatch(name)} | {
        "PIP_CONFIG_FILE": os.devnull,
        "UV_NO_CONFIG": "1",
    }


def resolved(*requirements: str) -> list[str]:
    """What `uv` prints. Skips the test, and all that come after it, where the index stops answering meanwhile."""
    run = uv(*requirements)
    if run.returncode and re.search(UNANSWERED, run.stderr, re.IGNORECASE):
        _lost.append(run.stderr.strip()[-300:])
        pytest.skip(f"the package index has stopped answering: {_lost[0]}")
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def uv(*requirements: str, extra: Mapping[str, str] = MappingProxyType({})) -> subprocess.CompletedProcess[str]:
    """What uv would install on Linux, one `name==version` a line; only what has no wheels is built."""
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--python",
        sys.executable,
        "--only-binary",
        ":all:",
        *[part for name in SOURCE_ONLY for part in ("--no-binary", name)],
        *requirements,
    ]
    return subprocess.run(
        command, cwd=ROOT, env=alone() | dict(extra), capture_output=True, text=True, timeout=RESOLVE_SECONDS
    )


@functools.cache
def index() -> str | None:
    """Why the package index cannot be asked here, or None. Asks once and briefly."""
    if importlib.util.find_spec("uv") is None:
        return "uv is not installed: make install"
    with tempfile.NamedTemporaryFile("w", suffix=".in") as wanted:
        wanted.write(f"iniconfig=={pins()['iniconfig']}")
        wanted.flush()
        probe = uv("--no-cache", wanted.name, extra={"UV_HTTP_TIMEOUT": "10", "UV_HTTP_RETRIES": "0"})
    return f"no package index is reached: {probe.stderr.strip()[-300:]}" if probe.returncode else None


@pytest.fixture
def package_index() -> None:
    if reason := index() or next(iter(_lost), None):
        pytest.skip(reason)


@pytest.mark.usefixtures("package_index")
@pytest.mark.parametrize(
    ("python", "extra"),
    [
        ("3.11", "dev"),
        ("3.13", ""),
        *(
            pytest.param(f"3.{n}", extra, marks=pytest.mark.long)
            for n, extra in ((11, ""), (12, "dev"), (12, ""), (13, "dev"))
        ),
    ],
)
def test_the_public_index_alone_resolves_to_what_is_pinned_with_one_nccl(python: str, extra: str) -> None:
    wanted = ["--extra", extra] if extra else []
    lines = resolved("--python-version", python, "--constraint", "constraints.txt", *wanted, "pyproject.toml")
    found = {normal(name): version for name, version in (line.split("==") for line in lines)}
    assert found.items() <= pins().items(), sorted(found.items() - pins().items())
    assert len(nccls(found)) <= 1, nccls(found)
    assert ("xgboost-cpu" in found) is (extra == "dev")


@pytest.mark.usefixtures("package_index")
@pytest.mark.parametrize("python", in_default_run(["3.11"], of=["3.11", "3.12", "3.13"]))
def test_every_lower_bound_can_be_installed_beside_the_others(python: str) -> None:
    """`make lowest` runs tests with them."""
    extras = [part for name in EXTRAS for part in ("--extra", name)]
    lines = resolved("--python-version", python, "--resolution", "lowest-direct", *extras, "pyproject.toml")
    found = {normal(name): version for name, version in (line.split("==") for line in lines)}
    for needed in map(Requirement, declared(*EXTRAS)):
        if needed.marker is None or needed.marker.evaluate():
            [least] = [one.version for one in needed.specifier if one.operator == ">="]
            assert f"{found[normal(needed.name)]}.".startswith(f"{least}."), needed
    for name, least_for_benches in (("torch", LEAST_TORCH), ("triton", LEAST_TRITON)):
        assert Version(found[name]).release[:2] == least_for_benches


@pytest.mark.usefixtures("package_index")
def test_the_second_nccl_of_a_gpu_build_of_xgboost_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "wanted.in").write_text(f"torch=={pins()['torch']}\nxgboost=={pins()['xgboost-cpu']}\n")
    lines = resolved(
        "--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28", str(tmp_path / "wanted.in")
    )
    assert nccls(line.partition("==")[0] for line in lines) == ["nvidia-nccl-cu12", "nvidia-nccl-cu13"]


@pytest.mark.install
@pytest.mark.usefixtures("package_index")
def test_pip_finds_the_same(tmp_path: Path) -> None:
    """With the pip of this environment, which fetches every package to read what it asks for: gigabytes."""
    report = tmp_path / "report.json"
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--ignore-installed",
            "--quiet",
            "--no-cache-dir",
            "--report",
            str(report),
            "--constraint",
            str(ROOT / "constraints.txt"),
            *declared("dev"),
        ],
        env=alone(),
        capture_output=True,
        text=True,
        timeout=RESOLVE_SECONDS,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    packages = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    found = {normal(package["name"]): package["version"] for package in packages}
    assert found.items() <= pins().items(), sorted(found.items() - pins().items())
    assert len(nccls(found)) <= 1, nccls(found)


def test_two_nccls_are_noticed() -> None:
    assert nccls(["torch", "nvidia-nccl-cu13", "nvidia-nvshmem-cu13"]) == ["nvidia-nccl-cu13"]
    assert nccls(["nvidia-nccl-cu13", "xgboost", "nvidia-nccl-cu12"]) == ["nvidia-nccl-cu12", "nvidia-nccl-cu13"]


def test_one_nccl_is_pinned() -> None:
    assert len(nccls(pins())) == 1


def test_no_two_installed_packages_write_the_same_library() -> None:
    """Whichever was unpacked last would be the one that all of them load."""
    owners = defaultdict(set)
    installed = [folder for folder in sys.path if folder.endswith("site-packages")]  # not those that a package vendors
    for package in importlib.metadata.distributions(path=installed):
        for file in package.files or ():
            if ".so" in file.suffixes:
                owners[file.locate().resolve()].add(normal(package.metadata["Name"]))
    assert owners
    assert {file: names for file, names in owners.items() if len(names) > 1} == {}


def test_the_extra_of_a_profile_is_part_of_what_the_tests_are_run_with() -> None:
    assert any("xgboost" in line for line in declared("dev"))
    assert not any("xgboost" in line for line in declared())


@pytest.mark.parametrize(
    "python, supported", [("3.10.9", False), ("3.11.0", True), ("3.13.5", True), ("3.14.0", False)]
)
def test_the_pythons_it_is_tested_with_are_the_ones_it_asks_for(python: str, supported: bool) -> None:
    assert SpecifierSet(PROJECT["requires-python"]).contains(python) is supported
    named = f"Programming Language :: Python :: {python.rpartition('.')[0]}" in PROJECT["classifiers"]
    assert named is supported
