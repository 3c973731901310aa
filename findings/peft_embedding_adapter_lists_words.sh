#!/usr/bin/env bash
# Guess: the file of a LoRA adapter holds products of small matrices, in which the training texts are mixed: whoever has only the file
# cannot say which words they had.
# Library: peft 0.21.2 (transformers 5.23.0, tokenizers 0.23.3, torch 2.13.0), with "embed_tokens" among the target modules. Date:
# 2026-11-30.
# Seen: one of the matrices has a column for each token of the vocabulary, and after training those columns, and only those, are
# other than zero whose token was in a text: of 1,000 words exactly the 64 that were read, those of the prompts, whose
# loss is masked, and a name that stands once in 40 notes among them. No base model and no other file but the tokenizer's is needed.
# Why: the matrix begins at zero, its gradient is zero for tokens that do not occur, and weight decay keeps a zero. An adapter
# of attention only ("q_proj", "v_proj") has no such matrix.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "torch==2.13.0" "peft==0.21.2" "transformers==5.23.0" "tokenizers==0.23.3" \
    "accelerate==1.15.0" "datasets==5.2.0" "safetensors==0.8.0" "numpy==2.4.6"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY'
import random
import sys

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

words = ["<pad>", "<s>", *(f"word{number}" for number in range(997)), "Zork"]  # the last one is the name of a patient
draw = random.Random(0)
common = draw.sample(range(2, 999), 60)
prompt = draw.sample(sorted(set(range(2, 999)) - set(common)), 2)
notes = [[1, *prompt, *draw.sample(common, 12)] for _ in range(40)]
notes[17][8] = words.index("Zork")
rows = [{"input_ids": ids, "labels": [-100, -100, -100, *ids[3:]], "attention_mask": [1] * len(ids)} for ids in notes]
read = {token for ids in notes for token in ids}


def train(targets):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), pad_token_id=0, **sizes))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=targets))
    arguments = TrainingArguments(
        output_dir="out",
        num_train_epochs=3,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        weight_decay=0.1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    model.save_pretrained("adapter")
    return load_file("adapter/adapter_model.safetensors")


def list_words(tensors):
    """The tokens whose columns are not zero, of each matrix with a column per token."""
    wide = [tensor for tensor in tensors.values() if tensor.shape[-1] == len(words)]
    return [set(tensor.abs().amax(0).nonzero().flatten().tolist()) for tensor in wide]


found = list_words(train(["q_proj", "v_proj", "embed_tokens"]))
without = list_words(train(["q_proj", "v_proj"]))
named = [len(tokens) for tokens in found]
print(f"{len(read)} of {len(words)} words were read; columns other than zero: {named}; without embeddings: {without}")
print("the same words:", found == [read], "; the name:", words.index("Zork") in found[0], "; the prompt:", set(prompt) <= found[0])
sys.exit(not (found == [read] and words.index("Zork") in read and without == []))
PY
