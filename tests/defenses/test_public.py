"""The public model as a row of its own."""

from __future__ import annotations

from collections.abc import Callable

from auditor.defenses.control_rows import PublicModelControl
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.defense import Scenario

MakeTiny = Callable[..., HuggingFaceModel]


def test_it_is_served_as_it_is_and_promises_nothing(make_tiny: MakeTiny) -> None:
    public = make_tiny(seed=1)
    scenario = Scenario(make_tiny(), public, None, 100, 4)
    assert PublicModelControl().protect(scenario) is public
    assert (
        PublicModelControl().claim(scenario, n_tokens=5) is None
        and PublicModelControl().fixed_token_budget(scenario) is None
    )
