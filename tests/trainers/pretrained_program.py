"""One rank that loads a model, on meta and sharded with FSDP2, from what ``save_pretrained`` wrote, and writes it.

Models with experts are those whose tensors transformers has otherwise than the files: fused, and stacked.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

import dcpring

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


def config_of(kind: str) -> PreTrainedConfig:
    if kind == "deepseek":
        few = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        return DeepseekV3Config(**SMALL, **LATENT, **EXPERTS, **few)
    if kind == "mixtral":
        return MixtralConfig(**SMALL, num_local_experts=4, num_key_value_heads=2)
    if kind == "qwen":
        return Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=4, num_key_value_heads=2, head_dim=8)
    if kind == "gpt-oss":
        return GptOssConfig(**SMALL, num_local_experts=4, num_key_value_heads=2, head_dim=8)
    return LlamaConfig(**SMALL, tie_word_embeddings=kind == "tied")


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    found = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for part in found for name, tensor in part.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    config = config_of(options.kind)
    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_config(config)
    if dist.get_rank() == 0:
        expected.save_pretrained(options.folder, max_shard_size="20KB")
    dist.barrier()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert not dcpring.load_pretrained(model, options.folder)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (options.kind == "tied")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        logits, wanted = model(tokens).logits, expected(tokens).logits
    assert torch.equal(logits.full_tensor() if isinstance(logits, DTensor) else logits, wanted)
    dcpring.save_pretrained_weights(model, options.folder / "back")
    if dist.get_rank() == 0:
        before, after = files_of(options.folder), files_of(options.folder / "back")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
