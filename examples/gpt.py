"""A small GPT over bytes, its text (the source of Python's own standard library) and its training with FSDP2."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCABULARY = 256
CONTEXT = 64
WIDTH = 512
HEADS = 8
LAYERS = 8
BATCH_ROWS = 8
LEARNING_RATE = 1e-3
WARM_UP_STEPS = 10
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed_norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # The rows of a head lie together: tensor parallelism has whole heads. There x is a part of the text.
        by_head = self.qkv(self.attention_norm(x)).unflatten(2, (-1, 3, WIDTH // HEADS))
        q, k, v = by_head.permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.projection(mixed)
        return x + self.down(F.gelu(self.up(self.feed_norm(x))))


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]).expand_as(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def library_text() -> Tensor:
    """The bytes of the standard library's modules, in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in library.rglob("*.py") if not NOT_LIBRARY & set(file.relative_to(library).parts))
    return torch.from_numpy(np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8).copy())


def batch(text: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one global step, each (BATCH_ROWS, CONTEXT): the same for any number of ranks."""
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH_ROWS, 1), generator=torch.Generator().manual_seed(step))
    window = text[starts + torch.arange(CONTEXT + 1)].long()
    return window[:, :-1], window[:, 1:]


class Trainer:
    """The model sharded over all processes (FSDP2), its AdamW and its text. Every rank takes its rows of each batch."""

    def __init__(self, seed: int) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (self.world,))
        torch.manual_seed(seed)
        self.model = GPT()
        self.parameters = sum(weight.numel() for weight in self.model.parameters())
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.text = library_text()

    def train(self, step: int) -> float:
        """Take one global step; returns its loss, the mean over the whole batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS)
        inputs, targets = (part.chunk(self.world)[self.rank] for part in batch(self.text, step))
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach() / self.world
        dist.all_reduce(mean)
        return mean.item()
