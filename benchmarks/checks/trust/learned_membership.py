"""Whether a membership score that is learned on some models finds members of others: of a family and of data unseen.

    python -m benchmarks.checks.trust.learned_membership ARRAYS TOKENIZER OUT

ARRAYS, TOKENIZER: as `benchmarks.checks.trust.real_text` takes them. OUT keeps what was seen of each world
(`membership_worlds`), of which it is known for free who is a member, and gets page.md. A classifier of numbers of
tokens is fitted to the worlds of two families and three kinds of text and asked about the third family and the fourth
kind; which classifier is chosen among the families that it is fitted to. The formulas are asked about the same records.
A quarter of an hour of one core, about half of it for LiRA's references.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import ttest_1samp
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from auditor.statistics import membership, roc
from benchmarks.checks.harness import Page, run
from benchmarks.checks.trust.membership_worlds import MembershipWorld, Sizes, worlds

Floats = NDArray[np.float64]

SIZES = Sizes()
RATES = (0.01, 0.001)
FORMULAS = ("ez_mia", "wbc", "min_k_plus", "min_k_plus_calibrated", "reference", "loss")
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


# --- scores -----------------------------------------------------------------------------------------------------------


def features(seen: dict[str, Floats]) -> Floats:
    """(records, k): what tokens say of the target, of the public model and of the difference, and the formulas."""
    one = {name: seen[name] for name in ("log_prob", "rank", "margin")} | {"away": away(seen)}
    base = {name: seen[f"base_{name}"] for name in ("log_prob", "rank", "margin")} | {"away": away(seen, "base_")}
    gained = {name: one[name] - base[name] for name in one}
    tokens = [*one.values(), base["log_prob"], *gained.values()]
    pooled = [number(values) for values in tokens for number in POOLS]
    delta, length = gained["log_prob"], seen["rank"].shape[1]
    zones = (seen["rank"] > 0, seen["base_rank"] > 0, seen["before"] > 0, seen["before"] == 0)
    place = np.broadcast_to(np.arange(length) < length // 2, delta.shape)
    within = [np.where(zone, delta, 0.0).sum(1) / np.maximum(zone.sum(1), 1) for zone in (*zones, place, ~place)]
    shares = [share.mean(1) for share in (*zones[:3], zones[1] & ~zones[0], delta > 0)]
    found = np.column_stack([*pooled, *within, *shares, *formulas(seen).values()])
    return np.asarray(found, dtype=np.float64)


POOLS: tuple[Callable[[Floats], Floats], ...] = (
    lambda values: values.mean(1),
    lambda values: values.std(1),
    *(lambda values, at=at: np.quantile(values, at, axis=1) for at in QUANTILES),
)


def away(seen: dict[str, Floats], whose: str = "") -> Floats:
    """Min-K%++'s number of each token."""
    return membership.standardised_log_probs(*(seen[f"{whose}{name}"] for name in ("log_prob", "mean", "deviation")))


def formulas(seen: dict[str, Floats]) -> dict[str, Floats]:
    """(records,) of each of `FORMULAS`, as `auditor.statistics.membership` has them."""
    delta, wrong = seen["log_prob"] - seen["base_log_prob"], seen["rank"] > 0
    lowest = partial(membership.mean_of_lowest, share=0.2)
    plus = np.array([lowest(one) for one in away(seen)])
    found = {
        "ez_mia": np.array([membership.error_zone_score(*pair) for pair in zip(delta, wrong, strict=True)]),
        "wbc": np.array([membership.window_comparison_score(one) for one in delta]),
        "min_k_plus": plus,
        "min_k_plus_calibrated": plus - np.array([lowest(one) for one in away(seen, "base_")]),
        "reference": delta.mean(1),
        "loss": seen["log_prob"].mean(1),
    }
    return {name: found[name] for name in FORMULAS}


@dataclass(frozen=True)
class ClassifierRecipe:
    """A classifier, and whether each number is first held against those of all records of its own world.

    That asks for no label; it does take for granted that a world has about as many members as others had.
    """

    name: str
    classifier: Callable[[], Any]
    own_scale: bool

    def rows(self, values: Floats) -> Floats:
        """values: (records, k) of one world."""
        return (values - values.mean(0)) / (values.std(0) + 1e-9) if self.own_scale else values

    def fitted(self, known: Sequence[Asked]) -> Any:
        rows = np.concatenate([self.rows(one.features) for one in known])
        return self.classifier().fit(rows, np.concatenate([one.member for one in known]))

    def scores(self, fitted: Any, asked: Asked) -> Floats:
        return np.asarray(fitted.decision_function(self.rows(asked.features)), dtype=np.float64)


def _linear() -> Any:
    return make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))


def _boosted() -> Any:
    return HistGradientBoostingClassifier(max_iter=60, max_leaf_nodes=15, max_bins=32, random_state=0)


RECIPES = tuple(
    ClassifierRecipe(f"{name}{', own scale' if own else ''}", made, own)
    for name, made in (("logistic", _linear), ("boosted", _boosted))
    for own in (False, True)
)


@dataclass(frozen=True)
class Asked:
    """A world as a classifier sees it, and its scores by name."""

    family: str
    kind: str
    seed: int
    member: NDArray[np.bool_]
    features: Floats
    scores: dict[str, Floats]

    def rate(self, scores: Floats, rate: float) -> float:
        return roc.tpr_at_fpr(scores[self.member], scores[~self.member], rate).value

    def numbers(self, name: str) -> tuple[float, ...]:
        """AUC, and the members found at each of `RATES`, at thresholds that this world's own non-members set."""
        scores = self.scores[name]
        found = roc.auc(scores[self.member], scores[~self.member])
        return (found, *(self.rate(scores, rate) for rate in RATES))


def asked_of(one: MembershipWorld) -> Asked:
    found = formulas(one.seen) | {"lira": one.lira}
    return Asked(one.family, one.kind, one.seed, one.member, features(one.seen), found)


def learn(every: Sequence[Asked]) -> Counter[str]:
    """Adds to each world the scores of what was learnt elsewhere; how often each recipe was chosen.

    learned: of other families and other kinds of text. same: of the same ones too, of other seeds: what is lost on the
    way to a family and text unseen.
    """
    chosen: Counter[str] = Counter()
    for family, kind in dict.fromkeys((one.family, one.kind) for one in every):
        known = apart(every, family, kind)
        recipe = choose(known)
        chosen[recipe.name] += 1
        fitted = recipe.fitted(known)
        for one in every:
            if (one.family, one.kind) == (family, kind):
                one.scores["learned"] = recipe.scores(fitted, one)
    usual = next(recipe for recipe in RECIPES if recipe.name == chosen.most_common(1)[0][0])
    for seed in sorted({one.seed for one in every}):
        fitted = usual.fitted([one for one in every if one.seed != seed] or every)
        for one in every:
            if one.seed == seed:
                one.scores["same"] = usual.scores(fitted, one)
    return chosen


def apart(every: Sequence[Asked], family: str, kind: str) -> list[Asked]:
    """The worlds that share neither family nor kind of text with this one."""
    return [one for one in every if one.family != family and one.kind != kind]


def choose(known: Sequence[Asked]) -> ClassifierRecipe:
    """The recipe that finds most at 1%, of families that it was not fitted to."""
    families = sorted({one.family for one in known})

    def found(recipe: ClassifierRecipe) -> float:
        rates = list[float]()
        for family in families:
            fitted = recipe.fitted([one for one in known if one.family != family])
            held = [one for one in known if one.family == family]
            rates += [one.rate(recipe.scores(fitted, one), RATES[0]) for one in held]
        return float(np.mean(rates))

    return max(RECIPES, key=found)


# --- the page ---------------------------------------------------------------------------------------------------------


def main(arrays: Path, tokenizer: Path, out: Path) -> None:
    torch.set_num_threads(1)
    every = [asked_of(one) for one in worlds(arrays, tokenizer, out, SIZES)]
    chosen = learn(every)
    page = Page(out / "page.md")
    members, others = (sum(int((one.member == side).sum()) for one in every) for side in (True, False))
    page.say(f"{len(every)} worlds, {members:,} members, {others:,} non-members; chosen: {dict(chosen)}")
    page.say()
    names = ["learned", "same", *FORMULAS, "lira"]
    table(page, every, names)
    for by in ("family", "kind", "seed"):
        page.say()
        breakdown(page, every, names, by)


def table(page: Page, every: Sequence[Asked], names: Sequence[str]) -> None:
    """Means over worlds, and what `learned` finds more of, in pairs of worlds."""
    heads = ("AUC", *(f"found at {rate:.1%}" for rate in RATES))
    page.head("score", *heads, *(f"learned minus it, {head}" for head in heads))
    own = np.array([one.numbers("learned") for one in every])
    for name in names:
        values = np.array([one.numbers(name) for one in every])
        more = [shown(column) for column in (own - values).T] if name != "learned" else [""] * len(heads)
        page.row(name, *map(shown, values.T), *more)


def breakdown(page: Page, every: Sequence[Asked], names: Sequence[str], by: str) -> None:
    """Found at 1% and at 0.1%, by what was held out."""
    page.head(by, *names)
    for value in dict.fromkeys(getattr(one, by) for one in every):
        among = [one for one in every if getattr(one, by) == value]
        means = [np.mean([one.numbers(name)[1:] for one in among], axis=0) for name in names]
        page.row(value, *(" · ".join(f"{share:.1%}" for share in mean) for mean in means))


def shown(values: Floats) -> str:
    """The mean with Student's 95% interval: worlds are what is drawn, each for itself."""
    low, high = ttest_1samp(values, 0.0).confidence_interval(0.95)
    return f"{values.mean():.3f} [{low:.3f} to {high:.3f}]"


if __name__ == "__main__":
    raise SystemExit(run(main))
