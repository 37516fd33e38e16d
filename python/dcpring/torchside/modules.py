"""What an ``nn.Module`` keeps to itself, and the names of torch's wrappers of modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dcpring.torchside.versions import function, required

EXTRA_STATE: str = required("torch.nn.modules.module", "_EXTRA_STATE_KEY_SUFFIX")
"""The name under which a module keeps what is no tensor."""

_state_of = function("torch.distributed._composable_state", "_get_module_state")
"""What torch keeps of a module that it has sharded."""
_to_sharded = function("torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup", "_to_sharded")

WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": ("module", False),
    "torch.nn.parallel.data_parallel.DataParallel": ("module", False),
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": ("_fsdp_wrapped_module", True),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": (
        "_checkpoint_wrapped_module",
        True,
    ),
    "torch._dynamo.eval_frame.OptimizedModule": ("_orig_mod", False),
    "torch.optim.swa_utils.AveragedModel": ("module", False),
}
"""By class: the attribute that holds what is wrapped, and whether hooks keep it out of the names."""


def children(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """The modules right below, those that are None, or there twice, included."""
    return module._modules


def parameters(module: nn.Module) -> Mapping[str, Tensor | None]:
    """A module's own parameters."""
    return module._parameters


def buffers(module: nn.Module) -> Mapping[str, Tensor | None]:
    """A module's own buffers."""
    return module._buffers


def tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters and buffers, by name."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


def reshard(model: nn.Module) -> None:
    """Puts back the parameters that FSDP2 has sharded, which are the optimizer's, as hooks of ``state_dict()`` do.

    After a forward without a backward, one that raised, or ``unshard()``, modules have whole parameters instead.
    ``FSDPModule.reshard()`` leaves these where a forward raised and ``reshard_after_forward`` is False.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = _state_of(module)  # FSDP1's, where both wrap the module
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # a torch that has one at most, or FSDP1's state
                groups = [getattr(state, "_fsdp_param_group", None)]
            for group in filter(None, groups):
                _to_sharded(group)


def class_before_fsdp(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before ``fully_shard`` gave it another one."""
    kinds = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    return next(kind for kind in kinds if not issubclass(kind, FSDPModule))


def shown_before_fsdp(model: nn.Module) -> nn.Module:
    """A model whose modules have the classes that they had before ``fully_shard``, for what goes by classes' names.

    It has the attributes and the tensors of the model, which stays as it is, as other threads may use it.
    """
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return model
    shown: dict[nn.Module, nn.Module] = {each: object.__new__(class_before_fsdp(each)) for each in model.modules()}
    for module, made in shown.items():
        below = {name: child and shown[child] for name, child in module._modules.items()}
        vars(made).update(vars(module), _modules=below)
    return shown[model]


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Gives memory, without values, to what of a model is on meta; what was one tensor in several places stays one.

    ``Module.to_empty`` takes the values of what is not on meta, and makes several of tied tensors.
    """
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None and tensor.is_meta:
                    places.setdefault(id(tensor), []).append((own, name))
    for module in reversed(list(model.modules())):  # FSDP2 looks at what is in a module after that has been changed
        if isinstance(module, FSDPModule) or any(tensor.is_meta for _, tensor in tensors(module)):
            module._apply(
                lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor, recurse=False
            )
    for (first, first_name), *others in places.values():
        for own, name in others:
            own[name] = first[first_name]


def is_saved(module: nn.Module, name: str) -> bool:
    """Whether a parameter or buffer of the module is in its ``state_dict()``."""
    return name not in module._non_persistent_buffers_set


def has_state_dict_hooks(module: nn.Module) -> bool:
    """Whether hooks change the module's ``state_dict()``, or what it loads."""
    return bool(module._state_dict_hooks or module._load_state_dict_pre_hooks)


def flat_parts(name: str, tensor: Tensor) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the parameters in a flat one (FSDP1); of any other, its own."""
    names, shapes = getattr(tensor, "_fqns", (name,)), getattr(tensor, "_shapes", (tensor.shape,))
    return [(one, tuple(shape)) for one, shape in zip(names, shapes, strict=True)]


def is_flat(tensor: Tensor) -> bool:
    """Whether a parameter holds several others, one behind the other (FSDP1)."""
    return hasattr(tensor, "_fqns")


def copy_metadata(source: Any, target: Any) -> None:
    """State dicts of modules carry the versions of their classes, in an attribute."""
    if hasattr(source, "_metadata"):
        target._metadata = source._metadata


def add_metadata(source: Any, target: Any) -> None:
    """The same, for a state dict that is made of several."""
    target._metadata = {**getattr(target, "_metadata", {}), **getattr(source, "_metadata", {})}
