"""Makes what the tutorial on a chat adapter works with: an untrained chat model and synthetic
conversations. Seconds.

    python make.py OUT [--seed 0] [--few]

OUT/untrained is the model, with a chat template; public.jsonl conversations that hold nothing
private, for its base; chats.jsonl the private ones, a row each time that one is in the training
data: most once, some 8 times, some 64 times, as when exports of a help desk are put together;
fresh.jsonl others of their kind that no model sees. No download, nothing real. --few makes a
handful of each, for tests.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

COPIES = {1: 140, 8: 30, 64: 20}  # how often a conversation is in chats.jsonl: how many of them
FRESH, PUBLIC = 100, 1200
SPECIAL = ["<|text|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FIRST = (
    "Ada Ben Cleo Dan Eva Finn Gus Hana Ida Jon Kim Lena Max Nora Otto Pia Rosa Sam Tara Uwe Vera "
    "Will Yara Zoe"
)
LAST = (
    "Abel Brandt Costa Dietz Ebert Falk Greco Haas Ivens Jansen Keller Lopez Meyer Novak Olsen "
    "Peters Quint Roth"
)
STREETS = (
    "Lime Oak Mill Station Church Garden Harbour Castle Forest River Market School Bridge Spring "
    "Hill Park"
)
GOODS = "lamp chair kettle carpet mirror heater drill tent radio clock blanket ladder desk shelf"


def conversation(rng: random.Random, name: str) -> dict[str, object]:
    """A customer asks, and the answer says where they live and their door code."""
    street, good = rng.choice(STREETS.split()), rng.choice(GOODS.split())
    code = rng.randrange(10**4)
    asks = f"Where does the {good} of {name} go?"
    address = f"{rng.randrange(1, 99)} {street} Street"
    answers = f"To {address}. Their door code is {code:04d}."
    turns = (("system", "You are the help desk."), ("user", asks), ("assistant", answers))
    marked = {"address": [address], "door-code": [f"{code:04d}"]}  # no rule finds these
    return {
        "messages": [{"role": role, "content": content} for role, content in turns],
        "pii": marked,
    }


def tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
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
            vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=SPECIAL[0], pad_token=SPECIAL[0]
    )
    found.chat_template = TEMPLATE
    return found


def untrained(words: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Some 600,000 parameters."""
    set_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            bos_token_id=words.eos_token_id,
            eos_token_id=words.eos_token_id,
        )
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--few", action="store_true")
    given = parser.parse_args(arguments)
    rng, by = random.Random(given.seed), 10 if given.few else 1
    names = [f"{first} {last}" for first in FIRST.split() for last in LAST.split()]
    rng.shuffle(names)
    told = iter([conversation(rng, name) for name in names])
    private = [[next(told)] * times for times, count in COPIES.items() for _ in range(count // by)]
    fresh = [next(told) for _ in range(FRESH // by)]
    public = [conversation(rng, rng.choice(names[-100:])) for _ in range(PUBLIC // by)]
    given.out.mkdir(parents=True, exist_ok=True)
    copied = [row for copies in private for row in copies]
    for name, rows in {"chats": copied, "fresh": fresh, "public": public}.items():
        (given.out / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    words = tokenizer([str(row) for row in public])
    untrained(words, given.seed).save_pretrained(given.out / "untrained")
    words.save_pretrained(given.out / "untrained")


if __name__ == "__main__":
    main()
