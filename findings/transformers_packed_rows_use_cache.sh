#!/usr/bin/env bash
# Guess: if the position ids of a packed row begin at 0 again with each record, as DataCollatorWithFlattening writes them,
# a Llama keeps the records apart: the second one's logits are those that it has alone.
# Library: transformers 5.23.0 (with torch 2.13.0, attention sdpa), 2026-11-28.
# Seen: only with use_cache=False. A plain forward, whose default is use_cache=True, also in training mode, lets the second
# record see the first in silence (logits differ by 0.29; with use_cache=False by less than 1e-6). A loop of one's own
# that trains on packed rows teaches each record with what happens to stand before it.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "torch==2.13.0" "transformers==5.23.0"
HF_HOME="$work/home" HF_HUB_OFFLINE=1 "$work/venv/bin/python" - <<'PY'
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
first, second = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[9, 10, 11, 12]])
packed, positions = torch.cat([first, second], 1), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
differences = {}
with torch.no_grad():
    alone = model(input_ids=second).logits
    for name, given in (("default", {}), ("use_cache=False", {"use_cache": False})):
        logits = model(input_ids=packed, position_ids=positions, **given).logits[:, 4:]
        differences[name] = (logits - alone).abs().max().item()
        print(f"{name}, training mode {model.training}: logits of the second record differ by {differences[name]:.2g}")
sys.exit(not (differences["default"] > 0.01 and differences["use_cache=False"] < 1e-5))
PY
