"""Tensors follow the model's device, or say that they stay in memory: nothing is made wherever
torch makes it.

By default torch makes tensors on the processor, where all models of these tests are, so that one
too many would not show. Here it makes them on the device that holds no numbers: whatever was made
without a word fails when it meets one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from auditor.attacks.claim_check import ClaimCheck
from auditor.attacks.ethicist import Ethicist
from auditor.attacks.extraction_probability import ExtractionProbability
from auditor.attacks.likelihood_ranking import PerplexityRanking
from auditor.attacks.membership import Membership
from auditor.attacks.near_verbatim import NearVerbatim
from auditor.attacks.prediction_audit import PredictionAudit
from auditor.core.errors import NotApplicable
from auditor.core.nouns import Pair, Query, Secret
from auditor.defenses.pmixed import PMixed, UnmixedEnsemble
from auditor.defenses.uniform_mixing import UniformMixing
from auditor.models import self_check
from auditor.models.base import LanguageModel, compute_text_nlls
from auditor.models.ensemble import ModelEnsemble
from auditor.plugins.attack import Attack
from auditor.plugins.defense import Scenario
from auditor.plugins.probe import Probe
from auditor.plugins.view import TEXT_ONLY, WHITE_BOX, Setting, View
from tests.conftest import tiny

TOKENS = torch.randint(1, 61, (8, 9), generator=torch.Generator().manual_seed(0)).tolist()
SECRETS = [
    Secret(f"s{i}", tuple(row[:5]), tuple(row[5:]), member=i % 2 == 0)
    for i, row in enumerate(TOKENS)
]
QUERIES = [Query(secret.id, secret.prefix, len(secret.suffix)) for secret in SECRETS]
KNOWN = [Pair(secret.prefix, secret.suffix) for secret in SECRETS]
FEW: dict[str, Any] = {"samples": 4, "prompt_length": 2, "epochs": 1}


def plain() -> LanguageModel:
    return tiny()


def mixed(defense: Any) -> Callable[[], LanguageModel]:
    def made() -> LanguageModel:
        public = tiny()
        ensemble = ModelEnsemble(public, [tiny(seed=1), tiny(seed=2)])
        return defense.protect(Scenario(tiny(seed=3), public, ensemble, 100, 4))

    return made


TARGETS = {
    "plain": plain,
    "pmixed": mixed(PMixed(q=0.5)),
    "unmixed": mixed(UnmixedEnsemble()),
    "uniform mixing": mixed(UniformMixing()),
}
ASKED: list[tuple[Attack | Probe, Setting]] = [
    (PerplexityRanking(samples=4), WHITE_BOX),
    (PerplexityRanking(search="tree", threshold=0.3), WHITE_BOX),
    (PerplexityRanking(search="beam", beams=2), WHITE_BOX),
    (Ethicist(**FEW), WHITE_BOX),
    (Ethicist(**FEW), TEXT_ONLY),
    (Ethicist(confidence="reference", **FEW), WHITE_BOX),
    (ExtractionProbability(), WHITE_BOX),
    (ExtractionProbability(bracket=True, near_beams=2), WHITE_BOX),
    (Membership(), WHITE_BOX),
    (NearVerbatim(beams=2), WHITE_BOX),
    (ClaimCheck(), WHITE_BOX),
    (PredictionAudit(), WHITE_BOX),
]


def ask(method: Attack | Probe, view: View) -> None:
    try:
        if isinstance(method, Probe):
            list(method.observe_secrets(view, SECRETS))
        else:
            list(method.guess(view, method.fit(view, KNOWN), QUERIES))
    except NotApplicable:
        return


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_made_where_torch_makes_it(name: str) -> None:
    target, public, reference = TARGETS[name](), tiny(), tiny(seed=4)
    self_check.configure_serving(reference, 12)
    with torch.device("meta"):
        list(compute_text_nlls(target, [secret.prefix + secret.suffix for secret in SECRETS]))
        for method, setting in ASKED:
            ask(method, View("target", target, setting, 0, public=public, reference=reference))
