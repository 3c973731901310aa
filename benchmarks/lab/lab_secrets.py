"""Cut the records of a lab into prefixes and suffixes: attacked, known and forgotten records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from auditor.benchmarks.data.wording import cut_wording, find_token_ends
from auditor.benchmarks.lab.lab_recipe import CANARY_SPACE, BaseLabRecipe, format_lab_canary
from auditor.benchmarks.lab.lab_texts import LabTexts
from auditor.core.errors import AuditError
from auditor.core.nouns import Canary, Pair, Secret
from auditor.core.secret_randomness import make_keyed_generator


@dataclass(frozen=True)
class LabSecrets:
    """Hold the records of a lab, cut into prefixes and suffixes.

    known: (prefix, suffix) pairs that the attacker knows.
    texts: complete texts of known, attacked and non-member records and canaries, keyed by id.
    forgotten: ids of the records that an unlearned model must forget.
    """

    secrets: tuple[Secret, ...]
    known: tuple[Pair, ...]
    canaries: tuple[Secret, ...]
    texts: dict[str, str]
    forgotten: frozenset[str]

    @property
    def forgotten_texts(self) -> list[str]:
        """The distinct texts to forget."""
        return [text for id, text in self.texts.items() if id in self.forgotten]


def cut_lab_secrets(recipe: BaseLabRecipe, texts: LabTexts, tokenizer: Any) -> LabSecrets:
    """Cut the records of a lab into prefixes and suffixes.

    The attacked members are ordered by their numbers of copies. Known pairs and non-members are cut
    too.

    Raise AuditError if a record is too short.
    """
    text_of: dict[str, str] = {}

    def records(label: str, group: Sequence[str], repeats: int) -> Iterator[Secret]:
        for i, text in enumerate(group):
            # In a generator: text_of fills only as the secrets are read.
            text_of[id := f"{label}-{i:03d}"] = text
            yield _cut_lab_text_into_secret(recipe, texts, tokenizer, id, text, repeats)

    secrets = list[Secret]()
    known = list[Pair]()
    for times, _, n_known in recipe.repeats:
        group = texts.private[times]
        known += [
            Pair(secret.prefix, secret.suffix)
            for secret in records("known", group[:n_known], times)
        ]
        secrets += records(f"member-{times:02d}", group[n_known:], times)
    secrets += records("nonmember", texts.nonmembers, 0)
    canaries = list[Secret]()
    for i, (digits, count) in enumerate(recipe.canaries):
        text_of[id := f"canary-{count:02d}-{i:03d}"] = text = format_lab_canary(digits)
        canary = Canary(text, CANARY_SPACE)
        tokens = tuple(tokenizer(text)["input_ids"])
        canaries.append(Secret(id, (), tokens, count, member=count > 0, canary=canary))
    forgotten = _select_forgotten_ids(recipe, canaries)
    return LabSecrets(tuple(secrets), tuple(known), tuple(canaries), text_of, forgotten)


def _cut_lab_text_into_secret(
    recipe: BaseLabRecipe, texts: LabTexts, tokenizer: Any, id: str, text: str, repeats: int
) -> Secret:
    encoded = tokenizer(text, return_offsets_mapping=True)
    tokens = tuple(encoded["input_ids"])
    offsets = encoded["offset_mapping"]
    at = recipe.first_suffix_token_index(text, offsets)
    start = max(0, at - recipe.prefix_length)
    end = at + recipe.suffix_length
    if len(tokens) < max(end, at + 1):
        raise AuditError(
            f"expected lab records of {at} + {max(end - at, 1)} tokens, got one of {len(tokens)}"
        )
    if not recipe.suffix_length:
        end = len(tokens)
    wording = cut_wording(text, find_token_ends(offsets, len(text)), start, at, end)
    wording = replace(wording, marks=texts.marks.get(text, ()))
    halves = (tokens[start:at], tokens[at:end])
    group = texts.kinds.get(text)
    return Secret(id, *halves, repeats, member=repeats > 0, group=group, wording=wording)


def _select_forgotten_ids(recipe: BaseLabRecipe, canaries: Sequence[Secret]) -> frozenset[str]:
    """Select the ids of the secrets that an unlearned model must forget.

    For each number of copies, these are a random half (rounded up) of the attacked records.

    In addition, every second canary, in descending order of copies, is forgotten.
    """
    chosen = set[str]()
    for times, attacked, _ in recipe.repeats:
        # The ids that `cut_lab_secrets` gives.
        ids = [f"member-{times:02d}-{i:03d}" for i in range(attacked)]
        order = make_keyed_generator("lab", recipe.seed, "forget", times).permutation(len(ids))
        chosen |= {ids[i] for i in order[: math.ceil(len(ids) / 2)]}
    inserted = sorted(
        (canary for canary in canaries if canary.repeats), key=lambda canary: -(canary.repeats or 0)
    )
    return frozenset(chosen | {canary.id for canary in inserted[::2]})
