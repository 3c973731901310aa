"""A secret's text is what its owner wrote, whatever the tokenizer makes of it; tokens cut it and do
not rewrite it."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from auditor.benchmarks.data.cut_places import (
    CUT_WITHIN_CHARACTER,
    cut_wording,
    find_token_ends,
)
from auditor.benchmarks.lab.lab import Lab
from auditor.core.nouns import Guess, Guesses, Secret
from auditor.records import private_texts
from tests.conftest import read_arrays, read_files

CORPUS = [
    f"Dear {who}, the code of {what} is {i:06d}."
    for i in range(40)
    for who in "Ann Bob"
    for what in ("A", "the")
]
# cases, spaces and characters that tokenizers fold or split
ODD = "Dear  Ann,\tthe CODE of the É-mail is 🗝 004711."


def trained(
    spaces: Any, decoder: Any, normalizer: Any = None, post: Any = None
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer, tokenizer.decoder = spaces, decoder
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if post is not None:
        tokenizer.post_processor = post
    alphabet = (
        pre_tokenizers.ByteLevel.alphabet() if decoder.__class__.__name__ == "ByteLevel" else []
    )
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400, show_progress=False, initial_alphabet=alphabet, special_tokens=["?"]
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
TOKENIZERS = {
    "bytes": trained(BYTES, decoders.ByteLevel()),
    "spaces trimmed off": trained(
        BYTES, decoders.ByteLevel(), post=processors.ByteLevel(trim_offsets=True)
    ),
    "lower case": trained(BYTES, decoders.ByteLevel(), normalizers.Lowercase()),
    "a space made up": trained(pre_tokenizers.Metaspace(), decoders.Metaspace()),
    "words": trained(
        pre_tokenizers.Whitespace(), decoders.BPEDecoder(), normalizers.BertNormalizer()
    ),
}


def byte_fallback_tokenizer(kind: str = "bpe") -> PreTrainedTokenizerFast:
    """Return a tokenizer as Llama 2 has it: a letter a token, and a byte a token of all others."""
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(32, 127)), "▁", "?"]
    if kind == "unigram":
        pieces = [(word, -1.0) for word in words]
        tokenizer = Tokenizer(models.Unigram(pieces, len(words) - 1, byte_fallback=True))
    else:
        vocabulary = {word: i for i, word in enumerate(words)}
        tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="?", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def decode(tokenizer: PreTrainedTokenizerFast) -> private_texts.Decode:
    return lambda ids: str(
        tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def kept(
    folder: Path, secrets: tuple[Secret, ...], tokenizer: PreTrainedTokenizerFast
) -> list[private_texts.SecretText]:
    """What a run keeps of these secrets, where every guess is right."""
    right = {
        "a/b/c": {s.id: Guesses(s.id, (Guess(s.suffix, 0.0),), 1, len(s.suffix)) for s in secrets}
    }
    private_texts.write_secret_texts(folder, secrets, right, decode(tokenizer))
    return list(private_texts.read_secret_texts(folder).values())


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_cut_text_is_kept_as_it_was_written(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]
    length = len(tokenizer(ODD)["input_ids"])
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": ODD}) + "\n")
    data = str(tmp_path / "data.jsonl")
    made = read_files(data, tokenizer, prefix_length=length - 7, suffix_length=7, known_fraction=0)
    (text,) = kept(tmp_path, made.secrets, tokenizer)
    assert text.prefix + text.suffix == ODD and text.suffix.endswith("4711.")
    assert len(text.pieces) == 7 and text.verbatim == ("a/b/c",) and not text.decoded


@pytest.mark.parametrize(
    ("layout", "lengths"),
    [
        ("text", {}),
        ("text", {"prefix_length": 10, "suffix_length": 8}),
        ("text", {"prefix_length": 10, "suffix_length": 8, "windows": 7}),
        ("messages", {}),
        ("messages", {"prefix_length": 10, "suffix_length": 8}),
        ("messages", {"knows": "partial:0.4"}),
    ],
)
@pytest.mark.parametrize("spaces", ["bytes", "byte fallback", "unigram"])
def test_no_cut_lies_within_a_character(
    spaces: str, layout: str, lengths: dict[str, Any], tmp_path: Path
) -> None:
    # three tokens for each Chinese character
    tokenizer = TOKENIZERS["bytes"] if spaces == "bytes" else byte_fallback_tokenizer(spaces)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    )
    noise = np.random.default_rng(0)
    texts = ["".join(map(chr, noise.integers(0x4E00, 0x9FA5, size=n))) for n in range(10, 60, 7)]
    talks = [
        [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": text}]
        for text in texts
    ]
    values = texts if layout == "text" else talks
    lines = [json.dumps({layout: value}) + "\n" for value in values]
    (tmp_path / "data.jsonl").write_text("".join(lines))
    secrets = read_files(
        str(tmp_path / "data.jsonl"), tokenizer, known_fraction=0, **lengths
    ).secrets
    parts = [
        decode(tokenizer)(tokens) for secret in secrets for tokens in (secret.prefix, secret.suffix)
    ]
    assert len(secrets) >= len(texts) and not any("\ufffd" in part for part in parts)


def test_a_suffix_below_one_character_is_left_out_by_name(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "ab猫犬"}\n{"text": "abcdef"}\n')
    data = str(tmp_path / "data.jsonl")
    lengths = {"prefix_length": 2, "suffix_length": 2}
    made = read_files(data, byte_fallback_tokenizer(), known_fraction=0, **lengths)
    assert len(made.secrets) == 1
    assert made.record_counts["members"].left_out == {CUT_WITHIN_CHARACTER: 1}


@pytest.mark.parametrize("name", ["bytes", "spaces trimmed off"])
def test_prefix_and_suffix_are_those_of_their_columns(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]
    row = {"prefix": "Dear  Ann,\tthe CODE of the É-mail", "suffix": " is 🗝 004711. "}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    made = read_files(str(tmp_path / "data.jsonl"), tokenizer, known_fraction=0)
    (text,) = kept(tmp_path, made.secrets, tokenizer)
    assert (text.prefix, text.suffix) == (row["prefix"], row["suffix"])
    assert len(text.pieces) == len(made.secrets[0].suffix) and "🗝" in "".join(text.pieces)


def test_the_lab_keeps_the_texts_that_it_made() -> None:
    lab = Lab()
    own = {text for group in lab.texts.private.values() for text in group} | set(
        lab.texts.nonmembers
    )
    for secret in lab.secrets[::25]:
        assert secret.wording is not None
        said = secret.wording.prefix + secret.wording.suffix
        assert any(text.startswith(said) for text in own)
        assert secret.wording.suffix_text_by_token == tuple(
            lab.tokenizer.decode([token]) for token in secret.suffix
        )


def test_arrays_hold_no_text_so_that_theirs_is_decoded_and_said_to_be(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["lower case"]
    ids = tokenizer(ODD)["input_ids"]
    for name, part in (("prefix", ids[:10]), ("suffix", ids[10:20])):
        np.save(tmp_path / f"own_{name}.npy", np.array([part]))
    made = read_arrays(str(tmp_path), vocab_size=len(tokenizer), known_fraction=0)
    (text,) = kept(tmp_path, made.secrets, tokenizer)
    assert (
        text.decoded
        and text.prefix == decode(tokenizer)(ids[:10])
        and text.prefix.startswith("dear")
    )


TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20)


@given(TEXT, st.sampled_from(sorted(TOKENIZERS)))
def test_tokens_make_up_all_of_a_text(text: str, name: str) -> None:
    encoded = TOKENIZERS[name](text, return_offsets_mapping=True)
    offsets, ids = encoded["offset_mapping"], encoded["input_ids"]
    ends = find_token_ends(offsets, len(text))
    assert (
        ends == list(accumulate(ends, max))
        and len(ends) == len(ids)
        and (not ids or ends[-1] == len(text))
    )
    for cut in range(1, len(ids)):
        whole = cut_wording(text, ends, 0, cut, len(ids))
        assert (
            whole.prefix + whole.suffix == text
            and "".join(whole.suffix_text_by_token) == whole.suffix
        )
        assert len(whole.suffix_text_by_token) == len(ids) - cut


@given(TEXT)
def test_pieces_are_those_that_decoding_finds_where_it_gives_the_text_back(text: str) -> None:
    tokenizer = TOKENIZERS["bytes"]
    encoded = tokenizer(text, return_offsets_mapping=True)
    ends = find_token_ends(encoded["offset_mapping"], len(text))
    whole = cut_wording(text, ends, 0, 0, len(ends))
    assert list(whole.suffix_text_by_token) == private_texts.decode_token_texts(
        decode(tokenizer), (), encoded["input_ids"]
    )


def test_a_text_without_tokens_has_no_ends() -> None:
    assert find_token_ends([], 5) == []
