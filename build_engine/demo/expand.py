"""From the packed weights to a checkpoint folder in Hugging Face's MXFP4 form, with all 201,088 rows of the
vocabulary.

Invariant: the folder is written beside its place and renamed, so what stands under the name is whole. Rows of
unused ids are seeded random bytes scaled to the trained rows' size, the same on every machine. Knows no training.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gptoss_trt.build_engine.demo.network import Shape
from gptoss_trt.build_engine.demo.pack import Packed, read_packed, vocabulary_rows
from gptoss_trt.build_engine.spec import HARMONY_STOP_IDS
from gptoss_trt.build_engine.tokenizer_files import write_tokenizer_files
from gptoss_trt.build_engine.vocabulary import VOCABULARY_SIZE

WEIGHTS_NAME = "weights.xz"
SHARDS = 2


def packed_path() -> Path:
    """The packed weights that ship with the package. Raises FileNotFoundError where the installation lacks them."""
    path = Path(str(resources.files("gptoss_trt.build_engine.demo") / WEIGHTS_NAME))
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the installation is incomplete")
    return path


def _interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Rows gate 0, up 0, gate 1, up 1, ... of [E, I, ...] tensors."""
    return torch.stack((gate, up), 2).flatten(1, 2).contiguous()


def _layer_tensors(packed: Packed, layer: int) -> dict[str, Tensor]:
    own = {name: value[layer] for name, value in packed.tensors.items() if name not in ("embedding", "head", "norm")}
    names = {
        "input_layernorm.weight": "attention_norm", "post_attention_layernorm.weight": "moe_norm",
        "self_attn.q_proj.weight": "q", "self_attn.q_proj.bias": "q_bias", "self_attn.k_proj.weight": "k",
        "self_attn.k_proj.bias": "k_bias", "self_attn.v_proj.weight": "v", "self_attn.v_proj.bias": "v_bias",
        "self_attn.o_proj.weight": "out", "self_attn.o_proj.bias": "out_bias", "self_attn.sinks": "sinks",
        "mlp.router.weight": "router", "mlp.router.bias": "router_bias", "mlp.experts.down_proj_blocks": "down.blocks",
        "mlp.experts.down_proj_scales": "down.scales", "mlp.experts.down_proj_bias": "down_bias",
    }  # fmt: skip
    out = {f"model.layers.{layer}.{theirs}": own[ours].contiguous() for theirs, ours in names.items()}
    for theirs, ours in (("blocks", ".blocks"), ("scales", ".scales"), ("bias", "_bias")):
        out[f"model.layers.{layer}.mlp.experts.gate_up_proj_{theirs}"] = _interleave(
            own[f"gate{ours}"], own[f"up{ours}"]
        )
    return out


def config_json(shape: Shape) -> dict[str, Any]:
    """`config.json` in the form of the published gpt-oss checkpoints."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": HARMONY_STOP_IDS[0],
        "pad_token_id": HARMONY_STOP_IDS[1],
        "experts_per_token": shape.active,
        "num_experts_per_tok": shape.active,
        "num_local_experts": shape.experts,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(shape.layers)],
        "max_position_embeddings": 131072,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "output_router_logits": False,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": shape.window,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": VOCABULARY_SIZE,
    }  # fmt: skip


def _write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """model-0000x-of-0000y.safetensors and the index; the embedding alone fills the first."""
    names = list(tensors)
    parts = [names[:1], names[1:]]
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(value.numel() * value.element_size() for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")


def expand_demo_checkpoint(folder: Path, *, packed: Path | None = None) -> Path:
    """Writes the demo checkpoint to `folder` (about 210 MB) and returns it.

    A folder that is there already is replaced only when it holds a checkpoint (a config.json) or nothing: anything else
    raises FileExistsError. `packed` takes the place of the shipped weights.
    """
    content = read_packed(packed or packed_path())
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise FileExistsError(f"{folder} holds something else than a checkpoint")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        embedding, head = vocabulary_rows(content)
        tensors = {"model.embed_tokens.weight": embedding}
        for layer in range(content.tensors["attention_norm"].shape[0]):
            tensors.update(_layer_tensors(content, layer))
        tensors.update({"model.norm.weight": content.tensors["norm"], "lm_head.weight": head})
        _write_shards(part, tensors)
        (part / "config.json").write_text(json.dumps(config_json(_shape(content)), indent=2) + "\n")
        stops = {
            "bos_token_id": 199998,
            "do_sample": False,
            "eos_token_id": list(HARMONY_STOP_IDS),
            "pad_token_id": 199999,
        }
        (part / "generation_config.json").write_text(json.dumps(stops, indent=2) + "\n")
        write_tokenizer_files(part)
        part.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        part.replace(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return folder


def _shape(content: Packed) -> Shape:
    tensors = content.tensors
    layers, experts, intermediate = tensors["gate_bias"].shape
    heads = tensors["sinks"].shape[1]
    head_dim = tensors["q"].shape[1] // heads
    return Shape(
        layers, tensors["norm"].shape[0], intermediate, experts, 4, heads, tensors["k"].shape[1] // head_dim, head_dim
    )
