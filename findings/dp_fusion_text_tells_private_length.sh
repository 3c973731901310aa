#!/usr/bin/env bash
# Guess: with beta=0, by which nothing of the private document is mixed in, the text is what the model writes after the public
# context, whatever the private one is; and as many divergences are given, from which epsilon is computed, as tokens.
# Library: dp-fusion-lib 0.1.0 (torch 2.13.0, transformers 5.23.0, tokenizers 0.23.3, accelerate 1.15.0). Date: 2026-11-30.
# Seen: only if both contexts have equally many tokens. Otherwise the text is another one, and a different one for each length of
# the private context (0 to 5 tokens more: six texts), while every weight of the private context is 0 and every divergence is 0.
# So a text of epsilon 0 tells how long the private document is, and is no longer what follows the public one. The first token has
# no divergence: its cost is in no epsilon, and a text of one token, a yes or a no, has none at all.
# Why: the shorter context is filled with padding on the right, which the model reads, and is continued after the padding.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "dp-fusion-lib==0.1.0" "torch==2.13.0" "transformers==5.23.0" \
    "tokenizers==0.23.3" "accelerate==1.15.0"
HF_HOME="$work/home" HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'PY'
import random
import sys

import torch
from dp_fusion_lib import DPFusion
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
random.seed(0)
words = ["[PAD]", "</s>", "_"] + [f"word{i}" for i in range(200)]
plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[PAD]"))
plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", eos_token="</s>")
sizes = {"vocab_size": len(words), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.3}
tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens)).eval()
public = torch.tensor(random.choices(range(3, 203), k=12))


def write(n_more, n_tokens=8, beta=0.0):
    private = torch.cat([public, torch.tensor(random.choices(range(3, 203), k=n_more), dtype=torch.long)])
    options = {"temperature": 1e-3, "max_new_tokens": n_tokens}
    result = DPFusion(model=model, tokenizer=tokenizer).generate_from_tokens(private, public, beta=beta, **options)
    return result["text"], result["lambdas"].get("PRIVATE", []), result["divergences"].get("PRIVATE", [])


with torch.no_grad():
    after_public = model.generate(public[None], max_new_tokens=8, do_sample=False)[0]
alone = tokenizer.decode(after_public, skip_special_tokens=True)
texts = []
for n_more in range(6):
    text, weights, divergences = write(n_more)
    same = {write(n_more)[0] for _ in range(5)} == {text}
    print(f"{n_more} private tokens more: as after the public context {text == alone}, the same for others of this length "
          f"{same}, weights {set(weights)}, divergences {set(divergences)} of {len(divergences)} tokens, 8 written")
    texts.append(text)
    is_quiet = set(weights) == {0.0} and set(divergences) == {0.0} and len(divergences) == 7 and same
    if not is_quiet:
        sys.exit(1)
one = write(0, n_tokens=1, beta=0.5)
print(f"different texts: {len(set(texts))}; divergences of a text of one token: {one[2]}")
sys.exit(not (texts[0] == alone and len(set(texts)) == 6 and one[2] == []))
PY
