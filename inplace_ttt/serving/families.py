"""The model families that can be served in vLLM, one per row."""

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
"""Maps the architecture in a converted checkpoint to module and class of its base in vLLM."""
