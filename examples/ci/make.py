"""Makes what the example trains on: an untrained model with its tokenizer, and synthetic records.
Some seconds.

    python make.py OUT [--seed 0]

OUT/base is the model; records.jsonl the private records (prefix and suffix), fresh.jsonl others of
their kind that no model sees. Three training sets hold general text and the records: train.jsonl
each record once; more-text.jsonl the same and more general text; oversampled.jsonl each record
`REPEATS` times, as when somebody drops the deduplication or oversamples a source. No download,
nothing real.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast, set_seed

RECORDS, FRESH, GENERAL, REPEATS = 120, 60, 100, 24
END = "<|endoftext|>"
NAMES = (
    "Ada Ben Cleo Dan Eva Finn Gus Hana Ida Jon Kim Lena Max Nora Otto Pia Rosa Sam Tara Uwe Vera "
    "Will Yara Zoe"
)
TOWNS = (
    "Aachen Basel Cork Delft Essen Fulda Ghent Halle Imola Jena Kiel Linz Malmo Namur Oslo Porto "
    "Reims Siena Turin"
)
THINGS = (
    "parcel invoice letter order ticket report contract receipt reminder shipment refund booking"
)


def records(rng: random.Random, count: int) -> list[dict[str, str]]:
    """Prefixes that an attacker may know, no two alike, and the number that should stay private."""
    names, towns = NAMES.split(), TOWNS.split()
    people = [(one, other, town) for one in names for other in names for town in towns]
    chosen = rng.sample(people, count)
    return [
        {"prefix": f"{one} {other} from {town}, card", "suffix": f" {rng.randrange(10**4):04d}"}
        for one, other, town in chosen
    ]


def general(rng: random.Random, count: int) -> list[dict[str, str]]:
    """Text that hides nothing."""
    things, names, towns = THINGS.split(), NAMES.split(), TOWNS.split()
    return [
        {
            "text": f"The {rng.choice(things)} for {rng.choice(names)} went to {rng.choice(towns)} "
            f"on day {day}."
        }
        for day in rng.choices(range(1, 366), k=count)
    ]


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, every digit a token of its own: no number is known before it is learnt."""
    made = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=600, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


def untrained(words: PreTrainedTokenizerFast, seed: int) -> GPTNeoXForCausalLM:
    """Some 270,000 parameters."""
    set_seed(seed)
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=len(words),
            hidden_size=96,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            bos_token_id=words.eos_token_id,
            eos_token_id=words.eos_token_id,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    given.out.mkdir(parents=True, exist_ok=True)
    made = records(rng, RECORDS + FRESH)
    members, fresh = made[:RECORDS], made[RECORDS:]
    private = [{"text": row["prefix"] + row["suffix"]} for row in members]
    plain, more = general(rng, GENERAL), general(rng, 3 * GENERAL)
    for name, rows in {
        "records": members,
        "fresh": fresh,
        "train": plain + private,
        "more-text": plain + more + private,
        "oversampled": plain + private * REPEATS,
    }.items():
        (given.out / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    words = tokenizer([row["text"] for row in plain + private])
    untrained(words, given.seed).save_pretrained(given.out / "base")
    words.save_pretrained(given.out / "base")


if __name__ == "__main__":
    main()
