"""What likelihoods alone say of a target: that it knows its members better, or nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from auditor.conclusions.outcomes import ValuesBySecret
from auditor.core.nouns import Secret
from auditor.core.plan import Plan
from auditor.models.huggingface import HuggingFaceModel
from auditor.records.folder import RunFolder
from auditor.runs import scoring
from auditor.runs.reporter import Reporter
from auditor.runs.run import plan_audit, run_audit
from auditor.runs.scoring import LIKELIHOOD, build_likelihood_row, doubt_if_members_likelier
from auditor.runs.site import Site
from tests.conftest import save_tiny


def answers(gap: float, n: int = 60, others: int = 20, seed: int = 0) -> ValuesBySecret:
    """Mean log-probabilities, nats a token, of standard deviation 0.5."""
    rng = np.random.default_rng(seed)
    members, rest = rng.normal(gap - 2, 0.5, n), rng.normal(-2, 0.5, others)
    own, floor = (
        {f"{name}{i}": float(x) for i, x in enumerate(x)}
        for name, x in (("m", members), ("n", rest))
    )
    return build_likelihood_row(own, floor)


def test_members_that_are_more_likely_are_a_reason_to_doubt_a_zero() -> None:
    (doubt,) = doubt_if_members_likelier("PMixED", answers(1.0))
    assert doubt.kind == "likelihood" and doubt.sentence.startswith(
        "PMixED: members' true tokens are more likely"
    )
    assert "--attack membership tests which one" in doubt.sentence
    (doubt,) = doubt_if_members_likelier("PMixED", answers(1.0), methods=("membership",))
    assert (
        "--attack" not in doubt.sentence
        and "compare membership with its blind baseline" in doubt.sentence
    )
    assert not doubt_if_members_likelier("PMixED", answers(-1.0))
    # of whom nothing is known
    assert not doubt_if_members_likelier("PMixED", answers(1.0, others=1))
    forbidden = answers(1.0)
    forbidden.values[LIKELIHOOD][-1] = -np.inf
    assert not doubt_if_members_likelier("MemFree", forbidden)


def test_false_alarms_are_as_many_as_the_level_says() -> None:
    """At 2.5%, at the sizes of a defense in the lab: 14 or fewer of 300 but for one series in a
    hundred."""
    assert (
        sum(bool(doubt_if_members_likelier("", answers(0.0, seed=seed))) for seed in range(300))
        <= 14
    )


@pytest.mark.parametrize("trait", ["document", "user"])
def test_records_of_one_text_or_person_are_one_answer(trait: str) -> None:
    """60 texts or people and 40 others, ten records each: as if independent, 22% are doubts."""

    def doubts(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        secrets, values = [], []
        for i in range(100):
            own = rng.normal()
            for j in range(10):
                secret = Secret(f"{i}.{j}", (1,), (2,), None, i < 60)
                secrets.append(replace(secret, **{trait: str(i)}))
                values.append((secret.id, float(own + rng.normal() - 3)))
        row = build_likelihood_row(dict(values[:600]), dict(values[600:]))
        return bool(doubt_if_members_likelier("", row, secrets=secrets))

    assert sum(map(doubts, range(300))) <= 14


def test_a_run_stores_scores_of_the_first_secrets_before_it_reads_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass over the members gives greedy recall and their tokens' log-probabilities."""
    save_tiny(tmp_path / "model")
    rows = [json.dumps({"prefix": f"ward {i:02d} bed ", "suffix": f"{i:03d}"}) for i in range(12)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    plan = Plan.from_fields(
        model=str(tmp_path / "model"),
        data=str(tmp_path / "data.jsonl"),
        known_fraction=0.0,
        prefix_token="none",
        setting="white-box",
        attack=("perplexity",),
        attack_options={"perplexity": {"temperature": 0}},
    )
    monkeypatch.setattr(scoring, "_SCORED_AT_ONCE", 5)
    monkeypatch.setattr(scoring, "_SLOW", 0.0)
    told = list[object]()

    class Watching(Reporter):
        def progress(self, description: str, n_done: int, total: int) -> None:
            if description == "greedy recall":
                lines = (tmp_path / "run" / "tokens.jsonl").read_text().splitlines()
                told.append((n_done, total, len(lines)))

        def announce(self, text: str) -> None:
            told.append(text)

    n_read = 0
    read = HuggingFaceModel.token_log_probs

    def counted(self: HuggingFaceModel, prefixes: Tensor, *of: Any, **more: Any) -> Tensor:
        nonlocal n_read
        n_read += len(prefixes)
        return read(self, prefixes, *of, **more)

    monkeypatch.setattr(HuggingFaceModel, "token_log_probs", counted)
    folder = RunFolder.create(tmp_path / "run", "stored", plan.to_json())
    run_audit(plan_audit(Site(plan, Watching())), folder)
    assert told == [
        "first number: 0 of the first 5 secrets recited word for word",
        *((n, 12, n) for n in (5, 10, 12)),
    ]
    assert n_read == 0
    scores = folder.tokens.finished_secrets("undefended")
    model = Site(plan).model
    secret = Site(plan).benchmark.secrets[11]
    expected = read(model, torch.tensor([secret.prefix]), torch.tensor([secret.suffix]))
    assert scores[secret.id].log_probs == pytest.approx(expected[0].tolist(), abs=1e-4)
