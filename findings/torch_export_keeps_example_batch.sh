#!/usr/bin/env bash
# Guess: the batch by which torch.export traces a model gives shapes only; the saved program holds the graph and the weights.
# Library: torch 2.13.0. Date: 2026-11-29.
# Seen: torch.export.save() writes the batch itself, token by token, and torch.export.load() gives it back in
# `example_inputs`; also after run_decompositions(). A model exported with a batch of its training data is published with
# that batch. With `example_inputs = None` before saving, the file holds none of it.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "torch==2.13.0" numpy
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log"
import sys
import zipfile

import torch


class TinyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(1000, 8)
        self.head = torch.nn.Linear(8, 1000)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


tokens = (torch.arange(100, 140) * 7).reshape(2, 20)


def save_and_search(program, name):
    torch.export.save(program, f"{name}.pt2")
    archive = zipfile.ZipFile(f"{name}.pt2")
    wanted = tokens.numpy().tobytes()
    return [entry for entry in archive.namelist() if wanted in archive.read(entry)]


program = torch.export.export(TinyModel().eval(), (tokens,))
found = {"saved": save_and_search(program, "saved")}
(batch,), _ = torch.export.load("saved.pt2").example_inputs
found["decomposed"] = save_and_search(program.run_decompositions(), "decomposed")
program.example_inputs = None
found["without example_inputs"] = save_and_search(program, "without")
for case, entries in found.items():
    print(f"{case}: the tokens of the batch are in {entries or 'no entry'}")
print(f"loaded again: equal to the batch {torch.equal(batch, tokens)}")
sent = [len(entries) for entries in found.values()]
sys.exit(sent != [1, 1, 0] or not torch.equal(batch, tokens))
PY
