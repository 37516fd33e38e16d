"""Mirrors of ``torch.distributed.checkpoint.state_dict``, with names that do not depend on how a model is wrapped.

The signatures, the options and what comes out are stock's; so is most of the work. What differs:

- Names come from the types of the modules (see ``wrapping``), so every nesting of every wrapper gives the same ones.
- The order of keys is the model's, inputs are never changed, errors list everything that is wrong.
- Tied tensors load from any of their names. Optimizer state loads in time linear in the number of parameters.
- No optimizer takes a step (see ``first_step``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from dcpring.names.state_dict.models import check_not_empty, get_model, set_model
from dcpring.names.state_dict.optimizers import get_optimizers
from dcpring.names.state_dict.request import requested
from dcpring.names.state_dict.set_optimizers import set_optimizers
from dcpring.torchside.state_dict import IncompatibleKeys

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

_Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def _as_tuple(optimizers: _Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    found = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)
    if not found:
        raise RuntimeError(
            "Optimizers are not passed in but optim_only is set to True. Pass those whose state is meant, one at least"
        )
    return found


def _refuse_submodules(submodules: set[nn.Module] | None) -> None:
    if submodules:
        raise TypeError("submodules= is not taken; choose from the state dict by the beginning of its keys")


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """The model's state dict under canonical names, in the model's order.

    Args:
        model: wrapped in whatever ways.
        submodules: not taken; stock has deprecated it.
        options: stock's; see ``torch.distributed.checkpoint.state_dict.StateDictOptions``.

    Raises:
        ValueError: two tensors would have one name; the message names both.
    """
    _refuse_submodules(submodules)
    with requested(model, options) as request:
        state = get_model(request)
        check_not_empty(request, state)
        return state


def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[Any, Any], *, options: StateDictOptions | None = None
) -> IncompatibleKeys:
    """Loads a model's state dict: what ``get_model_state_dict``, here or in stock, gave for any wrapping of the model.

    Args:
        model: wrapped in whatever ways.
        model_state_dict: canonical names, or raw ones of this model. It is not changed. One name of tied tensors
            is enough.
        options: stock's; ``ignore_frozen_params`` lets frozen parameters be missing.

    Returns:
        missing_keys and unexpected_keys, both canonical.

    Raises:
        KeyMismatchError: with ``strict``, when keys are missing or unexpected; the message lists them all.
        RuntimeError: shapes do not fit.
    """
    with requested(model, options) as request:
        check_not_empty(request, model_state_dict)
        return set_model(request, model_state_dict)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: _Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The state of one or more optimizers, with parameters under their canonical names.

    Args:
        model: the model that the optimizers are for.
        optimizers: one or several.
        submodules: not taken; stock has deprecated it, and does nothing with it.
        options: stock's; ``flatten_optimizer_state_dict`` gives one level of keys.

    Nothing of the optimizers or the model is changed. One that has no state yet is given in the dict what a step with
    gradients of zero makes, as in stock, so that it can be loaded into; the optimizer itself has none afterwards.

    Raises:
        RuntimeError: an optimizer has a parameter that is not the model's, or its class has a state dict of its own
            form, or it has no state yet and copies of it cannot take a step.
    """
    _refuse_submodules(submodules)
    with requested(model, options) as request:
        return get_optimizers(request, _as_tuple(optimizers))


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: _Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Loads optimizer state, in time linear in the number of parameters.

    The optimizer takes no step for it, where stock's takes one with gradients of zero: what it needs is found out on
    copies of its parameters, 64 MiB at a time.

    Args:
        model: the model that the optimizers are for.
        optimizers: one or several.
        optim_state_dict: what ``get_optimizer_state_dict``, here or in stock, gave, flattened or not. Not changed.
        options: stock's.

    Raises:
        KeyMismatchError: with ``strict``, when state is missing; the message lists all of it.
        RuntimeError: an optimizer has a parameter that is not the model's, or one group was saved as several that
            differ; with ``strict=False`` the options of the last are taken, where they are nested.
    """
    with requested(model, options) as request:
        set_optimizers(request, _as_tuple(optimizers), optim_state_dict)


def get_state_dict(
    model: nn.Module,
    optimizers: _Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``get_model_state_dict`` and ``get_optimizer_state_dict`` in one call."""
    _refuse_submodules(submodules)
    with requested(model, options) as request:
        state = get_model(request)
        check_not_empty(request, state)
        return state, get_optimizers(request, _as_tuple(optimizers)) if optimizers else {}


def set_state_dict(
    model: nn.Module,
    optimizers: _Optimizers,
    *,
    model_state_dict: Mapping[Any, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """``set_optimizer_state_dict`` and ``set_model_state_dict`` in one call; an empty model dict is left out."""
    with requested(model, options) as request:
        if optimizers:
            set_optimizers(request, _as_tuple(optimizers), optim_state_dict)
        return set_model(request, model_state_dict)
