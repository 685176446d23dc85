import pytest

from ops.counted import counted, first_of


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
