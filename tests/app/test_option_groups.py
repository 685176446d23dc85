"""Options in groups are options of the command itself, in the place of their group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from app.settings.option_groups import in_groups


@dataclass(frozen=True, kw_only=True)
class Size:
    height: Annotated[int, typer.Option(help="Pixels.")]
    width: Annotated[int, typer.Option("--wide", help="Pixels.", min=1)] = 8


@in_groups
def draw(
    *, colour: str = "red", size: Size, sharp: Annotated[bool, typer.Option(help="Without blur.")] = False
) -> None:
    """Draw it."""
    print(colour, size.height, size.width, sharp)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--height 4", "red 4 8 False\n"),
        ("--sharp --wide 2 --height 4 --colour blue", "blue 4 2 True\n"),
        ("", "Missing option '--height'"),
        ("--height 4 --wide 0", "Invalid value for '--wide'"),
    ],
)
def test_a_command_takes_the_fields_of_its_groups(words: str, said: str) -> None:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(draw)
    assert said in CliRunner().invoke(app, words.split()).output


def test_options_are_shown_in_the_order_of_the_command() -> None:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(draw)
    shown = CliRunner().invoke(app, ["--help"]).output
    places = [shown.index(word) for word in ("Draw it.", "--colour", "--height", "--wide", "--sharp")]
    assert places == sorted(places)


def test_a_command_is_called_with_its_options_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    draw(height=2, sharp=True)
    assert capsys.readouterr().out == "red 2 8 True\n"
