"""An EAGLE-3 head as it is published: config.json and safetensors of one decoder layer, and its forward pass.

Invariant: every tensor of the checkpoint is used or named in an error. Must not know sequences or schedules.

The head guesses the token behind the next one: its layer reads the next token's embedding beside a feature, which is
`fc` of three hidden states of the target, or in a chain the head's own output. Layout (EAGLE-3 as trained by its
authors and by SpecForge, LlamaForCausalLMEagle3): fc [H, 3 H']; midlayer.input_layernorm (of the embedding),
.hidden_norm (of the feature), .self_attn.{q,k,v}_proj [., 2 H], .o_proj, .post_attention_layernorm,
.mlp.{gate,up,down}_proj; norm; lm_head [draft vocabulary, H]; d2t (a draft id plus its entry is the target's id) and
t2d (which ids have a draft id); embed_tokens where the target's are not used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from gptoss_trt.build_engine.spec import ModelConfig
from gptoss_trt.ops import ops
from gptoss_trt.ops.prepare import RopeConfig, rope_table
from gptoss_trt.runtime.engine.core import EngineLoadError

FEATURES = 3


@dataclass(frozen=True)
class HeadConfig:
    """What config.json says of a head. `features`: the target's layers whose inputs it reads."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    draft_vocabulary: int
    eps: float
    rope: RopeConfig
    norm_before_residual: bool
    features: tuple[int, ...]

    @classmethod
    def read(cls, folder: Path, target: ModelConfig) -> HeadConfig:
        """Raises EngineLoadError for a file that is absent or lacks an entry, or a head of another target."""
        path = folder / "config.json"
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            layers = target.num_layers
            eagle = raw.get("eagle_config") or {}
            features = eagle.get("eagle_aux_hidden_state_layer_ids") or (2, layers // 2, layers - 3)
            head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
            config = cls(
                hidden=raw["hidden_size"],
                heads=raw["num_attention_heads"],
                kv_heads=raw.get("num_key_value_heads", raw["num_attention_heads"]),
                head_dim=head_dim,
                intermediate=raw["intermediate_size"],
                vocabulary=raw["vocab_size"],
                draft_vocabulary=raw.get("draft_vocab_size") or raw["vocab_size"],
                eps=raw.get("rms_norm_eps", 1e-6),
                rope=_rope(path, head_dim, raw.get("rope_theta", 10000.0), raw.get("rope_scaling") or {}),
                norm_before_residual=bool(raw.get("norm_before_residual", eagle.get("norm_before_residual", False))),
                features=tuple(features),
            )
        except (OSError, json.JSONDecodeError) as error:
            raise EngineLoadError(f"the EAGLE-3 head {folder} cannot be loaded: {error}") from error
        except KeyError as error:
            raise EngineLoadError(f"{path} has no entry {error}") from error
        config._check(path, raw, target)
        return config

    def _check(self, path: Path, raw: dict[str, Any], target: ModelConfig) -> None:
        for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "draft_vocabulary"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise EngineLoadError(f"{path}: the size of {name} is {value!r}; it must be an integer of at least 1")
        if self.vocabulary != target.vocab_size:
            raise EngineLoadError(
                f"{path} is of a vocabulary of {self.vocabulary} tokens, the engine has {target.vocab_size}"
            )
        if raw.get("num_hidden_layers", 1) != 1:
            raise EngineLoadError(f"{path} has {raw['num_hidden_layers']} layers; an EAGLE-3 head has 1")
        if len(self.features) != FEATURES or not all(0 <= layer < target.num_layers for layer in self.features):
            raise EngineLoadError(
                f"{path} reads the inputs of layers {list(self.features)}; {FEATURES} of the engine's "
                f"0..{target.num_layers - 1} are expected"
            )


class EagleHead:
    """The head's weights on `device`, and its keys and values, whose blocks are those of the target's full pool."""

    def __init__(self, folder: Path, target: ModelConfig, target_embedding: torch.Tensor, device: torch.device) -> None:
        self.config = config = HeadConfig.read(folder, target)
        tensors = _read(folder, _shapes(config, target.hidden_size))
        self._to_target = _target_ids(folder, tensors.pop("d2t", None), config).to(device)
        tensors.pop("t2d", None)
        w = {name: tensor.to(device=device, dtype=torch.bfloat16) for name, tensor in tensors.items()}
        self._embedding = w.pop("embed_tokens.weight", target_embedding)
        if self._embedding.shape[1] != config.hidden:
            raise EngineLoadError(
                f"{folder} has no embed_tokens; the engine's are {self._embedding.shape[1]} wide, not {config.hidden}"
            )
        self._w = w
        self._qkv = torch.cat([w.pop(f"midlayer.self_attn.{name}_proj.weight") for name in "qkv"])
        self._gate_up = torch.cat([w.pop(f"midlayer.mlp.{name}_proj.weight") for name in ("gate", "up")])
        self._sinks = torch.full((config.heads,), -torch.inf, dtype=torch.bfloat16, device=device)
        self._cos_sin = rope_table(config.rope, target.max_context, device)
        self._kv: tuple[torch.Tensor, torch.Tensor] | None = None
        self.device = device

    @property
    def weights(self) -> int:
        """Weights that one token is multiplied with."""
        return self._qkv.numel() + self._gate_up.numel() + sum(weight.numel() for weight in self._w.values())

    def block_bytes(self, block_tokens: int) -> int:
        """Memory of its keys and values in one block."""
        return 2 * 2 * self.config.kv_heads * block_tokens * self.config.head_dim

    def allocate_kv(self, blocks: int, block_tokens: int) -> None:
        shape = (blocks, self.config.kv_heads, block_tokens, self.config.head_dim)
        self._kv = (
            torch.zeros(shape, dtype=torch.bfloat16, device=self.device),
            torch.zeros(shape, dtype=torch.bfloat16, device=self.device),
        )

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """The feature of each token, bf16 [T, H], from the target's hidden states [T, 3 H']."""
        return _product(features, self._w["fc.weight"])

    def forward(
        self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, query_start: torch.Tensor,
        context_lens: torch.Tensor, block_table: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Writes the keys of T tokens of S sequences and returns the layer's output, bf16 [T, H]: features for a chain.

        `tokens` int32 [T]: the token behind each position; `features` bf16 [T, H]; the rest as in StepBatch. Raises
        RuntimeError before allocate_kv.
        """
        if self._kv is None:
            raise RuntimeError("allocate_kv comes before the head's first forward")
        c, w = self.config, self._w
        block_tokens = self._kv[0].shape[2]
        embedded = self._normed(self._embedding[tokens.long()], "midlayer.input_layernorm")
        normed = self._normed(features, "midlayer.hidden_norm")
        residual = normed if c.norm_before_residual else features
        qkv = _product(torch.cat((embedded, normed), dim=1), self._qkv)
        slots = torch.empty_like(positions)
        ops.kv_slots(positions, query_start, block_table, None, block_tokens, slots)
        q = torch.empty((len(tokens), c.heads, c.head_dim), dtype=torch.bfloat16, device=self.device)
        ops.rope_kv_append(qkv, positions, self._cos_sin, slots, 1.0, 1.0, q, *self._kv)
        out = torch.empty_like(q)
        how = (self._sinks, 0, c.head_dim**-0.5, 1.0, 1.0, out)
        ops.attention_prefill(q, *self._kv, block_table, None, query_start, context_lens, *how)
        residual = residual + _product(out.flatten(1), w["midlayer.self_attn.o_proj.weight"])
        gate, up = _product(self._normed(residual, "midlayer.post_attention_layernorm"), self._gate_up).chunk(2, dim=1)
        hidden = torch.nn.functional.silu(gate) * up
        return residual + _product(hidden, w["midlayer.mlp.down_proj.weight"])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [T, draft vocabulary], in the order of the target's ids."""
        return _product(self._normed(hidden, "norm"), self._w["lm_head.weight"]).float()

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return self._to_target[draft_ids.long()]

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        out = torch.empty_like(x)
        ops.rmsnorm_quant(x.contiguous(), None, self._w[f"{name}.weight"], self.config.eps, out, None, None)
        return out


def _rope(path: Path, head_dim: int, theta: float, scaling: dict[str, Any]) -> RopeConfig:
    """Plain rotation, or YaRN as gpt-oss has it. Raises EngineLoadError for another kind."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(head_dim, theta, 1.0)
    if kind != "yarn" or scaling.get("truncate", True):
        raise EngineLoadError(
            f"{path} has rope_scaling {scaling}; read are plain rotation and yarn with truncate false"
        )
    return RopeConfig(
        head_dim,
        theta,
        scaling["factor"],
        scaling["original_max_position_embeddings"],
        scaling.get("beta_fast", 32.0),
        scaling.get("beta_slow", 1.0),
    )


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty((len(x), len(weight)), dtype=torch.bfloat16, device=x.device)
    ops.dense(x.contiguous(), weight, None, out)
    return out


def _shapes(config: HeadConfig, target_hidden: int) -> dict[str, tuple[int, ...]]:
    """Every tensor that a head may have, with its shape."""
    h, q, kv = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    return {
        "fc.weight": (h, FEATURES * target_hidden),
        **{f"{name}.weight": (h,) for name in norms},
        "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.mlp.gate_proj.weight": (config.intermediate, h),
        "midlayer.mlp.up_proj.weight": (config.intermediate, h),
        "midlayer.mlp.down_proj.weight": (h, config.intermediate),
        "lm_head.weight": (config.draft_vocabulary, h),
        "embed_tokens.weight": (config.vocabulary, h),
        "d2t": (config.draft_vocabulary,),
        "t2d": (config.vocabulary,),
    }


def _read(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cpu") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                name = key.removeprefix("model.").replace("layers.0.", "midlayer.")
                if name not in shapes:
                    raise EngineLoadError(f"{path}: {key} belongs to no EAGLE-3 head that is read here")
                tensors[name] = file.get_tensor(key)
                if tuple(tensors[name].shape) != shapes[name]:
                    raise EngineLoadError(f"{path}: {key} is {tuple(tensors[name].shape)}, expected {shapes[name]}")
    missing = sorted(set(shapes) - set(tensors) - {"embed_tokens.weight", "d2t", "t2d"})
    if missing:
        raise EngineLoadError(f"the EAGLE-3 head {folder} lacks {', '.join(missing)}")
    return tensors


def _target_ids(folder: Path, offsets: torch.Tensor | None, config: HeadConfig) -> torch.Tensor:
    """int64 [draft vocabulary]: the target's id of each draft id. Raises EngineLoadError for ids that do not exist."""
    if offsets is None and config.draft_vocabulary != config.vocabulary:
        raise EngineLoadError(
            f"the EAGLE-3 head {folder} has {config.draft_vocabulary} of {config.vocabulary} tokens and no d2t"
        )
    ids = torch.arange(config.draft_vocabulary)
    if offsets is not None:
        ids = ids + offsets.long()
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.vocabulary or bool((ids.diff() <= 0).any()):
        raise EngineLoadError(
            f"{folder}: d2t gives ids {low} to {high}; they ascend and lie in 0..{config.vocabulary - 1}"
        )
    return ids
