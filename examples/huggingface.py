"""From a pretrained directory into FSDP2 shards, a step of training, and back into a directory, without a conversion.

    torchrun --nproc-per-node 4 examples/huggingface.py [FOLDER]

needs transformers. A small Llama is made from a configuration and saved as hubs have models. Every rank then builds the
model on the meta device, shards it, reads its slices, trains a step, and writes its bytes of the new directory, which
``from_pretrained`` loads: bit for bit what the ranks hold.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

import dcpring


def main() -> None:
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    given = [sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()]
    dist.broadcast_object_list(given)
    pretrained, trained = os.path.join(given[0], "pretrained"), os.path.join(given[0], "trained")
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    if is_first:
        AutoModelForCausalLM.from_config(config).save_pretrained(pretrained)
    dist.barrier()

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    dcpring.load_pretrained(model, pretrained)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(32).reshape(1, 32) + dist.get_rank()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()

    dcpring.save_pretrained_weights(model, trained, config=True)
    whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in model.state_dict().items()}
    if is_first:
        loaded = AutoModelForCausalLM.from_pretrained(trained).state_dict()
        assert loaded.keys() == whole.keys() and all(torch.equal(loaded[name], whole[name]) for name in whole)
        before = AutoModelForCausalLM.from_pretrained(pretrained).state_dict()
        assert not torch.equal(before["lm_head.weight"], whole["lm_head.weight"])
        print(f"{trained}: {len(whole)} tensors, as the ranks hold them; {sorted(os.listdir(trained))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
