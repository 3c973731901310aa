"""One row a family of language models: how it is served, or why it is refused, and a tiny one made
on the spot.

It is made from transformers' own configuration class: `_SHAPE` is what all have in common, under
the names that families give it; a row says what its family needs besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from auditor.models.huggingface import Served
from auditor.models.weights import Kind

VOCABULARY = 61
_SHAPE: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "decoder_layers",
            "encoder_layers",
        ),
        2,
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "n_mamba_heads"), 2),
    **dict.fromkeys(
        (
            "num_key_value_heads",
            "num_kv_heads",
            "n_group",
            "topk_group",
            "mamba_n_groups",
            "n_groups",
        ),
        1,
    ),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 64
    ),
    **dict.fromkeys(("ffn_hidden_size", "inner_dim"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 96),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "n_shared_experts"),
        2,
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(
        ("qk_rope_head_dim", "qk_nope_head_dim", "mamba_d_state", "state_size", "rotary_dim"), 8
    ),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(
        (
            "mamba_d_head",
            "mamba_head_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_head_dim",
        ),
        16,
    ),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    "hidden_size_per_layer_input": 8,
    "sliding_window": 4,  # shorter than what the tests read
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """shape: what its tiny model has beside `_SHAPE`. refused: what is said of it where it is not
    served."""

    shape: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True)
class Family(Row):
    """A causal one. served: how its rows are. embeddings: whether it is right by input embeddings
    too.

    but: where it is not served though it is elsewhere.
    """

    served: Served
    embeddings: bool = True
    but: str = ""


_DECODER = {"is_decoder": True}  # else it sees the tokens that it is asked for
_LATENT = {"head_dim": 8, "num_key_value_heads": 2}
_GEMMA_3N = {
    "layer_types": ["sliding_attention", "full_attention"],
    "intermediate_size": [64, 64],
    "activation_sparsity_pattern": [0.0, 0.0],
    "num_kv_shared_layers": 0,
    "altup_num_inputs": 2,
    "laurel_rank": 4,
}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"]}

FAMILIES: Mapping[str, Family] = {
    "afmoe": Family("slots"),
    "apertus": Family("slots"),
    "arcee": Family("slots"),
    "aria_text": Family("slots"),
    "axk1": Family("slots", shape=_LATENT),
    "axk2": Family("cache", shape=_LATENT),
    "bailing_hybrid": Family("cache"),
    "bamba": Family("recompute", shape={"attn_layer_indices": [1]}),
    "beam": Family("slots"),
    "bert": Family("slots", shape=_DECODER),
    "bert-generation": Family("slots", shape=_DECODER),
    "big_bird": Family("slots", shape={**_DECODER, "attention_type": "original_full"}),
    "biogpt": Family("slots"),
    "bitnet": Family("slots"),
    "bloom": Family("slots"),
    "camembert": Family("recompute", shape=_DECODER),
    "codegen": Family("slots", shape={"n_head": 4}),
    "cohere": Family("slots"),
    "cohere2": Family("slots"),
    "cohere2_moe": Family("slots"),
    "ctrl": Family("slots"),
    "cwm": Family("slots"),
    "data2vec-text": Family("recompute", shape=_DECODER),
    "dbrx": Family(
        "slots",
        shape={
            "attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64},
        },
    ),
    "deepseek_v2": Family("slots"),
    "deepseek_v3": Family("slots", shape=_LATENT),
    "deepseek_v32": Family("cache", shape=_LATENT),
    "deepseek_v4": Family("cache", embeddings=False),
    "diffllama": Family("slots", shape={"num_key_value_heads": 2}),
    "doge": Family("slots"),
    "dots1": Family("slots"),
    "electra": Family("slots", shape=_DECODER),
    "ernie": Family("slots", shape=_DECODER),
    "ernie4_5": Family("slots"),
    "ernie4_5_moe": Family("slots"),
    "exaone4": Family("slots"),
    "exaone_moe": Family("slots"),
    "falcon": Family("slots"),
    "falcon_h1": Family("cache", shape={"mamba_d_ssm": 64}),
    "falcon_mamba": Family("cache"),
    "flex_olmo": Family("slots"),
    "flint": Family("slots"),
    "gemma": Family("slots"),
    "gemma2": Family("slots"),
    "gemma3_text": Family("slots"),
    "gemma3n_text": Family("slots", embeddings=False, shape=_GEMMA_3N),
    "gemma4_text": Family("slots", embeddings=False),
    "gemma4_unified_text": Family("slots", embeddings=False),
    "glm": Family("slots"),
    "glm4": Family("slots"),
    "glm4_moe": Family("slots"),
    "glm4_moe_lite": Family("slots"),
    "glm_moe_dsa": Family("cache", shape=_LATENT),
    "gpt-sw3": Family("slots"),
    "gpt2": Family("slots"),
    "gpt_bigcode": Family("slots"),
    "gpt_neo": Family(
        "slots", shape={"attention_types": [[["global", "local"], 1]], "window_size": 4}
    ),
    "gpt_neox": Family("slots"),
    "gpt_neox_japanese": Family("slots"),
    "gpt_oss": Family("slots"),
    "gptj": Family("slots"),
    "granite": Family("slots"),
    "granite_swa": Family("slots"),
    "granitemoe": Family("slots"),
    "granitemoe_swa": Family("slots"),
    "granitemoehybrid": Family(
        "cache", shape={"layer_types": ["linear_attention", "full_attention"]}
    ),
    "granitemoeshared": Family("slots"),
    "helium": Family("slots"),
    "hrm_text": Family("slots"),
    "hunyuan_v1_dense": Family("slots"),
    "hunyuan_v1_moe": Family("slots"),
    "hy_v3": Family("slots"),
    "hy_v4": Family("cache"),
    "hyperclovax": Family("slots"),
    "inkling2_text": Family("cache"),
    "inkling_text": Family("cache"),
    "internlm3": Family("slots"),
    "iquestcoder": Family("slots"),
    "jais2": Family("slots"),
    "jamba": Family(
        "cache", shape={"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4}
    ),
    "jetmoe": Family("slots"),
    "kimi_linear": Family("cache"),
    "kolibri1": Family("slots"),
    "laguna": Family("slots"),
    "lfm2": Family("cache", shape=_CONVOLUTIONS),
    "lfm2_moe": Family("cache", shape=_CONVOLUTIONS),
    "lfm3": Family("cache"),
    "llama": Family("slots"),
    "llama4_text": Family("slots"),
    "mamba": Family("cache"),
    "mamba2": Family("cache", shape={"num_heads": 4, "head_dim": 16, "chunk_size": 8}),
    "megatron-bert": Family("slots", shape=_DECODER),
    "mellum": Family("slots"),
    "mimo_v2_flash": Family("slots"),
    "minicpm3": Family("slots"),
    "minimax": Family("cache"),
    "minimax_m2": Family("slots"),
    "minimax_m3_vl_text": Family("slots"),
    "ministral": Family("slots"),
    "ministral3": Family("slots"),
    "mistral": Family("slots"),
    "mixtral": Family("slots"),
    "modernbert-decoder": Family("slots"),
    "moshi": Family("slots"),
    "mpt": Family("slots"),
    "nanochat": Family("slots"),
    "nemotron": Family("slots"),
    "nemotron_h": Family(
        "cache",
        shape={
            "layers_block_type": ["linear_attention", "full_attention"],
            "mamba_num_heads": 4,
            "ssm_state_size": 8,
        },
    ),
    "olmo": Family("slots"),
    "olmo2": Family("slots"),
    "olmo3": Family("slots"),
    "olmo_hybrid": Family("cache"),
    "olmoe": Family("slots"),
    "openai-gpt": Family("recompute"),
    "opt": Family("slots"),
    "persimmon": Family("slots"),
    "phi": Family("slots"),
    "phi3": Family("slots"),
    "phimoe": Family("slots"),
    "qwen2": Family("slots"),
    "qwen2_moe": Family("slots"),
    "qwen3": Family("slots"),
    "qwen3_5_moe_text": Family("cache"),
    "qwen3_5_text": Family("cache"),
    "qwen3_moe": Family("slots"),
    "qwen3_next": Family("cache"),
    "recurrent_gemma": Family(
        "recompute", shape={"block_types": ["recurrent", "attention"], "lru_width": 32}
    ),
    "reformer": Family(
        "recompute",
        embeddings=False,
        shape={**_DECODER, "attn_layers": ["local", "local"], "axial_pos_embds": False},
    ),
    "rembert": Family(
        "slots", shape={**_DECODER, "input_embedding_size": 32, "output_embedding_size": 32}
    ),
    "roberta": Family("recompute", shape=_DECODER),
    "roberta-prelayernorm": Family("recompute", shape=_DECODER),
    "roformer": Family("slots", shape=_DECODER),
    "rwkv": Family("recompute"),
    "seed_oss": Family("slots"),
    "smollm3": Family("slots"),
    "solar_open": Family("slots"),
    "stablelm": Family("slots"),
    "starcoder2": Family("slots"),
    "trocr": Family("slots"),
    "vaultgemma": Family("slots"),
    "xglm": Family("slots", shape={"attention_heads": 2}),
    "xlm": Family("recompute", shape={"causal": True}),
    "xlm-roberta": Family("recompute", shape=_DECODER),
    "xlm-roberta-xl": Family("recompute", shape=_DECODER),
    "xlstm": Family(
        "cache",
        shape={"hidden_size": 128},
        but="refused in bfloat16 for texts of 64 tokens and more",
    ),
    "xmod": Family("recompute", shape={**_DECODER, "languages": ["en"], "default_language": "en"}),
    "youtu": Family("slots", shape=_LATENT),
    "zamba": Family(
        "cache",
        shape={
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            "num_hidden_layers": 3,
        },
    ),
    "zamba2": Family(
        "cache",
        shape={
            "layers_block_type": ["linear_attention", "hybrid"],
            "chunk_size": 8,
            "adapter_rank": 8,
        },
    ),
}

_SEES_THE_FUTURE = "whose distribution of a token changes by .* nats with the tokens after it"
_CHARACTERS = Row(
    shape={"pronunciation_vocab_size": 61, "shape_vocab_size": 61},
    refused="needs the shape and sound of each character",
)

REFUSED: Mapping[str, Row] = {
    "cpmant": Row(refused=_SEES_THE_FUTURE, shape={"dim_ff": 64, "dim_head": 16}),
    "roc_bert": _CHARACTERS,
    "xlnet": Row(refused=_SEES_THE_FUTURE, shape={"d_inner": 64}),
}

# Neither causal nor masked.
ENCODER_DECODERS = (
    *(
        "bart",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "marian",
        "mbart",
        "mvp",
        "pegasus",
        "plbart",
    ),
    *("prophetnet", "t5", "whisper"),
)

MASKED: Mapping[str, Row] = {
    **dict.fromkeys(
        ("albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta"), Row()
    ),
    **dict.fromkeys(
        ("deberta-v2", "distilbert", "electra", "ernie", "esm", "eurobert", "flaubert", "fnet"),
        Row(),
    ),
    **dict.fromkeys(("gte", "ibert", "jina_embeddings_v3", "megatron-bert", "modernbert"), Row()),
    **dict.fromkeys(
        ("mpnet", "neomme", "nomic_bert", "nystromformer", "rembert", "roberta"), Row()
    ),
    **dict.fromkeys(
        ("roberta-prelayernorm", "roformer", "squeezebert", "ultrabert", "xlm", "xlm-roberta"),
        Row(),
    ),
    **dict.fromkeys(("xlm-roberta-xl", "yoso"), Row()),
    "esmc": Row(shape={"num_key_value_heads": 2}),
    "funnel": Row(shape={"block_sizes": [1, 1], "d_head": 16, "d_inner": 64}),
    "layoutlm": Row(refused="needs the place of each word on its page"),
    "longformer": Row(shape={"attention_window": 8}),
    "luke": Row(shape={"entity_vocab_size": 8, "entity_emb_size": 16}),
    "mobilebert": Row(shape={"embedding_size": 16, "intra_bottleneck_size": 16}),
    "mra": Row(
        refused="whose distribution of a hidden token does not depend on the tokens after it"
    ),  # without its kernel
    "perceiver": Row(
        shape={
            **dict.fromkeys(("d_latents", "qk_channels", "v_channels"), 32),
            **dict.fromkeys(("num_self_attention_heads", "num_cross_attention_heads"), 2),
            "num_latents": 8,
            "num_blocks": 1,
            "num_self_attends_per_block": 1,
        }
    ),
    "reformer": Row(
        shape={
            **dict.fromkeys(("lsh_attn_chunk_length", "local_attn_chunk_length"), 16),
            "attn_layers": ["local", "lsh"],
            "axial_pos_embds": False,
            "num_buckets": 4,
        },
        refused="whose distribution of a hidden token in a text of .* changes by .* nats when it "
        "is scored",
    ),
    "roc_bert": _CHARACTERS,
    "tapas": Row(refused="needs the table cell of each token"),
    "xmod": Row(shape={"languages": ["en"], "default_language": "en"}),
}

# each method of `audit train` is run on them in the tests
TRAINED = (
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "qwen2",
)


def row(family: str, kind: Kind) -> Row:
    return MASKED[family] if kind == "masked" else {**FAMILIES, **REFUSED}[family]


def config_of(family: str, shape: Mapping[str, Any], **more: Any) -> PreTrainedConfig:
    """The family's own defaults, made small; one of each kind of layer that it alternates, two at
    least."""
    made = CONFIG_MAPPING[family]
    default = made()
    named = set(default.to_dict()) - set(made.attribute_map)
    own = {**shape, **{name: value for name, value in more.items() if name in named}}
    chosen = {name: value for name, value in _SHAPE.items() if name in named} | own
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if "layer_types" in named - set(own) and kinds:
        count = max(2, len(kinds))
        chosen |= {"layer_types": (kinds * count)[:count], "num_hidden_layers": count}
    return made(**chosen)


def tiny(family: str, kind: Kind = "causal", **more: Any) -> PreTrainedModel:
    """With larger weights than it is initialised with, and none that are all 0: its distribution
    depends on what it reads."""
    torch.manual_seed(0)
    config = config_of(family, row(family, kind).shape, **more)
    made = AutoModelForMaskedLM if kind == "masked" else AutoModelForCausalLM
    model: PreTrainedModel = made.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                not parameter.any()
            ):  # what Gemma 3n adds of its tokens to each layer is multiplied by such ones
                parameter.normal_(std=0.1)
            elif parameter.ndim > 1:
                parameter.mul_(4.0)
    return model


def save(folder: Path, family: str, kind: Kind = "causal") -> PreTrainedModel:
    """A tiny model with a tokenizer of single bytes, as `--model` and `audit train` take it."""
    vocabulary = {
        word: i for i, word in enumerate(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    own = {"mask_token": "<mask>"} if kind == "masked" else {}
    written = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", **own)
    written.save_pretrained(folder)
    sizes = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), len(written))
    model = tiny(family, kind, **sizes, eos_token_id=0)
    model.save_pretrained(folder)
    return model
