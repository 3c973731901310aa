"""The n-gram index: what it finds is what looking at every place finds; too large a one is refused
beforehand."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from auditor.benchmarks.data import ngrams
from auditor.core import machine_memory
from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.statistics import hashed_ngrams


def drawn(noise: Random, letters: list[int], most: int) -> Tokens:
    return tuple(noise.choice(letters) for _ in range(noise.randint(0, most)))


def stands(run: Tokens, text: Tokens) -> bool:
    return any(text[at : at + len(run)] == run for at in range(len(text) - len(run) + 1))


@pytest.mark.parametrize("is_hash_useless", (False, True))
@pytest.mark.parametrize("vocabulary", (4, 300, 70_000))
def test_finds_what_looking_at_every_place_finds(
    vocabulary: int, is_hash_useless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_hash_useless:  # one hash for many n-grams changes nothing

        def hash_badly(pieces: NDArray[np.uint32]) -> NDArray[np.uint64]:
            return pieces[:, 0].astype(np.uint64) % np.uint64(2) << np.uint64(60)

        monkeypatch.setattr(ngrams, "hash_token_pieces", hash_badly)
        monkeypatch.setattr(hashed_ngrams, "hash_token_pieces", hash_badly)
    noise = Random(vocabulary)
    letters = [0, 1, vocabulary - 2, vocabulary - 1]
    trained = [(drawn(noise, letters, 40), noise.choice((1, 2))) for _ in range(60)]
    heldout = [drawn(noise, letters, 30) for _ in range(10)]
    filler = tuple(range(2, vocabulary - 2))  # all other letters, none of which is looked up
    index = ngrams.build_ngram_index([*trained, (filler, 1)], heldout)
    texts = [
        trained[0][0],
        heldout[0],
        *(drawn(noise, letters, 30) for _ in range(8)),
        (),
        (vocabulary,) * 9,
    ]
    known = list(dict.fromkeys(text for text, _ in trained))
    several = 0
    for n in (1, 3, 6, 12):
        for text, seen in zip(texts, index.match_ngrams(texts, n), strict=True):
            found = dict(
                zip(
                    seen.starts.tolist(),
                    zip(seen.trained, seen.heldout, seen.record, strict=True),
                    strict=True,
                )
            )
            for at in range(len(text) - n + 1):
                run = text[at : at + n]
                own = [i for i, record in enumerate(known) if stands(run, record)]
                other = [
                    i for i, record in enumerate(heldout, len(known) + 1) if stands(run, record)
                ]
                several += len(own) > 1
                where = (own + other)[0] if len(own + other) == 1 else -1
                assert found.pop(at, None) == (
                    (bool(own), bool(other), where) if own or other else None
                )
            assert not found
    assert several > 20


def test_records_that_are_the_same_are_one_and_their_copies_add_up() -> None:
    index = ngrams.build_ngram_index(
        [((1, 2, 3), 2), ((4, 5), 1), ((1, 2, 3), 3), ((6, 7), None), ((6, 7), 1)], [(2, 3, 9)]
    )
    assert index.copies == (5, 1, None)
    assert [index.tokens_of_text(i) for i in range(4)] == [(1, 2, 3), (4, 5), (6, 7), (2, 3, 9)]
    assert (
        index.ngram_place_counts(2) == (4, 2)
        and index.ngram_place_counts(3) == (1, 1)
        and index.ngram_place_counts(4) == (0, 0)
    )


def test_no_run_goes_from_one_record_into_the_next() -> None:
    index = ngrams.build_ngram_index([((1, 2), 1), ((3, 4), 1)], [])
    (seen,) = index.match_ngrams([(1, 2, 3, 4)], 2)
    assert (
        seen.starts.tolist() == [0, 2] and seen.record.tolist() == [0, 1] and not seen.heldout.any()
    )


def test_a_text_is_found_in_every_record_that_holds_it_whole() -> None:
    index = ngrams.build_ngram_index([((1, 2, 3, 4), 1), ((9, 2, 3), 1), ((7, 8), 1)], [(5, 6)])
    texts = [(2, 3, 4), (2, 3), (7, 8), (5, 6), (1, 2, 3, 4, 5), (4, 9)]
    held = [index.find_texts_holding(text).tolist() for text in texts]
    assert held == [[0], [0, 1], [2], [3], [], []]


def test_a_long_text_is_found_by_its_rarest_run() -> None:
    noise = Random(5)
    records = [(*range(20), noise.randrange(50), *range(20)) for _ in range(80)]
    index = ngrams.build_ngram_index([(record, 1) for record in records], [])
    for record in records:
        assert index.find_texts_holding(record[3:38]).tolist() == [
            list(dict.fromkeys(records)).index(record)
        ]
    assert len(index.find_texts_holding(tuple(range(20)))) == len(set(records))


def test_an_index_that_memory_does_not_hold_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_memory, "measure_free_memory", lambda: 10**6)
    monkeypatch.setattr(ngrams, "join_texts", None)
    with pytest.raises(
        AuditError, match=r"^expected \d+ MB of memory for the index of 3 tokens .*, got 1 MB free"
    ):
        ngrams.build_ngram_index([((1, 2, 3), 1)], [])


def test_without_text_it_says_so() -> None:
    with pytest.raises(AuditError, match="expected training data to index, got no text"):
        ngrams.build_ngram_index([((), 1)], [(1, 2)])
