"""Prepare an audit: its models, data, attacks, defenses, prefix token and attacked targets.

Invalid input is refused here if the fault can be found before the first query to a model. Remote
workers get only a `RunContext`. The run folder belongs to the main process.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from auditor.benchmarks.data.ngrams import build_ngram_index
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import (
    UNDEFENDED,
    CellKey,
    Challenge,
    Claim,
    Guesses,
    Pair,
    PrefixToken,
    Query,
    Secret,
)
from auditor.core.plan import Plan
from auditor.core.plan_fields import AUTO
from auditor.core.result import Doubt, Measurement, TargetRecord
from auditor.core.secret_table import SecretTable, build_secret_table
from auditor.models import precision, self_check
from auditor.models.base import LanguageModel, implies_capability
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.references import ReferenceModels
from auditor.plugins.attack import Attack, CorpusAttack
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.defense import (
    Defense,
    QueryBudget,
    Scenario,
    TrainedModel,
    count_largest_lot,
)
from auditor.plugins.probe import Probe
from auditor.plugins.trainer import TrainerCheckpoint
from auditor.plugins.view import TEXT_ONLY, WHITE_BOX, ClaimTokenMeter, Setting, View
from auditor.privacy.promises import PrivacyRecord
from auditor.records.folder import RunFolder
from auditor.runs import generations, machine, packed_rows, personal_data, text_form
from auditor.runs.generations import TrainingCorpus
from auditor.runs.personal_data import PersonalDataOfSecrets
from auditor.runs.prefix_token import resolve_prefix_token, wrap_prefixed_model
from auditor.runs.selection import PluginSelection
from auditor.runs.site import Site
from auditor.runs.stopping import StoppingRule


@dataclass
class TokenSpending:
    """Counter of the tokens drawn from a target.

    Args:
        meter: counter of tokens drawn under the privacy claim.
        spent: number of tokens charged to the claim, keyed by (sampling recipe, secret id).
        seconds: seconds that this process spent on draws.
        n_drawn: number of tokens that this process drew.
    """

    meter: ClaimTokenMeter
    spent: dict[tuple[str, str], int] = field(default_factory=dict)
    seconds: float = 0.0
    n_drawn: int = 0

    def charge_claim(self, view: View, attack: Attack, answers: Sequence[Guesses]) -> None:
        """Charge each drawn token to the claim once, even if several attacks share the sample.

        Args:
            view: the attacker's access to the target.
            attack: the attack that drew the tokens.
            answers: its guesses.
        """
        for recipe in attack.sample_counts_by_recipe(view):
            for guesses in answers:
                # A fixed budget's allowance counts as spent, whether or not it is drawn.
                if view.allowance is None:
                    paid = guesses.drawn
                else:
                    paid = view.allowance[recipe, guesses.secret]
                self.spent[recipe, guesses.secret] = paid

    @property
    def milliseconds_per_token(self) -> float | None:
        if self.n_drawn:
            return 1000 * self.seconds / self.n_drawn
        return None


@dataclass
class Target:
    """Model that a run attacks, with its defense.

    Args:
        name: name of the target.
        title: title in reports.
        model: the model that attacks query.
        description: sentence about the model.
        defense: the defense; None for the undefended model.
        scenario: inputs that the defense was built from.
        training_seconds: seconds of training; None if unknown.
        secrets: secrets that are attacked on this target.
        companion: whether the target is a control, which serves only to explain a defense.
        trained: the model with the records of its training, such as a privacy promise and canaries.
        spending: counter of drawn tokens.
    """

    name: str
    title: str
    model: LanguageModel
    description: str
    defense: Defense | None = None
    scenario: Scenario | None = None
    training_seconds: float | None = None
    secrets: Sequence[Secret] = ()
    companion: bool = False
    trained: TrainedModel | None = None
    spending: TokenSpending = field(init=False)
    # claims by tokens spent: solving for a claim takes seconds
    _claims: dict[int, Claim | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spending = TokenSpending(ClaimTokenMeter(lots=self.lot_number_by_secret))

    @property
    def is_undefended(self) -> bool:
        return self.name == UNDEFENDED

    # --- the claim ---

    @cached_property
    def query_budget_of_defense(self) -> QueryBudget | None:
        if self.defense and self.scenario:
            return self.defense.fixed_token_budget(self.scenario)
        return None

    @cached_property
    def lot_number_by_secret(self) -> Mapping[str, int]:
        if self.defense and self.scenario:
            return self.defense.budget_lots(self.scenario)
        return {}

    @property
    def claim(self) -> Claim | None:
        """Privacy claim for the tokens drawn so far; None if the target claims nothing."""
        # Lots share no record, so only the largest spending of any lot counts: parallel composition
        # (McSherry 2009).
        n_tokens = count_largest_lot(self.spending.spent, self.lot_number_by_secret)
        if n_tokens not in self._claims:
            if self.defense and self.scenario:
                self._claims[n_tokens] = self.defense.claim(self.scenario, n_tokens)
            else:
                self._claims[n_tokens] = None
                if (record := self.privacy_record_of_target) is not None:
                    self._claims[n_tokens] = record.claim()
        return self._claims[n_tokens]

    @property
    def privacy_record_of_target(self) -> PrivacyRecord | None:
        """Privacy promise of this model's training; None if the training was not private."""
        if self.trained is None:
            return None
        return self.trained.privacy

    def judge_claim_coverage(self, setting: Setting) -> tuple[bool | None, str]:
        """Return whether the claim covers this access and decoding, then the reason.

        The first value is None if the target claims nothing.
        """
        claim = self.claim
        if claim is None:
            return None, "no claim is made"
        if claim.any_access:
            return True, f"{claim.access}; {claim.status}"
        if setting is TEXT_ONLY:
            return True, f"sampled tokens, ancestral; {claim.status}"
        return False, "gradients, log-probabilities, the attack's own decoding"

    def list_defense_remarks(self) -> tuple[str, ...]:
        if self.defense and self.scenario:
            return self.defense.remarks(self.scenario)
        return ()

    # --- the record ---

    def _explain_missing_perplexity(self) -> str:
        if implies_capability(self.model.capabilities, "likelihood"):
            return "no held-out perplexity: give --nonmembers FILE"
        return f"no held-out perplexity: {self.model.name} gives no log-probabilities"

    def make_target_record(
        self,
        perplexities: Sequence[Measurement],
        prefix_token: PrefixToken,
        doubts: Sequence[Doubt],
    ) -> TargetRecord:
        """Return the target's record for the result file.

        Args:
            perplexities: measured perplexities, that of the model's own distribution first; empty
                if no texts are held out.
            doubts: doubts to add to the model's own doubts.
        """
        training = self.privacy_record_of_target
        return TargetRecord(
            name=self.name,
            title=self.title,
            description=self.description,
            perplexity=perplexities[0] if perplexities else None,
            other_perplexities=tuple(perplexities[1:]),
            milliseconds_per_token=self.spending.milliseconds_per_token,
            peak_memory_mb=machine.measure_peak_memory(self.model.device),
            training_seconds=self.training_seconds,
            companion=self.companion,
            claim=self.claim,
            nominal_epsilon=training.nominal_epsilon if training else None,
            notes=(
                *(self.trained.notes() if self.trained else ()),
                f"{prefix_token.said}; the same for all attacks and for perplexity",
                *(() if perplexities else (self._explain_missing_perplexity(),)),
                *(
                    f"held-out perplexity: {perplexity.note}"
                    for perplexity in perplexities[:1]
                    if perplexity.note
                ),
                *self.model.cost_sentences(),
            ),
            doubts=(*self.model.doubts(), *doubts),
        )


Draws = dict[tuple[str, str], int]  # tokens by (recipe, secret)


def plan_token_counts(view: View, attacks: Sequence[Attack], secrets: Sequence[Secret]) -> Draws:
    """Return how many tokens each (sampling recipe, secret id) will draw in this view's setting.

    A sampling recipe is the name of a way to draw samples, with their number. Keys are ordered by
    attack, then by secret. Attacks with the same sampling recipe share their draws.

    Args:
        view: the attacker's access to the target.
        attacks: the attacks.
        secrets: the attacked secrets.
    """
    draws: Draws = {}
    for attack in attacks:
        if not all(
            implies_capability(view.setting.capabilities, name)
            for name in attack.required_capabilities
        ):
            continue
        try:
            recipes = attack.sample_counts_by_recipe(view)
        except NotApplicable:
            continue
        queries = list_attack_queries(view, attack, secrets)
        for recipe, samples in recipes.items():
            # Do not add: attacks with the same recipe, whose name includes its number of samples,
            # share a pass.
            draws.update({(recipe, query.id): samples * query.length for query in queries})
    return draws


def list_attack_queries(view: View, attack: Attack, secrets: Sequence[Secret]) -> Sequence[Query]:
    """Return the attack's queries about these secrets; () if the attack does not apply here."""
    try:
        return attack.queries(
            view, [Query(secret.id, secret.prefix, len(secret.suffix)) for secret in secrets]
        )
    except NotApplicable:
        return ()


def divide_query_budget(
    budget: QueryBudget, draws: Mapping[tuple[str, str], int], lots: Mapping[str, int] | None
) -> Draws:
    """Divide a fixed budget of tokens among the samples, before any token is drawn.

    A sample is named by (sampling recipe, secret id). Samples are paid for in the order of `draws`,
    whatever the order of the queries. A `stop` budget pays for whole samples only: after the first
    one that it cannot pay for, it pays for no other. A `public` budget may pay for a part of a
    sample, and the public model completes the rest.

    Args:
        budget: number of tokens, and what happens when they are spent.
        draws: number of tokens that each sample needs.
        lots: lot of each secret id, if the secrets are divided into lots that each have their own
            budget (`Defense.lots`); None for one budget.

    Returns:
        The number of tokens that the budget pays for, keyed by sample. A sample without a key is
            not drawn.
    """
    rest_by_lot = dict[int | None, int]()
    allowance = Draws()
    for key, tokens in draws.items():
        lot = (lots or {}).get(key[1])
        rest = rest_by_lot.get(lot, budget.tokens)
        if budget.on_exhaustion == "stop" and tokens > rest:
            rest_by_lot[lot] = -1  # no later answer is paid for, even if it is shorter
            continue
        allowance[key] = min(tokens, rest)
        rest_by_lot[lot] = rest - allowance[key]
    return allowance


State = dict[str, Any]
_MOST_COMPARED = 10_000  # secrets from which a self-check chooses a few


@dataclass(frozen=True)
class RunContext:
    """Context of all attacks and probes of a run, in the main process and on workers.

    Args:
        site: models and data of the audit.
        selection: attacks, probes, defenses and access settings.
        prefix_token: token that the run puts before every text.
    """

    site: Site
    selection: PluginSelection
    prefix_token: PrefixToken

    @property
    def plan(self) -> Plan:
        return self.site.plan

    @property
    def benchmark(self) -> Benchmark:
        return self.site.benchmark

    @cached_property
    def challenge(self) -> Challenge:
        return self.benchmark.challenge()

    def make_target_view(self, target: Target, setting: Setting) -> View:
        """Return a new view of the target: the attacker's access to the model in this setting.

        The view has drawn no samples yet. If the defense has a fixed query budget, the view divides
        the budget among the secrets.

        Args:
            target: the attacked model.
            setting: access setting, text-only or white-box.
        """
        public, reference = (
            model and wrap_prefixed_model(model, self.prefix_token.tokens)
            for model in (self.site.public_model, self.site.reference_model)
        )
        view = View(
            target_name=target.name,
            target=target.model,
            setting=setting,
            seed=self.plan.seed,
            public=public,
            reference=reference,
            reference_fault=self.site.reference_fault_sentence,
            references=self.load_prefixed_references,
            tokenizer=self.benchmark.tokenizer,
            batch_size=self.plan.batch_size,
            meter=target.spending.meter,
            claim=target.claim,
            progress=self.site.reporter.progress,
        )
        if target.trained is not None:
            view.training = target.trained.canaries
            view.tokens_after = target.trained.tokens_after
        # A budget pays only for text: reads by white-box access are not charged.
        if target.query_budget_of_defense is not None and setting is TEXT_ONLY:
            attacks = self.selection.list_defense_attacks(target.defense)
            draws = plan_token_counts(view, attacks, target.secrets)
            view.allowance = divide_query_budget(
                target.query_budget_of_defense, draws, target.lot_number_by_secret
            )
        return view

    def load_prefixed_references(self, spec: str) -> ReferenceModels:
        """Load the reference models that `-A references=` names.

        A reference model was trained like the target, but on other records. Each is wrapped so that
        it reads the run's prefix token before every text. Raise AuditError if no such models exist.

        Args:
            spec: value of the option: a folder, or in the lab a number of models.
        """
        references = self.site.load_site_references(spec)
        models = []
        for model in references.models:
            models.append(wrap_prefixed_model(model, self.prefix_token.tokens))
        return ReferenceModels(tuple(models), references.saw)

    def check_models_self_consistent(self, models: Iterable[LanguageModel | None]) -> None:
        """Check that each model returns the same distribution for every kind of query.

        The checked texts are as long as this run's longest text with its soft prompt. Remarks of
        the checks are added to the benchmark's notes. `models` may contain None, which is skipped.
        """
        subjects = self.benchmark.subjects
        lengths = list(map(len, self.benchmark.heldout))
        lengths.append(int(subjects.texts.lengths.max(initial=1)))
        # The site's model adds no prefix token, so the pairs include it.
        before = self.prefix_token.tokens
        count = min(len(subjects), _MOST_COMPARED)
        pairs = []
        for secret in subjects[np.arange(count) * len(subjects) // max(1, count)]:
            pairs.append((before + secret.prefix, secret.suffix))
        prompt_rows = self.selection.longest_soft_prompt_row_count
        longest = prompt_rows + len(before) + max(lengths)
        for model in models:
            if isinstance(model, HuggingFaceModel):
                # Check this first: it also configures how the model is served, on which all later
                # queries depend.
                notes = self_check.configure_serving(model, longest, pairs, model.choices_kept_in)
                if model is self.site.model and self.benchmark.earlier_in_row:
                    notes += self._list_packed_row_notes()
                if model is self.site.model and (
                    changed := precision.dtype_effect_sentence(model, pairs)
                ):
                    notes += (f"{model.name}: {changed}",)
                self.benchmark.notes += notes
                for note in notes:
                    self.site.reporter.note(note)

    def _list_packed_row_notes(self) -> tuple[str, ...]:
        """Compare recitation of packed records with and without the records before them.

        A trainer may pack several records into one row. If the model recites records better after
        the earlier records of their row, add a doubt to the benchmark. Return a note with both
        numbers, or () if nothing could be compared.
        """
        model = wrap_prefixed_model(self.site.model, self.prefix_token.tokens)
        remark, doubts = packed_rows.compare_packed_records(
            model, self.benchmark.secrets, self.benchmark.earlier_in_row
        )
        if not remark or remark in self.benchmark.notes:
            return ()
        self.benchmark.doubts += doubts
        return (remark,)

    def refuse_unanswerable_probes(self) -> None:
        """Raise AuditError now if a probe would later refuse its secrets or reference models.

        Otherwise the run would fail only after hours of queries.
        """
        for method in self.selection.methods:
            if isinstance(method, Probe) and method.of == "secrets":
                method.check_secrets(self.benchmark.secrets)
        for references in self.selection.reference_models_asked_by_probes:
            # Load the models, or train them in the lab, now: the site stores them.
            self.load_prefixed_references(references)

    def check_texts_fit_models(self) -> None:
        """Raise AuditError if this run's texts do not fit into a model's context.

        The lengths include prefix token and soft prompt.
        """
        rows = self.selection.longest_soft_prompt_row_count
        prefix_token = len(self.prefix_token.tokens)
        prompt = torch.empty(rows, 0) if rows else None  # only its number of rows matters
        models_with_prompts = (
            (self.site.model, prompt),
            (self.site.public_model, prompt),
            (self.site.reference_model, None),
        )
        for n_prefix, length in {secret.lengths for secret in self.benchmark.secrets}:
            for model, soft_prompt in models_with_prompts:
                if model is not None:
                    model.check_text_fits(n_prefix, length, soft_prompt, prefix_token)
        for n_prefix, length in {canary.lengths for canary in self.benchmark.canaries}:
            self.site.model.check_text_fits(n_prefix, length, prefix_token=prefix_token)


@dataclass(frozen=True)
class Audit(RunContext):
    """Context of all attacks and probes in the main process: a `RunContext` with the run folder.

    Args:
        stops: stopping rule of each cell whose queries may end before the last secret.
        population: ids of all secrets of a check, which queries them in batches; empty for a run.
        _tuned: tuned states of attacks that this process has loaded or made.
    """

    stops: Mapping[CellKey, StoppingRule]
    population: frozenset[str] = frozenset()
    _tuned: dict[tuple[str, str], State] = field(default_factory=dict)

    @property
    def folder(self) -> RunFolder:
        assert self.site.folder is not None  # `run_audit` attaches it
        return self.site.folder

    @cached_property
    def secrets_by_id(self) -> dict[str, Secret]:
        return {secret.id: secret for secret in self.benchmark.secrets}

    @cached_property
    def personal_data_of_secrets(self) -> PersonalDataOfSecrets:
        return personal_data.find_personal_data(
            self.benchmark, personal_data.parse_phone_regions(self.plan.data.phone_region)
        )

    @cached_property
    def sweep_cache_key_of_answers(self) -> dict[str, Any]:
        """Cache key of the answers that the runs of a sweep share.

        It is made from model, secrets and prefix token.
        """
        key = {**self.site.subject, "prefix_token": self.prefix_token.tokens}
        # A check attacks more and more secrets: do not share answers about a smaller set.
        if self.population:
            return {**key, "asked": tuple(self.secrets_by_id)}
        return key

    def build_attack_corpus(self, attack: CorpusAttack) -> TrainingCorpus:
        """Return the training texts with which the attack's generations are compared.

        The comparison uses an index of the texts' n-grams; an option of the attack sets n. Raise
        AuditError if every text has fewer than n tokens.
        """
        corpus = self.benchmark.texts_with_repeat_counts
        index = self.site.shared.get_or_make(
            "n-grams",
            self.site.subject,
            lambda: build_ngram_index(corpus(True), (tokens for tokens, _ in corpus(False))),
        )
        return generations.build_training_corpus(attack, self.benchmark, index)

    def check_corpus_attacks_feasible(self, target: Target) -> None:
        """Raise AuditError now for a corpus attack that would fail later.

        Without this check, it would fail only after its generations are drawn, which takes hours.
        """
        view = self.make_target_view(target, WHITE_BOX)
        for attack in self.selection.attacks:
            if not isinstance(attack, CorpusAttack):
                continue
            self.build_attack_corpus(attack)  # build the index before hours of drawing
            queries = list_attack_queries(view, attack, ())
            for n_prefix, length in {query.lengths for query in queries}:
                for model in (target.model, view.public, view.reference):
                    if model is not None:
                        model.check_text_fits(n_prefix, length)

    def load_or_fit_attack_state(self, target: Target, view: View, attack: Attack) -> State:
        """Return the attack's tuned state, such as a soft prompt; {} if the attack tunes nothing.

        The state is loaded if this run or an earlier run of the sweep saved it. Otherwise the
        attack is tuned now.

        Args:
            target: the attacked model.
            view: the attacker's access to the model.
            attack: the attack.
        """
        key = (attack.name, attack.fitted_state_name(view))
        if key not in self._tuned:
            fits = self.site.shared.fits
            saved = TrainerCheckpoint(self.folder.attack_state_path("-".join(key)))
            state = saved.load(target.model.device)
            if state is None:
                # The key holds all inputs of the state. A defense may depend on the number of draws
                # in its cells: a different number then gives a different model to tune on.
                sweep_key = json.dumps(
                    [
                        self.sweep_cache_key_of_answers,
                        self.plan.seed,
                        self.plan.data.known_limit,
                        self.plan.defenses.defense_options,
                        target.scenario and target.scenario.queries,
                        key,
                        attack.fit_options(),
                    ],
                    sort_keys=True,
                )
                # `or`: an empty state needed no tuning, so making it again costs nothing.
                state = fits.get(sweep_key) or attack.fit(view, self.challenge.known)
                saved.save(state)
                fits[sweep_key] = state
            self._tuned[key] = state
        return self._tuned[key]


def select_fingerprinted_secrets(site: Site) -> SecretTable:
    """Return the secrets and canaries that are hashed to the fingerprint of a run on this site.

    A resumed run must have the same fingerprint. The user's canaries are included. The lab's
    canaries are included only if coins inserted them, for an epsilon audit.
    """
    canaries = []
    for item in site.benchmark.canaries:
        if site.plan.data.canaries or item.has_coin:
            canaries.append(item)
    if not canaries:
        return build_secret_table(site.benchmark.secrets)
    return build_secret_table(itertools.chain(site.benchmark.secrets, canaries))


def choose_prefix_token(site: Site, longest: int, folder: RunFolder) -> PrefixToken:
    """Return the prefix token of the run: the token before every queried text.

    It is chosen on the undefended model. A resumed run keeps the prefix token that it chose before.
    Raise AuditError if the plan of a resumed run requests another prefix token.

    Args:
        site: models and data of the run.
        longest: number of tokens of the longest context, without the prefix token.
        folder: folder of the run.
    """
    saved = folder.prefix_token()
    data_plan = site.plan.data
    if saved is not None and data_plan.prefix_token == AUTO:
        return saved
    key = [site.subject, data_plan.prefix_token, data_plan.known_limit, longest]
    prefix_token = site.shared.get_or_make(
        "prefix_token",
        key,
        lambda: resolve_site_prefix(site, site.benchmark.known, longest),
    )
    if saved is None:
        folder.save_prefix_token(prefix_token)
    elif saved.tokens != prefix_token.tokens:
        raise AuditError(
            f"expected the prefix token that {str(folder.path)!r} was started with ({saved.said}), "
            f"got --prefix-token {data_plan.prefix_token}"
        )
    return prefix_token


def resolve_site_prefix(site: Site, known: Sequence[Pair], longest: int) -> PrefixToken:
    """Return the prefix token that the plan names, or choose one.

    Without a name in the plan, it is the prefix that the model's training recorded. If there is no
    record, the choice is the prefix token that makes the attacker's known pairs most likely.

    Args:
        site: models and data of the run.
        known: pairs of a prefix and its suffix that the attacker knows.
        longest: number of tokens of the longest context, without the prefix token.
    """
    benchmark = site.benchmark
    hurried = site.form_rows < text_form.ROWS
    options = (benchmark.canaries, benchmark.framed, benchmark.as_trained, hurried)
    recorded = site.recorded_prefix
    # Training put this prefix before whole records only.
    if any(secret.at > len(secret.prefix) for secret in benchmark.secrets):
        recorded = None
    return resolve_prefix_token(
        site.plan.data.prefix_token, site.model, known, longest, *options, recorded=recorded
    )


def count_longest_context(benchmark: Benchmark, prompt_rows: int) -> int:
    """Return the number of tokens of the longest context, without the prefix token.

    Args:
        benchmark: data of the run.
        prompt_rows: number of embedding vectors in the longest soft prompt. Each takes the place of
            a token.
    """
    # Held-out texts and canaries are read without a soft prompt.
    lengths = list(map(len, benchmark.heldout))
    for canary in benchmark.canaries:
        lengths.append(len(canary.tokens))
    for pair in benchmark.known:
        lengths.append(prompt_rows + len(pair.tokens))
    texts = build_secret_table(benchmark.secrets).texts
    lengths.append(int((prompt_rows + texts.lengths).max(initial=0)))
    return max(lengths, default=0)
