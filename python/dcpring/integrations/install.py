"""``install()``: programs that use torch's own storage and planners get dcpring's, with not a line of theirs changed.

An installation is a set of options; the last one that has not ended counts. As long as there is one, the names of
torch's classes make dcpring's objects. ``stand_in`` does that; it is imported here, and imports nothing of this module.
Where torch.distributed.checkpoint has not been imported yet, it begins when that is, so that nothing here imports
torch. Processes that this one spawns get the installation with what else multiprocessing hands them; DCP's background
process is one of these. Programs that are started otherwise get it by ``DCPRING_INSTALL=1``, which is read when dcpring
is imported, and by a line in the wheel's .pth file before that.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import logging
import multiprocessing.process
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, Literal

from dcpring.base.pickling import pickles

__all__ = ["Installation", "install", "uninstall"]

logger = logging.getLogger("dcpring")

VARIABLE = "DCPRING_INSTALL"

_DCP = "torch.distributed.checkpoint"

_HANDED_ON = "dcpring"
"""The entry among what multiprocessing gives to each new process (a dict of CPython's, as its authentication key)."""


Options = Mapping[str, Mapping[str, Any]]
"""What the objects are made with, besides what the program gives, by kind ("writer", "reader", ...)."""


def portable(options: Options) -> Options:
    """Those that another process can be given; others, such as a lambda for ``progress``, stay in this one."""
    return {kind: {name: one for name, one in each.items() if pickles(one)} for kind, each in options.items()}


class Installation:
    """What ``install()`` returns: ``with dcpring.install(): ...`` ends it at the end of the block.

    Several may be there at a time: the options of the last one count, and torch has its own classes back when all have
    ended.
    """

    def __init__(self, options: Options) -> None:
        self.options = options

    @property
    def is_active(self) -> bool:
        """Whether it has not ended."""
        return self in _state.installations

    def uninstall(self) -> None:
        """Ends this installation; nothing happens if it has ended."""
        with _state.lock:
            if self in _state.installations:
                _state.installations.remove(self)
                _state.settle()

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.uninstall()


def install(
    *,
    trusted: bool | Literal["warn"] = "warn",
    writer_options: Mapping[str, Any] | None = None,
    reader_options: Mapping[str, Any] | None = None,
    save_planner_options: Mapping[str, Any] | None = None,
    load_planner_options: Mapping[str, Any] | None = None,
) -> Installation:
    """Makes every program part in this process that uses torch.distributed.checkpoint use dcpring.

    From now on ``FileSystemWriter(...)``, ``FileSystemReader(...)``, ``DefaultSavePlanner(...)`` and
    ``DefaultLoadPlanner(...)`` of torch make a ``RingWriter``, ``RingReader``, ``RingSavePlanner`` and
    ``RingLoadPlanner``, and ``HuggingFaceStorageReader(...)``, ``QuantizedHuggingFaceStorageReader(...)`` and
    ``HuggingFaceStorageWriter(...)`` a ``RingHFReader``, ``RingQuantizedHFReader`` and ``RingHFWriter``: in
    ``dcp.save``, ``dcp.load`` and ``dcp.async_save`` with ``checkpoint_id=``, in trainers, in processes that this one
    spawns. The names of the classes are bound anew, in torch's modules and in all that have imported them; the classes
    stay what they are: other subclasses of them (``FsspecWriter``, a program's own) are not touched, and ``isinstance``
    holds. What dcpring does not take (paths of object stores, ``serialization_format=SAFETENSORS``) goes to torch's
    class, which is said once in the log. A class that a program has put elsewhere before (an attribute, a default
    argument) stays torch's, and what was made of torch's classes before cannot be pickled until ``uninstall``.

    All ranks of a job call it, before their first save or load. Without a change of the program:
    ``python -m dcpring run train.py``, or ``DCPRING_INSTALL=1`` in its environment.

    Args:
        trusted: what a load does about objects, and metadata, that hold more than plain data. "warn" loads them as
            torch does, which may run code from the checkpoint, and logs their names; False refuses them; True says
            nothing.
        writer_options: for ``RingWriter`` and ``RingHFWriter``, of each those that it takes, besides what the program
            gives.
        reader_options: for ``RingReader``. ``casts`` is "any" here if not given, as torch has it.
        save_planner_options: for ``RingSavePlanner``.
        load_planner_options: for ``RingLoadPlanner``.

    Returns:
        The installation: a context manager, with ``uninstall()``.

    Raises:
        TypeError: an option that these classes do not have. Where torch.distributed.checkpoint has not been imported
            yet, that is logged as an error when it is, and torch's classes stay.
    """
    if trusted not in (True, False, "warn"):
        raise ValueError(f'trusted={trusted!r}: must be True, False or "warn"')
    writer = {"objects": "warn" if trusted is False else "allow"} | _mapping("writer_options", writer_options)
    reader = {"trusted": trusted, "casts": "any"} | _mapping("reader_options", reader_options)
    save_planner = _mapping("save_planner_options", save_planner_options)
    load_planner = _mapping("load_planner_options", load_planner_options)
    return _install({"writer": writer, "reader": reader, "save_planner": save_planner, "load_planner": load_planner})


def _mapping(name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(given, Mapping | None):
        raise TypeError(f"{name}={given!r}: must be a mapping, of names of arguments to what they are to be")
    return dict(given or {})


def _install(options: Options) -> Installation:
    made = Installation(options)
    with _state.lock:
        _state.installations.append(made)
        try:
            _state.settle()
        except BaseException:
            _state.installations.remove(made)
            _state.settle()
            raise
    return made


def uninstall() -> None:
    """Ends all installations: torch's classes make their own objects again. Those that were made stay what they are.

    A background process that ``dcp.async_save`` has started goes on with what it has until it ends.
    """
    with _state.lock:
        _state.installations.clear()
        _state.settle()


def current() -> Installation | None:
    """The installation that counts."""
    return _state.installations[-1] if _state.installations else None


def tried_out() -> dict[str, bool]:
    """torch's classes, and whether calls of them would make dcpring's objects now. Imports torch."""
    importlib.import_module(_DCP)
    if _state.stand_in is None:
        return {}
    found: dict[str, bool] = _state.stand_in.tried_out()
    return found


class _Installed:
    """What is installed in this process.

    Attributes:
        lock: guards all that follows; an import may call back into here.
        installations: those that have not ended, the one that counts last.
        finder: waits for the import of DCP.
        stand_in: the module that does the work, once DCP is there.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.installations: list[Installation] = []
        self.finder = _Finder()
        self.stand_in: Any = None

    def settle(self) -> None:
        """Makes the process as the installations want it."""
        if not self.installations:
            if self.finder in sys.meta_path:
                sys.meta_path.remove(self.finder)
            _config().pop(_HANDED_ON, None)
            if self.stand_in is not None:
                self.stand_in.stop()
            return
        options = self.installations[-1].options
        _config()[_HANDED_ON] = HandedOn(options)
        if is_imported(_DCP):
            self.begin(options)
        elif self.finder not in sys.meta_path:
            sys.meta_path.insert(0, self.finder)

    def begin(self, options: Options) -> None:
        is_loading = any(name.startswith("dcpring.") and not is_imported(name) for name in list(sys.modules))

        from dcpring.integrations import stand_in

        self.stand_in = stand_in
        stand_in.start(options, is_loading=is_loading)

    def dcp_is_there(self) -> None:
        """After the import of DCP, which must not fail because of us."""
        with self.lock:
            if self.finder in sys.meta_path:
                sys.meta_path.remove(self.finder)
            if not self.installations:
                return
            try:
                self.begin(self.installations[-1].options)
            except Exception as error:
                self.installations.clear()
                self.settle()
                logger.error("dcpring cannot be installed, and torch's own storage is used: %s", error)


def _config() -> dict[str, Any]:
    config: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    return config


def is_imported(name: str) -> bool:
    """Whether a module has been imported, to its end."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


class HandedOn:
    """Pickled for a process that is spawned, it installs there."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def __reduce__(self) -> tuple[Any, ...]:
        return _take_over, (portable(self.options),)


def _take_over(options: Options) -> HandedOn:
    """In a process that was spawned: installs what its parent had, unless it has done so itself."""
    if current() is None:
        _install(options)
    return HandedOn(options)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: has us told when DCP's package has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _DCP:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _call_after_loading(spec.loader, _state.dcp_is_there)
        return spec


def _call_after_loading(loader: Any, call: Any) -> None:
    load = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        load(module)
        call()

    loader.exec_module = exec_module


_state = _Installed()


def is_asked_for() -> bool:
    """Whether the environment asks for an installation."""
    return os.environ.get(VARIABLE, "0").strip().lower() not in ("", "0", "false", "no", "off")


def install_if_asked_for() -> None:
    """Called when dcpring is imported."""
    if is_asked_for() and current() is None:
        install()
