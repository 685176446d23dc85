"""Counts add up at every moment, and the limits stop a run with one sentence."""

from __future__ import annotations

import json
import os
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.config import LimitsConfig
from data.errors import DataError, DataIOError
from data.ledger import BadSample, Fault, Ledger, Reason, Severity

SAMPLE = [reason for reason in Reason if reason.severity is Severity.SAMPLE]
ROWS = [reason for reason in Reason if reason.severity in (Severity.SAMPLE, Severity.ABSENT, Severity.CHOICE)]


def fault(reason: Reason, shard: str = "s3://b/00017.tar", key: str = "000170123", detail: str = "") -> Fault:
    return Fault(reason, shard, key, 512, detail)


@given(st.lists(st.sampled_from([None, *ROWS]), max_size=60), st.lists(st.sampled_from([None, *SAMPLE]), max_size=60))
def test_every_row_and_every_draw_is_in_one_state(rows, draws):
    ledger = Ledger()
    for reason in rows:
        ledger.add_indexed(1)
        ledger.add_planned(1) if reason is None else ledger.reject(fault(reason))
        ledger.check()
    for reason in draws:
        ledger.schedule(1)
        assert ledger.pending == 1
        ledger.deliver(1) if reason is None else ledger.skip(fault(reason))
        ledger.check()
    facts = ledger.summary()
    assert facts["indexed"] == facts["planned"] + sum(facts["rejected"].values()) == len(rows)
    assert facts["scheduled"] == facts["delivered"] + sum(facts["skipped"].values()) == len(draws)
    json.dumps(facts)


def test_a_row_without_a_state_is_an_error_of_ours():
    ledger = Ledger()
    ledger.add_indexed(3)
    ledger.add_planned(2)
    with pytest.raises(AssertionError, match=r"indexed 3 != planned 2 \+ rejected 0"):
        ledger.check()
    ledger = Ledger()
    ledger.deliver(1)
    with pytest.raises(AssertionError, match="scheduled 0 < delivered 1"):
        ledger.check()


def test_breach_is_one_sentence_with_the_worst_and_the_last(tmp_path):
    ledger = Ledger(LimitsConfig(max_bad_fraction=0.01, bad_after=200), tmp_path / "bad.jsonl")
    ledger.add_indexed(2400)
    for reason, count in ((Reason.CAPTION_NOT_UTF8, 16), (Reason.TRUNCATED_VIDEO, 20)):
        for _ in range(count):
            ledger.reject(fault(reason, key="x"))
    ledger.reject(fault(Reason.TRUNCATED_VIDEO, detail="moov past end of member"))
    with pytest.raises(DataError) as caught:
        ledger.check_limits()
    assert str(caught.value) == (
        "bad data: 37 of 2400 samples (1.5% > 1.0%); worst: 21 truncated_video, 16 caption_not_utf8; last: shard "
        "s3://b/00017.tar key 000170123 (truncated_video: moov past end of member). "
        f"Full list: {tmp_path / 'bad.jsonl'}"
    )


@pytest.mark.parametrize(
    "rejected, indexed, breach", [(2, 200, False), (3, 200, True), (100, 199, False), (0, 500, False)]
)
def test_the_fraction_counts_after_enough_samples(rejected, indexed, breach):
    ledger = Ledger(LimitsConfig(max_bad_fraction=0.01, bad_after=200))
    ledger.add_indexed(indexed)
    for _ in range(rejected):
        ledger.reject(fault(Reason.DECODE_ERROR))
    assert_breach(ledger, breach)


def assert_breach(ledger: Ledger, breach: bool) -> None:
    if breach:
        with pytest.raises(DataError):
            ledger.check_limits()
    else:
        ledger.check_limits()


def test_draws_have_their_own_fraction():
    ledger = Ledger(LimitsConfig(max_bad_fraction=0.01, bad_after=200))
    ledger.add_indexed(1_000_000)
    ledger.schedule(300)
    ledger.deliver(296)
    for _ in range(4):
        ledger.skip(fault(Reason.DECODE_ERROR))
    assert_breach(ledger, True)


@pytest.mark.parametrize("reason", [Reason.FILE_MISSING, Reason.NO_MEDIA, Reason.DECODER_CRASH])
def test_a_draw_that_cannot_be_had_counts_whatever_the_reason(reason):
    ledger = Ledger(LimitsConfig(max_bad_fraction=0.01, bad_after=200))
    ledger.add_indexed(1_000_000)
    ledger.schedule(300)
    ledger.deliver(296)
    for _ in range(4):
        ledger.skip(fault(reason))
    with pytest.raises(DataError, match=f"4 of 300 samples .*worst: 4 {reason}"):
        ledger.check_limits()


def test_rows_without_files_and_filtered_ones_never_stop_a_run_and_do_not_hide_faults():
    ledger = Ledger(LimitsConfig(max_bad_fraction=0.01, bad_after=200))
    ledger.add_indexed(100_000)
    ledger.reject_many(Reason.FILE_MISSING, 99_000)
    ledger.reject_many(Reason.FILTERED, 500, "aesthetic_score >= 4.5")
    ledger.check_limits()
    for _ in range(11):  # of the 1,000 that are there
        ledger.reject(fault(Reason.NOT_MP4))
    assert_breach(ledger, True)
    assert ledger.summary()["details"] == {"filtered(aesthetic_score >= 4.5)": 500}


def test_shard_faults_have_their_own_limit():
    ledger = Ledger(LimitsConfig(max_bad_shards=1))
    ledger.record(fault(Reason.TRUNCATED_TAR, "a.tar"))
    ledger.record(fault(Reason.GARBAGE_HEADER, "a.tar"))
    ledger.check_limits()  # two faults of one shard
    ledger.record(fault(Reason.UNREADABLE_TAR, "b.tar", ""))
    with pytest.raises(DataError, match=r"2 shards with faults > max_bad_shards 1.*last: shard b\.tar \(unreadable"):
        ledger.check_limits()


def test_list_of_faults_has_a_line_for_each_and_is_not_repeated_on_resume(tmp_path):
    path = tmp_path / "run" / "bad.jsonl"
    for resumed in (False, True):
        ledger = Ledger(path=path)
        ledger.record(fault(Reason.NOT_MP4, key="caf\udce9"))
        ledger.record(fault(Reason.LINK_MEMBER))
        ledger.schedule(1)
        ledger.skip(fault(Reason.DECODE_ERROR, key=f"draw {resumed}"))
        ledger.close()
        assert ledger.summary()["rejected"] == {"not_mp4": 1}, "a resumed run counts all the same"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["reason"] for line in lines] == ["not_mp4", "link_member", "decode_error", "decode_error"]
    assert lines[0].keys() == {"shard", "key", "offset", "reason", "detail"}


@pytest.mark.parametrize("there", [2.0, 2.5, 5.0], ids=["lines", "a half", "all"])
def test_a_list_that_ended_among_the_faults_of_the_index_is_gone_on_with(tmp_path, there):
    """The start before was killed, or its disk was full; each start after it left the others out for ever."""
    path, faults = tmp_path / "bad.jsonl", [fault(Reason.NO_CAPTION, key=f"k{n}") for n in range(4)]
    faults.append(fault(Reason.LINK_MEMBER))
    ledger = Ledger(path=path)
    for one in faults:
        ledger.record(one)
    ledger.close()
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    path.write_text("".join(lines[: int(there)]) + (lines[2][:20] if there % 1 else ""))
    for _ in range(2):
        ledger = Ledger(path=path)
        for one in faults:
            ledger.record(one)
        ledger.close()
        assert path.read_text() == whole


def test_faults_of_an_index_that_was_made_anew_are_not_listed_behind_draws(tmp_path):
    path = tmp_path / "bad.jsonl"
    for draw, keys in enumerate((["a", "b"], ["a", "b", "c"], ["b", "c", "d"])):
        ledger = Ledger(path=path)
        for key in keys:
            ledger.record(fault(Reason.NO_CAPTION, key=key))
        ledger.schedule(1)
        ledger.skip(fault(Reason.DECODE_ERROR, key=str(draw)))
        ledger.close()
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["a", "b", "0", "1", "2"]


def test_bad_draws_on_a_disk_that_is_full_for_a_while_are_listed_later(tmp_path, monkeypatch):
    write, full = os.write, [True]

    def written(file, data):
        if full:
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr("ops.line_file.os.write", written)
    path = tmp_path / "bad.jsonl"
    ledger = Ledger(path=path)
    ledger.schedule(1002)
    for draw in range(1000):
        ledger.skip(fault(Reason.DECODE_ERROR, key=str(draw)))
    with pytest.raises(DataIOError, match="no fault goes unlisted"):
        ledger.skip(fault(Reason.DECODE_ERROR, key="1000"))
    full.clear()
    ledger.deliver(1)
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == [str(n) for n in range(1001)]


def test_a_fault_of_the_index_on_a_full_disk_is_an_error_at_once(tmp_path, monkeypatch):
    """Somebody has just started the run, and can answer it."""

    def full(file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ops.line_file.os.write", full)
    with pytest.raises(DataIOError, match="Free space, or name another folder"):
        Ledger(path=tmp_path / "bad.jsonl").record(fault(Reason.NOT_MP4))


def test_rows_that_a_rule_left_out_may_have_lines_of_their_own(tmp_path):
    ledger = Ledger(path=tmp_path / "bad.jsonl")
    ledger.reject_many(Reason.FILE_MISSING, 3)
    ledger.add_line(fault(Reason.FILE_MISSING, key="one of them"))
    assert ledger.summary()["rejected"] == {"file_missing": 3}
    assert [json.loads(line)["key"] for line in (tmp_path / "bad.jsonl").read_text().splitlines()] == ["one of them"]


def test_counts_of_draws_survive_a_resume():
    first = Ledger()
    first.schedule(10)
    first.deliver(9)
    first.skip(fault(Reason.DECODE_ERROR))
    assert first.draw_state()["sources"]["0"]["bad_in_a_row"] == 1
    second = Ledger()
    second.restore_draws(json.loads(json.dumps(first.draw_state())))
    assert second.draw_state() == first.draw_state() and second.pending == 0


def two_sources() -> Ledger:
    ledger = Ledger(LimitsConfig(max_bad_fraction=0.01, bad_after=200))
    for source, (name, rows) in enumerate((("films", 1_000_000), ("mine", 50))):
        ledger.name_source(source, name)
        ledger.add_indexed(rows, source)
        ledger.add_planned(rows, source)
    return ledger


def skip(ledger: Ledger, count: int, source: int) -> None:
    for _ in range(count):
        ledger.skip(Fault(Reason.FILE_MISSING, "t.csv", "a", None, "a.mp4 is gone", source))


def test_a_source_is_judged_as_if_it_were_alone():
    ledger = two_sources()
    for source, count in ((0, 100_000), (1, 300)):
        ledger.schedule(count, source)
        ledger.deliver(count - 3 * source, source)
    skip(ledger, 3, 1)
    ledger.check_limits()  # 3 of 300
    ledger.schedule(1, 1)
    skip(ledger, 1, 1)
    with pytest.raises(DataError, match=r"bad data: source mine: 4 of 301 samples \(1.3% > 1.0%\).*last: shard t\.csv"):
        ledger.check_limits()
    assert [counts["skipped"] for counts in ledger.summary()["sources"]] == [{}, {"file_missing": 4}]


def test_rows_of_a_source_are_judged_as_if_it_were_alone():
    ledger = two_sources()
    ledger.add_indexed(400, 1)
    for _ in range(6):
        ledger.reject(Fault(Reason.NOT_MP4, "t.csv", source=1))
    with pytest.raises(DataError, match=r"source mine: 6 of 450 samples .*worst: 6 not_mp4"):
        ledger.check_limits()


@pytest.mark.parametrize("drawn", [False, True])
def test_sources_that_are_too_small_to_be_judged_alone_are_judged_together(drawn):
    ledger = Ledger(LimitsConfig(max_bad_fraction=0.01, bad_after=200))
    for source in range(10):
        ledger.add_indexed(50, source)
        if drawn:
            ledger.schedule(50, source)
            ledger.deliver(49, source)
        one = Fault(Reason.NOT_MP4, "t.csv", source=source)
        ledger.skip(one) if drawn else ledger.reject(one)
    with pytest.raises(DataError, match=r"bad data: 10 of 500 samples"):
        ledger.check_limits()


@pytest.mark.parametrize("bad, gone", [(49, False), (50, True)])
def test_a_small_source_is_gone_when_as_many_draws_as_it_has_rows_were_bad_in_a_row(bad, gone):
    ledger = two_sources()
    ledger.schedule(100_000)
    ledger.deliver(100_000)
    for count in (7, bad):  # between them it was there
        ledger.schedule(count + 1, 1)
        ledger.deliver(1, 1)
        skip(ledger, count, 1)
    if gone:
        with pytest.raises(DataError, match=r"source mine: none of its last 50 draws could be read; .*then resume\."):
            ledger.check_limits()
    else:
        ledger.check_limits()
    ledger.limits = LimitsConfig(max_bad_fraction=1.0)
    ledger.check_limits()


def test_what_is_hdr_is_counted_and_ends_no_run_that_has_other_clips():
    ledger = two_sources()
    ledger.add_indexed(400, 1)
    ledger.add_planned(400, 1)
    ledger.reject(Fault(Reason.HDR, "t.csv", source=1))
    ledger.add_indexed(1, 1)
    for _ in range(300):  # as where an index of before takes them
        ledger.schedule(2, 1)
        ledger.skip(Fault(Reason.HDR, "t.csv", source=1))
        ledger.deliver(1, 1)
        ledger.check_limits()
    ledger.check()
    assert (ledger.rejected, ledger.skipped) == ({Reason.HDR: 1}, {Reason.HDR: 300})
    twice = 2 * ledger.sources[1].planned  # fewer in a row may come of a source that has others, too
    assert twice > ledger.limits.bad_after
    ledger.schedule(twice, 1)
    for _ in range(twice):
        ledger.check_limits()
        ledger.skip(Fault(Reason.HDR, "t.csv", detail="HLG; tone-map it", source=1))
    with pytest.raises(DataError, match=rf"none of its last {twice} draws could be trained; .*tone-map it") as ended:
        ledger.check_limits()
    assert "See whether its files" not in str(ended.value)


def test_a_large_source_of_nothing_but_hdr_ends_the_run_long_before_two_epochs():
    ledger = Ledger(LimitsConfig(max_bad_fraction=0.01, bad_after=200))
    ledger.add_indexed(100_000)
    ledger.add_planned(100_000)
    ledger.schedule(2000)
    for _ in range(2000):
        ledger.check_limits()
        ledger.skip(fault(Reason.HDR, detail="HLG; tone-map it"))
    with pytest.raises(DataError, match=r"none of its last 2000 draws could be trained; .*tone-map it"):
        ledger.check_limits()


def test_a_source_that_has_other_clips_goes_on_after_any_number_of_hdr_within_two_epochs():
    """Shards may be of one kind: 2,000 in a row were taken for all that it has."""
    ledger = hdr_in_a_row(2_000, 2 * 2_000 - 1)
    ledger.schedule(1)
    ledger.skip(fault(Reason.HDR))
    with pytest.raises(DataError, match="none of its last 4000 draws could be trained"):
        ledger.check_limits()


def hdr_in_a_row(rows: int, draws: int) -> Ledger:
    """The ledger of a source that had delivered 300 before."""
    ledger = Ledger(LimitsConfig(max_bad_fraction=0.01, bad_after=200))
    ledger.add_indexed(rows)
    ledger.add_planned(rows)
    ledger.schedule(300)
    ledger.deliver(300)
    ledger.schedule(draws)
    for _ in range(draws):
        ledger.skip(fault(Reason.HDR))
        ledger.check_limits()
    return ledger


def test_hdr_in_a_row_makes_no_bad_draw_after_it_the_last_of_many():
    ledger = hdr_in_a_row(1000, 250)
    ledger.schedule(1)
    ledger.skip(fault(Reason.DECODE_ERROR))
    ledger.check_limits()
    assert (ledger.sources[0].bad_in_a_row, ledger.sources[0].left_out_in_a_row) == (1, 250)
    ledger.schedule(1)
    ledger.deliver(1)
    assert (ledger.sources[0].bad_in_a_row, ledger.sources[0].left_out_in_a_row) == (0, 0)


def test_hdr_between_them_hides_no_bad_draws_in_a_row():
    ledger = hdr_in_a_row(20, 1)
    ledger.schedule(38)
    for _ in range(19):
        ledger.skip(fault(Reason.FILE_MISSING))
        ledger.skip(fault(Reason.HDR))
    ledger.limits = LimitsConfig(max_bad_fraction=0.5, bad_after=200)
    ledger.check_limits()
    ledger.schedule(1)
    ledger.skip(fault(Reason.FILE_MISSING))
    with pytest.raises(DataError, match="none of its last 20 draws could be read"):
        ledger.check_limits()


@pytest.mark.parametrize("rows, draws", [(1000, 250), (20, 25)])
def test_a_run_resumes_after_hdr_in_a_row(rows, draws):
    state = json.loads(json.dumps(hdr_in_a_row(rows, draws).draw_state()))
    resumed = Ledger(LimitsConfig(max_bad_fraction=0.01, bad_after=200))
    resumed.add_indexed(rows)
    resumed.add_planned(rows)
    resumed.restore_draws(state)
    resumed.check_limits()
    assert resumed.draw_state() == state
    del state["sources"]["0"]["left_out_in_a_row"]  # as a run of before wrote it
    resumed.restore_draws(state)
    assert resumed.sources[0].left_out_in_a_row == 0


def test_draws_of_version_0_1_stay_totals_and_are_of_no_source():
    ledger = two_sources()
    skip(ledger, 5, 1)
    ledger.restore_draws({"scheduled": 1000, "delivered": 100, "skipped": {"decode_error": 900}})
    assert (ledger.scheduled, ledger.delivered, ledger.skipped) == (1000, 100, {Reason.DECODE_ERROR: 900})
    ledger.limits = LimitsConfig(bad_after=1001)
    ledger.check_limits()
    diluted = two_sources()
    diluted.restore_draws({"scheduled": 300, "delivered": 296, "skipped": {"decode_error": 4}})
    diluted.schedule(400)
    diluted.deliver(400)
    diluted.check_limits()  # 4 of 700
    ledger.schedule(3, 1)
    ledger.deliver(3, 1)
    again = two_sources()
    again.restore_draws(json.loads(json.dumps(ledger.draw_state())))
    assert again.summary() == ledger.summary() and again.scheduled == 1003


def test_a_bad_sample_crosses_processes():
    error = pickle.loads(pickle.dumps(BadSample(Reason.NOT_MP4, "starts with b'<htm'", 7)))
    assert (error.reason, error.detail, error.offset) == (Reason.NOT_MP4, "starts with b'<htm'", 7)
