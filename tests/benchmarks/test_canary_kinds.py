"""The table of canary kinds in small: one training holds all kinds, and each kind is told by its own canaries."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from auditor.benchmarks.lab import Lab
from benchmarks.checks.trust import canary_kinds
from tests.benchmarks.test_lab import TINY

KINDS = ("words", "sampled@1.5", "rare-tokens")


def test_all_kinds_are_in_one_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path))
    own = {field.name: getattr(TINY, field.name) for field in dataclasses.fields(TINY)}
    del own["audit_canaries"]
    lab = canary_kinds.mixed_lab(Lab, KINDS, 8, **own)
    coined = [one for one in lab.canaries if one.canary is not None and one.canary.coin is not None]
    copies = Counter(lab.texts.private_text_copies())
    assert [copies[one.canary.text] for one in coined if one.canary] == [int(one.member) for one in coined]
    assert len(coined) == 24 and {len(one.suffix) for one in coined[16:]} == {1} and len(coined[0].suffix) > 1
    rows = list(canary_kinds.rows(lab, KINDS, 8, 8.0))
    assert [row[3] for row in rows] == [*KINDS, *KINDS * 4]  # the public model by its loss alone
    assert {str(row[1]) for row in rows} == {"public", "undefended", "DP-SGD, ε 8"}
    assert all(0 <= float(str(row[-1])) <= 1 and float(str(row[2])) > 1 for row in rows)
    bare = canary_kinds.mixed_lab(Lab, KINDS, 0, **own)
    assert bare.recipe == TINY and {len(row) for row in canary_kinds.rows(bare, KINDS, 0, 8.0)} == {3}


def test_a_kind_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        canary_kinds.main(kinds=("words", "rhymes"))
    assert "got small and ('words', 'rhymes')" in capsys.readouterr().err
