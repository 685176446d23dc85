"""Data in a bucket: PyArrow's S3 client against a service of this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from data import storage
from data.config import LimitsConfig, SourceConfig
from data.decode import decode_job
from data.errors import DataIOError
from data.ledger import Reason
from data.readers.ahead import AT_ONCE
from data.readers.registry import guess_kind
from data.storage import ByteRange, ReadFile, list_files, read_range, stat
from data.types import Bucket, DecodeJob
from tests.data.making import clip, good, index_of, shard
from tests.data.object_store import ObjectStore, object_store

AWS = {
    "AWS_ACCESS_KEY_ID": "the-first-key",
    "AWS_SECRET_ACCESS_KEY": "a secret that nobody prints",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    with object_store() as service:
        for name, value in (AWS | {"AWS_ENDPOINT_URL": service.endpoint}).items():
            monkeypatch.setenv(name, value)
        storage._file_systems.clear()
        yield service
        storage._file_systems.clear()


def pairs(store: ObjectStore, *names: str) -> None:
    for name in names:
        store.objects[f"set/clips/{name}.mp4"] = clip()
        store.objects[f"set/clips/{name}.txt"] = name.encode()


def test_clips_of_a_bucket_share_connections_and_the_credentials_of_a_role(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{store.endpoint}/role")
    store.objects["role"] = (
        b'{"AccessKeyId": "a", "SecretAccessKey": "b", "Token": "c", "Expiration": "2099-01-01T00:00:00Z"}'
    )
    pairs(store, *(f"{number:02d}" for number in range(40)))
    index, _ = index_of("s3://set/clips", tmp_path, kind="pairs")
    assert index.num_ok == 40
    assert len(store.of("GET")) >= 80 and len({asked.connection for asked in store.asked}) <= AT_ONCE + 3
    assert sum(asked.path == "role" for asked in store.asked) <= 2


def test_an_attempt_after_a_failure_has_the_credentials_of_then(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of credentials is renewed in a long run; the client alone reads it again after minutes."""
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = the-first-key\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    store.objects["set/a"] = b"abc"
    assert read_range("s3://set/a", 0, -1) == b"abc"
    store.fault = lambda asked: (403, "AccessDenied") if asked.signed_by == "the-first-key" else None
    with pytest.raises(DataIOError):
        stat("s3://set/a", retries=0)
    file.write_text(file.read_text().replace("first", "second"))
    assert read_range("s3://set/a", 0, -1, retries=0) == b"abc"


def test_a_key_with_an_empty_part_is_refused_and_the_others_are_read(store: ObjectStore, tmp_path: Path) -> None:
    pairs(store, "a", "b//c", "d e #+%20?")
    index, ledger = index_of("s3://set/clips", tmp_path, kind="pairs")
    assert index.num_ok == 2 and ledger.rejected == {Reason.UNSAFE_NAME: 1}
    assert len(list_files("s3://set/clips")) == 6


def test_a_region_that_cannot_be_asked_for_is_storage_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def down(uri: str) -> None:
        raise OSError("When resolving region for bucket 'set': no network")

    monkeypatch.setattr(storage, "resolve", down)
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    for ask in (lambda uri: stat(uri, 0), list_files):
        with pytest.raises(DataIOError, match="resolving region"):
            ask("s3://set/a")


@pytest.mark.parametrize("path", ["clips", "clips/{a,b}.tar", "clips/?.tar", "clips/a.tar::s3://set/clips/b.tar"])
def test_a_service_named_behind_the_uri_is_the_one_that_is_asked(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store.objects |= {f"set/clips/{name}.tar": shard(good(2)) for name in "ab"}
    options = f"?endpoint_override={store.endpoint.removeprefix('http://')}&scheme=http"
    given = "::".join(part + options for part in f"s3://set/{path}".split("::"))
    assert guess_kind(given) == "webdataset"
    index, _ = index_of(given, tmp_path)
    assert index.num_ok == 4
    row = index.row(3)
    assert read_range(row.path, row.offset, row.size)[4:8] == b"ftyp"


def test_shards_by_name_and_by_listing_are_the_same(store: ObjectStore, tmp_path: Path) -> None:
    """MinIO and Ceph list milliseconds, of which the answer about one object says none."""
    store.second = "00.123"
    store.objects |= {f"set/clips/{name}.tar": shard(good(2)) for name in "ab"}
    named, _ = index_of("s3://set/clips/{a,b}.tar", tmp_path)
    for path in ("s3://set/clips/*.tar", "s3://set/clips"):
        store.asked.clear()
        index, _ = index_of(path, tmp_path)
        assert index.row(3).content == named.row(3).content and index.num_ok == 4
        assert not [asked for asked in store.of("GET") if asked.path.endswith(".tar")]
        index.verify()


def test_a_table_of_objects_needs_no_list_of_their_bucket(
    store: ObjectStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S3 answers 403 to lists, and to questions about keys that are not there, where objects alone may be read."""
    pairs(store, "a", "b")
    store.fault = lambda asked: (403, "AccessDenied") if asked.path not in store.objects else None
    table = tmp_path / "list.csv"
    table.write_text("path,caption\n" + "".join(f"s3://set/clips/{name}.mp4,a clip\n" for name in "ab"))
    index, _ = index_of(table, tmp_path / "index", kind="manifest")
    assert index.num_ok == 2 and index.parts[0].meta["outside"] == {}
    assert "files in s3://set/clips, which storage refuses to list, are named by path" in caplog.text
    assert "Let this machine list it, or delete the index" in caplog.text and "data.sources media" not in caplog.text


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("s3://some-key:some/secret=@set/a.tar", r"a secret before @set/a\.tar"),
        ("s3://:some@set/a.tar", r"a secret before @set/a\.tar"),
        ("s3://region=us-east-1@some-key:some@set/a.tar", r"a secret before @set/a\.tar"),
        ("s3://some-key:some@set/a.tar?region=some", r"a secret before @set/a\.tar,"),
        ("abfs://:some@account.dfs.core.windows.net/set/a.tar", "a secret before @account"),
        ("abfs://set@account.dfs.core.windows.net/a.tar?tenant_id=a&client_secret=some", "a secret as client_secret=,"),
        ("abfs://client_secret=some@set/a.tar", "a secret as client_secret=,"),
        ("fsspec+https://account.blob.core.windows.net/set/a.tar?sv=1&sig=some", "a secret as sig=,"),
        ("fsspec+https://set/a.tar?X-Amz-Date=1&X-Amz-Signature=some", "a secret as X-Amz-Signature=,"),
        ("fsspec+https://set/a.tar?x-goog-signature=some", "a secret as x-goog-signature=,"),
        ("fsspec+https://set/a.tar?token=some", "a secret as token=,"),
        ("/set/a.tar::s3://:some@set/a.tar", r"a secret before @set/a\.tar"),
    ],
)
@pytest.mark.parametrize("setting", ["path", "media", "index"])
def test_a_secret_in_a_uri_is_refused_and_not_printed(setting: str, uri: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as refused:
        SourceConfig(**{"path": "set", setting: uri})  # type: ignore[arg-type]
    assert "some" not in str(refused.value)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://set/a.tar?endpoint_override=h:9000",
        "s3://set/a.tar?endpoint_override=h:9000&scheme=http&region=us-east-1",
        "s3://endpoint_override=h:9000@set/a.tar",
        "s3://set/token=5/a.tar",
        "gs://anonymous@set/a.tar",
        "abfs://set@account.dfs.core.windows.net/a.tar",
        "hdfs://host:8020/set/a.tar",
        "hf://datasets/me/set@main/a.tar",
        "fsspec+https://host/a.tar?download=true",
        "/set/token=5@6:7@8/a.tar",
    ],
)
def test_a_uri_without_a_secret_is_taken(uri: str) -> None:
    assert SourceConfig(path=uri, media=uri).path == uri


def test_a_clip_and_its_caption_cost_a_request_each_and_their_own_bytes(store: ObjectStore, tmp_path: Path) -> None:
    store.objects["set/a.tar"] = shard(good(4))
    index, _ = index_of("s3://set/a.tar", tmp_path)
    store.asked.clear()
    rows = [index.row(number) for number in range(4)]
    clips = tuple(row.clip() for row in rows)
    bucket, limits = Bucket(9, 48, 64), LimitsConfig()
    job = DecodeJob(
        item="", bucket=bucket, clips=clips, fps=0, crop=False, limits=limits, decoder="data.decode:decode_clip"
    )
    batch = decode_job(job)
    assert batch.captions == [f"caption {number}" for number in range(4)] and all(batch.ok)
    own = {(row.offset, row.size) for row in rows} | {(row.captions[0].offset, row.captions[0].size) for row in rows}
    assert len(store.of("HEAD")) == 1
    ranges = [asked.range.split("-") for asked in store.of("GET")]
    assert sorted((int(first), int(last) - int(first) + 1) for first, last in ranges) == sorted(own)


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (400, "ExpiredToken")])
def test_credentials_that_are_refused_are_named_as_the_cause(store: ObjectStore, status: int, code: str) -> None:
    store.fault = lambda asked: (status, code)
    with pytest.raises(DataIOError, match=r"s3://set/a.*Credentials of this process are missing, expired") as failed:
        stat("s3://set/a", retries=0)
    assert "secret" not in str(failed.value)


def test_a_file_that_is_read_on_takes_ever_fewer_requests_and_a_jump_begins_anew(store: ObjectStore) -> None:
    store.objects["set/table.csv"] = bytes(range(256)) * (20 << 12)
    with ReadFile("s3://set/table.csv") as file:
        stream = ByteRange(file)
        found = b"".join(iter(lambda: stream.read(50_000), b""))
        assert found == store.objects["set/table.csv"]
        assert len(store.of("GET")) <= 8
        store.asked.clear()
        file.pread(1 << 20, 512)
        assert [asked.range for asked in store.asked] == [f"{1 << 20}-{(1 << 20) + storage.BLOCK_BYTES - 1}"]


def test_a_storage_that_fails_for_seconds_is_waited_for_and_one_that_refuses_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients give up within a second; a service that is busy or starts again takes more."""
    pauses: list[float] = []
    monkeypatch.setattr(storage.time, "sleep", pauses.append)

    def fail_with(why: str) -> None:
        def failing(uri: str) -> None:
            raise OSError(why)

        pauses.clear()
        monkeypatch.setattr(storage, "resolve", failing)
        with pytest.raises(DataIOError, match="7 attempts"):
            stat("s3://set/a", retries=6)

    fail_with("Please reduce your request rate")
    assert pauses == [1, 2, 4, 8, 10, 10]
    with pytest.raises(DataIOError, match="5 attempts"):
        read_range("s3://set/a", 0, -1)
    assert pauses[6:] == [1, 2, 4, 8]
    fail_with("HTTP status 403: access denied")
    assert sum(pauses) < 4
