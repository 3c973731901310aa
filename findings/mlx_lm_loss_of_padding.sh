#!/usr/bin/env bash
# Guess: the loss of a row of 6 tokens is the mean of the 5 tokens that have one before them.
# Library: mlx-lm 0.32.2 (mlx 0.32.4 on a processor), evaluate() with its default loss, 2026-11-28.
# Seen: it is the mean of 6: the first token of the padding counts, which is id 0 whatever the tokenizer's padding is.
# Why: the mask of the loss holds for `steps <= length`, where step k is the token at index k, so that index `length`, the
# token after the row, is within it. The same mask is used in training: a model learns to write id 0 (in Llama 3's
# vocabulary "!") after each end of text, and validation losses are not those of other tools.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "mlx-lm==0.32.2" "mlx[cpu]==0.32.4" "transformers==5.23.0"
HF_HOME="$work/home" HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'PY'
import sys

import mlx.core as mx
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tuner.datasets import CacheDataset
from mlx_lm.tuner.trainer import evaluate


class Rows(list):
    def process(self, row):
        return row, 0


mx.random.seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2}
model = Model(ModelArgs("llama", **sizes, num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=50))
row = [11, 12, 13, 14, 15, 2]
told = evaluate(model, CacheDataset(Rows([row])), batch_size=1, num_batches=-1)
logits = model(mx.array([row]))[0]
log_probs = logits - mx.logsumexp(logits, -1, keepdims=True)
nll = [-log_probs[i, token].item() for i, token in enumerate(row[1:] + [0])]
right, padded = sum(nll[:5]) / 5, sum(nll) / 6
print(f"evaluate(): {told:.4f}; mean of the row's 5 losses: {right:.4f}; with id 0 after it: {padded:.4f}")
sys.exit(abs(told - padded) > 1e-4 or abs(told - right) < 1e-2)
PY
