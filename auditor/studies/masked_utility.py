"""Measure how much mixing masked language models raises perplexity, at each epsilon.

This is Fig. 2 of Majmudar et al. 2022. All points of a grid score the same texts, batch by batch.
They share each forward pass of the model, and their differences are paired by text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy.special import logsumexp, softmax
from torch import Tensor

from auditor import __version__
from auditor.benchmarks.data.columns import read_data_table
from auditor.benchmarks.lab.masked_lab import MaskedLab
from auditor.conclusions.replicates import Replicates
from auditor.core.arrays import Floats, Ints
from auditor.core.errors import AuditError, refuse_unknown_names
from auditor.core.jsonable import from_json, read_json, to_json, write_json
from auditor.core.nouns import UNDEFENDED, Claim, Tokens
from auditor.core.plan import Plan
from auditor.core.plan_fields import ATTACKS
from auditor.core.result import Measurement
from auditor.core.secret_randomness import make_keyed_generator
from auditor.models.base import get_max_logits
from auditor.models.masked import MaskedModel, load_masked
from auditor.models.memory import group_equal_shapes
from auditor.models.vocabulary import check_same_vocabulary_size, check_tokens_within_vocabulary
from auditor.plugins.defense import Defense, MaskedScenario
from auditor.records import file_digests
from auditor.runs import plan_weights
from auditor.runs.loader import LABS, build_lab_recipe
from auditor.runs.machine import describe_environment
from auditor.runs.plan import GridPoint, expand_plan_grid, make_plan
from auditor.runs.reporter import Reporter
from auditor.runs.run import plan_audit
from auditor.runs.site import Site
from auditor.statistics import bootstrap
from auditor.studies.ledger import StudyPoint

_BATCH = 64  # texts in a batch, unless memory allows fewer
_TIMINGS = 5


@dataclass(frozen=True)
class MaskingOptions:
    """Values of a plan's `[utility]` table. Raise AuditError for invalid values.

    Args:
        on: which records of the built-in lab to measure: held-out texts (default) or members. A
            user's data has no such kinds, and all of it is measured.
        restarts: number of different maskings of each text.
        mask_share: share of the tokens that each masking hides.
        max_length: number of tokens at which a text is cut off.
    """

    on: Literal["heldout", "members"] | None = None
    restarts: int = 3
    mask_share: float = 0.15
    max_length: int = 512

    def __post_init__(self) -> None:
        if self.restarts < 1:
            raise AuditError(f"expected restarts >= 1 in [utility], got {self.restarts}")
        if not 0 < self.mask_share < 1:
            raise AuditError(f"expected mask_share in (0, 1) in [utility], got {self.mask_share}")
        if self.max_length < 2:
            raise AuditError(f"expected max_length >= 2 in [utility], got {self.max_length}")


@dataclass(frozen=True)
class Passage:
    """A text as tokens.

    Args:
        row: index of the text in the data, from 0.
        tokens: token ids.
        open: positions that may be masked.
        cut: whether the text was cut off.
    """

    row: int
    tokens: Tokens
    open: tuple[int, ...]
    cut: bool = False


class MaskedTexts:
    """Texts for masked models to predict, with the protected model and its public model, if any."""

    def __init__(
        self,
        target: MaskedModel,
        public: MaskedModel | None,
        tokenizer: Any,
        texts: Sequence[str],
        options: MaskingOptions,
        *,
        seed: int = 0,
        limit: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Prepare models and texts. limit: maximum number of texts, drawn at random.

        Raise AuditError if the vocabularies of the models differ, or if no text has a token to
        mask.
        """
        if public is not None:
            check_same_vocabulary_size(
                "--public", public.name, public.vocab_size, "the target's", target.vocab_size
            )
        self.bare = target
        self.target = _LastAnswerCache(target)
        self.public = None if public is None else _LastAnswerCache(public)
        self.tokenizer = tokenizer
        self.options = options
        self.seed = seed
        self.room = min(options.max_length, target.max_positions or options.max_length)
        self.notes = [*target.notes, *(public.notes if public is not None else ())]
        self.texts = self._draw_sample(self._encode_usable_texts(texts), limit)
        size = get_max_logits(target.device) // (
            max(len(text.tokens) for text in self.texts) * target.vocab_size
        )
        self.batch_size = batch_size or max(1, min(_BATCH, size))

    @cached_property
    def hidden_token_counts(self) -> Ints:
        """Number of tokens of each text that one masking hides, of shape (texts,)."""
        return np.array(list(map(self._count_hidden_tokens, self.texts)))

    def _encode_usable_texts(self, texts: Sequence[str]) -> list[Passage]:
        usable = []
        tokens = []
        cut = 0
        for row, text in enumerate(texts):
            passage = self._encode_passage(row, text)
            if passage.open:
                usable.append(passage)
                tokens.append(passage.tokens)
                cut += passage.cut
        name = self.target.name
        check_tokens_within_vocabulary("the texts", tokens, self.target.vocab_size, name)
        if not usable:
            raise AuditError(f"expected texts with a token to hide, got {len(texts)} without one")
        if len(usable) < len(texts):
            self.notes.append(
                f"{len(texts) - len(usable)} of {len(texts)} texts contain nothing to "
                "predict: left out"
            )
        if cut:
            self.notes.append(
                f"{cut} of {len(usable)} texts are longer than {self.room} tokens: the rest was "
                "cut off"
            )
        return usable

    def _encode_passage(self, row: int, text: str) -> Passage:
        # Tokenize without truncation first, only to detect a cut.
        cut = len(self.tokenizer(text, verbose=False)["input_ids"]) > self.room
        coded = self.tokenizer(
            text,
            truncation=True,
            max_length=self.room,
            return_special_tokens_mask=True,
            verbose=False,
        )
        open = np.flatnonzero(np.array(coded["special_tokens_mask"]) == 0).tolist()
        return Passage(row, tuple(coded["input_ids"]), tuple(open), cut)

    def _draw_sample(self, texts: list[Passage], limit: int | None) -> list[Passage]:
        if limit is None or limit >= len(texts):
            return texts
        rng = make_keyed_generator("utility", "limit", self.seed)
        rows = sorted(rng.permutation(len(texts))[:limit])
        self.notes.append(
            f"--limit kept {limit} of {len(texts)} texts, a random sample with seed {self.seed}"
        )
        return [texts[i] for i in rows]

    def _count_hidden_tokens(self, text: Passage) -> int:
        """Return how many of the text's tokens to hide: at least 1, so that the text has an nll."""
        return max(1, round(self.options.mask_share * len(text.open)))

    def masked_positions(self, text: Passage, restart: int) -> list[int]:
        """Return the positions that a restart hides; only seed, restart and text decide them."""
        rng = make_keyed_generator("utility", "masks", self.seed, restart, text.row)
        return sorted(
            rng.choice(text.open, self._count_hidden_tokens(text), replace=False).tolist()
        )

    def protect(self, defense: Defense) -> tuple[MaskedModel, Claim | None]:
        """Return the defended model, then the defense's claim for the text with the most hidden
        tokens.
        """
        return defense.protect_masked(
            MaskedScenario(self.target, self.public, int(self.hidden_token_counts.max()))
        )

    def _batches(self) -> Iterator[tuple[int, list[int], Tensor, Tensor]]:
        """Yield batches of B texts of n tokens, m of them hidden, as four values.

        The values are the restart, the indices of the texts, their tokens of shape (B, n), and the
        hidden positions of shape (B, m).
        """
        shapes = []
        for text in self.texts:
            shapes.append((len(text.tokens), self._count_hidden_tokens(text)))
        for restart in range(self.options.restarts):
            for batch in group_equal_shapes(shapes, self.batch_size):
                tokens = torch.tensor([self.texts[i].tokens for i in batch])
                gaps = torch.tensor([self.masked_positions(self.texts[i], restart) for i in batch])
                yield restart, batch.tolist(), tokens, gaps

    def measure_nll(
        self, models: Sequence[MaskedModel], progress: Callable[[int, int], None]
    ) -> tuple[Floats, Ints]:
        """Return the summed nll (nats) of hidden tokens whose probability is not 0.

        The second value is the number of hidden tokens whose probability is 0. Both have shape
        (models, restarts, texts).
        """
        restarts = self.options.restarts
        nll = np.zeros((len(models), restarts, len(self.texts)))
        n_impossible = np.zeros(nll.shape, dtype=np.int64)
        n_done = 0
        for restart, batch, tokens, gaps in self._batches():
            # Batches outside, models inside: the cache answers all models of a batch from a single
            # forward pass.
            for i, model in enumerate(models):
                log_prob = model.token_log_probs(tokens, gaps).double().cpu().numpy()  # (B, m) nats
                impossible = np.isneginf(log_prob)
                nll[i, restart, batch] = -np.where(impossible, 0.0, log_prob).sum(1)
                n_impossible[i, restart, batch] = impossible.sum(1)
            n_done += len(batch)
            progress(n_done, restarts * len(self.texts))
        return nll, n_impossible

    def measure_slowdowns(self, models: Sequence[MaskedModel]) -> list[Measurement]:
        """Return how many times slower each model is than the undefended model.

        The measured time is the time to compute the distributions of masked tokens. The value is
        the median over several rounds, and the interval is the range over the rounds.
        """
        rounds = []
        # Time the bare model again in every round: other load on the machine slows both.
        for _ in range(_TIMINGS):
            bare = self._time_distribution(self.bare)
            rounds.append([self._time_distribution(model) / bare for model in models])
        slowdowns = []
        for middle, low, high in np.quantile(rounds, [0.5, 0, 1], axis=0).T.tolist():
            slowdowns.append(
                Measurement("slowdown", middle, low, high, _TIMINGS, "times", "range of timings")
            )
        return slowdowns

    def _time_distribution(self, model: MaskedModel) -> float:
        """Return the seconds to compute the distributions of a batch of four copies of a text."""
        self.target.forget()  # a cached answer would take no time
        if self.public is not None:
            self.public.forget()
        text = self.texts[0]
        tokens = torch.tensor([text.tokens] * 4)
        gaps = torch.tensor([self.masked_positions(text, 0)] * 4)
        start = time.perf_counter()
        if model.log_probs(tokens, gaps).is_cuda:
            torch.cuda.synchronize()  # a launched kernel may not have finished
        return time.perf_counter() - start


class _LastAnswerCache(MaskedModel):
    """Wrapper of a model that returns the last answer again if the query is repeated.

    All points of a sweep send the same query in turn. Likelihoods are float64.
    """

    def __init__(self, model: MaskedModel) -> None:
        self.model = model
        self.name = model.name
        self.vocab_size = model.vocab_size
        self.max_positions = model.max_positions
        self.device = model.device
        self.forget()

    def forget(self) -> None:
        self._question: tuple[Tensor, Tensor] | None = None
        self._answer: Tensor | None = None

    def log_probs(self, contexts: Tensor, positions: Tensor) -> Tensor:
        question = (contexts, positions)
        if self._question is None or not all(map(torch.equal, self._question, question)):
            self.forget()  # two distributions need not fit in memory
            self._question = question
            self._answer = self.model.log_probs(contexts, positions)
        assert self._answer is not None
        return self._answer

    def token_log_probs(self, contexts: Tensor, positions: Tensor) -> Tensor:
        return super().token_log_probs(contexts, positions).double()


NAME = "utility"  # the only "attack" in the ledger's cells
RESULT = "utility.json"
# Measurements of a point in its table, with their headings.
HEADINGS = {
    "perplexity": "perplexity",
    "perplexity_ratio": "× undefended",
    "epsilon_per_token": "ε a token",
    "epsilon": "ε at max T",
    "epsilon_mean": "ε at mean T: not a guarantee",
    "covered": "tokens covered",
}
_RESAMPLES = 2000


@dataclass(frozen=True)
class UtilityPlan:
    """A plan with a `[utility]` table.

    Args:
        grid: points with the options of defenses.
        options: options of masking.
    """

    grid: Sequence[GridPoint]
    options: MaskingOptions

    @classmethod
    def from_raw_values(cls, raw: Mapping[str, Any]) -> UtilityPlan:
        """Parse a plan's raw fields, with `[sweep]` and `[utility]`. Raise AuditError for invalid
        values.
        """
        fields = dict(raw)
        options = from_json(MaskingOptions, fields.pop("utility", {}), "utility")
        if "variant" in fields:
            raise AuditError("expected a [utility] plan without variants: it has a sweep")
        if len(seeds := fields.get("seeds", [0])) > 1:
            raise AuditError(
                f"expected one seed for a [utility] plan, whose restarts mask anew, got {seeds}"
            )
        defenses = fields.get("defense", [])
        for key in fields.get("sweep", {}):
            name = key.rpartition(".")[0]
            refuse_unknown_names(f"defense in the sweep of {key!r}:", [name], defenses)
        return cls(expand_plan_grid(fields), options)

    @property
    def plan(self) -> Plan:
        """The plan of the grid's first point.

        The other points differ only in the options of defenses.
        """
        return make_plan(self.grid[0].plan, {})

    def list_defenses(self) -> list[tuple[dict[str, Any], Defense]]:
        """Return (swept options, defense) for each defense at each point.

        Raise AuditError for unknown options and missing inputs.
        """
        for name in self.plan.list_changed_fields(ATTACKS):
            raise AuditError(f"{name} is about attacks: a plan with [utility] does not use it")
        defenses = []
        for point in self.grid:
            for row in plan_audit(Site(make_plan(point.plan, {}))).selection.rows:
                if not row.companion:
                    defenses.append((point.at, row.defense))
        return defenses

    def to_json(self) -> dict[str, Any]:
        return {"points": [point.plan for point in self.grid], "options": to_json(self.options)}


@dataclass(frozen=True)
class UtilityRow:
    """Measurements of a defense at a point of the grid, or of the undefended model.

    Args:
        target: name of the defense, or of the undefended model.
        at: swept options.
        options: all options of the defense.
        measured: measurements, keyed by the names below.

    `perplexity_ratio` is the perplexity divided by the undefended model's, paired by text.
    `covered` is the share of predicted tokens with nonzero probability. `slowdown` is the time per
    distribution, divided by the undefended model's. `epsilon` is the claimed epsilon for the text
    with the most predicted tokens. `epsilon_mean` is the claimed epsilon for the *mean* number of
    predicted tokens, as in the paper; it guarantees nothing.
    """

    target: str
    at: dict[str, Any]
    options: dict[str, Any]
    measured: dict[str, Measurement]


@dataclass(frozen=True)
class Utility:
    """Record of the measurements of a `[utility]` plan: numbers, no text.

    Args:
        model: the masked model.
        data: description of the texts.
        rows: measurements of each defense at each point.
        notes: remarks for readers.
        created: time of the measurement (UTC, ISO 8601).
        tool_version: version of this program.
        command: command line.
        seed: seed of the masks.
        plan: the plan, from `UtilityPlan.to_json`.
        environment: software and hardware.
        seconds: duration.
        weights: SHA-256 by file name, such as "model/model.safetensors"; empty in the lab.
    """

    model: str
    data: str
    rows: tuple[UtilityRow, ...]
    notes: tuple[str, ...]
    created: str
    tool_version: str
    command: str
    seed: int
    plan: dict[str, Any]
    environment: dict[str, str]
    seconds: float
    weights: dict[str, str] = field(default_factory=dict)

    def list_points(self) -> list[StudyPoint]:
        """Return each row as a grid point for the ledger, the undefended model first."""
        about = f"{Path(self.model).name} (masked) on {self.data}"
        points = []
        for row in self.rows:
            cell = Replicates(
                row.target, "", NAME, measured={self.seed: row.measured}, options=row.options
            )
            variant = UNDEFENDED if row.target == UNDEFENDED else ""
            points.append(StudyPoint(variant, row.at, (NAME,), (cell,), subject=about))
        return points


def write_utility_result(folder: Path, result: Utility) -> None:
    write_json(folder / RESULT, result)


def read_utility_result(folder: Path, plan: UtilityPlan | None = None) -> Utility:
    """Read the measurements in a folder.

    Raise AuditError if their plan differs from `plan`, or their weights from its weights.
    """
    path = folder / RESULT
    result = from_json(Utility, read_json(path, "the measured utility"), str(path))
    if plan is not None:
        if result.plan != plan.to_json():
            raise AuditError(
                f"expected a new folder for -o, but {str(folder)!r} was measured with another plan"
            )
        now = plan_weights.digest_plan_files(plan.plan)
        file_digests.check_model_files_unchanged(result.weights or None, now, str(folder))
    return result


# --- measuring ---


def measure_utility_points(request: UtilityPlan, reporter: Reporter, command: str) -> Utility:
    """Measure every point of the plan on the same texts.

    Raise AuditError for invalid input before any model is queried.
    """
    plan = request.plan
    options = request.options
    start = time.perf_counter()
    defenses = request.list_defenses()
    with reporter.stage("prepare"):
        texts = _load_masked_texts(plan, options, reporter)
        models: list[MaskedModel] = [texts.target]
        protected_claims = []
        for _, defense in defenses:
            model, claim = texts.protect(defense)
            models.append(model)
            protected_claims.append(claim)
    with reporter.stage(f"perplexity of {len(models)} points on {len(texts.texts):,} texts"):
        nll, lost = texts.measure_nll(
            models, lambda n_done, total: reporter.progress("scoring", n_done, total)
        )
    with reporter.stage("time of a distribution"):
        slowdowns = texts.measure_slowdowns(models)
    # A token without a probability makes the perplexity infinite; `covered` reports their share.
    possible = np.where(lost > 0, np.inf, nll)
    rows = [UtilityRow(UNDEFENDED, {}, {}, _measure_point(texts, possible, lost, 0, slowdowns[0]))]
    for i, ((at, defense), claim) in enumerate(zip(defenses, protected_claims, strict=True), 1):
        measured = _measure_point(texts, possible, lost, i, slowdowns[i])
        for m in _list_claimed_epsilons(texts, claim):
            measured[m.name] = m
        rows.append(UtilityRow(defense.name, dict(at), to_json(defense), measured))
    data = "member records" if options.on == "members" else "held-out records"
    if plan.data.data is not None:
        data = Path(plan.data.data).name
    return Utility(
        model=plan.target.model or LABS[plan.target.lab].name,
        data=data,
        rows=tuple(rows),
        notes=(_describe_masked_texts(texts), *texts.notes),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=__version__,
        command=command,
        seed=plan.seed,
        plan=request.to_json(),
        environment=describe_environment(plan.loading.device),
        weights=plan_weights.digest_plan_files(plan),
        seconds=time.perf_counter() - start,
    )


def _describe_masked_texts(texts: MaskedTexts) -> str:
    counts = texts.hidden_token_counts
    return (
        f"{len(texts.texts):,} texts, masked {texts.options.restarts} times; |V| = "
        f"{texts.target.vocab_size:,}; max T = {counts.max()} predicted tokens of a text, mean T = "
        f"{counts.mean():.3g}."
    )


def _load_masked_texts(plan: Plan, options: MaskingOptions, reporter: Reporter) -> MaskedTexts:
    if plan.target.uses_builtin_lab:
        lab = LABS[plan.target.lab](build_lab_recipe(plan), None, reporter.progress)
        models = MaskedLab(lab)
        texts = lab.texts.distinct_private_texts(options.on == "members")
        target = models.target_masked_model()
        public = models.public_masked_model()
    else:
        assert plan.target.model is not None and plan.data.data is not None
        if options.on is not None:
            raise AuditError(
                "`on` in [utility] chooses among the lab's records; --data are measured whole"
            )
        texts = read_data_table("--data", plan.data.data).list_texts()
        target = load_masked(plan.target.model, plan.loading)
        public = None
        if plan.target.public:
            public = load_masked(plan.target.public, plan.loading.for_companion_model())
    return MaskedTexts(
        target,
        public,
        target.tokenizer,
        texts,
        options,
        seed=plan.seed,
        limit=plan.data.limit,
        batch_size=plan.batch_size,
    )


def _measure_point(
    texts: MaskedTexts, possible: Floats, lost: Ints, i: int, slowdown: Measurement
) -> dict[str, Measurement]:
    """Return the measurements of model i, keyed by name.

    possible: summed nll (nats) of tokens with nonzero probability. lost: number of tokens with
    probability 0. Both have shape (models, restarts, texts).
    """
    tokens = texts.hidden_token_counts
    perplexity = measure_corpus_perplexity(possible[i], tokens)
    size = texts.target.vocab_size
    # At weight 0 uniform mixing has the perplexity |V| (Majmudar et al. 2022): 1 here.
    ends = (perplexity.value / size, perplexity.low / size, perplexity.high / size)
    relative = Measurement("perplexity_over_vocabulary", *ends, perplexity.n, "times")
    measurements = (
        perplexity,
        measure_corpus_perplexity(possible[i], tokens, possible[0]),
        relative,
        _measure_possible_tokens(lost[i], tokens),
        slowdown,
    )
    return {m.name: m for m in measurements}


def _list_claimed_epsilons(texts: MaskedTexts, claim: Claim | None) -> Iterator[Measurement]:
    """Yield the claim's epsilons as measurements, with intervals of width 0: they are not
    estimates.
    """
    if claim is None:
        return
    epsilons = {"epsilon": claim.epsilon[claim.relation]}
    per_token = claim.details.get("epsilon_per_token")
    if per_token is not None:
        mean_tokens = float(texts.hidden_token_counts.mean())
        epsilons |= {"epsilon_per_token": per_token, "epsilon_mean": per_token * mean_tokens}
    note = f"{claim.relation}, delta {claim.delta:g}, T = {claim.queries}: {claim.status}"
    for name, value in epsilons.items():
        yield Measurement(name, value, value, value, len(texts.texts), "nats", note)


def measure_corpus_perplexity(nll: Floats, tokens: Ints, base: Floats | None = None) -> Measurement:
    """Return the corpus perplexity, averaged over restarts, or its ratio to another perplexity.

    The interval covers the choice of texts and of masks: the bootstrap resamples texts, each with
    its masks of all restarts. The measurement's note lists the perplexity of each restart.

    Args:
        nll: summed nats, of shape (restarts, texts); inf if a token has probability 0.
        tokens: number of predicted tokens, of shape (texts,).
        base: None for the perplexity. For the ratio, the summed nats of the model to compare with,
            in the same shape. Both models are then resampled together.
    """
    name = unit = "perplexity"
    note = ""
    paired = nll
    if base is None:
        restarts = np.exp(nll.sum(1) / tokens.sum()).tolist()
        note = f"restarts {', '.join(map(str, restarts))}"
    else:
        name = "perplexity_ratio"
        unit = "times"
        paired = np.concatenate([nll, base])

    # Return the log of the number at these rates and its slopes by each rate, for
    # `estimate_rate_statistic`. each: (resamples, restarts), nats a token, followed by the restarts
    # of a base.
    def log(nlls: Floats) -> tuple[Floats, Floats]:
        rates = nlls.reshape(len(nlls), -1, len(nll))
        with np.errstate(invalid="ignore"):  # infinity has no slope, and none is needed
            # The log of the mean of exp(rate) over restarts; exp undoes it below.
            logs = logsumexp(rates, axis=2) - math.log(len(nll))
            slopes = softmax(rates, axis=2)
            if base is None:
                return logs[:, 0], slopes[:, 0]
            ratio = np.where(np.isinf(logs[:, 0]), np.inf, logs[:, 0] - logs[:, 1])
            return ratio, np.concatenate([slopes[:, 0], -slopes[:, 1]], axis=1)

    value, low, high = np.exp(
        bootstrap.estimate_rate_statistic(paired, tokens[None], log, "utility", _RESAMPLES)
    ).tolist()
    return Measurement(name, value, low, high, len(tokens), unit, note)


def _measure_possible_tokens(lost: Ints, tokens: Ints) -> Measurement:
    """Return the share of predicted tokens with nonzero probability.

    lost: number of tokens with probability 0, of shape (restarts, texts). tokens: number of
    predicted tokens, of shape (texts,).
    """

    def share(values: Floats) -> tuple[Floats, Floats]:
        # The number and its slopes by each restart's rate.
        return 1 - values.mean(1), np.full(values.shape, -1 / values.shape[1])

    estimates = bootstrap.estimate_rate_statistic(lost, tokens[None], share, "utility", _RESAMPLES)
    value, low, high = np.clip(estimates, 0, 1).tolist()  # shares are in [0, 1]
    return Measurement("covered", value, low, high, len(tokens), "probability")
