"""What users give by name: what is mistyped is refused in the words of whoever was called, and objects show theirs."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

Init = TypeVar("Init", bound=Callable[..., None])


def unknown(given: Iterable[str], known: Collection[str], called: str) -> str:
    """Of names those that are not known, with what may have been meant; "" where all are.

    Args:
        called: what was called with them: "RingWriter()".
    """
    wrong = sorted(set(given).difference(known))
    if not wrong:
        return ""
    close = difflib.get_close_matches(wrong[0], sorted(known), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    more = f", nor {', '.join(map(repr, wrong[1:]))}" if wrong[1:] else ""
    return f"{called} has no argument {wrong[0]!r}{more}{hint}"


def checks_names(*more: str) -> Callable[[Init], Init]:
    """For an ``__init__``: TypeError for an argument that it does not have, of the class that was called.

    Args:
        more: names that its ``**io`` takes. One that hands all others on to the class above has no need of this.
    """

    def checked(init: Init) -> Init:
        known = {*list(inspect.signature(init).parameters)[1:], *more} - {"io"}

        @functools.wraps(init)
        def __init__(self: object, *args: Any, **options: Any) -> None:
            if not options.keys() <= known:
                raise TypeError(unknown(options, known, f"{type(self).__name__}()"))
            init(self, *args, **options)

        return __init__  # type: ignore[return-value]

    return checked


def strings(given: str | Iterable[str], name: str) -> tuple[str, ...]:
    """An argument that takes several strings; one alone is one of these, and not its letters.

    Raises:
        TypeError: something else is among them.
    """
    found = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(each, str) for each in found):
        raise TypeError(f"{name}={given!r}: must be a string, or a list of strings")
    return found


def shown(one: object, *first: object, **options: Any) -> str:
    """The ``repr`` of an object: the call that makes one such.

    Args:
        first: what always stands there.
        options: what stands there unless it is the default.
    """
    made = [vars(kind)["__init__"] for kind in reversed(type(one).__mro__) if "__init__" in vars(kind)]
    defaults = {name: each.default for init in made for name, each in inspect.signature(init).parameters.items()}
    named = [
        f"{name}={value!r}" for name, value in options.items() if value != defaults.get(name, inspect.Parameter.empty)
    ]
    return f"{type(one).__name__}({', '.join([*map(repr, first), *named])})"
