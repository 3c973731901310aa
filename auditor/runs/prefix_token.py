"""Choose the prefix token: the token before every queried text, as in training.

In training, the tokenizer put a `<bos>` before each text, or the trainer an end of text between
packed records. Without this token, a model may recite few of its records. A run chooses its prefix
token once, on the undefended model. Only this module adds the token, so all prefixes, secrets and
guesses contain only tokens of the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auditor.core.arrays import Floats
from auditor.core.errors import AuditError
from auditor.core.nouns import Pair, PrefixToken, Secret, Tokens
from auditor.core.plan_fields import AUTO, NONE
from auditor.core.secret_randomness import make_keyed_generator
from auditor.generation.tries import encode_without_special_tokens
from auditor.models.base import LanguageModel, ReadsPositions, implies_capability
from auditor.models.vocabulary import decode_keeping_special_tokens
from auditor.models.wrapping import WrappingModel
from auditor.plugins.trainer import RECORD
from auditor.runs.likeliest_reading import (
    choose_likeliest_reading,
    compute_pair_nlls,
    is_choice_clear,
)

_SPECIAL = ("bos", "eos")
# maximum number of known pairs in a choice: a difference that needs more pairs does not matter
PAIRS = 500
# first pairs, enough if they exclude a lead of `_MARGIN` for another prefix token
_LOOKS = (5, 50)
_SCORED = 16  # leading tokens of each suffix to score: these depend most on a prefix token
_MARGIN = 0.1  # nats a token
_LEAD = 4  # unscored leading tokens of a text in a hurried choice
_DRAWN = 64  # texts of each canary format in place of known pairs


def _make_prefixed_delegate(method: str) -> Any:
    """Make a method that adds the prefix token to texts and then calls the wrapped model.

    Args:
        method: name of the method of the wrapped model.
    """

    def answer(self: PrefixedModel, texts: Tensor, *of: Any, **more: Any) -> Any:
        return getattr(self.model, method)(self.prepend_prefix_token(texts), *of, **more)

    return answer


class PrefixedModel(WrappingModel):
    """Wrapper of a model that puts the prefix token before each text, and after any soft prompt.

    Only this class adds prefix tokens. `max_positions` is the number of positions left for texts.
    """

    def __init__(self, model: LanguageModel, prefix_token: Tokens) -> None:
        super().__init__(model)
        self.prefix_token = prefix_token
        self.choices_kept_in = model.choices_kept_in
        if self.max_positions is not None:
            self.max_positions -= len(prefix_token)

    def prepend_prefix_token(self, texts: Tensor) -> Tensor:
        """Put the prefix token before texts of shape (B, n); n may be 0.

        Return texts of shape (B, m + n), where m is the length of the prefix in tokens.
        """
        # Never empty (`wrap_prefixed_model`): an empty tensor would cast the token ids to float.
        prefix_token = torch.tensor(self.prefix_token, device=self.device).expand(len(texts), -1)
        return torch.cat([prefix_token, texts.to(prefix_token)], dim=1)

    def _prepend(self, texts: Sequence[Tokens]) -> list[Tokens]:
        return [(*self.prefix_token, *text) for text in texts]

    @property
    def can_join_rows(self) -> bool:  # type: ignore[override]  # not copied: known only with the texts
        return self.model.can_join_rows

    start = _make_prefixed_delegate("start")
    completions = _make_prefixed_delegate("completions")
    suffix_log_probs = _make_prefixed_delegate("suffix_log_probs")
    log_probs = _make_prefixed_delegate("log_probs")
    tuning_log_probs = _make_prefixed_delegate("tuning_log_probs")
    token_log_probs = _make_prefixed_delegate("token_log_probs")
    token_ranks = _make_prefixed_delegate("token_ranks")
    partial_distributions_of = _make_prefixed_delegate("partial_distributions_of")
    teacher_forced_distributions = _make_prefixed_delegate("teacher_forced_distributions")
    divergence_checks = _make_prefixed_delegate("divergence_checks")
    neighbour_distributions = _make_prefixed_delegate("neighbour_distributions")

    def read_ahead(
        self,
        texts: Sequence[Tokens],
        last: Sequence[int],
        prefix_lengths: Sequence[int] | None = None,
    ) -> None:
        if prefix_lengths is not None:
            prefix_lengths = [len(self.prefix_token) + begin for begin in prefix_lengths]
        self.model.read_ahead(self._prepend(texts), last, prefix_lengths)

    def log_probs_at_positions(self, texts: Tensor, positions: Tensor, last: int) -> Tensor | None:
        if not isinstance(self.model, ReadsPositions):
            return None
        return self.model.log_probs_at_positions(texts, positions, last)

    def forget_batch(self) -> None:
        self.model.forget_batch()

    def has_withheld_answer_by_prefix(self, prefixes: Sequence[Tokens]) -> list[bool]:
        return self.model.has_withheld_answer_by_prefix(self._prepend(prefixes))

    def published_perplexity_nll(
        self, texts: Sequence[Tokens], seed: int, n_context: int = 1
    ) -> Mapping[str, Sequence[float]]:
        # The prefix token counts as given: it is not scored.
        n_given = len(self.prefix_token) + n_context
        return self.model.published_perplexity_nll(self._prepend(texts), seed, n_given)

    def neighbour_model(self, relation: str, index: int) -> LanguageModel:
        return PrefixedModel(self.model.neighbour_model(relation, index), self.prefix_token)

    def claim_premise_counts(self) -> Mapping[str, int]:
        return self.model.claim_premise_counts()

    def row_bytes(self, positions: int, distribution: bool = True) -> int:
        return self.model.row_bytes(len(self.prefix_token) + positions, distribution)

    def check_text_fits(
        self, n_prefix: int, length: int, prompt: Tensor | None = None, prefix_token: int = 0
    ) -> None:
        # The inner model's `max_positions` includes the prefix token.
        self.model.check_text_fits(n_prefix, length, prompt, len(self.prefix_token) + prefix_token)


def wrap_prefixed_model(model: LanguageModel, prefix_token: Tokens) -> LanguageModel:
    """Return the model, wrapped so that it reads the prefix token before every text.

    If the prefix token is empty, return the model itself.
    """
    if prefix_token:
        return PrefixedModel(model, prefix_token)
    return model


# --- the choice ---


def resolve_prefix_token(
    spec: str,
    model: LanguageModel,
    known: Sequence[Pair] = (),
    longest: int = 0,
    canaries: Sequence[Secret] = (),
    framed: bool = False,
    as_trained: bool = False,
    hurried: bool = False,
    recorded: Tokens | None = None,
) -> PrefixToken:
    """Return the requested prefix token; for `auto`, choose the one that makes texts most likely.

    If the model's training recorded a prefix and it fits, `auto` takes that. Otherwise it keeps the
    tokenizer's default unless a different token gives a significantly lower mean nll per token of
    the known suffixes. The test is Student's interval, paired by known pair, and corrected for the
    number of alternatives. If there are no known pairs, `auto` uses new texts in the canaries'
    formats. In an epsilon audit, it uses the texts of all canaries, whether they were inserted or
    not.

    Args:
        spec: the requested token, or `auto`.
        model: the model.
        known: the attacker's known pairs of prefix and suffix.
        longest: number of tokens of the longest context, without prefix token. `auto` skips prefix
            tokens that do not fit.
        canaries: canaries of the run.
        framed: whether the texts begin with a chat template. The tokenizer then has no default
            prefix token.
        as_trained: whether the texts are a trainer's own token ids. `auto` then adds no prefix
            token.
        hurried: whether to save time by using fewer known pairs (see `is_choice_clear`), and only
            the starts of their texts. If `framed`, the texts are used in full.
        recorded: tokens before every record in the model's training; None if unknown.

    Raises:
        AuditError: if the model or its tokenizer does not have the requested token.
    """
    begins = {pair.prefix[: len(model.prepended)] for pair in known}
    # A template or the trainer's ids may begin with this token.
    if model.prepended and begins != {model.prepended}:
        return _resolve_server_prefix(spec, model)
    if spec != AUTO:
        tokens = parse_prefix_token(spec, model)
        return PrefixToken(
            tokens,
            f"prefix token: {describe_prefix_token(tokens, model.tokenizer)}, as given "
            f"(--prefix-token {spec})",
        )
    if as_trained:
        return PrefixToken((), "prefix token: none: the data contain the token ids of the training")
    no_room = ""
    if recorded is not None:
        if not _is_vocabulary_token(recorded, model):
            raise AuditError(
                f"expected tokens in the vocabulary of {model.name} in its {RECORD}, got "
                f"{', '.join(map(str, recorded))}"
            )
        name = describe_prefix_token(recorded, model.tokenizer)
        if model.max_positions is None or len(recorded) + longest <= model.max_positions:
            return PrefixToken(recorded, f"prefix token: {name}, as {RECORD} says")
        no_room = f"; no room for {name}, as {RECORD} says"
    if known or not canaries:
        chosen = _choose_likeliest_prefix_token(
            model, known, longest, "auxiliary records", framed, hurried
        )
    else:
        pairs, description = _list_canary_pairs(canaries, model.tokenizer)
        chosen = _choose_likeliest_prefix_token(model, pairs, longest, description)
    return replace(chosen, said=chosen.said + no_room)


def _resolve_server_prefix(spec: str, model: LanguageModel) -> PrefixToken:
    """Return the prefix token that the model's server uses.

    Raise AuditError if `spec` requests a different token.
    """
    name = describe_prefix_token(model.prepended, model.tokenizer)
    if spec != AUTO and parse_prefix_token(spec, model) != model.prepended:
        raise AuditError(
            f"expected --prefix-token {AUTO} for {model.name}, whose server puts {name} before "
            f"every text, got {spec}"
        )
    return PrefixToken(
        model.prepended, f"prefix token: {name} (the server puts it before every text)"
    )


def _choose_likeliest_prefix_token(
    model: LanguageModel,
    known: Sequence[Pair],
    longest: int,
    description: str,
    framed: bool = False,
    hurried: bool = False,
) -> PrefixToken:
    words = model.tokenizer
    prefix_tokens = _list_prefix_candidates(model, framed)
    room = math.inf if model.max_positions is None else model.max_positions
    # Never empty: the empty prefix token always has room.
    candidates = [tokens for tokens in prefix_tokens if len(tokens) + longest <= room or not tokens]
    default = candidates[0]
    basis = "tokenizer default"
    if framed:
        basis = "the chat template's"
    if words is None:
        basis = "there is no tokenizer to put another"
    if default != prefix_tokens[0]:
        basis = (
            f"no room for the tokenizer default, {describe_prefix_token(prefix_tokens[0], words)}"
        )

    def chosen(prefix_token: Tokens, reason: str) -> PrefixToken:
        return PrefixToken(
            prefix_token, f"prefix token: {describe_prefix_token(prefix_token, words)} ({reason})"
        )

    if not implies_capability(model.capabilities, "likelihood"):
        return chosen(default, f"{basis}; {model.name} gives no log-probabilities to choose by")
    pairs = _sample_fitting_pairs(known, room - max(map(len, candidates)))
    if hurried and not framed:  # a template starts every text the same way
        pairs = [_shorten_pair(pair) for pair in pairs]
        description = f"beginnings of {description}"
    pairs = [Pair(pair.prefix, pair.suffix[:_SCORED]) for pair in pairs]
    if not pairs:
        return chosen(default, f"{basis}; no {description} to choose by")
    best, nll = _compare_prefix_tokens(model, candidates, pairs, hurried)
    if best != default:
        basis = f"the most likely of the {len(nll)} tried"
    measured = (
        f"mean loss of {len(nll[best])} {description} with it: {nll[best].mean():.3f} nats a token"
    )
    rivals = []
    for tokens, losses in nll.items():
        if tokens != best:
            rivals.append(f"with {describe_prefix_token(tokens, words)} {losses.mean():.3f}")
    return chosen(best, "; ".join(filter(None, (basis, measured, ", ".join(rivals)))))


def _sample_fitting_pairs(known: Sequence[Pair], room: float) -> list[Pair]:
    """Return at most PAIRS of the pairs that have at most `room` tokens."""
    pairs = [pair for pair in known if len(pair.tokens) <= room]
    # Use the same pairs for every seed: the prefix token is not random.
    order = make_keyed_generator("prefix_token", len(pairs)).permutation(len(pairs))[:PAIRS]
    return [pairs[i] for i in order.tolist()]


def _compare_prefix_tokens(
    model: LanguageModel, candidates: Sequence[Tokens], pairs: Sequence[Pair], hurried: bool
) -> tuple[Tokens, Mapping[Tokens, Floats]]:
    """Score more and more pairs with each candidate until the choice is clear.

    Returns:
        The most likely candidate; the first, unless another is better.
        The mean loss per token of each scored pair, (pairs,), keyed by candidate.
    """
    ends = sorted({min(end, len(pairs)) for end in (*_LOOKS, len(pairs))})
    nll = dict.fromkeys(candidates, np.empty(0))
    best = candidates[0]
    for start, end in pairwise([0, *ends]):
        texts = []  # in a single batch
        for prefix_token in candidates:
            texts += [Pair(prefix_token + pair.prefix, pair.suffix) for pair in pairs[start:end]]
        values = compute_pair_nlls(model, texts).reshape(len(candidates), -1)
        for prefix_token, row in zip(candidates, values, strict=True):
            nll[prefix_token] = np.append(nll[prefix_token], row)
        best = choose_likeliest_reading(candidates[0], nll, len(ends))
        if is_choice_clear(best, nll, _MARGIN, len(ends), hurried):
            break
    return best, nll


def _shorten_pair(pair: Pair) -> Pair:
    """Return the start of the pair's text as a new pair.

    The new prefix is a few leading tokens, and the new suffix is the few tokens after them.
    """
    text = pair.tokens
    n_lead = min(_LEAD, len(text) - 1)
    return Pair(text[:n_lead], text[n_lead:])


def parse_prefix_token(text: str, model: LanguageModel) -> Tokens:
    """Return the tokens of `none`, `bos`, `eos` or a text.

    Raise AuditError if the model lacks these tokens. The result is () for `none`.
    """
    if text == NONE:
        return ()
    if text in _SPECIAL:
        token = _find_special_token(text, model)
        if token is None:
            source = "configuration" if model.tokenizer is None else "tokenizer"
            raise AuditError(
                f"expected --prefix-token {text} to be a token of {model.name}, but its {source} "
                "names none"
            )
        tokens: Tokens = (token,)
    else:
        tokens = _tokenize_prefix_text(text, model)
    if not _is_vocabulary_token(tokens, model):
        raise AuditError(
            f"expected --prefix-token {text} in the vocabulary of {model.name}, which has "
            f"{model.vocab_size} tokens, got {', '.join(map(str, tokens))}"
        )
    return tokens


def describe_prefix_token(prefix_token: Tokens, tokenizer: Any) -> str:
    """Return the text of the prefix token; without a tokenizer, return its token ids."""
    if not prefix_token:
        return "none"
    if tokenizer is None:
        return f"token {', '.join(map(str, prefix_token))}"
    return decode_keeping_special_tokens(tokenizer, prefix_token)


def _list_prefix_candidates(model: LanguageModel, framed: bool) -> list[Tokens]:
    """List the distinct prefix tokens to try: the tokenizer's default, no token, bos and eos.

    Args:
        model: the model.
        framed: whether the texts begin with a chat template; the tokenizer then has no default.
    """
    candidates: dict[Tokens, None] = {}
    if not framed:
        candidates[find_default_prefix(model.tokenizer)] = None
    candidates[()] = None
    for kind in _SPECIAL:
        token = _find_special_token(kind, model)
        if token is not None:
            candidates[token,] = None
    return [tokens for tokens in candidates if _is_vocabulary_token(tokens, model)]


def _is_vocabulary_token(prefix_token: Tokens, model: LanguageModel) -> bool:
    return all(0 <= token < model.vocab_size for token in prefix_token)


def find_default_prefix(tokenizer: Any) -> Tokens:
    """Return the tokens that the tokenizer puts before a text."""
    if tokenizer is None:
        return ()
    framed = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    # Tokens after the text, such as an end-of-text token, do not count.
    starts = (i for i in range(len(framed)) if bare and framed[i : i + len(bare)] == bare)
    return tuple(framed[: next(starts, 0)])


def _find_special_token(kind: str, model: LanguageModel) -> int | None:
    """Return the id of the tokenizer's special token of this kind.

    Without a tokenizer, return the token of the model's configuration.
    """
    if model.tokenizer is None:
        return model.special_token_id(kind)
    token: int | None = getattr(model.tokenizer, f"{kind}_token_id", None)
    return token


def _tokenize_prefix_text(text: str, model: LanguageModel) -> Tokens:
    if model.tokenizer is None:
        raise AuditError(
            f"expected --prefix-token {AUTO}, {NONE}, bos or eos for a model without a tokenizer, "
            f"got {text!r}"
        )
    tokens = tuple(model.tokenizer(text, add_special_tokens=False)["input_ids"])
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    if not tokens or (unknown in tokens and model.tokenizer.unk_token not in text):
        raise AuditError(
            f"expected --prefix-token as text that the tokenizer of {model.name} can write, got "
            f"{text!r}"
        )
    return tokens


def _list_canary_pairs(canaries: Sequence[Secret], tokenizer: Any) -> tuple[list[Pair], str]:
    """List texts to choose by, each split after its first token, and describe them.

    New texts of the canaries' formats show how the model reads a format, but not which canaries
    were inserted, so the choice of a prefix token reveals nothing about the canaries. Without
    formats, the texts are those of all canaries.
    """
    known_canaries = list(filter(None, (secret.canary for secret in canaries)))
    texts: dict[str, None] = {}
    for space in dict.fromkeys(filter(None, (canary.space for canary in known_canaries))):
        noise = make_keyed_generator("prefix_token", space.format)
        for _ in range(_DRAWN):
            texts[space.draw(noise)] = None
    rows: Iterable[Sequence[int]] = (secret.tokens for secret in canaries)
    description = "canaries, those that stayed out among them"
    if texts:
        for canary in known_canaries:
            texts.pop(canary.text, None)
        rows = encode_without_special_tokens(tokenizer, list(texts))
        description = "new texts of the canaries' formats"
    # The first token is given, because a context may not be empty.
    return [Pair(tuple(row[:1]), tuple(row[1:])) for row in rows if len(row) > 1], description
