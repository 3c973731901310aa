"""Texts that were drawn from a model, held against all that it was trained on: what of it they
give, and which records.

One index is made a run, before any model is asked; every row is judged by it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from auditor.benchmarks.data.ngrams import NGramIndex
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Guesses, Tokens
from auditor.core.result import Measurement
from auditor.plugins.attack import CorpusAttack
from auditor.plugins.benchmark import Benchmark
from auditor.records.aliases import alias_of_training_record, load_alias_salt
from auditor.records.table import MEASURED, RECORDS, Column
from auditor.statistics import memorised
from auditor.statistics.memorised import MemorisedTokens, TokenRun

_N = 50  # Carlini et al. 2021; Nasr et al. 2023
_AT_ONCE = 1000  # generations looked up at once


@dataclass(frozen=True)
class TrainingCorpus:
    """What generations are held against. n: tokens of an n-gram; said: why so many, where nobody
    asked for it."""

    benchmark: Benchmark
    index: NGramIndex
    n: int
    said: str

    @cached_property
    def ngram_and_record_counts(self) -> memorised.CorpusCounts:
        trained, heldout = self.index.ngram_place_counts(self.n)
        long = self.index.text_lengths >= self.n
        known = len(self.index.copies)  # texts of the index that were trained on, which come first
        return memorised.CorpusCounts(
            trained, heldout, int(long[:known].sum()), int(long[known:].sum())
        )

    @cached_property
    def secret_aliases_by_record(self) -> dict[int, tuple[str, ...]]:
        """The aliases of the attacked secrets in each trained record."""
        aliases: dict[int, tuple[str, ...]] = {}
        records: dict[Tokens, Sequence[int]] = {}  # that hold a text
        for secret in self.benchmark.secrets:
            text = secret.prefix + secret.suffix
            if secret.member and text not in records:
                records[text] = self.index.find_texts_holding(text).tolist()
            if secret.member and len(records[text]) == 1:
                (home,) = records[text]
                aliases[home] = (*aliases.get(home, ()), secret.alias)
        return aliases

    @cached_property
    def record_counts_by_copies(self) -> dict[int | None, int]:
        """How many trained records have an n-gram, by how often they were trained on."""
        lengths = self.index.text_lengths[: len(self.index.copies)]
        return dict(
            Counter(
                times
                for times, own in zip(self.index.copies, lengths, strict=True)
                if own >= self.n
            )
        )

    def notes_on_corpus_and_prompts(self, prompts: Sequence[Tokens]) -> tuple[str, ...]:
        known, every = len(self.index.copies), len(self.index.text_lengths)
        said = [
            f"memorised: {self.n} tokens in a row that stand in the training data{self.said} and "
            f"in no held-out text; every generation was held against {known:,} training records "
            f"and {every - known:,} held-out ones, token for token"
        ]
        if known == every:
            said.append(
                "without held-out text, common text cannot be distinguished from memorised text: "
                "give --nonmembers"
            )
        stand = sum(
            min(self.index.find_texts_holding(prompt), default=known) < known for prompt in prompts
        )
        if stand:
            said.append(
                f"{stand:,} of {len(prompts):,} prompts stand in the training data themselves: "
                "what follows those is no untargeted extraction"
            )
        return tuple(said)


@dataclass(frozen=True)
class JudgedGenerations:
    """One row. costs: of each generation, without its text; texts: what was extracted of each
    record, by its alias.

    columns: what the table keeps of the generations and of the records in them.
    """

    measurements: tuple[Measurement, ...]
    notes: tuple[str, ...]
    costs: list[Guesses]
    columns: tuple[Column, ...]
    texts: dict[str, tuple[Tokens, Tokens]]  # with the whole generation that holds it


def corpus_with_chosen_ngram_length(
    attack: CorpusAttack, benchmark: Benchmark, index: NGramIndex
) -> TrainingCorpus:
    """The corpus with its n: what the attack asks for, else `_N`, or the median length of suffixes
    where it is less.

    Raises AuditError for an n-gram that no generation or no record has room for.
    """
    lengths = sorted(len(secret.suffix) for secret in benchmark.secrets if secret.member)
    middle = lengths[len(lengths) // 2]
    n, said = attack.n or min(_N, middle), ""
    if not attack.n and n < _N:
        said = f" (half of the attacked suffixes are no longer than {n})"
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
    return TrainingCorpus(benchmark, index, n, said)


def judge_generations_of_cell(
    cell: CellKey,
    attack: CorpusAttack,
    done: Mapping[str, Guesses],
    drawn: Sequence[str],
    corpus: TrainingCorpus,
) -> JudgedGenerations:
    """Holds generations against the corpus. done: all of them; drawn: those of this row, by id, in
    order."""
    every, costs, scores, heads = (
        list[MemorisedTokens](),
        list[Guesses](),
        list[dict[str, float]](),
        Counter[bytes](),
    )
    best: dict[
        int, tuple[TokenRun, str]
    ] = {}  # the longest run of each record, and where it stands

    def text(i: int) -> Tokens:
        return done[drawn[i]].ranked[0].suffix

    for start in range(0, len(drawn), _AT_ONCE):
        some = [done[id] for id in drawn[start : start + _AT_ONCE]]
        texts = [guesses.ranked[0].suffix for guesses in some]
        # Digests: which generations say the same, without keeping their texts.
        heads.update(
            hashlib.blake2b(repr(tokens).encode(), digest_size=16).digest() for tokens in texts
        )
        for guesses, standing in zip(some, corpus.index.match_ngrams(texts, corpus.n), strict=True):
            held = memorised.count_memorised_ngrams(standing, corpus.n)
            every.append(held)
            costs.append(replace(guesses, ranked=(), rankings={}))
            scores.append(guesses.rankings)
            for record, run in held.records.items():
                if record not in best or run.length > best[record][0].length:
                    best[record] = run, guesses.secret
    # A score that some generations lack ranks none.
    names = sorted(set.intersection(*map(set, scores)))
    firsts = {
        name: memorised.select_distinct_texts([own[name] for own in scores], text) for name in names
    }
    seen = Counter(record for held in every for record in held.records)
    key = load_alias_salt()
    aliases = {
        record: alias_of_training_record(corpus.index.tokens_of_text(record), key)
        for record in seen
    }
    # Ties by alias, so that the order tells nothing of where a record stands in the data.
    order = sorted(seen, key=lambda record: (-seen[record], aliases[record]))
    shown = dict[str, tuple[Tokens, Tokens]]()
    for record, (run, where) in best.items():
        whole = done[where].ranked[0].suffix
        shown[aliases[record]] = whole[run.start : run.start + run.length], whole
    same, others = len(drawn) - len(heads), {record for held in every for record in held.strangers}
    said = [f"{same:,} of {len(drawn):,} generations say the same as another one"] if same else []
    if others and order:
        said.append(
            f"{len(others):,} of {corpus.ngram_and_record_counts.strangers:,} held-out records "
            "count as extracted too, by n-grams of this length: some of the extracted records are "
            "only similar to what was drawn; take a larger n"
        )
    return JudgedGenerations(
        tuple(
            memorised.measure_generation_memorisation(
                every, corpus.ngram_and_record_counts, corpus.n, attack.length, firsts
            )
        ),
        tuple(said),
        costs,
        (
            *_generation_columns(cell, drawn, every),
            *_extracted_record_columns(
                cell,
                corpus,
                order,
                aliases,
                seen,
                {record: run.length for record, (run, _) in best.items()},
            ),
        ),
        shown,
    )


def _generation_columns(
    cell: CellKey, drawn: Sequence[str], every: Sequence[MemorisedTokens]
) -> Iterator[Column]:
    counts, member = [float(held.memorised) for held in every], [True] * len(drawn)
    yield Column(
        MEASURED, cell, memorised.MEMORISED, drawn, [memorised.PER * n for n in counts], member
    )
    yield Column(
        MEASURED, cell, memorised.GENERATIONS, drawn, [float(n > 0) for n in counts], member
    )


def _extracted_record_columns(
    cell: CellKey,
    corpus: TrainingCorpus,
    order: Sequence[int],
    aliases: Mapping[int, str],
    seen: Mapping[int, int],
    longest: Mapping[int, int],
) -> Iterator[Column]:
    """Extracted records, most often first; attacked secrets, by the place of their record among
    these (from 0); numbers of trained records, by copies.
    """
    ids, copies = (
        [aliases[record] for record in order],
        [corpus.index.copies[record] for record in order],
    )
    for name, of in (("generations", seen), ("longest", longest)):
        yield Column(RECORDS, cell, name, ids, [of[record] for record in order], (), copies)
    inside = [
        (secret, place)
        for place, record in enumerate(order)
        for secret in corpus.secret_aliases_by_record.get(record, ())
    ]
    yield Column(
        RECORDS, cell, "record", [secret for secret, _ in inside], [place for _, place in inside]
    )
    of_copies = corpus.record_counts_by_copies
    yield Column(
        RECORDS, cell, "trained", [""] * len(of_copies), [*of_copies.values()], (), [*of_copies]
    )
