"""Tiny Hugging Face models, built from their config classes; nothing is downloaded."""

import torch
import transformers

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "use_cache": False,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "intermediate_size": 24},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "intermediate_size": 24,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": 8},
    ),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}),
}


def make(family, dtype=torch.float32, seed=0, **overrides):
    """(model in training mode, input ids)."""
    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **settings, **overrides})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and sinks too, which start at zero
            if parameter.dim() < 2 and not parameter.any():
                parameter.normal_(std=0.1)
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    return model.to(dtype).train(), ids


def step(model, ids, run=None, **more):
    """Loss and gradients of one training step."""
    model.zero_grad(set_to_none=True)
    loss = (model if run is None else run)(input_ids=ids, labels=ids, **more).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
