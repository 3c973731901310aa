"""Split the rows of every benchmark into attacked, known and non-member records.

Messages name rows by number and never quote their text.
"""

from __future__ import annotations

import operator
from array import array
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace

import numpy as np

from auditor.benchmarks.data.data_records import DataRecord, RecordSource
from auditor.core.arrays import Ints
from auditor.core.counts import format_count
from auditor.core.errors import AuditError
from auditor.core.nouns import Pair, Secret
from auditor.core.plan_parts import DataPlan
from auditor.core.result import RecordCounts
from auditor.core.secret_randomness import make_keyed_generator
from auditor.core.secret_table import build_secret_table
from auditor.plugins.benchmark import Benchmark
from auditor.statistics import people
from auditor.statistics.extraction import format_copies
from auditor.statistics.near_pairs import index_pairs_within_edit_limits, label_connected_texts

NAMED_ROWS = 10  # row numbers that a note lists; it counts further rows
SEVERAL = "several groups"
# share of a near copy's tokens that may be edited; most records to compare
NEAR_SHARE = 0.05
NEAR_MOST = 20_000
ALSO_MEMBER = "identical to a member or an auxiliary record"


@dataclass(frozen=True)
class SplitOptions:
    """Hold the options for dividing members into attacked and known records.

    known_fraction: the share of members that the attacker knows, in [0, 1).
    limit: maximum number of attacked members and of non-members (None: no limit). Raise AuditError
    if the fraction is invalid.
    """

    known_fraction: float
    limit: int | None
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.known_fraction < 1:  # also refuses NaN
            raise AuditError(f"expected --known-fraction in [0, 1), got {self.known_fraction}")

    def known_count(self, members: int) -> int:
        """Return the number of distinct members that become known pairs.

        If there are two or more members, at least one is attacked, and at least one is known unless
        the fraction is 0.
        """
        if self.known_fraction == 0 or members < 2:
            return 0
        return min(members - 1, max(1, round(self.known_fraction * members)))

    def draw_order(self, description: str, of: int) -> Ints:
        """Return the indices below `of` in random order, fixed by the seed and by `description`."""
        return make_keyed_generator("benchmark", description, self.seed).permutation(of)


def list_data_files(plan: DataPlan) -> dict[str, str]:
    """Return the names of a plan's data files, keyed by option."""
    names = {
        "--data": plan.data,
        "--known": plan.known,
        "--nonmembers": plan.nonmembers,
        "--forget": plan.forget,
    }
    return {flag: name for flag, name in names.items() if name is not None}


def split_records_into_benchmark(
    benchmark: Benchmark, sources: Mapping[str, RecordSource], split: SplitOptions, label: str
) -> str:
    """Split distinct members into known and attacked records, and add non-members.

    Set the fields of the benchmark, and return a phrase such as "12 members, 4 non-members".

    sources: maps `--data` and, if given, `--known`, `--nonmembers` and `--forget` to records.
    label: prefix of ids, such as `label-000017` for a secret whose first row is 17. Known pairs are
    never attacked, and records to forget are never known. Without `--known`, known pairs are drawn
    from the members with fewest copies. A non-member that is also a member is omitted. Raise
    AuditError if a source has no record left, or if records to forget are not members.
    """
    members = sources["--data"]
    known, nonmembers, forget = map(sources.get, ("--known", "--nonmembers", "--forget"))
    notes: list[str] = []
    for source in filter(None, (members, known, nonmembers, forget)):
        notes += _record_source_notes(source)
    unique = _list_distinct_records(members)
    lost = set[int]() if forget is None else _list_forgotten_rows(forget, unique)
    copies_of_all = count_row_copies(unique, notes, members.counts_occurrences)
    if known is None:
        known_records, attacked = _draw_known_records(unique, lost, copies_of_all, split, notes)
    else:
        known_records = _list_distinct_records(known)
        attacked = _list_unknown_members(members, unique, known, known_records, lost, notes)
    if nonmembers is not None:
        unseen, n_dropped = _select_untrained_nonmembers(
            nonmembers, (*unique, *known_records), notes
        )
    copies = {row: copies_of_all[row] for row in _list_distinct_row_numbers(attacked)}
    members_in_order = _select_members(attacked, lost, copies, split, notes)
    n_known = len(copies_of_all) - len(copies)
    del copies_of_all  # a tenth of a large file's memory
    counts = {"members": _count_members(members, members_in_order, n_known, copies)}
    others_in_order: list[DataRecord] = []
    if nonmembers is not None:
        others_in_order = _select_copied_rows(unseen, {}, "non-member", split, notes)
        n_unseen = len(_list_distinct_row_numbers(unseen))
        counts["nonmembers"] = nonmembers.count_records(n_dropped, 0, n_unseen, others_in_order)
    # Copies: a few tuples among those of all records would keep the memory of all.
    known_table = build_secret_table(Secret("", r.prefix, r.suffix) for r in known_records)
    benchmark.known = tuple(map(Pair, known_table.prefixes, known_table.suffixes))
    benchmark.notes = tuple(notes)
    benchmark.record_counts = counts
    _set_attacked_records(benchmark, label, members, members_in_order, others_in_order, copies)
    benchmark.forgotten = frozenset(
        _get_record_id(label, record) for record in members_in_order if record.row in lost
    )
    return _describe_numbers(members_in_order, known_records, others_in_order)


def _count_members(
    source: RecordSource,
    attacked: Sequence[DataRecord],
    n_known: int,
    copies: Mapping[int, int | None],
) -> RecordCounts:
    """Return the counts of the members' rows. copies: copies of each row before the limit."""
    population = Counter(map(format_copies, copies.values()))
    if source.unread is not None:
        population += source.unread.by_copies
    counts = source.count_records({}, n_known, len(copies), attacked)
    return replace(counts, by_copies=dict(population))


def _select_members(
    attacked: Sequence[DataRecord],
    lost: Container[int],
    copies: Mapping[int, int | None],
    split: SplitOptions,
    notes: list[str],
) -> list[DataRecord]:
    """Return the members within the limit, in the order of attack. lost: rows to forget."""
    retained, gone = _partition_rows(attacked, lost)
    if not gone:
        return _select_copied_rows(retained, copies, "member", split, notes)
    # Limited separately: a joint sample might hold too few records to forget.
    return [
        *_select_copied_rows(retained, copies, "retained member", split, notes),
        *_select_copied_rows(gone, copies, "member to forget", split, notes),
    ]


def _set_attacked_records(
    benchmark: Benchmark,
    label: str,
    source: RecordSource,
    members: Sequence[DataRecord],
    nonmembers: Sequence[DataRecord],
    copies: Mapping[int, int | None],
) -> None:
    """Set the secrets, the held-out texts and the order of attack.

    members, nonmembers: the records in the order of attack. copies: copies of each row.
    """
    is_trained = _find_trained_users(source, members)
    member_order = _order_file_records(members)
    other_order = _order_file_records(nonmembers)

    def build_secrets() -> Iterator[Secret]:
        for i in member_order:
            record = members[i]
            yield _build_record_secret(
                label, record, record.repeats, True, is_trained(record.user), copies[record.row]
            )
        for i in other_order:
            record = nonmembers[i]
            yield _build_record_secret("nonmember", record, 0, False, is_trained(record.user))

    benchmark.secrets = build_secret_table(build_secrets())
    # The inverse of an order: the position of each record in the file.
    places = (np.argsort(member_order), len(members) + np.argsort(other_order))
    benchmark.asking_order = array("q", np.concatenate(places).tolist())
    benchmark.heldout = benchmark.secrets[len(members) :].texts


def _partition_rows(
    records: Sequence[DataRecord], rows: Container[int]
) -> tuple[list[DataRecord], list[DataRecord]]:
    """Return two lists: first the records of rows not in `rows`, then those of rows in `rows`."""
    others: list[DataRecord] = []
    records_of_rows: list[DataRecord] = []
    for record in records:
        (records_of_rows if record.row in rows else others).append(record)
    return others, records_of_rows


def _draw_known_records(
    unique: Sequence[DataRecord],
    lost: set[int],
    copies: Mapping[int, int | None],
    split: SplitOptions,
    notes: list[str],
) -> tuple[list[DataRecord], list[DataRecord]]:
    """Draw known records from the distinct members; return known and attacked records.

    lost: row numbers of records to forget, which are attacked.
    """
    rows = _list_distinct_row_numbers(_partition_rows(unique, lost)[0])
    in_random_order = [rows[i] for i in split.draw_order("known", len(rows))]
    # A stable sort, fewest copies first: frequent records leak first, so attack them instead of
    # using them as known records.
    in_random_order.sort(key=lambda row: copies.get(row) or 1)
    # Choose whole rows, because the parts of a row may overlap.
    known_rows = set(in_random_order[: split.known_count(len(rows))])
    attacked, known_records = _partition_rows(unique, known_rows)
    notes.append(_known_fraction_note(len(known_records), len(unique), split))
    return known_records, attacked


def _list_unknown_members(
    members: RecordSource,
    unique: Sequence[DataRecord],
    known: RecordSource,
    known_records: Sequence[DataRecord],
    lost: set[int],
    notes: list[str],
) -> list[DataRecord]:
    """Return the members that the attacker does not know, which are attacked.

    unique: distinct members; lost: row numbers of records to forget. Raise AuditError if a record
    to forget is known, or if no member is left.
    """
    digests = {record.digest for record in known_records}
    unknown: list[DataRecord] = []
    shared: list[DataRecord] = []
    for record in unique:
        (shared if record.digest in digests else unknown).append(record)
    if twice := [record.row for record in shared if record.row in lost]:
        raise AuditError(
            f"expected {known.label} without the records to be forgotten, got {len(twice)} records "
            f"of {members.label} that are in both ({format_row_numbers(twice)})"
        )
    if len(shared) == len(unique):
        raise AuditError(
            f"nothing is left to attack in {members.label}: every row is also in {known.label}"
        )
    notes.append(
        f"the attacker knows the {format_count(len(known_records), 'pair')} of {known.label}"
    )
    if shared:
        notes.append(
            f"left out {format_count(len(shared), 'member')} identical to an auxiliary record"
        )
    return unknown


def _list_forgotten_rows(forget: RecordSource, members: Sequence[DataRecord]) -> set[int]:
    """Return the row numbers of the records to forget, in the file of members.

    Raise AuditError if a record to forget is not a member.
    """
    row_of = {record.digest: record.row for record in members}
    rows = set()
    missing = set()
    for record in _require_usable_source_records(forget):
        row = row_of.get(record.digest)
        if row is None:
            missing.add(record.row)
        else:
            rows.add(row)
    if missing:
        raise AuditError(
            f"expected {forget.label} with records of --data, got {len(missing)} that are not in "
            f"it ({format_row_numbers(sorted(missing))})"
        )
    return rows


def _get_record_id(label: str, record: DataRecord) -> str:
    row = f"{label}-{record.row:06d}"
    if record.part is None:
        return row
    return f"{row}-{record.part:04d}"


def _build_record_secret(
    label: str,
    record: DataRecord,
    repeats: int | None,
    member: bool,
    user_trained: bool,
    copies: int | None = None,
) -> Secret:
    row = f"{label}-{record.row:06d}"
    secret = Secret(
        row,
        record.prefix,
        record.suffix,
        repeats,
        member,
        group=record.group,
        wording=record.wording,
        user=record.user,
        user_trained=user_trained,
        copies=copies,
    )
    if record.part is None:
        return secret
    return replace(secret, id=_get_record_id(label, record), document=row, at=record.suffix_start)


def _find_trained_users(
    members: RecordSource, attacked_records: Sequence[DataRecord]
) -> Callable[[str | None], bool]:
    """Return a function that tells whether any of a user's records, known or not, was trained on.

    Records that the attacker knows count too. Raise AuditError if the attacked records belong to
    fewer than `people.LEAST` people.
    """
    trained = {record.user for record in members.records} - {None}
    attacked = {record.user for record in attacked_records} - {None}
    if trained and len(attacked) < people.LEAST:
        raise AuditError(
            f"{members.label}: expected attacked records of at least {people.LEAST} people, to say "
            f"anything by person, got {len(attacked)}"
        )
    unread = members.unread

    def is_trained(user: str | None) -> bool:
        return user in trained or (
            user is not None and unread is not None and unread.contains_user(user)
        )

    return is_trained


def merge_duplicate_data_records(records: Iterable[DataRecord]) -> list[DataRecord]:
    """Return one record for each distinct (prefix, suffix), with the number of its first row.

    Repeats are summed if all are known. If equal records differ in group, their group is `SEVERAL`.
    If they differ in user, the merged record has no user.
    """
    first: dict[bytes, DataRecord] = {}
    for record in records:
        digest = record.digest
        earlier = first.setdefault(digest, record)
        if earlier is record:
            continue
        repeats = None
        if earlier.repeats is not None and record.repeats is not None:
            repeats = earlier.repeats + record.repeats
        merged = replace(earlier, repeats=repeats)
        if earlier.group != record.group:
            merged = replace(merged, group=SEVERAL)
        if earlier.user != record.user:
            merged = replace(merged, user=None)
        first[digest] = merged
    return list(first.values())


def _list_distinct_records(source: RecordSource) -> list[DataRecord]:
    return merge_duplicate_data_records(_require_usable_source_records(source))


def _require_usable_source_records(source: RecordSource) -> tuple[DataRecord, ...]:
    if not source.records:
        reasons = []
        for cause, rows in source.left_out.items():
            reasons.append(f"{format_count(len(rows), 'row')}: {cause}")
        raise AuditError(
            f"nothing is left of {source.label} after leaving out unusable rows "
            f"({'; '.join(reasons)})"
        )
    return source.records


def _select_untrained_nonmembers(
    source: RecordSource, trained_records: Sequence[DataRecord], notes: list[str]
) -> tuple[list[DataRecord], dict[str, int]]:
    """Return the distinct records that were not trained on, and numbers of omitted rows by reason.

    trained_records: members and known records. notes: receives sentences about dropped rows.
    """
    records = _require_usable_source_records(source)
    # Not the digests of all trained records, which are far more.
    trained = set(map(operator.attrgetter("digest"), records))
    trained.intersection_update(map(operator.attrgetter("digest"), trained_records))
    untrained = [record for record in records if record.digest not in trained]
    if not untrained:
        raise AuditError(
            f"nothing is left of {source.label}: every row is also a member or an auxiliary record"
        )
    gone = len(_list_distinct_row_numbers(records)) - len(_list_distinct_row_numbers(untrained))
    if gone:
        notes.append(f"{source.label}: left out {format_count(gone, 'row')} {ALSO_MEMBER}")
    return merge_duplicate_data_records(untrained), {ALSO_MEMBER: gone}


def _select_copied_rows(
    records: Sequence[DataRecord],
    copies: Mapping[int, int | None],
    description: str,
    split: SplitOptions,
    notes: list[str],
) -> list[DataRecord]:
    """Return the records of at most `split.limit` rows: most copied rows first, the rest at random.

    copies: number of copies of each row (None: unknown). All parts of a selected row are selected.
    With the same seed, a larger limit keeps all rows of a smaller limit.
    """
    rows = _list_distinct_row_numbers(records)
    in_random_order = (rows[i] for i in split.draw_order(description, len(rows)).tolist())
    # A stable sort: equal counts stay in random order.
    ordered = sorted(in_random_order, key=lambda row: -(copies.get(row) or 1))
    picked = ordered[: split.limit]
    if len(picked) < len(rows):
        parts = "" if len(rows) == len(records) else ", each with all its parts"
        copied = sum((copies.get(row) or 1) > 1 for row in picked)
        rule = f"the {copied} with most copies first, then a random" if copied else "a random"
        notes.append(
            f"--limit kept {len(picked)} of {len(rows)} {description}s{parts}, {rule} sample with "
            f"seed {split.seed}"
        )
    place = dict(zip(picked, range(len(picked)), strict=True))
    _, selected = _partition_rows(records, place)
    return sorted(selected, key=lambda unit: (place[unit.row], unit.part or 0))


def _order_file_records(records: Sequence[DataRecord]) -> Ints:
    """Return the indices of the records in the order of the file."""
    return np.array(
        sorted(range(len(records)), key=lambda i: (records[i].row, records[i].part or 0)), np.int64
    )


def count_row_copies(
    records: Sequence[DataRecord], notes: list[str], counts_occurrences: bool
) -> dict[int, int | None]:
    """Count the copies of each row in training, including nearly equal rows (None: unknown).

    A row counts as often as its most copied part. Rows that share only a prefix are not copies.
    counts_occurrences: whether a record's repeats already include the near copies that contain it.
    Near copies (at most `NEAR_SHARE` of the tokens edited) are searched for among at most
    `NEAR_MOST` records; if there are more, a note says so. Of a prefix longer than the suffix, only
    as many tokens count: a long prompt that many rows share makes none of them a near copy.
    """
    times = []
    rows_with_own_parts = set()
    for record in records:
        times.append(record.repeats)
        if record.own_tokens:
            rows_with_own_parts.add(record.row)
    if len(records) > NEAR_MOST:
        notes.append(
            f"near copies were not looked for among {len(records):,} records (more than "
            f"{NEAR_MOST:,})"
        )
    elif records:
        texts = []
        limits = []
        for record in records:
            tokens = record.own_tokens or record.compared_tokens
            texts.append(tokens)
            n_compared = min(len(tokens), 2 * record.n_suffix)
            limits.append(int(n_compared * NEAR_SHARE))
        pairs = index_pairs_within_edit_limits(texts, texts, limits)
        groups: dict[int, list[int]] = {}  # records that are near copies of each other
        for i, group in enumerate(label_connected_texts(len(texts), pairs).tolist()):
            groups.setdefault(group, []).append(i)
        n_near = 0
        for indices in groups.values():
            of_row = _count_near_copies([records[i] for i in indices], counts_occurrences)
            # Windows of the same row are not copies of each other.
            if len(of_row) > 1:
                n_near += len(indices)
                for i in indices:
                    times[i] = sum(of_row.values())
        if n_near:
            near_copies = format_count(n_near, "record")
            notes.append(f"{near_copies} with near copies, which count as copies of each other")
    copies_of_rows: dict[int, int | None] = {}
    for record, count in zip(records, times, strict=True):
        if not record.own_tokens and record.row in rows_with_own_parts:
            continue
        before = copies_of_rows.get(record.row)
        copies_of_rows[record.row] = (
            count if before is None or count is None else max(before, count)
        )
    return copies_of_rows


def _count_near_copies(records: Sequence[DataRecord], counts_occurrences: bool) -> dict[int, int]:
    """Count the copies of each row with some of these records, which are near copies."""
    texts: dict[int, set[str]] = {}  # by length
    if counts_occurrences and len(records) > 1:
        for record in records:
            texts.setdefault(len(record.compared_text), set()).add(record.compared_text)
    n_copies_of_row: dict[int, int] = {}
    for record in records:
        n_copies = 1 if record.repeats is None else record.repeats
        if _contains_other_text(record, texts):
            n_copies = 0
        n_copies_of_row[record.row] = max(n_copies_of_row.get(record.row, 0), n_copies)
    return n_copies_of_row


def _contains_other_text(record: DataRecord, texts: Mapping[int, Collection[str]]) -> bool:
    """Return whether the record's text is one of these texts with more at its start or end.

    texts: keyed by length.
    """
    text = record.compared_text
    bare = text.strip()
    if bare != text and bare in texts.get(len(bare), ()):
        return True
    for length, others in texts.items():
        if 0 < length < len(text) and (text[:length] in others or text[-length:] in others):
            return True
    return False


def _list_distinct_row_numbers(records: Iterable[DataRecord]) -> list[int]:
    return list(dict.fromkeys(record.row for record in records))


# --- notes ---


def _describe_numbers(
    members: Sequence[DataRecord], known: Sequence[DataRecord], nonmembers: Sequence[DataRecord]
) -> str:
    phrases = []
    for word, records in (
        ("member", members),
        ("auxiliary record", known),
        ("non-member", nonmembers),
    ):
        if records:
            phrases.append(format_count(len(records), word))
    return ", ".join(phrases)


def format_row_numbers(rows: Sequence[int]) -> str:
    """Return a phrase such as "row 4" or "rows 4, 17 and 12 more"; rows are counted from 0."""
    numbers = ", ".join(map(str, rows[:NAMED_ROWS]))
    if len(rows) > NAMED_ROWS:
        numbers += f" and {len(rows) - NAMED_ROWS} more"
    return f"row{'' if len(rows) == 1 else 's'} {numbers}, counted from 0"


def _record_source_notes(source: RecordSource) -> list[str]:
    notes = []
    for noun, reasons in ((source.part_noun, source.parts_left_out), ("row", source.left_out)):
        for cause, rows in reasons.items():
            numbers = format_row_numbers(sorted(set(rows)))
            notes.append(
                f"{source.label}: left out {format_count(len(rows), noun)}: {cause} ({numbers})"
            )
    copies = len(source.records) - len({record.digest for record in source.records})
    if copies:
        notes.append(
            f"{source.label}: merged {format_count(copies, 'row')} identical to an earlier row"
        )
    return [*source.notes, *notes]


def _known_fraction_note(n_known: int, unique: int, split: SplitOptions) -> str:
    if not n_known:
        cause = "one member cannot be divided" if split.known_fraction else "--known-fraction is 0"
        return (
            f"the attacker knows no pairs ({cause}): an attack that tunes on auxiliary data cannot "
            "run"
        )
    return (
        f"the attacker knows {n_known} of the {unique} unique members (--known-fraction "
        f"{split.known_fraction:g}, seed {split.seed}); they are not attacked"
    )
