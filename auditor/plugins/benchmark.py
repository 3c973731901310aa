"""Define the base class of benchmarks, which hold the secrets; attacks get only a `Challenge`."""

from __future__ import annotations

import itertools
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
from auditor.core.secret_table import SecretTable, build_secret_table, select_members


class Benchmark:
    """Base class of benchmarks, which hold the secrets and their true suffixes.

    An attack gets only `challenge()`. The run compares its guesses with the true suffixes.

    Attributes:
        secrets: members and non-members.
        canaries: inserted canaries and controls.
        forgotten: ids of the secrets that a model was trained to forget.
        asking_order: indices of secrets, those most likely to leak first.
        known: (prefix, suffix) pairs that the attacker knows.
        heldout: tokens of private text that no model was trained on, for perplexity.
        heldout_given: for each held-out text, the number of leading tokens that are not scored; ()
            means 1 for each.
        text_form: how conversations become text; None if there are no conversations.
        framed: whether prefixes start with the text that a chat template writes, as in training.
        as_trained: whether the data are token ids from a trainer; then no begin-of-text token is
            added.
        record_counts: counts of "members" and "nonmembers".
        unread_columns: columns whose texts are not used.
        earlier_in_row: for a secret of a packed row (several texts in one row), the token sequences
            before its prefix, keyed by secret id.
        doubts: reasons why the data may hide a leak.
        whole_texts: complete texts of records that are attacked in part, keyed by secret id.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""  # shown in tables; "": its name
    ensemble_limit: ClassVar[int | None] = None  # members attacked behind an ensemble, by default
    # whether it marks all of its personal data, so that nobody has to search for it
    marks_all: ClassVar[bool] = False

    tokenizer: Any = None
    text_form: TextForm | None = None
    framed: bool = False
    as_trained: bool = False
    secrets: Sequence[Secret]
    canaries: tuple[Secret, ...] = ()
    forgotten: frozenset[str] = frozenset()
    asking_order: Sequence[int] = ()
    known: tuple[Pair, ...]
    heldout: Sequence[Tokens]
    heldout_given: tuple[int, ...] = ()
    description: str = ""
    notes: tuple[str, ...] = ()
    record_counts: Mapping[str, RecordCounts] = types.MappingProxyType({})
    unread_columns: tuple[str, ...] = ()
    # large tables, so that workers need not count again
    counted_tables: Mapping[str, Any] = types.MappingProxyType({})
    earlier_in_row: Mapping[str, tuple[Tokens, ...]] = types.MappingProxyType({})
    doubts: tuple[Doubt, ...] = ()
    whole_texts: Mapping[str, str] = types.MappingProxyType({})

    @property
    def subjects(self) -> SecretTable:
        """All secrets and canaries; only a few are objects at once."""
        if not self.canaries:
            return build_secret_table(self.secrets)
        return build_secret_table(itertools.chain(self.secrets, self.canaries))

    @property
    def unattacked_training_tokens(self) -> Sequence[Tokens]:
        """Training records that are neither attacked nor to be forgotten, as tokens.

        A model can relearn on them.
        """
        return [pair.prefix + pair.suffix for pair in self.known]

    def challenge(self) -> Challenge:
        """Return the public part of the benchmark."""
        queries = tuple(
            Query(secret.id, secret.prefix, len(secret.suffix)) for secret in self.secrets
        )
        return Challenge(known=self.known, queries=queries)

    def texts_with_repeat_counts(self, members: bool) -> Iterator[tuple[Tokens, int | None]]:
        """Yield (tokens, copies in training) for each training text or each held-out text.

        If `members` is True, yield the training texts, otherwise the held-out texts. An unknown
        number of copies is None. By default, yield only the texts that are attacked and the texts
        that the attacker knows. A benchmark that has the complete records yields all of them.
        """
        for secret in self.subjects:
            if secret.member == members:
                yield secret.prefix + secret.suffix, secret.repeats
        if members:
            for pair in self.known:
                yield pair.prefix + pair.suffix, None

    def few(self, limit: int) -> tuple[Secret, ...]:
        """Return at most `limit` members, and the same share of the non-members.

        The secrets are evenly spaced, so that every number of copies is represented.
        """
        members = select_members(self.secrets)
        nonmembers = select_members(self.secrets, False)
        n_members = min(limit, len(members))
        n_nonmembers = math.ceil(len(nonmembers) * n_members / max(1, len(members)))
        return (
            *select_evenly_spaced(members, n_members),
            *select_evenly_spaced(nonmembers, n_nonmembers),
        )
