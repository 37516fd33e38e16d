"""Private names of torch: all are in ``dcpring.torchside``, and this torch has them, to be called as they are."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.tensor import DTensor

import dcpring
from dcpring import torchside
from dcpring.torchside import versions

PACKAGE = Path(dcpring.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "torchside" not in path.relative_to(PACKAGE).parts)

OWN = {"self", "cls"}
NAMEDTUPLES = {"_replace", "_asdict", "_fields", "_make"}
FOREIGN = {"_actions", "_config", "_init_weights", "_initializing", "_run_module_as_main"}
FOREIGN |= {"_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_save"}
"""Names that look private, of argparse, multiprocessing, transformers' models, importlib and runpy."""

OLDER, NEWER = (0, 0), (99, 0)

PROTOCOLS = re.compile(r"__(create|get)_(write_items|chunk_list|tensor_shard)__")


def _is_private(name: str) -> bool:
    return (name.startswith("_") and not name.startswith("__")) or bool(PROTOCOLS.fullmatch(name))


def _is_private_path(path: str) -> bool:
    return path.split(".")[0] == "torch" and any(map(_is_private, path.split(".")))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{_dotted(node.func)}()"
    return node.id if isinstance(node, ast.Name) else "?"


def _reached(tree: ast.AST) -> Iterator[str]:
    """Private attributes of anything but an object of this module's own classes; also by getattr, and in strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if _dotted(node.value) not in OWN | {"super()"}:
                yield node.attr
        elif isinstance(node, ast.Call) and _dotted(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and _is_private(str(arg.value)))


def _texts(tree: ast.AST) -> Iterator[str]:
    """All strings but those that stand alone, which are documentation."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield from re.findall(r"torch(?:\.\w+)+", node.value)


def _inherited(tree: ast.Module) -> Iterator[str]:
    """Private attributes of ``self`` that no class of the module defines: those of a class of torch, or of ours."""
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _dotted(node.value) in OWN | {"super()"} and _is_private(node.attr):
            (defined if isinstance(node.ctx, ast.Store) else used).add(node.attr)
        elif isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(node.value, ast.Constant | None):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    yield from used - defined


def _defined(tree: ast.AST) -> Iterator[str]:
    """The names that a module gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def _private_names(*objects: object) -> set[str]:
    return {name for one in objects for name in dir(one) if _is_private(name)}


@functools.cache
def _bases_of_torch() -> set[str]:
    """The private names of the classes of torch that ours are made from."""
    return _private_names(DefaultLoadPlanner(), DefaultSavePlanner(), FileSystemReader("x"), FileSystemWriter("x"))


@functools.cache
def _own_names() -> set[str]:
    """Private names that dcpring gives, and nothing of torch has."""
    sources = [*MODULES, PACKAGE / "_C.pyi"]
    made = {name for path in sources for name in _defined(ast.parse(path.read_text())) if _is_private(name)}
    others = _private_names(torch.Tensor, torch.nn.Module(), DTensor, ProcessGroup) | {"_metadata"}
    return made - _bases_of_torch() - others


def _offences(path: Path, tree: ast.Module) -> list[str]:
    found = [f"imports {one}" for one in _imports(tree) if _is_private_path(one)]
    found += [f"names {one}" for one in _texts(tree) if _is_private_path(one)]
    found += [f"reaches for {one}" for one in _reached(tree) if one not in NAMEDTUPLES | FOREIGN | _own_names()]
    found += [f"takes {one} of a class of torch" for one in _inherited(tree) if one in _bases_of_torch()]
    return [f"{path.relative_to(PACKAGE)}: {one}" for one in found]


def test_private_names_of_torch_are_in_one_room() -> None:
    assert len(MODULES) > 60
    offences = [one for path in MODULES for one in _offences(path, ast.parse(path.read_text()))]
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize(
    "source, said",
    [
        ("import torch._utils", "imports"),
        ("from torch.distributed.checkpoint.filesystem import _StorageInfo", "imports"),
        ("from torch.distributed._shard.sharded_tensor import ShardedTensor", "imports"),
        ("def f(value): return value._local_tensor", "reaches"),
        ("def f(tensor): return getattr(tensor, '_fqns', ())", "reaches"),
        ("def f(tensor): return hasattr(tensor, '__create_write_items__')", "reaches"),
        ("import torch\nx = torch._utils._rebuild_tensor_v2", "reaches"),
        ("X = {'torch._dynamo.eval_frame.OptimizedModule': 1}", "names"),
        ("class W:\n    def f(self): return self._metadata_exists()", "takes"),
        ("class P:\n    def f(self): return self._enable_plan_caching", "takes"),
    ],
)
def test_the_rule_sees(source: str, said: str) -> None:
    found = _offences(PACKAGE / "some.py", ast.parse(source))
    assert found and said in found[0]


# ---- what this torch has ----

CALLS: dict[str, tuple[Any, ...]] = {
    "torch.distributed._composable_state._get_module_state": ("module",),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._to_sharded": ("self",),
    "torch.distributed.checkpoint.planner_helpers._create_write_items": ("fqn", "value"),
    "torch.distributed.checkpoint.planner_helpers._create_chunk_list": ("value",),
    "torch.distributed.checkpoint.planner_helpers._init_state_dict": ("state_dict",),
    "torch.distributed.checkpoint._sharded_tensor_utils._flatten_sharded_tensors": ("state_dict",),
    "torch.distributed.checkpoint._nested_dict.flatten_state_dict": ("state_dict",),
    "torch.distributed.checkpoint._traverse.set_element": ("root", "path", "value"),
    "torch.distributed.checkpoint._traverse.traverse_state_dict_v_2_3": ("state_dict", "visit"),
    "torch.distributed.checkpoint.filesystem._StorageInfo": ("relative_path", "offset", "length"),
    "torch.distributed.checkpoint.state_dict._state_dict_fn": ("model", "api"),
    "torch.distributed.checkpoint.state_dict._maybe_full_or_cpu_state_dict": ("state_dict", "info"),
    "torch.distributed.checkpoint.state_dict._flatten_optim_state_dict": ("state_dict",),
    "torch.distributed.checkpoint.state_dict._get_fsdp_process_group": ("model", "info"),
    "torch.distributed._state_dict_utils._broadcast_state_dict": (
        *("full", "local"),
        {"device": "device", "strict": False, "cpu_offload": False},
    ),
    "torch.distributed._state_dict_utils._distribute_state_dict": ("full", "local", {"device": "device"}),
    "torch.distributed._state_dict_utils._flatten_state_dict": ("state_dict",),
    "torch.distributed._state_dict_utils._unflatten_state_dict": ("state_dict", "paths"),
    "torch.distributed.distributed_c10d._get_default_store": (),
    "torch.distributed.distributed_c10d._new_process_group_helper": (
        *("size", "rank", "ranks", "backend", "store", "name"),
        {"timeout": "timeout", "group_desc": "words"},
    ),
    "torch.distributed.distributed_c10d._set_pg_timeout": ("timeout", "group"),
    "torch.distributed.checkpoint.state_dict_saver._save_state_dict": (
        *("state_dict", "writer"),
        {"process_group": None, "no_dist": True, "planner": "planner"},
    ),
    "torch.distributed.checkpoint.state_dict_loader._load_state_dict": (
        *("state_dict", "reader"),
        {"process_group": None, "no_dist": True, "planner": "planner"},
    ),
    "torch.nn.modules.module._IncompatibleKeys": ("missing_keys", "unexpected_keys"),
    "torch._utils._rebuild_tensor_v2": ("storage", "offset", "size", "stride", "requires_grad", "hooks"),
    "torch._utils._rebuild_tensor_v3": ("storage", "offset", "size", "stride", "requires_grad", "hooks", "dtype"),
    "torch.distributed.checkpoint.FileSystemWriter": ("path", {"_extensions": None}),
    "torch.distributed.checkpoint.FileSystemReader": ("path", "_extension_registry"),
}
"""How dcpring calls what it has looked up, and what its classes hand to those of torch; last, what is by keyword."""

_REBUILDERS = (
    *("tensor", "parameter", "parameter_with_state", "qtensor", "sparse_tensor", "nested_tensor"),
    *("meta_tensor_no_storage", "wrapper_subclass", "device_tensor_from_numpy", "device_tensor_from_cpu_tensor"),
)

NOT_CALLED: dict[str, set[str]] = {
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": {
        "TORCH_CONTIGUOUS_FORMAT",
        "TORCH_CHANNELS_LAST",
        "TORCH_PRESERVE_FORMAT",
    },
    "torch.distributed.checkpoint.state_dict._StateDictInfo": {"fsdp_context", "fsdp_modules", "strict"},
    "torch.distributed._shard.sharded_tensor.ShardedTensor": {"local_shards", "metadata", "sharding_spec"},
    "torch.distributed._shard.sharded_tensor.Shard": set(),
    "torch.distributed.tensor.placement_types._StridedShard": {"dim", "split_factor"},
    "torch.distributed.checkpoint._async_process_executor": {"_CHECKPOINT_PROCESS"},
    "torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX": set(),
    "torch._utils._sparse_tensors_to_validate": set(),
    "torch._utils._get_sparse_tensors_to_validate": set(),
    "torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors": set(),
    "torch.UntypedStorage._new_shared_fd_cpu": set(),
    # Pickles say what these are called with.
    **{f"torch._utils._rebuild_{name}": set() for name in _REBUILDERS},
    "torch._tensor._rebuild_from_type_v2": set(),
    "torch.distributed.distributed_c10d._world": {"pg_group_ranks"},
    "torch.optim.optimizer._global_optimizer_pre_hooks": {"clear", "update"},
    "torch.optim.optimizer._global_optimizer_post_hooks": {"clear", "update"},
}
"""The others, and attributes that they must have."""

NOT_ALWAYS = {
    "torch.distributed.checkpoint.state_dict._get_fsdp_process_group": ((2, 13), NEWER),
    "torch._utils._sparse_tensors_to_validate": (OLDER, (2, 14)),
    "torch._utils._get_sparse_tensors_to_validate": ((2, 15), NEWER),
}
"""The first and last version with what the others lack; dcpring does without it there."""


def _look_up_all() -> dict[str, Any]:
    for module in pkgutil.iter_modules(torchside.__path__):
        importlib.import_module(f"dcpring.torchside.{module.name}")
    return versions.found


def _find(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError:
        return getattr(_find(module), attribute)


def test_all_that_is_looked_up_is_checked_here() -> None:
    extra = {name for name in CALLS if name.rpartition(".")[2] in ("FileSystemWriter", "FileSystemReader")}
    assert _look_up_all().keys() == (CALLS.keys() | NOT_CALLED.keys()) - extra


def _should_have(name: str) -> bool:
    first, last = NOT_ALWAYS.get(name, (OLDER, NEWER))
    should = first <= versions.release(torch.__version__) <= last
    assert name not in versions.found or should == (_look_up_all()[name] is not None)
    return should


@pytest.mark.parametrize("name", sorted(CALLS))
def test_it_is_there_and_takes_what_it_is_given(name: str) -> None:
    if not _should_have(name):
        return
    given = CALLS[name]
    by_name = given[-1] if given and isinstance(given[-1], dict) else {}
    positional = given[: len(given) - bool(by_name)]
    inspect.signature(_find(name)).bind(*positional, **by_name)


@pytest.mark.parametrize("name", sorted(NOT_CALLED))
def test_it_is_there(name: str) -> None:
    if not _should_have(name):
        return
    found = _find(name)
    fields = set(getattr(found, "__dataclass_fields__", ()))
    assert NOT_CALLED[name] <= {*dir(found), *fields}


def test_objects_have_what_is_reached_for() -> None:
    module = torch.nn.BatchNorm1d(2)
    state = module.state_dict()
    assert all(
        hasattr(module, name)
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "_state_dict_hooks")
    )
    assert hasattr(module, "_load_state_dict_pre_hooks") and hasattr(state, "_metadata")
    optimizer = torch.optim.SGD(module.parameters())
    assert {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"} <= vars(optimizer).keys()
    assert torch.optim.SGD.step.hooked and torch.optim.SGD.step.__wrapped__
    assert torch.zeros(1)._version == 0
    storage = torch.zeros(3).storage()
    assert storage._pickle_storage_type() == "FloatStorage" and storage._size() == 3
    assert storage._untyped_storage._cdata
    assert isinstance(torch.autograd.profiler._is_profiler_enabled, bool)
    assert isinstance(torch.distributed.tensor.DTensor._local_tensor, object)
    assert hasattr(torch.distributed.ProcessGroup, "_device_types")
    assert hasattr(torch.distributed.ProcessGroup, "bound_device_id")


def test_the_names_of_wrappers_are_those_of_classes() -> None:
    from dcpring.torchside.modules import WRAPPERS

    for name in WRAPPERS:
        assert issubclass(_find(name), torch.nn.Module)


# ---- what another torch lacks ----


def test_a_function_that_is_gone_says_so_when_it_is_called() -> None:
    gone = versions.function("torch.distributed.checkpoint.planner_helpers", "_create_nothing")
    with pytest.raises(versions.UnsupportedTorchError) as caught:
        gone("name", 1)
    text = str(caught.value)
    assert "torch.distributed.checkpoint.planner_helpers._create_nothing" in text
    assert f"torch {torch.__version__} does not have" in text and "install torch 2.9 to 2.15" in text
    del versions.found["torch.distributed.checkpoint.planner_helpers._create_nothing"]


@pytest.mark.parametrize("module", ["torch.no_such_module", "torch._C._no_such_part", "torch"])
def test_what_nothing_works_without_is_an_error_at_once(module: str) -> None:
    with pytest.raises(ImportError, match=f"dcpring needs {re.escape(module)}._gone, which torch"):
        versions.required(module, "_gone")
    assert versions.optional(module, "_gone", 7) == 7
    del versions.found[f"{module}._gone"]


@pytest.mark.parametrize(
    "text, numbers", [("2.15.0+cu132", (2, 15)), ("2.9.1", (2, 9)), ("2.16.0a0+git12", (2, 16)), ("3.0rc1", (3, 0))]
)
def test_releases(text: str, numbers: tuple[int, int]) -> None:
    assert versions.release(text) == numbers
