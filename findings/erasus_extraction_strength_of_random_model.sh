#!/usr/bin/env bash
# Guess: ExtractionStrengthMetric, which prompts a language model with the first prefix_length tokens of a record, is about 0 for a
# model with random weights, and ExactMemorizationMetric is 1 for a model that has learned the records by heart.
# Library: erasus 0.2.0 (torch 2.13.0, transformers 5.23.0, numpy 2.4.6). Date: 2026-12-01.
# Seen: with batches of input_ids and labels, as language models are trained, the extraction strength is 1.0 for random weights
# and "extraction_resistance" 0.0; the exact memorization is 0.0 for a model that continues each record word for word from its first
# four tokens (this was checked by hand). So an unlearning that worked looks like one that failed, or the other way round, depending
# on the metric. With batches of the first four tokens and the labels they are 0.0 and 1.0.
# Why: prefix_length only says from which token on answers are compared. The prompt is all of input_ids, so the record is quoted by
# the prompt in the first metric, and the second one compares what comes after the record.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "erasus==0.2.0" "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6"
cd "$work"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - 2> "$work/log" <<'PY'
import sys

import torch
from erasus.metrics.forgetting.exact_memorization import ExactMemorizationMetric
from erasus.metrics.forgetting.extraction_strength import ExtractionStrengthMetric
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
records = torch.randint(1, 100, (20, 24))
sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, bos_token_id=None, eos_token_id=None)
random = LlamaForCausalLM(config).eval()
learned = LlamaForCausalLM(config)
optimizer = torch.optim.Adam(learned.parameters(), lr=3e-3)
for _ in range(200):
    optimizer.zero_grad()
    learned(input_ids=records, labels=records).loss.backward()
    optimizer.step()
learned.eval()
seen = {}
for name, model in (("random", random), ("learned", learned)):
    written = model.generate(records[:, :4], max_new_tokens=20, do_sample=False)
    by_hand = (written == records).all(1).float().mean().item()
    for inputs in (24, 4):
        data = DataLoader(TensorDataset(records[:, :inputs], records), batch_size=10)
        strength = ExtractionStrengthMetric(prefix_length=4, max_new_tokens=20).compute(model, forget_data=data)
        exact = ExactMemorizationMetric(prefix_length=4, max_new_tokens=20).compute(model, forget_data=data)
        values = strength["extraction_strength_forget"], exact["exact_memorization_forget"]
        seen[name, inputs] = by_hand, *values
        print(f"{name} weights, {inputs} input_ids: by hand {by_hand}, extraction strength {values[0]}, exact {values[1]}")
wanted = {("random", 24): (0, 1, 0), ("random", 4): (0, 0, 0), ("learned", 24): (1, 1, 0), ("learned", 4): (1, 1, 1)}
sys.exit(seen != wanted)
PY
