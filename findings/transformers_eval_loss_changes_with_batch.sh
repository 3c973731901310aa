#!/usr/bin/env bash
# Guess: Trainer.evaluate() gives the same model and rows the same eval_loss, whatever per_device_eval_batch_size and the order
# of the rows are: it is the mean over all tokens, or the mean over rows.
# Library: transformers 5.23.0 (torch 2.13.0, accelerate 1.15.0). Date: 2026-11-30.
# Seen: on 32 short rows with a loss of about 5 and 32 long ones with 0.0 it is 2.67 in batches of 1, which is the mean over
# rows, and 0.31 in batches of 2 or of 64, which is the mean over tokens. Sorted by length, in batches of 48, it is 0.44, which
# is neither. No warning; the field has the same name. Whoever compares members with non-members, or a model with its reference,
# by eval_loss, with other batch sizes, another order or other lengths, measures the batches.
# Why: the model's loss of a batch is a mean over its tokens, and evaluate() weighs batches by their rows.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "torch==2.13.0" "transformers==5.23.0" "accelerate==1.15.0"
cd "$work"
HF_HOME="$work/home" HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log" | grep -v "^{"
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)


def join_rows(rows):
    longest = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def read_loss(rows):
    with torch.no_grad():
        return model(**join_rows(rows)).loss.item()


sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=None)
model = LlamaForCausalLM(config)
short = torch.randint(1, 40, (32, 8)).tolist()
long = [[5] * 120 for _ in range(32)]
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(60):
    optimizer.zero_grad()
    model(**join_rows(long[:8])).loss.backward()
    optimizer.step()
model.eval()
mixed = [row for pair in zip(long, short, strict=True) for row in pair]
n_tokens = sum(len(row) - 1 for row in mixed)
by_token = sum(read_loss([row]) * (len(row) - 1) for row in mixed) / n_tokens
by_row = sum(read_loss([row]) for row in mixed) / len(mixed)
print(f"mean over tokens {by_token:.3f}, mean over rows {by_row:.3f}")
seen = {}
for order, rows in {"mixed": mixed, "sorted by length": sorted(mixed, key=len)}.items():
    for size in (1, 2, 48, 64):
        options = {"per_device_eval_batch_size": size, "report_to": [], "use_cpu": True, "disable_tqdm": True}
        trainer = Trainer(model=model, args=TrainingArguments("out", **options), data_collator=join_rows, eval_dataset=rows)
        seen[order, size] = trainer.evaluate()["eval_loss"]
        print(f"{order}, batches of {size}: eval_loss {seen[order, size]:.3f}")
same = abs(seen["mixed", 64] - by_token) < 1e-3 and abs(seen["mixed", 2] - by_token) < 1e-3
same = same and abs(seen["mixed", 1] - by_row) < 1e-3 and by_row > 5 * by_token
sys.exit(not (same and 1.2 * by_token < seen["sorted by length", 48] < by_row / 2))
PY
