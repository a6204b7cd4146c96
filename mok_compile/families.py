"""Tiny random models of the MoE families of transformers, built from their config classes, to measure coverage on.

Sizes: hidden 64, 2 layers, 8 experts, 2 per token, vocabulary 128. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

HIDDEN, INNER, LAYERS, EXPERTS, VOCABULARY = 64, 32, 2, 8, 128

# Names by which config classes call their sizes. A class gets those that it knows.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size"), INNER),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "ffn_hidden_size"), INNER),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "pad_token_id"), 0),
    **dict.fromkeys(("hidden_size", "d_model"), HIDDEN),
    **dict.fromkeys(("head_dim", "qk_head_dim", "v_head_dim", "index_head_dim", "kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "sliding_window", "index_topk"), 8),
    **dict.fromkeys(("num_key_value_heads", "index_n_heads", "n_group", "eos_token_id"), 2),
    **dict.fromkeys(("topk_group", "decoder_sparse_step", "bos_token_id"), 1),
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "use_cache": False,
}


@dataclass(frozen=True)
class Family:
    """Where a family's classes are, and what its config needs beyond `SIZES`; a setting of None takes it out.

    `title` names the classes (``Qwen3Moe``); `head` is what follows it in the model's name. `old`: settings for
    transformers 4 only.
    """

    title: str
    head: str = "ForCausalLM"
    package: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    old: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    inputs: str = "ids"
    routed: bool = True  # False for a look-alike, which must stay as it is


SPARSE = {"mlp_layer_types": ["sparse"] * LAYERS}
FULL = {"layer_types": ["full_attention"] * LAYERS}
LATENT = {"num_key_value_heads": 4}  # every query head has its key in latent attention
ROTARY = {**LATENT, "head_dim": 8}  # here the head size is that of the rotary part
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
MROPE_OLD = {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}}
DBRX = {
    "ffn_hidden_size": INNER,
    "moe_num_experts": EXPERTS,
    "moe_top_k": 2,
    "moe_jitter_eps": None,
    "moe_loss_weight": 0.01,
    "moe_normalize_expert_weights": 1.0,
}


def _mrope(*section: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section)}}


FAMILIES = {
    "afmoe": Family("Afmoe", settings=FULL),
    "aria": Family("AriaText"),
    "axk1": Family("AXK1", settings={**ROTARY, **SPARSE}),
    "axk2": Family("AXK2", settings={**ROTARY, **SPARSE}),
    "bailing_hybrid": Family("BailingHybrid"),
    "beam": Family("Beam", settings=SPARSE),
    "cohere2_moe": Family("Cohere2Moe", settings=FULL),
    "dbrx": Family(
        "Dbrx",
        settings={
            "n_heads": 4,
            "n_layers": LAYERS,
            "max_seq_len": 256,
            "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 1e4},
            "ffn_config": {**DBRX, "hidden_size": HIDDEN},
        },
        old={"ffn_config": DBRX},
    ),
    "deepseek_ocr2": Family("DeepseekOcr2Text", "Model", settings=SPARSE),
    "deepseek_v2": Family("DeepseekV2", settings={**LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": Family("DeepseekV3", settings=ROTARY),
    "deepseek_v32": Family("DeepseekV32", settings=ROTARY),
    "deepseek_v4": Family("DeepseekV4", settings={"mlp_layer_types": ["hash_moe", "moe"]}),
    "diffusion_gemma": Family(
        "DiffusionGemma", "EncoderTextModel", config="DiffusionGemmaTextConfig", settings={"enable_moe_block": True}
    ),
    # Its experts are embeddings.
    "doge": Family("Doge", settings={"is_moe": True, "num_experts": 16}, routed=False),
    "dots1": Family("Dots1"),
    "dots3_note": Family("Dots3Note", config="Dots3NoteTextConfig", settings={**LATENT, **SPARSE}),
    "ernie4_5_moe": Family(
        "Ernie4_5_Moe", settings={"moe_layer_start_index": 0, "moe_layer_end_index": -1, "moe_layer_interval": 1}
    ),
    "ernie4_5_vl_moe": Family(
        "Ernie4_5_VLMoeText", "Model", settings={**SPARSE, **_mrope(3, 3, 2), "moe_intermediate_size": [INNER, INNER]}
    ),
    "exaone_moe": Family("ExaoneMoe", settings={**FULL, **SPARSE}),
    "flex_olmo": Family("FlexOlmo"),
    "flint": Family("Flint"),
    "gemma4": Family(
        "Gemma4",
        config="Gemma4TextConfig",
        settings={
            "enable_moe_block": True,
            "global_head_dim": 16,
            "num_global_key_value_heads": 2,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    "glm4_moe": Family("Glm4Moe"),
    "glm4_moe_lite": Family("Glm4MoeLite", settings={**LATENT, **SPARSE}),
    "glm4v_moe": Family(
        "Glm4vMoeText",
        "Model",
        settings=_mrope(2, 1, 1),
        old={"rope_parameters": None, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        inputs="ids and mask",  # in transformers 4 a batch of two does not run without a mask
    ),
    "glm5_next": Family(
        "Glm5NextText",
        "Model",
        settings={**LATENT, **SPARSE, "index_topk": 16, "qk_rope_head_dim": 0, "qk_nope_head_dim": 16},
    ),
    "glm_moe_dsa": Family("GlmMoeDsa", settings=ROTARY),
    "gpt_oss": Family("GptOss"),
    "granitemoe": Family("GraniteMoe"),
    "granitemoe_swa": Family("GraniteMoeSWA"),
    "granitemoehybrid": Family(
        "GraniteMoeHybrid", settings=FULL, old={"layer_types": ["attention"] * LAYERS, "layers_block_type": None}
    ),
    "granitemoeshared": Family("GraniteMoeShared"),
    "hunyuan_v1_moe": Family("HunYuanMoEV1"),
    "hy_v3": Family("HYV3", settings=SPARSE),
    "hy_v4": Family("HYV4", settings=SPARSE),
    "hy_v4_vl": Family("HYV4VLText", "Model", settings={**SPARSE, **_mrope(2, 1, 1)}),
    "inkling": Family("Inkling", config="InklingTextConfig"),
    "inkling2": Family("Inkling2", config="Inkling2TextConfig"),
    "inkling2_loop": Family("Inkling2Loop", config="Inkling2LoopTextConfig"),
    "jamba": Family(
        "Jamba",
        settings={
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "attn_layer_period": 1,
            "attn_layer_offset": 0,
            "use_mamba_kernels": False,
        },
    ),
    "jetmoe": Family("JetMoe", settings={"kv_channels": 16}),
    "kimi_linear": Family("KimiLinear", settings=SPARSE),
    "kolibri1": Family("Kolibri1"),
    "laguna": Family("Laguna", settings=SPARSE),
    "lara_mini": Family("LaraMini"),
    "lfm2_moe": Family("Lfm2Moe", settings=FULL),
    "llama4": Family(
        "Llama4",
        config="Llama4TextConfig",
        settings={"intermediate_size_mlp": INNER, "moe_layers": [0, 1], "interleave_moe_layer_step": 1},
    ),
    "longcat_flash": Family("LongcatFlash", settings={**ROTARY, "num_layers": 1, "zero_expert_num": 2}),
    "mellum": Family("Mellum"),
    "mimo_v2_flash": Family("MiMoV2Flash", settings=SPARSE),
    "minimax": Family("MiniMax", settings=FULL),
    "minimax_m2": Family("MiniMaxM2"),
    "minimax_m3_vl": Family("MiniMaxM3VL", config="MiniMaxM3VLTextConfig"),
    "mistral4": Family("Mistral4", settings=LATENT),
    "mistral_large4": Family("MistralLarge4Text", "Model", settings=ROTARY),
    "mixtral": Family("Mixtral"),
    "muse_spark": Family("MuseSparkText", "Model"),
    "nemotron_h": Family(
        "NemotronH", settings={"num_hidden_layers": 4, "layers_block_type": ["full_attention", "moe"] * 2}
    ),
    "nllb_moe": Family(
        "NllbMoe",
        "ForConditionalGeneration",
        inputs="encoder and decoder",
        settings={
            **{
                f"{side}_{what}": n
                for side in ("encoder", "decoder")
                for what, n in (("layers", 2), ("sparse_step", 1))
            },
            **{
                f"{side}_{what}": n
                for side in ("encoder", "decoder")
                for what, n in (("ffn_dim", INNER), ("attention_heads", 4))
            },
            "expert_capacity": 64,
        },
    ),
    "olmoe": Family("Olmoe"),
    "openai_privacy_filter": Family("OpenAIPrivacyFilter", "ForTokenClassification"),
    "phimoe": Family("Phimoe"),
    "qwen2_moe": Family("Qwen2Moe"),
    "qwen3_5_moe": Family("Qwen3_5Moe", config="Qwen3_5MoeTextConfig", settings={**FULL, **DELTA}),
    "qwen3_moe": Family("Qwen3Moe"),
    "qwen3_next": Family(
        "Qwen3Next", settings={**FULL, **DELTA}, old={"layer_types": ["linear_attention", "full_attention"]}
    ),
    "qwen3_omni_moe": Family("Qwen3OmniMoe", "ThinkerTextModel", config="Qwen3OmniMoeTextConfig", old=MROPE_OLD),
    "qwen3_omni_moe_talker": Family(
        "Qwen3OmniMoeTalker",
        "Model",
        "qwen3_omni_moe",
        config="Qwen3OmniMoeTalkerTextConfig",
        inputs="embeddings",
        settings={"shared_expert_intermediate_size": INNER},
        old=MROPE_OLD,
    ),
    "qwen3_vl_moe": Family("Qwen3VLMoeText", "Model", old=MROPE_OLD),
    "qwen4_exp": Family(
        "Qwen4Exp",
        config="Qwen4ExpTextConfig",
        settings={
            **FULL,
            **DELTA,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
    ),
    "solar_open": Family("SolarOpen"),
    "step3p7": Family("Step3p7Text", "Model", settings=SPARSE),
    "switch_transformers": Family(
        "SwitchTransformers",
        "ForConditionalGeneration",
        inputs="encoder and decoder",
        settings={
            "d_kv": 16,
            "d_ff": INNER,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "num_sparse_encoder_layers": 2,
            "num_sparse_decoder_layers": 2,
        },
    ),
    "unlimited_ocr": Family("UnlimitedOcrText", "Model", settings=SPARSE),
    # One expert for each data set; the caller chooses.
    "vitpose_backbone": Family(
        "VitPoseBackbone",
        "",
        inputs="pixels",
        routed=False,
        settings={"num_experts": 3, "part_features": 16, "intermediate_size": 128},
    ),
    "zaya": Family("Zaya", settings={"num_experts_per_tok": 1}),
}


def present(routed: bool = True) -> list[str]:
    """The families of the installed transformers, those with routed experts or the look-alikes."""
    return [name for name, family in FAMILIES.items() if family.routed == routed and _classes(name) is not None]


def _classes(name: str) -> tuple[type, type] | None:
    family = FAMILIES[name]
    package = family.package or name
    try:
        config, model = (
            importlib.import_module(f"transformers.models.{package}.{kind}_{package}")
            for kind in ("configuration", "modeling")
        )
        return getattr(config, family.config or f"{family.title}Config"), getattr(model, family.title + family.head)
    except (ImportError, AttributeError):
        return None


def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model of family `name` in evaluation mode and its arguments. ValueError if it is not in this transformers."""
    import transformers

    classes = _classes(name)
    if classes is None:
        raise ValueError(f"transformers {transformers.__version__} has no {name}")
    family = FAMILIES[name]
    config_class, model_class = classes
    default = config_class()
    known = {**default.to_dict(), **vars(default)}
    renamed = getattr(config_class, "attribute_map", {})
    settings = {renamed.get(k, k): v for k, v in SIZES.items() if renamed.get(k, k) in known}
    settings |= family.settings | (family.old if transformers.__version__.startswith("4.") else {})
    config = config_class(**{k: v for k, v in settings.items() if v is not None})
    torch.manual_seed(0)
    model = model_class._from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for tensor in _unset(model):
            tensor.normal_(0, 0.1)
        for key, table in model.named_buffers():
            if key.endswith("tid2eid"):  # the experts of each token, of deepseek_v4's first layers
                table.copy_(torch.rand(table.shape[0], EXPERTS).topk(table.shape[1]).indices)
    return model, _arguments(family.inputs, dtype)


def _unset(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, and biases among the buffers, that the constructor leaves at zero or without values."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        wanted = isinstance(tensor, nn.Parameter) or (name.endswith("bias") and tensor.is_floating_point())
        if wanted and not (torch.isfinite(tensor).all() and 1e-3 < tensor.abs().max() < 1e3):
            yield tensor


def _arguments(kind: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, 12))
    if kind == "embeddings":
        return {"inputs_embeds": torch.randn(2, 12, HIDDEN).to(dtype)}
    if kind == "pixels":
        return {"pixel_values": torch.randn(2, 3, 256, 192).to(dtype), "dataset_index": torch.tensor([0, 1])}
    if kind == "ids and mask":
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {"input_ids": ids, "decoder_input_ids": ids} if kind == "encoder and decoder" else {"input_ids": ids}


def blocks_of(model: nn.Module) -> list[str]:
    """The modules of `model` that hold routed experts, one for each block."""
    return [name for name, module in model.named_modules() if _holds_experts(name, type(module).__name__, module)]


def _holds_experts(path: str, kind: str, module: nn.Module) -> bool:
    if kind.endswith("MoA"):  # mixtures of attention heads
        return False
    fused_linears = kind.endswith("MoE") and hasattr(module, "input_linear")  # jetmoe; granite in transformers 4
    return path.rpartition(".")[2] == "experts" or fused_linears or kind.endswith("CDMoE")
