"""The black-box audit of epsilon on the lab: what each kind of canary lets it prove of which model.

    python -m benchmarks.checks.trust.audited_epsilon [--kinds words prefixed sampled new-tokens] [--epsilon 1 8 inf]

Each kind is a lab of its own with as many canaries, all models trained with them and kept in the lab's cache. Per kind:
the public model, which saw none of them, the target, and DP-SGD at each epsilon (inf: its control without noise). New
tokens take a lab that trains all parameters: an adapter leaves embeddings frozen, and cannot learn them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from auditor.attacks.epsilon_audit import EpsilonAudit
from auditor.benchmarks.audit_canaries import Kind
from auditor.benchmarks.lab import Lab
from auditor.benchmarks.lab_recipe import LabRecipe
from auditor.core import threads
from auditor.core.errors import NotApplicable
from auditor.core.result import Audited
from auditor.defenses.dp_sgd import DpSgd
from auditor.models.base import LanguageModel
from auditor.plugins.probe import run_probe
from auditor.plugins.trainer import Trainer
from auditor.plugins.view import WHITE_BOX, View
from auditor.runs.prefix_token import resolve_prefix_token, with_prefix_token
from benchmarks.checks.harness import Page, run

Score = Literal["loss", "difference"]


def lab_of(kind: Kind, count: int) -> Lab:
    rank = {"private_rank": 0} if kind == "new-tokens" else {}
    return Lab(LabRecipe(audit_canaries=count, audit_kind=kind, **rank))


def trainer(epsilon: float) -> Trainer:
    """As `audit run` trains it in the lab."""
    options = Lab.defense_defaults["dp-sgd"]
    return DpSgd(**options).without_noise() if math.isinf(epsilon) else DpSgd(**{**options, "epsilon": epsilon})


def models(lab: Lab, epsilons: Sequence[float]) -> Iterator[tuple[str, LanguageModel, float]]:
    """Each with the seconds that its own training took."""
    yield "public", lab.public(), lab.parts.seconds["public"]
    yield "target", lab.target(), lab.parts.seconds["target"]
    for epsilon in epsilons:
        method = trainer(epsilon)
        name = method.name if math.isinf(epsilon) else f"{method.name}, ε {epsilon:g}"
        yield name, lab.trained(method).model, lab.training_seconds_of_trainer(method)


def audits(lab: Lab, model: LanguageModel, score: Score) -> tuple[Audited, ...]:
    """The bounds by this score, behind the prefix token that `audit run` chooses."""
    secrets = tuple(one for one in lab.canaries if one.canary is not None and one.canary.coin is not None)
    prefix_token = resolve_prefix_token("auto", lab.target(), lab.known).tokens
    view = View(
        "target",
        with_prefix_token(model, prefix_token),
        WHITE_BOX,
        0,
        reference=with_prefix_token(lab.public(), prefix_token),
        tokenizer=lab.tokenizer,
    )
    probe = EpsilonAudit(score=score)
    return probe.audits(secrets, run_probe(probe, view, secrets))


def rows(kind: Kind, count: int, epsilons: Sequence[float]) -> Iterator[tuple[object, ...]]:
    lab = lab_of(kind, count)
    for name, model, seconds in models(lab, epsilons):
        for score in get_args(Score):
            try:
                main, *others = audits(lab, model, score)
            except NotApplicable as why:  # the public model, held against itself
                yield kind, name, score, why
                continue
            bounds = (f"{one.epsilon:.3f}" for one in (main, *others))
            right = f"{main.right}/{main.guesses}"
            yield kind, name, score, right, *bounds, f"{main.best:.2f}", f"{seconds / 60:.1f}"


def main(kinds: tuple[Kind, ...] = get_args(Kind), epsilon: tuple[float, ...] = (8.0,), count: int = 1000) -> None:
    threads.set_thread_count()
    page = Page()
    page.head("kind", "model", "score", "right", "(ε,δ)", "f-DP", "shape", "best", "minutes")
    for kind in kinds:
        for row in rows(kind, count, epsilon):
            page.row(*row)


if __name__ == "__main__":
    raise SystemExit(run(main))
