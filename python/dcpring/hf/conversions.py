"""How transformers stores a model's tensors: under other names, and one by one where the model fuses them.

``from_pretrained`` of transformers 5 goes by a table of conversions for each kind of model, and ``save_pretrained`` by
its reverse. Here these become rules (``hf.rearrange``) and names. A conversion that is more than a rearrangement is
left out: then names do not match, and the error says which.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from dcpring.format.quantised import MXFP4_CODES
from dcpring.hf.rearrange import Rearrange
from dcpring.torchside.modules import shown_before_fsdp

Rename = Callable[[str], str]

_OF_A_DIMENSION = ("Chunk", "Split", "Concatenate", "MergeModulelist")
"""Operations that cut one, or make one of several."""


_LEFT_OUT = "_keys_to_ignore_on_save"
"""Where a model names the tensors that ``save_pretrained`` leaves out, as they are made anew from a formula."""


class LoadConversion(NamedTuple):
    """How a load finds a model's tensors among those that are stored.

    Attributes:
        rules: from the model's tensors to stored ones.
        key_map: from stored names to those that are wanted; None where they are the same.
        may_miss: names of the model's that files may lack.
        note: tells transformers, after a load, how the model was stored, so that it is saved alike.
    """

    rules: Sequence[Rearrange] = ()
    key_map: Callable[[Collection[str]], Rename | None] = lambda wanted: None
    may_miss: Sequence[str] = ()
    note: Callable[[], None] = lambda: None


class SaveConversion(NamedTuple):
    """How a model is stored.

    Attributes:
        state: its tensors that are stored, by name. Those that are stored under another of their names come last, as
            the first of tied tensors is stored.
        rules: from these to stored ones.
        key_map: from the names that the rules make to stored ones; None where they are the same.
    """

    state: dict[str, Any]
    rules: Sequence[Rearrange] = ()
    key_map: Rename | None = None


def conversion_of_load(model: nn.Module, state: Mapping[str, Any], stored: Mapping[str, Any]) -> LoadConversion:
    """Asks transformers how it finds a model's tensors among those that are stored. Others' are stored as they are.

    Args:
        state: its tensors by their names.
        stored: what there is, by name, as DCP's metadata has it. Tensors that are stored as the model has them are left
            alone.
    """
    own, table = _known(model)
    if own is None:
        return LoadConversion()
    known = table(shown_before_fsdp(own))
    renamed = _renamed_by([each for each in known if not hasattr(each, "operations")])
    converters = [each for each in known if hasattr(each, "operations")]
    prefix = own.base_model_prefix and f"{own.base_model_prefix}."

    def key_map(wanted: Collection[str]) -> Rename:
        """Files of a model with a head may be wanted without it, and the reverse."""

        def name_of(name: str) -> str:
            if name in wanted:
                return name
            name = renamed(name)
            return next((each for each in (name, name.removeprefix(prefix), prefix + name) if each in wanted), name)

        return name_of

    def note() -> None:
        for name in map(renamed, stored):
            for each in converters:
                each.rename_source_key(name)
        own._weight_conversions = [each for each in known if getattr(each, "was_used", lambda: True)()]

    name_of = key_map(state)
    there = {name_of(name): tuple(getattr(entry, "size", ())) for name, entry in stored.items()}
    fused = {name: one for name, one in state.items() if isinstance(one, Tensor) and name not in there}
    packed = [name for name, one in fused.items() if f"{name}{MXFP4_CODES}" in there and one.dim() == 3]
    rules = [Rearrange(name, f"{name}{MXFP4_CODES}", "e i o -> e o i") for name in packed]
    for name in packed:
        del fused[name]
    rules += _rules(own.config, ((each, each.reverse_transform()) for each in converters), fused, there)
    patterns = getattr(own, "_keys_to_ignore_on_load_missing", None) or ()
    is_left_out = _ends_in(own, _LEFT_OUT)
    may_miss = [name for name in state if is_left_out(name) or any(re.search(each, name) for each in patterns)]
    return LoadConversion(rules, key_map, may_miss, note)


def conversion_of_save(model: nn.Module, state: Mapping[str, Any]) -> SaveConversion:
    """Asks transformers how ``save_pretrained`` stores a model: as it was stored when it was loaded, or as its kind is.

    Args:
        state: its tensors by their names.
    """
    own, table = _known(model)
    if own is None:
        return SaveConversion(dict(state))
    known = getattr(own, "_weight_conversions", None)
    if known is None:  # without what hubs' files may have before all names, or not
        all_known = table(shown_before_fsdp(own), add_legacy=False)
        known = [each for each in all_known if type(each).__name__ != "PrefixChange"]
    reverse = [(each, each.reverse_transform()) for each in reversed(known)]
    tensors = {name: one for name, one in state.items() if isinstance(one, Tensor)}
    renaming = [back for each, back in reverse if not hasattr(each, "operations")]
    rules = _rules(own.config, ((each, back) for each, back in reverse if hasattr(each, "operations")), tensors, {})
    is_copy, is_left_out = _ends_in(own, "all_tied_weights_keys"), _ends_in(own, _LEFT_OUT)
    kept = {name: state[name] for name in sorted(state, key=is_copy) if not is_left_out(name)}
    return SaveConversion(kept, list(rules), _renamed_by(renaming) if renaming else None)


def _ends_in(own: Any, attribute: str) -> Callable[[str], bool]:
    """Whether a name is among those of a model of transformers' attribute; the model may be a part of another one."""
    names = tuple(f".{name}" for name in getattr(own, attribute, None) or ())
    return lambda name: f".{name}".endswith(names)


def tied_names(model: nn.Module) -> Callable[[str], Sequence[str]]:
    """The names that a model ties to one of its own, by ``all_tied_weights_keys``, which transformers' models have."""
    said = (getattr(module, "all_tied_weights_keys", None) for module in model.modules())
    groups: dict[str, list[str]] = {}
    for second, first in next((each for each in said if isinstance(each, Mapping)), {}).items():
        groups.setdefault(first, [first]).append(second)
    by_name = {name: names for names in groups.values() for name in names}

    def others(name: str) -> Sequence[str]:
        """The model may be a part of another one."""
        parts = name.split(".")
        for at in range(len(parts) if by_name else 0):
            within = ".".join(parts[at:])
            if within in by_name:
                return [name.removesuffix(within) + other for other in by_name[within] if other != within]
        return ()

    return others


def _known(model: nn.Module) -> tuple[Any, Any]:
    """The model of transformers in it, and transformers' table of conversions; None where there is none."""
    library = sys.modules.get("transformers")
    table = getattr(sys.modules.get("transformers.conversion_mapping"), "get_model_conversion_mapping", None)
    if library is None or table is None:
        return None, None
    return next((module for module in model.modules() if isinstance(module, library.PreTrainedModel)), None), table


def _renamed_by(transforms: Sequence[Any]) -> Rename:
    @functools.cache
    def renamed(name: str) -> str:
        for transform in transforms:
            name = transform.rename_source_key(name)[0]
        return name

    return renamed


def _rules(
    config: Any,
    converters: Iterable[tuple[Any, Any]],
    tensors: Mapping[str, Tensor],
    there: Mapping[str, Sequence[int]],
) -> Iterable[Rearrange]:
    """The rules of all converters, which go by the names of the model; ``there``: sizes of what is stored."""
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
            for some, done_to_them in _alike(operations, reverse.source_patterns, names):
                shapes = {name: tensors[name].shape for name in names}
                rule = _rule(config, reverse, done_to_them, stored, some, shapes, there)
                if rule is not None:
                    yield rule


def _alike(
    operations: Sequence[tuple[str, Any]], targets: Sequence[str], names: Sequence[str]
) -> Iterable[tuple[list[str], list[tuple[str, Any]]]]:
    """The model's tensors that a stored one is cut into, those together that the same is done to: q and k, but not v.

    Where there are several, the place of each that is in another list is "", which is no name.
    """
    chosen = [each.permute_layer_names for kind, each in operations if kind == "PermuteForRope"]
    ordered = [(name, target) for target in targets for name in names if re.search(target, name)]
    if len(targets) == 1 or len(ordered) != len(names) or not any(chosen):
        yield [name for name, _ in ordered] if len(targets) > 1 else list(names), list(operations)
        return
    permuted = [any(part in target for part in itertools.chain(*chosen)) for _, target in ordered]
    others = [(kind, each) for kind, each in operations if kind != "PermuteForRope"]
    for wanted, done in ((True, list(operations)), (False, others)):
        if wanted in permuted:
            pairs = zip(ordered, permuted, strict=True)
            yield [name if is_permuted == wanted else "" for (name, _), is_permuted in pairs], done


def _rule(
    config: Any,
    reverse: Any,
    operations: Sequence[tuple[str, Any]],
    stored: str,
    names: Sequence[str],
    shapes: Mapping[str, Sequence[int]],
    there_sizes: Mapping[str, Sequence[int]],
) -> Rearrange | None:
    """The rule of a converter for some tensors; None if it does more than to rearrange them.

    Args:
        config: the model's.
        reverse: the converter, the other way round.
        operations: what it does to stored tensors, by name.
        stored: the name of the stored tensor, or of the first; with * for the number of one in a list.
        names: of the model's tensors, in the order in which they are stored; "" for one that has a rule of its own.
        shapes: of these.
        there_sizes: of stored tensors, by name.
    """
    sources, targets = reverse.target_patterns, reverse.source_patterns
    if len(names) != len(targets) or (len(sources) > 1 and len(targets) > 1):
        return None
    shape = next(iter(shapes.values()))
    model: list[list[str]] = [[f"d{number}"] for number in range(len(shape))]
    axes: dict[str, Any] = {"p": names} if len(targets) > 1 else {}
    there = [list(dim) for dim in model]
    for kind, each in reversed(operations):  # from the model's dimensions to those that are stored
        if kind == "Transpose" and not each.check_dims:
            there[each.dim0], there[each.dim1] = there[each.dim1], there[each.dim0]
            continue
        if kind == "Interleave" and there[each.dim][0] == "p" and not each.inverse:
            there[each.dim] = [*there[each.dim][1:], "p"]
            continue
        if kind in ("Interleave", "PermuteForRope"):
            is_rope = kind == "PermuteForRope"  # in which halves of each head take turns
            if not _take_turns(model, there, 0 if is_rope else each.dim, ["n"] if is_rope else [], each.inverse):
                return None
            axes["h"] = 2
            if is_rope:
                axes["n"] = getattr(getattr(config, each.subconfig_key or "", config), "num_attention_heads", 1)
            continue
        if kind not in _OF_A_DIMENSION or getattr(each, "num_shards_attribute", None):
            return None
        dim = there[each.dim]
        if kind == "Split":
            axes["p"] = {name: shapes[name][each.dim] for name in names}
            dim.insert(0, "p")
        elif kind == "Chunk":
            if "" in names and dim in model:  # sizes of those that another rule has: all are alike
                axes[dim[0]] = shape[model.index(dim)]
            dim.insert(0, "p")
        elif dim not in model:
            return None
        elif kind == "Concatenate":
            model[model.index(dim)] = ["p", *dim]
        else:
            model[model.index(dim)] = ["e"]
            there.pop(each.dim)
    whole = names[0]
    if len(targets) > 1:
        whole = "{p}"
    elif len(sources) > 1:
        parts = [stored.replace(sources[0], source, 1) for source in sources]
        stored, labels = _apart(parts)
        shares = _shares(operations, parts, shape, there_sizes)
        axes["p"] = labels if len(set(shares)) == 1 else dict(zip(labels, shares, strict=True))
    try:
        return Rearrange(whole, stored.replace("*", "{e}"), f"{_text(model)} -> {_text(there)}", axes)
    except ValueError:
        return None


def _take_turns(
    model: list[list[str]], there: list[list[str]], at: int, outer: Sequence[str], is_inverse: bool
) -> bool:
    """Halves of a dimension of the model's, of which elements take turns where it is stored, or the reverse.

    Args:
        at: the dimension of the stored tensor.
        outer: an axis of whose values each has halves of its own.

    Returns:
        Whether the model has that dimension.
    """
    dim = there[at]
    if dim not in model:
        return False
    apart, in_turns = [*outer, "h", *dim], [*outer, *dim, "h"]
    place = model.index(dim)
    model[place], there[at] = (in_turns, apart) if is_inverse else (apart, in_turns)
    return True


def _shares(
    operations: Sequence[tuple[str, Any]],
    parts: Sequence[str],
    shape: Sequence[int],
    there: Mapping[str, Sequence[int]],
) -> list[int]:
    """The proportions of what is joined: as it is stored, or else as ``torch.chunk`` cuts it."""
    if len(operations) > 1:
        return [1] * len(parts)
    ((_, joined),) = operations
    if all(part in there for part in parts):
        sizes = [there[part][joined.dim] for part in parts]
    else:
        size, each = shape[joined.dim], -(-shape[joined.dim] // len(parts))
        sizes = [max(min(each, size - number * each), 0) for number in range(len(parts))]
    return [size // math.gcd(*sizes) for size in sizes]


def _apart(names: Sequence[str]) -> tuple[str, list[str]]:
    """One name with {p} for what differs, and what that is."""
    letters = zip(*names, strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda each: len(set(each)) == 1, letters))
    return f"{names[0][:same]}{{p}}", [name[same:] for name in names]


def _text(dims: Sequence[Sequence[str]]) -> str:
    return " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in dims)
