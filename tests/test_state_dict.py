"""The mirrors: every wrapper, alone and in pairs, gives and takes the names of the plain model, bit for bit."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from typing import Any

import _distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _wrapper_table import PAGE, PAGE_TORCH, in_page, names_of_ours, table
from _wrappers import OWN, WIDTH, WRAPPERS, Case, Lora, Net, build, cases, full_tensor, plain_values, quiet, raw_keys
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as stock
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel

import dcpring
from dcpring import KeyMismatchError, RingReader, RingWriter
from dcpring.state_dict import StateDictOptions


@pytest.fixture(scope="module", autouse=True)
def _group(group_of_one: None) -> None:
    """Wrappers need a process group; one rank is enough for names."""
    quiet()


NOT_BY_TORCH = {
    ("DDP", "FSDP2"): "DDP cannot broadcast DTensors",
    ("FSDP1 (flat)", "FSDP1 (use_orig_params)"): "FSDP1 wants one use_orig_params for all",
    ("FSDP1 (use_orig_params)", "FSDP1 (flat)"): "FSDP1 wants one use_orig_params for all",
    ("FSDP2", "FSDP2"): "fully_shard takes a module once",
    ("FSDP2", "FSDP1 (flat)"): "fully_shard loses FSDP1's flat parameter on load",
    ("torch.compile", "torch.compile"): "torch.compile gives a function",
    ("AveragedModel", "FSDP1 (flat)"): "FSDP1 cannot be copied",
    ("AveragedModel", "FSDP1 (use_orig_params)"): "FSDP1 cannot be copied",
    ("AveragedModel", "FSDP2"): "FSDP2 cannot be copied",
    ("parametrization", "FSDP1 (flat)"): "the parameters are in the flat one",
    ("parametrization", "FSDP1 (use_orig_params)"): "FSDP1 does not find the parameters again",
    ("float8", "FSDP1 (flat)"): "the parameters are in the flat one",
    ("float8", "parametrization"): "the weight is no parameter",
}
"""Pairs (outer, inner) that torch itself cannot make, save or load; each is shown to fail."""

CLASHES = {("AveragedModel", "AveragedModel"), ("LoRA (registered)", "LoRA (registered)")}
"""A wrapper in itself: what both own has one name."""


def _supported() -> list[Case]:
    pairs = CLASHES | NOT_BY_TORCH.keys()
    return [case for case in cases() if (case.outer, case.inner) not in pairs]


def _values(model: nn.Module) -> dict[str, Tensor]:
    return plain_values(dcpring.get_model_state_dict(model))


def _check_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert torch.equal(got[key], value), key


def _loading(case: Case, **options: Any) -> StateDictOptions:
    """Full tensors into DTensors need ``full_state_dict``."""
    return StateDictOptions(full_state_dict="FSDP2" in (case.outer, case.inner), **options)


@pytest.mark.parametrize("case", _supported(), ids=str)
def test_names_and_bits_are_those_of_the_plain_model(case: Case) -> None:
    plain = Net(0).state_dict()
    wrapped = build(case, seed=0)
    state = dcpring.get_model_state_dict(wrapped)
    _check_equal(plain_values(state), plain)

    target = Net(1)
    dcpring.set_model_state_dict(target, plain_values(state))
    _check_equal(dict(target.state_dict()), plain)

    other = build(case, seed=1)
    given = dict(plain)
    result = dcpring.set_model_state_dict(other, given, options=_loading(case, strict=False))
    assert {name.rsplit(".")[-1] for name in result.missing_keys} <= set(OWN)
    assert result.unexpected_keys == []
    assert list(given) == list(plain)
    _check_equal(_values(other), plain)

    dcpring.set_model_state_dict(build(case, seed=1), state)


@pytest.mark.parametrize("case", _supported(), ids=str)
def test_the_order_is_the_models(case: Case) -> None:
    wrapped = build(case)
    state = dcpring.get_model_state_dict(wrapped)
    parametrized = "parametrization" in (case.outer, case.inner)  # torch moves these tensors behind the others
    names = [name for name in state if name.rsplit(".")[-1] not in OWN]
    assert names == (sorted(names, key=names.index) if parametrized else list(Net().state_dict()))
    assert len(state) == len(raw_keys(wrapped))


@pytest.mark.parametrize("pair", NOT_BY_TORCH, ids=str)
def test_what_torch_cannot_nest(pair: tuple[str, str]) -> None:
    with pytest.raises(BaseException):  # noqa: B017
        model = build(Case(*pair, "root"))
        raw_keys(model)
        state = {name: full_tensor(value) for name, value in dcpring.get_model_state_dict(model).items()}
        dcpring.set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


@pytest.mark.parametrize("pair", sorted(CLASHES), ids=str)
def test_two_that_would_be_one_are_both_named(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"'\w+' and '\w+\.\w+' would both be called"):
        dcpring.get_model_state_dict(build(Case(*pair, "root")))


STOCK_WRONG = {
    (outer, inner)
    for outer in ("FSDP1 (flat)", "FSDP1 (use_orig_params)", "checkpoint_wrapper")
    for inner in ("DDP", "torch.compile")
}
"""Pairs whose inner wrapper stock keeps in names."""

STOCK_LEAVES = {"AveragedModel", "parametrization", "LoRA (registered)"}
"""Wrappers that stock does not know."""

STOCK_MIXES_UP = {("DDP", "FSDP1 (flat)"), ("torch.compile", "FSDP1 (flat)")}
"""Pairs into which stock loads, or does not, by luck: it pairs the names in a flat parameter in the order of a set."""

STOCK_SAME = [
    case
    for case in _supported()
    if (case.outer, case.inner) not in STOCK_WRONG and not {case.outer, case.inner} & STOCK_LEAVES
]


@pytest.mark.parametrize("case", STOCK_SAME, ids=str)
def test_interchange_with_stock(case: Case) -> None:
    """Where stock is right, what either saved the other loads."""
    wrapped = build(case, seed=0)
    ours = dcpring.get_model_state_dict(wrapped)
    theirs = stock.get_model_state_dict(wrapped)
    assert ours.keys() == theirs.keys()
    loads = [(dcpring.set_model_state_dict, theirs)]
    if (case.outer, case.inner) not in STOCK_MIXES_UP:
        loads.append((stock.set_model_state_dict, dict(ours)))
    for set_state, state in loads:
        other = build(case, seed=1)
        set_state(other, state)
        _check_equal(_values(other), dict(Net(0).state_dict()))


@pytest.mark.parametrize("pair", sorted(STOCK_WRONG), ids=str)
def test_what_stock_saved_under_a_wrappers_name_loads(pair: tuple[str, str]) -> None:
    for where in ("root", "block"):
        case = Case(*pair, where)
        theirs = stock.get_model_state_dict(build(case, seed=0))
        assert theirs.keys() != dcpring.get_model_state_dict(build(case)).keys()
        target = build(case, seed=1)
        dcpring.set_model_state_dict(target, theirs)
        _check_equal(_values(target), dict(Net(0).state_dict()))


def test_the_tables_of_the_page_are_those_of_a_run() -> None:
    text, made = PAGE.read_text(), table()
    if text == in_page(text, made):
        return
    # What torch can nest, and what stock calls it, is the business of its version, and of torchao's.
    assert not torch.__version__.startswith(PAGE_TORCH), "python tests/_wrapper_table.py makes them anew"
    told, found = names_of_ours(text), names_of_ours(made)
    both = told.keys() & found.keys()
    assert len(both) > 50 and {case: told[case] for case in both} == {case: found[case] for case in both}


# ---- what stock gets wrong ----


class Holder(nn.Module):
    """Owns a child and a parameter with reserved names."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Linear(2, 2)
        self._checkpoint_wrapped_module = nn.Linear(2, 2)
        self.base_layer = nn.Parameter(torch.ones(2))


class Split(nn.Module):
    """Its hooks store one parameter as two, and put them together again."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.arange(8.0).reshape(4, 2))
        self._register_state_dict_hook(self._split)
        self.register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}w1"], state[f"{prefix}w3"] = state.pop(f"{prefix}w13").chunk(2)

    @staticmethod
    def _join(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}w13"] = torch.cat([state.pop(f"{prefix}w1"), state.pop(f"{prefix}w3")])


class Renaming(Net):
    """Its own hooks call what is below its children otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._out)
        self.register_load_state_dict_pre_hook(self._in)

    @staticmethod
    def _out(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in list(state):
            state[key.replace(f"{prefix}block.up", f"{prefix}body.w1")] = state.pop(key)

    @staticmethod
    def _in(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in list(state):
            state[key.replace(f"{prefix}body.w1", f"{prefix}block.up")] = state.pop(key)


def _compiled_block(model: nn.Module) -> nn.Module:
    model.block = torch.compile(checkpoint_wrapper(AveragedModel(model.block)))
    return model


def _ac_compile(module: nn.Module) -> nn.Module:
    return checkpoint_wrapper(torch.compile(module))


def _fsdp1_compile(module: nn.Module) -> nn.Module:
    return WRAPPERS["FSDP1 (use_orig_params)"](torch.compile(module))


STOCK_FAILS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    # pytorch/torchtitan#2622: stock keeps "_orig_mod"
    "compiled inside activation checkpointing": (lambda: _ac_compile(Net()), Net),
    # stock drops "_orig_mod" only at a compiled module, not through FSDP1's attribute forwarding
    "FSDP1 around a compiled module": (lambda: _fsdp1_compile(Net()), Net),
    # stock removes "_checkpoint_wrapped_module." wherever the text occurs
    "reserved names": (Holder, Holder),
    "reserved names in DDP": (lambda: DistributedDataParallel(Holder()), Holder),
    "reserved names in a compiled module": (lambda: torch.compile(Holder()), Holder),
    # stock looks every key up as an attribute
    "a hook that splits": (lambda: nn.Sequential(Split()), lambda: nn.Sequential(Split())),
    "a hook that splits, compiled": (lambda: torch.compile(Split()), Split),
    "a hook that splits, in DDP": (lambda: DistributedDataParallel(Split()), Split),
    # stock strips nothing from what it cannot find as an attribute
    "a hook above a compiled module": (lambda: DistributedDataParallel(_compiled_block(Renaming())), Renaming),
    # stock keeps "module."
    "AveragedModel": (lambda: AveragedModel(Net()), Net),
}


def _stock_agrees(make: Callable[[], nn.Module], names: list[str]) -> bool:
    try:
        return [key for key in stock.get_model_state_dict(make()) if key.rsplit(".")[-1] not in OWN] == names
    except (AttributeError, RuntimeError, KeyError, AssertionError):
        return False


@pytest.mark.parametrize("name", STOCK_FAILS)
def test_cases_that_stock_fails(name: str) -> None:
    make, plain = STOCK_FAILS[name]
    torch.manual_seed(0)
    wrapped, want = make(), plain()
    want.load_state_dict(plain_values(dcpring.get_model_state_dict(wrapped)))
    names = list(want.state_dict())
    assert not _stock_agrees(make, names)
    state = dcpring.get_model_state_dict(wrapped)
    assert [key for key in state if key.rsplit(".")[-1] not in OWN] == names
    changed = {key: value + 1 if value.is_floating_point() else value for key, value in state.items()}
    dcpring.set_model_state_dict(wrapped, changed)
    again = dcpring.get_model_state_dict(wrapped)
    for key, value in changed.items():
        assert torch.equal(again[key], value), key


def test_a_raw_name_does_not_displace_a_canonical_one() -> None:
    model = DistributedDataParallel(Holder())
    state = dcpring.get_model_state_dict(model)
    assert {"module.weight", "_orig_mod.weight", "base_layer"} <= state.keys()
    dcpring.set_model_state_dict(model, {**state, "module.weight": torch.full((2, 2), 7.0)})
    assert torch.equal(model.module.module.weight, torch.full((2, 2), 7.0))


# ---- parametrizations ----


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2

    def right_inverse(self, x: Tensor) -> Tensor:
        return x * 2


def test_a_parametrization_with_coordinates_of_its_own_keeps_its_name() -> None:
    """Its ``original`` is another tensor than the weight was: under the weight's name it would load as a wrong one."""
    linear = nn.Linear(2, 2)
    parametrize.register_parametrization(linear, "weight", Halved())
    assert list(dcpring.get_model_state_dict(linear)) == ["bias", "parametrizations.weight.original"]


def test_a_parametrization_of_two_tensors_keeps_its_names() -> None:
    model = torch.compile(parametrizations.weight_norm(nn.Linear(2, 2)))
    names = [f"parametrizations.weight.original{i}" for i in range(2)]
    state = dcpring.get_model_state_dict(model)
    assert list(state) == ["bias", *names]
    dcpring.set_model_state_dict(model, state)


# ---- registration ----


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(1))


def test_register_wrapper() -> None:
    class Subclass(Inner):
        pass

    before = list(dcpring.get_model_state_dict(Subclass()))
    assert before == ["gain", "core.weight", "core.bias"]
    dcpring.register_wrapper(Inner, "core")
    assert list(dcpring.get_model_state_dict(Subclass())) == ["gain", "weight", "bias"]
    dcpring.register_wrapper(Inner, "core")
    with pytest.raises(ValueError, match="registered already"):
        dcpring.register_wrapper(Inner, "other")
    with pytest.raises(ValueError, match="cannot be the name"):
        dcpring.register_wrapper(Inner, "a.b")
    with pytest.raises(TypeError, match=r"a class of nn\.Module"):
        dcpring.register_wrapper(int, "a")  # type: ignore[arg-type]


# ---- tied tensors ----


class Tied(nn.Module):
    def __init__(self, head_first: bool) -> None:
        super().__init__()
        names = ("head", "embed") if head_first else ("embed", "head")
        for name in names:
            setattr(self, name, nn.Linear(4, 4, bias=False))
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_one_name_of_tied_tensors_is_enough(head_first: bool, kept: str) -> None:
    model = torch.compile(Tied(head_first))
    value = torch.rand(4, 4)
    dcpring.set_model_state_dict(model, {kept: value})
    assert torch.equal(model._orig_mod.embed.weight, value)
    assert model._orig_mod.embed.weight is model._orig_mod.head.weight


def test_optimizer_state_of_tied_parameters_loads_in_either_order() -> None:
    source, target = Tied(head_first=False), Tied(head_first=True)
    ours = torch.optim.AdamW(source.parameters(), lr=0.1)
    source.embed.weight.grad = torch.rand(4, 4)
    ours.step()
    theirs = torch.optim.AdamW(target.parameters())
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        state = dcpring.get_optimizer_state_dict(source, ours, options=options)
        dcpring.set_optimizer_state_dict(target, theirs, state, options=options)
        loaded = theirs.state[target.embed.weight]
        assert torch.equal(loaded["exp_avg"], ours.state[source.embed.weight]["exp_avg"])
        assert theirs.param_groups[0]["lr"] == 0.1


# ---- options ----


def test_frozen_parameters_are_left_out_and_not_missed() -> None:
    model = torch.compile(Net())
    model._orig_mod.block.requires_grad_(False)
    options = StateDictOptions(ignore_frozen_params=True)
    state = dcpring.get_model_state_dict(model, options=options)
    assert list(state) == ["first.weight", "first.bias", "block.scale", "head.weight"]
    dcpring.set_model_state_dict(model, state, options=options)
    with pytest.raises(KeyMismatchError, match=r"block\.down\.weight"):
        dcpring.set_model_state_dict(model, state)


def test_submodules_are_refused() -> None:
    """Stock has deprecated them."""
    model = Net()
    with pytest.raises(TypeError, match="choose from the state dict"):
        dcpring.get_model_state_dict(model, submodules={model.block})
    with pytest.raises(TypeError, match="a dict by submodules is not taken"):
        dcpring.set_model_state_dict(model, {model.block: model.block.state_dict()})


def test_all_mismatches_are_named() -> None:
    state = dict(Net().state_dict())
    renamed = {key.replace("head", "decoder"): value for key, value in state.items() if "first" not in key}
    with pytest.raises(KeyMismatchError) as caught:
        dcpring.set_model_state_dict(torch.compile(Net()), renamed)
    for name in ("first.weight", "first.bias", "head.weight", "decoder.weight"):
        assert repr(name) in str(caught.value)
    result = dcpring.set_model_state_dict(Net(), renamed, options=StateDictOptions(strict=False))
    assert sorted(result.missing_keys) == ["first.bias", "first.weight", "head.weight"]
    assert result.unexpected_keys == ["decoder.weight"]


def test_what_is_missing_in_activation_checkpointing_has_its_canonical_name() -> None:
    """These modules report by path, with what their hooks keep out of raw names."""
    model = build(Case("checkpoint_wrapper", "torch.compile", "block"))
    options = StateDictOptions(strict=False)
    result = dcpring.set_model_state_dict(model, {"head.weight": torch.zeros(WIDTH, WIDTH)}, options=options)
    assert sorted(result.missing_keys) == sorted(name for name in Net().state_dict() if name != "head.weight")


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="key number 0, 7, is not a str"):
        dcpring.set_model_state_dict(Net(), {7: torch.ones(1)})
    with pytest.raises(ValueError, match="full_state_dict must be True"):
        dcpring.get_model_state_dict(Net(), options=StateDictOptions(broadcast_from_rank0=True))
    with pytest.raises(RuntimeError, match="model state_dict is empty"):
        dcpring.set_model_state_dict(Net(), {})
    with pytest.raises(RuntimeError, match="Optimizers are not passed in"):
        dcpring.get_optimizer_state_dict(Net(), [])
    stranger = torch.optim.SGD(Net().parameters(), lr=1)
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0 of SGD .* is not in the model"):
        dcpring.get_optimizer_state_dict(Net(), stranger)


# ---- optimizers ----


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for index, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, float(index + 1))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[::2], "lr": 0.1}, {"params": params[1::2], "lr": 0.2, "weight_decay": 0.0}]


def _check_same_state(state: Any, other: Any) -> None:
    flat, _ = stock._flatten_state_dict(state)
    flat_other, _ = stock._flatten_state_dict(other)
    assert flat.keys() == flat_other.keys()
    for key, value in flat.items():
        there = flat_other[key]
        same = torch.equal(full_tensor(value), full_tensor(there)) if isinstance(value, Tensor) else value == there
        assert same, key


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("wrapper", ["torch.compile", "checkpoint_wrapper", "DDP", "FSDP2", "FSDP1 (use_orig_params)"])
def test_optimizer_state_of_a_wrapped_model(wrapper: str, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    plain = Net()
    source = torch.optim.AdamW(_groups(plain))
    _step(plain, source)
    state = dcpring.get_optimizer_state_dict(plain, source, options=options)
    _check_same_state(state, stock.get_optimizer_state_dict(plain, source, options=options))
    before = copy.deepcopy(state)

    model = build(Case(wrapper, "torch.compile" if wrapper == "checkpoint_wrapper" else "Module.compile", "block"))
    target = torch.optim.AdamW(_groups(model))
    full = StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=wrapper == "FSDP2")
    dcpring.set_optimizer_state_dict(model, target, state, options=full)
    _check_same_state(state, before)
    _check_same_state(state, dcpring.get_optimizer_state_dict(model, target, options=options))
    if not flat:
        stock.set_optimizer_state_dict(plain, torch.optim.AdamW(_groups(plain)), state)


def test_fsdp1_flat_optimizer_around_a_compiled_module() -> None:
    """Stock replaces text in these names, one parameter at a time."""
    model = build(Case("FSDP1 (flat)", "torch.compile", "root"))
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)
    state = dcpring.get_optimizer_state_dict(model, optimizer)
    assert set(state["state"]) == {name for name, _ in Net().named_parameters()}
    plain = Net()
    target = torch.optim.AdamW(plain.parameters())
    full = dcpring.get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    dcpring.set_optimizer_state_dict(plain, target, full)
    again = torch.optim.AdamW(model.parameters())
    dcpring.set_optimizer_state_dict(model, again, state)
    _check_same_state(state, dcpring.get_optimizer_state_dict(model, again))


def test_several_optimizers() -> None:
    model = Net()
    halves = [list(model.first.parameters()), list(model.block.parameters())]
    optimizers = [torch.optim.SGD(halves[0], lr=0.5, momentum=0.9), torch.optim.SGD(halves[1], lr=0.25)]
    _step(model, optimizers[0])
    model_state, state = dcpring.get_state_dict(model, optimizers)
    fresh = [torch.optim.SGD(halves[0], lr=1, momentum=0.9), torch.optim.SGD(halves[1], lr=1)]
    result = dcpring.set_state_dict(model, fresh, model_state_dict=model_state, optim_state_dict=state)
    assert not result.missing_keys and not result.unexpected_keys
    assert [one.param_groups[0]["lr"] for one in fresh] == [0.5, 0.25]
    buffers = [one.state[model.first.weight]["momentum_buffer"] for one in (optimizers[0], fresh[0])]
    assert torch.equal(*buffers)


def test_all_missing_optimizer_state_is_named() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = dcpring.get_optimizer_state_dict(model, optimizer, options=options)
    gone = [key for key in state if "head" in key]
    left = {key: value for key, value in state.items() if key not in gone}
    with pytest.raises(KeyMismatchError) as caught:
        dcpring.set_optimizer_state_dict(model, optimizer, left, options=options)
    assert all(key in str(caught.value) for key in gone if key.startswith("state."))
    options.strict = False
    dcpring.set_optimizer_state_dict(model, optimizer, left, options=options)


def test_state_below_the_first_level() -> None:
    """Optimizers like Shampoo keep dicts in their state; flattened, their keys have more parts."""
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nested = {"a": {"0": torch.ones(2), "1.5": torch.zeros(1)}, "b": torch.ones(1)}
    optimizer.state[model.weight] = nested
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = dcpring.get_optimizer_state_dict(model, optimizer, options=options)
    assert "state.weight.a.0" in state
    optimizer.state[model.weight] = copy.deepcopy(nested)
    changed = {key: value + 1 if isinstance(value, Tensor) else value for key, value in state.items()}
    dcpring.set_optimizer_state_dict(model, optimizer, changed, options=options)
    assert torch.equal(optimizer.state[model.weight]["a"]["0"], torch.full((2,), 2.0))


@pytest.mark.parametrize("flat", [False, True])
def test_loading_optimizer_state_takes_linear_time(flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def seconds(count: int) -> float:
        model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(count)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        _step(model, optimizer)
        state = dcpring.get_optimizer_state_dict(model, optimizer, options=options)
        start = time.process_time()
        dcpring.set_optimizer_state_dict(model, optimizer, state, options=options)
        return time.process_time() - start

    small, large = (min(seconds(count) for _ in range(3)) for count in (1000, 8000))
    assert large < 3 * 8 * small  # quadratic: 64


# ---- float8 ----


def test_float8_all_gather_weights_are_saved_plain(tmp_path: Any) -> None:
    """FSDP2 with float8 all-gather keeps weights in a tensor subclass, which a plain model could not unpickle."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)

    def make(seed: int) -> nn.Module:
        model = convert_to_float8_training(Net(seed), config=config)
        return fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))

    state = dcpring.get_model_state_dict(make(0))
    locals_ = [value.to_local() if hasattr(value, "to_local") else value for value in state.values()]
    assert {type(value) for value in locals_} <= {Tensor, nn.Parameter}
    dcp.save(state, storage_writer=RingWriter(tmp_path))
    plain = Net(1).state_dict()
    dcp.load(plain, storage_reader=RingReader(tmp_path))
    _check_equal(dict(plain), dict(Net(0).state_dict()))
    other = make(1)
    loaded = dcpring.get_model_state_dict(other)
    dcp.load(loaded, storage_reader=RingReader(tmp_path))
    dcpring.set_model_state_dict(other, loaded)
    _check_equal(_values(other), dict(Net(0).state_dict()))


# ---- through checkpoints, on two ranks ----

NAMED_PAIRS = [
    (Case("", "DDP", "root"), Case("", "FSDP2", "root")),
    (Case("", "FSDP1 (use_orig_params)", "root"), Case("FSDP2", "torch.compile", "root")),
    (Case("", "FSDP1 (flat)", "root"), Case("torch.compile", "FSDP2", "root")),
    (Case("torch.compile", "float8", "root"), Case("", "Module.compile", "root")),
    (Case("FSDP1 (use_orig_params)", "torch.compile", "block"), Case("DDP", "checkpoint_wrapper", "root")),
    (Case("FSDP2", "checkpoint_wrapper", "block"), Case("torch.compile", "DDP", "root")),
    (Case("checkpoint_wrapper", "torch.compile", "block"), Case("FSDP1 (flat)", "torch.compile", "root")),
    (Case("", "parametrization", "block"), Case("AveragedModel", "torch.compile", "root")),
    (Case("FSDP2", "LoRA (registered)", "block"), Case("", "FSDP2", "root")),
]


def _save_and_load(folder: str) -> list[str]:
    """Each pair both ways, and each of its sides to a plain model; returns what went wrong."""
    quiet()
    problems = []
    want = {name: value.clone() for name, value in Net(0).state_dict().items()}
    for number, pair in enumerate(NAMED_PAIRS):
        for way, (source, target) in enumerate((pair, pair[::-1])):
            path = f"{folder}/{number}-{way}"
            dcp.save(dcpring.get_model_state_dict(build(source, seed=0)), storage_writer=RingWriter(path))
            for other in (build(target, seed=1), Net(1)):
                state = dcpring.get_model_state_dict(other)
                loaded = {name: value for name, value in state.items() if name.rsplit(".")[-1] not in OWN}
                dcp.load(loaded, storage_reader=RingReader(path))
                dcpring.set_model_state_dict(other, loaded, options=StateDictOptions(strict=False))
                got = plain_values(dcpring.get_model_state_dict(other))
                problems += [f"{source} to {target}: {name}" for name in want if not torch.equal(got[name], want[name])]
    return problems


def test_named_pairs_through_a_checkpoint(tmp_path: Any) -> None:
    assert _distributed.run(2, _save_and_load, str(tmp_path)) == [[], []]


def _broadcast() -> list[bool]:
    """Full state on rank 0 only, into a sharded and compiled model with hooks, optimizer too."""
    quiet()
    results = []
    for case in (
        Case("torch.compile", "FSDP2", "root"),
        Case("", "DDP", "root"),
        Case("FSDP2", "LoRA (registered)", "root"),
    ):
        options = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True, strict=case.inner != "LoRA (registered)"
        )
        source = Net(5)
        optimizer = torch.optim.AdamW(source.parameters(), lr=0.3)
        _step(source, optimizer)
        rank0 = dist.get_rank() == 0
        state = dcpring.get_model_state_dict(source) if rank0 else {}
        optim_state = dcpring.get_optimizer_state_dict(source, optimizer) if rank0 else {}
        model = build(case, seed=1)
        target = torch.optim.AdamW(model.parameters())
        dcpring.set_model_state_dict(model, state, options=options)
        dcpring.set_optimizer_state_dict(model, target, optim_state, options=options)
        got = plain_values(dcpring.get_model_state_dict(model))
        results += [torch.equal(got[name], value) for name, value in source.state_dict().items()]
        moments = dcpring.get_optimizer_state_dict(model, target)["state"]
        for name, param in source.named_parameters():
            results.append(torch.equal(full_tensor(moments[name]["exp_avg"]), optimizer.state[param]["exp_avg"]))
    return results


def test_broadcast_from_rank_0() -> None:
    for results in _distributed.run(2, _broadcast):
        assert results and all(results)


def _full_to_cpu() -> list[str]:
    quiet()
    model = build(Case("", "FSDP2", "root"))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = dcpring.get_model_state_dict(model, options=options)
    return [
        name
        for name, value in state.items()
        if type(value) in (Tensor, nn.Parameter) and value.shape[-1] in (WIDTH, 2 * WIDTH, 1)
    ]


def test_full_state_dict_on_rank_0() -> None:
    rank0, rank1 = _distributed.run(2, _full_to_cpu)
    assert rank0 == list(Net().state_dict())
    assert rank1 == []


def test_lora_is_a_wrapper_by_registration() -> None:
    assert list(dcpring.get_model_state_dict(Lora(nn.Linear(WIDTH, WIDTH)))) == ["lora_a", "weight", "bias"]
    assert "base_layer.weight" in stock.get_model_state_dict(Lora(nn.Linear(WIDTH, WIDTH)))


@pytest.mark.parametrize("full", [True, False])
def test_garbage_is_collected_while_tensors_are_gathered(full: bool) -> None:
    """Which may take long; names and local tensors do not."""
    model, seen = nn.Linear(3, 4), list[bool]()
    model.register_state_dict_pre_hook(lambda *_: seen.append(gc.isenabled()))
    dcpring.get_model_state_dict(model, options=StateDictOptions(full_state_dict=full))
    assert seen == [full] and gc.isenabled()
