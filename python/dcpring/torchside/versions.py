"""Which torch this is, and how its private names are looked up.

A private name may be gone in another torch. A function that is gone is replaced by one that says so when it is called:
whoever does not need it is not stopped by it. What nothing works without is an error at the import.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
from collections.abc import Callable
from typing import Any

import torch

OLDEST, NEWEST_TESTED = (2, 9), (2, 15)
"""The versions of torch that dcpring supports: docs/versions.md says what was run."""


logger = logging.getLogger("dcpring")


class UnsupportedTorchError(ImportError, RuntimeError):
    """This torch lacks something that dcpring needs."""


found: dict[str, Any] = {}
"""Every private name that was looked up, by its full name, with what it is; None where this torch lacks it."""


def release(version: str) -> tuple[int, int]:
    """The first two numbers of a version: "2.15.0+cu132" is (2, 15)."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def is_tested(version: str) -> bool:
    """Whether a version of torch is one of those that are supported."""
    return OLDEST <= release(version) <= NEWEST_TESTED


tested = is_tested(torch.__version__)
"""Whether what dcpring knows of tensors holds for this torch; if not, it asks torch about each."""


def knows_torch() -> bool:
    """Whether this torch has been tested; said once in the log if not."""
    if not tested:
        say_once(
            logging.WARNING,
            f"torch {torch.__version__} is not one that dcpring has been tested with ({_text(OLDEST)} to "
            f"{_text(NEWEST_TESTED)}): saves and loads are planned by torch's own functions, which takes longer",
        )
    return tested


@functools.cache
def say_once(level: int, text: str) -> None:
    """Logs a text, the first time that it is said."""
    logger.log(level, text)


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
    """A private function of torch, as it is when it is called; where this torch lacks it, the call says so."""
    optional(module, name)
    home = _module(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        found = getattr(home, name, None)
        if found is None:
            raise lacks(f"{module}.{name}")
        return found(*args, **kwargs)

    return call
