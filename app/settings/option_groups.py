"""Options of a command in groups: a dataclass has those that belong together, with what is checked and made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def in_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it and tests call it: where it takes a dataclass, each field of that is an option of
    its own, in its place.

        @dataclass(frozen=True, kw_only=True)
        class Size:
            height: Annotated[int, typer.Option(help="Pixels.")] = 256
            width: Annotated[int, typer.Option(help="Pixels.")] = 256

        @in_groups
        def draw(*, size: Size, out: Path | None = None) -> None: ...     # draw --height 64 --out PATH

    The command takes keyword arguments only, and no group has the name of an option. A field without a default must be
    given.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = [name for name, hint in hints.items() if is_dataclass(hint)]
    options: list[Parameter] = []
    for one in signature(command).parameters.values():
        if one.name in groups:
            options += _options_of(hints[one.name])
        else:
            options.append(one.replace(annotation=hints[one.name]))

    @wraps(command)
    def grouped(**given: object) -> None:
        for name in groups:
            own = [field.name for field in fields(hints[name]) if field.name in given]
            given[name] = hints[name](**{option: given.pop(option) for option in own})
        command(**given)

    setattr(grouped, "__signature__", Signature(options))  # noqa: B010
    grouped.__annotations__ = {one.name: one.annotation for one in options}
    return grouped


def _options_of(group: type[DataclassInstance]) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
