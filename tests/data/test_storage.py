"""Names of files: as a listing gives them, and the same wherever a command is started."""

from __future__ import annotations

import csv
import errno
import os
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow.fs import FileInfo, FileType

from data import storage
from data.config import LimitsConfig, SourceConfig
from data.dataset.index_build import build_index
from data.errors import DataError, DataIOError
from data.ledger import Ledger
from data.readers.registry import reader_of
from data.storage import absolute, check_there, expand, list_files, read_range, resolve, stat
from ops.listing import names_in, paths_below
from tests.data.making import clip, good, index_of, shard

ODD_NAMES = ("my clip.mp4", "a#1.mp4", "what?.mp4", "100%.mp4", "50%20.mp4", "caf\u00e9 \U0001f600.mp4", "a+b&c=d.mp4")


@pytest.fixture
def through_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """file:// goes through PyArrow as s3:// does, not through `os`."""
    monkeypatch.setattr(storage, "is_local", lambda uri: "://" not in uri)


@pytest.mark.parametrize(
    ("pattern", "questions"), [("", 1), ("/*.tar", 0), ("/{0..2}.tar", 3)], ids=["folder", "glob", "range"]
)
def test_a_remote_shard_is_asked_for_once_and_not_at_all_where_it_was_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through_pyarrow: None, pattern: str, questions: int
) -> None:
    for number in range(3):
        (tmp_path / f"{number}.tar").write_bytes(shard(good(1)))
    asked, plain = [], storage._about
    monkeypatch.setattr(storage, "_about", lambda uri, retries=4: (asked.append(uri), plain(uri, retries))[1])
    source = SourceConfig(path=f"file://{tmp_path}{pattern}", kind="webdataset")
    parts = reader_of(source, LimitsConfig()).parts()
    assert [(part.uri, part.size) for part in parts] == [
        (f"file://{tmp_path}/{number}.tar", (tmp_path / f"{number}.tar").stat().st_size) for number in range(3)
    ]
    assert len(asked) == questions


@pytest.mark.parametrize("size", [-1, 90])
def test_a_read_goes_on_where_one_call_gives_less_than_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Linux gives 2 GiB at most."""
    data, whole = bytes(range(100)), os.pread
    (tmp_path / "a").write_bytes(data)
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: whole(fd, min(count, 7), offset))
    assert read_range(str(tmp_path / "a"), 3, size, retries=0) == (data[3:] if size < 0 else data[3:93])


def test_files_of_any_name_are_listed_and_read_through_pyarrow(tmp_path: Path, through_pyarrow: None) -> None:
    folder = tmp_path / "my videos #1"
    folder.mkdir()
    for name in ODD_NAMES:
        (folder / name).write_bytes(name.encode())
    listed = list_files(f"file://{folder}")
    assert [file.uri for file in listed] == sorted(f"file://{folder}/{name}" for name in ODD_NAMES)
    for file in listed:
        assert read_range(file.uri, 0, -1) == storage.name_of(file.uri).encode()
        assert stat(file.uri) == file
    assert expand(f"file://{folder}/100%*", (".mp4",)) == [f"file://{folder}/100%.mp4"]


OLD_ONES = ["old/.snapshot/old/01.tar", "old/.snapshot/old/older/02.tar"]


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("*.tar", ["00.tar", "b.tar"]),
        ("?.tar", ["b.tar"]),
        ("[0-9]*.tar", ["00.tar"]),
        ("*/*.tar", ["old/01.tar"]),
        ("old/*/*.tar", ["old/older/02.tar"]),
        ("**/*.tar", ["00.tar", "b.tar", "old/01.tar", "old/older/02.tar"]),
        ("o**/**/0*.tar", ["old/01.tar", "old/older/02.tar"]),
        ("old/**", ["old/01.tar", "old/older/02.tar"]),
        ("*/.snapshot/**/*.tar", ["old/.snapshot/00.tar", "old/.snapshot/b.tar", *OLD_ONES]),
        ("**/.snap*/*.tar", [".snapshot/00.tar", ".snapshot/b.tar", "old/.snapshot/00.tar", "old/.snapshot/b.tar"]),
        ("*/._01.tar", ["old/._01.tar"]),
        ("[.]*/*.tar", []),
    ],
)
def test_a_glob_means_the_same_files_by_a_path_and_by_a_uri(tmp_path: Path, pattern: str, meant: list[str]) -> None:
    tree = tmp_path / ".set"  # hidden itself, which its user has said
    for name in ("00.tar", "b.tar", "old/01.tar", "old/older/02.tar"):
        hidden = str(Path(name).with_name(f"._{Path(name).name}"))  # as macOS leaves them
        for each in (name, hidden, f".snapshot/{name}", f"old/.snapshot/{name}"):
            (tree / each).parent.mkdir(parents=True, exist_ok=True)
            (tree / each).touch()
    for root in (str(tree), f"fsspec+file://{tree}"):
        if meant:
            assert expand(f"{root}/{pattern}", (".tar",)) == [f"{root}/{name}" for name in meant]
        else:
            with pytest.raises(DataError, match="no files"):
                expand(f"{root}/{pattern}", (".tar",))


@pytest.mark.parametrize("pattern", ["*/s.tar", "**/s.tar", "*/*.tar"])
def test_a_glob_passes_over_a_folder_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    """Which is listed as one above it is, and lets nobody else ask for what is in it."""
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "s.tar").touch()
    theirs, stat_of, listed = tmp_path / "theirs", Path.stat, os.scandir

    def asked(path: Path, **how: bool) -> os.stat_result:
        if path.parent == theirs:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat_of(path, **how)

    def given(path: Path) -> Any:
        if path == theirs:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "stat", asked)
    monkeypatch.setattr(os, "scandir", given)
    assert expand(f"{tmp_path}/{pattern}", (".tar",)) == [f"{tmp_path}/ours/s.tar"]


@pytest.mark.parametrize("pattern", ["", "/*/*.tar", "/**/*.tar", "/*/0.tar"])
def test_links_that_lead_to_each_other_are_nothing(tmp_path: Path, pattern: str) -> None:
    """They refused the whole data set, as storage that fails."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.tar").touch()
    for name, to in (("loop", "loop"), ("one", "other"), ("other", "one"), ("a/1.tar", "1.tar")):
        (tmp_path / name).symlink_to(to)
    assert expand(f"{tmp_path}{pattern}", (".tar",)) == [f"{tmp_path}/a/0.tar"]
    assert stat(f"{tmp_path}/a/1.tar") is None and names_in(tmp_path / "loop") == paths_below(tmp_path / "loop") == []


@pytest.mark.parametrize("pattern", ["*/*.tar", "**/*.tar", "*/0.tar"])
def test_a_glob_does_not_ask_for_a_hidden_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    """Nothing in it is meant: the snapshots of a file server, which may not answer."""
    for name in ("ours", ".snapshot"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.tar").touch()
    hidden, stat_of, listed = tmp_path / ".snapshot", Path.stat, os.scandir

    def refuse(path: Path) -> None:
        if hidden in (path, *path.parents):
            raise OSError(errno.EIO, "Input/output error", str(path))

    def asked(path: Path, **how: bool) -> os.stat_result:
        refuse(path)
        return stat_of(path, **how)

    def given(path: Path) -> Any:
        refuse(path)
        return listed(path)

    monkeypatch.setattr(Path, "stat", asked)
    monkeypatch.setattr(os, "scandir", given)
    monkeypatch.setattr(storage, "time", SimpleNamespace(sleep=lambda seconds: None))
    assert expand(f"{tmp_path}/{pattern}", (".tar",)) == [f"{tmp_path}/ours/0.tar"]
    with pytest.raises(DataIOError, match="Input/output error"):
        expand(f"{tmp_path}/.*/*.tar", (".tar",))


def test_a_glob_of_a_path_may_go_up_again(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "0.tar").touch()
    assert expand(f"{tmp_path}/*/.././*.tar", (".tar",)) == [f"{tmp_path}/a/../0.tar"]


def test_a_path_that_is_there_as_it_is_written_is_no_glob(tmp_path: Path) -> None:
    (tmp_path / "pairs [v2]").mkdir()
    (tmp_path / "pairs [v2]" / "0.tar").touch()
    for name in ("", "/0.tar", "/*.tar", "/[0-9].tar", "/{0..0}.tar"):
        check_there(f"{tmp_path}/pairs [v2]{name}")
        assert expand(f"{tmp_path}/pairs [v2]{name}", (".tar",)) == [f"{tmp_path}/pairs [v2]/0.tar"]
    with pytest.raises(DataError, match=r"there is no .*/pairs \[v2\]/1.tar on"):
        check_there(f"{tmp_path}/pairs [v2]/1.tar")
    with pytest.raises(DataError, match=r"there is no .*/pairs \[v2\]/a on"):
        check_there(f"{tmp_path}/pairs [v2]/a/*.tar")


@pytest.mark.parametrize(
    ("path", "lacks"),
    [
        ("a/0.tar", ""),
        ("a", ""),
        ("a/*.tar", ""),
        ("a/{0,1}.tar", "a/1.tar"),
        ("a/0.tar::b", "b"),
        ("c/d*/*.tar", "c"),
        ("s3://x/y", ""),
    ],
)
def test_a_path_with_nothing_there_is_found_without_a_look_into_folders(tmp_path: Path, path: str, lacks: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.tar").touch()
    given = "::".join(part if "://" in part else f"{tmp_path}/{part}" for part in path.split("::"))
    with pytest.raises(DataError, match=f"there is no {tmp_path}/{lacks} on") if lacks else nullcontext():
        check_there(given)


def test_a_folder_of_odd_names_is_indexed_through_pyarrow(tmp_path: Path, through_pyarrow: None) -> None:
    folder = tmp_path / "my set"
    folder.mkdir()
    for name in ODD_NAMES:
        (folder / name).write_bytes(clip())
        (folder / name.replace(".mp4", ".txt")).write_text(name)
    index, _ = index_of(f"file://{folder}", tmp_path / "cache", kind="pairs")
    assert index.num_ok == len(ODD_NAMES)
    for number in range(len(index)):
        row = index.row(number)
        assert index.caption(number) == storage.name_of(row.path)
        assert read_range(row.path, row.offset, row.size) == clip()


@pytest.mark.parametrize(
    "uri, path",
    [
        ("gs://anonymous@bucket/videos/my clip #1?.mp4", "bucket/videos/my clip #1?.mp4"),
        ("gs://anonymous@bucket/50%20/\u00e9.mp4", "bucket/50%20/\u00e9.mp4"),
        ("gs://anonymous@bucket", "bucket"),
        ("fsspec+memory://videos/my clip%20.mp4", "/videos/my clip%20.mp4"),
    ],
)
def test_what_follows_the_bucket_is_the_name(uri: str, path: str) -> None:
    assert resolve(uri)[1] == path


def test_a_query_of_fsspec_stays_where_it_is_and_is_no_glob(monkeypatch: pytest.MonkeyPatch) -> None:
    given = "fsspec+https://huggingface.co/datasets/a/b/resolve/main/a.tar?download=true"
    monkeypatch.setattr(storage, "_about", lambda uri: FileInfo("a.tar", type=FileType.File))  # nobody is asked
    assert absolute(given) == given and expand(given, (".tar",)) == [given]


def test_options_of_pyarrow_stand_behind_the_name() -> None:
    given = absolute("s3://bucket/my clips/a?.tar?region=eu-west-3&endpoint_override=localhost:9000")
    assert storage.name_of(given) == "a?.tar"
    for uri, inside in ((given, "my clips/a?.tar"), (storage.join(storage.parent(given), "b#.mp4"), "my clips/b#.mp4")):
        system, path = resolve(uri)
        assert (path, system.region) == (f"bucket/{inside}", "eu-west-3")


@pytest.mark.parametrize(
    "uri, root",
    [
        ("gs://anonymous@set/a", "gs://anonymous@set/?retry_limit_seconds=10"),
        ("gs://set/a?retry_limit_seconds=60", "gs://set/?retry_limit_seconds=60"),
        (
            "gs://anonymous@set/a?endpoint_override=localhost:1&scheme=http",
            "gs://anonymous@set/?endpoint_override=localhost:1&scheme=http&retry_limit_seconds=10",
        ),
        ("s3://set/a", "s3://set/"),
    ],
)
def test_a_bucket_of_google_is_asked_for_seconds(monkeypatch: pytest.MonkeyPatch, uri: str, root: str) -> None:
    """Its client alone goes on for 15 minutes without a word, and so long again at each of our attempts."""
    made: list[str] = []

    def from_uri(asked: str) -> tuple[object, str]:
        made.append(asked)
        return object(), "set"

    monkeypatch.setattr(storage, "_file_systems", {})
    monkeypatch.setattr(storage.pafs, "FileSystem", SimpleNamespace(from_uri=from_uri))
    assert resolve(absolute(uri))[1] == "set/a" and made == [root]


def test_a_service_of_google_that_does_not_answer_is_storage_that_failed() -> None:
    uri = absolute("gs://anonymous@set/a?endpoint_override=127.0.0.1:1&scheme=http&retry_limit_seconds=1")
    with pytest.raises(DataIOError, match=r"Could not connect to server \(1 attempts\)\. The storage failed"):
        stat(uri, retries=0)


@pytest.mark.parametrize(
    "said, shown",
    [
        ("UNAVAILABLE: Could not create a OAuth2 access token. error_info={reason=, domain=}", "access token."),
        ("Client error '403 Forbidden' for url 'https://host/a'", "'https://host/a'"),
    ],
)
def test_credentials_are_named_as_the_cause_where_they_are(said: str, shown: str) -> None:
    def unsigned() -> None:
        raise OSError(said)

    cause = re.escape(f"{shown} (1 attempts). Credentials of this process are missing")
    with pytest.raises(DataIOError, match=cause):
        storage.retried("stat gs://set/a", unsigned, retries=0)


def test_local_paths_are_made_absolute_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert absolute("a/{0..3}.tar::../b/::s3://c/d") == f"{tmp_path}/a/{{0..3}}.tar::{tmp_path.parent}/b::s3://c/d"
    assert absolute("~/a/*.tar") == "/home/me/a/*.tar" and absolute("{a,b}.tar") == f"{tmp_path}/{{a,b}}.tar"
    for kept in ("", "/a/b.tar", "{/a,~/b}/c.tar", "gs://a/../b", "pipe:cat a"):
        assert absolute(kept) == kept
    assert absolute("file:///a/../b") == "/b"


def test_a_folder_given_as_a_file_uri_is_that_folder(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.mp4").write_bytes(clip())
    (folder / "a.txt").write_text("a clip")
    index, _ = index_of(f"file://{folder}", tmp_path / "cache", kind="pairs")
    assert index.num_ok == 1 and index.row(0).path == f"{folder}/a.mp4"


def test_a_pipe_behind_a_path_is_still_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(shard(good(1)))
    with pytest.raises(DataError, match="pipe: runs a shell command"):
        index_of(f"{tmp_path}/a.tar::pipe:cat {tmp_path}/a.tar", tmp_path / "cache")


def make_source(kind: str, folder: Path) -> str:
    """A source of two clips; its path below `folder`."""
    if kind == "webdataset":
        (folder / "a.tar").write_bytes(shard(good(2)))
        return "{a,a}.tar"
    (folder / "videos").mkdir()
    for name in ("a", "b"):
        (folder / "videos" / f"{name}.mp4").write_bytes(clip())
        (folder / "videos" / f"{name}.txt").write_text(name)
    if kind == "pairs":
        return "videos"
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("videoID", "timestamp", "caption"), *((name, "", name) for name in "ab")]
            if kind == "koala"
            else [("video", "caption"), ("a.mp4", "a"), ("b.mp4", "b")]
        )
    return "table.csv"


@pytest.mark.parametrize("kind", ["webdataset", "pairs", "koala", "manifest"])
def test_an_index_made_by_a_relative_path_is_that_of_the_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = make_source(kind, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    media = "videos" if kind in ("koala", "manifest") else ""
    monkeypatch.chdir(elsewhere)
    made, _ = index_of(f"../{path}", tmp_path / "cache", kind=kind, media=media and f"../{media}")
    assert made.num_ok == 2
    monkeypatch.chdir("/")
    read: list[int] = []
    source = SourceConfig(path=f"{tmp_path}/{path}", kind=kind, media=media and f"{tmp_path}/{media}")  # type: ignore[arg-type]
    found = build_index(source, tmp_path / "cache", Ledger(), progress=lambda done, _: read.append(done))
    assert not read and found.hash == made.hash
    for number in range(2):
        row = made.row(number)
        assert row == found.row(number)
        assert len(read_range(row.path, row.offset, row.size)) == row.size > 0
        assert found.caption(number) == made.caption(number) != ""
    made.verify()


@pytest.mark.parametrize(
    "uri, root, told",
    [
        ("a.mp4", "s3://b/set", False),
        ("file:///a#?/b.mp4", "/set", False),
        ("s3://b/x?a=b.mp4", "/set", False),
        ("s3://key@b/x.mp4", "/set", False),
        ("hf://datasets/a/b@main/x.mp4", "/set", False),
        ("abfs://b@account.dfs.core.windows.net/x.mp4", "/set", False),
        ("abfs://b/x.mp4", "/set", False),
        ("abfs://b@evil.example%2f.blob.core.windows.net/x.mp4", "/set", True),
        ("s3://endpoint_override=h:9000@b/videos/x.mp4", "s3://endpoint_override=h:9000@b/set", False),
        ("s3://endpoint_override=h:9000@b/videos/x.mp4", "s3://b/set", True),
        ("S3://endpoint_override=h:9000@b/videos/x.mp4", "s3://endpoint_override=h@b/set", True),
        ("fsspec+https://h/videos/x.mp4", "fsspec+https://h/set", False),
        ("fsspec+https://h/videos/x.mp4::http://evil", "fsspec+https://h/set", True),
        ("fsspec+https://h.evil/x.mp4", "fsspec+https://h/set", True),
    ],
)
def test_a_service_is_that_of_the_source(uri: str, root: str, told: bool) -> None:
    assert storage.tells_service(uri, root) is told
