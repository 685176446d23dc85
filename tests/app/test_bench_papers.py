import importlib
import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer

from app.bench.gpu.longest import largest
from app.bench.gpu.measurement import Place
from app.bench.papers import adaptiveload, arachne, contents, knapformer, scalefusion
from app.bench.papers.contents import choose, reproductions, show, summary
from app.bench.papers.figure import PublishedFigure, Reproduction, ShownFigure, papers, read_paper
from app.bench.papers.losses import losses_by_batches
from app.bench.papers.page import html, markdown, pairs, ratio_of
from app.drawing.svg import LONGEST
from ops.typed import ConfigError


def test_every_figure_is_made_or_says_why_not() -> None:
    for name, paper in papers().items():
        known = reproductions(paper)
        ids = [figure.id for figure in paper.figures]
        assert len(set(ids)) == len(ids)
        assert set(known) <= set(ids), f"{name} makes figures that its data file does not have"
        for figure in paper.figures:
            assert figure.source and figure.title and figure.unit, figure.id
            wants_gpu = figure.id in ("table1", "table2")  # made where there is one, else `open` says so
            assert (figure.id in known) != bool(figure.open) or wants_gpu, f"{name} {figure.id}"


def test_every_paper_has_a_file_of_its_name() -> None:
    for name in papers():
        assert importlib.import_module(f"app.bench.papers.{name}").FIGURES


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(typer.BadParameter, match="'archne' is none of adaptiveload, arachne, knapformer, scalefusion"):
        choose(papers(), "archne", None)
    with pytest.raises(typer.BadParameter, match="arachne has no 'fig99'; it has fig1b, fig2"):
        choose(papers(), "arachne", "fig99")
    with pytest.raises(typer.BadParameter, match="Give --paper as well"):
        choose(papers(), None, "fig9")


def test_help_names_every_paper_and_every_id() -> None:
    options = inspect.get_annotations(contents.run, eval_str=True)
    paper_help, figure_help = (options[name].__metadata__[0].help for name in ("paper", "figure"))
    for name, paper in papers().items():
        assert name in paper_help
        assert f"of {name} {', '.join(figure.id for figure in paper.figures)}" in figure_help


def test_a_file_that_is_no_paper_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("paper: x\nfigures: [{id: a, titel: b}]\n")
    with pytest.raises(ConfigError, match="is not a data file of a paper"):
        read_paper(path)


def test_a_published_value_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("paper: x\nfigures: [{id: a, title: t, source: s, unit: u, published: {longest, 113 frames: 5}}]\n")
    with pytest.raises(ConfigError, match="'longest' is published as None, not a number"):
        read_paper(path)


# Arachne


def test_the_case_study_is_that_of_the_paper() -> None:
    static, flexsp, ours = (reproductions(papers()["arachne"])[name](True) for name in ("fig1b", "fig3", "fig9"))
    assert static is not None and flexsp is not None and ours is not None
    assert set(static.ours) == set(papers()["arachne"].figures[0].published)
    longest, shortest, idle = static.ours.values()
    assert longest == pytest.approx(shortest + idle)
    assert ours.ours["step, proven optimum"] - 1e-6 <= ours.ours["step"] < 31.4  # Figure 9
    assert ours.ours["step"] < flexsp.ours["step"] <= longest


def test_a_step_is_longest_without_any_rule_of_the_mapper() -> None:
    found = arachne.table3(True).ours
    assert set(found) == set(next(f for f in papers()["arachne"].figures if f.id == "table3").published)
    assert found["without the mapper"] > 1.0
    assert found["without the mapper"] >= max(found.values()) - 0.05  # each plan is a short search of its own


# KnapFormer


def test_the_replay_meets_the_printed_imbalance() -> None:
    printed = next(f for f in papers()["knapformer"].figures if f.id == "table1-wir").published
    for scenario in ("low-res", "mixed-res"):
        kept = knapformer.unbalanced(scenario, 8)
        replayed = sum(max(work) / min(work) for work in kept) / len(kept)
        assert replayed == pytest.approx(printed[f"{scenario} none"], rel=0.03)


def test_printed_seconds_tokens_and_utilisation_are_of_one_step() -> None:
    figures = {figure.id: figure.published for figure in papers()["knapformer"].figures}
    for label, taken in figures["table1-fbl"].items():
        lengths = knapformer.drawn(label.split()[0], 8)
        tokens, flops = (sum(map(sum, per)) / len(lengths) for per in (lengths, map(knapformer.flops_of, lengths)))
        assert figures["table1-tps"][label] * 1e3 * taken == pytest.approx(tokens, rel=0.02)
        assert figures["table1-hfu"][label] == pytest.approx(knapformer.utilisation(flops, taken), rel=0.02)


@pytest.mark.long
def test_our_balance_is_never_worse_than_their_rule() -> None:
    taken, printed = knapformer.seconds(True), knapformer.published_s()
    for label in printed:
        if not label.endswith("none"):
            assert taken[label] <= taken[f"{label}, their rule"] * (1 + 1e-9)
    assert taken["mixed-res mixed bags"] < min(taken[f"mixed-res {one}"] for one in ("g1n32", "g2n16", "g4n8", "g8n4"))


@pytest.mark.long
def test_modelled_seconds_without_a_balancer_are_close_to_the_printed_ones() -> None:
    taken, printed = knapformer.seconds(True), knapformer.published_s()
    for scenario in ("low-res", "mixed-res"):  # one rate for both, whose steps differ by half
        assert taken[f"{scenario} none"] == pytest.approx(printed[f"{scenario} none"], rel=0.03)
    assert taken["video none"] == pytest.approx(8.2, rel=0.05)  # 264 TFLOP/s on the busiest GPU's work
    assert "misses its printed seconds by up to 1" in knapformer.note_of(True)


def test_mixtures_of_bags_take_every_gpu_once() -> None:
    found = knapformer.topologies()
    assert len(set(found)) == len(found) == 165  # solutions of a + 2 b + 4 c + 8 d = 32
    assert all(sum(knapformer.parse_topology(one, knapformer.GPUS)) == knapformer.GPUS for one in found)


# AdaptiveLoad


def test_the_dual_constraint_bounds_memory_and_work() -> None:
    memory, compute = adaptiveload.stage2_limits()
    for tokens in adaptiveload.buckets():
        equal, dual = adaptiveload.batch(tokens, False), adaptiveload.batch(tokens, True)
        assert 1 <= dual <= equal and equal * tokens <= memory
        assert dual == 1 or dual * adaptiveload.work(tokens) <= compute
    assert any(adaptiveload.batch(s, True) < adaptiveload.batch(s, False) for s in adaptiveload.buckets())


def test_the_dual_constraint_evens_out_steps() -> None:
    found = adaptiveload.fig6(True).ours
    for gpus in (8, 16):
        assert found[f"{gpus} GPUs, dual constraint"] < found[f"{gpus} GPUs, equal tokens"]
    assert adaptiveload.rate(8, True, True) > adaptiveload.rate(8, False, True)


def test_fused_speeds_have_a_ratio_for_each_length_and_side() -> None:
    found = adaptiveload.fused_speed("cpu", {"64": 64, "128": 128}, 32, repeats=3)
    assert list(found) == ["64 forward", "64 backward", "128 forward", "128 backward"]
    assert all(value > 0 for value in found.values())


@pytest.mark.long
def test_a_step_follows_its_load_and_not_its_tokens() -> None:
    found = adaptiveload.correlation(True).ours
    assert found["with B S^p"] > found["with tokens"] + 0.3 and found["with B S^p"] > 0.7
    assert set(found) == set(next(f for f in papers()["adaptiveload"].figures if f.id == "correlation").published)


def test_both_sizes_of_batches_begin_with_the_same_weights_and_other_clips() -> None:
    found = losses_by_batches(2, clips=24)
    equal, dual = found["equal tokens"], found["dual constraint"]
    assert len(equal) == len(dual) == 2 and equal != dual
    assert dual[0] == pytest.approx(equal[0], rel=0.2)


def test_longest_is_the_last_that_fits() -> None:
    for most, limit in ((240, 33), (240, 0), (8, 100), (7, 7), (240, 1)):
        asked: list[int] = []

        def fits(frames: int, limit: int = limit, asked: list[int] = asked) -> bool:
            asked.append(frames)
            return frames <= limit

        assert largest(fits, most) == min(limit, most)
        assert len(asked) == len(set(asked)) < 16 and max(asked) <= most


def test_table_1_has_the_labels_of_the_paper() -> None:
    found = adaptiveload.with_and_without_fusion(Place(device=torch.device("cpu"), rehearse=True))
    figure = next(f for f in papers()["adaptiveload"].figures if f.id == "table1")
    assert set(figure.published) <= set(found)
    assert found["step, unfused / fused"] == found["step, unfused"] / found["step, fused"]
    assert found["longest, fused / unfused"] == 1.0  # a rehearsal has memory for all that it tries


# ScaleFusion


def test_speed_ups_are_those_of_the_simulated_seconds() -> None:
    found = scalefusion.fig9(True).ours
    assert found["4 machines"] > 1.0 and found["parts under the layer before"] > 1.0
    assert scalefusion.scaling(True).ours["4 machines"] > scalefusion.scaling(True).ours["2 machines"] > 1.0


def test_more_slices_leave_less_all_to_all_up_to_the_paper_s_four() -> None:
    left = scalefusion.fig10(True).ours
    assert left["1 slice"] == 1.0
    assert left["1 slice"] > left["2 slices"] > left["4 slices"] >= 0.25


# the page


def shown(found: Reproduction | None, **published: float) -> ShownFigure:
    figure = PublishedFigure(
        id="fig1",
        title="a <b>",
        source="Section 1",
        unit="s",
        better="less",
        published=published,
        open="" if found else "no data",
    )
    return ShownFigure(paper="arachne", figure=figure, found=found)


def test_slices_take_less_memory_than_whole_layers_and_than_ulysses() -> None:
    found = scalefusion.memory(True).ours
    assert 1 < found["of DSP"] < found["of DSP, without weights"]
    assert 1 < found["of Ulysses"] < found["of Ulysses, without weights"]


def test_the_page_says_how_and_with_which_command() -> None:
    found = Reproduction(
        way="simulation",
        ours={"a": 2.0, "own": 1.0},
        note="why",
        series={"curve": ((0.0, 1.0), (1.0, 2.0))},
        x_name="n",
    )
    sections = [shown(found, a=4.0), shown(None, b=1.0)]
    text = html([papers()["arachne"]], sections, "2 cores")
    assert "a &lt;b&gt;" in text and "<b>" not in text.split("</nav>")[1].split("<svg")[0].replace("</b>", "")
    assert "heddle bench papers --paper arachne --figure fig1" in text
    assert "simulation" in text and "not run here" in text and "no data" in text
    assert text.count('class="ours"') == 2 and text.count('class="theirs"') == 2
    assert text.count("<td>0.50</td>") == 2 and "s, less is better" in text
    plain = markdown([papers()["arachne"]], sections, "2 cores")
    assert "| a | 4 | 2 | 0.50 |" in plain and "| own | - | 1 | - |" in plain and "Not run here. no data" in plain


def test_the_overview_shows_the_headline_of_a_figure() -> None:
    found = Reproduction(way="simulation", ours={"a": 2.0, "b": 3.0})
    plain = shown(found, a=4.0, b=4.0, c=1.0)
    named = replace(plain, figure=replace(plain.figure, headline="b"))
    assert plain.headline() == ("a", 4.0, 2.0) and named.headline() == ("b", 4.0, 3.0)
    assert shown(found, c=1.0).headline() is None and shown(None, a=1.0).headline() is None


def test_bars_are_as_long_as_their_values() -> None:
    drawn = pairs([("a", 4.0, 2.0), ("b", None, 1.0), ("c", None, 0.0)])
    widths = [float(width) for width in re.findall(r'<rect .*? width="([\d.]+)%"', drawn)]
    assert widths == [LONGEST, LONGEST / 2, LONGEST / 4, 0.1]
    assert 'class="grid"' not in drawn


def test_negative_bars_end_where_the_others_begin() -> None:
    drawn = pairs([("tokens", 0.25, -0.75), ("work", 0.25, 0.0)])
    (line,) = re.findall(r'class="grid" x1="([\d.]+)%"', drawn)
    bars = [(float(x), float(width)) for x, width in re.findall(r'<rect .*? x="([\d.]+)%" .*?width="([\d.]+)%"', drawn)]
    assert bars[1] == (0.0, 0.75 * LONGEST) and float(line) == 0.75 * LONGEST
    assert {x for x, _ in (bars[0], *bars[2:])} == {float(line)}


def test_seconds_and_tokens_have_a_scale_each() -> None:
    figure = next(f for f in papers()["adaptiveload"].figures if f.id == "table1")
    shown = ShownFigure(paper="adaptiveload", figure=figure, found=None)
    together = {unit: [label for label, _, _ in rows] for unit, rows in shown.rows_by_unit().items()}
    assert together["tokens"] == ["longest sequence, unfused", "longest sequence, fused"]
    assert together["s / step"] == ["step, unfused", "step, fused"]
    drawn = html([papers()["adaptiveload"]], [shown], "here")
    # by seconds of 62 the tokens would leave the bar of a step a pixel
    assert f'width="{LONGEST:.2f}%"' in pairs(shown.rows_by_unit()["s / step"]) and drawn.count("<svg") == 3


def test_a_ratio_needs_both_sides() -> None:
    assert [ratio_of(None, 1.0), ratio_of(2.0, None), ratio_of(2.0, 1.0)] == ["-", "-", "0.50"]


def test_the_command_writes_both_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents.run(paper="scalefusion", figure=None, quick=True, out=tmp_path / "page")
    said = capsys.readouterr().out
    assert "scalefusion fig9" in said and "ratio" in said and "memory" in said
    page = (tmp_path / "page" / "papers.html").read_text(encoding="utf-8")
    assert len(page) > 5000
    assert "--paper scalefusion --figure fig9 --quick</code>" in page  # the command beneath makes what stands above it
    assert "### fig10" in (tmp_path / "page" / "papers.md").read_text()


def test_a_line_is_printed_for_each_number() -> None:
    figure = papers()["scalefusion"].figures[0]
    made = show("scalefusion", figure, scalefusion.fig9, True)
    assert summary(made).count("\n") == len(made.rows())
