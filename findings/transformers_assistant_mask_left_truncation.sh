#!/usr/bin/env bash
# Guess: if a chat is cut on the left, the mask of assistant tokens marks those answers that are left.
# Library: transformers 5.23.0 (with tokenizers 0.23.3), apply_chat_template(return_assistant_tokens_mask=True) with
# truncation_side "left". Date: 2026-11-28.
# Seen: as soon as the first character of the first answer is cut, no token at all is marked, though the last answer is
# there whole. Cut on the right, the answers that are left are marked.
# Why: the first answer whose beginning is not found ends the loop over answers. A trainer that takes its loss from this
# mask learns nothing of such a chat, in silence: it is in the training file, but no member.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q "transformers==5.23.0" "tokenizers==0.23.3" jinja2
HF_HOME="$work/home" HF_HUB_OFFLINE=1 "$work/venv/bin/python" -W ignore - <<'PY'
import sys

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = "<unk> user: assistant: who is it her number Ann Field 0172 5530".split()
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
fast.chat_template = (
    "{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %} {% endfor %}"
)
turns = ["who is it", "Ann Field", "her number", "0172 5530"]
chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
marked = {}
for side in ("right", "left"):
    fast.truncation_side = side
    for length in (13, 7):
        row = fast.apply_chat_template(
            chat, truncation=True, max_length=length, return_dict=True, return_assistant_tokens_mask=True
        )
        answers = [i for i, flag in zip(row["input_ids"], row["assistant_masks"]) if flag]
        marked[side, length] = fast.decode(answers)
        print(f"cut on the {side} to {length} tokens: {fast.decode(row['input_ids'])!r}, marked {marked[side, length]!r}")
right = marked["right", 7] == "Ann Field" and marked["left", 13] == "Ann Field 0172 5530"
sys.exit(not (right and marked["left", 7] == ""))
PY
