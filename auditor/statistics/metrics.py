"""Define all measurements in one table, with their names, units and formulas.

Code that depends on the kind of measurement reads this table: for an attack's measurements, the
pairing of runs by secret, a gate's bounds, a sweep's columns and a report's words. Any name absent
from the table belongs to a plug-in. Reports show the plug-in's measurement, and comparisons pair
its values by secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from auditor.core.arrays import Bools, Floats
from auditor.core.result import Measurement
from auditor.statistics import documents, people, roc
from auditor.statistics.bootstrap import Draws, Values
from auditor.statistics.intervals import estimate_mean, subtract_nonmember_share
from auditor.statistics.judging import SCORE, Outcome
from auditor.statistics.membership import BELOW, FALSE_POSITIVES, SCORES
from auditor.statistics.ranking import compute_resampled_recall, measure_error_recall

SHARES = ("share", "probability")  # units between 0 and 1, written in percent
RECALL = "recall"
_OTHERS = "_nonmembers"
EXCESS = "excess_"
DRAWN = "memorised_per_1000"  # counted in each drawn text, not for each secret
# Suffixes of the ends of a bracket, if the exact value is unknown.
AT_LEAST = "_at_least"
AT_MOST = "_at_most"
# A lower bound; the upper bound is NEAR_PROBABILITY + AT_MOST.
NEAR_PROBABILITY = "near_verbatim_probability"

# Traits that group secrets by person or record: a metric with such a trait counts groups.
_CLUSTERS = (people.USER, documents.RECORD)

# Per-secret values, (secrets,), by the metric that is their mean.
Columns = Mapping[str, Floats]

OfSecrets = Callable[[Outcome], Floats | Bools]


@dataclass(frozen=True)
class Metric:
    """A measurement, or a family of measurements with numbers in place of `{n}` and `{p}`.

    The fields from `values` on define how to compute the measurement from an attack's guesses. It
    is the mean of `values` over the secrets that `among` selects. A metric with `errors` is instead
    the recall before that many wrong guesses. A probe computes its measurements itself.
    """

    name: str
    title: str
    unit: str = "share"
    exact: bool = False  # a count of secrets, so its bounds are exact
    # whether secrets.parquet contains the values of which it is the mean
    per_secret: bool = False
    signed: bool = False  # one share minus another
    bounded: bool = True  # whether it has an interval, as every metric of a gate must
    # a number about the model, not about an attack, so no gate can use it
    of_model: bool = False
    members: bool = True  # whether it is measured on members; otherwise on non-members
    short: str = ""  # its short name, for narrow columns
    place: int = 0  # rank of its column, headed `short`, in a table of several runs; 0: no column
    varies: bool = False  # shown in that table only if it differs between lines
    note: str = ""
    values: OfSecrets | None = None  # NaN if unknown
    among: Callable[[Outcome], Bools] | None = None  # None: all secrets
    trait: str = ""  # trait of the outcome that the metric needs
    # (number of secrets, number in the name) -> wrong guesses
    errors: Callable[[int, int], int] | None = None
    number: int = 0  # the number in the name of a family's member
    # column of scores that separate members from non-members; the metric measures how well
    scores: str = ""
    # False-positive rate at which it is the share of members found; 0: it is the AUC.
    rate: float = 0.0
    below: float = 0.0  # it is the mean of those shares over all rates up to this one; 0: it is not

    @property
    def is_gateable(self) -> bool:
        """Return whether a gate may set a limit on this metric."""
        return self.bounded and not self.of_model

    @property
    def per_secret_column_name(self) -> str:
        """Return the name of the column that stores the metric's value for each secret.

        The metric is the mean of this column.
        """
        return self.name.removesuffix(_OTHERS)

    @property
    def columns_to_recompute(self) -> tuple[str, ...]:
        """Return the per-secret columns that a run must store to recompute the metric."""
        if self.scores:
            return (self.scores,)
        if self.errors:
            return (RECALL, SCORE)
        return (self.per_secret_column_name,)

    @property
    def is_of_member_guesses(self) -> bool:
        """Return whether the metric is computed from an attack's guesses for single members."""
        return (
            self.members
            and not self.signed
            and self.trait not in _CLUSTERS
            and bool(self.values or self.errors)
        )

    def compute_wrong_guess_limit(self, n: int) -> int:
        """Return the number of wrong guesses after which right guesses no longer count.

        n: the number of ranked secrets.
        """
        assert self.errors is not None  # callers check it
        return self.errors(n, self.number)

    def fill_numbers(self, *numbers: str) -> Metric:
        """Return the metric of this family with these numbers in its name."""
        values = dict(zip(("n", "p"), numbers, strict=False))
        return replace(
            self,
            name=self.name.format(**values),
            title=self.title.format(**values),
            number=int(numbers[0]),
        )

    def parse_numbers(self, name: str) -> tuple[str, ...] | None:
        """Return the numbers in a metric's name; None if it belongs to a different family."""
        pattern = (
            re.escape(self.name)
            .replace(r"\{n\}", "([0-9]{1,15})")
            .replace(r"\{p\}", "([0-9.e-]{1,15})")
        )
        match = re.fullmatch(pattern, name)
        return match.groups() if match else None

    # --- metrics of guesses ---

    def measure(self, members: Outcome, others: Outcome) -> Measurement | None:
        """Return the metric's measurement with its interval; None if it needs more guesses."""
        outcome = members if self.members else others
        if self.errors is not None:
            return measure_error_recall(
                self.name, outcome, self.compute_wrong_guess_limit(len(outcome.ids))
            )
        of_others = self.signed or not self.members
        if (
            self.values is None
            or (self.trait and self.trait not in outcome.columns)
            or (of_others and not len(others.ids))
        ):
            return None
        values = self.values(outcome)
        if self.signed:
            return subtract_nonmember_share(self.name, values == 1, self.values(others) == 1)
        if self.among is not None:
            values = values[self.among(outcome)]
        # not known of some: the mean of the others would be another number
        if not np.isfinite(values).all():
            return None
        if not len(values) and (self.unit != "share" or self.trait in _CLUSTERS):
            return None
        return estimate_mean(self.name, values.astype(float), self.unit, self.note)

    def compute_resampled_values(self, outcome: Outcome, draws: Draws) -> Values:
        """Return the metric of every resample of the members, of shape (resamples,).

        draws: (resamples, members) counts. Only valid if `is_of_member_guesses`.
        """
        if self.errors is not None:
            return compute_resampled_recall(
                outcome.hit, outcome.score, draws, self.compute_wrong_guess_limit(len(outcome.ids))
            )
        assert self.values is not None  # callers check `is_of_member_guesses`
        weights = draws
        if self.among is not None:
            weights = draws * self.among(outcome)
        total = weights.sum(1)
        values = self.values(outcome).astype(float)
        # An unknown value is NaN, and 0 times NaN is still NaN.
        sums = weights @ np.where(weights.any(0), values, 0.0)
        return np.divide(sums, total, out=np.full(len(draws), np.nan), where=total > 0)


# --- metrics of membership probes ---

OF_TEXT = {  # scores that need no model
    "ngrams": "n-grams of released text against those of other records",
    "bigrams": "bigrams of released text",
    "likeness": "likeness to released text",
}
# Scores that have not seen the target.
CONTROLS = {"blind": "blind baseline", "reference_alone": "the reference alone"}


# On the texts that members and non-members have in common.
ADJUSTED_AUC = "adjusted_membership_auc"


def name_auc(score: str) -> str:
    """Return the name of the AUC of a membership score; score: "" for the strongest score."""
    if score in CONTROLS:
        return f"{score}_auc"
    if score:
        return f"membership_auc_{score}"
    return "membership_auc"


def name_tpr_metric(score: str, rate: float) -> str:
    """Return the name of a score's true-positive rate, such as `tpr_at_1pct_fpr_loss`.

    rate: the false-positive rate.
    """
    return "_".join(filter(None, (f"tpr_at_{100 * rate:g}pct_fpr", score)))


def name_partial_auc_metric(score: str) -> str:
    """Return the name of a score's partial AUC.

    The partial AUC is the mean true-positive rate at low false-positive rates.
    """
    return "_".join(filter(None, (f"partial_auc_{100 * BELOW:g}pct_fpr", score)))


def name_score_column(score: str) -> str:
    """Return the column name of a membership score; score: "" for the strongest score."""
    return "_".join(filter(None, ("membership_score", score)))


def _list_membership_metrics() -> Iterator[Metric]:
    title = "Membership AUC, adjusted for how the texts differ"
    yield Metric(ADJUSTED_AUC, title, roc.AUC)
    for score, title in {"": "", **CONTROLS, **SCORES, **OF_TEXT}.items():
        yield from _list_score_metrics(score, title)


def _list_score_metrics(score: str, title: str) -> Iterator[Metric]:
    by = f" ({title})" if title else ""
    short = "AUC" if not score else ""
    column = name_score_column(score)
    yield Metric(name_auc(score), f"Membership AUC{by}", roc.AUC, short=short, scores=column)
    for rate in FALSE_POSITIVES:
        label = f"Members found at {100 * rate:g}% false positives{by}"
        yield Metric(name_tpr_metric(score, rate), label, scores=column, rate=rate)
    mean = f"Members found, mean up to {100 * BELOW:g}% false positives{by}"
    yield Metric(name_partial_auc_metric(score), mean, scores=column, below=BELOW)


def _find_plugin_score_metric(name: str) -> Metric | None:
    """Return the metric of a plug-in's membership score, such as `membership_auc_mine`.

    Return None for any other name.
    """
    for prefix in (
        name_auc(""),
        *(name_tpr_metric("", rate) for rate in FALSE_POSITIVES),
        name_partial_auc_metric(""),
    ):
        score = name.removeprefix(f"{prefix}_")
        if score != name:
            return next(m for m in _list_score_metrics(score, make_label(score)) if m.name == name)
    return None


# --- metrics of untargeted extraction ---

_PER_1000 = "per 1,000"
RANKINGS = {
    "perplexity": "perplexity",
    "zlib": "zlib",
    "lowercase": "lower case",
    "reference": "reference",
}


def _list_generation_metrics() -> Iterator[Metric]:
    main = "Memorised n-grams per 1,000 generations"
    yield Metric("memorised_per_1000", main, _PER_1000, short="n-grams/1,000")
    yield Metric(
        "common_per_1000",
        "N-grams in both training data and held-out text per 1,000 generations",
        _PER_1000,
    )
    yield Metric("memorised_generations", "Generations that hold a memorised n-gram", exact=True)
    yield Metric("records_out", "Training records extracted", "count")
    yield Metric(
        "new_records_per_1000", "New records per 1,000 generations to come (Good–Turing)", _PER_1000
    )
    yield Metric("records_to_come_out", "Records extracted in the end, at least (Chao)", "records")
    for name, title in RANKINGS.items():
        label = f"Memorised among the first 100 by {title}"
        yield Metric(f"memorised_in_top_100_{name}", label, exact=True)


# --- the table ---

_NEAR = "at most a fifth of the tokens edited"

_share_of_secrets = partial(Metric, exact=True, per_secret=True)
_share_of_nonmembers = partial(Metric, exact=True, members=False)
_mean_probability = partial(Metric, unit="probability", per_secret=True)
DISCOVERABLE = _share_of_secrets("discoverable_{n}_{p}", "({n}, {p})-discoverable")
EXTRACTED = _share_of_secrets(
    "extracted_{n}_{p}", "({n}, {p})-discoverable, above the non-members' threshold"
)
EXPECTED_ANY_OF = _mean_probability("expected_any_of_{n}", "Expected recall of any of {n}")
_AT_ERRORS = Metric("recall_at_{n}_errors", "Recall at {n} errors", errors=lambda n, number: number)
_AT_SHARE = Metric(
    "recall_at_{n}pct_errors",
    "Recall at {n}% errors",
    errors=lambda n, percent: max(1, n * percent // 100),
)
FAMILIES = (
    _AT_ERRORS,
    _AT_SHARE,
    EXPECTED_ANY_OF,
    DISCOVERABLE,
    EXTRACTED,
    _share_of_secrets("extraction_1_in_{n}", "Extraction probability of 1 in {n} or more"),
    _share_of_secrets(
        "near_verbatim_1_in_{n}", "Near-verbatim probability surely 1 in {n} or more"
    ),
    _share_of_secrets("rank_bound_1_in_{n}", "Extraction probability perhaps 1 in {n} or more"),
    _mean_probability("window_bound_{n}", "Likeliest window of {n} tokens, at most"),
    _share_of_secrets(
        "window_bound_{n}_1_in_{p}", "Some window of {n} tokens perhaps 1 in {p} or more"
    ),
    _mean_probability("greedy_windows_{n}", "Windows of {n} tokens that greedy decoding gives"),
)


def _mark_extracted_against_likelihood(o: Outcome) -> Floats:
    """Mark the extracted secrets whose guess was not the most likely candidate; NaN if unknown."""
    passed = o.columns["passed_over"]
    return np.where(np.isnan(passed), np.nan, o.hit & (passed == 1))


def _list_guess_metrics(
    name: str, title: str, unit: str, values: OfSecrets, trait: str = ""
) -> Iterator[Metric]:
    """Yield two metrics: the mean of `values` over right and over wrong first guesses.

    trait: the trait in `Outcome.columns` that the metrics need.
    """
    for end, among in (("right", lambda o: o.hit), ("wrong", lambda o: ~o.hit)):
        yield Metric(
            f"{name}_{end}", title.format(end), unit, trait=trait, values=values, among=among
        )


def _list_record_metrics(name: str, title: str, values: OfSecrets) -> Iterator[Metric]:
    """Yield two metrics, one for members and one for non-members.

    Each is the share of records with a part for which `values` is 1.
    """
    metric = Metric(
        name,
        title,
        exact=True,
        trait=documents.RECORD,
        values=lambda o: documents.take_highest_per_record(values(o), o.columns[documents.RECORD]),
    )
    yield metric
    yield replace(metric, name=f"{name}{_OTHERS}", title=f"{title}, non-members", members=False)


def _compute_person_recall(o: Outcome) -> Floats:
    return people.average_per_person(o.hit, o.columns[people.USER])


_mean_over_people = partial(
    Metric, unit="probability", trait=people.USER, values=_compute_person_recall
)

# Every attack measures the metrics with `values` or `errors`, in this order. From `recall_top_3`
# on, they show the rank of the true suffix, and differences between right and wrong first guesses
# (Ethicist, Table 4, Figures 6 and 7).
METRICS = (
    _share_of_secrets(
        "recall", "Recall (first guess, verbatim)", short="recall", place=1, values=lambda o: o.hit
    ),
    _share_of_secrets(
        "near_verbatim_recall",
        "Near-verbatim recall (first guess)",
        note=_NEAR,
        values=lambda o: o.is_near_verbatim,
    ),
    _share_of_secrets(
        "any_of_k", "Any of the guesses", short="any of K", place=3, values=lambda o: o.any_hit
    ),
    replace(_AT_ERRORS.fill_numbers("100"), short="recall@100", place=2),
    replace(_AT_SHARE.fill_numbers("10"), title="Recall at n/10 errors"),
    _share_of_nonmembers(
        "recall_nonmembers",
        "Recall on non-members (the baseline)",
        note="the baseline",
        values=lambda o: o.hit,
    ),
    _share_of_nonmembers(
        *("near_verbatim_recall_nonmembers", "Near-verbatim recall on non-members (the baseline)"),
        note=f"the baseline; {_NEAR}",
        values=lambda o: o.is_near_verbatim,
    ),
    _share_of_nonmembers(
        "any_of_k_nonmembers",
        "Any of the guesses on non-members (the baseline)",
        note="the baseline",
        values=lambda o: o.any_hit,
    ),
    Metric(
        "excess_recall",
        "Excess recall (members − non-members)",
        signed=True,
        values=lambda o: o.hit,
    ),
    Metric(
        "recall_top_3",
        "True suffix among the three surest candidates",
        trait="rank",
        values=lambda o: o.columns["rank"] <= 3,
    ),
    *_list_guess_metrics(
        "count",
        "Samples equal to the first guess, where it is {}",
        "samples",
        lambda o: o.columns["count"],
        "count",
    ),
    *_list_guess_metrics("score", "Score of {} first guesses", "score", lambda o: o.score),
    *_list_guess_metrics(
        "min_probability",
        "Least token probability of {} first guesses",
        "probability",
        lambda o: np.exp(o.columns["min_log_prob"]),
        "min_log_prob",
    ),
    Metric(
        *("right_against_likelihood", "Right though another candidate is more likely"),
        note="right first guesses that are not the likeliest candidate",
        trait="passed_over",
        values=_mark_extracted_against_likelihood,
    ),
    _mean_over_people(
        people.RECALL, "Recall by person: mean over people of the share of their records"
    ),
    _mean_over_people(
        f"{people.RECALL}{_OTHERS}",
        "The same for people none of whose records were trained on (the baseline)",
        members=False,
    ),
    Metric(
        *("users_extracted", "People of whom some record was extracted"),
        exact=True,
        trait=people.USER,
        values=lambda o: _compute_person_recall(o) > 0,
    ),
    Metric("recall_difference", "Difference from undefended, paired", signed=True),
    Metric("greedy", "Greedy decoding, no attack", of_model=True),
    Metric(people.INFERENCE, "Membership of people, by records that were not trained on", roc.AUC),
    Metric(people.INFERENCE_CONTROL, "The same by only the reference", roc.AUC),
    *_list_record_metrics(
        documents.RECALL, "Records of which a part was extracted verbatim", lambda o: o.hit
    ),
    *_list_record_metrics(
        documents.NEAR,
        "Records of which a part was extracted near-verbatim",
        lambda o: o.is_near_verbatim,
    ),
    Metric(documents.LONGEST, "Longest extracted block of a record", "tokens"),
    # metrics of probes
    _mean_probability(
        "extraction_probability", "Extraction probability, mean", short="chance per sample"
    ),
    _mean_probability(
        *("extraction_probability_ancestral", "Extraction probability without truncation, mean"),
        short="chance per sample",
        place=4,
        varies=True,
    ),
    _mean_probability(
        "rank_bound", "Extraction probability at any temperature, top-k or top-p, at most"
    ),
    Metric("conformal_share", "Members above the non-members' conformal threshold"),
    _mean_probability(
        NEAR_PROBABILITY, "Near-verbatim probability, mean, at least", short="chance per sample ≥"
    ),
    _mean_probability(f"{NEAR_PROBABILITY}{AT_MOST}", "Near-verbatim probability, mean, at most"),
    Metric(
        "near_verbatim_conformal_share",
        "Members above the non-members' threshold of near-verbatim probability",
    ),
    Metric("claim_violations", "Claim violations", "count"),
    Metric(
        "epsilon_data_dependent",
        "Epsilon of the examined queries, by their own distributions: no claim",
        "nats",
    ),
    Metric("exposure", "Exposure of canaries, mean bits", "bits", per_secret=True),
    Metric("exposed_share", "Canaries more exposed than chance allows", per_secret=True),
    Metric("identifiers_above_chance", "Personal data ranked above chance", exact=True),
    Metric(
        "identifiers_above_chance_nonmembers",
        "Personal data of non-members ranked above chance",
        exact=True,
        members=False,
    ),
    Metric("identifier_bits", "Rank of personal data among fresh values", "bits"),
    Metric(
        "exposure_extrapolated",
        "Exposure extrapolated from samples, mean bits",
        "bits",
        bounded=False,
    ),
    Metric(
        "epsilon_lower_bound", "Epsilon, lower bound", "nats", short="ε ≥", place=7, varies=True
    ),
    Metric(
        "epsilon_lower_bound_fdp",
        "Epsilon of the Gaussian trade-off that is refuted (f-DP)",
        "nats",
    ),
    Metric(
        "epsilon_lower_bound_shape",
        "Epsilon that is refuted of canaries of a Gaussian shape, apart from one shared coin",
        "nats",
    ),
    Metric("epsilon_best_provable", "Epsilon that the audit could have proved at best", "nats"),
    Metric("epsilon_exact", "Epsilon of the audit's own game, exactly", "nats"),
    Metric("guesses_right", "Guesses of canaries that are right", "count"),
    *_list_membership_metrics(),
    *_list_generation_metrics(),
    # metrics of models
    Metric(
        "perplexity",
        "Held-out perplexity",
        "perplexity",
        short="PPL",
        place=5,
        varies=True,
        of_model=True,
    ),
    Metric(
        "perplexity_subset_average",
        "Held-out perplexity, averaged over subsets as in the paper",
        "perplexity",
        short="PPL, subset average",
        place=6,
        varies=True,
        of_model=True,
    ),
)

# Metrics by which models are compared at equal usefulness.
LEAKS = (
    "extraction_probability",
    "exposure",
    name_tpr_metric("", max(FALSE_POSITIVES)),
    name_auc(""),
    "near_verbatim_probability",
    "recall",
)
COLUMNS = sorted((metric for metric in METRICS if metric.place), key=lambda metric: metric.place)
_BY_NAME = {metric.name: metric for metric in METRICS}
_DECLARED: dict[str, str] = {}  # titles of plug-ins' measurements


def register_plugin_titles(titles: Mapping[str, str]) -> None:
    """Register the titles of plug-ins' measurements, keyed by the measurement's name."""
    _DECLARED.update(titles)
    # An earlier call may have cached the name as the title.
    find_metric.cache_clear()


@cache
def find_metric(name: str) -> Metric:
    """Return the metric of this name: from the table, derived from the table, or a plug-in's.

    Derived names are NAME_nonmembers and excess_NAME. NAME_at_least and NAME_at_most are lower and
    upper bounds on NAME.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    for family in FAMILIES:
        if numbers := family.parse_numbers(name):
            return family.fill_numbers(*numbers)
    if plugin_score := _find_plugin_score_metric(name):
        return plugin_score
    # After the table, which has separate entries for some of these names, such as
    # `recall_nonmembers`.
    if name.endswith(_OTHERS):
        base = find_metric(name.removesuffix(_OTHERS))
        return replace(base, name=name, title=f"{base.title}, non-members", members=False)
    for end, words in ((AT_LEAST, "at least"), (AT_MOST, "at most")):
        if name.endswith(end):
            base = find_metric(name.removesuffix(end))
            return replace(base, name=name, title=f"{base.title}, {words}")
    if name.startswith(EXCESS):
        base = find_metric(name.removeprefix(EXCESS))
        return replace(
            base, name=name, title=f"{base.title}, members − non-members", exact=False, signed=True
        )
    return Metric(
        name,
        _DECLARED.get(name, make_label(name)),
        unit="",
        signed="excess" in name or "difference" in name,
    )


def is_builtin_metric(name: str) -> bool:
    """Return whether a metric is built in, that is, not a plug-in's.

    NAME_nonmembers is built in if NAME is.
    """
    return find_metric(name).unit != ""  # every entry has a unit


def name_nonmember_metric(name: str) -> str:
    """Return the name of the metric's counterpart for non-members."""
    return f"{name}{_OTHERS}"


def name_upper_bound_metric(name: str) -> str:
    """Return the name of the upper bound that matches this lower bound; "" for other names.

    name: the name of the lower bound.
    """
    if name in (NEAR_PROBABILITY, name_nonmember_metric(NEAR_PROBABILITY)):
        return name.replace(NEAR_PROBABILITY, f"{NEAR_PROBABILITY}{AT_MOST}")
    if AT_LEAST in name:
        return name.replace(AT_LEAST, AT_MOST)
    return ""


def name_excess_metric(name: str) -> str:
    """Return the name of a metric's excess, the members' value minus the non-members' value."""
    return f"{EXCESS}{name}"


def make_label(name: str) -> str:
    """Turn a name into a label: `peak_rate` becomes `Peak rate`."""
    text = name.replace("_", " ")
    return text[:1].upper() + text[1:]
