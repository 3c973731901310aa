"""The adversary in small: sound claims hold, what is known to be exceeded is found, and what is
fails the program."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from auditor.defenses.pmixed import PMixed
from auditor.defenses.pmixed_model import PMixedMemberProjection
from auditor.plugins.registry import list_defenses
from validation.trust import adversary
from validation.trust.adversary import GaussianSetting, exact_delta, gaussian_delta, one_step_delta


def test_no_sound_claim_is_exceeded(capsys: pytest.CaptureFixture[str]) -> None:
    assert adversary.main(settings=2, starts=20, steps=4) == 0
    said = capsys.readouterr().out
    assert said.count("holds") >= 14 and "EXCEEDED" not in said
    assert len(adversary.claims()) == len(
        {(row.defense, row.promise) for row in adversary.claims()}
    )


def test_every_defense_with_a_claim_is_tried() -> None:
    tried = {row.defense for row in adversary.claims()}
    assert tried == {
        name for name, kind in list_defenses().items() if not kind.claims.startswith("none")
    }


def test_what_is_known_to_exceed_its_claim_is_found_to() -> None:
    """One certain member, and the counterexample to a radius that is solved from N."""
    setting = adversary.EnsembleSetting(1, 3, 0.03, 1024, True)
    published = PMixed(accounting="published", alpha=3)
    distributions = torch.tensor([[[0.145, 0.855], [1.0, 0.0], [0.5, 0.5]]], dtype=torch.float64)
    for relation in ("zero_out", "add_remove"):
        (ratio,) = adversary.ensemble_ratio(published, setting, relation)(distributions)
        assert ratio == pytest.approx(1.8169, abs=5e-5)

    @dataclasses.dataclass(frozen=True)
    class FromTheirNumber(PMixed):
        def _make_projection(self, queries: int, members: int) -> PMixedMemberProjection:
            radius = {1: 4.9121, 2: 3.8402}[members]
            return PMixedMemberProjection(
                4, (radius,) * members, cap=-math.expm1(-radius), two_sided=False
            )

    setting = adversary.EnsembleSetting(2, 4, 1.0, 1, True)
    first = torch.tensor([5.62e-4, 0.999, 1e-13, 0.5], dtype=torch.float64)
    distributions = torch.stack([first, 1 - first], -1).unsqueeze(0)
    broken, mended = (
        adversary.ensemble_ratio(kind(q=1.0, adjacency="add_remove"), setting, "add_remove")(
            distributions
        )[0]
        for kind in (FromTheirNumber, PMixed)
    )
    assert broken > 6.905 / 4.9122 and 0.99 < mended <= 1


@pytest.mark.parametrize(
    ("ratio", "sound", "code"),
    [(1.01, True, 1), (math.nan, True, 1), (1.01, False, 0), (1.0, True, 0)],
)
def test_a_sound_claim_that_is_exceeded_fails(
    monkeypatch: pytest.MonkeyPatch, ratio: float, sound: bool, code: int
) -> None:
    row = adversary.Claimed("mine", "everything", sound, lambda effort: (ratio, "here"))
    monkeypatch.setattr(adversary, "claims", lambda: [row])
    assert adversary.main() == code


def test_exact_deltas_of_the_gaussian_mechanism() -> None:
    """Two steps at a rate of all but 1 are those of no sampling; a step by quadrature is that in
    closed form."""
    whole = GaussianSetting(1.0, 1.0, 2)
    nearly = GaussianSetting(1.0, 1 - 1e-9, 2)
    assert exact_delta(1.5, nearly) == pytest.approx(exact_delta(1.5, whole), rel=1e-6)
    for removed in (False, True):
        assert one_step_delta(1.0, 2.0, 1.0, removed) == pytest.approx(gaussian_delta(1.0, 0.5))
