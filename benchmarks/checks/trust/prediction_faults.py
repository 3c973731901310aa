"""Faults planted in private prediction on the lab, one at a time: what games and claim-check see of each.

    python -m benchmarks.checks.trust.prediction_faults [--games 8000] [--epsilon 1] [--seed 0] [--small]

The lab's own ensemble is served by PMixed with one thing broken, and audited as a user would audit it: it claims what
the unbroken defense claims. Controls have no fault: a bound above their claim would be a false alarm, and makes the
program exit 1. `planted_faults.py` has the faults of training, and the exact answer on one context.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from auditor.attacks.claim_check import ClaimCheck
from auditor.attacks.prediction_audit import PredictionAudit
from auditor.benchmarks.lab import Lab
from auditor.benchmarks.lab_recipe import LabRecipe
from auditor.core import threads
from auditor.core.nouns import Claim, Secret, evenly
from auditor.defenses.pmixed import PMixed
from auditor.defenses.pmixed_model import PMixedModel, everything
from auditor.models.base import LanguageModel, Neighbours, Rows
from auditor.models.decoding import Decoding
from auditor.models.ensemble import Ensemble, Exchanged
from auditor.plugins.defense import Scenario
from auditor.plugins.probe import observe
from auditor.plugins.view import WHITE_BOX, Meter, View
from benchmarks.checks.harness import Page, run

_KEPT = 64  # tokens of a budget that keeps its subset
Q, ALPHA = 0.06, 20  # the lab's q; an order at which small epsilons leave a budget
SMALL = LabRecipe(vocab_size=300, layers=1, hidden=32, heads=2, block=64, repeats=((1, 8, 2), (4, 4, 1)), others=0,
                  nonmembers=4, public_records=40, public_epochs=1, private_rank=2, lora_rank=2, members=3)  # fmt: skip


@dataclass(frozen=True)
class ServingFault:
    """name; what is broken, in words; served: the ensemble by the defense, with the fault in it.

    sound: whether nothing is broken. unseen: why games that do not see it cannot.
    """

    name: str
    what: str
    served: Callable[[Ensemble, PMixed], PMixedModel]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    members: int | None = None  # of the ensemble: the first ones; None: all
    tokens: int = 64  # of one budget
    asked: int = 1  # budgets that one adversary is answered
    sound: bool = False
    unseen: str = ""


# --- the faults -------------------------------------------------------------------------------------------------------


class WithoutWeights(PMixedModel):
    """Says the mixed distribution, and draws from members as they are."""

    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None, distribution: bool = True) -> Rows:
        if distribution:
            return super().start(prefixes, length, prompt=prompt)
        raw = PMixedModel(self.ensemble, self.q, everything, self.name)
        return raw.start(prefixes, length, prompt=prompt, distribution=False)


class OneSubset(PMixedModel):
    """Draws the Poisson subset once a budget: its members answer all of it."""

    def start(self, prefixes: Tensor, length: int, *, prompt: Tensor | None = None, distribution: bool = True) -> Rows:
        rows = super().start(prefixes, length, prompt=prompt, distribution=distribution)
        return rows if distribution else _Kept(rows, self)


class _Kept(Rows):
    """Every budget keeps the size and the first member of its first draw; each draw asks one of that many in a row."""

    def __init__(self, rows: Rows, model: PMixedModel) -> None:
        self.rows, self.model = rows, model

    def __len__(self) -> int:
        return len(self.rows)

    def log_probs(self) -> Tensor:
        return self.rows.log_probs()

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        self.rows.advance(parents, tokens)

    def draw(self, row_of_draw: Tensor, uniforms: Tensor, decoding: Decoding) -> tuple[Tensor, Tensor]:
        first = torch.arange(len(uniforms), device=uniforms.device) // _KEPT * _KEPT  # draw of each one's budget
        size, members = uniforms[first, 1], self.model.ensemble.size
        chosen = torch.searchsorted(self.model.size_cdf, size.contiguous(), right=True).clamp(1, members)
        place = (uniforms[first, 2] * members).floor() + (uniforms[:, 2] * chosen).floor()
        kept = torch.stack([uniforms[:, 0], size, (place % members + 0.5) / members], dim=-1)
        return self.rows.draw(row_of_draw, kept, decoding)


class Copied(PMixedModel):
    """One shard's records lie in others too, and the neighbour is without all of them: they go with their record."""

    def neighbours(self, contexts: Tensor, last: int, at: Sequence[int]) -> Sequence[Neighbours]:
        distribution = self.neighbour("zero_out", 0).log_probs(contexts, last)[:, at]
        return [Neighbours("zero_out", distribution.double().unsqueeze(-2))]

    def neighbour(self, relation: str, index: int) -> LanguageModel:
        assert isinstance(self.ensemble, Exchanged)
        places = self.ensemble.places
        left = torch.where(places == places[1], 0, places).tolist()
        return PMixedModel(Exchanged(self.ensemble.held, left), self.q, self.served, self.name, self.promise)


def _as(kind: type[PMixedModel]) -> Callable[[Ensemble, PMixed], PMixedModel]:
    """The defense as it is set up, by a class that does something else."""

    def served(held: Ensemble, defense: PMixed) -> PMixedModel:
        model = defense.protect(_scenario(held))
        assert isinstance(model, PMixedModel)
        return kind(held, model.q, model.served, model.name, model.promise)

    return served


def _copied(times: int) -> Callable[[Ensemble, PMixed], PMixedModel]:
    """The first shard in so many places; nobody wrote down what lies where."""

    def served(held: Ensemble, defense: PMixed) -> PMixedModel:
        size = held.size
        places = [0, *[1] * min(times, size), *range(min(times, size) + 1, size + 1)]
        copies = Exchanged(held, places)
        copies.shards = None
        return _as(Copied)(copies, defense)

    return served


_RIGHT = _as(PMixedModel)
FAULTS = (
    ServingFault("control", "nothing is broken: the sound rule", _RIGHT, sound=True),
    ServingFault("control, one member", "nothing is broken: the sound rule at N = 1", _RIGHT, members=1, sound=True),
    ServingFault("published at N = 1", "the paper's radii, one member", _RIGHT, {"accounting": "published"}, members=1),
    ServingFault("published", "the paper's radii, all members", _RIGHT, {"accounting": "published"},
          unseen="no violation is known here (formulas B2.3): what is unproved may still hold"),
    ServingFault("no mixing", "lambda is solved for and not applied: members answer as they are", _as(WithoutWeights)),
    ServingFault("one subset", "the Poisson subset is drawn once a budget, not once a token", _as(OneSubset),
          unseen="a member is asked seldom, and then weighs so little that one budget shows it in few games"),
    ServingFault("not charged", "an adversary is answered 64 budgets for one", _RIGHT, tokens=4, asked=64),
    ServingFault("shard in two", "a shard's records lie in a second one too", _copied(2),
          unseen="the accounting's slack is larger than one copy is worth"),
    ServingFault("shard in eight", "a shard's records lie in seven others too", _copied(8),
          unseen="games of one budget of a small epsilon are nearly alike, as the exact answer says: it takes more"),
)  # fmt: skip


# --- what is seen of them ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Detection:
    """What either audit says of a fault. Epsilons in nats."""

    fault: ServingFault
    claimed: float
    bound: float
    best: float
    exact: float
    games: int
    seen: tuple[str, ...]  # by claim-check, sentences
    minutes: float

    @property
    def caught(self) -> bool:
        return self.bound > self.claimed

    @property
    def cells(self) -> tuple[str, ...]:
        missed = ": ".join(filter(None, ["not caught", self.fault.unseen]))
        verdict = "" if self.fault.sound else ", **caught**" if self.caught else f", {missed}"
        bounds = f"{self.claimed:.2f}", f"{self.bound:.2f}{verdict}", f"{self.best:.2f}", f"{self.exact:.2f}"
        said = "; ".join(self.seen) or "holds"
        return f"{self.fault.name}: {self.fault.what}", *bounds, f"{self.games:,}", said, f"{self.minutes:.1f}"


def rows(lab: Lab, games: int = 8000, epsilon: float = 1.0, seed: int = 0) -> Iterator[Detection]:
    secrets = evenly([secret for secret in lab.secrets if secret.member], 40)
    for fault in FAULTS:
        yield audited(fault, lab.ensemble(), secrets, games, epsilon, seed)


def audited(
    fault: ServingFault, held: Ensemble, secrets: Sequence[Secret], games: int, epsilon: float, seed: int
) -> Detection:
    start = time.perf_counter()
    held = held if fault.members is None else Exchanged(held, range(1 + fault.members))
    defense = PMixed(**{"epsilon": epsilon, "alpha": ALPHA, "q": Q, "queries": fault.tokens, **fault.options})
    model, claim = fault.served(held, defense), defense.claim(_scenario(held), fault.tokens)
    probe = PredictionAudit(games=games, tokens=fault.tokens * fault.asked)
    # A service takes its claim to cover what it answers: what is not charged is not counted.
    view = _view(model, dataclasses.replace(claim, queries=fault.tokens * fault.asked), seed)
    found = observe(probe, view, secrets)
    (bound,) = probe.audits(secrets, found)
    exact = next(m.value for m in probe.measurements(secrets, found) if m.name == "epsilon_exact")
    check, view = ClaimCheck(), _view(model, claim, seed)
    view.meter = Meter({(fault.name, ""): fault.tokens * fault.asked}, spent=fault.tokens)
    seen = check.violations(secrets, observe(check, view, secrets))
    minutes = (time.perf_counter() - start) / 60
    return Detection(
        fault, claim.epsilon[claim.relation], bound.epsilon, bound.best, exact, bound.canaries, seen, minutes
    )


def _view(model: LanguageModel, claim: Claim, seed: int) -> View:
    return View("pmixed", model, WHITE_BOX, seed=seed, claim=claim)


def _scenario(held: Ensemble) -> Scenario:
    return Scenario(held.public, held.public, held, 0, 16)


def main(
    games: int = 8000,
    epsilon: float = 1.0,
    seed: int = 0,
    small: Annotated[bool, "a lab of seconds: for tests"] = False,
) -> int:
    threads.settle()
    page, false_alarms = Page(), 0
    page.head("fault", "claimed ε", "bound by games", "best provable", "exactly", "games", "claim-check", "minutes")
    for row in rows(Lab(SMALL if small else LabRecipe()), games, epsilon, seed):
        page.row(*row.cells)
        false_alarms += row.fault.sound and row.caught
    return int(false_alarms > 0)


if __name__ == "__main__":
    raise SystemExit(run(main))
