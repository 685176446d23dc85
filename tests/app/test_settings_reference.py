"""`heddle settings` and docs/all-settings.md say what every setting takes, its default and what it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner

from app.cli import app
from app.settings.config import RunConfig
from app.settings.reference import as_markdown, as_text, chosen, reference
from ops.typed import ConfigError, dotted_names

PAGE = Path(__file__).parents[2] / "docs" / "all-settings.md"
SECTIONS = reference(RunConfig)
# what needs no explanation, or has it at the setting before
PLAIN = {
    *(
        "num_layers",
        "num_heads",
        "head_dim",
        "ffn_dim",
        "out_channels",
        "patch",
        "eps",
        "rope_theta",
        "cross_attn_norm",
    ),
    *("d_model", "seed", "betas", "adam_eps"),
    *(
        "base",
        "max",
        "mean",
        "std",
        "frames",
        "height",
        "width",
        "decode_noise_scale",
        "name",
        "dir",
    ),
}


def test_the_page_is_what_the_settings_say() -> None:
    written = PAGE.read_text(encoding="utf-8")
    found = as_markdown(SECTIONS)
    assert written.endswith(f"{found}\n"), (
        "docs/all-settings.md is not what the settings say now. Write all after its first paragraph anew: "
        "heddle settings --markdown"
    )
    assert written.count("\n## ") == len(SECTIONS)


def test_every_setting_is_there_and_explained() -> None:
    names = {f"{one.name}.{setting.name}".lstrip(".") for one in SECTIONS for setting in one.settings}
    names |= {one.name for one in SECTIONS}
    all_of_them = set(dotted_names(RunConfig))
    measured = {name for name in all_of_them if name.startswith("model.dit.attention.")}  # written by a command
    lists = {name for name in all_of_them if f"{name}.N" in names}
    assert all_of_them - measured - lists <= names
    bare = {setting.name for one in SECTIONS for setting in one.settings if not setting.about}
    assert bare <= PLAIN, "say in a comment at its field what it does"


def test_a_section_has_all_below_it_and_a_setting_comes_alone() -> None:
    assert [one.name for one in chosen(SECTIONS, "train.flow")] == ["train.flow", "train.flow.token_shift"]
    (flow,) = chosen(SECTIONS, "logit_std")
    assert (flow.name, [one.name for one in flow.settings]) == ("train.flow", ["logit_std"])
    assert flow.settings[0].default == "1.0" and flow.settings[0].takes == "number"
    assert {one.name for one in chosen(SECTIONS, "attention")} == {"model.dit", "train.memory"}
    assert {one.name for one in chosen(SECTIONS, "flow_shift")} == {"train.flow", "sample"}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("data.sources.1.path", "data.sources.N"),
        ("sources", "data.sources.N"),
        ("max_train_steps", "train"),
        ("segments.0.batch", "data.segments.N.batch"),
        ("train.lr", "train.optimizer"),
        ("TRAIN.STEPS", "train"),
        ("num_repeats", "data.sources.N"),
    ],
)
def test_places_in_lists_last_words_and_names_of_others_are_understood(asked: str, found: str) -> None:
    first = chosen(SECTIONS, asked)[0]
    assert first.name == found and first.settings


def test_what_is_unknown_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"called logitmean; did you mean train\.flow\.logit_mean\?"):
        chosen(SECTIONS, "logitmean")
    with pytest.raises(ConfigError, match="heddle settings lists all"):
        chosen(SECTIONS, "qqqqq")
    with pytest.raises(ConfigError, match="lora_dropout is no setting here; LoRA is trained without dropout"):
        chosen(SECTIONS, "lora_dropout")
    with pytest.raises(ConfigError, match="resume is no setting here; it is the command line option --resume"):
        chosen(SECTIONS, "resume")


def test_a_family_is_asked_for_by_its_name() -> None:
    (mochi,) = chosen(SECTIONS, "mochi")
    assert [one.name for one in mochi.settings] == ["context_dim"]


def test_families_list_what_each_has_of_its_own() -> None:
    (cogvideox,) = [one for one in SECTIONS if one.when == "architecture: cogvideox"]
    names = {one.name for one in cogvideox.settings}
    assert "snr_shift" in names and "num_layers" not in names  # the second stands in model.dit, for all
    assert "eps" in names  # with another default


@dataclass(frozen=True, kw_only=True)
class Inner:
    """An inner one. And more.

    Not this.
    """

    size: tuple[int, int] = (1, 2)  # height and width


@dataclass(frozen=True, kw_only=True)
class Outer:
    """An outer one."""

    # Two lines
    # above it
    mode: Literal["a", "b"] = "a"

    plain: float | None = None
    shown: tuple[str, ...] = ()  # what | stands in a table
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None  # a second one


def test_comments_above_and_beside_a_field_are_its_explanation() -> None:
    assert as_text(reference(Outer), 40).splitlines() == [
        "the top level: An outer one.",
        "  mode = a   (a | b)",
        "      Two lines above it",
        "  plain = null   (number | null)",
        "  shown = []   (list of text)",
        "      what | stands in a table",
        "",
        "inner: An inner one. And more.",
        "  size = [1, 2]   ([whole number, whole number])",
        "      height and width",
        "",
        "maybe: An inner one. And more. A second one. Unset by default.",
        "  as inner",
    ]
    assert "| `shown` | list of text | `[]` | what \\| stands in a table |" in as_markdown(reference(Outer))


def test_the_command_prints_them() -> None:
    result = CliRunner().invoke(app, ["settings", "checkpoint.every"])
    assert result.exit_code == 0 and "steps from one checkpoint to the next" in result.output
    assert "keep_last" not in result.output
