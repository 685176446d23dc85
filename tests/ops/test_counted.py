import pytest

from ops.counted import counted


@pytest.mark.parametrize(("number", "shown"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1024, "1,024 steps")])
def test_one_has_no_s(number: int, shown: str) -> None:
    assert counted(number, "step") == shown
