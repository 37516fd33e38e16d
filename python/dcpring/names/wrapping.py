"""What wrappers put into the names of a model's tensors, told by the types of its modules.

A *raw* name is one that ``model.state_dict()`` gives, and ``load_state_dict`` takes. A *canonical* name is the one that
the tensor would have if no module were wrapped. A *path* is the way through the modules' attributes; raw names differ
from it where a wrapper's own hooks take its part out (FSDP1, activation checkpointing).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from dcpring import _C
from dcpring.torchside import modules
from dcpring.torchside.tensors import local_tensor

__all__ = ["register_wrapper"]

_Node = tuple[str, int, int]
_ROOT: _Node = ("", 0, _C.KEY_PLAIN)


class Wrapper(NamedTuple):
    """How a type of module wraps another one.

    Attributes:
        attribute: the name of the child that is wrapped.
        hooked: the wrapper's own state-dict hooks keep that name out of raw names.
    """

    attribute: str
    hooked: bool


# By name, so that none of them has to be imported: without the import there is no instance to be found either.
_BY_NAME: dict[str, Wrapper] = {
    **{name: Wrapper(*wrapped) for name, wrapped in modules.WRAPPERS.items()},
    "peft.tuners.tuners_utils.BaseTunerLayer": Wrapper("base_layer", False),
}
_BY_TYPE: dict[type, Wrapper] = {}


def register_wrapper(cls: type[nn.Module], attribute: str, *, hooked: bool = False) -> None:
    """Makes names look through a type of wrapper: what it wraps is named as if it were not wrapped.

    Args:
        cls: the wrapper's class; subclasses count too.
        attribute: the name of the child module that it wraps. What else the wrapper owns keeps its name.
        hooked: the class has state-dict hooks that keep the attribute out of ``state_dict()`` already.

    Raises:
        TypeError: ``cls`` is not a class of modules.
        ValueError: the attribute cannot be a module's name, or the class is registered with another one.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"register_wrapper takes a class of nn.Module, not {cls!r}")
    if not attribute or "." in attribute:
        raise ValueError(f"{attribute!r} cannot be the name of a child of {cls.__qualname__}")
    wrapper = Wrapper(attribute, hooked)
    if _BY_TYPE.setdefault(cls, wrapper) != wrapper:
        raise ValueError(f"{cls.__qualname__} is registered already, as {_BY_TYPE[cls]}, not {wrapper}")
    _found.clear()


_found: weakref.WeakKeyDictionary[type, Wrapper | None] = weakref.WeakKeyDictionary()
"""What was found for each class; forgotten when one is registered."""


def _wrapper_of_type(cls: type) -> Wrapper | None:
    if cls not in _found:
        by_base = (_BY_TYPE.get(base) or _BY_NAME.get(f"{base.__module__}.{base.__qualname__}") for base in cls.__mro__)
        _found[cls] = next((wrapper for wrapper in by_base if wrapper), None)
    return _found[cls]


def wrapper_of(module: nn.Module) -> Wrapper | None:
    """How the module wraps another one, None when it does not."""
    wrapper = _wrapper_of_type(type(module))
    return wrapper if wrapper and modules.children(module).get(wrapper.attribute) is not None else None


class _NamesView(NamedTuple):
    """How a model is looked at.

    Attributes:
        modifiers: the method by which modules tell which children their hooks keep out of raw names
            (``StateDictOptions.dsd_fqn_modifiers``).
        cleared: wrappers that get hooks which keep their part out of raw names, see ``cleared_names``.
    """

    modifiers: str
    cleared: frozenset[nn.Module]


def _hidden_children(module: nn.Module, view: _NamesView) -> dict[str, bool]:
    """The children whose names are no part of canonical names, and whether raw names lack them too."""
    hidden: dict[str, bool] = {}
    modified = getattr(module, view.modifiers, None)
    if callable(modified):
        hidden |= {name: True for name in modified().values() if modules.children(module).get(name) is not None}
    if wrapper := wrapper_of(module):
        hidden[wrapper.attribute] = wrapper.hooked or module in view.cleared
    return hidden


def _below_hooks(module: nn.Module, below: bool = False) -> Iterator[nn.Module]:
    """Wrappers below a module with state-dict hooks, which its author wrote for the names of the plain model."""
    wrapper = wrapper_of(module)
    if wrapper is not None and not wrapper.hooked and below:
        yield module
    below = below or (wrapper is None and modules.has_state_dict_hooks(module))
    for child in modules.children(module).values():
        if child is not None:
            yield from _below_hooks(child, below)


def _take_out(attribute: str, module: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
    inner = f"{prefix}{attribute}."
    for key in [key for key in state if key.startswith(inner)]:
        name = prefix + key.removeprefix(inner)
        if name in state:
            raise ValueError(f"{key!r} and {name!r} would both be called {name!r}")
        state[name] = state.pop(key)


def _put_in(attribute: str, module: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
    own = {*_own_tensors(module), *modules.children(module)} - {attribute}
    for key in [key for key in state if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        if name.split(".", 1)[0] not in own:
            state[f"{prefix}{attribute}.{name}"] = state.pop(key)


@contextlib.contextmanager
def cleared_names(wrappers: Iterable[nn.Module]) -> Iterator[None]:
    """Meanwhile the wrappers keep their part out of raw names by hooks, as activation checkpointing always does.

    So the hooks of modules above them see the names that they were written for.
    """
    handles = []
    for module in wrappers:
        attribute = _wrapper_of_type(type(module)).attribute  # type: ignore[union-attr]
        handles.append(module.register_state_dict_post_hook(functools.partial(_take_out, attribute)))
        handles.append(module.register_load_state_dict_pre_hook(functools.partial(_put_in, attribute)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _renamed_parametrizations(module: nn.Module) -> list[str]:
    """The parametrized tensors that are still stored as they were before: one tensor each, put in unchanged.

    A parametrization with a ``right_inverse`` stores another tensor, in coordinates of its own.
    """
    lists = modules.children(module).get("parametrizations")
    if not isinstance(lists, nn.ModuleDict):
        return []
    return [
        name
        for name, chain in lists.items()
        if isinstance(chain, nn.utils.parametrize.ParametrizationList)
        and chain.is_tensor
        and not any(hasattr(step, "right_inverse") for step in chain)
    ]


def _own_tensors(module: nn.Module) -> list[str]:
    """Of the names in a module, those of tensors. FSDP1 keeps those that it has flattened as plain attributes."""
    plain = [name for name, value in vars(module).items() if isinstance(value, Tensor)]
    names = dict.fromkeys((*modules.parameters(module), *modules.buffers(module), *plain))
    return [*names, modules.EXTRA_STATE]


@dataclass
class _Branch:
    """A point of the tree that the core wants: what leads to hidden children, and what their owners own besides them.

    A module whose name is in no raw name shares the branch of the module that it is in.
    """

    kind: int = _C.KEY_PLAIN
    children: dict[str, _Branch] = field(default_factory=dict)

    def add(self, name: str, kind: int = _C.KEY_PLAIN) -> _Branch:
        return self.children.setdefault(name, _Branch(kind))

    def grow(self, module: nn.Module, view: _NamesView) -> bool:
        """Adds what is below a module, which this stands for; False when there is nothing worth listing."""
        hidden = _hidden_children(module, view)
        owns = any(not hooked for hooked in hidden.values())
        found = self._grow_parametrizations(module) or owns
        for name in _own_tensors(module) if owns else ():
            self.add(name)
        for name, child in modules.children(module).items():
            if child is None or name in hidden:
                continue
            branch = _Branch()
            if branch.grow(child, view) or owns:
                found = True
                self.add(name).merge(branch)
        for name, hooked in hidden.items():
            child = modules.children(module)[name]
            assert child is not None
            found |= (self if hooked else self.add(name, _C.KEY_WRAPPED)).grow(child, view)
        return found

    def merge(self, other: _Branch) -> None:
        for name, child in other.children.items():
            self.add(name, child.kind).merge(child)

    def _grow_parametrizations(self, module: nn.Module) -> bool:
        names = _renamed_parametrizations(module)
        for name in names:
            self.add("parametrizations").add(name).add("original", _C.KEY_ORIGINAL)
        return bool(names)

    def nodes(self) -> list[_Node]:
        """The branches as the core takes them, each behind the one that it is on."""
        nodes = [_ROOT]
        waiting = [(0, self)]
        while waiting:
            index, branch = waiting.pop()
            for name, child in branch.children.items():
                nodes.append((name, index, child.kind))
                waiting.append((len(nodes) - 1, child))
        return nodes


class NamedTensor(NamedTuple):
    """A tensor of a model, under one of its names.

    Attributes:
        path: through the modules' attributes.
        raw: as in ``state_dict()``.
        tensor: the parameter or buffer.
        shape: of the tensor, or of the part of a flat parameter (FSDP1) that has this name.
        chain: the types of the wrappers around it, outermost first.
    """

    path: str
    raw: str
    tensor: Tensor
    shape: tuple[int, ...]
    chain: tuple[str, ...]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _entries(
    module: nn.Module, view: _NamesView, path: str = "", raw: str = "", chain: tuple[str, ...] = ()
) -> Iterator[NamedTensor]:
    """The tensors that ``state_dict()`` shows, in its order; a flat parameter (FSDP1) as the parameters in it."""
    hidden = _hidden_children(module, view)
    for name, tensor in (*modules.parameters(module).items(), *modules.buffers(module).items()):
        if tensor is None or not modules.is_saved(module, name):
            continue
        for one, shape in modules.flat_parts(name, tensor):
            yield NamedTensor(_join(path, name), _join(raw, one), tensor, shape, chain)
    for name, child in modules.children(module).items():
        if child is None:
            continue
        inner = (*chain, type(module).__name__) if wrapper_of(module) and name in hidden else chain
        yield from _entries(child, view, _join(path, name), raw if hidden.get(name) else _join(raw, name), inner)


@dataclass
class ModelKeys:
    """The names of a model's tensors.

    Attributes:
        nodes: the tree of wrappers, for the core.
        entries: every name of every tensor.
        view: how they were found.
        names: the canonical name of each entry.
        slots: for each parameter or buffer the names that stand for it. A flat parameter (FSDP1) has several slots,
            one for each parameter in it; a slot has several names when tensors are tied.
    """

    nodes: list[_Node]
    entries: list[NamedTensor]
    view: _NamesView
    names: list[str] = field(init=False)
    slots: dict[Tensor, list[list[str]]] = field(init=False)

    def __post_init__(self) -> None:
        self.names = self.canonical([entry.raw for entry in self.entries])
        self.slots = {}
        for entry, name in zip(self.entries, self.names, strict=True):
            slots = self.slots.setdefault(entry.tensor, [])
            if slots and not modules.is_flat(entry.tensor):
                slots[0].append(name)
            else:
                slots.append([name])

    def canonical(self, raw: list[str]) -> list[str]:
        """Canonical names of raw ones.

        Raises:
            ValueError: two of them would be one; the message names both.
            TypeError: one is not a str.
        """
        return _C.canonical_keys(self.nodes, raw)

    def raw(self, canonical: list[str]) -> list[str]:
        """Raw names of canonical ones: what ``load_state_dict`` takes. Raises what ``canonical`` does."""
        return _C.raw_keys(self.nodes, canonical)


def model_keys(model: nn.Module, modifiers: str = "_fqn_modifiers") -> ModelKeys:
    """Walks through a model once. What FSDP2 has gathered is resharded, as ``state_dict()`` would do it.

    Args:
        model: any module.
        modifiers: the method by which modules tell which children their hooks keep out of raw names
            (``StateDictOptions.dsd_fqn_modifiers``).
    """
    modules.reshard(model)
    # FSDP1's own hooks look its parameters up by raw names: nothing may be renamed before them.
    has_fsdp1 = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    view = _NamesView(modifiers, frozenset(() if has_fsdp1 else _below_hooks(model)))
    root = _Branch()
    root.grow(model, view)
    return ModelKeys(root.nodes(), list(_entries(model, view)), view)


# ---- tensors that wrap tensors ----

_TENSOR_WRAPPERS = {
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": "_tensor",
}


def _inner_tensor(tensor: Tensor) -> Tensor | None:
    name = _TENSOR_WRAPPERS.get(f"{type(tensor).__module__}.{type(tensor).__qualname__}")
    return getattr(tensor, name) if name else None


def plain_tensor(value: object) -> object:
    """The same memory as a plain tensor, where a wrapper of tensors (float8 all-gather) holds it; else the value.

    Such a wrapper says how a weight is communicated, not what it is; a plain model has no use for it.
    """
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, torch.distributed.tensor.DTensor):
        local = local_tensor(value)
        inner = _inner_tensor(local)
        if inner is None:
            return value
        return torch.distributed.tensor.DTensor.from_local(
            inner, value.device_mesh, value.placements, run_check=False, shape=value.size(), stride=value.stride()
        )
    inner = _inner_tensor(value)
    return value if inner is None else inner
