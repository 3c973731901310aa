"""Define the base class of benchmarks, which own the secrets; an attack gets only a `Challenge`."""

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
    select_evenly_spaced,
)
from auditor.core.result import Doubt, RecordCounts


class Benchmark:
    """Owner of the secrets. An attack gets only `challenge()`; the run compares its guesses with
    the answers.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""  # shown in tables; "": its name
    attack_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = types.MappingProxyType({})
    defense_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = types.MappingProxyType({})
    ensemble_limit: ClassVar[int | None] = None  # members attacked behind an ensemble, by default
    # whether it marks all of its personal data, so that nobody has to search for it
    marks_all: ClassVar[bool] = False

    tokenizer: Any = None
    text_form: TextForm | None = None  # how its conversations become text; None: it has none
    # whether its prefixes begin as training texts did, with the chat template's own text
    framed: bool = False
    # whether its token ids are a trainer's own, with nothing else before them
    as_trained: bool = False
    secrets: tuple[Secret, ...]  # members and non-members alike
    canaries: tuple[Secret, ...] = ()  # inserted ones and, as non-members, controls that were not
    # ids of the secrets and canaries that a model was trained to forget
    forgotten: frozenset[str] = frozenset()
    # ids of secrets, worst first, for a check that may run out of time
    asking_order: tuple[str, ...] = ()
    known: tuple[Pair, ...]
    # private text that no model was trained on, for perplexity
    heldout: tuple[Tokens, ...]
    # how many first tokens of each are given, not scored; empty: one
    heldout_given: tuple[int, ...] = ()
    description: str = ""
    notes: tuple[str, ...] = ()
    # of "members", "nonmembers"; {}: not counted
    record_counts: Mapping[str, RecordCounts] = types.MappingProxyType({})
    unread_columns: tuple[str, ...] = ()  # of the data, with texts or turns
    # large tables, so that workers need not count again
    counted_tables: Mapping[str, Any] = types.MappingProxyType({})
    # by secret id: the texts packed before it, and last the beginning of its own
    earlier_in_row: Mapping[str, tuple[Tokens, ...]] = types.MappingProxyType({})
    doubts: tuple[Doubt, ...] = ()  # reasons why the data may hide a leak of any model

    @property
    def unattacked_training_tokens(self) -> Sequence[Tokens]:
        """The training records, neither attacked nor to be forgotten, on which a model can
        relearn.
        """
        return [pair.prefix + pair.suffix for pair in self.known]

    def challenge(self) -> Challenge:
        """Return the public part of the benchmark."""
        queries = tuple(
            Query(secret.id, secret.prefix, len(secret.suffix)) for secret in self.secrets
        )
        return Challenge(known=self.known, queries=queries)

    def texts_with_repeat_counts(self, members: bool) -> Iterator[tuple[Tokens, int | None]]:
        """Yield each training text, or each held-out text, with its repeat count (None: unknown).

        The default yields only attacked and known texts; a benchmark of whole records overrides it.
        """
        yield from (
            (s.prefix + s.suffix, s.repeats)
            for s in (*self.secrets, *self.canaries)
            if s.member == members
        )
        if members:
            yield from ((pair.prefix + pair.suffix, None) for pair in self.known)

    def few(self, limit: int) -> tuple[Secret, ...]:
        """Return at most `limit` members and the same share of non-members.

        They are evenly spaced, so that all repeat counts remain.
        """
        members = [secret for secret in self.secrets if secret.member]
        nonmembers = [secret for secret in self.secrets if not secret.member]
        n_members = min(limit, len(members))
        n_nonmembers = math.ceil(len(nonmembers) * n_members / max(1, len(members)))
        return (
            *select_evenly_spaced(members, n_members),
            *select_evenly_spaced(nonmembers, n_nonmembers),
        )
