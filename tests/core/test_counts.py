from __future__ import annotations

from auditor.core.counts import format_count


def test_one_is_not_many() -> None:
    assert [format_count(n, "row") for n in (0, 1, 2, 1200)] == [
        "0 rows",
        "1 row",
        "2 rows",
        "1,200 rows",
    ]
    assert [format_count(n, "canary", "canaries") for n in (1, 2)] == ["1 canary", "2 canaries"]
