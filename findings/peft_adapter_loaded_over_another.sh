#!/usr/bin/env bash
# Guess: load_adapter() of a second user's adapter under the name of the first one's replaces it: the model then answers as
# with the second adapter by itself.
# Library: peft 0.21.2 (with transformers 5.23.0, torch 2.13.0). Date: 2026-11-29.
# Seen: layers that the second adapter does not have keep what the first was trained to: the model is a mix of both users,
# and so is what save_pretrained() writes then. Nothing warns; the value that load_adapter() returns lists the keys not loaded.
# delete_adapter() before load_adapter(), and hotswap_adapter(), give the second adapter by itself.
# Why: the layers of the name that is there are kept, and only the tensors that the file has are overwritten.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "torch==2.13.0" "transformers==5.23.0" "peft==0.21.2"
cd "$work"
HF_HOME="$work/home" HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'PY'
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
ids = torch.tensor([[5, 6, 7, 8]])


def make_base():
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def save_trained(folder, targets):
    torch.manual_seed(1)
    model = get_peft_model(make_base(), LoraConfig(r=4, target_modules=targets))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.3 * torch.randn(weight.shape))
    model.save_pretrained(folder)


def answer(model):
    with torch.no_grad():
        return model(ids).logits


save_trained("first", ["q_proj", "v_proj", "up_proj"])
save_trained("second", ["q_proj"])
base = answer(make_base())
second = answer(PeftModel.from_pretrained(make_base(), "second").eval())
distances = {"base model": (base - second).abs().max().item()}
for way in ("load_adapter", "delete_adapter, load_adapter", "hotswap_adapter"):
    model = PeftModel.from_pretrained(make_base(), "first", adapter_name="user").eval()
    if way == "hotswap_adapter":
        hotswap_adapter(model, "second", adapter_name="user")
    else:
        if way.startswith("delete"):
            model.load_adapter("second", adapter_name="spare")
            model.set_adapter("spare")
            model.delete_adapter("user")
        model.load_adapter("second", adapter_name="user")
        model.set_adapter("user")
    distances[way] = (answer(model.eval()) - second).abs().max().item()
    if way == "load_adapter":
        model.save_pretrained("mixed")
for way, distance in distances.items():
    print(f"{way}: logits differ from the second adapter's by {distance:.2g}")
first, mixed = load_file("first/adapter_model.safetensors"), load_file("mixed/user/adapter_model.safetensors")
kept = [name for name in mixed if torch.equal(mixed[name], first[name])]
print(f"of the saved mix, {len(kept)} of {len(mixed)} tensors are the first user's")
clean = max(distances["delete_adapter, load_adapter"], distances["hotswap_adapter"])
sys.exit(not (clean < 1e-6 and distances["load_adapter"] > 0.1 and [len(kept), len(mixed)] == [8, 12]))
PY
