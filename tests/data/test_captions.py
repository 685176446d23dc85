"""Whatever a caption holds, its batch can be written as a block."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from data import storage
from data.captions import check_lengths, read_caption
from data.config import LimitsConfig
from data.decode import READERS, caption_or_empty, captions_of, decode_job
from data.engines.blocks import from_block, to_block
from data.ledger import BadSample, Ledger, Reason
from data.tools.lint import lint
from data.types import Bucket, CaptionRef, Clip, DecodeJob
from tests.data.making import clip, good, index_of, rejected, sample, shard

CLIP = Clip(key="a", media="a", offset=0, size=1, suffix="mp4", image=False, frames=9, fps=8.0, start_frame=0)
CUT_EMOJI = b'{"caption": "a cat \\ud83d", "whole": "a cat \\ud83d\\ude00"}'


def test_half_an_emoji_of_a_shard_is_refused_and_a_whole_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(shard([*good(1), *sample(1, json=CUT_EMOJI), *sample(2)]))
    index, ledger = index_of(tmp_path / "a.tar", tmp_path / "cache", caption="json:caption")
    assert rejected(ledger) == {"caption_not_utf8": 1} and ledger.last.key == "000001"
    index, ledger = index_of(tmp_path / "a.tar", tmp_path / "cache", caption="json:whole|txt")
    assert not rejected(ledger) and index.caption(1) == "a cat \U0001f600"


def test_half_an_emoji_of_a_folder_is_refused_and_linted(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for name, about in (("cut", CUT_EMOJI), ("whole", b'{"caption": "a dog"}')):
        (tmp_path / "set" / f"{name}.mp4").write_bytes(clip())
        (tmp_path / "set" / f"{name}.json").write_bytes(about)
    index, _ = index_of(tmp_path / "set", tmp_path / "cache", kind="pairs")
    ledger = Ledger(LimitsConfig(max_bad_fraction=1.0))
    index.file_into(ledger)
    lint([index], ledger, decode=False)
    assert rejected(ledger) == {"caption_not_utf8": 1} and index.caption(1) == "a dog"


@pytest.mark.parametrize("field", ["", "caption#0"])
def test_half_an_emoji_found_at_decode_is_one_bad_sample_of_a_batch_that_can_be_written(
    tmp_path: Path, field: str
) -> None:
    (tmp_path / "a.mp4").write_bytes(clip())
    (tmp_path / "a.json").write_bytes(CUT_EMOJI)  # edited since it was indexed
    cut = CaptionRef(path=str(tmp_path / "a.json"), size=-1, field=field) if field else CaptionRef(text="a \ud83d")
    with pytest.raises(BadSample) as caught:
        read_caption(cut)
    assert caught.value.reason is Reason.CAPTION_NOT_UTF8
    clips = [
        Clip(
            key=key,
            media=str(tmp_path / "a.mp4"),
            offset=0,
            size=-1,
            suffix="mp4",
            image=False,
            frames=9,
            fps=8.0,
            start_frame=0,
            captions=(ref,),
            shard="shard",
        )
        for key, ref in (("cut", cut), ("whole", CaptionRef(text="a dog")))
    ]
    job = DecodeJob(
        item="s0.0",
        bucket=Bucket(1, 48, 64),
        clips=tuple(clips),
        fps=0.0,
        crop=False,
        limits=LimitsConfig(),
        decoder="data.decode:decode_clip",
    )
    batch = from_block(to_block(decode_job(job)))
    assert batch.captions == ["", "a dog"] and batch.ok == [False, True]
    assert batch.faults[0].reason is Reason.CAPTION_NOT_UTF8 and batch.faults[0].key == "cut"
    assert caption_or_empty(clips[0], job) == ""


def test_lengths_are_of_utf8_and_half_an_emoji_has_none() -> None:
    limits = LimitsConfig(max_caption_bytes=8)
    check_lengths(["\U0001f600" * 2], limits)
    for text, reason in (
        ("\U0001f600" * 3, Reason.CAPTION_TOO_LARGE),
        (json.loads('"\\udc00"'), Reason.CAPTION_NOT_UTF8),
    ):
        with pytest.raises(BadSample) as caught:
            check_lengths([text], limits)
        assert caught.value.reason is reason


@pytest.mark.parametrize("scheme", ["", "fsspec+file://"])
def test_captions_of_an_item_are_read_with_one_open_file_for_several_and_stay_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    texts = [f"caption {i}".encode() for i in range(20)]
    texts[13] = b"\xff" * len(texts[13])
    (tmp_path / "texts").write_bytes(b"".join(texts))
    opened: list[str] = []
    plain = storage._open_remote
    monkeypatch.setattr(storage, "_open_remote", lambda uri: (opened.append(uri), plain(uri))[1])
    clips, at = [], 0
    for i, text in enumerate(texts):
        ref = CaptionRef(path=f"{scheme}{tmp_path}/texts", offset=at, size=len(text))
        clips.append(replace(CLIP, key=str(i), captions=(ref,)))
        at += len(text)
    job = DecodeJob(
        item="", bucket=Bucket(1, 8, 8), clips=tuple(clips), fps=0.0, crop=False, limits=LimitsConfig(), decoder=""
    )
    assert captions_of(job) == [None if i == 13 else f"caption {i}" for i in range(20)]
    assert len(opened) == (READERS - 1 if scheme else 0), "20 are 6 times 3 and 2, not one each"
