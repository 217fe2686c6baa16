"""Tiny, randomly initialized causal language models that the law tests run over."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

WINDOW = 16
SLIDING, FULL = "sliding_attention", "full_attention"
ALTERNATING = (SLIDING, FULL)

TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
COMMON: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.3,
    attention_dropout=0.0,
    **TOKENS,
)
# The names that GPT-2 and its relatives use.
GPT2_STYLE: dict[str, Any] = dict(
    vocab_size=97,
    n_embd=32,
    n_inner=48,
    n_layer=3,
    n_head=4,
    n_positions=512,
    initializer_range=0.3,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    **TOKENS,
)


def _common(*without: str, **extra: Any) -> dict[str, Any]:
    return {key: value for key, value in COMMON.items() if key not in without} | extra


@dataclass(frozen=True)
class Family:
    """One row: how to build the model, and where its parts are.

    ``layers`` is a path from the causal LM; ``attention``, ``mlp`` and ``down`` are paths from one
    layer. In a ``parallel`` layer the MLP does not see the attention output.
    """

    name: str
    model_class: str
    config_class: str
    overrides: Mapping[str, Any] = field(default_factory=lambda: dict(COMMON))
    gated: bool = True
    layers: str = "model.layers"
    attention: str = "self_attn"
    mlp: str = "mlp"
    down: str = "mlp.down_proj"
    parallel: bool = False


FAMILIES: tuple[Family, ...] = (
    Family("llama", "LlamaForCausalLM", "LlamaConfig", _common(head_dim=8)),
    Family("mistral", "MistralForCausalLM", "MistralConfig", _common(head_dim=8, sliding_window=WINDOW)),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        "Qwen2Config",
        _common(use_sliding_window=True, sliding_window=WINDOW, layer_types=ALTERNATING),
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        "Qwen3Config",
        _common(head_dim=8, use_sliding_window=True, sliding_window=WINDOW, layer_types=ALTERNATING),
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        _common(head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW, layer_types=ALTERNATING),
    ),
    Family(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _common(head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW, layer_types=ALTERNATING),
    ),
    Family("phi3", "Phi3ForCausalLM", "Phi3Config", _common(sliding_window=WINDOW)),
    Family("olmo2", "Olmo2ForCausalLM", "Olmo2Config"),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        "Olmo3Config",
        _common(sliding_window=WINDOW, layer_types=ALTERNATING),
    ),
    Family(
        "granite",
        "GraniteForCausalLM",
        "GraniteConfig",
        _common(
            mlp_bias=True,
            embedding_multiplier=2.0,
            logits_scaling=2.0,
            residual_multiplier=0.5,
            attention_multiplier=0.35,
        ),
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        _common(
            no_rope_layer_interval=2,
            use_sliding_window=True,
            sliding_window=WINDOW,
            layer_types=ALTERNATING,
        ),
    ),
    Family(
        "cohere2",
        "Cohere2ForCausalLM",
        "Cohere2Config",
        _common(logit_scale=1.0, sliding_window=WINDOW, layer_types=ALTERNATING),
        parallel=True,
    ),
    Family("stablelm", "StableLmForCausalLM", "StableLmConfig", _common(hidden_dropout=0.0)),
    Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        "Starcoder2Config",
        _common(sliding_window=WINDOW),
        gated=False,
        down="mlp.c_proj",
    ),
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        _common("num_key_value_heads", hidden_dropout=0.0),
        gated=False,
        layers="gpt_neox.layers",
        attention="attention",
        down="mlp.dense_4h_to_h",
        parallel=True,
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        GPT2_STYLE,
        gated=False,
        layers="transformer.h",
        attention="attn",
        down="mlp.c_proj",
    ),
    # `fc1` holds gate and value together, so `ffn_dim` is twice the inner width. The window stays
    # at full length: Moshi applies it to the cache alone, so a shorter one would change the model.
    Family(
        "moshi",
        "MoshiForCausalLM",
        "MoshiConfig",
        _common("intermediate_size", head_dim=8, ffn_dim=96, sliding_window=512),
        down="mlp.fc2",
    ),
)

# Dense, and not known by name: automatic detection must find their parts.
UNLISTED: tuple[Family, ...] = (
    Family("phi", "PhiForCausalLM", "PhiConfig", gated=False, down="mlp.fc2", parallel=True),
    Family(
        "falcon",
        "FalconForCausalLM",
        "FalconConfig",
        _common(
            "intermediate_size",
            "num_key_value_heads",
            ffn_hidden_size=48,
            num_kv_heads=2,
            new_decoder_architecture=True,
            hidden_dropout=0.0,
            bias=True,
        ),
        gated=False,
        layers="transformer.h",
        attention="self_attention",
        down="mlp.dense_4h_to_h",
        parallel=True,
    ),
    Family(
        "gptj",
        "GPTJForCausalLM",
        "GPTJConfig",
        GPT2_STYLE | {"rotary_dim": 4},
        gated=False,
        layers="transformer.h",
        attention="attn",
        down="mlp.fc_out",
        parallel=True,
    ),
)

# Mixtures of experts. A layer with routed experts alone must be refused: no down-projection of it sees every
# token.
MOE: tuple[Family, ...] = (
    Family(
        "mixtral",
        "MixtralForCausalLM",
        "MixtralConfig",
        _common(head_dim=8, num_local_experts=4, num_experts_per_tok=2),
        down="",
    ),
    # The first layer alone is dense.
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _common(
            head_dim=8,
            moe_intermediate_size=48,
            num_experts=4,
            num_experts_per_tok=2,
            mlp_only_layers=[0],
        ),
        down="",
    ),
    # A gated shared expert in every layer, which takes all rows as one.
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        _common(
            "intermediate_size",
            moe_intermediate_size=16,
            shared_expert_intermediate_size=40,
            num_experts=4,
            num_experts_per_tok=2,
        ),
        mlp="mlp.shared_expert",
        down="mlp.shared_expert.down_proj",
    ),
    # The first layer is dense; the others have a shared expert, which is narrower.
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        _common(
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=2,
            moe_intermediate_size=12,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
        ),
        mlp="mlp.shared_experts",
        down="mlp.shared_experts.down_proj",
    ),
)

BY_NAME: dict[str, Family] = {family.name: family for family in FAMILIES + UNLISTED + MOE}


def build(
    family: str | Family,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config_overrides: Any,
) -> PreTrainedModel:
    """Build one family in eval mode.

    One seed gives the same weights in every dtype, up to rounding. Vectors (biases and norm scales)
    are moved off their constant start, so that none is a no-op.
    """
    row = BY_NAME[family] if isinstance(family, str) else family
    config = config_for(row, **config_overrides)
    model_class = getattr(transformers, row.model_class)
    attention = "sdpa" if model_class._supports_sdpa else "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class._from_config(
            config, attn_implementation=attention, dtype=torch.float32
        )
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
            # Parameters only: rotary tables stay in float32, as they do in a loaded model.
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.train(False)
    return model


def config_for(row: Family, **overrides: Any) -> PreTrainedConfig:
    """The row's tiny config."""
    made: PreTrainedConfig = getattr(transformers, row.config_class)(
        **_repeat_layer_types({**row.overrides, **overrides})
    )
    return made


def _repeat_layer_types(settings: dict[str, Any]) -> dict[str, Any]:
    """Repeat the pattern of layer types over the number of layers."""
    if "layer_types" not in settings:
        return settings
    pattern = islice(cycle(settings["layer_types"]), settings["num_hidden_layers"])
    return settings | {"layer_types": list(pattern)}
