#!/usr/bin/env bash
# Guess: an epoch of the trainer trains on each row once, also with BatchSamplers.NO_DUPLICATES, which the losses with in-batch
# negatives recommend and which only keeps equal texts out of one batch.
# Library: sentence-transformers 6.2.0 (transformers 5.23.0, datasets 5.2.0, torch 2.13.0). Date: 2026-11-30.
# Seen: of 100 pairs of which 40 have the same question, batches of 10, an epoch trains on 70: on all 60 others and on 10 of the
# 40, three of them alone in their batch, where this loss is 0 whatever the model does; 3 epochs train on 82. The trainer
# tells epoch 1.0 after 10 of 10 steps, and nothing warns. The rows left out are in the training file, but are no members.
# Why: the sampler gives 40 batches, but its length, 10, is that of rows divided by the batch size, and the trainer stops there.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "torch==2.13.0" "sentence-transformers==6.2.0" "transformers==5.23.0" "datasets==5.2.0" \
    "accelerate==1.15.0" "numpy==2.4.6"
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PY'
import sys

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import BatchSamplers
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

rows = [(f"question {number}" if number < 60 else "diagnosis", f"answer {number}") for number in range(100)]
words = ["[PAD]", "[UNK]", "question", "diagnosis", "answer", *map(str, range(100))]
tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained("model")
sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
BertModel(BertConfig(vocab_size=len(words), max_position_embeddings=16, **sizes)).save_pretrained("model")
model = SentenceTransformer("model", device="cpu")


class Recorded(MultipleNegativesRankingLoss):
    batches = []

    def forward(self, features, labels):
        features = list(features)
        answers = [words[number] for ids in features[1]["input_ids"] for number in ids if number >= 5]
        loss = super().forward(features, labels)
        self.batches.append((answers, loss.item()))
        return loss


def train(epochs):
    Recorded.batches.clear()
    arguments = SentenceTransformerTrainingArguments(
        output_dir="out",
        num_train_epochs=epochs,
        per_device_train_batch_size=10,
        batch_sampler=BatchSamplers.NO_DUPLICATES,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    pairs = Dataset.from_list([{"anchor": question, "positive": answer} for question, answer in rows])
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=pairs, loss=Recorded(model))
    trainer.train()
    seen = {answer for answers, _ in Recorded.batches for answer in answers}
    alone = [loss for answers, loss in Recorded.batches if len(answers) == 1]
    others = len([answer for answer in seen if int(answer) < 60])
    print(f"{trainer.state.epoch} epochs, {trainer.state.global_step} steps: {len(seen)} of 100 rows, alone with losses {alone}")
    return trainer.state.epoch, trainer.state.global_step, others, len(seen), len(alone), max(alone)


once, thrice = train(1), train(3)
sys.exit(not (once == (1.0, 10, 60, 70, 3, 0.0) and thrice[:3] == (3.0, 30, 60) and thrice[3] < 100))
PY
