"""What stands before every text that a model is asked about: the token that its tokenizer or its
training put there.

A tokenizer that puts `<bos>` in front, or packing with end-of-text, is part of what was learnt:
without it a model that recites its records may say little of them. A prefix token is chosen once a
run, on the undefended model, and put in front in one place, so that prefixes, secrets and guesses
stay those of the data. Knows nothing of attacks or files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.core.errors import AuditError
from auditor.core.nouns import Pair, PrefixToken, Secret, Tokens
from auditor.core.plan_fields import AUTO, NONE
from auditor.core.secret_randomness import keyed_random_generator
from auditor.generation.tries import encode_without_special_tokens
from auditor.models.base import LanguageModel, ReadsPositions, implies_capability
from auditor.models.vocabulary import decode_keeping_special_tokens
from auditor.models.wrapping import WrappingModel
from auditor.runs.likeliest_reading import (
    choose_likeliest_reading,
    is_choice_clear,
    mean_suffix_nll_of_each_pair,
)

_SPECIAL = ("bos", "eos")
# known pairs that a choice looks at, at most: a difference that more of them would show is no
# matter
PAIRS = 500
# of them, which are enough if they show that no other prefix token is ahead by `_MARGIN`
_FIRST = 5
_SCORED = 16  # first tokens of each suffix, on which a prefix token tells most
_MARGIN = 0.1  # nats a token
_DRAWN = 64  # texts of each format of canaries that stand in for known pairs


def _make_delegate_with_prefix_token(question: str) -> Any:
    """What the model itself answers to this question of `LanguageModel`, whose texts stand behind
    the prefix token."""

    def answer(self: PrefixedModel, texts: Tensor, *of: Any, **more: Any) -> Any:
        return getattr(self.model, question)(self.prepend_prefix_token(texts), *of, **more)

    return answer


class PrefixedModel(WrappingModel):
    """A model behind a prefix token: it is asked about texts, and reads the prefix token before
    each. A soft prompt stands before both.

    The one place where a text becomes a context; whatever else is to stand around a prefix (a
    template) belongs here.
    `max_positions`: those that are left for texts.
    """

    def __init__(self, model: LanguageModel, prefix_token: Tokens) -> None:
        super().__init__(model)
        self.prefix_token = prefix_token
        self.choices_kept_in = model.choices_kept_in
        if self.max_positions is not None:
            self.max_positions -= len(prefix_token)

    def prepend_prefix_token(self, texts: Tensor) -> Tensor:
        """(B, n) -> (B, prefix token + n); n may be 0."""
        # Never empty (`with_prefix_token`): a tensor of nothing is of floats, to which the token
        # ids would be cast.
        prefix_token = torch.tensor(self.prefix_token, device=self.device).expand(len(texts), -1)
        return torch.cat([prefix_token, texts.to(prefix_token)], dim=1)

    @property
    def can_join_rows(self) -> bool:  # type: ignore[override]  # not copied: found out once the texts are known
        return self.model.can_join_rows

    start = _make_delegate_with_prefix_token("start")
    completions = _make_delegate_with_prefix_token("completions")
    suffix_log_probs = _make_delegate_with_prefix_token("suffix_log_probs")
    log_probs = _make_delegate_with_prefix_token("log_probs")
    tuning_log_probs = _make_delegate_with_prefix_token("tuning_log_probs")
    token_log_probs = _make_delegate_with_prefix_token("token_log_probs")
    token_ranks = _make_delegate_with_prefix_token("token_ranks")
    partial_distributions_of = _make_delegate_with_prefix_token("partial_distributions_of")
    teacher_forced_distributions = _make_delegate_with_prefix_token("teacher_forced_distributions")
    divergence_checks = _make_delegate_with_prefix_token("divergence_checks")
    neighbour_distributions = _make_delegate_with_prefix_token("neighbour_distributions")

    def read_ahead(
        self, texts: Sequence[Tokens], last: Sequence[int], begun: Sequence[int] | None = None
    ) -> None:
        behind = None if begun is None else [len(self.prefix_token) + begin for begin in begun]
        self.model.read_ahead([(*self.prefix_token, *text) for text in texts], last, behind)

    def log_probs_at_positions(self, texts: Tensor, positions: Tensor, last: int) -> Tensor | None:
        if not isinstance(self.model, ReadsPositions):
            return None
        return self.model.log_probs_at_positions(texts, positions, last)

    def forget_batch(self) -> None:
        self.model.forget_batch()

    def has_withheld_answer_by_prefix(self, prefixes: Sequence[Tokens]) -> list[bool]:
        return self.model.has_withheld_answer_by_prefix(
            [(*self.prefix_token, *prefix) for prefix in prefixes]
        )

    def published_perplexity_nll(
        self, texts: Sequence[Tokens], seed: int, given: int = 1
    ) -> Mapping[str, Sequence[float]]:
        # The prefix token counts as given: it is read and not scored.
        return self.model.published_perplexity_nll(
            [(*self.prefix_token, *text) for text in texts], seed, len(self.prefix_token) + given
        )

    def neighbour_model(self, relation: str, index: int) -> LanguageModel:
        return PrefixedModel(self.model.neighbour_model(relation, index), self.prefix_token)

    def claim_premise_counts(self) -> Mapping[str, int]:
        return self.model.claim_premise_counts()

    def row_bytes(self, positions: int, distribution: bool = True) -> int:
        return self.model.row_bytes(len(self.prefix_token) + positions, distribution)

    def check_text_fits(
        self, n_prefix: int, length: int, prompt: Tensor | None = None, prefix_token: int = 0
    ) -> None:
        # The inner model counts by its own `max_positions`, off which the prefix token was not
        # taken.
        self.model.check_text_fits(n_prefix, length, prompt, len(self.prefix_token) + prefix_token)


def with_prefix_token(model: LanguageModel, prefix_token: Tokens) -> LanguageModel:
    """The model behind the prefix token; itself where there is none."""
    return PrefixedModel(model, prefix_token) if prefix_token else model


# --- which one
# -----------------------------------------------------------------------------------------------


def resolve_prefix_token(
    asked: str,
    model: LanguageModel,
    known: Sequence[Pair] = (),
    longest: int = 0,
    canaries: Sequence[Secret] = (),
    framed: bool = False,
    as_trained: bool = False,
    hurried: bool = False,
) -> PrefixToken:
    """The prefix token that was asked for; for `auto`, the one behind which the known pairs are
    likeliest under the model.

    framed: whether the texts begin with what a template put there, so that the tokenizer's own
    choice is nothing more.
    as_trained: whether they are a trainer's own token ids, so that there is nothing to choose.
    hurried: whether fewer known pairs are to do, as of `is_choice_clear`.
    Where no pair is known, texts of the canaries' formats stand in, drawn anew; or the canaries of
    an audit, which went in or not: their coins are not looked at.

    The tokenizer's own choice is tried first and stays unless another is more likely beyond chance:
    by the mean nll a token of the known suffixes, paired by pair, Student's interval corrected for
    the number of others. longest: tokens that a context takes beside the prefix token, at most;
    `auto` takes none that has no room. Raises AuditError for a prefix token that the model or its
    tokenizer does not have.
    """
    begins = [pair.prefix[: len(model.prepended)] == model.prepended for pair in known]
    if model.prepended and not (
        begins and all(begins)
    ):  # a template, or the trainer's own ids, may begin with it
        return _prefix_token_of_server(asked, model)
    if asked != AUTO:
        tokens = parse_prefix_token(asked, model)
        return PrefixToken(
            tokens,
            f"prefix token: {describe_prefix_token(tokens, model.tokenizer)}, as asked for "
            f"(--prefix-token {asked})",
        )
    if as_trained:
        return PrefixToken((), "prefix token: none: the data hold the token ids of the training")
    if known or not canaries:
        return _choose_likeliest_prefix_token(
            model, known, longest, "auxiliary records", framed, hurried
        )
    if any(secret.canary is not None and secret.canary.space is not None for secret in canaries):
        drawn = _sample_fresh_canary_pairs(canaries, model.tokenizer)
        return _choose_likeliest_prefix_token(
            model, drawn, longest, "new texts of the canaries' formats"
        )
    whole = [secret.prefix + secret.suffix for secret in canaries]
    # The first token is given, as nothing may stand before it.
    own = [Pair(text[:1], text[1:]) for text in whole if len(text) > 1]
    return _choose_likeliest_prefix_token(
        model, own, longest, "canaries, those that stayed out among them"
    )


def _prefix_token_of_server(asked: str, model: LanguageModel) -> PrefixToken:
    """The prefix token that the server of a model puts before every text. Raises AuditError for any
    other."""
    name = describe_prefix_token(model.prepended, model.tokenizer)
    if asked != AUTO and parse_prefix_token(asked, model) != model.prepended:
        raise AuditError(
            f"expected --prefix-token {AUTO} for {model.name}, whose server puts {name} before "
            f"every text, got {asked}"
        )
    return PrefixToken(
        model.prepended, f"prefix token: {name} (the server puts it before every text)"
    )


def _choose_likeliest_prefix_token(
    model: LanguageModel,
    known: Sequence[Pair],
    longest: int,
    what: str,
    framed: bool = False,
    hurried: bool = False,
) -> PrefixToken:
    words, every = model.tokenizer, _prefix_token_candidates(model, framed)
    room = math.inf if model.max_positions is None else model.max_positions
    # Never empty: no token at all is a candidate, and has room.
    own, *_ = candidates = [
        prefix_token
        for prefix_token in every
        if len(prefix_token) + longest <= room or not prefix_token
    ]
    whose = "the chat template's" if framed else "tokenizer default"
    if words is None:
        whose = "there is no tokenizer to put another"
    if own != every[0]:
        whose = f"no room for the tokenizer default, {describe_prefix_token(every[0], words)}"

    def chosen(prefix_token: Tokens, why: str) -> PrefixToken:
        return PrefixToken(
            prefix_token, f"prefix token: {describe_prefix_token(prefix_token, words)} ({why})"
        )

    if not implies_capability(model.capabilities, "likelihood"):
        return chosen(own, f"{whose}; {model.name} gives no log-probabilities to choose by")
    most = max(map(len, candidates))
    pairs = [pair for pair in known if most + len(pair.prefix) + len(pair.suffix) <= room]
    # The same ones for every seed: which prefix token stands there is no draw of the attack's.
    kept = keyed_random_generator("prefix_token", len(pairs)).permutation(len(pairs))[:PAIRS]
    pairs = [Pair(pairs[i].prefix, pairs[i].suffix[:_SCORED]) for i in kept.tolist()]
    if not pairs:
        return chosen(own, f"{whose}; no {what} to choose by")
    looks = 1 if len(pairs) <= _FIRST else 2
    nll = _nll_of_pairs_by_prefix_token(model, candidates, pairs[:_FIRST])
    best = choose_likeliest_reading(own, nll, looks)
    if looks == 2 and not is_choice_clear(best, nll, _MARGIN, looks, hurried):
        others = _nll_of_pairs_by_prefix_token(model, candidates, pairs[_FIRST:])
        nll = {
            prefix_token: np.concatenate([values, others[prefix_token]])
            for prefix_token, values in nll.items()
        }
        best = choose_likeliest_reading(own, nll, looks)
    means = {prefix_token: f"{values.mean():.3f}" for prefix_token, values in nll.items()}
    beside = ", ".join(
        f"with {describe_prefix_token(prefix_token, words)} {mean}"
        for prefix_token, mean in means.items()
        if prefix_token != best
    )
    why = whose if best == own else f"the most likely of the {len(nll)} tried"
    beside_text = f"; {beside}" if beside else ""
    measured = (
        f"mean loss of {len(nll[best])} {what} with it: {means[best]} nats a token{beside_text}"
    )
    return chosen(best, f"{why}; {measured}")


def _nll_of_pairs_by_prefix_token(
    model: LanguageModel, candidates: Sequence[Tokens], pairs: Sequence[Pair]
) -> dict[Tokens, NDArray[np.float64]]:
    """Return (pairs,) nats a token of the suffixes after each prefix token, all read side by
    side."""
    texts = [
        Pair(prefix_token + pair.prefix, pair.suffix)
        for prefix_token in candidates
        for pair in pairs
    ]
    values = mean_suffix_nll_of_each_pair(model, texts).reshape(len(candidates), len(pairs))
    return dict(zip(candidates, values, strict=True))


def parse_prefix_token(asked: str, model: LanguageModel) -> Tokens:
    """The tokens of `none`, `bos`, `eos` or a text. Raises AuditError where the model cannot read
    them."""
    if asked == NONE:
        return ()
    if asked in _SPECIAL:
        token = _special_token_id(asked, model)
        if token is None:
            whose = "configuration" if model.tokenizer is None else "tokenizer"
            raise AuditError(
                f"expected --prefix-token {asked} to be a token of {model.name}, but its {whose} "
                "names none"
            )
        tokens: Tokens = (token,)
    else:
        tokens = _tokenize_prefix_text(asked, model)
    if not _is_in_vocabulary(tokens, model):
        raise AuditError(
            f"expected --prefix-token {asked} in the vocabulary of {model.name}, which has "
            f"{model.vocab_size} tokens, got {', '.join(map(str, tokens))}"
        )
    return tokens


def describe_prefix_token(prefix_token: Tokens, tokenizer: Any) -> str:
    """The prefix token as a reader knows it: its text, or its ids where nothing says what they
    write."""
    if not prefix_token:
        return "none"
    if tokenizer is None:
        return f"token {', '.join(map(str, prefix_token))}"
    return decode_keeping_special_tokens(tokenizer, prefix_token)


def _prefix_token_candidates(model: LanguageModel, framed: bool) -> list[Tokens]:
    """The tokenizer's own choice, then nothing, bos and eos: each once, as far as the model has
    them."""
    special = (_special_token_id(kind, model) for kind in _SPECIAL)
    candidates = [
        () if framed else tokenizer_default_prefix_token(model.tokenizer),
        (),
        *((token,) for token in special if token is not None),
    ]
    return [
        prefix_token
        for prefix_token in dict.fromkeys(candidates)
        if _is_in_vocabulary(prefix_token, model)
    ]


def _is_in_vocabulary(prefix_token: Tokens, model: LanguageModel) -> bool:
    return all(0 <= token < model.vocab_size for token in prefix_token)


def tokenizer_default_prefix_token(tokenizer: Any) -> Tokens:
    """What the tokenizer puts in front of a text."""
    if tokenizer is None:
        return ()
    whole, bare = (
        list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (True, False)
    )
    # What it adds behind the text, such as an end-of-text token, does not count.
    starts = (i for i in range(len(whole)) if bare and whole[i : i + len(bare)] == bare)
    return tuple(whole[: next(starts, 0)])


def _special_token_id(kind: str, model: LanguageModel) -> int | None:
    """The tokenizer's token of this kind; without a tokenizer, the one that the model's
    configuration names."""
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


def _sample_fresh_canary_pairs(canaries: Sequence[Secret], tokenizer: Any) -> list[Pair]:
    """Texts of the canaries' formats, none of them a canary; the first token is given, as nothing
    may stand before it.

    They say what the model makes of a format, and nothing of which of its texts went in: the null
    distribution of exposure stays what it is.
    """
    own = [secret.canary for secret in canaries if secret.canary is not None]
    said = {canary.text for canary in own}
    texts: dict[str, None] = {}
    for space in dict.fromkeys(canary.space for canary in own if canary.space is not None):
        noise = keyed_random_generator("prefix_token", space.format)
        texts |= dict.fromkeys(space.draw(noise) for _ in range(_DRAWN))
    rows = encode_without_special_tokens(tokenizer, [text for text in texts if text not in said])
    return [Pair(tuple(row[:1]), tuple(row[1:])) for row in rows if len(row) > 1]
