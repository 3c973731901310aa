#!/usr/bin/env bash
# Guess: with enable_differential_privacy=True the words' counts are noised and rare words dropped before the vocabulary is
# learned, as in sentencepiece 0.2.1, or the training is refused.
# Library: sentencepiece 0.2.3. Date: 2026-11-29.
# Seen: the options of differential privacy are taken and do nothing. Pieces and scores are exactly those of the training
# without them, and the letters of a name that occurs once, below the threshold of 20, are in the vocabulary; 0.2.1 drops
# them. A line of the log says that the options are "deprecated and ignored"; with minloglevel=2, nothing does.
# So an upgrade ends the privacy of a tokenizer, whose vocabulary is published with the model.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
cat > "$work/train.py" <<'PY'
import io
import json
import random
import sys

import sentencepiece

random.seed(0)
counts = {"Zwenkau": 1}
while len(counts) < 300:
    word = "".join(random.choices("abcdefghij", k=random.randint(3, 7)))
    counts[word] = random.randint(30, 400)
with open("counts.tsv", "w") as file:
    file.writelines(f"{word}\t{count}\n" for word, count in counts.items())


def learn_pieces(**options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        input="counts.tsv", input_format="tsv", model_writer=model, vocab_size=60, hard_vocab_limit=False,
        model_type="unigram", character_coverage=1.0, minloglevel=2, **options
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return {processor.id_to_piece(i): processor.get_score(i) for i in range(len(processor))}


plain = learn_pieces()
private = learn_pieces(
    enable_differential_privacy=True,
    differential_privacy_noise_level=2.0,
    differential_privacy_clipping_threshold=20,
)
letters = sorted(set("Zwnku") & set(private))
print(json.dumps({"as_without": plain == private, "letters_of_rare_name": letters}))
PY
cd "$work"
for version in 0.2.1 0.2.3; do
    "$work/venv/bin/pip" install -q "sentencepiece==$version"
    "$work/venv/bin/python" train.py > "$version.json"
    echo "sentencepiece $version: $(cat "$version.json")"
done
grep -q '"as_without": false, "letters_of_rare_name": \[\]' 0.2.1.json
grep -q '"as_without": true, "letters_of_rare_name": \["Z", "k", "n", "u", "w"\]' 0.2.3.json
