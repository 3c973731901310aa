"""What each kind of canary lets a black-box audit of epsilon prove, all kinds in the same trainings, over seeds.

    python -m benchmarks.checks.trust.canary_kinds [--lab smollm2] [--kinds words sampled@1.5] [--each N] [--seeds 0 1]

A seed is a lab of its own: its records, its canaries and their coins, the noise of its training. All models are trained
on the canaries of all kinds, each once, so that the kinds are compared on one model; the bound of a kind is that of its
own canaries, the others being data as any other. `--each 0` says what perplexity is without them. `sampled@T` are drawn
at temperature T. New tokens take the small lab, which then trains all parameters: an adapter leaves embeddings frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from auditor.attacks.epsilon_audit import EpsilonAudit
from auditor.benchmarks import audit_canaries, lab_training, manifests
from auditor.benchmarks.audit_canaries import Halves, Kind, make_audit_canary_manifest
from auditor.benchmarks.lab import Lab
from auditor.benchmarks.lab_texts import make_fake_texts_with_marks
from auditor.benchmarks.lab_training import LabTraining
from auditor.core import threads
from auditor.core.nouns import Secret
from auditor.defenses.private_training import DpSgd
from auditor.models.base import LanguageModel, model_nll_and_token_counts
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.probe import Observed, observe_all_secrets, value_column
from auditor.plugins.view import WHITE_BOX, View
from auditor.runs.prefix_token import resolve_prefix_token, with_prefix_token
from auditor.statistics.roc import auc
from benchmarks.checks.harness import Page, refuse, run
from benchmarks.checks.trust.bases import LABS

SCORES = ("loss", "difference")


def texts_of(kind: str, each: int, training: LabTraining, public: HuggingFaceModel) -> list[Halves]:
    """The canaries of one kind, `sampled@1.5` as the command line writes it."""
    name, _, temperature = kind.partition("@")
    recipe = training.recipe
    return audit_canaries.make_audit_canary_texts(
        name,
        each,
        recipe.audit_length,
        recipe.seed,
        texts=list(make_fake_texts_with_marks(recipe.seed + 2, each, training.kinds)),  # nobody's
        model=public,
        temperature=float(temperature or 1),
    )


def mixed_lab(base: type[Lab], kinds: Sequence[str], each: int, **recipe: Any) -> Lab:
    """A lab whose canaries are of all these kinds, those of one kind side by side."""

    class MixedTraining(base.training_kind):
        def write_audit_canary_manifest(self, path: Path, public: Callable[[], HuggingFaceModel]) -> None:
            texts = [halves for kind in kinds for halves in texts_of(kind, each, self, public())]
            mixed = make_audit_canary_manifest("words", texts, 1, self.recipe.seed)
            manifests.write_canary_manifest(path / lab_training.MANIFEST, mixed)

    class MixedLab(base):
        training_kind = MixedTraining

        def _further_package_versions(self) -> dict[str, str]:
            return {**super()._further_package_versions(), "canaries of": " ".join(kinds)}

    own: dict[str, Any] = {"audit_kind": "new-tokens", "private_rank": 0} if "new-tokens" in kinds else {}
    kind = MixedLab if each else base
    made: Lab = kind(base.recipe_kind(audit_canaries=each * len(kinds), **recipe | own))
    return made


def models(lab: Lab, epsilon: float) -> Iterator[tuple[str, LanguageModel]]:
    yield "public", lab.lab_public_model()
    yield "undefended", lab.lab_target_model()
    trainer = DpSgd(**{**lab.defense_defaults["dp-sgd"], "epsilon": epsilon})
    yield f"DP-SGD, ε {epsilon:g}", lab.model_trained_by_trainer(trainer).model


def observed(lab: Lab, model: LanguageModel, score: str, secrets: Sequence[Secret]) -> Observed:
    """The score of each canary, behind the prefix token that `audit run` chooses."""
    token = resolve_prefix_token("auto", lab.lab_target_model(), lab.known).tokens
    own, public = (
        with_prefix_token(model, token),
        with_prefix_token(lab.lab_public_model(), token),
    )
    view = View("target", own, WHITE_BOX, 0, reference=public, tokenizer=lab.tokenizer)
    return observe_all_secrets(EpsilonAudit(score=score), view, secrets)


def rows(lab: Lab, kinds: Sequence[str], each: int, epsilon: float) -> Iterator[tuple[object, ...]]:
    secrets = [one for one in lab.canaries if one.canary is not None and one.canary.coin is not None]
    for name, model in models(lab, epsilon):
        nll, tokens = zip(*model_nll_and_token_counts(model, lab.heldout, lab.heldout_given), strict=True)
        cost = f"{math.exp(sum(nll) / sum(tokens)):.2f}"
        if not each:
            yield lab.recipe.seed, name, cost
            continue
        for score in SCORES[: 1 if name == "public" else 2]:  # the public model, held against itself, says nothing
            found = observed(lab, model, score, secrets)
            for i, kind in enumerate(kinds):
                some = slice(i * each, (i + 1) * each)
                shown = proved(score, secrets[some], Observed(found[some], found.facts))
                yield (lab.recipe.seed, name, cost, kind, score, *shown)


def proved(score: str, secrets: Sequence[Secret], found: Observed) -> tuple[object, ...]:
    main, *others = EpsilonAudit(score=score).epsilon_lower_bounds(secrets, found)
    scores, into = (
        value_column(found, "score"),
        np.array([bool(one.canary and one.canary.coin) for one in secrets]),
    )
    bounds = (f"{one.epsilon:.2f}" for one in (main, *others))
    return f"{main.right}/{main.guesses}", *bounds, f"{main.best:.2f}", f"{auc(scores[into], scores[~into]):.3f}"


def main(
    lab: str = "small",
    kinds: tuple[str, ...] = ("words", "prefixed", "sampled", "sampled@1.5", "rare-tokens"),
    each: int = 125,
    seeds: tuple[int, ...] = (0, 1, 2),
    epsilon: float = 4.0,
    out: Path | None = None,
) -> None:
    if lab not in LABS or {kind.partition("@")[0] for kind in kinds} - set(get_args(Kind)):
        refuse(f"expected --lab {' or '.join(LABS)} and --kinds of {', '.join(get_args(Kind))}, got {lab} and {kinds}")
    threads.set_thread_count()
    page = Page(out)
    page.head("seed", "model", "perplexity", "canaries", "score", "right", "(ε,δ)", "f-DP", "shape", "best", "AUC")
    for seed in seeds:
        for row in rows(mixed_lab(LABS[lab], kinds, each, seed=seed), kinds, each, epsilon):
            page.row(*row)


if __name__ == "__main__":
    raise SystemExit(run(main))
