"""A small decoder in the stages of a pipeline, cut out of the whole model as torchtitan does it, and its training.

Every layer keeps the name that it has in the whole model. Schedules are torch's, over gloo.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _versions import clear_sharding_cache
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

from dcpring import RNG, ElasticLoader, ElasticSampler, Replicated

WORDS, WIDTH, LENGTH, BATCH = 16, 8, 4, 8
LAYERS = 6


class Layout(NamedTuple):
    """How a model is spread.

    Attributes:
        pp, dp, tp: the mesh.
        cuts: the layers at which stages begin, and where the last ends. Stages go to the ranks in turns.
        is_split: each part has an optimizer and a scheduler of its own.
    """

    pp: int
    dp: int
    tp: int
    cuts: tuple[int, ...]
    is_split: bool = False

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp


LAYOUTS = {
    "pp2 x dp2": Layout(2, 2, 1, (0, 3, 6)),
    "pp2 x tp2, cut elsewhere": Layout(2, 1, 2, (0, 1, 6)),
    "pp4": Layout(4, 1, 1, (0, 1, 3, 5, 6)),
    "interleaved": Layout(2, 2, 1, (0, 1, 3, 4, 6)),
    "interleaved, an optimizer for each part": Layout(2, 2, 1, (0, 2, 3, 5, 6), is_split=True),
    "dp4": Layout(1, 4, 1, (0, 6)),
    "one": Layout(1, 1, 1, (0, 6)),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, data: Tensor) -> Tensor:
        return data + self.down(F.gelu(self.up(self.norm(data))))


class Decoder(nn.Module):
    tokens: nn.Module | None
    head: nn.Module | None

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(LAYERS)})
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, data: Tensor) -> Tensor:
        data = data if self.tokens is None else self.tokens(data)
        for layer in self.layers.values():
            data = layer(data)
        return data if self.head is None else self.head(data)


def stage_of(model: Decoder, begin: int, end: int) -> Decoder:
    """A copy of a model with some of its layers; the first stage has the embedding, the last one the head."""
    stage = copy.deepcopy(model)
    for name in list(stage.layers):
        if not begin <= int(name) < end:
            del stage.layers[name]
    if begin > 0:
        stage.tokens = None
    if end < LAYERS:
        stage.head = None
    return stage


class Lines(Dataset[Tensor]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Tensor:
        return (torch.arange(LENGTH + 1) * (index % 7 + 1) + index) % WORDS


def adamw(parts: list[nn.Module]) -> torch.optim.AdamW:
    """With weight decay for matrices."""
    parameters = [parameter for part in parts for parameter in part.parameters()]
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others}], lr=0.01, weight_decay=0)


class Training:
    def __init__(self, layout: Layout, seed: int = 0) -> None:
        warnings.filterwarnings("ignore", category=FutureWarning)
        clear_sharding_cache()
        self.layout = layout
        mesh = init_device_mesh("cpu", (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp"))
        self.pp_group = mesh["pp"].get_group()
        self.stages = len(layout.cuts) - 1
        self.own = [stage for stage in range(self.stages) if stage % layout.pp == mesh["pp"].get_local_rank()]
        torch.manual_seed(seed)
        whole = Decoder()
        self.parts = [self._spread(stage_of(whole, *layout.cuts[stage : stage + 2]), mesh) for stage in self.own]
        self.optimizers = [adamw([part]) for part in self.parts] if layout.is_split else [adamw(self.parts)]
        self.schedulers = [
            torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (step + 1)) for one in self.optimizers
        ]
        sampler = ElasticSampler(200, rank=mesh["dp"].get_local_rank(), world_size=layout.dp)
        self.loader = ElasticLoader(DataLoader(Lines(), BATCH // layout.dp, sampler=sampler))
        self.progress = {"step": 0}

    def _spread(self, part: Decoder, mesh: Any) -> nn.Module:
        for block in part.layers.values():
            if self.layout.tp > 1:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(part, mesh=mesh["dp"]) if self.layout.dp > 1 else part

    def components(self) -> dict[str, Any]:
        """As one writes it: what there is one of on this rank by itself, several as a list."""

        def one_or_all(several: list[Any]) -> Any:
            return several if len(several) > 1 else several[0]

        return {
            "model": one_or_all(self.parts),
            "optimizer": one_or_all(self.optimizers),
            "scheduler": one_or_all(self.schedulers),
            "data": self.loader,
            "rng": RNG(),
            "progress": Replicated(self.progress),
        }

    def train(self, steps: int) -> list[float]:
        """Goes on to a step; the losses of the rank with the last stage."""
        kind: Any = Schedule1F1B if len(self.own) == 1 else ScheduleInterleaved1F1B
        made = [
            PipelineStage(part, stage, self.stages, torch.device("cpu"), group=self.pp_group)
            for stage, part in zip(self.own, self.parts, strict=True)
        ]
        schedule = kind(made[0] if len(made) == 1 else made, n_microbatches=4, loss_fn=_loss)
        losses: list[float] = []
        for batch in self.loader:
            found: list[Tensor] = []
            inputs = (batch[:, :-1].contiguous(),) if 0 in self.own else ()
            last = {"target": batch[:, 1:].contiguous(), "losses": found} if self.stages - 1 in self.own else {}
            schedule.step(*inputs, **last)
            for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses += [loss.item() for loss in found]
            self.progress["step"] += 1
            if self.progress["step"] >= steps:
                break
        return losses

    def pretend(self, steps: int = 2) -> None:
        """Steps without a pipeline: gradients that are a function of the parameters, the same in every layout."""
        for _ in range(steps):
            for parameter in (one for part in self.parts for one in part.parameters()):
                parameter.grad = parameter.detach() * 0.5 + 0.1
            for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    def everything(self) -> dict[str, dict[str, Any]]:
        """The value, the state and the options of every parameter of the whole model, whole. Collective."""
        own: dict[str, dict[str, Any]] = {}
        names = {parameter: name for part in self.parts for name, parameter in part.named_parameters()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                options = {name: value for name, value in group.items() if name != "params"}
                for parameter in group["params"]:
                    state = {name: _whole(value) for name, value in optimizer.state[parameter].items()}
                    own[names[parameter]] = {"value": _whole(parameter), **state, **options}
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, own)
        return {name: each[name] for each in seen for name in each}


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _whole(value: Any) -> Any:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().clone() if isinstance(whole, Tensor) else whole


def same(a: dict[str, dict[str, Any]], b: dict[str, dict[str, Any]]) -> bool:
    """Whether two of ``everything`` are equal to the bit."""
    return a.keys() == b.keys() and all(
        a[name].keys() == b[name].keys()
        and all(
            torch.equal(x, y) if isinstance(x, Tensor) else x == y
            for x, y in zip(a[name].values(), b[name].values(), strict=True)
        )
        for name in a
    )
