"""torch's storage and planners make dcpring's objects: four constructors are replaced, and nothing else.

A constructor that is called for exactly torch's class turns the object into dcpring's, which is a subclass, and
constructs that. For any other class it is torch's own constructor, so that subclasses stay what they are; unpickling
and copying call no constructor. No name of a module changes, so that it does not matter who has imported what, or when.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.filesystem import SerializationFormat

from dcpring.integrations.install import Options
from dcpring.plan.load_planner import RingLoadPlanner
from dcpring.plan.save_planner import RingSavePlanner
from dcpring.store.layout import not_remote
from dcpring.store.reader import RingReader
from dcpring.store.writer import RingWriter
from dcpring.torchside.dcp import has_background_process
from dcpring.torchside.versions import say_once

logger = logging.getLogger("dcpring")

PAIRS: dict[type, tuple[type, str]] = {
    FileSystemWriter: (RingWriter, "writer"),
    FileSystemReader: (RingReader, "reader"),
    DefaultSavePlanner: (RingSavePlanner, "save_planner"),
    DefaultLoadPlanner: (RingLoadPlanner, "load_planner"),
}
"""torch's class, ours, and which of the options are for it."""


@dataclass(frozen=True)
class _Constructor:
    """What a class had, and what it has instead; ``had`` is None where it inherited its constructor."""

    had: Any
    has: Any


_replaced: dict[type, _Constructor] = {}
_options: Options | None = None


def start(options: Options) -> None:
    """From now on torch's classes make dcpring's objects, with these options.

    Raises:
        TypeError: options that a class does not have.
    """
    global _options
    for ours, kind in PAIRS.values():
        _check_options(ours, kind, getattr(options, kind))
    _options = options
    if _replaced:
        return
    if has_background_process():
        logger.warning(
            "async_save has started its background process before dcpring was installed: its saves go on with torch's "
            "classes until it ends. Call dcpring.install() before the first async_save"
        )
    for stock, (ours, kind) in PAIRS.items():
        had = vars(stock).get("__init__")
        _replaced[stock] = _Constructor(had, _constructor(stock, ours, kind))
        setattr(stock, "__init__", _replaced[stock].has)  # noqa: B010
    logger.info("%s", described())


def stop() -> None:
    """torch's classes make their own objects again."""
    global _options
    if not _replaced:
        return
    _options = None
    for stock, constructor in _replaced.items():
        if vars(stock).get("__init__") is not constructor.has:
            # Somebody has wrapped it since. What is wrapped only calls torch's now.
            logger.warning("the constructor of %s was replaced by others since install(), and is left", stock.__name__)
        elif constructor.had is None:
            delattr(stock, "__init__")
        else:
            setattr(stock, "__init__", constructor.had)  # noqa: B010
    _replaced.clear()
    logger.info("dcpring is uninstalled: torch %s uses its own storage and planners", torch.__version__)


def described() -> str:
    """What is replaced, in words."""
    assert _options is not None
    pairs = ", ".join(f"{ours.__name__} for {stock.__name__}" for stock, (ours, _) in PAIRS.items())
    trusted = _options.reader.get("trusted")
    objects = "are refused" if trusted is False else "load as with torch (dcpring.install(trusted=False) refuses them)"
    return f"dcpring is installed in torch {torch.__version__}: {pairs}. Objects whose loading could run code {objects}"


def _check_options(ours: type, kind: str, options: dict[str, Any]) -> None:
    known = set(inspect.signature(ours).parameters)
    wrong = sorted(set(options) - known)
    if wrong:
        raise TypeError(f"{kind}_options has {', '.join(map(repr, wrong))}, which {ours.__name__} does not take")


def _constructor(stock: Any, ours: Any, kind: str) -> Callable[..., None]:
    construct = stock.__init__
    parameters, taken = inspect.signature(construct), set(inspect.signature(ours).parameters)

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        options = _options
        if options is None or type(self) is not stock:
            return construct(self, *args, **kwargs)
        try:
            given = dict(parameters.bind(self, *args, **kwargs).arguments)
        except TypeError:
            return construct(self, *args, **kwargs)  # which says what is wrong
        given.pop("self")
        reason = _not_taken(given, set(given) - taken)
        if reason:
            say_once(logging.WARNING, f"{stock.__name__} with {reason} is torch's own, as dcpring does not take that")
            return construct(self, *args, **kwargs)
        self.__class__ = ours
        try:
            ours.__init__(self, **{**getattr(options, kind), **given})
        except BaseException:
            self.__class__ = stock
            raise

    return __init__


def _not_taken(given: dict[str, Any], unknown: set[str]) -> str:
    """What of these arguments dcpring's class is not for; "" if it is for all."""
    if unknown:
        return ", ".join(f"{name}=" for name in sorted(unknown))
    form = given.get("serialization_format", SerializationFormat.TORCH_SAVE)
    if form != SerializationFormat.TORCH_SAVE:
        return f"serialization_format={form}"
    if "path" in given and not_remote(given["path"]):
        return f"a path of {os.fsdecode(given['path']).partition('://')[0]}://"
    return ""
