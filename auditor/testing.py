"""Test in one line that your own plug-in or model keeps its contract; compute intervals.

    from auditor.testing import check_attack

    check_attack(Consensus)

Each check queries a tiny random model, made on the spot, and raises `ContractBroken` with every
breach.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

from auditor.core.canary_space import CanarySpace
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.jsonable import from_json, to_json
from auditor.core.nouns import Canary, Guesses, Observation, Pair, Query, Secret, Wording
from auditor.core.result import Measurement
from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.defenses.uniform_mixing import UniformMixing
from auditor.generation.sample import sample_candidates
from auditor.models import consistency
from auditor.models.base import LanguageModel, implies_capability
from auditor.models.decoding import ANCESTRAL, Decoding
from auditor.models.ensemble import ModelEnsemble
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.attack import Attack
from auditor.plugins.defense import Defense, Prompt, Scenario, TrainedModel
from auditor.plugins.options import describe_plugin
from auditor.plugins.probe import Observed, Probe
from auditor.plugins.view import TEXT_ONLY, WHITE_BOX, Setting, View
from auditor.privacy.gradient_canaries import GradientCanaries
from auditor.privacy.promises import PrivacyRecord
from auditor.statistics import roc


def tpr_interval(
    members: ArrayLike, nonmembers: ArrayLike, rate: float = 0.01, seed: int = 0
) -> Measurement:
    """Return the true-positive rate at this false-positive rate, with its 95% interval.

    Args:
        members: scores of members, (members,); a higher score means more likely a member.
        nonmembers: scores of non-members, (non-members,).
        rate: the false-positive rate.

    Numbers are computed as in reports (statistics/roc.py). `value` is the share of members above a
    threshold that is estimated from these non-members. On average over samples of non-members, a
    share `rate` of all non-members exceeds this threshold. `low` and `high` bound the share of
    members above the exact threshold. The result is the same for every seed, because nothing is
    drawn. Raise AuditError if scores are NaN or have the wrong shape, or if there are too few
    non-members to set a threshold.
    """
    member_scores = np.asarray(members, dtype=np.float64)
    others = np.asarray(nonmembers, dtype=np.float64)
    if member_scores.ndim != 1 or others.ndim != 1 or not len(member_scores):
        raise AuditError(
            f"expected one score a record, got arrays of {member_scores.shape} and {others.shape}"
        )
    if np.isnan(member_scores).any() or np.isnan(others).any():
        raise AuditError("expected a score of every record, got NaN")
    if not 0 < rate < 1:
        raise AuditError(f"expected a rate in (0, 1), got {rate:g}")
    estimate = roc.estimate_tpr(f"tpr_at_{100 * rate:g}pct_fpr", member_scores, others, rate)
    if estimate is None:
        raise AuditError(
            f"expected at least {roc.count_threshold_nonmembers(rate):,} non-members for a "
            f"rate of {rate:.3g}, got {len(others):,}"
        )
    return estimate


# --- the contracts ---


class ContractBroken(AssertionError):
    """Error that lists how a plug-in or model breaks its contract, one sentence per line."""


def check_attack(attack: Attack | Probe | type[Attack] | type[Probe]) -> None:
    """Check that an attack or probe keeps its contract.

    A class is built with few samples and epochs. Raise ContractBroken, which lists every violation.
    An attack must describe itself correctly. In every setting with the access that it needs, it
    must answer every query, most confident guess first, or give a reason. Each answer may depend
    only on its own query. It must draw as many tokens as announced. A probe must observe every
    secret. Each observation may depend only on its own secret, and measured values must be within
    their intervals.
    """
    plugin: Any = attack
    if isinstance(attack, type):
        plugin = make_small_plugin(attack)
    faults: Any = _attack_contract_faults
    if isinstance(plugin, Probe):
        faults = _probe_contract_faults
    needs = [*consistency.CAPABILITIES, "training"]
    _raise_if_broken(plugin.name, _plugin_contract_faults(plugin, needs), faults(plugin))


def check_defense(defense: Defense | type[Defense]) -> None:
    """Check that a defense keeps its contract.

    A defense must serve a model. More queries may never spend less of its privacy budget. Its claim
    must be unchanged after it is written as JSON and read again. Raise ContractBroken with every
    breach.
    """
    if isinstance(defense, type):
        defense = defense()
    needs = ("public", "ensemble", "trained", "whole", "records", "corpus")
    _raise_if_broken(
        defense.name, _plugin_contract_faults(defense, needs), _defense_contract_faults(defense)
    )


def check_model(model: LanguageModel) -> None:
    """Check that a model keeps its contract.

    A model must return the same distribution for every kind of query, and samples of the requested
    length. Raise ContractBroken, which lists every violation.
    """
    _raise_if_broken(model.name, _model_contract_faults(model))


def _raise_if_broken(name: str, *faults: Iterator[str]) -> None:
    sentences = []
    for sentence in chain(*faults):
        sentences.append(f"{name}: {sentence}")
    if sentences:
        raise ContractBroken("\n".join(sentences))


def _plugin_contract_faults(plugin: Any, needs: Sequence[str]) -> Iterator[str]:
    kind = type(plugin)
    if not dataclasses.is_dataclass(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        yield "expected a frozen dataclass, whose fields are its options"
    if len(describe_plugin(kind)) < 20:
        yield (
            "expected a first line of the docstring that says what it does, got "
            f"{describe_plugin(kind)!r}"
        )
    if unknown := set(plugin.needs) - set(needs):
        yield f"expected needs among {', '.join(sorted(needs))}, got {min(unknown)!r}"


def _attack_contract_faults(attack: Attack) -> Iterator[str]:
    queries = random_queries()
    for setting in (TEXT_ONLY, WHITE_BOX):
        try:
            guesses_by_id = fit_and_guess(attack, make_view(tiny_model(), setting), queries)
        except NotApplicable as why:
            if not str(why) or setting_gives_capabilities(attack.required_capabilities, setting):
                yield (
                    f"expected answers in the setting {setting.name}, which gives all that it "
                    f"needs, got {str(why)!r}"
                )
            continue
        yield from _guess_format_faults(guesses_by_id, queries, setting.name)
        if setting is WHITE_BOX and set(guesses_by_id) == {query.id for query in queries}:
            yield from _batch_and_count_faults(attack, queries, guesses_by_id)


def _batch_and_count_faults(
    attack: Attack, queries: Sequence[Query], everything: dict[str, Guesses]
) -> Iterator[str]:
    """Yield a sentence for each answer that depends on the batch, and for a wrong number of drawn
    tokens.

    everything: the guesses for all queries at once, keyed by query id.
    """
    for batch_size in (1, 2):
        alone = fit_and_guess(
            attack, make_view(tiny_model(), WHITE_BOX, batch_size=batch_size), queries[2:4]
        )
        for query in queries[2:4]:
            guesses = alone.get(query.id)
            if guesses is None or not _is_nearly_same_guesses(guesses, everything[query.id]):
                yield (
                    f"expected the answer to {query.id} to depend only on it; in batches of "
                    f"{batch_size} it changes"
                )
    recipes = attack.sample_counts_by_recipe(make_view(tiny_model(), WHITE_BOX))
    planned = {query.id: sum(recipes.values()) * query.length for query in queries}
    n_drawn = {name: guesses.drawn for name, guesses in everything.items()}
    if n_drawn != planned:
        yield f"expected as many drawn tokens as samples_by_recipe() says, {planned}, got {n_drawn}"


def _guess_format_faults(
    guesses_by_id: dict[str, Guesses], queries: Sequence[Query], setting: str
) -> Iterator[str]:
    ids = {query.id for query in queries}
    if set(guesses_by_id) != ids:
        missing = sorted(ids - set(guesses_by_id))
        yield f"expected an answer to every query in the setting {setting}, got none to {missing}"
        return
    for query in queries:
        guesses = guesses_by_id[query.id]
        ranked = guesses.ranked
        scores = [guess.score for guess in ranked]
        if any(len(guess.suffix) != query.length for guess in ranked):
            yield (
                f"expected guesses of {query.length} tokens for {query.id}, got others in the "
                f"setting {setting}"
            )
        if sum(guess.count for guess in ranked) != guesses.samples:
            yield (
                f"expected the counts of the guesses for {query.id} to add up to its "
                f"{guesses.samples} samples"
            )
        if scores != sorted(scores, reverse=True):
            yield f"expected the surest guess for {query.id} first, got scores {scores}"
        if len({guess.suffix for guess in ranked}) != len(ranked):
            yield f"expected each guess for {query.id} once, got one twice"


def _is_nearly_same_guesses(first: Guesses, other: Guesses) -> bool:
    """Test whether guesses and their order are equal, and scores are equal up to rounding."""
    pairs = list(zip_longest(first.ranked, other.ranked))
    return None not in chain(*pairs) and all(
        (a.suffix, a.count) == (b.suffix, b.count) and _nearly_equal(a.score, b.score)
        for a, b in pairs
    )


def _is_nearly_same_observation(first: Observation, other: Observation) -> bool:
    return first.values.keys() == other.values.keys() and all(
        _nearly_equal(value, other.values[key]) for key, value in first.values.items()
    )


_nearly_equal = functools.partial(math.isclose, rel_tol=1e-4, abs_tol=1e-5)


def _probe_contract_faults(probe: Probe) -> Iterator[str]:
    secrets = make_subjects_for_probe(probe, tiny_model())
    ids = {secret.id for secret in secrets}
    target = model_for_probe(probe, tiny_model())
    everything: dict[str, Observation] = {}
    for setting in (TEXT_ONLY, WHITE_BOX):
        try:
            observations = observe_by_id(probe, make_view(target, setting), secrets)
        except NotApplicable as why:
            everything = {}
            if not str(why) or setting_gives_capabilities(probe.needs, setting):
                yield (
                    f"expected observations in the setting {setting.name}, which gives all it "
                    f"needs, got {str(why)!r}"
                )
            continue
        if not setting_gives_capabilities(probe.needs, setting):
            yield (
                f"expected no observations in the setting {setting.name}, which lacks "
                f"{', '.join(probe.needs)}"
            )
        if set(observations) != ids:
            yield (
                "expected an observation of every secret, got none of "
                f"{sorted(ids - set(observations))}"
            )
        values = [observation.values for observation in observations.values()]
        if len(set(map(frozenset, values))) != 1 or not all(values):
            yield "expected the same numbers for every secret, at least one"
        if any(math.isnan(value) for numbers in values for value in numbers.values()):
            yield "expected numbers, got NaN"
        everything = observations
    if set(everything) != ids:
        return  # a sentence above says so
    for batch_size in (1, 2):
        view = make_view(target, WHITE_BOX, batch_size=batch_size)
        alone = observe_by_id(probe, view, secrets[3:7])
        for secret in secrets[3:7]:
            observation = alone.get(secret.id)
            expected = everything[secret.id]
            if observation is None or not _is_nearly_same_observation(observation, expected):
                yield (
                    f"expected the observation of {secret.id} to depend only on it; in batches of "
                    f"{batch_size} it does not"
                )
    yield from _measurement_faults(probe, make_view(target, WHITE_BOX), secrets, everything)


def _measurement_faults(
    probe: Probe, at: View, secrets: list[Secret], observations: dict[str, Observation]
) -> Iterator[str]:
    observation_list = [observations[secret.id] for secret in secrets]
    completed = Observed(
        probe.add_joint_values(at, secrets, observation_list),
        probe.facts(at, secrets, observation_list),
    )
    if probe.add_joint_values(at, secrets, completed) != completed:
        yield "expected add_joint_values() to change nothing the second time"
    if probe.facts(at, secrets, observation_list) != completed.facts:
        yield "expected facts() to say the same the second time"
    if [observation.secret for observation in completed] != [secret.id for secret in secrets]:
        yield "expected add_joint_values() to keep the order of the secrets"
    measured = probe.measurements(secrets, completed)
    names = [measurement.name for measurement in measured]
    if not names or len(set(names)) != len(names):
        yield f"expected measurements, each name once, got {names}"
    for m in measured:
        # Some numbers have no valid interval.
        bounded = not (math.isnan(m.low) and math.isnan(m.high))
        if (bounded and not m.low <= m.value <= m.high) or m.n < 1:
            yield f"expected {m.name} in its interval, of at least one secret, got {m}"
    if not all(probe.notes(secrets, completed)):
        yield "expected notes that say something, got an empty one"


def _defense_contract_faults(defense: Defense) -> Iterator[str]:
    among = make_tiny_scenario()
    model = defense.protect(among)
    if model.vocab_size != among.target.vocab_size:
        yield (
            f"expected a model of the target's {among.target.vocab_size} tokens, got "
            f"{model.vocab_size}"
        )
    yield from _model_contract_faults(model)
    claims = [defense.claim(among, n_drawn) for n_drawn in (0, 20, 60)]
    first = claims[0]
    if first is None:
        if any(claims):
            yield "expected a claim before the first query, or none ever"
        return
    if from_json(type(first), json.loads(json.dumps(to_json(first)))) != first:
        yield "expected a claim that JSON can hold"
    for relation, most in first.epsilon.items():
        n_tokens = [claim.spent_epsilon[relation] for claim in claims if claim]
        if first.queries is None:
            if set(n_tokens) != {most}:
                yield (
                    "expected all of epsilon to be spent in training, as queries cost nothing, "
                    f"got {n_tokens}"
                )
        elif n_tokens != sorted(n_tokens) or n_tokens[0] != 0 or n_tokens[-1] > most * (1 + 1e-9):
            yield (
                f"expected more queries to spend more of {relation}, from 0 to at most {most}, "
                f"got {n_tokens}"
            )


def _model_contract_faults(model: LanguageModel) -> Iterator[str]:
    yield from consistency.find_inconsistencies(model)
    prefix = torch.tensor([[1, 2, 3]], device=model.device)
    if "draw" in model.capabilities:
        noise = draw_secret_uniforms(20, 3, 0)[None]
        (candidates,) = sample_candidates(model, prefix, 3, ANCESTRAL, noise, distribution=False)
        if candidates.suffixes.shape[1] != 3 or int(candidates.counts.sum()) != 20:
            yield (
                f"expected 20 samples of 3 tokens, got {int(candidates.counts.sum())} of "
                f"{candidates.suffixes.shape[1]}"
            )
    if "embeddings" in model.capabilities:
        prompt = model.embedding_rows(2).requires_grad_(True)
        noise_source = torch.Generator().manual_seed(0)
        log_prob = model.tuning_log_probs(prefix, 1, prompt, noise_source)[0, 0, 5]
        slope = None
        if log_prob.requires_grad:
            slope = torch.autograd.grad(log_prob, prompt, allow_unused=True)[0]
        if slope is None or not bool(slope.any()):
            yield "expected gradients for a soft prompt, as its capabilities say, got none"


# --- inputs of the contracts ---

SMALL: dict[str, Any] = {
    "samples": 6,
    "prompt_length": 3,
    "epochs": 2,
    "batch": 4,
    "warmup_steps": 1,
    "beams": 4,
    "games": 64,
    "tokens": 4,
    "references": 20,
    "formats": "word=A{letters:1}",
}


def make_small_plugin(kind: Any) -> Any:
    """Make a plug-in of this class with few samples and epochs."""
    options = {}
    for f in dataclasses.fields(kind):
        if f.name in SMALL and type(f.default) is type(SMALL[f.name]):
            options[f.name] = SMALL[f.name]
    return kind(**options)


@functools.cache
def tiny_model(seed: int = 0) -> HuggingFaceModel:
    """Return the model of `make_tiny_random_model` with default arguments, cached by seed."""
    # The seed is restored afterwards. No devices, because naming CUDA devices would initialise
    # CUDA.
    with torch.random.fork_rng(devices=[]):
        return make_tiny_random_model(seed=seed)


def make_tiny_random_model(
    vocab_size: int = 61, seed: int = 0, kind: str = "neox", scale: float = 3.0
) -> HuggingFaceModel:
    """Make a tiny random model.

    `kind` is `neox` or `gpt2`. `scale` is the norm of each row of the output layer. A large norm
    makes the distributions peaked, so that samples share prefixes and top-p truncates.
    """
    torch.manual_seed(seed)  # seeds the whole process; callers who mind must fork the generator
    model: Any
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=2, n_positions=64, eos_token_id=0
        )
        model = GPT2LMHeadModel(config)
    else:
        neox_config = GPTNeoXConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=96,
            eos_token_id=0,
            bos_token_id=0,
        )
        model = GPTNeoXForCausalLM(neox_config)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        # All rows have the same norm, so only `scale` determines how peaked distributions are.
        head.mul_(scale / head.norm(dim=1, keepdim=True))
    return HuggingFaceModel(model, name=f"tiny {kind}")


class TwoLetterTokenizer:
    """Tokenizer with two-letter words, upper case for even ids.

    Lower-casing turns an even id into the next id.
    """

    def decode(self, tokens: Sequence[int]) -> str:
        text = ""
        for t in tokens:
            text += chr(65 + 32 * (t % 2) + t // 26) + chr(97 + t % 26)
        return text

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        ids = []
        for a, b in zip(text[::2], text[1::2], strict=True):
            token = (ord(a.lower()) - 97) * 26 + ord(b) - 97
            ids.append((token + 1) % 61 if a.islower() and token % 2 == 0 else token)
        return {"input_ids": ids}


def make_view(model: LanguageModel, setting: Setting, **more: Any) -> View:
    roles: dict[str, Any] = {"public": model, "reference": tiny_model(7), "training": KEPT}
    return View("target", model, setting, seed=0, tokenizer=TwoLetterTokenizer(), **roles, **more)


def random_queries(count: int = 6) -> list[Query]:
    tokens = torch.randint(1, 61, (count, 5), generator=torch.Generator().manual_seed(1)).tolist()
    return [Query(f"q{i}", tuple(row), 3 + i % 2) for i, row in enumerate(tokens)]


KNOWN = [Pair(query.prefix, query.prefix[:3]) for query in random_queries(8)]


def fit_and_guess(attack: Attack, view: View, queries: Sequence[Query]) -> dict[str, Guesses]:
    guesses_of_queries = attack.guess(view, attack.fit(view, KNOWN), queries)
    return {guesses.secret: guesses for guesses in guesses_of_queries}


def make_test_secrets(model: LanguageModel) -> list[Secret]:
    """Make members and non-members of two lengths. The model draws half of the suffixes."""
    test_secrets = []
    for i, query in enumerate(random_queries(12)):
        suffix = query.prefix[: query.length]
        if i % 4 < 2:
            prefix = torch.tensor([query.prefix])
            noise = draw_secret_uniforms(1, query.length, i)[None]
            (candidates,) = sample_candidates(
                model, prefix, query.length, Decoding(top_p=0.7), noise
            )
            suffix = tuple(candidates.suffixes[0].tolist())
        text = TwoLetterTokenizer().decode(suffix)
        ends = tuple(range(2, len(text) + 1, 2))
        marks = tuple(("word", text[i - 2 : i]) for i in ends if text[i - 2] == "A")
        wording = Wording.join(TwoLetterTokenizer().decode(query.prefix), text, ends, marks)
        secret = Secret(query.id, query.prefix, suffix, 1 + i % 2, i % 3 > 0, wording=wording)
        test_secrets.append(secret)
    return test_secrets


def make_exposure_test_canaries() -> list[Secret]:
    """Make 12 canaries, some inserted and some not, with texts that `TwoLetterTokenizer` can
    encode.

    All are from one space of possible canaries that is small enough to list.
    """
    words = TwoLetterTokenizer()
    slots = tuple(
        (f"slot{i}", tuple(words.decode((token,)) for token in range(i, 61, 10))) for i in range(3)
    )
    space = CanarySpace(words.decode((5, 9)) + "".join(f"{{{name}}}" for name, _ in slots), slots)
    canaries = []
    for i, text in enumerate(list(space.texts())[::17][:12]):
        tokens = tuple(words(text)["input_ids"])
        canaries.append(Secret(f"c{i}", (), tokens, i % 3, i % 3 > 0, Canary(text, space)))
    return canaries


def make_coin_flip_test_canaries() -> list[Secret]:
    """Make canaries with prefixes; mark every second one as inserted, as a coin flip would."""
    canaries = []
    for i, query in enumerate(random_queries(24)):
        coin = i % 2 > 0
        canary = Canary(TwoLetterTokenizer().decode(query.prefix * 2), coin=coin)
        suffix = query.prefix[: query.length]
        canaries.append(Secret(query.id, query.prefix, suffix, i % 2, coin, canary))
    return canaries


def make_subjects_for_probe(probe: Probe, model: LanguageModel) -> list[Secret]:
    """Make secrets or canaries of the kind that this probe observes."""
    if probe.of == "own":
        return list(probe.textless_subjects(make_view(model, WHITE_BOX)))
    if probe.of == "canaries":
        return make_exposure_test_canaries()
    if probe.of == "coins":
        return make_coin_flip_test_canaries()
    return make_test_secrets(model)


def model_for_probe(probe: Probe, model: LanguageModel) -> LanguageModel:
    """Return the model, or a defended model if the probe needs a privacy claim."""
    subjects = make_subjects_for_probe(probe, model)[:1]
    try:
        next(iter(probe.observe_secrets(make_view(model, WHITE_BOX), subjects)), None)
    except NotApplicable:
        return UniformMixing().protect(Scenario(model, model, None, queries=60, answer_length=4))
    return model


def setting_gives_capabilities(needs: Sequence[str], setting: Setting) -> bool:
    """Test whether an access setting gives all capabilities in `needs`."""
    return all(implies_capability(setting.capabilities, needed) for needed in needs)


def observe_by_id(probe: Probe, view: View, secrets: Sequence[Secret]) -> dict[str, Observation]:
    return {observation.secret: observation for observation in probe.observe_secrets(view, secrets)}


@functools.cache
def make_tiny_scenario() -> Scenario:
    """Make, from tiny models, all inputs that a defense may need."""
    target = tiny_model()
    ensemble = ModelEnsemble(target, [tiny_model(seed) for seed in (1, 2)])
    prompts = []
    corpus = []
    for i, query in enumerate(random_queries()):
        record = (*query.prefix, 7, 8) if i % 3 else ()
        prompts.append(Prompt(query.id, query.prefix, record))
        corpus.append(query.prefix * 4)
    return Scenario(
        target,
        target,
        ensemble,
        60,
        4,
        trained=TrainedModel(tiny_model(3), _PROMISE),
        whole=tiny_model(4),
        prompts=tuple(prompts),
        corpus=corpus,
    )


KEPT = GradientCanaries(
    included=tuple(i % 2 == 0 for i in range(40)),
    scores=tuple(math.cos(3 * i) + (i % 2 == 0) for i in range(40)),
    sums=tuple(math.cos(i) for i in range(40)),
    noise_multiplier=1.0,
    sampling_rate=0.1,
    steps=10,
    clip=1.0,
    delta=1e-5,
    unit="record",
    releases=10,
    drawn=40,
    unevenness=0.0,
    noise_values=640,
    noise_size=1.0,
    noise_repeated=0.4,
)
_PROMISE = PrivacyRecord(
    method="dp-sgd",
    epsilon=3.0,
    delta=1e-5,
    status="sound",
    sound=True,
    noise_multiplier=1.0,
    clip=1.0,
    sampling_rate=0.1,
    steps=10,
    unit="record",
    noise="secret",
    epsilon_rdp=3.5,
)
