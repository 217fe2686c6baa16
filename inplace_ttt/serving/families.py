"""Whose converted models vLLM serves: a family is a row."""

FAMILIES = {
    f"InPlaceTTT{model}": (f"vllm.model_executor.models.{module}", model)
    for module, model in (
        ("llama", "LlamaForCausalLM"),
        ("mistral", "MistralForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        ("gemma3", "Gemma3ForCausalLM"),
    )
}
"""The architecture that a converted checkpoint names -> module and class of its base in vLLM."""
