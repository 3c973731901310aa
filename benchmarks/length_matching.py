"""Non-members as long as the members are, so that a difference between the two is none of length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from scipy.stats import chi2_contingency

from auditor.benchmarks.splitting import DataRecord, RecordSource, SplitOptions, merge_duplicate_data_records
from auditor.core.result import Doubt

UNMATCHED = "more of its length than among the members"
_DIFFERENT_MIX = 0.01  # p-value below which two mixes of lengths differ
_FEW_OF_MEMBERS = 0.1  # share of the members


def match_nonmembers_by_length(
    nonmembers: RecordSource, members: RecordSource, split: SplitOptions
) -> tuple[RecordSource, tuple[Doubt, ...]]:
    """Return non-members of which as large a share is short or long as of the members, by attacked tokens of a row.

    Rows are counted in bands of 8 to 15 tokens, 16 to 31, and so on. Nothing changes unless the two differ beyond
    chance (chi-square, 1%). If at most half of the non-members could stay, all of them do, and that is a doubt.
    """
    bands = _rows_by_length_band(nonmembers.records)
    member_rows = _rows_by_length_band(merge_duplicate_data_records(members.records))
    sizes = {band: len(rows) for band, rows in member_rows.items()}
    every = sorted(bands.keys() | sizes.keys())
    table = [[sizes.get(band, 0) for band in every], [len(bands.get(band, ())) for band in every]]
    if not bands or not sizes or len(every) < 2 or chi2_contingency(table).pvalue >= _DIFFERENT_MIX:
        return nonmembers, ()
    n_members, n_nonmembers = sum(sizes.values()), sum(map(len, bands.values()))
    # So many of a band for each member of it; a band with few members does not decide how many stay of the others.
    ratio = min(len(bands.get(band, ())) / n for band, n in sizes.items() if n >= _FEW_OF_MEMBERS * n_members)
    n_by_band = {band: min(len(rows), round(ratio * sizes.get(band, 0))) for band, rows in bands.items()}
    n_matched = sum(n_by_band.values())
    if 2 * n_matched <= n_nonmembers:
        mix = _length_mix_phrase({band: len(rows) for band, rows in bands.items()})
        sentence = (
            f"members and non-members differ in length ({_length_mix_phrase(sizes)} of the members, {mix} of the "
            "non-members), and too few non-members are as long as the members: a difference between the two may be "
            "one of length"
        )
        return nonmembers, (Doubt("non-members", sentence),)
    matched_rows: set[int] = set()
    for band, rows in bands.items():
        matched_rows |= {rows[i] for i in split.pick_indices(f"non-member of band {band}", n_by_band[band], len(rows))}
    unmatched = tuple(row for rows in bands.values() for row in rows if row not in matched_rows)
    note = (
        f"{nonmembers.where}: matched by length: {n_matched} of {n_nonmembers} rows stay, so that as large a share of "
        "them is short as of the members"
    )
    matched = replace(
        nonmembers,
        records=tuple(record for record in nonmembers.records if record.row in matched_rows),
        notes=(*nonmembers.notes, note),
        not_attacked={**nonmembers.not_attacked, UNMATCHED: unmatched},
    )
    return matched, ()


def _rows_by_length_band(records: Iterable[DataRecord]) -> dict[int, list[int]]:
    tokens: dict[int, int] = {}
    for record in records:
        tokens[record.row] = tokens.get(record.row, 0) + len(record.suffix)
    bands: dict[int, list[int]] = {}
    for row, count in tokens.items():
        bands.setdefault(count.bit_length(), []).append(row)
    return bands


def _length_mix_phrase(sizes: Mapping[int, int]) -> str:
    """Return the share of rows whose attacked tokens are as in the most frequent band, in words."""
    band = max(sizes, key=lambda band: sizes[band])
    share = sizes[band] / sum(sizes.values())
    return f"{2 ** (band - 1)} to {2**band - 1} tokens in {share:.0%}"
