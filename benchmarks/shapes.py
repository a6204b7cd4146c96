"""Sizes of the models that are measured or predicted here."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """H, I, E and K of a model's MoE blocks; E in all, whatever the number of ranks."""

    hidden: int
    inner: int
    experts: int
    top_k: int


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "olmoe-1b-7b": Shape(2048, 1024, 64, 8),
    "wide": Shape(4096, 1024, 128, 8),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "deepseek-v3": Shape(7168, 2048, 256, 8),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4),
    "kimi-k2.7-code": Shape(7168, 2048, 384, 8),
    "glm-5.2": Shape(6144, 2048, 256, 8),
    "qwen3.5-397b-a17b": Shape(4096, 1024, 512, 10),
    "deepseek-v4-pro": Shape(7168, 3072, 384, 6),
}
ONE_CARD = ("qwen3-30b-a3b", "olmoe-1b-7b", "wide", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b")
SPREAD = ("qwen3-30b-a3b", "kimi-k2.7-code", "glm-5.2", "qwen3.5-397b-a17b", "deepseek-v4-pro")
