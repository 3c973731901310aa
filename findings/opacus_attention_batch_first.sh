#!/usr/bin/env bash
# Guess: what ModuleValidator.fix puts in place of nn.MultiheadAttention is a drop-in replacement, as its message says: with
# the same weights it gives the same outputs, also with batch_first=True.
# Library: opacus 1.6.0 (with torch 2.13.0), DPMultiheadAttention. Date: 2026-11-28.
# Seen: with batch_first=True and several heads the outputs differ by as much as they are large, in silence; a token's
# output then holds parts of other tokens' outputs. With batch_first=False, or one head, they are equal.
# Why: the heads' outputs, (records * heads, tokens, head size), are viewed as (records, tokens, width) without moving the
# heads behind the tokens. No record sees another, so privacy holds; a pretrained model is spoilt before training begins.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "torch==2.13.0" "opacus==1.6.0"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import torch
from opacus.validators import ModuleValidator


class Attention(torch.nn.Module):
    def __init__(self, heads, batch_first):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(16, heads, batch_first=batch_first)

    def forward(self, states):
        return self.attention(states, states, states)[0]


differences = {}
for batch_first in (False, True):
    for heads in (1, 2):
        torch.manual_seed(0)
        model = Attention(heads, batch_first).eval()
        replaced = ModuleValidator.fix(model).eval()
        states = torch.randn(3, 5, 16)
        with torch.no_grad():
            right, given = model(states), replaced(states)
        differences[batch_first, heads] = (given - right).abs().max().item()
        print(
            f"batch_first={batch_first}, {heads} heads: outputs of at most {right.abs().max():.2f} "
            f"differ by {differences[batch_first, heads]:.2g}"
        )
wrong = differences.pop((True, 2))
sys.exit(not (wrong > 0.1 and max(differences.values()) < 1e-5))
PY
