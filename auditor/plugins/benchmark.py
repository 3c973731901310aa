"""Benchmarks: the base of all. A benchmark owns the secrets; what an attack is told of them is a
`Challenge`."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from auditor.core.nouns import (
    Challenge,
    Pair,
    Query,
    Secret,
    TextForm,
    Tokens,
    evenly_spaced_secrets,
)
from auditor.core.result import Doubt, RecordCounts


class Benchmark:
    """Owns the secrets. An attack gets `challenge()`; only the run compares guesses with the
    answers."""

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""  # what people read in a table; "": its name
    attack_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = types.MappingProxyType({})
    defense_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = types.MappingProxyType({})
    ensemble_limit: ClassVar[int | None] = None  # members attacked behind an ensemble, by default
    # whether it marks all personal data that it holds: nobody has to look for it
    marks_all: ClassVar[bool] = False

    tokenizer: Any = None
    text_form: TextForm | None = None  # how its conversations are rendered; None: it has none
    # whether its prefixes begin as training texts did: with what a chat template put there
    framed: bool = False
    # whether its token ids are a trainer's own: nothing else stood before them
    as_trained: bool = False
    secrets: tuple[Secret, ...]  # members and non-members alike
    canaries: tuple[
        Secret, ...
    ] = ()  # inserted ones, and, as non-members, controls that never were
    # ids of secrets and canaries that a model was to forget
    forgotten: frozenset[str] = frozenset()
    asking_order: tuple[
        str, ...
    ] = ()  # ids of secrets, worst first, of a check that may run out of time
    known: tuple[Pair, ...]
    # text of the private kind that nothing was trained on, for perplexity
    heldout: tuple[Tokens, ...]
    heldout_given: tuple[
        int, ...
    ] = ()  # how many first tokens of each are given, not scored; empty: one
    description: str = ""
    notes: tuple[str, ...] = ()
    # of "members", "nonmembers"; {}: not counted
    record_counts: Mapping[str, RecordCounts] = types.MappingProxyType({})
    unread_columns: tuple[str, ...] = ()  # of the data, that hold texts or turns
    # large ones, which workers need not count again
    counted_tables: Mapping[str, Any] = types.MappingProxyType({})
    # by secret id: what was packed before it
    earlier_in_row: Mapping[str, Tokens] = types.MappingProxyType({})
    doubts: tuple[Doubt, ...] = ()  # what of the data may hide a leak, whatever the model

    @property
    def unattacked_training_tokens(self) -> Sequence[Tokens]:
        """Records that were trained on, are not attacked and were not to be forgotten: what can be
        learnt again."""
        return [pair.prefix + pair.suffix for pair in self.known]

    def challenge(self) -> Challenge:
        """The public half of the benchmark."""
        queries = tuple(
            Query(secret.id, secret.prefix, len(secret.suffix)) for secret in self.secrets
        )
        return Challenge(known=self.known, queries=queries)

    def texts_with_repeat_counts(self, members: bool) -> Iterator[tuple[Tokens, int | None]]:
        """All that was trained on, or all held-out text: each text with how often, None where
        nobody knows.

        By default what is attacked or known, and no more; a benchmark of whole records overrides
        it.
        """
        yield from (
            (s.prefix + s.suffix, s.repeats)
            for s in (*self.secrets, *self.canaries)
            if s.member == members
        )
        if members:
            yield from ((pair.prefix + pair.suffix, None) for pair in self.known)

    def few(self, limit: int) -> tuple[Secret, ...]:
        """At most so many members, and as large a share of the non-members, evenly spaced: every
        repeat count stays."""
        members, others = (
            [secret for secret in self.secrets if secret.member == inside]
            for inside in (True, False)
        )
        kept = min(limit, len(members))
        as_many = math.ceil(len(others) * kept / max(1, len(members)))
        return (*evenly_spaced_secrets(members, kept), *evenly_spaced_secrets(others, as_many))
