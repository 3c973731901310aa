#!/usr/bin/env bash
# Guess: unload() gives the base model back, as its docstring says ("the base model by removing all the PEFT modules"),
# and as the model with its adapter disabled is: a reference that has never seen the private rows.
# Library: peft 0.21.2 (with transformers 5.23.0, torch 2.13.0). Date: 2026-11-28.
# Seen: with modules_to_save the trained copies stay in the unloaded model, in silence: with the output matrix trained its
# logits differ from the base model's by as much as the trained model's do. With the adapter disabled they are equal.
# Why: merge_and_unload() and unload() put the same trained copy into the place of each wrapped module.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "torch==2.13.0" "transformers==5.23.0" "peft==0.21.2"
HF_HOME="$work/home" HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'PY'
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
ids = torch.tensor([[5, 6, 7, 8]])
unloaded = {}
for names in (None, ["lm_head"]):
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        base = model(ids).logits.clone()
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=names)).eval()
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn(weight.shape))
        trained = (model(ids).logits - base).abs().max().item()
        with model.disable_adapter():
            disabled = (model(ids).logits - base).abs().max().item()
        unloaded[str(names)] = (model.unload()(ids).logits - base).abs().max().item()
    print(
        f"modules_to_save={names}: logits differ from the base model's by {trained:.2g} (trained), "
        f"{disabled:.2g} (disabled), {unloaded[str(names)]:.2g} (unloaded)"
    )
sys.exit(not (unloaded["None"] < 1e-6 and unloaded["['lm_head']"] > 0.1 and disabled < 1e-6))
PY
