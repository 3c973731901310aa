"""Extract training data without prefixes, by comparing drawn texts with all training data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from auditor.attacks.likelihood_ranking import (
    LowercaseRanking,
    PerplexityRanking,
    ZlibRanking,
    score_reference_model,
)
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Guesses, Pair, Query, Tokens
from auditor.models.decoding import Cooling, Decoding
from auditor.plugins.attack import CorpusAttack, candidate_values_tensor, rank_candidates
from auditor.plugins.options import CountOrZero
from auditor.plugins.view import Batch, Sampling, View


@dataclass(frozen=True)
class Untargeted(CorpusAttack):
    """Draw texts without a prefix, and find training data in them (Carlini et al. 2021).

    generations: the number of texts, with `length` tokens each.
    n: the number of tokens of a memorised n-gram. 0 takes 50 tokens, or fewer if half of the
    members' suffixes are shorter.
    temperature, top_k: parameters of the distribution from which tokens are drawn. The temperature
    falls from `hot` to `temperature` over the first `cooling` tokens (0: at once). temperature=0 is
    greedy from the first token on, and draws only one text per prompt, because all would be equal.
    prompts: a file of texts with which generations begin, one per line, used in turn. Without a
    file, generations begin as the model begins a text.

    Texts are ranked by perplexity, zlib, lower case and a reference model. The rankings need
    log-probabilities, and some need a tokenizer or a reference model.
    """

    name = "untargeted"
    page = "how-to/untargeted"
    measures = "untargeted"
    control = "public"
    temperature: float = 1.0
    top_k: int = 40
    hot: float = 10.0
    cooling: CountOrZero = 20
    prompts: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampling()  # raises for a bad temperature or top_k

    def sampling(self) -> Sampling:
        if not self.cooling or self.temperature == 0:
            return Sampling(1, Decoding(self.temperature, self.top_k))
        return Sampling(1, Cooling(self.temperature, self.top_k, hot=self.hot, steps=self.cooling))

    def sample_counts_by_recipe(self, view: View) -> dict[str, int]:
        return {view.sampling_recipe_name(self.sampling(), ""): 1}

    def generation_beginnings(self, view: View) -> list[Tokens]:
        """Return the tokens with which generations begin.

        Raise AuditError if the prompts cannot be read.
        """
        if self.prompts:
            return read_untargeted_prompts(Path(self.prompts), view.tokenizer)
        if view.target.prefix_token:
            return [()]  # like every text, they follow the prefix token
        for kind in ("bos", "eos"):
            token = getattr(view.tokenizer, f"{kind}_token_id", None)
            if token is None:
                token = view.target.special_token_id(kind)
            if (
                token is not None and token < view.target.vocab_size
            ):  # a tokenizer may have more tokens than the model
                return [(token,)]
        raise NotApplicable(
            "nothing precedes a text's first token: give --prefix-token, or -A "
            "untargeted.prompts=FILE"
        )

    def check_inputs(self, view: View, known: Sequence[Pair]) -> None:
        self.generation_beginnings(view)

    def user_chosen_beginnings(self, view: View) -> list[Tokens]:
        if self.prompts:
            return self.generation_beginnings(view)
        return []

    def guess(
        self, view: View, state: dict[str, Any], queries: Sequence[Query]
    ) -> Iterator[Guesses]:
        view.require_capability(*self.required_capabilities)
        for batch in view.candidates(queries, self.sampling()):
            rankings = self.score_rankings(view, batch)
            for i, (query, candidates) in enumerate(batch):
                # One sample per generation, so one candidate.
                scores_of_text = {}
                for name, scores in rankings.items():
                    scores_of_text[name] = float(scores[i][0])
                # Without log-probabilities, all scores are equal.
                score = candidate_values_tensor([scores_of_text.get("perplexity", 0.0)])
                yield replace(rank_candidates(query, candidates, score, 1), rankings=scores_of_text)

    def score_rankings(self, view: View, batch: Batch) -> Mapping[str, list[Tensor]]:
        """Return the scores of each query's candidates, keyed by ranking.

        All rankings need likelihoods; some also need a tokenizer or a reference model.
        """
        if not view.has_capability("likelihood"):
            return {}
        rankings = {"perplexity": PerplexityRanking().candidate_scores(view, batch)}
        if view.tokenizer is not None:
            rankings |= {
                "zlib": ZlibRanking().candidate_scores(view, batch),
                "lowercase": LowercaseRanking().candidate_scores(view, batch),
            }
        if view.reference is not None:
            rankings["reference"] = score_reference_model(view, batch)
        return rankings

    def notes(self, view: View, state: dict[str, Any]) -> tuple[str, ...]:
        prompts = f"texts begin with {len(self.generation_beginnings(view)):,} prompts in turn"
        sentences = [prompts if self.prompts else "texts begin as the model begins one"]
        if view.decoding_in_this_setting(self.sampling()).is_point:
            sentences.append(
                f"1 text for each beginning, not {self.generations:,} in all: under this decoding "
                "all would be equal"
            )
        if not view.has_capability("likelihood"):
            sentences.append("not ranked: in this setting only sampled tokens come back")
        return tuple(sentences)


def read_untargeted_prompts(path: Path, tokenizer: Any) -> list[Tokens]:
    """Read each line of a text file as tokens, in order, omitting duplicates and blank lines.

    Raise AuditError if there is no tokenizer, or if the file is unreadable or empty.
    """
    option = f"-A untargeted.prompts={path}"
    if tokenizer is None:
        raise AuditError(
            f"{option}: expected a model with a tokenizer for prompts of text, got a model without "
            "one"
        )
    try:
        # -sig: a file may begin with a BOM
        lines = path.read_bytes().decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:  # from None: the error holds the entire file
        raise AuditError(
            f"{option}: expected UTF-8 text, got something else at byte {error.start}"
        ) from None
    except OSError as error:
        raise AuditError(f"{option}: cannot be read: {error.strerror}") from None
    texts = list(dict.fromkeys(line for line in lines if line.strip()))
    if not texts:
        raise AuditError(f"{option}: expected a prompt a line, got no text")
    return [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
