"""The records of a lab, cut into prefixes and suffixes: who is attacked, who is known, what is to
be forgotten."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from auditor.benchmarks.data.wording import wording_of_tokens
from auditor.benchmarks.lab.lab_recipe import CANARY_SPACE, BaseLabRecipe, lab_canary_text
from auditor.benchmarks.lab.lab_texts import LabTexts
from auditor.core.errors import AuditError
from auditor.core.nouns import Canary, Pair, Secret
from auditor.core.secret_randomness import keyed_random_generator


@dataclass(frozen=True)
class LabSecrets:
    """texts: whole, of known, attacked and never trained records and of canaries, by id. forgotten:
    of these, by id."""

    secrets: tuple[Secret, ...]
    known: tuple[Pair, ...]
    canaries: tuple[Secret, ...]
    texts: dict[str, str]
    forgotten: frozenset[str]

    @property
    def forgotten_texts(self) -> list[str]:
        """Each once."""
        return [text for id, text in self.texts.items() if id in self.forgotten]


def cut_lab_secrets(recipe: BaseLabRecipe, texts: LabTexts, tokenizer: Any) -> LabSecrets:
    """Attacked members by repeat count, known pairs, non-members. Raises AuditError for a record
    that is too short."""
    text_of: dict[str, str] = {}

    def records(label: str, group: Sequence[str], repeats: int) -> Iterator[Secret]:
        for i, text in enumerate(group):
            # In a generator: text_of fills only as the secrets are read.
            text_of[id := f"{label}-{i:03d}"] = text
            yield _cut_lab_text_into_secret(recipe, texts, tokenizer, id, text, repeats)

    secrets, known = list[Secret](), list[Pair]()
    for times, _, given in recipe.repeats:
        group = texts.private[times]
        known += [
            Pair(secret.prefix, secret.suffix) for secret in records("known", group[:given], times)
        ]
        secrets += records(f"member-{times:02d}", group[given:], times)
    secrets += records("nonmember", texts.nonmembers, 0)
    canaries = list[Secret]()
    for i, (digits, count) in enumerate(recipe.canaries):
        text_of[id := f"canary-{count:02d}-{i:03d}"] = text = lab_canary_text(digits)
        canary, tokens = Canary(text, CANARY_SPACE), tuple(tokenizer(text)["input_ids"])
        canaries.append(Secret(id, (), tokens, count, member=count > 0, canary=canary))
    forgotten = _lab_secret_ids_to_forget(recipe, canaries)
    return LabSecrets(tuple(secrets), tuple(known), tuple(canaries), text_of, forgotten)


def _cut_lab_text_into_secret(
    recipe: BaseLabRecipe, texts: LabTexts, tokenizer: Any, id: str, text: str, repeats: int
) -> Secret:
    encoded = tokenizer(text, return_offsets_mapping=True)
    tokens, offsets = tuple(encoded["input_ids"]), encoded["offset_mapping"]
    at = recipe.first_suffix_token_index(text, offsets)
    start, end = max(0, at - recipe.prefix_length), at + recipe.suffix_length
    if len(tokens) < end:
        raise AuditError(
            f"expected lab records of {at} + {end - at} tokens, got one of {len(tokens)}"
        )
    wording = replace(
        wording_of_tokens(text, offsets, start, at, end), marks=texts.marks.get(text, ())
    )
    halves, group = (tokens[start:at], tokens[at:end]), texts.kinds.get(text)
    return Secret(id, *halves, repeats, member=repeats > 0, group=group, wording=wording)


def _lab_secret_ids_to_forget(recipe: BaseLabRecipe, canaries: Sequence[Secret]) -> frozenset[str]:
    """Ids of the secrets that a model which unlearns is to forget.

    Of the attacked records a random half at each count, rounded up; of the canaries, every other
    one, from the one that was inserted most.
    """
    chosen = set[str]()
    for times, attacked, _ in recipe.repeats:
        # The ids that `cut_lab_secrets` gives.
        own = [f"member-{times:02d}-{i:03d}" for i in range(attacked)]
        order = keyed_random_generator("lab", recipe.seed, "forget", times).permutation(len(own))
        chosen |= {own[i] for i in order[: math.ceil(len(own) / 2)]}
    inserted = sorted((one for one in canaries if one.repeats), key=lambda one: -(one.repeats or 0))
    return frozenset(chosen | {one.id for one in inserted[::2]})
