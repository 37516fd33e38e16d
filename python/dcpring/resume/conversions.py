"""What transformers says of how a model's tensors are stored: under other names, one by one where the model fuses them.

``from_pretrained`` of transformers 5 goes by a table of conversions for each kind of model, and ``save_pretrained`` by
its reverse. Here these become rules (``plan.rearrange``) and names. A conversion that is more than a rearrangement is
left out: then names do not match, and the error says which.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from dcpring.plan.rearrange import Rearrange


class Conversion(NamedTuple):
    """How a model is stored.

    Attributes:
        rules: from the model's tensors to stored ones.
        to_model: from stored names to those that the rules make; None where they are the same.
        to_stored: the reverse.
    """

    rules: Sequence[Rearrange] = ()
    to_model: Callable[[str], str] | None = None
    to_stored: Callable[[str], str] | None = None


def conversion_of(model: nn.Module, state: Mapping[str, Any]) -> Conversion:
    """How transformers stores a model; if it is none of its own, as it is.

    Args:
        state: its tensors by their names.
    """
    library = sys.modules.get("transformers")
    mapping = getattr(sys.modules.get("transformers.conversion_mapping"), "get_model_conversion_mapping", None)
    if library is None or mapping is None:
        return Conversion()
    own = next((module for module in model.modules() if isinstance(module, library.PreTrainedModel)), None)
    if own is None:
        return Conversion()
    known = mapping(own, add_legacy=False)
    reverse = [each.reverse_transform() for each in reversed(known)]
    renaming = [each for each in mapping(own) if not hasattr(each, "operations")]
    reverse_renaming = [each for each in reverse if not hasattr(each, "operations")]
    converters = [(each, each.reverse_transform()) for each in known if hasattr(each, "operations")]
    return Conversion(
        [*_rules(converters, {name: one for name, one in state.items() if isinstance(one, Tensor)})],
        _renamed_by(renaming),
        _renamed_by(reverse_renaming),
    )


def _renamed_by(transforms: Sequence[Any]) -> Callable[[str], str] | None:
    def renamed(name: str) -> str:
        for transform in transforms:
            name = transform.rename_source_key(name)[0]
        return name

    return renamed if transforms else None


def _rules(converters: Iterable[tuple[Any, Any]], tensors: Mapping[str, Tensor]) -> Iterable[Rearrange]:
    """The rules of all converters, which go by the names of the model."""
    done: set[str] = set()
    for converter, reverse in converters:
        found: dict[str, list[str]] = {}
        for name in tensors:
            stored, pattern = reverse.rename_source_key(name)
            if pattern is not None and name not in done:
                found.setdefault(stored, []).append(name)
                done.add(name)
        operations = [(type(each).__name__, each) for each in converter.operations]
        for stored, names in found.items():
            rule = _rule(reverse, operations, stored, names, tensors[names[0]].dim())
            if rule is not None:
                yield rule


def _rule(
    reverse: Any, operations: Sequence[tuple[str, Any]], stored: str, names: Sequence[str], ndim: int
) -> Rearrange | None:
    """The rule of a converter for some tensors; None if it does more than to rearrange them.

    Args:
        reverse: the converter, the other way round.
        operations: what it does to stored tensors, by name.
        stored: the name of the stored tensor, or of the first; with * for the number of one in a list.
        names: of the model's tensors.
        ndim: how many dimensions these have.
    """
    sources, targets = reverse.target_patterns, reverse.source_patterns
    if len(names) != len(targets) or (len(sources) > 1 and len(targets) > 1):
        return None
    model: list[list[str]] = [[f"d{number}"] for number in range(ndim)]
    there = [list(dim) for dim in model]
    for kind, each in reversed(operations):  # from the model's dimensions to those that are stored
        if kind == "Transpose" and not each.check_dims:
            there[each.dim0], there[each.dim1] = there[each.dim1], there[each.dim0]
            continue
        if kind not in ("Chunk", "Concatenate", "MergeModulelist") or getattr(each, "num_shards_attribute", None):
            return None
        dim = there[each.dim]
        if kind == "Chunk":
            dim.insert(0, "p")
        elif dim not in model:
            return None
        elif kind == "Concatenate":
            model[model.index(dim)] = ["p", *dim]
        else:
            model[model.index(dim)] = ["e"]
            there.pop(each.dim)
    whole, axes = names[0], {}
    if len(targets) > 1:
        whole, axes = "{p}", {"p": [name for target in targets for name in names if re.search(target, name)]}
    elif len(sources) > 1:
        stored, labels = _apart([stored.replace(sources[0], source, 1) for source in sources])
        axes = {"p": labels}
    try:
        return Rearrange(whole, stored.replace("*", "{e}"), f"{_text(model)} -> {_text(there)}", axes)
    except ValueError:
        return None


def _apart(names: Sequence[str]) -> tuple[str, list[str]]:
    """One name with {p} for what differs, and what that is."""
    letters = zip(*names, strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda each: len(set(each)) == 1, letters))
    return f"{names[0][:same]}{{p}}", [name[same:] for name in names]


def _text(dims: Sequence[Sequence[str]]) -> str:
    return " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in dims)
