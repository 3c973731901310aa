#!/usr/bin/env bash
# Guess: a TokenSwapProcessor, which keeps a model from quoting what it learned by heart, changes a prompt's next tokens in the same way
# whether or not another prompt was answered before; and in a batch each row as it would alone.
# Library: verbatim-llm 0.2.0 (transformers 5.23.0, torch 2.13.0). Date: 2026-12-01.
# Seen: with the same processor, the second prompt gets the swapped probabilities of the first prompt and its own last token: the
# auxiliary model never reads it, while it keeps reading the first user's text. All of 40 answers of 20 tokens differ from those of
# a fresh processor. If the two models have different tokenizers, all rows of a batch get the probabilities of the first row.
# Why: the auxiliary model's cache is kept in the processor, and is only made at its first call; with two tokenizers only the first
# row's text is handed over. transformers' generate() takes processors by instance, so one per pipeline is what is usual.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "verbatim-llm==0.2.0" "torch==2.13.0" "transformers==5.23.0"
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$work/venv/bin/python" -W ignore - 2> "$work/log" <<'PY'
import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, PreTrainedTokenizerFast
from verbatim_llm.tokenswap import TokenSwapProcessor

grammar = [f"g{i}" for i in range(60)]
words = grammar + [f"w{i}" for i in range(39)]


def make_tokenizer(names):
    vocabulary = {"[UNK]": 0, **{name: i + 1 for i, name in enumerate(names)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[UNK]")


def make_model(seed):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    tokens = {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens, **heads)).eval()


main, auxiliary = make_model(0), make_model(1)
tokenizer, other = make_tokenizer(words), make_tokenizer(words[::-1])


def make_processor(auxiliary_tokenizer=None):
    return TokenSwapProcessor(auxiliary, tokenizer, grammar, auxiliary_tokenizer)


def get_swapped(processor, ids):
    """Return the probabilities of the grammar words among themselves, (rows, 60)."""
    with torch.no_grad():
        swapped = processor(ids, main(ids).logits[:, -1]).exp()[:, processor.grammar_ids]
    return swapped / swapped.sum(1, keepdim=True)


def answer(processor, ids):
    options = {"max_new_tokens": 20, "do_sample": False, "logits_processor": LogitsProcessorList([processor])}
    return main.generate(ids, **options)[0, ids.shape[1] :]


prompts = torch.randint(1, 100, (41, 8), generator=torch.Generator().manual_seed(0)).unsqueeze(1)
first = prompts[0]
used = make_processor()
get_swapped(used, first)
seen = get_swapped(used, prompts[1])
mixed = get_swapped(make_processor(), torch.cat([first, prompts[1][:, -1:]], 1))
fresh = get_swapped(make_processor(), prompts[1])
to_mixed, to_fresh = (float((seen - one).abs().sum() / 2) for one in (mixed, fresh))
print(f"second prompt: total variation {to_fresh:.2f} from a fresh processor, {to_mixed:.6f} from the first prompt and its last token")
changed = 0
for prompt in prompts[1:]:
    used = make_processor()
    answer(used, first)
    changed += not torch.equal(answer(used, prompt), answer(make_processor(), prompt))
print(f"{changed} of 40 answers differ from those of a fresh processor")
batch = torch.cat([first, prompts[1]])
rows = get_swapped(make_processor(other), batch)
alone = get_swapped(make_processor(other), prompts[1])[0]
of_first, of_own = float((rows[1] - rows[0]).abs().max()), float((rows[1] - alone).abs().sum() / 2)
print(f"batch, two tokenizers: the second row is {of_first:.6f} from the first row, {of_own:.2f} from itself alone")
sys.exit(not (to_mixed < 1e-4 < 0.1 < to_fresh and changed == 40 and of_first < 1e-5 and of_own > 0.1))
PY
