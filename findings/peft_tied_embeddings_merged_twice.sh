#!/usr/bin/env bash
# Guess: with ensure_weight_tying=True, LoRA on the embeddings of a model whose output matrix is tied to them is merged
# once: the merged model answers as the adapter does.
# Library: peft 0.21.2 (with transformers 5.23.0, torch 2.13.0), 2026-11-28.
# Seen: merge_and_unload adds the delta twice, for the embeddings and for the output matrix, which are one tensor. The
# logits of the merged model differ by 200; without tied weights by 0. PEFT warns, when the adapter is made, that merging
# may lead to complications. An audit of the adapter says nothing of such a merged model.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0" "peft==0.21.2"
HF_HOME="$work/home" HF_HUB_OFFLINE=1 "$work/venv/bin/python" - <<'PY'
import sys, warnings
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore")
ids = torch.tensor([[3, 5, 7, 5, 9, 11]])
differences = {}
ratios = {}
for tied in (True, False):
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=tied)
    lora = LoraConfig(r=4, target_modules=["embed_tokens"], ensure_weight_tying=True, init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM(config), lora).eval()
    with torch.no_grad():
        adapter = model(input_ids=ids).logits
        embedding = model.get_base_model().model.embed_tokens
        before, delta = embedding.weight.clone(), embedding.get_delta_weight("default")
        merged = model.merge_and_unload()
        differences[tied] = (merged(input_ids=ids).logits - adapter).abs().max().item()
        added = (merged.model.embed_tokens.weight - before) / delta
    ratios[tied] = added.median().item()
    print(f"tied {tied}: logits differ by {differences[tied]:.2g}; merged adds {ratios[tied]:.2f} times the delta")
twice = abs(ratios[True] - 2) < 0.01 and differences[True] > 1
sys.exit(not (twice and abs(ratios[False] - 1) < 0.01 and differences[False] < 1e-4))
PY
