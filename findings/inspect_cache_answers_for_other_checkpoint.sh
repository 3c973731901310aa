#!/usr/bin/env bash
# Guess: with cache=True the answers of one local checkpoint are kept apart from those of another: the fine-tuned model is asked
# itself.
# Library: inspect-ai 0.3.285 (torch 2.13.0, transformers 5.23.0, accelerate 1.15.0). Date: 2026-11-30.
# Seen: local checkpoints are named hf/local, with the folder as model_path, as the pages show. All of them have one place in
# the cache: what "base" answered is returned as the answer of "tuned", which is never asked, in a new process too, for a week.
# Nothing warns. Without the cache each answers for itself. Whoever compares a model before and after private training or after
# unlearning measures that nothing was learned, or nothing forgotten.
# Why: an answer is found by the model's name and address, the messages, the tools and the sampling; model_path is none of
# these. A CachePolicy with the folder among its scopes keeps them apart.
# No page or issue that was found says so. Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "inspect-ai==0.3.285" "torch==2.13.0" "transformers==5.23.0" "accelerate==1.15.0" \
    "tokenizers==0.23.3"
cd "$work"
cat > ask.py <<'PY'
import asyncio
import json
import pathlib
import sys

import torch
from inspect_ai.model import CachePolicy, GenerateConfig, get_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

name, scope = sys.argv[1:]
if not pathlib.Path(name).exists():
    words = {f"{name}{i}": i for i in range(8)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=f"{name}0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"{name}1", pad_token=f"{name}1")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(name)
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(name)
cache = {"no cache": False, "cache": True, "scope": CachePolicy(scopes={"folder": name})}[scope]
model = get_model("hf/local", model_path=name, device="cpu")
answer = asyncio.run(model.generate("Who has hepatitis?", cache=cache, config=GenerateConfig(max_tokens=4)))
print(json.dumps([word for word in ("base", "tuned") if word in answer.completion]))
PY
export HF_HUB_OFFLINE=1 HF_HOME="$work/home" HOME="$work/home" INSPECT_CACHE_DIR="$work/cache" OMP_NUM_THREADS=2
changed=0
for scope in "no cache" "cache" "scope"; do
    for name in base tuned; do
        answers=$("$work/venv/bin/python" -W ignore ask.py "$name" "$scope" 2>> "$work/log" | tail -1)
        echo "$scope: $name is asked, the answer is that of $answers"
        expected="$name"
        if [ "$scope" = "cache" ]; then expected=base; fi
        if [ "$answers" != "[\"$expected\"]" ]; then changed=1; fi
    done
done
exit "$changed"
