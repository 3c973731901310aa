#!/usr/bin/env bash
# Guess: add_weighted_adapter() with weights 1 and -1 subtracts what the second adapter does to the weights, so that two
# adapters which do the same give zero; its docstring allows negative weights for this ("subtraction of adapter effects").
# Library: peft 0.21.2 (with transformers 5.23.0, torch 2.13.0), LoRA. Date: 2026-11-29.
# Seen: with combination_type="linear" (the docstring: "a very rough approximation") the difference of two equal updates is
# 1.5 times the update if one has A halved and B doubled, as another training or another tool may write it. For two
# adapters that share nothing the result is as far from the difference as the difference is large. "svd", which the docstring
# calls precise, is off by about half of it for these, since it keeps the larger of both ranks; "cat" is exact.
# Forgetting by subtraction of an adapter that was trained on private rows therefore needs "cat", or "svd" with svd_rank.
# Why: "linear" adds the A's and the B's apart, and multiplies the sums.
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

sizes = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
lora = LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj", "v_proj"])
torch.manual_seed(0)
model = get_peft_model(LlamaForCausalLM(config), lora, adapter_name="task")
for name in ("private", "private again"):
    model.add_adapter(name.replace(" ", "_"), lora)
weights = dict(model.named_parameters())
with torch.no_grad():
    for name, weight in weights.items():
        if ".task." in name or ".private." in name:
            weight.copy_(torch.randn(weight.shape))
        if ".private_again." in name:
            scale = 0.5 if "lora_A" in name else 2.0
            weight.copy_(scale * weights[name.replace("private_again", "private")])


def get_update(name):
    layers = [layer for layer in model.modules() if hasattr(layer, "get_delta_weight")]
    return torch.cat([layer.get_delta_weight(name).flatten() for layer in layers]).detach()


task, private = get_update("task"), get_update("private")
same = (get_update("private_again") - private).norm() / private.norm()
print(f"two adapters with one update: they differ by {same:.1g} of it")
errors = {}
for kind, rank in (("cat", None), ("svd", None), ("svd", 16), ("linear", None)):
    made = f"{kind}{rank}"
    options = {"combination_type": kind, "svd_rank": rank}
    model.add_weighted_adapter(["private", "private_again"], [1.0, -1.0], f"{made}_zero", **options)
    model.add_weighted_adapter(["task", "private"], [1.0, -1.0], made, **options)
    zero = float(get_update(f"{made}_zero") @ private / (private @ private))
    wrong = float((get_update(made) - task + private).norm() / (task - private).norm())
    print(f"{kind}, svd_rank {rank}: equal ones give {zero:.2f} of the update; others are off by {wrong:.0%}")
    errors[made] = (round(zero, 2) + 0.0, wrong)
exact = max(errors["catNone"][1], errors["svd16"][1], abs(errors["catNone"][0]), abs(errors["svd16"][0]))
zero, wrong = errors["linearNone"]
sys.exit(not (exact < 1e-3 and zero == 1.5 and wrong > 0.7 and errors["svdNone"][1] > 0.3))
PY
