"""What a source gives its samples: a prefix before every caption, and a caption for those without a text."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import webdataset

from actors.feed.encoders import Encoders
from actors.feed.item_cache import ItemCache
from data.captions import named_elsewhere
from data.config import CacheConfig, DataConfig, SourceConfig
from data.dataset.dataset import Dataset
from data.dataset.index import Index
from data.decode import decode_job
from data.errors import DataError
from data.ledger import BadSample, Ledger
from data.tools.convert import convert
from data.tools.lint import count_long_captions
from data.tools.stats import statistics
from ops.geometry import Geometry
from tests.data.dataset.test_dataset import config, names
from tests.data.making import clip, index_of, rejected, sample, shard

PREFIX = "sks style, "


def folder_of_pairs(folder: Path, *texts: str | None) -> Path:
    """Clips 0, 1, ... with these captions beside them."""
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.mp4").write_bytes(clip(seed=number))
        if text is not None:
            (folder / f"{number}.txt").write_text(text)
    return folder


def tar(folder: Path, *texts: str | None) -> Path:
    folder.mkdir()
    parts = [{"txt": text and text.encode(), "json": None} for text in texts]
    (folder / "0.tar").write_bytes(shard([member for i, part in enumerate(parts) for member in sample(i, **part)]))
    return folder / "0.tar"


def table(folder: Path, columns: list[str], *rows: list[str | None]) -> Path:
    folder.mkdir()
    for number, _ in enumerate(rows):
        (folder / f"abcdefghij{number}_1.mp4").write_bytes(clip(seed=number))
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return folder / "table.csv"


def manifest(folder: Path, *texts: str | None) -> Path:
    return table(folder, ["path", "text"], *([f"abcdefghij{i}_1.mp4", text] for i, text in enumerate(texts)))


def koala(folder: Path, *texts: str | None) -> Path:
    stamp = "['0:00:00', '0:00:01']"
    columns = ["videoID", "url", "timestamp", "caption"]
    return table(folder, columns, *([f"abcdefghij{i}_1", "u", stamp, text] for i, text in enumerate(texts)))


def mds(folder: Path, *texts: str | None) -> Path:
    from tests.data.readers.test_mds import packed, write

    rows = [{"caption": (text or "").encode(), "video": clip(seed=i)} for i, text in enumerate(texts)]
    data, about = packed(rows, {"caption": "str", "video": "bytes"})
    return write(folder, [data], about)


KINDS = {"pairs": folder_of_pairs, "webdataset": tar, "manifest": manifest, "koala": koala, "mds": mds}
TEXTS = ("a red cat", None, " ")


def captions(index: Index) -> list[str]:
    return [index.caption(row) for row in np.flatnonzero(index.columns("ok")["ok"])]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_without_a_text_have_the_default_caption_of_their_source(tmp_path: Path, kind: str) -> None:
    path, cache = KINDS[kind](tmp_path / "set", *TEXTS), tmp_path / "cache"
    index, ledger = index_of(path, cache, kind=kind)
    assert captions(index) == ["a red cat"] and rejected(ledger) == {"no_caption": 2} and index.num_by_default == 0
    assert "default_caption of the source gives such samples one" in ledger.last.detail
    index, ledger = index_of(path, cache, kind=kind, default_caption="sks style")
    assert captions(index) == ["a red cat", "sks style", "sks style"] and not rejected(ledger)
    assert index.num_by_default == 2
    index, ledger = index_of(path, cache, kind=kind, default_caption="")
    assert captions(index) == ["a red cat", "", ""] and not rejected(ledger)
    index, ledger = index_of(path, cache, kind=kind)
    assert rejected(ledger) == {"no_caption": 2}, (
        "without it they are refused as before, whatever was indexed meanwhile"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_prefix_stands_before_every_caption(tmp_path: Path, kind: str) -> None:
    path, cache = KINDS[kind](tmp_path / "set", *TEXTS), tmp_path / "cache"
    index, _ = index_of(path, cache, kind=kind, caption_prefix=PREFIX, default_caption="a cat")
    assert captions(index) == ["sks style, a red cat", "sks style, a cat", "sks style, a cat"]
    index, _ = index_of(path, cache, kind=kind, caption_prefix=PREFIX, default_caption="")
    assert captions(index) == ["sks style, a red cat", "sks style,", "sks style,"]
    index, ledger = index_of(path, cache, kind=kind, caption_prefix=PREFIX)
    assert captions(index) == ["sks style, a red cat"] and rejected(ledger) == {"no_caption": 2}


def test_another_prefix_or_default_reads_no_header_again(tmp_path: Path) -> None:
    path, cache = folder_of_pairs(tmp_path / "set", *TEXTS), tmp_path / "cache"
    made = [index_of(path, cache, kind="pairs", default_caption=text, caption_prefix=text)[0] for text in ("a", "b")]
    assert made[0].parts[0].file == made[1].parts[0].file
    assert captions(made[1]) == ["ba red cat", "bb", "bb"]


def with_words(clips: Path, prefix: str = "", default: str | None = None, **changes: object) -> DataConfig:
    plain = config(clips, caption_dropout=0.3, **changes)
    (source,) = plain.sources
    return replace(plain, sources=(replace(source, caption_prefix=prefix, default_caption=default),))


def opened(config: DataConfig) -> Dataset:
    return Dataset.open(config, Geometry(), 0)


def test_of_several_captions_each_is_prefixed_and_a_dropped_one_stays_empty(clips: Path) -> None:
    plain, prefixed = opened(with_words(clips)), opened(with_words(clips, PREFIX))
    seen = set()
    for step in range(6):
        for one, other in zip(plain.step(step).items, prefixed.step(step).items, strict=True):
            words = decode_job(one.job).captions
            assert decode_job(other.job).captions == [f"{PREFIX}{text}" if text else "" for text in words]
            seen |= {clip.caption_drop for clip in one.job.clips}
            for before, after in zip(one.samples, other.samples, strict=True):
                grown = 0 if before.caption_drop else len(PREFIX)
                assert after.caption_chars == before.caption_chars + grown, "text tokens are planned by it"
    assert seen == {True, False}
    assert names(plain.step(3)) == names(prefixed.step(3))


def test_a_cached_embedding_of_the_caption_without_its_prefix_has_another_name(clips: Path, tmp_path: Path) -> None:
    encoders = Encoders(vae="v", text="t5", max_length=226, chars_per_token=4.0)
    named = []
    for prefix in ("", PREFIX):
        chosen = with_words(clips, prefix, cache=CacheConfig(path=str(tmp_path / "cache")))
        item = opened(chosen).step(0).items[0]
        cache = ItemCache(chosen, encoders, Geometry())
        named.append((cache.names(item).texts, [clip.caption_drop for clip in item.job.clips]))
    (before, dropped), (after, _) = named
    assert not all(dropped)
    assert [one == other for one, other in zip(before, after, strict=True)] == dropped, "the empty caption is the same"


@pytest.mark.parametrize("words", [{"prefix": PREFIX}, {"default": "a cat"}, {"default": ""}])
def test_a_run_with_other_words_does_not_continue(clips: Path, words: dict[str, str]) -> None:
    token = opened(with_words(clips)).token(3)
    with pytest.raises(DataError, match="made with other data settings: sources changed"):
        opened(with_words(clips, **words)).resume(token)
    assert opened(with_words(clips)).resume(token) == 3


def test_the_identity_of_a_source_without_such_words_is_that_of_before_there_were_any(clips: Path) -> None:
    from data.dataset.order import digest

    (source,) = with_words(clips).sources
    data = opened(with_words(clips))
    assert data.token(0)["plan"]["sources"] == digest([(source.filters, source.shuffle_window, source.caption)])


def test_statistics_and_lint_count_what_is_trained_and_filters_the_text_itself(tmp_path: Path) -> None:
    path = folder_of_pairs(tmp_path / "set", *TEXTS)
    index, _ = index_of(path, tmp_path / "c", kind="pairs", caption_prefix=PREFIX, default_caption="a")
    facts = statistics(index, 0)
    assert (facts["caption_chars"][0], facts["caption_chars"][-1]) == (len(PREFIX) + 1, len(PREFIX) + len("a red cat"))
    assert facts["by_default"] == 2
    admitted = [index.columns("ok")["ok"]]
    assert count_long_captions([index], admitted, len, len(PREFIX) + 1) == (1, 3)
    assert index.filter_mask("caption_chars > 0").tolist() == [True, False, False]


def test_converted_shards_hold_the_captions_that_were_trained(tmp_path: Path) -> None:
    path = folder_of_pairs(tmp_path / "set", *TEXTS)
    index, _ = index_of(path, tmp_path / "c", kind="pairs", caption_prefix=PREFIX, default_caption="a cat")
    (written,) = convert(index, tmp_path / "out", Ledger())
    found = {one["__key__"]: one for one in webdataset.WebDataset([str(written)], shardshuffle=False)}
    assert {key: one["txt"].decode() for key, one in found.items()} == {
        "0": "sks style, a red cat",
        "1": "sks style, a cat",
        "2": "sks style, a cat",
    }
    assert json.loads(found["1"]["json"])["caption"] == "sks style, a cat"


@pytest.mark.parametrize("name", ["caption_prefix", "default_caption"])
def test_words_that_no_file_can_hold_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"data\.sources {name} 'a .ud83d' is no text: surrogates not allowed at"):
        SourceConfig(path="a", **{name: "a \ud83d"})


# Texts that the caption setting does not name -------------------------------------------------------------------------

ELSEWHERE = json.dumps({"url": "u", "long_caption": "long words", "text": ["short"], "tags": [], "fps": 8}).encode()


def test_a_sample_of_a_tar_with_its_text_elsewhere_says_where_and_what_to_set(tmp_path: Path) -> None:
    members = [*sample(0, txt=None, json=ELSEWHERE), *sample(1, txt=None, json=None, **{"long.txt": b"a"})]
    members += sample(2, txt=None, json=None, prompt=b"a prompt", note=b"no text")
    (tmp_path / "a.tar").write_bytes(shard(members))
    index, ledger = index_of(tmp_path / "a.tar", tmp_path / "cache")
    assert rejected(ledger) == {"no_caption": 2} and index.caption(1) == "a", "the only .txt of a sample"
    told = [fault.detail for fault in index.faults()]
    assert told[0] == (
        "no text in txt|json:caption; set caption: txt|json:caption|json:text, as text is in json:url, "
        "json:long_caption, json:text"
    )
    assert told[1] == "no text in txt|json:caption; set caption: txt|json:caption|prompt, as text is in prompt"
    for row, setting in ((0, "txt|json:caption|json:text"), (2, "txt|json:caption|prompt")):
        index, _ = index_of(tmp_path / "a.tar", tmp_path / "cache", caption=setting)
        assert index.caption(row) in ("short", "a prompt"), "what was suggested is what helps"


def test_a_clip_of_a_folder_with_its_text_elsewhere_says_where_and_what_to_set(tmp_path: Path) -> None:
    folder = folder_of_pairs(tmp_path / "set", None, None)
    (folder / "0.json").write_bytes(ELSEWHERE)
    (folder / "1.prompt").write_text("a prompt")
    index, _ = index_of(folder, tmp_path / "cache", kind="pairs")
    told = [fault.detail for fault in index.faults()]
    assert "set caption: txt|json:caption|json:text, as text is in json:url, json:long_caption, json:text" in told[0]
    assert "set caption: txt|json:caption|prompt, as text is in prompt" in told[1]
    index, _ = index_of(folder, tmp_path / "cache", kind="pairs", caption="txt|json:caption|json:text|prompt")
    assert captions(index) == ["short", "a prompt"]


def test_fields_of_no_usual_name_are_named_all_the_same() -> None:
    assert named_elsewhere("txt", [], {"url": "u", "words": ["a"]}) == (
        "text is in json:url, json:words; caption of the source names its own"
    )
    assert named_elsewhere("txt|json:a", [], {"a": "named, and found empty by the reader", "n": 3}) == ""
    assert named_elsewhere("txt", ["long.txt", "short.txt"], {}).startswith("set caption: txt|long.txt, as")


def test_what_is_said_of_a_sample_without_a_caption_fits_a_line(tmp_path: Path) -> None:
    many = json.dumps({f"field {number}": "text" for number in range(400)}).encode()
    (tmp_path / "a.tar").write_bytes(shard(sample(0, txt=None, json=many)))
    _, ledger = index_of(tmp_path / "a.tar", tmp_path / "cache")
    assert len(ledger.last.detail) <= 240
    assert isinstance(BadSample(ledger.last.reason, ledger.last.detail), Exception)
