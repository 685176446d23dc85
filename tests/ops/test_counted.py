import pytest

from ops.counted import by_numbers, counted, first_of


@pytest.mark.parametrize(("number", "shown"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1024, "1,024 steps")])
def test_one_has_no_s(number: int, shown: str) -> None:
    assert counted(number, "step") == shown


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ("", ""),
        ("a", "a"),
        ("abcd", "a, b, c, d"),
        ("abcde", "a, b, c, d and 1 more"),
        (["w"] * 1030, "w, w, w, w and 1,026 more"),
    ],
)
def test_of_many_names_the_first_are_listed(names: str | list[str], shown: str) -> None:
    assert first_of(list(names)) == shown


def test_names_stand_by_their_numbers() -> None:
    names = ["17x64x96", "1x64x96", "9x128x96", "9x64x96", "b2", "b10", "", "1"]
    assert sorted(names, key=by_numbers) == ["", "1", "1x64x96", "9x64x96", "9x128x96", "17x64x96", "b2", "b10"]
