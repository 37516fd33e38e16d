"""Names in files that ``load_pretrained`` takes and ``save_pretrained_weights`` writes: those of transformers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    CamembertConfig,
    CLIPConfig,
    CLIPVisionConfig,
    GPT2Config,
    GptOssConfig,
    Inkling2TextConfig,
    Kimi_K25Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    MarianConfig,
    MixtralConfig,
    Molmo2TextConfig,
    OlmoHybridConfig,
    Qwen3MoeConfig,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import dcpring

TEXT = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SEEN = {key: value for key, value in TEXT.items() if key != "vocab_size"} | {"image_size": 28, "patch_size": 14}
PREFIX = "vision_tower.", "vision_tower.vision_model."
"""Of the names in a LLaVA from scratch, and in those on hubs."""


def kinds(kind: str) -> tuple[Any, Any]:
    if kind == "clip":
        return AutoModel, CLIPConfig(text_config=TEXT, vision_config=SEEN, projection_dim=32)
    if kind == "llava":
        parts = {"vision_config": CLIPVisionConfig(**SEEN), "text_config": LlamaConfig(**TEXT)}
        return AutoModelForImageTextToText, LlavaConfig(**parts, image_token_index=100)
    if kind == "kimi":  # one matrix of which two parts are permuted for rotary embeddings
        few = {
            name: 8 for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank")
        }
        few |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        few |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        text = {"model_type": "deepseek_v3", **TEXT, **few}
        return AutoModelForImageTextToText, Kimi_K25Config(text_config=text, vision_config=SEEN)
    if kind == "molmo":  # one matrix of parts of different sizes
        return AutoModel, Molmo2TextConfig(**TEXT, num_key_value_heads=2, head_dim=8)
    if kind == "gpt-oss":
        few = {"num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 8}
        return AutoModelForCausalLM, GptOssConfig(**(TEXT | {"intermediate_size": 64} | few))
    if kind == "gpt2":
        return AutoModelForCausalLM, GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    if kind == "mixtral":
        return AutoModelForCausalLM, MixtralConfig(**TEXT, num_local_experts=4, num_key_value_heads=2)
    if kind == "camembert":  # whose head comes before its embedding, to which it is tied
        return AutoModelForCausalLM, CamembertConfig(**TEXT)
    if kind == "olmo hybrid":  # one convolution of three parts, of which the last may be larger
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "pad_token_id": 0}
        heads |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_key_value_heads": 2}
        return AutoModelForCausalLM, OlmoHybridConfig(**TEXT, **heads)
    if kind == "inkling":  # rows of gate and up take turns
        few = {"n_routed_experts": 4, "num_experts_per_tok": 2, "swa_num_attention_heads": 4, "swa_head_dim": 8}
        few |= {"num_key_value_heads": 2, "swa_num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
        few["unpadded_vocab_size"] = TEXT["vocab_size"]
        return AutoModelForCausalLM, Inkling2TextConfig(**TEXT, **few)
    few = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return AutoModelForCausalLM, Qwen3MoeConfig(**TEXT, **few, num_key_value_heads=2, head_dim=8)


def made(kind: str, device: str = "cpu") -> Any:
    auto, config = kinds(kind)
    with torch.device(device):
        return auto.from_config(config)


def files_of(folder: Path) -> dict[str, Tensor]:
    found = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for part in found for name, tensor in part.items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ("clip", "llava", "mixtral", "camembert", "olmo hybrid", "inkling", "kimi", "molmo"))
def test_as_save_pretrained(tmp_path: Path, kind: str) -> None:
    model, loaded = made(kind), made(kind, "meta")
    model.save_pretrained(tmp_path / "theirs")
    assert not dcpring.load_pretrained(loaded, tmp_path / "theirs")
    assert_same(dict(loaded.named_buffers()), dict(model.named_buffers()))
    for number, each in enumerate((model, loaded)):
        dcpring.save_pretrained_weights(each, tmp_path / str(number))
        assert_same(files_of(tmp_path / str(number)), files_of(tmp_path / "theirs"))


def test_what_is_made_of_a_formula(tmp_path: Path) -> None:
    """``save_pretrained`` leaves it out, and ``from_pretrained`` makes it anew; what is on meta has to be."""
    few = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    few |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
    config = MarianConfig(vocab_size=128, pad_token_id=0, **few)
    model = AutoModelForSeq2SeqLM.from_config(config)
    with torch.device("meta"):
        loaded = AutoModelForSeq2SeqLM.from_config(config)
    model.save_pretrained(tmp_path / "theirs")
    missing = {f"model.{part}.embed_positions.weight" for part in ("encoder", "decoder")}
    assert {item.key for item in dcpring.load_pretrained(loaded, tmp_path / "theirs").missing} == missing
    assert_same(loaded.state_dict(), model.state_dict())
    dcpring.save_pretrained_weights(loaded, tmp_path / "ours")
    assert_same(files_of(tmp_path / "ours"), files_of(tmp_path / "theirs"))


def test_parts_of_different_sizes(tmp_path: Path) -> None:
    """As hubs have them; ``save_pretrained`` cuts into equal ones."""
    model, loaded = made("olmo hybrid"), made("olmo hybrid", "meta")
    model.save_pretrained(tmp_path)
    stored, number = files_of(tmp_path), 0
    for name, tensor in model.state_dict().items():
        if name.endswith("conv1d.weight"):
            parts = tensor.split([16, 16, 32])
            names = [name.replace("conv1d", f"{part}_conv1d") for part in "qkv"]
            assert stored.keys() >= set(names)
            stored |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
            number += 1
    assert number
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    assert not dcpring.load_pretrained(loaded, tmp_path)
    assert_same(loaded.state_dict(), model.state_dict())


@pytest.mark.usefixtures("group_of_one")
def test_a_model_whose_class_fsdp_has_changed(tmp_path: Path) -> None:
    """transformers goes by the names of classes."""
    model, loaded = made("llava"), made("llava", "meta")
    model.save_pretrained(tmp_path / "theirs")
    fully_shard(loaded.model.vision_tower)
    fully_shard(loaded)
    assert not dcpring.load_pretrained(loaded, tmp_path / "theirs")
    dcpring.save_pretrained_weights(loaded, tmp_path / "ours")
    assert_same(files_of(tmp_path / "ours"), files_of(tmp_path / "theirs"))
    assert isinstance(loaded, FSDPModule) and isinstance(loaded.model.vision_tower, FSDPModule)


@pytest.mark.usefixtures("group_of_one")
def test_tied_weights_that_are_parallelised(tmp_path: Path) -> None:
    """They become two parameters; ``from_pretrained`` ties what is stored twice and equal."""
    auto, config = AutoModelForCausalLM, LlamaConfig(**TEXT, tie_word_embeddings=True)
    model = auto.from_config(config)
    model.save_pretrained(tmp_path / "theirs")
    with torch.device("meta"):
        loaded = auto.from_config(config)
    plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()), "lm_head": ColwiseParallel()}
    parallelize_module(loaded, init_device_mesh("cpu", (1,)), plan)
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    assert not dcpring.load_pretrained(loaded, tmp_path / "theirs")
    assert torch.equal(loaded.lm_head.weight.full_tensor(), model.lm_head.weight)
    dcpring.save_pretrained_weights(loaded, tmp_path / "ours")
    config.save_pretrained(tmp_path / "ours")
    again = auto.from_pretrained(tmp_path / "ours")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert_same(again.state_dict(), model.state_dict())


def config_in(path: Path) -> Any:
    return json.loads((path / "config.json").read_text())


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("kind, sharded", (("llama", False), ("llama", True), ("clip", False), ("llava", True)))
def test_the_configuration_is_that_of_save_pretrained(tmp_path: Path, kind: str, sharded: bool) -> None:
    auto, config = (AutoModelForCausalLM, LlamaConfig(**TEXT)) if kind == "llama" else kinds(kind)
    model = auto.from_config(config)
    before = config.to_dict()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    dcpring.save_pretrained_weights(model, tmp_path / "ours", config=True, dtype=torch.bfloat16)
    with dcpring.Checkpointer(tmp_path / "all", {"model": model}, export_options={"dtype": torch.bfloat16}) as saving:
        saving.save(1, export="hf")
    assert model.config.to_dict() == before, "the model's own is not touched"
    auto.from_config(copy.deepcopy(config)).to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    theirs = config_in(tmp_path / "theirs")
    assert config_in(tmp_path / "ours") == config_in(tmp_path / "all" / "step-1" / "hf") == theirs
    has_generation = (tmp_path / "theirs" / "generation_config.json").exists()
    assert (tmp_path / "ours" / "generation_config.json").exists() == has_generation
    assert auto.from_pretrained(tmp_path / "ours").dtype == torch.bfloat16


class Custom(LlamaForCausalLM):  # type: ignore[misc]
    """A class of somebody's own, whose code goes with the weights."""


def test_code_of_a_custom_model_goes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Custom, "_auto_class", "AutoModelForCausalLM")
    model = Custom(LlamaConfig(**TEXT))
    dcpring.save_pretrained_weights(model, tmp_path / "ours", config=True)
    model.save_pretrained(tmp_path / "theirs")
    assert config_in(tmp_path / "ours") == config_in(tmp_path / "theirs")
    assert "auto_map" in config_in(tmp_path / "ours")
    names = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == names


@pytest.mark.parametrize("storage", ("safetensors", "DCP"))
@pytest.mark.parametrize("kind", ("mixtral", "qwen"))
def test_stored_as_the_model_has_them(tmp_path: Path, kind: str, storage: str) -> None:
    """Experts that are fused in the files too, as ``dcp.save`` of a model's state dict leaves them."""
    model, loaded = made(kind), made(kind, "meta")
    state = dcpring.get_model_state_dict(model)
    writer: Any = dcpring.RingHFWriter(tmp_path) if storage == "safetensors" else dcpring.RingWriter(tmp_path)
    dcp.save(state, storage_writer=writer, planner=dcpring.RingSavePlanner(), no_dist=True)
    assert not dcpring.load_pretrained(loaded, tmp_path)
    assert_same(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("kind", ("gpt2", "mixtral"))
@pytest.mark.parametrize("stored, wanted", ((AutoModel, None), (None, AutoModel)), ids=("head added", "head left out"))
def test_with_and_without_a_head(tmp_path: Path, kind: str, stored: Any, wanted: Any) -> None:
    """As hubs have GPT-2: without the prefix that all names have in a model with a head."""
    auto, config = kinds(kind)
    (stored or auto).from_config(config).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = (wanted or auto).from_config(config)
    heads = [] if stored is None or config.tie_word_embeddings else ["lm_head.weight"]
    diff = dcpring.load_pretrained(model, tmp_path, allow_missing=heads)
    assert [each.key for each in diff.missing] == heads
    expected = (wanted or auto).from_pretrained(tmp_path).state_dict()
    assert_same({**model.state_dict(), **{name: expected[name] for name in heads}}, expected)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("is_sharded", (False, True))
def test_experts_in_mxfp4(tmp_path: Path, is_sharded: bool) -> None:
    """As hubs have gpt-oss: the model has experts transposed, and under names without an ending."""
    stored: dict[str, Tensor] = {}
    made("gpt-oss").save_pretrained(tmp_path)
    for name, tensor in files_of(tmp_path).items():
        if tensor.dim() == 3:
            experts, rows, columns = tensor.shape
            stored[f"{name}_blocks"] = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.randint(110, 130, (experts, columns, rows // 32), dtype=torch.uint8)
        else:
            stored[name] = tensor
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = made("gpt-oss", "meta")
    if is_sharded:
        fully_shard(loaded)
    assert not dcpring.load_pretrained(loaded, tmp_path)
    for name, tensor in dcpring.get_model_state_dict(loaded).items():
        found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if tensor.dim() == 3:
            blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
            assert torch.equal(found, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)), name
        else:
            assert torch.equal(found, stored[name]), name


def test_what_a_hub_has(tmp_path: Path) -> None:
    """Names of older files are kept by a save after a load, as by ``from_pretrained`` and ``save_pretrained``."""
    made("llava").save_pretrained(tmp_path / "new")
    (tmp_path / "hub").mkdir()
    tensors = {name.replace(*PREFIX): tensor for name, tensor in files_of(tmp_path / "new").items()}
    save_file(tensors, tmp_path / "hub" / "model.safetensors", {"format": "pt"})
    (tmp_path / "hub" / "config.json").write_text(json.dumps(kinds("llava")[1].to_dict()))
    theirs, ours = AutoModelForImageTextToText.from_pretrained(tmp_path / "hub"), made("llava", "meta")
    assert not dcpring.load_pretrained(ours, tmp_path / "hub")
    assert_same(ours.state_dict(), theirs.state_dict())
    for number, each in enumerate((theirs, ours)):
        dcpring.save_pretrained_weights(each, tmp_path / f"{number}")
        each.save_pretrained(tmp_path / f"{number} by itself")
        assert_same(files_of(tmp_path / f"{number}"), tensors)
        assert_same(files_of(tmp_path / f"{number} by itself"), tensors)
