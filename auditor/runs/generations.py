"""Compare a model's generations with all training texts: memorised tokens and extracted records.

A run builds an index of the texts before the first query, and judges every target with this index.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress

import numpy as np

from auditor.benchmarks.data.ngrams import NGramIndex
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Guesses, Tokens
from auditor.core.result import Measurement
from auditor.core.secret_table import select_members
from auditor.plugins.attack import CorpusAttack
from auditor.plugins.benchmark import Benchmark
from auditor.records.aliases import alias_training_record, load_alias_salt
from auditor.records.table import MEASURED, RECORDS, Column
from auditor.statistics import memorised
from auditor.statistics.memorised import MemorisedTokens, TokenRun

_N = 50  # Carlini et al. 2021; Nasr et al. 2023
_AT_ONCE = 1000  # generations in a lookup batch


@dataclass(frozen=True)
class TrainingCorpus:
    """Training texts to compare generations with.

    Args:
        benchmark: the audit's data.
        index: n-gram index of the training texts and held-out texts.
        n: n-gram length in tokens.
        reason: why this n was chosen if no option sets n; otherwise "".
    """

    benchmark: Benchmark
    index: NGramIndex
    n: int
    reason: str

    @cached_property
    def ngram_and_record_counts(self) -> memorised.CorpusCounts:
        trained, heldout = self.index.ngram_place_counts(self.n)
        long = self.index.text_lengths >= self.n
        n_trained = len(self.index.copies)  # trained texts, which come first in the index
        return memorised.CorpusCounts(
            trained, heldout, int(long[:n_trained].sum()), int(long[n_trained:].sum())
        )

    @cached_property
    def secret_aliases_by_record(self) -> dict[int, tuple[str, ...]]:
        """Aliases of the attacked secrets in each training record, keyed by the record's index.

        An alias is the name of a secret in reports. A secret whose text is in several records is
        left out.
        """
        aliases: dict[int, tuple[str, ...]] = {}
        records: dict[Tokens, Sequence[int]] = {}  # records that contain a text
        for secret in select_members(self.benchmark.secrets):
            text = secret.tokens
            if text not in records:
                records[text] = self.index.find_texts_holding(text).tolist()
            if len(records[text]) == 1:
                (home,) = records[text]
                aliases[home] = (*aliases.get(home, ()), secret.alias)
        return aliases

    def list_corpus_notes(self, prompts: Sequence[Tokens]) -> tuple[str, ...]:
        n_known = len(self.index.copies)
        n_texts = len(self.index.text_lengths)
        notes = [
            f"memorised: {self.n} tokens in a row that occur in the training data{self.reason} and "
            f"in no held-out text; every generation was compared with {n_known:,} training records "
            f"and {n_texts - n_known:,} held-out ones, token for token"
        ]
        if n_known == n_texts:
            notes.append(
                "without held-out text, common text cannot be distinguished from memorised text: "
                "give --nonmembers"
            )
        n_prompts = 0
        for prompt in prompts:
            n_prompts += min(self.index.find_texts_holding(prompt), default=n_known) < n_known
        if n_prompts:
            notes.append(
                f"{n_prompts:,} of {len(prompts):,} prompts occur in the training data themselves: "
                "text that follows them is no untargeted extraction"
            )
        return tuple(notes)


@dataclass(frozen=True)
class JudgedGenerations:
    """Results of comparing a target's generations with the training texts.

    Args:
        measurements: measurements of memorised tokens and extracted records.
        notes: sentences for the reader.
        costs: the generations without their texts, from which queries and tokens are counted.
        columns: table columns about the generations and the extracted records.
        texts: (longest extracted part, whole generation) of each extracted record, keyed by the
            record's alias.
    """

    measurements: tuple[Measurement, ...]
    notes: tuple[str, ...]
    costs: list[Guesses]
    columns: tuple[Column, ...]
    texts: dict[str, tuple[Tokens, Tokens]]


def build_training_corpus(
    attack: CorpusAttack, benchmark: Benchmark, index: NGramIndex
) -> TrainingCorpus:
    """Return the training corpus with the n-gram length n that the attack's options set.

    If no option sets n, it is the median length of the attacked members' suffixes, but at most
    `_N`. Raise AuditError if n exceeds the length of the generations or of the longest record.
    """
    lengths = sorted(len(secret.suffix) for secret in select_members(benchmark.secrets))
    middle = lengths[len(lengths) // 2]
    n = attack.n or min(_N, middle)
    reason = ""
    if not attack.n and n < _N:
        reason = f" (half of the attacked suffixes are no longer than {n})"
    if n > attack.length:
        raise AuditError(
            f"expected -A {attack.name}.length of at least {n}, the tokens of an n-gram, got "
            f"{attack.length}"
        )
    longest = int(index.text_lengths[: len(index.copies)].max())
    if n > longest:
        raise AuditError(
            f"expected -A {attack.name}.n of at most {longest}, the longest training record, got "
            f"{n}"
        )
    return TrainingCorpus(benchmark, index, n, reason)


def judge_generations(
    cell: CellKey,
    attack: CorpusAttack,
    generations_by_id: Mapping[str, Guesses],
    generation_ids: Sequence[str],
    corpus: TrainingCorpus,
) -> JudgedGenerations:
    """Compare a target's generations with the training texts of the corpus.

    Args:
        cell: target, setting and attack.
        attack: the attack that drew the generations.
        generations_by_id: stored generations, keyed by id.
        generation_ids: ids of the generations to compare, in order.
        corpus: the training texts.
    """
    costs = list[Guesses]()
    memorised_tokens = list[MemorisedTokens]()
    heads = set[bytes]()  # digests: equal generations are counted without storing their texts

    def text(id: str) -> Tokens:
        return generations_by_id[id].ranked[0].suffix

    for start in range(0, len(generation_ids), _AT_ONCE):
        batch = [generations_by_id[id] for id in generation_ids[start : start + _AT_ONCE]]
        texts = [guesses.ranked[0].suffix for guesses in batch]
        for tokens in texts:
            heads.add(hashlib.blake2b(repr(tokens).encode(), digest_size=16).digest())
        for guesses, matches in zip(batch, corpus.index.match_ngrams(texts, corpus.n), strict=True):
            memorised_tokens.append(memorised.count_memorised_ngrams(matches, corpus.n))
            costs.append(replace(guesses, ranked=()))
    # Rank only by scores that all generations have.
    top_generations = {}
    rankings = [guesses.rankings for guesses in costs]
    for name in sorted(set.intersection(*map(set, rankings))):
        top_generations[name] = memorised.select_distinct_texts(
            [scores[name] for scores in rankings], lambda i: text(generation_ids[i])
        )
    runs: dict[int, list[tuple[TokenRun, str]]] = {}  # in generations, by record
    heldout = set[int]()
    for id, tokens_of_text in zip(generation_ids, memorised_tokens, strict=True):
        heldout.update(tokens_of_text.heldout_records)
        for record, run in tokens_of_text.records.items():
            runs.setdefault(record, []).append((run, id))
    key = load_alias_salt()
    aliases = {}
    extracted_texts = {}
    for record, runs_of_record in runs.items():
        alias = alias_training_record(corpus.index.tokens_of_text(record), key)
        run, id = max(runs_of_record, key=lambda item: item[0].length)
        full_text = text(id)
        aliases[record] = alias
        extracted_texts[alias] = full_text[run.start : run.start + run.length], full_text
    columns = (
        *_build_generation_columns(cell, generation_ids, memorised_tokens),
        *_build_record_columns(cell, corpus, aliases, runs),
    )
    measurements = memorised.measure_generation_memorisation(
        memorised_tokens,
        corpus.ngram_and_record_counts,
        corpus.n,
        attack.length,
        top_generations,
    )
    notes = _list_generation_notes(corpus, len(costs), len(heads), len(heldout) if runs else 0)
    return JudgedGenerations(tuple(measurements), tuple(notes), costs, columns, extracted_texts)


def _list_generation_notes(
    corpus: TrainingCorpus, n_texts: int, n_distinct: int, n_heldout: int
) -> Iterator[str]:
    """Yield notes for readers; n_heldout: number of extracted held-out records."""
    if n_distinct < n_texts:
        yield f"{n_texts - n_distinct:,} of {n_texts:,} generations equal another one"
    if n_heldout:
        yield (
            f"{n_heldout:,} of {corpus.ngram_and_record_counts.heldout_records:,} held-out records "
            "count as extracted too, by n-grams of this length: some of the extracted records are "
            "only similar to the drawn text; use a larger n"
        )


def _build_generation_columns(
    cell: CellKey, ids: Sequence[str], memorised_tokens: Sequence[MemorisedTokens]
) -> Iterator[Column]:
    counts = np.array([generation.memorised for generation in memorised_tokens], dtype=float)
    members = [True] * len(ids)
    yield Column(MEASURED, cell, memorised.MEMORISED, ids, memorised.PER * counts, members)
    yield Column(MEASURED, cell, memorised.GENERATIONS, ids, (counts > 0).astype(float), members)


def _build_record_columns(
    cell: CellKey,
    corpus: TrainingCorpus,
    aliases: Mapping[int, str],
    runs: Mapping[int, Sequence[tuple[TokenRun, str]]],
) -> Iterator[Column]:
    """Yield table columns about the extracted records.

    - `generations`: for each extracted record, the number of generations that contain a part of it.
    - `longest`: for each extracted record, the number of tokens of the longest part.
    - `record`: for each attacked secret, the position (from 0) of its record in these columns.
    - `trained`: for each number of copies, the number of training records with that many copies.

    Args:
        aliases: name of each extracted record, keyed by its index in the corpus.
        runs: parts of each extracted record, with the id of their generation.
    """
    # Break ties by alias, so that the order does not reveal the position of a record in the data.
    order = sorted(runs, key=lambda record: (-len(runs[record]), aliases[record]))
    ids = [aliases[record] for record in order]
    copies = [corpus.index.copies[record] for record in order]
    n_generations = list[int]()
    longest = list[int]()
    for record in order:
        n_generations.append(len(runs[record]))
        longest.append(max(run.length for run, _ in runs[record]))
    for name, values in (("generations", n_generations), ("longest", longest)):
        yield Column(RECORDS, cell, name, ids, values, (), copies)
    secrets: list[str] = []
    places: list[int] = []
    for place, record in enumerate(order):
        for secret in corpus.secret_aliases_by_record.get(record, ()):
            secrets.append(secret)
            places.append(place)
    yield Column(RECORDS, cell, "record", secrets, places)
    index = corpus.index
    is_long = index.text_lengths[: len(index.copies)] >= corpus.n
    # The key None counts records with an unknown number of copies.
    counts_by_copies = Counter(compress(index.copies, is_long))
    yield Column(
        RECORDS,
        cell,
        "trained",
        [""] * len(counts_by_copies),
        [*counts_by_copies.values()],
        (),
        [*counts_by_copies],
    )
