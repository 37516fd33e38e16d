"""Which torch this is, and how its private names are looked up.

A private name may be gone in another torch. A function that is gone is replaced by one that says so when it is called:
whoever does not need it is not stopped by it. What nothing works without is an error at the import.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any, NoReturn

import torch

OLDEST, NEWEST_TESTED = (2, 9), (2, 15)
"""The versions of torch that dcpring supports: docs/versions.md says what was run."""


class UnsupportedTorchError(ImportError, RuntimeError):
    """This torch lacks something that dcpring needs."""


found: dict[str, Any] = {}
"""Every private name that was looked up, by its full name, with what it is; None where this torch lacks it."""


def release(version: str) -> tuple[int, int]:
    """The first two numbers of a version: "2.15.0+cu132" is (2, 15)."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def _text(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def lacks(name: str) -> UnsupportedTorchError:
    """The error for a name that this torch does not have."""
    return UnsupportedTorchError(
        f"dcpring needs {name}, which torch {torch.__version__} does not have; install torch {_text(OLDEST)} to "
        f"{_text(NEWEST_TESTED)}, or a dcpring that knows torch {torch.__version__}"
    )


def _module(path: str) -> Any:
    """A module by its dotted path, None where there is none. Parts of an extension are attributes of it only."""
    try:
        return importlib.import_module(path)
    except ImportError:
        parent, _, name = path.rpartition(".")
        return getattr(_module(parent), name, None) if parent else None


def optional(module: str, name: str, otherwise: Any = None) -> Any:
    """A private name of torch that not all versions have."""
    value = getattr(_module(module), name, None)
    found[f"{module}.{name}"] = value
    return otherwise if value is None else value


def required(module: str, name: str) -> Any:
    """A private name of torch without which nothing works."""
    value = optional(module, name)
    if value is None:
        raise lacks(f"{module}.{name}")
    return value


def function(module: str, name: str) -> Callable[..., Any]:
    """A private function of torch; where this torch lacks it, one that says so when it is called."""

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise lacks(f"{module}.{name}")

    looked_up: Callable[..., Any] = optional(module, name, missing)
    return looked_up
