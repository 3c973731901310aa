#!/usr/bin/env bash
# Guess: the score of a continuation is the mean log-probability of its tokens (the default divides by the length), or their sum; it
# does not depend on whether the prompt is repeated in the result (include_prompt_in_result), nor on how long the prompt is.
# Library: ctranslate2 4.8.5 (transformers 5.23.0 and torch 2.13.0 make the model and check it). Date: 2026-11-30.
# Seen: by default, with the prompt in the result, the sum of the log-probabilities of the continuation is divided by the tokens of
# prompt and continuation together: the same 6 tokens have -0.75 as their mean and -0.45 as their score after a prompt of 4
# tokens, and after 20 tokens -0.61 and -0.14. With include_prompt_in_result=False the score is the mean. Whoever ranks
# continuations by their scores, as likelier to be memorized, ranks them by the length of their prompts.
# Why: the prompt's tokens are taken as steps of the search with score 0. They also count towards max_length.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "ctranslate2==4.8.5" "torch==2.13.0" "transformers==5.23.0" "tokenizers==0.23.3" "numpy==2.4.6"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

import ctranslate2
import torch
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(60))]
tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>").save_pretrained("model")
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), initializer_range=0.5, **sizes)).eval()
model.save_pretrained("model")
TransformersConverter("model").convert("converted")
generator = ctranslate2.Generator("converted", device="cpu")
still = True
for length in (4, 10, 20):
    prompt = ["<s>", *(f"w{number}" for number in range(length))]
    options = {"sampling_topk": 1, "end_token": [], "return_scores": True}
    by_default = generator.generate_batch([prompt], max_length=length + 6, **options)[0]
    without = generator.generate_batch([prompt], max_length=6, include_prompt_in_result=False, **options)[0]
    continuation = without.sequences[0]
    ids = torch.tensor([[words.index(word) for word in prompt + continuation]])
    logs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[-6:, 0]
    mean, diluted = logs.mean().item(), logs.sum().item() / (length + 6)
    print(f"prompt of {length}: mean {mean:.3f}, score {without.scores[0]:.3f}; with the prompt in the result {by_default.scores[0]:.3f}")
    still &= by_default.sequences[0][-6:] == continuation and len(by_default.sequences[0]) == length + 6
    still &= abs(without.scores[0] - mean) < 1e-3 and abs(by_default.scores[0] - diluted) < 1e-3 and mean < 1.5 * diluted
sys.exit(not still)
PY
