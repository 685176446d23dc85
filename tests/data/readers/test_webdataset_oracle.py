"""On good shards our reader finds the samples that the webdataset library finds, byte for byte."""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import pytest
import webdataset

from data.storage import read_range
from tests.data.making import clip, index_of, picture

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def library_samples(paths: list[str]) -> dict[str, dict[str, bytes]]:
    found = {}
    for sample in webdataset.WebDataset(paths, shardshuffle=False, nodesplitter=None, empty_check=False):
        found[f"{sample['__url__']}|{sample['__key__']}"] = {
            name: value for name, value in sample.items() if not name.startswith("__")
        }
    return found


def our_samples(index) -> dict[str, dict[str, bytes]]:
    found = {}
    for number in range(len(index)):
        row = index.row(number)
        assert row.reject is None, row.detail
        found[f"{row.shard}|{row.key}"] = {
            row.suffix: read_range(row.path, row.offset, row.size),
            "txt": index.caption(number).encode(),
        }
    return found


def assert_same(index, paths) -> None:
    theirs, ours = library_samples(paths), our_samples(index)
    assert list(ours) == list(theirs)
    for key, parts in ours.items():
        for name, data in parts.items():
            assert theirs[key][name] == data, (key, name)


def test_shards_of_the_library_itself(tmp_path):
    with webdataset.ShardWriter(str(tmp_path / "%05d.tar"), maxcount=5, verbose=0) as writer:
        for i in range(17):
            media = {"mp4": clip(seed=i % 3)} if i % 4 else {"jpg": picture(kind="jpeg", seed=i)}
            writer.write({"__key__": f"{i:09d}", **media, "txt": f"caption {i}", "json": json.dumps({"i": i}).encode()})
    index, _ = index_of(tmp_path / "{00000..00003}.tar", tmp_path / "cache")
    assert index.num_ok == 17
    assert_same(index, [str(tmp_path / f"{i:05d}.tar") for i in range(4)])


@pytest.mark.parametrize("form", list(FORMATS))
def test_random_layouts_and_long_names_in_every_tar_format(tmp_path, form):
    random = np.random.default_rng(3)
    path, letters = tmp_path / "00000.tar", "abcdefghijkl_-XYZ0123456789é"
    with tarfile.open(path, "w", format=FORMATS[form]) as tar:
        for i in range(30):
            length = int(random.integers(1, 60 if form == "ustar" else 180))
            stem = "".join(random.choice(list(letters), length)) + f"_{i}"
            folder = random.choice(["", "./", "part.1/", "a/b/"])
            parts = [("mp4" if i % 2 else "MP4", clip(seed=i % 3)), ("txt", f"caption {i}".encode()), ("json", b"{}")]
            for extension, data in [parts[k] for k in random.permutation(3)]:
                info = tarfile.TarInfo(f"{folder}{stem}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            if i % 10 == 0:
                tar.addfile(tarfile.TarInfo("__skipped__"))
    index, _ = index_of(path, tmp_path / "cache")
    assert len(index) == 30
    assert_same(index, [str(path)])
