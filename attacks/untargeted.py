"""Untargeted extraction: no prefix is known; texts are drawn, and held against all that the model
was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from auditor.attacks.likelihood_ranking import (
    LowercaseRanking,
    PerplexityRanking,
    ZlibRanking,
    scores_against_reference_model,
)
from auditor.core.errors import AuditError, NotApplicable
from auditor.core.nouns import Guesses, Pair, Query, Tokens
from auditor.models.decoding import Cooling, Decoding
from auditor.plugins.attack import CorpusAttack, candidate_values_tensor, rank_candidates_as_guesses
from auditor.plugins.options import require_options_at_least
from auditor.plugins.view import Batch, Sampling, View


@dataclass(frozen=True)
class Untargeted(CorpusAttack):
    """Draw texts without a prefix, look for training data in all of them (Carlini et al. 2021).

    generations: how many, of `length` tokens each. n: tokens of a memorised n-gram (0: 50, or as
    many as half of the members' suffixes have, where those are shorter). temperature, top_k: of the
    distribution that tokens are drawn from; over the first `cooling` tokens the temperature falls
    from `hot` (0: at once). prompts: a file of texts to begin with, one a line, taken in turn;
    without it, texts begin as the model begins one. Ranked by perplexity, zlib, lower case and a
    reference model, as far as there are log-probabilities, a tokenizer and a reference.
    """

    name: ClassVar[str] = "untargeted"
    page: ClassVar[str] = "how-to/untargeted"
    measures: ClassVar[str] = "untargeted"
    control: ClassVar[str] = "public"
    temperature: float = 1.0
    top_k: int = 40
    hot: float = 10.0
    cooling: int = 20
    prompts: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_options_at_least(self, 0, "cooling")
        self.sampling()  # refuses a bad temperature or top_k

    def sampling(self) -> Sampling:
        if not self.cooling:
            return Sampling(1, Decoding(self.temperature, self.top_k))
        return Sampling(1, Cooling(self.temperature, self.top_k, hot=self.hot, steps=self.cooling))

    def sample_counts_by_recipe(self, view: View) -> dict[str, int]:
        return {view.sampling_recipe_name(self.sampling(), ""): 1}

    def generation_beginnings(self, view: View) -> list[Tokens]:
        """What generations begin with, in turn. Raises AuditError for prompts that cannot be
        read."""
        if self.prompts:
            return read_untargeted_prompts(Path(self.prompts), view.tokenizer)
        if view.target.prefix_token:
            return [()]  # as every text, they stand behind the prefix token
        for kind in ("bos", "eos"):
            token = getattr(view.tokenizer, f"{kind}_token_id", None)
            token = view.target.special_token_id(kind) if token is None else token
            if (
                token is not None and token < view.target.vocab_size
            ):  # a tokenizer may know more tokens than the model
                return [(token,)]
        raise NotApplicable(
            "nothing stands before a text's first token: give --prefix-token, or -A "
            "untargeted.prompts=FILE"
        )

    def check_inputs(self, view: View, known: Sequence[Pair]) -> None:
        self.generation_beginnings(view)

    def user_chosen_beginnings(self, view: View) -> list[Tokens]:
        return self.generation_beginnings(view) if self.prompts else []

    def guess(
        self, view: View, state: dict[str, Any], queries: Sequence[Query]
    ) -> Iterator[Guesses]:
        view.require_capability(*self.required_capabilities)
        for batch in view.candidates(queries, self.sampling()):
            rankings = self.candidate_scores_by_ranking(view, batch)
            for i, (query, candidates) in enumerate(batch):
                # One sample a generation, so one candidate.
                own = {name: float(scores[i][0]) for name, scores in rankings.items()}
                # all alike without log-probabilities
                score = candidate_values_tensor([own.get("perplexity", 0.0)])
                yield replace(rank_candidates_as_guesses(query, candidates, score, 1), rankings=own)

    def candidate_scores_by_ranking(self, view: View, batch: Batch) -> Mapping[str, list[Tensor]]:
        """Scores of the candidates, by name, as far as access, tokenizer and reference allow."""
        if not view.has_capability("likelihood"):
            return {}
        found = {"perplexity": PerplexityRanking().candidate_scores(view, batch)}
        if view.tokenizer is not None:
            found |= {
                "zlib": ZlibRanking().candidate_scores(view, batch),
                "lowercase": LowercaseRanking().candidate_scores(view, batch),
            }
        if view.reference is not None:
            found["reference"] = scores_against_reference_model(view, batch)
        return found

    def notes(self, view: View, state: dict[str, Any]) -> tuple[str, ...]:
        prompts = f"texts begin with {len(self.generation_beginnings(view)):,} prompts in turn"
        said = [prompts if self.prompts else "texts begin as the model begins one"]
        if view.decoding_in_this_setting(self.sampling()).is_point:
            said.append(
                f"1 text of each beginning, not {self.generations:,} in all: under this decoding "
                "all are the same"
            )
        if not view.has_capability("likelihood"):
            said.append("not ranked: in this setting only sampled tokens come back")
        return tuple(said)


def read_untargeted_prompts(path: Path, tokenizer: Any) -> list[Tokens]:
    """Each line of a text file as tokens, in order, each once; blank lines are none. Raises
    AuditError."""
    where = f"-A untargeted.prompts={path}"
    if tokenizer is None:
        raise AuditError(
            f"{where}: expected a model with a tokenizer for prompts of text, got a model without "
            "one"
        )
    try:
        # -sig: a file may begin with a BOM
        lines = path.read_bytes().decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:  # from None: the error holds the whole file
        raise AuditError(
            f"{where}: expected UTF-8 text, got something else at byte {error.start}"
        ) from None
    except OSError as error:
        raise AuditError(f"{where}: cannot be read: {error.strerror}") from None
    texts = list(dict.fromkeys(line for line in lines if line.strip()))
    if not texts:
        raise AuditError(f"{where}: expected a prompt a line, got no text")
    return [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
