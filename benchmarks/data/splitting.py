"""Who is attacked, who is known, who never trained: the split that every benchmark made of rows
shares.

Knows token ids and row numbers. Knows nothing of files, columns or tokenizers, and its words never
hold a row's text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from auditor.benchmarks.data.data_records import BY_LIMIT, DataRecord, RecordSource
from auditor.core.errors import AuditError
from auditor.core.nouns import Pair, Secret, Tokens
from auditor.core.result import RecordCounts
from auditor.core.secret_randomness import keyed_random_generator
from auditor.plugins.benchmark import Benchmark
from auditor.statistics import people
from auditor.statistics.extraction import format_copies
from auditor.statistics.near_pairs import group_texts_within_edit_limits

NAMED_ROWS = 10  # how many row numbers a note names before it only counts
SEVERAL = "several groups"
AUXILIARY = "auxiliary data: the attacker knows them"
# share of a near copy's tokens that may be edited; records that are compared
NEAR_SHARE, NEAR_MOST = (
    0.05,
    20_000,
)
ALSO_MEMBER = "identical to a member or an auxiliary record"


@dataclass(frozen=True)
class SplitOptions:
    """How members are divided. Raises AuditError for a fraction outside [0, 1) or a limit below
    1."""

    known_fraction: float
    limit: int | None
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.known_fraction < 1:  # also refuses NaN
            raise AuditError(f"expected --known-fraction in [0, 1), got {self.known_fraction}")
        if self.limit is not None and self.limit < 1:
            raise AuditError(f"expected --limit >= 1, got {self.limit}")

    def known_count(self, members: int) -> int:
        """How many of the unique members become known pairs: at least one of each kind where there
        are two."""
        if self.known_fraction == 0 or members < 2:
            return 0
        return min(members - 1, max(1, round(self.known_fraction * members)))

    def pick_indices(self, what: str, count: int, of: int) -> frozenset[int]:
        """`count` of the indices below `of`. Nested: a larger count, same seed, keeps all that a
        smaller one picked."""
        return frozenset(self.draw_order(what, of)[:count].tolist())

    def draw_order(self, what: str, of: int) -> NDArray[np.int64]:
        """Return the indices below `of` in the random order of this seed."""
        return keyed_random_generator("benchmark", what, self.seed).permutation(of)


@dataclass(frozen=True)
class SplitData:
    """What a Benchmark holds: members first, then non-members; `heldout` is the non-members' prefix
    + suffix."""

    secrets: tuple[Secret, ...]
    known: tuple[Pair, ...]
    heldout: tuple[Tokens, ...]
    notes: tuple[str, ...]
    forgotten: frozenset[str] = frozenset()  # ids of secrets
    asking_order: tuple[
        str, ...
    ] = ()  # ids of secrets: most copied members first, others at random
    # of "members" and "nonmembers"
    record_counts: Mapping[str, RecordCounts] = field(default_factory=dict)

    def give_to(self, benchmark: Benchmark) -> None:
        """Set each of these fields on a benchmark, which has them under the same names."""
        for one in fields(self):
            setattr(benchmark, one.name, getattr(self, one.name))

    def member_count(self) -> int:
        return sum(secret.member for secret in self.secrets)

    def counts_by_role_text(self) -> str:
        """For a description: "12 members, 3 known pairs, 4 non-members"."""
        others = len(self.secrets) - self.member_count()
        words = (
            (self.member_count(), "member"),
            (len(self.known), "auxiliary record"),
            (others, "non-member"),
        )
        return ", ".join(plural(count, word) for count, word in words if count)


def split_data_records_into_secrets(
    sources: Mapping[str, RecordSource], split: SplitOptions, label: str
) -> SplitData:
    """Unique members into known and attacked ones, non-members beside them; ids are `label-000017`,
    by first row.

    sources: by flag, `--data` and, where given, `--known`, `--nonmembers` and `--forget`.
    Known pairs are never attacked, and nothing that was to be forgotten is known. Without a file of
    them they are drawn from the members with fewest copies. A non-member that is also a member,
    known or attacked, is no non-member and goes. Raises AuditError when a source has nothing left,
    and for records to forget that are no members.
    """
    members = sources["--data"]
    known, nonmembers, forget = map(sources.get, ("--known", "--nonmembers", "--forget"))
    in_order = (members, known, nonmembers, forget)
    notes = [note for source in in_order if source for note in _record_source_notes(source)]
    unique = merge_duplicate_data_records(_require_usable_source_records(members))
    lost = _member_rows_to_forget(forget, unique) if forget is not None else set[int]()
    copies_of_all = count_copies_of_rows(unique, notes)
    if known is not None:
        given = merge_duplicate_data_records(_require_usable_source_records(known))
        attacked = _member_records_not_known(
            members, unique, known, {record.prefix_suffix_pair for record in given}, lost
        )
        notes.append(f"the attacker knows the {plural(len(given), 'pair')} of {known.where}")
        if len(attacked) < len(unique):
            left_out = plural(len(unique) - len(attacked), "member")
            notes.append(f"left out {left_out} identical to an auxiliary record")
    else:
        rows = [row for row in _distinct_row_numbers(unique) if row not in lost]
        in_random_order = [rows[i] for i in split.draw_order("known", len(rows))]
        # Stable, fewest copies first: what occurs often leaks first, so it is attacked and not
        # given away.
        in_random_order.sort(key=lambda row: copies_of_all.get(row) or 1)
        # with all parts of a row: they may overlap
        known_rows = set(in_random_order[: split.known_count(len(rows))])
        given = [record for record in unique if record.row in known_rows]
        attacked = [record for record in unique if record.row not in known_rows]
        notes.append(_known_fraction_note(len(given), len(unique), split))
    n_not_known = len(_distinct_row_numbers(attacked))
    pairs = {record.prefix_suffix_pair for record in (*unique, *given)}
    others, seen = (
        _nonmember_records_not_trained_on(nonmembers, pairs, notes) if nonmembers else ([], {})
    )
    n_unseen = len(_distinct_row_numbers(others))
    copies = {row: copies_of_all[row] for row in _distinct_row_numbers(attacked)}
    if lost:
        # Limited apart: a sample of both together might hold too few of what was to be forgotten.
        kept = [record for record in attacked if record.row not in lost]
        gone = [record for record in attacked if record.row in lost]
        members_in_order = [
            *_first_rows_by_copies(kept, copies, "retained member", split, notes),
            *_first_rows_by_copies(gone, copies, "member to forget", split, notes),
        ]
    else:
        members_in_order = _first_rows_by_copies(attacked, copies, "member", split, notes)
    others_in_order = _first_rows_by_copies(others, {}, "non-member", split, notes)
    population = Counter(format_copies(times) for times in copies.values())
    if members.unread is not None:
        population += members.unread.by_copies
    attacked, others = (_in_file_order(side) for side in (members_in_order, others_in_order))
    secrets = [
        replace(
            _secret_of_record(label, record, record.repeats, member=True), copies=copies[record.row]
        )
        for record in attacked
    ]
    forgotten = frozenset(
        secret.id for secret, record in zip(secrets, attacked, strict=True) if record.row in lost
    )
    secrets += [_secret_of_record("nonmember", record, 0, member=False) for record in others]
    secrets = secrets_with_user_membership(secrets, members)
    heldout = tuple(record.prefix + record.suffix for record in others)
    not_attacked = {
        AUXILIARY: len(_distinct_row_numbers(unique)) - n_not_known,
        BY_LIMIT: n_not_known - len(_distinct_row_numbers(attacked)),
    }
    counts = {
        "members": replace(
            members.count_records({}, not_attacked, attacked), by_copies=dict(population)
        )
    }
    if nonmembers is not None:
        beyond_limit = {BY_LIMIT: n_unseen - len(_distinct_row_numbers(others))}
        counts["nonmembers"] = nonmembers.count_records(seen, beyond_limit, others)
    known_pairs = tuple(record.prefix_suffix_pair for record in given)
    order = (
        *(_id_of_record(label, record) for record in members_in_order),
        *(_id_of_record("nonmember", record) for record in others_in_order),
    )
    return SplitData(tuple(secrets), known_pairs, heldout, tuple(notes), forgotten, order, counts)


def _member_records_not_known(
    members: RecordSource,
    unique: Sequence[DataRecord],
    known: RecordSource,
    pairs: set[Pair],
    lost: set[int],
) -> list[DataRecord]:
    """Raises AuditError for a known record that was to be forgotten, and where nothing is left."""
    if twice := [
        record.row for record in unique if record.row in lost and record.prefix_suffix_pair in pairs
    ]:
        raise AuditError(
            f"expected {known.where} without what was to be forgotten, got {len(twice)} records of "
            f"{members.where} that are in both ({row_numbers_phrase(twice)})"
        )
    attacked = [record for record in unique if record.prefix_suffix_pair not in pairs]
    if not attacked:
        raise AuditError(
            f"nothing is left to attack in {members.where}: every row is also in {known.where}"
        )
    return attacked


def _member_rows_to_forget(forget: RecordSource, members: Sequence[DataRecord]) -> set[int]:
    """The rows of the members that are to be forgotten, whole. Raises AuditError for a record that
    is none of them."""
    row_of = {record.prefix_suffix_pair: record.row for record in members}
    wanted = _require_usable_source_records(forget)
    if missing := sorted(
        {record.row for record in wanted if record.prefix_suffix_pair not in row_of}
    ):
        raise AuditError(
            f"expected {forget.where} with records that --data has, got {len(missing)} that it has "
            f"not ({row_numbers_phrase(missing)})"
        )
    return {row_of[record.prefix_suffix_pair] for record in wanted}


def _id_of_record(label: str, record: DataRecord) -> str:
    row = f"{label}-{record.row:06d}"
    return row if record.part is None else f"{row}-{record.part:04d}"


def _secret_of_record(label: str, record: DataRecord, repeats: int | None, member: bool) -> Secret:
    row = f"{label}-{record.row:06d}"
    whole = Secret(
        row,
        record.prefix,
        record.suffix,
        repeats,
        member,
        group=record.group,
        wording=record.wording,
        user=record.user,
    )
    return (
        whole
        if record.part is None
        else replace(whole, id=_id_of_record(label, record), document=row, at=record.at)
    )


def secrets_with_user_membership(secrets: Sequence[Secret], members: RecordSource) -> list[Secret]:
    """The secrets, each with whether any record of its user was trained on, known records too.

    Raises AuditError where the attacked ones are of fewer than `people.LEAST` people.
    """
    trained = {record.user for record in members.records} - {None}
    attacked = {secret.user for secret in secrets if secret.member} - {None}
    if trained and len(attacked) < people.LEAST:
        raise AuditError(
            f"{members.where}: expected attacked records of at least {people.LEAST} people, to say "
            f"anything by person, got {len(attacked)}"
        )
    unread = members.unread
    return [
        replace(
            secret,
            user_trained=secret.user in trained
            or (
                secret.user is not None and unread is not None and unread.contains_user(secret.user)
            ),
        )
        for secret in secrets
    ]


def merge_duplicate_data_records(records: Iterable[DataRecord]) -> list[DataRecord]:
    """One record for each distinct (prefix, suffix), as its first row has it; repeats add up where
    all are known.

    Equal records of different groups belong to none of them: their group is `SEVERAL`; those of
    several people belong to nobody.
    """
    first: dict[Pair, DataRecord] = {}
    for record in records:
        seen = first.get(record.prefix_suffix_pair)
        if seen is None:
            first[record.prefix_suffix_pair] = record
        else:
            known = seen.repeats is not None and record.repeats is not None
            repeats = (seen.repeats or 0) + (record.repeats or 0) if known else None
            group = seen.group if seen.group == record.group else SEVERAL
            user = seen.user if seen.user == record.user else None
            first[record.prefix_suffix_pair] = replace(
                seen, repeats=repeats, group=group, user=user
            )
    return list(first.values())


def _require_usable_source_records(source: RecordSource) -> tuple[DataRecord, ...]:
    if not source.records:
        reasons = "; ".join(f"{plural(len(rows), 'row')}: {why}" for why, rows in source.left_out)
        raise AuditError(
            f"nothing is left of {source.where} after leaving out unusable rows ({reasons})"
        )
    return source.records


def _nonmember_records_not_trained_on(
    source: RecordSource, trained: set[Pair], notes: list[str]
) -> tuple[list[DataRecord], dict[str, int]]:
    """Return the distinct records that were not trained on, and how many rows have none of them, by
    reason."""
    records = _require_usable_source_records(source)
    others = [record for record in records if record.prefix_suffix_pair not in trained]
    if not others:
        raise AuditError(
            f"nothing is left of {source.where}: every row is also a member or an auxiliary record"
        )
    gone = len(_distinct_row_numbers(records)) - len(_distinct_row_numbers(others))
    if gone:
        notes.append(f"{source.where}: left out {plural(gone, 'row')} {ALSO_MEMBER}")
    return merge_duplicate_data_records(others), {ALSO_MEMBER: gone}


def _first_rows_by_copies(
    records: Sequence[DataRecord],
    copies: Mapping[int, int | None],
    what: str,
    split: SplitOptions,
    notes: list[str],
) -> list[DataRecord]:
    """Return the records within the limit in the order of asking: most copies first, a random order
    among equals.

    Every part of a row is kept with it. A larger limit, same seed, keeps all that a smaller one
    keeps.
    """
    rows = _distinct_row_numbers(records)
    in_random_order = [rows[i] for i in split.draw_order(what, len(rows)).tolist()]
    # stable: equals stay at random
    ordered = sorted(in_random_order, key=lambda row: -(copies.get(row) or 1))
    kept = ordered[: split.limit]
    if len(kept) < len(rows):
        whole = "" if len(rows) == len(records) else ", each with all its parts"
        copied = sum((copies.get(row) or 1) > 1 for row in kept)
        how = f"the {copied} with most copies first, then a random" if copied else "a random"
        notes.append(
            f"--limit kept {len(kept)} of {len(rows)} {what}s{whole}, {how} sample with seed "
            f"{split.seed}"
        )
    place = {row: i for i, row in enumerate(kept)}
    return sorted(
        (one for one in records if one.row in place),
        key=lambda one: (place[one.row], one.part or 0),
    )


def _in_file_order(records: Sequence[DataRecord]) -> list[DataRecord]:
    return sorted(records, key=lambda record: (record.row, record.part or 0))


def count_copies_of_rows(records: Sequence[DataRecord], notes: list[str]) -> dict[int, int | None]:
    """Return by row how often it, or a row that differs from it in a few tokens, was trained on;
    None: not known.

    Of a row with several parts, that of its most copied part. A beginning that many rows share
    makes no copies. Near copies (`NEAR_SHARE` of the tokens edited) are looked for among at most
    `NEAR_MOST` records; a note says if there are more.
    """
    times = [record.repeats for record in records]
    if len(records) > NEAR_MOST:
        notes.append(
            f"near copies were not looked for among {len(records):,} records (more than "
            f"{NEAR_MOST:,})"
        )
    elif records:
        texts = [record.own_tokens or record.prefix + record.suffix for record in records]
        groups = group_texts_within_edit_limits(
            texts, [int(len(text) * NEAR_SHARE) for text in texts]
        ).tolist()
        of_group: dict[int, dict[int, int]] = {}  # of each row that has a text in it, the copies
        for record, group in zip(records, groups, strict=True):
            of_row = of_group.setdefault(group, {})
            of_row[record.row] = max(
                of_row.get(record.row, 0), 1 if record.repeats is None else record.repeats
            )
        # windows of one row are no copies of each other
        is_near = [len(of_group[group]) > 1 for group in groups]
        times = [
            sum(of_group[group].values()) if near else record.repeats
            for record, group, near in zip(records, groups, is_near, strict=True)
        ]
        if any(is_near):
            notes.append(
                f"{plural(sum(is_near), 'record')} with near copies, which count as copies of each "
                "other"
            )
    rows_with_own_parts = {record.row for record in records if record.own_tokens}
    copies_of_rows: dict[int, int | None] = {}
    for record, count in zip(records, times, strict=True):
        if not record.own_tokens and record.row in rows_with_own_parts:
            continue
        before = copies_of_rows.get(record.row)
        copies_of_rows[record.row] = (
            count if before is None or count is None else max(before, count)
        )
    return copies_of_rows


def _distinct_row_numbers(records: Iterable[DataRecord]) -> list[int]:
    return list(dict.fromkeys(record.row for record in records))


# --- notes
# -----------------------------------------------------------------------------------------------


def plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def row_numbers_phrase(rows: Sequence[int]) -> str:
    """ "row 4" or "rows 4, 17 and 12 more", counted from 0."""
    named = ", ".join(map(str, rows[:NAMED_ROWS]))
    more = f" and {len(rows) - NAMED_ROWS} more" if len(rows) > NAMED_ROWS else ""
    return f"row{'' if len(rows) == 1 else 's'} {named}{more}, counted from 0"


def _record_source_notes(source: RecordSource) -> list[str]:
    notes = [
        f"{source.where}: left out {plural(len(rows), 'row')}: {why} ({row_numbers_phrase(rows)})"
        for why, rows in source.left_out
    ]
    copies = len(source.records) - len({record.prefix_suffix_pair for record in source.records})
    if copies:
        notes.append(f"{source.where}: merged {plural(copies, 'row')} identical to an earlier row")
    return [*source.notes, *notes]


def _known_fraction_note(given: int, unique: int, split: SplitOptions) -> str:
    if not given:
        why = (
            "--known-fraction is 0" if split.known_fraction == 0 else "one member cannot be divided"
        )
        return (
            f"the attacker knows no pairs ({why}): an attack that tunes on auxiliary data cannot "
            "run"
        )
    return (
        f"the attacker knows {given} of the {unique} unique members (--known-fraction "
        f"{split.known_fraction:g}, seed {split.seed}); they are not attacked"
    )
