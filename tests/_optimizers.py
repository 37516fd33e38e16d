"""Optimizers of every kind, for tests of what saving and loading does to them: torch's, and strange ones."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Muon takes nothing else."""
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


TORCHS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), initial_accumulator_value=0.5),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, weight_decay=0.1),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5, amsgrad=True),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters()),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3, line_search_fn="strong_wolfe"),
    "Muon": lambda m: torch.optim.Muon(matrices(m), lr=0.1),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters()),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters()),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.9, centered=True),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.1),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "SparseAdam": lambda m: torch.optim.SparseAdam(m.parameters()),
}
VARIANTS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD with momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.1, weight_decay=1),
    "AdamW foreach": lambda m: torch.optim.AdamW(m.parameters(), foreach=True),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "SGD fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    "AdamW, lr a tensor": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.1), foreach=False),
    "Adam, maximize": lambda m: torch.optim.Adam(m.parameters(), maximize=True),
    "AdamW by names": lambda m: torch.optim.AdamW(list(m.named_parameters())),
}


class Plain(Optimizer):
    """Moves its parameters by a rate of its own name, whatever their gradients."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"rate": 0.1, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter].setdefault("seen", torch.zeros_like(parameter)).add_(1)
                    parameter.mul_(1 - group["rate"]).sub_(parameter.grad)


class Noisy(Plain):
    """Draws random numbers from every generator there is."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(3)

    def step(self, closure: Any = None) -> None:
        import numpy

        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            noise = random.random() + numpy.random.rand() + torch.rand(parameter.shape)
            self.state[parameter]["noise"] = noise + torch.rand(parameter.shape, generator=self.generator)


class Caching(Plain):
    """Steps the parameters that it has in a list of its own, as LBFGS does, and counts in attributes and groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.own = {"parameters": [p for group in self.param_groups for p in group["params"]]}
        self.steps = 0
        self.counts = [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.counts[0] += 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        for parameter in self.own["parameters"]:
            self.state[parameter]["average"] = parameter.clone()
            parameter.mul_(0.5)


class Closing(Plain):
    """Cannot step without a closure."""

    def step(self, closure: Any = None) -> None:
        closure()
        super().step()


class Recorded(torch.optim.AdamW):
    """Has a state dict of its own, in torch's form and with something more."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.note = 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "note": self.note}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.note = state["note"]
        super().load_state_dict({name: state[name] for name in ("state", "param_groups")})


class Wrapper(Optimizer):
    """Passes on what it is asked, as accelerate's does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.lock = __import__("threading").Lock()  # cannot be copied

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Container(Optimizer):
    """Holds others, as torchtitan's does: flat names of its own, and a step of those that have no state yet."""

    def __init__(self, model: nn.Module, make: Callable[[Any], Optimizer] | None = None, first: int = 2) -> None:
        make = make or (lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5))
        named = list(model.named_parameters())
        self.model_parts = [model]
        self.optimizers = [make(named[:first]), make(named[first:])]
        Optimizer.__init__(self, [parameter for _, parameter in named], {})

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.optimizers)

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for optimizer in self.optimizers:
            make_state(optimizer)
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    found |= {f"state.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
                    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                    found |= {f"param_groups.{name}.{key}": value for key, value in options.items()}
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer in self.optimizers:
            make_state(optimizer)
            own = optimizer.state_dict()
            names = [name for group in optimizer.param_groups for name in group["param_names"]]
            for number, name in enumerate(names):
                own["state"][number] = {key: state[f"state.{name}.{key}"] for key in own["state"][number]}
            for group in own["param_groups"]:
                for key in group.keys() - {"params", "param_names"}:
                    group[key] = state[f"param_groups.{group['param_names'][0]}.{key}"]
            optimizer.load_state_dict(own)


def make_state(optimizer: Optimizer) -> None:
    """As DCP and torchtitan do: a step with gradients of zero."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.state or any(p.grad is not None for p in parameters):
        return
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step(closure=None)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


STRANGE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Plain": lambda m: Plain(m.parameters()),
    "Noisy": lambda m: Noisy(m.parameters()),
    "Caching": lambda m: Caching(m.parameters()),
    "Closing": lambda m: Closing(m.parameters()),
    "Recorded": lambda m: Recorded(m.parameters()),
    "Wrapper": lambda m: Wrapper(torch.optim.AdamW(m.parameters(), lr=0.1)),
    "Container": Container,
    "Container of a wrapper": lambda m: Container(m, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
}
ALL = TORCHS | VARIANTS | STRANGE
WITHOUT_A_FIRST_STEP = {"LBFGS", "SparseAdam", "Closing"}
"""Those that cannot take a step with plain gradients of zero and no closure."""


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(2))

    def forward(self, data: Tensor) -> Tensor:
        return self.second(self.first(data).tanh())


def train(model: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    """Some steps, in whatever way the optimizer takes one, that leave gradients."""
    inner = optimizer.optimizer if isinstance(optimizer, Wrapper) else optimizer
    for step in range(steps):
        data = torch.linspace(-1, 1, 8).reshape(2, 4) + step

        def closure(data: Tensor = data) -> Tensor:
            optimizer.zero_grad()
            loss = model(data).square().sum()
            loss.backward()
            return loss

        closure()
        if isinstance(inner, torch.optim.SparseAdam):
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.to_sparse()
        optimizer.step(*([closure] if isinstance(inner, torch.optim.LBFGS | Closing) else []))


def seen_by_training(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """All that training could notice, in copies, and who is who."""
    everything = {id(optimizer): optimizer}
    for value in vars(optimizer).values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Optimizer):
                everything[id(one)] = one
    parameters = [*model.parameters(), *model.buffers()]
    return {
        "values": [parameter.detach().clone() for parameter in parameters],
        "versions": [parameter._version for parameter in parameters],
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in parameters],
        "requires_grad": [parameter.requires_grad for parameter in parameters],
        "state": [copy.deepcopy({id(p): s for p, s in one.state.items()}) for one in everything.values()],
        "state's": [[id(v) for s in one.state.values() for v in s.values()] for one in everything.values()],
        "groups": [copy.deepcopy(without_parameters(one)) for one in everything.values()],
        "groups'": [[[(k, id(v)) for k, v in g.items()] for g in one.param_groups] for one in everything.values()],
        "attributes": [
            {name: copy.copy(value) for name, value in vars(one).items() if isinstance(value, int | list | str)}
            for one in everything.values()
        ],
        "random": [torch.get_rng_state(), random.getstate(), numpy_state()],
        "own random": [one.generator.get_state() for one in everything.values() if isinstance(one, Noisy)],
    }


def without_parameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def numpy_state() -> tuple[Any, ...]:
    import numpy

    kind, numbers, *rest = numpy.random.get_state()
    return kind, numbers.tolist(), rest


def equal(a: Any, b: Any) -> bool:
    """Bit by bit."""
    if isinstance(a, Tensor):
        alike = isinstance(b, Tensor) and (a.dtype, a.layout, a.shape) == (b.dtype, b.layout, b.shape)
        return alike and torch.equal(a.to_dense(), b.to_dense())
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b) or a is b
