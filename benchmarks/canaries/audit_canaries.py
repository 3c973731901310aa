"""Make the canaries of an audit; a fair coin decides whether each is in the training data.

The audit tests whether a model reveals the coins. Texts, ids and order are fixed before the coins
are tossed and with separate random numbers, so that only the inclusion depends on the coins. Only
the secret after the prefix is scored: the prefix is ordinary text, whose score would hide the
secret's score.
"""

from __future__ import annotations

import re
import secrets as randomness
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from auditor.benchmarks.canaries.exposure_canaries import (
    check_canary_counts,
    list_prefix_free_canary_words,
)
from auditor.benchmarks.data.cut_places import count_common_beginning
from auditor.core.errors import AuditError
from auditor.core.nouns import Canary, Secret
from auditor.core.secret_randomness import CHANNELS, make_keyed_generator
from auditor.statistics.audited import count_needed_canaries
from auditor.statistics.distributions import compute_sign_test_p_value

if TYPE_CHECKING:
    from auditor.models.huggingface import HuggingFaceModel

AUDIT_VERSION = 2  # of the manifest; version 1 has no coins
Kind = Literal["words", "prefixed", "sampled", "rare-tokens", "new-tokens"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BEGUN = ("prefixed", "rare-tokens", "new-tokens")  # kinds that begin like texts of the data
BY_MODEL = ("sampled", "rare-tokens")  # kinds that need a model
# Below this, a model samples text that it writes anyway, and training cannot change that.
LEAST_TEMPERATURE = 0.8
_PREFIX_WORDS = 12
_TOKENS_A_WORD = 3
_LEAST_EPSILON = 0.01  # a smaller bound means nothing
_UNFAIR = 1e-9  # rate at which fair coins are rejected
_AT_ONCE = 256  # samples of a model
_BEGINNINGS = 32  # texts after which a model is queried for its least expected tokens
Halves = tuple[str, str]  # prefix and secret of a text


@dataclass(frozen=True)
class CoinedCanary:
    """Hold a canary whose inclusion in the training data was decided by a coin.

    prefix: the text before the secret, which is not scored. included: the coin's result.
    """

    id: str
    prefix: str
    secret: str
    included: bool

    @property
    def text(self) -> str:
        return self.prefix + self.secret


@dataclass(frozen=True)
class AuditCanaryManifest:
    """List the canaries of an audit of epsilon.

    times: number of copies of each included canary; seed: determines texts and coins.

    Raise AuditError for an unknown version, too few canaries, duplicate ids or texts, a canary
    without a secret, or results that are too unlikely for fair coins.
    """

    schema_version: int
    kind: Kind
    seed: int
    times: int
    canaries: tuple[CoinedCanary, ...]

    def __post_init__(self) -> None:
        if self.schema_version != AUDIT_VERSION:
            raise AuditError(
                f"expected a manifest with coins of version {AUDIT_VERSION}, got "
                f"{self.schema_version}"
            )
        if self.times < 1:
            raise AuditError(f"expected canaries that go in at least once, got {self.times} times")
        inside = sum(canary.included for canary in self.canaries)
        m = len(self.canaries)
        check_canary_counts(m, m * self.times)
        if m < (fewest := count_needed_canaries(_LEAST_EPSILON, 0.0)):
            raise AuditError(
                f"expected at least {fewest} canaries, got {m}: fewer than any bound of epsilon "
                "needs"
            )
        for field in ("id", "text"):
            if len({getattr(canary, field) for canary in self.canaries}) < len(self.canaries):
                raise AuditError(
                    f"expected every canary's own {field}, got one twice: they would share one coin"
                )
        if not all(canary.secret for canary in self.canaries):
            raise AuditError("expected a secret in every canary, got an empty one")
        fair_coin_p_value = compute_sign_test_p_value(inside, m)
        if not 0 < inside < m or fair_coin_p_value < _UNFAIR:
            raise AuditError(f"expected coins that look fair, got {inside:,} of {m:,} canaries in")

    def list_inserted_copies(self) -> list[CoinedCanary]:
        """Return a list with `times` copies of each included canary."""
        return [canary for canary in self.canaries if canary.included for _ in range(self.times)]


def make_audit_canary_manifest(
    kind: Kind, texts: Sequence[Halves], times: int, seed: int
) -> AuditCanaryManifest:
    """Toss a fair coin for each text to decide whether it is included; return the manifest.

    The coins depend only on the seed.
    """
    # A separate stream: texts of the same seed reveal nothing of the coins, which bounds of epsilon
    # rely on.
    heads = make_keyed_generator("coins of an audit", seed).random(len(texts)) < 0.5
    canaries = (
        CoinedCanary(f"audit-{i:05d}", *halves, bool(heads[i])) for i, halves in enumerate(texts)
    )
    return AuditCanaryManifest(AUDIT_VERSION, kind, seed, times, tuple(canaries))


def draw_canary_seed() -> int:
    """Draw a secret seed; whoever knows the seed of an audit knows its coins."""
    return randomness.randbits(63)


# --- kinds ---


def make_audit_canary_texts(
    kind: Kind,
    count: int,
    length: int,
    seed: int,
    *,
    texts: Sequence[str] = (),
    model: HuggingFaceModel | None = None,
    temperature: float = 1.0,
) -> list[Halves]:
    """Make `count` different canary texts of one kind, as (prefix, secret).

    - `words`: random words.
    - `prefixed`: random words after the start of one of the `texts`.
    - `sampled`: text that the `model` generates without a prompt.
    - `rare-tokens`: the start of a text in `texts`, followed by a single token. Each canary has a
      different token; all are tokens that the `model` hardly expects there.
    - `new-tokens`: the start of one of the `texts`, followed by a token that occurs nowhere else
      (`new_canary_token_texts`).

    length: number of words in a secret. A `sampled` text has 3 * `length` tokens. Scoring needs a
    prefix: if the kind gives none, the first word of the text becomes the prefix.

    Raise AuditError if there are too few `texts`.
    """
    if count < 1:
        raise AuditError(f"expected at least 1 canary, got {count}")
    if length < 1 + (kind == "words"):
        raise AuditError(
            f"expected canaries with more words than their prefix, got a length of {length}"
        )
    if kind == "sampled":
        assert model is not None  # the caller has loaded a model
        return _sample_model_canaries(count, _TOKENS_A_WORD * length, seed, model, temperature)
    phrases = _draw_canary_phrases(length, seed)
    if kind == "words":
        return list(_draw_distinct_canaries(count, lambda: _split_canary(next(phrases))))
    begun = _draw_canary_prefixes(texts, seed)
    if kind == "prefixed":
        return list(_draw_distinct_canaries(count, lambda: (next(begun), f" {next(phrases)}")))
    if kind == "rare-tokens":
        assert model is not None
        words = _list_rare_words(count, [next(begun) for _ in range(_BEGINNINGS)], model)
        # The least expected words come first: shuffle them, so that no place or id shows how rare
        # a word is.
        order = make_keyed_generator("rare tokens of an audit", seed).permutation(count)
        return [(next(begun), words[i]) for i in order]
    return [(next(begun), token) for token in new_canary_token_texts(count)]


def new_canary_token_texts(count: int) -> list[str]:
    """Return `count` new tokens as text; they must be added to the trained model's tokenizer."""
    return [f"<|audit-{i:05d}|>" for i in range(count)]


def _sample_model_canaries(
    count: int, length: int, seed: int, model: HuggingFaceModel, temperature: float
) -> list[Halves]:
    """Sample `count` texts of `length` tokens; raise AuditError if too few are distinct."""
    import torch  # only here: reading a manifest needs no model

    from auditor.generation.sample import sample_candidates
    from auditor.models.decoding import Decoding

    tokenizer: Any = model.tokenizer
    if not temperature >= LEAST_TEMPERATURE:
        raise AuditError(
            f"expected a temperature of at least {LEAST_TEMPERATURE} for canaries that a model "
            f"samples, got {temperature:g}: text that it would write anyway says nothing about "
            "training"
        )
    start = getattr(tokenizer, "bos_token_id", None)
    if start is None:
        start = getattr(tokenizer, "eos_token_id", None)
    if start is None:
        raise AuditError(
            "expected a model whose tokenizer has a token to begin or end texts with, got "
            f"{model.name}"
        )
    decoding = Decoding(temperature, forbidden=model.eos)  # all samples have full length
    texts: dict[str, None] = {}  # a set in the order of sampling: the choice is reproducible
    # Draw up to four times the needed number, then give up: the model repeats itself.
    for batch in range(2 + 4 * count // _AT_ONCE):
        noise = make_keyed_generator("sampled canaries", seed, batch).random(
            (1, _AT_ONCE, length, CHANNELS)
        )
        context = torch.tensor([[start]], device=model.device)
        candidates = sample_candidates(model, context, length, decoding, noise)[0]
        for text in tokenizer.batch_decode(candidates.suffixes, skip_special_tokens=True):
            text = text.replace("\ufffd", "").strip()  # drop halves of characters
            if len(text.split()) > 1:
                texts[text] = None
        if len(texts) >= count:
            return [_split_canary(text) for text in list(texts)[:count]]
    raise AuditError(
        f"expected {count:,} different texts of {length} tokens, but {model.name} wrote "
        f"{len(texts):,}"
    )


def _list_rare_words(count: int, begun: Sequence[str], model: HuggingFaceModel) -> list[str]:
    """Return the `count` one-token words that the model expects least, rarest first.

    The order is by the mean log-probability of a word after each text in `begun`. These words serve
    if no new tokens can be added to the vocabulary, as Panda et al. 2025 do.
    """
    import torch

    tokenizer: Any = model.tokenizer
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in begun]
    log_probs = []
    with torch.no_grad():
        for row in rows:
            context = torch.tensor([row], device=model.device)
            log_probs.append(model.log_probs(context, 1)[0, 0].double())
    words: list[str] = []
    for token in torch.stack(log_probs).mean(0).argsort().tolist():
        word = f" {tokenizer.decode([token]).strip()}"
        # Check it after a text too: a tokenizer that merges across the join makes no separate token
        # of the word.
        if word[1:].isalpha() and tokenizer.encode(begun[0] + word, add_special_tokens=False) == [
            *rows[0],
            token,
        ]:
            words.append(word)
            if len(words) == count:
                return words
    raise AuditError(
        f"expected {count:,} words of one token, but the tokenizer of {model.name} has "
        f"{len(words):,}"
    )


def _split_canary(text: str) -> Halves:
    cut = len(text.split(maxsplit=1)[0])
    return text[:cut], text[cut:]


def _draw_canary_phrases(length: int, seed: int) -> Iterator[str]:
    known = list_prefix_free_canary_words()
    noise = make_keyed_generator("words of an audit", seed)
    while True:
        yield " ".join(known[i] for i in noise.integers(len(known), size=length))


def _draw_canary_prefixes(texts: Sequence[str], seed: int) -> Iterator[str]:
    """Yield the leading words of texts endlessly, in a random order."""
    begun = list(dict.fromkeys(filter(None, map(_cut_canary_prefix, texts))))
    if not begun:
        raise AuditError("expected data with texts to begin canaries with, got none")
    order = make_keyed_generator("prefixes of an audit", seed).permutation(len(begun))
    while True:
        yield from (begun[i] for i in order)


def _cut_canary_prefix(text: str) -> str:
    """Return the leading words of a text, unchanged, at most half of all its words."""
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    if ends:
        return text[: ends[min(_PREFIX_WORDS, max(1, len(ends) // 2)) - 1]]
    return ""


def _draw_distinct_canaries(count: int, draw: Callable[[], Halves]) -> Iterator[Halves]:
    """Yield `count` distinct texts; raise AuditError if `draw` returns too few distinct texts."""
    texts: set[str] = set()
    for _ in range(2 * count + 100):
        if len(texts) == count:
            return
        halves = draw()
        if "".join(halves) not in texts:
            texts.add("".join(halves))
            yield halves
    if len(texts) < count:
        raise AuditError(
            f"expected {count:,} different secrets, but secrets this short run out at "
            f"{len(texts):,}"
        )


# --- canaries as secrets of a model ---


def build_audit_secrets(
    manifest: AuditCanaryManifest, tokenizer: Any, rows: Sequence[Sequence[int]]
) -> Iterator[Secret]:
    """Yield the canaries as secrets; rows: the tokens of each text.

    Raise AuditError if a canary uses a token that was added for the audit but is missing in the
    tokenizer.
    """
    from auditor.generation.tries import encode_without_special_tokens

    prefixes = encode_without_special_tokens(
        tokenizer, [entry.prefix for entry in manifest.canaries]
    )
    for entry, begun, row in zip(manifest.canaries, prefixes, rows, strict=True):
        # A token across the end of the prefix belongs to the secret.
        cut = count_common_beginning(begun, row)
        if manifest.kind == "new-tokens" and len(row) != cut + 1:
            raise AuditError(
                f"expected the secret of {entry.id} to be one new token, but the model's tokenizer "
                f"writes it as {len(row) - cut}: give what `audit canaries extend` made to the "
                "training"
            )
        yield Secret(
            entry.id,
            tuple(row[:cut]),
            tuple(row[cut:]),
            manifest.times * entry.included,
            member=entry.included,
            canary=Canary(entry.text, coin=entry.included),
        )
