"""One rank that loads a Llama, on meta and sharded with FSDP2, from what ``save_pretrained`` wrote."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import dcpring


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tie", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=options.tie,
    )
    torch.manual_seed(0)
    expected = LlamaForCausalLM(config)
    if dist.get_rank() == 0:
        expected.save_pretrained(options.folder, max_shard_size="20KB")
    dist.barrier()
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert not dcpring.load_pretrained(model, options.folder)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == options.tie
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        logits, wanted = model(tokens).logits, expected(tokens).logits
    assert torch.equal(logits.full_tensor() if isinstance(logits, DTensor) else logits, wanted)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
