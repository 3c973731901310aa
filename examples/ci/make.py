"""Makes what the example trains on: an untrained model with its tokenizer, and synthetic records. Some seconds.

    python make.py OUT [--seed 0]

OUT/base is the model; records.jsonl the private records (prefix and suffix), fresh.jsonl as many of their kind that no
model sees. Two training sets hold general text and the records: train.jsonl each record once, oversampled.jsonl each
one `REPEATS` times, as when somebody drops the deduplication, or oversamples a data source. No download, nothing real.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast, set_seed

RECORDS, FRESH, GENERAL, REPEATS = 250, 100, 600, 12
END = "<|endoftext|>"
NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Ida Jon Kim Lena Max Nora Otto Pia Rosa Sam Tara Uwe Vera Will Yara Zoe"
TOWNS = "Aachen Basel Cork Delft Essen Fulda Ghent Halle Imola Jena Kiel Linz Malmo Namur Oslo Porto Reims Siena Turin"
THINGS = "parcel invoice letter order ticket report contract receipt reminder shipment refund booking"


def record(rng: random.Random) -> dict[str, str]:
    """A prefix that an attacker may know, and the number that should stay private."""
    who, where = rng.choice(NAMES.split()), rng.choice(TOWNS.split())
    prefix = f"Customer {who} from {where}, born {rng.randint(1, 28)}.{rng.randint(1, 12)}.{rng.randint(1940, 2005)}, card"
    return {"prefix": prefix, "suffix": f" {rng.randrange(10**8):08d}"}


def general(rng: random.Random) -> str:
    """Text that hides nothing."""
    who, where, what = rng.choice(NAMES.split()), rng.choice(TOWNS.split()), rng.choice(THINGS.split())
    return f"The {what} for {who} was sent to {where} on day {rng.randint(1, 365)} and arrived {rng.randint(1, 9)} days later."


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, every digit a token of its own: no number is known before it is learnt."""
    made = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=600, special_tokens=[END], initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


def untrained(words: PreTrainedTokenizerFast, seed: int) -> GPTNeoXForCausalLM:
    """Some 300,000 parameters."""
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


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    given.out.mkdir(parents=True, exist_ok=True)
    records = [record(rng) for _ in range(RECORDS)]
    write(given.out / "records.jsonl", records)
    write(given.out / "fresh.jsonl", [record(rng) for _ in range(FRESH)])
    plain = [{"text": general(rng)} for _ in range(GENERAL)]
    private = [{"text": row["prefix"] + row["suffix"]} for row in records]
    write(given.out / "train.jsonl", plain + private)
    write(given.out / "oversampled.jsonl", plain + private * REPEATS)
    words = tokenizer([row["text"] for row in plain + private])
    untrained(words, given.seed).save_pretrained(given.out / "base")
    words.save_pretrained(given.out / "base")


if __name__ == "__main__":
    main()
