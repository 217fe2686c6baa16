"""Tiny vision-language models, one a family."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

TEXT: dict[str, Any] = dict(
    vocab_size=120, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=512, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
# As deep and as wide as the text: only its place tells it from that.
VISION: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, image_size=28, patch_size=14
)  # fmt: skip
PATCHES: dict[str, Any] = dict(
    depth=3, hidden_size=32, out_hidden_size=32, intermediate_size=48, num_heads=4, patch_size=4
)
IDS: dict[str, int] = dict(
    image_token_id=101, video_token_id=102, vision_start_token_id=103, vision_end_token_id=104
)


def axes(*section: int, **more: Any) -> dict[str, Any]:
    return TEXT | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section), **more}
    }


CONFIGS: dict[str, Callable[[], Any]] = {
    "Qwen2VL": lambda: transformers.Qwen2VLConfig(
        text_config=axes(1, 1, 2), vision_config=dict(depth=3, embed_dim=32, hidden_size=32, num_heads=4, mlp_ratio=2, patch_size=4), **IDS
    ),
    "Qwen2_5_VL": lambda: transformers.Qwen2_5_VLConfig(
        text_config=axes(1, 1, 2), vision_config={**PATCHES, "fullatt_block_indexes": [0]}, **IDS
    ),
    "Qwen3VL": lambda: transformers.Qwen3VLConfig(
        text_config=axes(1, 1, 2), vision_config={**PATCHES, "deepstack_visual_indexes": [0]}, **IDS
    ),
    "Glm4v": lambda: transformers.Glm4vConfig(
        text_config=axes(1, 1, 2, partial_rotary_factor=1.0),
        vision_config=PATCHES,
        image_token_id=101,
        video_token_id=102,
    ),
    "Gemma3": lambda: transformers.Gemma3Config(
        text_config={**TEXT, "query_pre_attn_scalar": 8}, vision_config=VISION, mm_tokens_per_image=4, image_token_id=101
    ),
    "Llava": lambda: transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"}, vision_config={**VISION, "model_type": "clip_vision_model"}, image_token_index=101
    ),
    "InternVL": lambda: transformers.InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config={**VISION, "image_size": [28, 28], "patch_size": [14, 14]},
        image_token_id=101,
    ),
    "Mistral3": lambda: transformers.Mistral3Config(
        text_config={**TEXT, "model_type": "mistral"}, vision_config={**VISION, "model_type": "pixtral"}, image_token_index=101
    ),
    "Idefics3": lambda: transformers.Idefics3Config(
        text_config={**TEXT, "model_type": "llama"}, vision_config=VISION, image_token_id=101
    ),
}  # fmt: skip


def build(name: str, **text: Any) -> PreTrainedModel:
    """A random model of the family. text: values of its text config."""
    config = CONFIGS[name]()
    for key, value in text.items():
        setattr(config.get_text_config(), key, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
        for parameter in model.parameters():
            if not parameter.any():  # a projection that starts at zero would hide the images
                torch.nn.init.normal_(parameter, std=0.3)
        return model
