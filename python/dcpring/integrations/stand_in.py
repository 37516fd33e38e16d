"""torch's names for its storage and planners stand for classes that make dcpring's objects.

Such a stand-in is a subclass of torch's class, and passes for it: what is an instance or a subclass of torch's class is
one of the stand-in, and a subclass that a program makes of it is constructed as torch constructs it. Only a call of the
stand-in itself makes an object of dcpring's. The names are bound anew in all modules that have imported them, torch's
own included, and get torch's classes back at the end; nothing is changed in the classes.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
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

Options = Mapping[str, Mapping[str, Any]]
"""What the objects are made with, besides what the program gives, by kind ("writer", "reader", ...)."""


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


class StandIn(type(FileSystemWriter)):  # type: ignore[misc]  # the types of the others are that, or above it
    """The type of the stand-ins, and so of the subclasses that programs make of them."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        stock = _stock_of.get(cls)
        if stock is None:
            return super().__call__(*args, **kwargs)
        chosen = _arguments(stock, args, kwargs)
        return super().__call__(*args, **kwargs) if chosen is None else ours()[stock](**chosen)

    def __instancecheck__(cls, instance: Any) -> bool:
        stock = _stock_of.get(cls)
        return super().__instancecheck__(instance) if stock is None else isinstance(instance, stock)

    def __subclasscheck__(cls, subclass: type) -> bool:
        stock = _stock_of.get(cls)
        return super().__subclasscheck__(subclass) if stock is None else issubclass(subclass, stock)

    @property
    def __signature__(cls) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def _stand_in(stock: type) -> StandIn:
    words = {name: getattr(stock, name) for name in ("__module__", "__qualname__", "__doc__")}
    return StandIn(stock.__name__, (stock,), words)


_stand_ins = {stock: _stand_in(stock) for stock in PAIRS}
_stock_of: dict[type, type] = {stand_in: stock for stock, stand_in in _stand_ins.items()}
_options: Options | None = None


def _bind(classes: Mapping[Any, type]) -> None:
    """Binds the names of some classes to others, in all modules but dcpring's."""
    by_id = {id(before): after for before, after in classes.items()}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] == "dcpring":
            continue
        found = {at: by_id[id(value)] for at, value in list(vars(module).items()) if id(value) in by_id}
        vars(module).update(found)


def start(options: Options, *, is_loading: bool) -> None:
    """From now on torch's names make dcpring's objects, with these options.

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
            if wrong := unknown(options[kind], known, f"{next(iter(names.values()))}()"):
                raise TypeError(f"{kind}_options: {wrong}")
    before, _options = _options, options
    if before is not None:
        return
    if not is_loading:
        _warn_of_background_process()
    _bind(_stand_ins)
    logger.info("%s", described())


def _warn_of_background_process() -> None:
    from dcpring.torchside.dcp import has_background_process

    if has_background_process():
        logger.warning(
            "async_save has started its background process before dcpring was installed: its saves go on with torch's "
            "classes until it ends. Call dcpring.install() before the first async_save"
        )


def stop() -> None:
    """torch's names are those of torch's classes again."""
    global _options
    if _options is None:
        return
    _options = None
    _bind(_stock_of)
    logger.info("dcpring is uninstalled: torch %s uses its own storage and planners", torch.__version__)


def tried_out() -> dict[str, bool]:
    """torch's classes by name, and whether a call of that name would make an object of dcpring's now."""
    made = {stock: () if kind.endswith("planner") else (".",) for stock, (_, kind) in PAIRS.items()}
    named = {stock: getattr(torch.distributed.checkpoint, stock.__name__) for stock in PAIRS}
    return {stock.__name__: type(named[stock](*args)) is ours()[stock] for stock, args in made.items()}


def described() -> str:
    """What is replaced, in words."""
    assert _options is not None
    pairs = ", ".join(f"{name} for {stock.__name__}" for stock, (name, _) in PAIRS.items())
    trusted = _options["reader"].get("trusted")
    objects = "are refused" if trusted is False else "load as with torch (dcpring.install(trusted=False) refuses them)"
    return f"dcpring is installed in torch {torch.__version__}: {pairs}. Objects whose loading could run code {objects}"


def _arguments(stock: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """What our class is made with in place of torch's; None where torch's own is to be made."""
    if _options is None:  # a program has kept the stand-in
        return None
    try:
        given = dict(inspect.signature(stock).bind(*args, **kwargs).arguments)
    except TypeError:
        return None  # torch's constructor says what is wrong
    reason = _not_taken(given, set(given) - _taken()[stock])
    if reason:
        from dcpring.torchside.versions import say_once

        say_once(logging.WARNING, f"{stock.__name__} with {reason} is torch's own, as dcpring does not take that")
        return None
    options = _options[PAIRS[stock][1]]
    return {**{name: value for name, value in options.items() if name in _taken()[stock]}, **given}


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
