"""torch's storage and planners make dcpring's objects: their constructors are replaced, and nothing else.

A constructor that is called for exactly torch's class turns the object into dcpring's, which is a subclass, and
constructs that. For any other class it is torch's own constructor, so that subclasses stay what they are; unpickling
and copying call no constructor. No name of a module changes, so that it does not matter who has imported what, or when.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    QuantizedHuggingFaceStorageReader,
)
from torch.distributed.checkpoint.filesystem import SerializationFormat

from dcpring.base.arguments import unknown
from dcpring.integrations.install import Options
from dcpring.options import IO_NAMES

logger = logging.getLogger("dcpring")

PAIRS: dict[type, tuple[str, str]] = {
    FileSystemWriter: ("RingWriter", "writer"),
    FileSystemReader: ("RingReader", "reader"),
    HuggingFaceStorageReader: ("RingHFReader", "reader"),
    HuggingFaceStorageWriter: ("RingHFWriter", "writer"),
    QuantizedHuggingFaceStorageReader: ("RingQuantizedHFReader", "reader"),
    DefaultSavePlanner: ("RingSavePlanner", "save_planner"),
    DefaultLoadPlanner: ("RingLoadPlanner", "load_planner"),
}
"""torch's class, the name of ours, and which of the options are for it."""


@functools.cache
def ours() -> dict[type, Any]:
    """Our classes, for torch's. They are imported here, and not above: one of them may be what imports DCP."""
    from dcpring.hf.reader import RingHFReader, RingQuantizedHFReader
    from dcpring.hf.writer import RingHFWriter
    from dcpring.plan.load_planner import RingLoadPlanner
    from dcpring.plan.save_planner import RingSavePlanner
    from dcpring.store.reader import RingReader
    from dcpring.store.writer import RingWriter
    from dcpring.torchside import shim  # noqa: F401

    return {
        FileSystemWriter: RingWriter,
        FileSystemReader: RingReader,
        HuggingFaceStorageReader: RingHFReader,
        HuggingFaceStorageWriter: RingHFWriter,
        QuantizedHuggingFaceStorageReader: RingQuantizedHFReader,
        DefaultSavePlanner: RingSavePlanner,
        DefaultLoadPlanner: RingLoadPlanner,
    }


@functools.cache
def _taken() -> dict[type, frozenset[str]]:
    """The arguments that our classes take."""
    return {stock: frozenset(_arguments_of(one)) for stock, one in ours().items()}


def _arguments_of(kind: Any) -> Iterator[str]:
    for each in filter(_is_ours, kind.__mro__):
        parameters = inspect.signature(each.__init__).parameters
        yield from parameters
        if "io" in parameters:
            yield from IO_NAMES
        if not any(one.kind == one.VAR_KEYWORD and name != "io" for name, one in parameters.items()):
            return  # else the others are for the class above


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("dcpring.") and "__init__" in vars(kind)


@dataclass(frozen=True)
class _Constructor:
    """What a class had, and what it has instead; ``had`` is None where it inherited its constructor."""

    had: Any
    has: Any


_replaced: dict[type, _Constructor] = {}
_options: Options | None = None


def start(options: Options, *, is_loading: bool) -> None:
    """From now on torch's classes make dcpring's objects, with these options.

    Args:
        is_loading: a module of dcpring's is being imported, and has imported DCP; else all that the first save needs is
            imported now, and the options are checked.

    Raises:
        TypeError: options that a class does not have.
    """
    global _options
    if not is_loading:
        for kind in dict.fromkeys(kind for _, kind in PAIRS.values()):
            names = {stock: name for stock, (name, of_kind) in PAIRS.items() if of_kind == kind}
            known = frozenset().union(*(_taken()[stock] for stock in names)) - {"self", "io"}
            if wrong := unknown(getattr(options, kind), known, f"{next(iter(names.values()))}()"):
                raise TypeError(f"{kind}_options: {wrong}")
    _options = options
    if _replaced:
        return
    if not is_loading:
        _warn_of_background_process()
    for stock, (_, kind) in PAIRS.items():
        had = vars(stock).get("__init__")
        _replaced[stock] = _Constructor(had, _constructor(stock, kind))
        setattr(stock, "__init__", _replaced[stock].has)  # noqa: B010
    logger.info("%s", described())


def _warn_of_background_process() -> None:
    from dcpring.torchside.dcp import has_background_process

    if has_background_process():
        logger.warning(
            "async_save has started its background process before dcpring was installed: its saves go on with torch's "
            "classes until it ends. Call dcpring.install() before the first async_save"
        )


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


def tried_out() -> dict[str, bool]:
    """See ``install.tried_out``."""
    made = {stock: () if kind.endswith("planner") else (".",) for stock, (_, kind) in PAIRS.items()}
    return {stock.__name__: type(stock(*args)) is ours()[stock] for stock, args in made.items()}


def described() -> str:
    """What is replaced, in words."""
    assert _options is not None
    pairs = ", ".join(f"{name} for {stock.__name__}" for stock, (name, _) in PAIRS.items())
    trusted = _options.reader.get("trusted")
    objects = "are refused" if trusted is False else "load as with torch (dcpring.install(trusted=False) refuses them)"
    return f"dcpring is installed in torch {torch.__version__}: {pairs}. Objects whose loading could run code {objects}"


def _constructor(stock: Any, kind: str) -> Callable[..., None]:
    construct = stock.__init__
    parameters = inspect.signature(construct)

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
        reason = _not_taken(given, set(given) - _taken()[stock])
        if reason:
            from dcpring.torchside.versions import say_once

            say_once(logging.WARNING, f"{stock.__name__} with {reason} is torch's own, as dcpring does not take that")
            return construct(self, *args, **kwargs)
        self.__class__ = ours()[stock]
        chosen = {name: value for name, value in getattr(options, kind).items() if name in _taken()[stock]}
        try:
            self.__init__(**{**chosen, **given})
        except BaseException:
            self.__class__ = stock
            raise

    return __init__


def _not_taken(given: dict[str, Any], unknown: set[str]) -> str:
    """What of these arguments dcpring's class is not for; "" if it is for all."""
    from dcpring.store.layout import not_remote

    if unknown:
        return ", ".join(f"{name}=" for name in sorted(unknown))
    if given.get("save_distributed") and not given.get("enable_consolidation"):
        return "save_distributed=True and no consolidation, which leaves each rank's shards to the program,"
    form = given.get("serialization_format", SerializationFormat.TORCH_SAVE)
    if form != SerializationFormat.TORCH_SAVE:
        return f"serialization_format={form}"
    if "path" in given and not_remote(given["path"]):
        return f"a path of {os.fsdecode(given['path']).partition('://')[0]}://"
    return ""
