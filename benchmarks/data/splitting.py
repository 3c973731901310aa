"""Split the rows of every benchmark into attacked, known and non-member records.

Messages name rows by number and never quote their text.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np

from auditor.benchmarks.data.data_records import (
    AT_ONCE,
    WHOLE,
    DataRecord,
    DataRecordTable,
    RecordSource,
    build_data_record_table,
)
from auditor.core.arrays import Bools, Ints, Strings
from auditor.core.counts import format_count
from auditor.core.errors import AuditError
from auditor.core.nouns import Pair
from auditor.core.plan_parts import DataPlan
from auditor.core.result import RecordCounts
from auditor.core.secret_randomness import make_keyed_generator
from auditor.core.secret_table import STRINGS, UNKNOWN, join_secret_tables
from auditor.plugins.benchmark import Benchmark
from auditor.statistics import people
from auditor.statistics.extraction import format_copies
from auditor.statistics.near_pairs import index_pairs_within_edit_limits, label_connected_texts

NAMED_ROWS = 10  # row numbers that a note lists; it counts further rows
SEVERAL = "several groups"
# share of a near copy's tokens that may be edited; most records to compare
NEAR_SHARE = 0.05
NEAR_MOST = 20_000
_NO_DOCUMENT = np.array(None, STRINGS)
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
        unseen, n_dropped = _select_untrained_nonmembers(nonmembers, (unique, known_records), notes)
    copies = {row: copies_of_all[row] for row in attacked.distinct_rows}
    n_known = len(copies_of_all) - len(copies)
    del copies_of_all  # a tenth of a large file's memory
    members_in_order = _select_members(attacked, lost, copies, split, notes)
    counts = {"members": _count_members(members, members_in_order, n_known, copies)}
    others_in_order = members_in_order[:0]
    if nonmembers is not None:
        others_in_order = unseen[_select_copied_rows(unseen, {}, "non-member", split, notes)]
        n_unseen = len(unseen.distinct_rows)
        counts["nonmembers"] = nonmembers.count_records(n_dropped, 0, n_unseen, others_in_order)
    known_texts = known_records.secrets
    benchmark.known = tuple(map(Pair, known_texts.prefixes, known_texts.suffixes))
    benchmark.notes = tuple(notes)
    benchmark.record_counts = counts
    _set_attacked_records(benchmark, label, members, members_in_order, others_in_order, copies)
    benchmark.forgotten = frozenset(
        _get_record_id(label, record) for record in _partition_rows(members_in_order, lost)[1]
    )
    return _describe_numbers(members_in_order, known_records, others_in_order)


def _count_members(
    source: RecordSource,
    attacked: DataRecordTable,
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
    attacked: DataRecordTable,
    lost: Collection[int],
    copies: Mapping[int, int | None],
    split: SplitOptions,
    notes: list[str],
) -> DataRecordTable:
    """Return the members within the limit, in the order of attack. lost: rows to forget."""
    is_lost = _find_rows(attacked, lost)
    if not is_lost.any():
        return attacked[_select_copied_rows(attacked, copies, "member", split, notes)]
    # Limited separately: a joint sample might hold too few records to forget.
    orders = []
    for side, noun in ((~is_lost, "retained member"), (is_lost, "member to forget")):
        order = _select_copied_rows(attacked[side], copies, noun, split, notes)
        orders.append(np.flatnonzero(side)[order])
    return attacked[np.concatenate(orders)]


def _set_attacked_records(
    benchmark: Benchmark,
    label: str,
    source: RecordSource,
    members: DataRecordTable,
    nonmembers: DataRecordTable,
    copies: Mapping[int, int | None],
) -> None:
    """Set the secrets, the held-out texts and the order of attack.

    members, nonmembers: the records in the order of attack. copies: copies of each row.
    """
    is_trained = _find_trained_users(source, members)
    member_order = _order_file_records(members)
    other_order = _order_file_records(nonmembers)

    secrets = join_secret_tables(members.secrets[member_order], nonmembers.secrets[other_order])
    rows = np.concatenate([members.rows[member_order], nonmembers.rows[other_order]])
    parts = np.concatenate(
        [members.numbers["part"][member_order], nonmembers.numbers["part"][other_order]]
    )
    is_member = np.arange(len(rows)) < len(members)
    row_copies = np.full(len(rows), UNKNOWN)
    for place, row in enumerate(members.rows[member_order].tolist()):
        if (count := copies[row]) is not None:
            row_copies[place] = count
    ids, documents = _build_record_ids(label, rows, parts, len(members))
    benchmark.secrets = secrets.replace_columns(
        id=ids,
        repeats=np.where(is_member, secrets.find_column("repeats"), 0),
        member=is_member,
        document=documents,
        at=np.where(parts == WHOLE, 0, secrets.find_column("at")),
        user_trained=np.array(list(map(is_trained, secrets.list_values("user"))), bool),
        copies=row_copies,
    )
    # The inverse of an order: the position of each record in the file.
    places = (np.argsort(member_order), len(members) + np.argsort(other_order))
    benchmark.asking_order = array("q", np.concatenate(places).tobytes())
    benchmark.heldout = benchmark.secrets[len(members) :].texts


def _find_rows(records: DataRecordTable, rows: Collection[int]) -> Bools:
    """Return whether each record's row is in `rows`, (records,)."""
    return np.isin(records.rows, np.fromiter(rows, np.int64, len(rows)))


def _partition_rows(
    records: DataRecordTable, rows: Collection[int]
) -> tuple[DataRecordTable, DataRecordTable]:
    """Return two tables: first the records of rows not in `rows`, then those of rows in `rows`."""
    is_listed = _find_rows(records, rows)
    if not is_listed.any():  # no second table of all records
        return records, records[:0]
    return records[~is_listed], records[is_listed]


def _draw_known_records(
    unique: DataRecordTable,
    lost: set[int],
    copies: Mapping[int, int | None],
    split: SplitOptions,
    notes: list[str],
) -> tuple[DataRecordTable, DataRecordTable]:
    """Draw known records from the distinct members; return known and attacked records.

    lost: row numbers of records to forget, which are attacked.
    """
    rows = _partition_rows(unique, lost)[0].distinct_rows
    in_random_order = [rows[i] for i in split.draw_order("known", len(rows))]
    # A stable sort, fewest copies first: frequent records leak first, so attack them instead of
    # using them as known records.
    in_random_order.sort(key=lambda row: copies.get(row) or 1)
    # Choose whole rows, because the parts of a row may overlap.
    known_rows = set(in_random_order[: split.known_count(len(rows))])
    attacked, known_records = _partition_rows(unique, known_rows)
    n_unique = len(unique.distinct_rows)
    notes.append(_known_fraction_note(len(known_records.distinct_rows), n_unique, split))
    return known_records, attacked


def _list_unknown_members(
    members: RecordSource,
    unique: DataRecordTable,
    known: RecordSource,
    known_records: DataRecordTable,
    lost: set[int],
    notes: list[str],
) -> DataRecordTable:
    """Return the members that the attacker does not know, which are attacked.

    unique: distinct members; lost: row numbers of records to forget. Raise AuditError if a record
    to forget is known, or if no member is left.
    """
    is_shared = np.isin(unique.digests, known_records.digests)
    shared = unique[is_shared]
    if twice := _partition_rows(shared, lost)[1].rows.tolist():
        raise AuditError(
            f"expected {known.label} without the records to be forgotten, got {len(twice)} records "
            f"of {members.label} that are in both ({format_row_numbers(twice)})"
        )
    if len(shared) == len(unique):
        raise AuditError(
            f"nothing is left to attack in {members.label}: every row is also in {known.label}"
        )
    notes.append(f"auxiliary data: {_count_records(known_records, 'record')} of {known.label}")
    if shared:
        notes.append(
            f"left out {_count_records(shared, 'member')} identical to an auxiliary record"
        )
    return unique[~is_shared]


def _list_forgotten_rows(forget: RecordSource, members: DataRecordTable) -> set[int]:
    """Return the row numbers of the records to forget, in the file of members.

    Raise AuditError if a record to forget is not a member.
    """
    row_of = dict(zip(members.digests.tolist(), members.rows.tolist(), strict=True))
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
    part = WHOLE if record.part is None else record.part
    return f"{label}-{record.row:06d}{_format_part(part)}"


def _build_record_ids(
    label: str, rows: Ints, parts: Ints, n_members: int
) -> tuple[Strings, Strings]:
    """Return the id and the document of each record, (records,); members come first.

    rows, parts: numbers of each record's row and part.
    """
    ids = np.empty(len(rows), STRINGS)
    documents = np.empty(len(rows), STRINGS)
    for side, name in (
        (slice(0, n_members), label),
        (slice(n_members, len(rows)), "nonmember"),
    ):
        for begin in range(side.start, side.stop, AT_ONCE):
            part = slice(begin, min(begin + AT_ONCE, side.stop))
            names = np.array([f"{name}-{row:06d}" for row in rows[part].tolist()], STRINGS)
            windows = list(map(_format_part, parts[part].tolist()))
            ids[part] = names + np.array(windows, STRINGS)
            documents[part] = np.where(parts[part] == WHOLE, _NO_DOCUMENT, names)
    return ids, documents


def _format_part(part: int) -> str:
    return "" if part == WHOLE else f"-{part:04d}"


def _find_trained_users(
    members: RecordSource, attacked_records: DataRecordTable
) -> Callable[[str | None], bool]:
    """Return a function that tells whether any of a user's records, known or not, was trained on.

    Records that the attacker knows count too. Raise AuditError if the attacked records belong to
    fewer than `people.LEAST` people.
    """
    trained = set(members.table.secrets.find_column("user").tolist()) - {None}
    attacked = set(attacked_records.secrets.find_column("user").tolist()) - {None}
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


def merge_duplicate_records(records: DataRecordTable) -> DataRecordTable:
    """Return one record for each distinct (prefix, suffix), with the number of its first row.

    Repeats are summed if all are known. If equal records differ in group, their group is `SEVERAL`.
    If they differ in user, the merged record has no user.
    """
    _, places, codes = np.unique(records.digests, return_index=True, return_inverse=True)
    if len(places) == len(records):
        return records
    firsts = places[codes]
    secrets = records.secrets
    repeats = secrets.find_column("repeats").copy()
    groups = secrets.find_column("group").copy()
    users = secrets.find_column("user").copy()
    for i in np.flatnonzero(firsts != np.arange(len(firsts))).tolist():
        first = firsts[i]
        if UNKNOWN in (repeats[first], repeats[i]):
            repeats[first] = UNKNOWN
        else:
            repeats[first] += repeats[i]
        if groups[first] != groups[i]:
            groups[first] = SEVERAL
        if users[first] != users[i]:
            users[first] = None
    return records.replace_columns(repeats=repeats, group=groups, user=users)[np.sort(places)]


def _list_distinct_records(source: RecordSource) -> DataRecordTable:
    return merge_duplicate_records(_require_usable_source_records(source))


def _require_usable_source_records(source: RecordSource) -> DataRecordTable:
    if not source.records:
        reasons = []
        for cause, rows in source.left_out.items():
            reasons.append(f"{format_count(len(rows), 'row')}: {cause}")
        raise AuditError(
            f"nothing is left of {source.label} after leaving out unusable rows "
            f"({'; '.join(reasons)})"
        )
    return source.table


def _select_untrained_nonmembers(
    source: RecordSource, trained_records: Sequence[DataRecordTable], notes: list[str]
) -> tuple[DataRecordTable, dict[str, int]]:
    """Return the distinct records that were not trained on, and numbers of omitted rows by reason.

    trained_records: members and known records. notes: receives sentences about dropped rows.
    """
    records = _require_usable_source_records(source)
    is_trained = np.zeros(len(records), np.bool_)
    for trained in trained_records:
        is_trained |= np.isin(records.digests, trained.digests)
    untrained = records[~is_trained]
    if not untrained:
        raise AuditError(
            f"nothing is left of {source.label}: every row is also a member or an auxiliary record"
        )
    gone = len(records.distinct_rows) - len(untrained.distinct_rows)
    if gone:
        notes.append(f"{source.label}: left out {format_count(gone, 'row')} {ALSO_MEMBER}")
    return merge_duplicate_records(untrained), {ALSO_MEMBER: gone}


def _select_copied_rows(
    records: DataRecordTable,
    copies: Mapping[int, int | None],
    description: str,
    split: SplitOptions,
    notes: list[str],
) -> Ints:
    """Return the indices of the records of at most `split.limit` rows.

    The most copied rows come first, then the rest at random.

    copies: number of copies of each row (None: unknown). All parts of a selected row are selected.
    With the same seed, a larger limit keeps all rows of a smaller limit.
    """
    rows = records.distinct_rows
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
    places = np.flatnonzero(_find_rows(records, picked))
    # (places,) the position of each record's row in the order of attack
    order = np.argsort(picked)
    positions = order[np.searchsorted(picked, records.rows[places], sorter=order)]
    return places[np.lexsort((records.numbers["part"][places], positions))]


def _order_file_records(records: DataRecordTable) -> Ints:
    """Return the indices of the records in the order of the file."""
    return np.lexsort((records.numbers["part"], records.rows))


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
    table = build_data_record_table(records)
    times = table.secrets.list_values("repeats")
    rows = table.rows.tolist()
    has_own_tokens = table.has_own_tokens.tolist()
    rows_with_own_parts = set(compress(rows, has_own_tokens))
    if len(records) > NEAR_MOST:
        notes.append(
            f"near copies were not looked for among {len(records):,} records (more than "
            f"{NEAR_MOST:,})"
        )
    elif records:
        texts = []
        limits = []
        records = list(table)
        for record in records:
            tokens = record.own_tokens or record.compared_tokens
            texts.append(tokens)
            n_compared = min(len(tokens), 2 * record.n_suffix)
            limits.append(int(n_compared * NEAR_SHARE))
        pairs = index_pairs_within_edit_limits(texts, texts, limits)
        groups: dict[int, list[int]] = {}  # records that are near copies of each other
        for i, group in enumerate(label_connected_texts(len(texts), pairs).tolist()):
            groups.setdefault(group, []).append(i)
        rows_with_near_copies = set[int]()
        for indices in groups.values():
            of_row = _count_near_copies([records[i] for i in indices], counts_occurrences)
            # Windows of the same row are not copies of each other.
            if len(of_row) > 1:
                rows_with_near_copies.update(of_row)
                for i in indices:
                    times[i] = sum(of_row.values())
        if rows_with_near_copies:
            near_copies = format_count(len(rows_with_near_copies), "record")
            notes.append(f"{near_copies} with near copies, which count as copies of each other")
    copies_of_rows: dict[int, int | None] = {}
    for row, count, has_own in zip(rows, times, has_own_tokens, strict=True):
        if not has_own and row in rows_with_own_parts:
            continue
        before = copies_of_rows.get(row)
        copies_of_rows[row] = count if before is None or count is None else max(before, count)
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


# --- notes ---


def _describe_numbers(
    members: DataRecordTable, known: DataRecordTable, nonmembers: DataRecordTable
) -> str:
    phrases = []
    for word, records in (
        ("member", members),
        ("auxiliary record", known),
        ("non-member", nonmembers),
    ):
        if records:
            phrases.append(_count_records(records, word))
    return ", ".join(phrases)


def _count_records(records: DataRecordTable, noun: str) -> str:
    """Return `12 members`, or `12 members in 22 parts` if some rows have several parts."""
    n_rows = len(records.distinct_rows)
    parts = f" in {len(records):,} parts" if len(records) > n_rows else ""
    return f"{format_count(n_rows, noun)}{parts}"


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
    copies = len(source.records) - len(np.unique(source.table.digests))
    if copies:
        noun = "part"
        if len(source.records) == len(np.unique(source.table.rows)):
            noun = "row"
        notes.append(
            f"{source.label}: merged {format_count(copies, noun)} identical to an earlier {noun}"
        )
    return [*source.notes, *notes]


def _known_fraction_note(n_known: int, unique: int, split: SplitOptions) -> str:
    if not n_known:
        cause = "one member cannot be divided" if split.known_fraction else "--known-fraction is 0"
        return f"no auxiliary data ({cause}): an attack that tunes on auxiliary data cannot run"
    return (
        f"auxiliary data: {n_known} of the {unique} unique members, not attacked (--known-fraction "
        f"{split.known_fraction:g}, seed {split.seed})"
    )
