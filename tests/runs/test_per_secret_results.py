"""What cells found is kept by secret; what non-members' numbers are is no memory, and no cause is
credited with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from auditor.conclusions.outcomes import ValuesBySecret, list_secret_attributes
from auditor.core.nouns import CellKey, Observation, Secret
from auditor.core.result import Measurement
from auditor.plugins.probe import Observed, Probe
from auditor.records.folder import RunFolder
from auditor.runs.chain_steps import measure_row_difference
from auditor.runs.per_secret_results import (
    PerSecretCollector,
    _build_observation_columns,
)
from auditor.statistics.compare import ABOVE

SECRETS = tuple(Secret(f"s{i}", (1,), (2,), member=i < 20) for i in range(40))


@dataclass(frozen=True)
class Likely(Probe):
    """Likely: what it was told of each secret."""

    name = "likely"

    def per_secret_values(
        self, secrets: Sequence[Secret], observations: Sequence[Observation]
    ) -> dict[str, list[float]]:
        return {"likely": [observation.values["p"] for observation in observations]}


class OfCanaries(Likely):
    of = "canaries"


def collected(folder: RunFolder, probe: Probe, members: float, others: float) -> PerSecretCollector:
    """Two rows: nothing is left of either in the second, and members vary a little."""
    collector = PerSecretCollector(folder)
    for target, scale in (("undefended", 1.0), ("defended", 0.0)):
        values = [
            scale * ((members if s.member else others) + i / 500) for i, s in enumerate(SECRETS)
        ]
        seen = Observed(
            Observation(s.id, {"p": value}) for s, value in zip(SECRETS, values, strict=True)
        )
        main = Measurement("likely", sum(values[:20]) / 20, 0, 1, 20, "probability")
        collector.collect_probe_observations(
            CellKey(target, "white-box", "likely"), probe, SECRETS, seen, main
        )
    return collector


def change(collector: PerSecretCollector) -> Measurement:
    new, base = (
        collector.find_main_numbers(CellKey(name, "white-box", "likely"))
        for name in ("defended", "undefended")
    )
    return measure_row_difference("likely", "probability", new, base)


@pytest.mark.parametrize(("members", "others", "shown"), [(0.3, 0.3, False), (0.9, 0.1, True)])
def test_what_non_members_show_too_is_taken_off(
    members: float, others: float, shown: bool, tmp_path: Path
) -> None:
    found = change(
        collected(RunFolder.create(tmp_path / "run", "n", {}), Likely(), members, others)
    )
    # the non-members' own five-hundredths: 20 more each
    assert found.value == pytest.approx(others - members + 0.04)
    assert (found.high < 0) == shown and found.note == ABOVE and found.n == 20


def test_nothing_is_taken_off_a_canarys_rank(tmp_path: Path) -> None:
    found = change(collected(RunFolder.create(tmp_path / "run", "n", {}), OfCanaries(), 0.3, 0.3))
    assert found.value == pytest.approx(-0.319) and not found.note


def test_columns_of_a_probe_share_their_facts_and_only_gaps_have_their_own() -> None:
    values = [{"p": 0.5, "q": 1.0} if i else {"p": 0.5} for i in range(len(SECRETS))]
    observations = [
        Observation(secret.id, numbers) for secret, numbers in zip(SECRETS, values, strict=True)
    ]
    other = CellKey("undefended", "white-box", "other")
    ids, member, repeats = list_secret_attributes(SECRETS)
    row = ValuesBySecret(ids, np.array(member), repeats, {})
    p, q = _build_observation_columns(other, row, Observed(observations))
    assert p.ids is ids and p.member is row.member and p.repeats is repeats
    assert (list(q.ids), list(q.values)) == (list(p.ids[1:]), [1.0] * (len(SECRETS) - 1))
    whole = [Observation(secret.id, {"p": 0.5, "q": 1.0}) for secret in SECRETS]
    p, q = _build_observation_columns(other, row, Observed(whole))
    assert p.ids is q.ids and p.member is q.member and p.repeats is q.repeats
