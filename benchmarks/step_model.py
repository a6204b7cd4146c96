"""The model whose training step is measured: decoder layers of the Qwen3-30B-A3B shape and a small vocabulary."""

from __future__ import annotations

import torch
from shapes import SHAPES
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY = 32000


def build(layers: int, device: str = "cuda") -> Qwen3MoeForCausalLM:
    """In bfloat16, from seed 0."""
    hidden, inner, experts, top_k = SHAPES["qwen3-30b-a3b"]
    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_experts=experts,
        num_experts_per_tok=top_k,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=VOCABULARY,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3MoeForCausalLM(config).to(torch.bfloat16)
