"""The documents name files, functions and classes that exist, and words that the code uses."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

from app.settings.config import RunConfig

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    "docs/map.md",
    "docs/settings.md",
    "docs/first-lora.md",
    "docs/models.md",
    "docs/clusters.md",
    "docs/records.md",
    "docs/libraries.md",
    "docs/words.md",
    "CONTRIBUTING.md",
)
MOST_STATIONS = 10
MOST_WORDS = 48


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_folders_that_a_document_names_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = re.findall(r"`((?:app|actors|data|ops|tests|configs|docs)/[\w./-]*)`", text)
    missing = [name for name in named if not (ROOT / name).exists() and "NAME" not in name]
    assert not missing, f"{document} names {missing}"


def test_links_between_documents_lead_somewhere() -> None:
    for document in ("README.md", "docs/results.md", *DOCUMENTS):
        path = ROOT / document
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            file, _, heading = target.partition("#")
            other = (path.parent / file).resolve() if file else path
            assert target.startswith("http") or other.exists(), f"{document} leads to {target}"
            if heading:
                titles = re.findall(r"^#+ (.+)$", other.read_text(encoding="utf-8"), re.MULTILINE)
                anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
                assert heading in anchors, f"{document} leads to {target}"


@pytest.mark.parametrize("document", ["README.md", "docs/clusters.md"])
def test_a_head_that_asks_for_a_token_is_started_where_there_is_one(document: str) -> None:
    """`ray start` ends with a traceback where RAY_AUTH_MODE is token and the machine has none yet."""
    blocks = (ROOT / document).read_text().split("```")[1::2]
    (start,) = (block for block in blocks if "ray start --head" in block)
    assert start.index("RAY_AUTH_MODE=token") < start.index("get-auth-token --generate") < start.index("ray start")


@pytest.mark.parametrize(("document", "name"), [("README.md", "my-run"), ("docs/first-lora.md", "my-lora")])
def test_the_run_file_of_a_document_is_one(document: str, name: str, tmp_path: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    (written,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    file = tmp_path / "my.yaml"
    file.write_text(written, encoding="utf-8")
    assert RunConfig.load(file, []).run.name == name


def test_every_preset_and_every_run_stands_in_models() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    named = set(re.findall(r"`([\w.-]+)`", table))
    small = {"tiny", "latte-tiny", "stdit-tiny"}  # presets of the runs on a CPU
    presets = {path.stem for path in (ROOT / "configs" / "models").glob("*.yaml")} - small
    runs = {path.stem for path in (ROOT / "configs" / "runs").glob("*.yaml")} - {"demo", "demo-curriculum", "learn"}
    assert presets | runs <= named, f"docs/models.md lacks {sorted((presets | runs) - named)}"
    assert named <= presets | runs, f"docs/models.md names {sorted(named - presets - runs)}"


def test_every_station_of_a_walk_is_in_its_file() -> None:
    for file, told in stations():
        defined = definitions(ROOT / file)
        named = re.findall(r"`(\w+)`", told)
        assert not (unknown := [word for word in named if word not in defined]), f"{file} has no {unknown}"


def test_a_walk_is_short() -> None:
    walks = (ROOT / "docs" / "map.md").read_text(encoding="utf-8").split("## Four walks")[1].split("\n## ")[0]
    lengths = [len(re.findall(r"^\d+\. ", walk, re.MULTILINE)) for walk in walks.split("\n### ")[1:]]
    assert len(lengths) == 4 and max(lengths) <= MOST_STATIONS


def test_the_words_are_few_and_stand_in_code() -> None:
    rows = re.findall(r"^\| \*\*(.+?)\*\*", (ROOT / "docs" / "words.md").read_text(encoding="utf-8"), re.MULTILINE)
    code = " ".join(path.read_text(encoding="utf-8").lower() for path in sources()).replace("_", " ")
    unknown = [word for row in rows for word in words_of(row) if not re.search(rf"\b{word}", code)]
    assert not unknown, f"docs/words.md explains {unknown}, which no file says"
    assert 30 < len(rows) <= MOST_WORDS


def words_of(row: str) -> list[str]:
    """The words of a row: `leave / drain` are two, and what stands in brackets says only where a word belongs."""
    return [word.strip().lower() for word in re.sub(r"\(.*?\)", "", row).split("/")]


def sources() -> list[Path]:
    """All Python files of the program."""
    return [path for room in ("app", "actors", "data", "ops") for path in sorted((ROOT / room).rglob("*.py"))]


def stations() -> list[tuple[str, str]]:
    """(file, what the map says of it)."""
    found = re.findall(r"^\d+\. `([\w/]+\.py)`: (.*)$", (ROOT / "docs" / "map.md").read_text(), re.MULTILINE)
    assert len(found) > 20
    return found


def definitions(path: Path) -> set[str]:
    """Names of all functions and classes of a file, methods included, and names that it imports."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    defined = {n.name for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}
    return defined | {alias.name for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}
