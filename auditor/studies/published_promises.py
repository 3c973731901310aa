"""Check published privacy claims at given distributions: actual against claimed privacy loss.

A plan's `[published]` table describes a mechanism, its promise, and how we interpret the promise.
Each query in the table gives the distributions of a public model and of private models over a few
tokens, chosen so that the promise is hardest to keep. `claim-check` measures the loss of one token;
the loss of T tokens is computed exactly from the distributions with and without the record. A
control uses this program's own accounting. All results are computed here; a plan states none. This
module implements how each mechanism answers a query, and renders a page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auditor.attacks.claim_check import ClaimCheck, list_claimed_relations
from auditor.benchmarks.data.fixed_distributions import FixedDistribution, build_fixed_ensemble
from auditor.core.errors import AuditError, refuse_unknown_names
from auditor.core.jsonable import from_json
from auditor.core.nouns import Secret
from auditor.defenses.adapmixed import make_constant_radius_projection
from auditor.defenses.invisible_ink import InvisibleInk, InvisibleInkModel
from auditor.defenses.pmixed import PMixed
from auditor.defenses.pmixed_model import PMixedModel
from auditor.defenses.uniform_mixing import UniformMixing
from auditor.models.base import DivergenceCheck, LanguageModel, Neighbours
from auditor.models.rows import Rows
from auditor.models.wrapping import WrappingModel
from auditor.plugins.defense import Prompt, Scenario
from auditor.plugins.probe import observe_all_secrets
from auditor.plugins.view import WHITE_BOX, View
from auditor.privacy.accounting import compute_two_sided_renyi, compute_uniform_mixing_epsilon
from auditor.privacy.gaussian import compute_noise_scale_divergence, compute_noise_scale_epsilon
from auditor.reports import tables
from auditor.statistics.composition import compute_exact_game_epsilon
from auditor.statistics.one_run import compute_gaussian_epsilon

Options = Mapping[str, Any]

_ROUNDING = 1e-6  # relative
# Absolute: deviation from 1 allowed for a total of decimals written by hand.
_MASS = 1e-6
_ALIAS = "the query"
_PMIXED_OPTIONS = {"epsilon", "delta", "alpha", "queries"}


@dataclass(frozen=True)
class PromiseCheck:
    """Comparison of a claimed privacy loss with its actual value.

    Args:
        query: the query.
        neighbour: name of the neighbouring relation.
        realised: actual loss, in nats.
        claimed: claimed loss, in nats.
        order: order of the Rényi divergence; None if both losses are epsilons at a delta.
        count: number of tokens, or of other units, over which both losses are summed.
        unit: singular noun for the unit, for example "token".
        ours: whether this is the control, which uses this program's accounting.
        is_uncounted: whether the check is shown only for comparison, because its claimed loss is
            computed differently from the published loss.
        location: context of the largest loss, in the words of claim-check.
    """

    query: GivenDistributions
    neighbour: str
    realised: float
    claimed: float
    order: float | None = None
    count: int = 1
    unit: str = "token"
    ours: bool = False
    is_uncounted: bool = False
    location: str = ""

    @property
    def setting(self) -> str:
        """Parameters of the mechanism."""
        return self.query.setting_label + ", charged 4 D" * self.is_uncounted

    @property
    def loss_ratio(self) -> float:
        return self.realised / self.claimed

    @property
    def verdict(self) -> str:
        if self.realised <= self.claimed * (1 + _ROUNDING):
            return "holds"
        return f"exceeded, {self.loss_ratio:.3g} times"


Checks = Iterator[PromiseCheck]


@dataclass(frozen=True)
class GivenDistributions:
    """Query of a published promise: the models' distributions over a few tokens.

    Raise AuditError unless all are probability distributions over the same number of tokens.

    Args:
        name: name of the query.
        public: distribution of the public model.
        private: distribution of the examined member.
        other: distribution of all other members.
        parameters: number of model parameters, if the query is about the scale of noise instead of
            distributions.
        settings: all sets of mechanism parameters to check.
        setting: the set of mechanism parameters that this check uses.
    """

    name: str = ""
    public: tuple[float, ...] = ()
    private: tuple[float, ...] = ()
    other: tuple[float, ...] = ()
    parameters: int = 0
    settings: tuple[dict[str, Any], ...] = ({},)
    setting: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for distribution in filter(None, (self.public, self.private, self.other)):
            if (
                abs(sum(distribution) - 1) > _MASS
                or min(distribution) < 0
                or len(distribution) != len(self.public)
            ):
                raise AuditError(
                    "expected distributions of one width and of total mass 1 in the query "
                    f"{self.name!r}, got {distribution}"
                )

    @property
    def setting_label(self) -> str:
        labels = []
        for name, value in self.setting.items():
            if name != "tokens":
                labels.append(f"{_SIGNS.get(name, name)} {_format_published_number(value)}")
        return ", ".join(labels)


_SIGNS = {
    "alpha": "α",
    "beta": "β",
    "members": "N",
    "batch": "B",
    "weight": "λ",
    "scale": "γ",
    "epsilon": "ε",
}


@dataclass(frozen=True)
class PublishedPromise:
    """A published promise, as in a plan's `[published]` table.

    Args:
        mechanism: name of the mechanism.
        title: title of the section.
        source: sentences about the publication.
        does: sentence about the mechanism.
        says: sentence about the promise.
        reading: sentence about our reading of the promise.
        holds: sentence for a promise that holds.
        fails: sentence for a promise that does not hold.
        options: options of the mechanism.
        query: queries to check.
    """

    mechanism: str
    title: str = ""
    source: tuple[str, ...] = ()
    does: str = ""
    says: str = ""
    reading: str = ""
    holds: str = ""
    fails: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    query: tuple[GivenDistributions, ...] = ()

    @classmethod
    def from_published_table(cls, title: str, raw: Options) -> PublishedPromise:
        """Parse a `[published]` table (`raw`). Raise AuditError for an unknown field or
        mechanism.
        """
        promise = from_json(cls, {**raw, "title": title}, f"{title}: published")
        refuse_unknown_names(f"mechanism in {title!r}:", [promise.mechanism], MECHANISMS)
        return promise

    @property
    def queries(self) -> list[GivenDistributions]:
        """Each query, once for each of its settings."""
        queries = []
        for query in self.query:
            for setting in query.settings:
                queries.append(replace(query, setting=setting))
        return queries

    def check_all_queries(self) -> list[PromiseCheck]:
        """Return the claimed and the actual loss for each query."""
        checks: list[PromiseCheck] = []
        for query in self.queries:
            checks += MECHANISMS[self.mechanism](query, self.options)
        return checks


# --- claim-check on a query ---


class NeighbouringModels(WrappingModel):
    """A model together with its neighbours: the models that it would be with a record more or less.

    The claim says how much the distribution of one token may differ between neighbours.
    """

    def __init__(
        self,
        served: LanguageModel,
        others: Mapping[str, LanguageModel],
        claimed: Mapping[str, tuple[float, float]],
    ) -> None:
        """Wrap the served model. others: neighbours, keyed by neighbouring relation.

        claimed: Rényi order and claimed divergence (nats) of one token, keyed by neighbouring
        relation.
        """
        super().__init__(served)
        self.others = others
        self.claimed = claimed

    def start(
        self,
        prefixes: Tensor,
        length: int,
        *,
        prompt: Tensor | None = None,
        distribution: bool = True,
    ) -> Rows:
        return self.model.start(prefixes, length, prompt=prompt, distribution=distribution)

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        return self.model.log_probs(contexts, last, prompt=prompt)

    def divergence_checks(
        self, contexts: Tensor, last: int, at: Sequence[int], order: int = 0
    ) -> Sequence[DivergenceCheck]:
        log_probs = _read_float64_log_probs(self.model, contexts, last, at)
        checks = []
        for relation, (k, claimed) in self.claimed.items():
            other_log_probs = _read_float64_log_probs(self.others[relation], contexts, last, at)
            # The claim covers both directions: either model may be the served model.
            realised = compute_two_sided_renyi(log_probs, other_log_probs, k)
            # Shape (rows, positions, 1) from (rows, positions).
            checks.append(
                DivergenceCheck(relation, k, claimed, torch.from_numpy(realised[..., None]))
            )
        return checks

    def neighbour_distributions(
        self, contexts: Tensor, last: int, at: Sequence[int]
    ) -> Sequence[Neighbours]:
        # Shape (rows, positions, 1, vocabulary): a neighbour for each relation.
        neighbours = []
        for name, other in self.others.items():
            log_probs = torch.from_numpy(_read_float64_log_probs(other, contexts, last, at))
            neighbours.append(Neighbours(name, log_probs.unsqueeze(-2)))
        return neighbours


def _read_float64_log_probs(
    model: LanguageModel, contexts: Tensor, last: int, at: Sequence[int]
) -> np.ndarray:
    # In float64: actual and claimed losses are compared to a millionth.
    distribution: np.ndarray = (
        model.log_probs(contexts, last)[:, at].double().log_softmax(-1).numpy()
    )
    return distribution


def check_published_query(
    model: LanguageModel,
    query: GivenDistributions,
    only: Sequence[str] = (),
    is_own_bound: bool = False,
) -> list[PromiseCheck]:
    """Return the result of claim-check for each neighbouring relation.

    only: relations to check; all relations if empty. is_own_bound: whether this program's own
    accounting is checked. Raise AuditError if claim-check reports that a different claim is broken.
    """
    # A context of one token: the given distributions ignore it.
    probe = ClaimCheck(draws=256)
    secrets = [Secret("query", (0,), (0,), alias=_ALIAS)]
    results = observe_all_secrets(probe, View(query.name, model, WHITE_BOX, seed=0), secrets)
    checks = []
    values = results[0].values
    # the first violation of each relation counts
    stray = dict.fromkeys(probe.claim_violations(secrets, results))
    for relation in only or list_claimed_relations(results):
        words = relation.replace("_", " ")
        violation = next((line for line in stray if line.startswith(f"{words},")), "")
        stray.pop(violation, None)
        checks.append(
            PromiseCheck(
                query,
                words,
                values[f"realised_{relation}"],
                values[f"claimed_{relation}"],
                values[f"order_{relation}"],
                ours=is_own_bound,
                location=violation,
            )
        )
    for line in stray:
        raise AuditError(f"expected {query.name!r} to break nothing but the examined claim: {line}")
    return checks


def _compute_exact_epsilon(
    model: LanguageModel, other: LanguageModel, tokens: int, delta: float
) -> float:
    # Any context will do, because these models ignore it: T tokens are T independent draws.
    context = torch.zeros(1, 1, dtype=torch.long)
    log_probs = _read_float64_log_probs(model, context, 1, [0])[0, 0]
    other_log_probs = _read_float64_log_probs(other, context, 1, [0])[0, 0]
    return compute_exact_game_epsilon(log_probs, other_log_probs, tokens, delta)


# --- the mechanisms ---


def check_published_dp_fusion_claim(query: GivenDistributions, options: Options) -> Checks:
    """Check the claim of DP-Fusion for one private group (formulas C5).

    DP-Fusion mixes an ensemble within a divergence radius. options: options of the mechanism.
    """
    alpha = int(query.setting["alpha"])
    beta = float(query.setting["beta"])
    delta = float(options.get("delta", 1e-5))
    radius = alpha * beta
    mix = partial(make_constant_radius_projection, alpha, radius)
    models = []
    for distribution in (query.private, query.other):
        ensemble = build_fixed_ensemble(query.public, distribution)
        # 1.0: the only private group is queried for every token, never left out by chance
        models.append(PMixedModel(ensemble, 1.0, mix, "DP-Fusion"))
    served, other = models
    neighbours: dict[str, LanguageModel] = {
        "replace": other,
        "zero_out": FixedDistribution(query.public),
    }
    yield from check_published_query(
        NeighbouringModels(served, neighbours, dict.fromkeys(neighbours, (alpha, 4 * beta))), query
    )
    # 4 D a token, where D is the radius alpha beta itself (the plan's `reading`).
    (check,) = check_published_query(
        NeighbouringModels(served, neighbours, {"replace": (alpha, 4 * radius)}), query
    )
    yield replace(check, is_uncounted=True)
    for tokens in query.setting.get("tokens", ()):
        # 4 beta of Renyi divergence a token, converted to an epsilon by Mironov 2017, Proposition
        # 3.
        claimed = 4 * beta * tokens + math.log(1 / delta) / (alpha - 1)
        exact = _compute_exact_epsilon(served, other, tokens, delta)
        yield PromiseCheck(query, "replace", exact, claimed, count=tokens)
    # Hoelder (Mironov 2017, Proposition 11), both terms at order alpha; against the public model,
    # the radius itself.
    lower = alpha**2 / (2 * alpha - 1)
    bounds = {
        "replace": (lower, radius * (2 * alpha - 1) / (alpha - 1)),
        "zero_out": (float(alpha), radius),
    }
    yield from check_published_query(
        NeighbouringModels(served, neighbours, bounds), query, is_own_bound=True
    )


def check_published_pmixed_claim(query: GivenDistributions, options: Options) -> Checks:
    members = int(query.setting["members"])
    share = float(query.setting["q"])
    ensemble = build_fixed_ensemble(query.public, query.private, *[query.other] * (members - 1))
    common = {}
    for name in _PMIXED_OPTIONS & options.keys():
        common[name] = options[name]
    defenses = [
        (PMixed(**common, q=share, accounting="published"), ("add_remove", "zero_out"), False),
        (PMixed(**common, q=share, adjacency="add_remove"), ("add_remove",), True),
        (PMixed(**common, q=share, adjacency="zero_out"), ("zero_out",), True),
    ]
    for defense, only, is_control in defenses:
        # Target and public model are equal: only the ensemble knows the private distributions.
        model = defense.protect(
            Scenario(ensemble.public, ensemble.public, ensemble, defense.queries, 1)
        )
        yield from check_published_query(model, query, only, is_control)
        for relation in only:
            # Member 0 is the examined member.
            exact = _compute_exact_epsilon(
                model, model.neighbour_model(relation, 0), defense.queries, defense.delta
            )
            words = relation.replace("_", " ")
            count = defense.queries
            yield PromiseCheck(query, words, exact, defense.epsilon, count=count, ours=is_control)


def check_published_adp_claim(query: GivenDistributions, options: Options) -> Checks:
    """Check one step of ADP on two batches: with and without a record of privacy probability 1.

    The batches get noise of different scales (Wu et al. 2022, Eq. 5 and 6). options: options of the
    mechanism.
    """
    scale = float(query.setting["scale"])
    batch = int(query.setting["batch"])
    sigma = float(options["sigma"])
    delta = float(options["delta"])
    order = 2
    # ADP scales its noise by the batch's mean privacy probability (Wu et al. 2022, Eq. 5):
    # without a record of probability 1 that mean is smaller.
    without = (scale * batch - 1) / (batch - 1)
    # Mironov 2017, Corollary 3: a gradient of norm C, constant noise.
    charged = order / (2 * (scale * sigma) ** 2)
    # mu = sensitivity / noise; the bound C on the gradient cancels.
    charged_epsilon = compute_gaussian_epsilon(1 / (scale * sigma), delta)
    for other, is_control in ((without, False), (scale, True)):
        noise = scale * sigma
        other_noise = other * sigma
        # The gradient is the same with and without the record: only the noise differs.
        realised = max(
            compute_noise_scale_divergence(order, query.parameters, noise, other_noise),
            compute_noise_scale_divergence(order, query.parameters, other_noise, noise),
        )
        relation = "record in or out" + ", γ public" * is_control
        yield PromiseCheck(query, relation, realised, charged, order, unit="step", ours=is_control)
        if not is_control:
            exact = compute_noise_scale_epsilon(query.parameters, noise, other_noise, delta)
            yield PromiseCheck(query, relation, exact, charged_epsilon, unit="step")


def check_published_uniform_mixing_claim(query: GivenDistributions, options: Options) -> Checks:
    defense = UniformMixing(weight=float(query.setting["weight"]))
    public = FixedDistribution(query.public)
    served = defense.protect(Scenario(FixedDistribution(query.private), public, None, 1, 1))
    other = defense.protect(Scenario(FixedDistribution(query.other), public, None, 1, 1))
    # Pure epsilon (Majmudar et al. 2022, Eq. 2), which two one-hot distributions attain.
    epsilon = compute_uniform_mixing_epsilon(defense.weight, public.vocab_size)
    relation = "any_two_models"
    yield from check_published_query(
        NeighbouringModels(served, {relation: other}, {relation: (math.inf, epsilon)}), query
    )
    for tokens in query.setting.get("tokens", ()):
        claimed = compute_uniform_mixing_epsilon(defense.weight, public.vocab_size, tokens)
        # Delta 0: the promise is pure.
        exact = _compute_exact_epsilon(served, other, tokens, 0.0)
        yield PromiseCheck(query, "any two models", exact, claimed, count=tokens)


def check_published_invisible_ink_claim(query: GivenDistributions, options: Options) -> Checks:
    batch = int(query.setting["batch"])
    epsilon = float(query.setting["epsilon"])
    defense = InvisibleInk(epsilon=epsilon, batch=batch, **options)
    public = FixedDistribution(query.public)
    scenario = Scenario(
        public, public, None, defense.queries, 1, prompts=(Prompt(_ALIAS, (0,), (0,)),)
    )
    protected = defense.protect(scenario)
    assert isinstance(protected, InvisibleInkModel)
    ensemble = build_fixed_ensemble(query.public, query.private, *[query.other] * (batch - 1))
    # The defense reads its batch of records in context; here their distributions are given, its
    # options stay.
    model = InvisibleInkModel(ensemble, protected.ink, protected.name, protected.promise)
    yield from check_published_query(model, query, ("zero_out", "range_zero_out"))
    exact = _compute_exact_epsilon(
        model, model.neighbour_model("zero_out", 0), defense.queries, defense.delta
    )
    yield PromiseCheck(query, "zero out", exact, epsilon, count=defense.queries)


MECHANISMS: Mapping[str, Callable[[GivenDistributions, Options], Checks]] = {
    "dp-fusion": check_published_dp_fusion_claim,
    "pmixed": check_published_pmixed_claim,
    "adp": check_published_adp_claim,
    "uniform-mixing": check_published_uniform_mixing_claim,
    "invisible-ink": check_published_invisible_ink_claim,
}


# --- the page ---

INTRO = """# Published claims under `claim-check`

Made by `audit reproduce claims` (`claims.md` in its folder): every number below is found when it is run, in seconds.

Each claim is read in the way that asks least of it, and held to distributions of a few tokens where it is hardest to
keep: both neighbours are served as published, and the divergence of their next-token distributions is held against what
the claim charges for a token. What T tokens cost follows exactly from both distributions. One number above its claim
refutes it; a claim that holds at these queries is not proved by it. The control is our accounting of the same mechanism
at the same query. All numbers are nats. Distributions like these are not met in every document: a claim that is refuted
here may be kept in most answers, and a promise is about all of them.
"""  # noqa: E501


def build_published_promise_table(
    claim: PublishedPromise, checks: Sequence[PromiseCheck]
) -> tables.RowTable:
    """Return a table with a row for each check."""
    head = ("query", "setting", "neighbour", "what", "realised", "claimed", "verdict")
    rows = []
    for check in checks:
        labels = (check.query.name, check.setting, check.neighbour)
        losses = map(_format_published_number, (check.realised, check.claimed))
        rows.append((*labels, _format_promised_quantity(check), *losses, check.verdict))
    return tables.RowTable(claim.title, head, rows)


def build_published_promise_section(claim: PublishedPromise, checks: Sequence[PromiseCheck]) -> str:
    """Return a published privacy promise, with our checks, as a Markdown section of the ledger."""
    # Checks with `is_uncounted` are in the table, but not counted in the verdict.
    published = []
    counted = []
    controls = []
    for check in checks:
        if check.ours:
            controls.append(check)
            continue
        published.append(check)
        if not check.is_uncounted:
            counted.append(check)
    outcome = _promise_outcome_sentence(counted)
    parts = [f"## {claim.title}", f"{claim.does} {claim.says}", outcome]
    sentences = {"Reading": claim.reading, "What holds": claim.holds, "What does not": claim.fails}
    for name, sentence in sentences.items():
        if sentence:
            parts.append(f"*{name}:* {sentence}")
    parts.append(_render_promise_table(claim, published))
    if controls:
        outcome = _promise_outcome_sentence(controls)
        parts.append(f"*The control*, our accounting of the same: {outcome}")
        parts.append(_render_promise_table(claim, controls))
    parts.append(f"*The queries:* {' '.join(map(_describe_published_query, claim.query))}")
    parts.append(f"*Sources:* {' '.join(claim.source)}")
    return "\n\n".join(parts) + "\n"


def _render_promise_table(claim: PublishedPromise, checks: Sequence[PromiseCheck]) -> str:
    return "\n".join(tables.render_markdown_lines(build_published_promise_table(claim, checks)))


def _promise_outcome_sentence(checks: Sequence[PromiseCheck]) -> str:
    worst = max(checks, key=lambda check: check.loss_ratio)
    n_bad = sum(check.verdict != "holds" for check in checks)
    at = f"{worst.query.name}, {worst.setting}, {worst.neighbour}"
    numbers = (
        f"{_format_published_number(worst.realised)} nats realised, "
        f"{_format_published_number(worst.claimed)} claimed, {_format_promised_quantity(worst)}"
    )
    if not n_bad:
        return f"**Holds** in all {len(checks)} comparisons; nearest to it: {at}: {numbers}."
    quote = ""
    if worst.location:
        quote = f' claim-check: "VIOLATED: {worst.location}".'
    return (
        f"**Does not hold** in {n_bad} of {len(checks)} comparisons; worst: {at}: {numbers}.{quote}"
    )


def _format_promised_quantity(check: PromiseCheck) -> str:
    if check.order is None:
        return f"ε of {check.count:,} {check.unit}{'s' * (check.count > 1)}"
    if math.isinf(check.order):
        return f"a {check.unit}, pure"
    return f"a {check.unit}, order {_format_published_number(check.order)}"


def _format_published_number(value: float) -> str:
    if isinstance(value, int) or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _describe_published_query(query: GivenDistributions) -> str:
    if query.parameters:
        return f"{query.name}: noise on {query.parameters:,} parameters."
    distributions = {
        "public": query.public,
        "the examined one": query.private,
        "the other": query.other,
    }
    # Ten digits: 0.9999995 must not be shown as 1.
    labels = []
    for role, masses in distributions.items():
        if masses:
            labels.append(f"{role} ({', '.join(map('{:.10g}'.format, masses))})")
    return f"{query.name}: {'; '.join(labels)}."
