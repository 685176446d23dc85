"""1,000 damaged shards: never a crash, never a silent loss, and the ledger adds up."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from data.ledger import BadSample
from data.readers.part import read_meta
from tests.data.making import clip, index_of, picture, sample, shard

SHARDS = 1000
KEYS = [f"{i:06d}" for i in range(4)]


def tiny_shard() -> bytes:
    return shard(
        [
            *sample(0, mp4=clip(32, 32, 3)),
            *sample(1, mp4=None, png=picture(16, 16)),
            *sample(2, mp4=clip(48, 32, 5, seed=1)),
            *sample(3, mp4=clip(32, 48, 2, seed=2)),
        ]
    )


def flip(data: bytearray, random: np.random.Generator) -> bytes:
    for at in random.integers(0, len(data), random.integers(1, 30)):
        data[at] ^= int(random.integers(1, 256))
    return bytes(data)


def cut(data: bytearray, random: np.random.Generator) -> bytes:
    return bytes(data[: random.integers(0, len(data))])


def splice_out(data: bytearray, random: np.random.Generator) -> bytes:
    start, end = sorted(random.integers(0, len(data), 2))
    return bytes(data[:start] + data[end:])


def splice_in(data: bytearray, random: np.random.Generator) -> bytes:
    at, (start, end) = random.integers(0, len(data)), sorted(random.integers(0, len(data), 2))
    return bytes(data[:at] + data[start:end] + data[at:])


def noise(data: bytearray, random: np.random.Generator) -> bytes:
    at, count = random.integers(0, len(data)), int(random.integers(1, 3000))
    return bytes(data[:at] + random.bytes(count) + data[at + (count if random.random() < 0.5 else 0) :])


def zeros(data: bytearray, random: np.random.Generator) -> bytes:
    at, count = random.integers(0, len(data)), int(random.integers(1, 3000))
    return bytes(data[:at] + bytes(count) + data[at + count :])[: len(data)]


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzzed")
    original, random = tiny_shard(), np.random.default_rng(7)
    damages = (flip, cut, splice_out, splice_in, noise, zeros)
    for number in range(SHARDS):
        damage = damages[number % len(damages)]
        (folder / f"{number:05d}.tar").write_bytes(damage(bytearray(original), random))
    index, ledger = index_of(folder, folder / "cache")
    return original, index, ledger


def test_every_shard_is_indexed_and_the_ledger_adds_up(fuzzed):
    _, index, ledger = fuzzed
    assert index.num_shards == SHARDS
    ledger.check()
    assert ledger.indexed == len(index) == index.num_ok + sum(ledger.rejected.values())
    assert sum(ledger.shard_faults.values()) > SHARDS / 3, "the damage must be seen"


def test_no_key_is_lost_silently(fuzzed):
    _, index, _ = fuzzed
    keys = index.columns("key")["key"]
    lost = []
    for part, start, end in zip(index.parts, index.shard_bounds[:-1], index.shard_bounds[1:], strict=True):
        missing = set(KEYS) - set(keys[start:end])
        if missing and not part.meta["faults"]:
            lost.append((part.part.uri, missing))
    assert not lost


def test_usable_rows_can_be_read(fuzzed):
    original, index, _ = fuzzed
    columns = index.columns("ok", "key", "width", "height", "num_frames")
    outcome = Counter()
    for row in np.flatnonzero(columns["ok"])[::5]:
        about = index.row(int(row))
        assert about.width > 0 and about.height > 0 and about.num_frames > 0
        assert about.width * about.height <= index.limits.max_pixels
        try:
            outcome[index.caption(int(row)) in original.decode("latin-1")] += 1
        except BadSample as fault:
            raise AssertionError(f"{about.shard} {about.key}: {fault}") from fault
    assert outcome[True] > 0.9 * outcome.total()


def test_the_same_damage_gives_the_same_index(fuzzed, tmp_path):
    _, index, _ = fuzzed
    part = index.parts[123]
    again, _ = index_of(part.part.uri, tmp_path)
    assert read_meta(again.parts[0].file)["digest"] == part.meta["digest"]
