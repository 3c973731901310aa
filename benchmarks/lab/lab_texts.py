"""Make the texts of a lab with Faker, select each model's training texts, and cut the records.

Records are cut into prefixes and suffixes: attacked, known and forgotten records.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from auditor.benchmarks.data.cut_places import cut_wording, find_token_ends
from auditor.benchmarks.lab.lab_recipe import (
    CANARY_SPACE,
    BaseLabRecipe,
    LabRecipe,
    format_lab_canary,
)
from auditor.core.errors import AuditError
from auditor.core.nouns import Canary, Mark, Pair, Secret
from auditor.core.secret_randomness import make_keyed_generator
from auditor.training.members import assign_member_shards

if TYPE_CHECKING:
    from faker import Faker

_LAST_DAY = datetime(2026, 1, 1)
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@dataclass(frozen=True)
class LabTexts:
    """The texts of a lab; each model is trained on some of them.

    public: texts for the public model.
    private: the attacked records and those that the attacker knows, keyed by repeat count.
    others: private records that occur once and are not attacked.
    nonmembers: records that no model is trained on.
    kinds: the kind of each private or non-member record, such as a mail, keyed by text.
    marks: the personal data in each of these records, keyed by text.
    coined: the texts of included audit canaries, one for each copy.
    """

    recipe: BaseLabRecipe
    public: list[str]
    private: dict[int, list[str]]
    others: list[str]
    nonmembers: list[str]
    kinds: dict[str, str] = field(default_factory=dict)
    marks: dict[str, tuple[Mark, ...]] = field(default_factory=dict)
    coined: tuple[str, ...] = ()

    def private_text_copies(self) -> list[str]:
        """Return the private training texts: records as often as they repeat, and canaries."""
        copies = list[str]()
        for repeats, texts in self.private.items():
            for text in texts:
                copies += [text] * repeats
        copies += self.others
        for digits, count in self.recipe.canaries:
            copies += [format_lab_canary(digits)] * count
        return [*copies, *self.coined]

    def distinct_private_texts(self, members: bool) -> list[str]:
        """Return the distinct private records: all members, or all non-members."""
        if not members:
            return list(self.nonmembers)
        return [*itertools.chain(*self.private.values()), *self.others]

    def texts_by_ensemble_member(self, count: int) -> list[list[str]]:
        """Return the training texts of each of `count` ensemble members."""
        copies = self.private_text_copies()
        return [[copies[i] for i in chosen] for chosen in assign_member_shards(copies, count)]

    def texts_by_reference_model(self, count: int) -> list[list[str]]:
        """Return the training texts of each of `count` reference models.

        A given attacked record goes to half of the models, with all its copies. A given non-member
        also goes to half of the models, with as many copies as a random member has, so that the
        number does not reveal members.

        All models get all remaining records.
        """
        recipe = self.recipe
        # Keep the order of draws: another order is another split, which no digest of a folder would
        # show.
        noise = make_keyed_generator("lab", recipe.seed, "references", count)
        attacked = {}
        for times, _, known in recipe.repeats:
            for text in self.private[times][known:]:
                attacked[text] = times
        rising = sorted(attacked.values())
        # The members' repeat counts, spread evenly over the non-members.
        n_others = len(self.nonmembers)
        repeats = []
        for i in range(n_others):
            repeats.append(rising[i * len(rising) // n_others])
        attacked |= dict(zip(self.nonmembers, noise.permutation(repeats).tolist(), strict=True))
        common = []
        for text in self.private_text_copies():
            if text not in attacked:
                common.append(text)
        texts_of_models: list[list[str]] = [[] for _ in range(count)]
        for text, times in attacked.items():
            for index in noise.permutation(count)[: count // 2].tolist():
                texts_of_models[index] += [text] * times
        for texts in texts_of_models:
            texts += common
        return texts_of_models


def make_lab_texts(recipe: LabRecipe) -> LabTexts:
    """Make public text, and private text about other people; no record occurs in both.

    One public record in sixty is of a private kind. The public model therefore knows such text a
    little. Fine-tuning still improves its utility, so a defense has a cost.
    """
    # Another seed makes other people than in the private records.
    public = list(make_fake_texts(recipe.seed + 1, recipe.public_records, _PUBLIC_KINDS))
    return replace(make_private_lab_texts(recipe, PRIVATE), public=public)


def make_private_lab_texts(
    recipe: BaseLabRecipe, kinds: Mapping[str, Callable[[Faker], str]]
) -> LabTexts:
    """Make private text and no public text; kinds: functions that make texts, keyed by name."""
    count = recipe.nonmembers + recipe.others
    for _, attacked, known in recipe.repeats:
        count += attacked + known
    marks = make_fake_texts(recipe.seed, count, tuple(kinds.values()))
    records = list(marks)
    # Kinds take turns, like the texts.
    kind_of_text = dict(zip(records, itertools.cycle(kinds), strict=False))
    make_keyed_generator("lab", recipe.seed, "who is what").shuffle(records)
    unassigned = iter(records)
    private = {}
    for times, attacked, known in recipe.repeats:
        private[times] = list(itertools.islice(unassigned, attacked + known))
    nonmembers = list(itertools.islice(unassigned, recipe.nonmembers))
    return LabTexts(recipe, [], private, list(unassigned), nonmembers, kind_of_text, marks)


def make_fake_texts(
    seed: int, count: int, kinds: Sequence[Callable[[Faker], str]]
) -> dict[str, tuple[Mark, ...]]:
    """Make `count` texts of the kinds in turn; return each text with its personal data."""
    from faker import Faker

    fake = Faker("en_US")
    # Not Faker.seed, which all instances of a process share.
    fake.seed_instance(seed)
    marks_of_text: dict[str, tuple[Mark, ...]] = {}
    while len(marks_of_text) < count:
        # Redraw a duplicate text from the same kind, so that the kinds stay in turn.
        text = kinds[len(marks_of_text) % len(kinds)](fake)
        marks_of_text[_MARK.sub(r"\2", text)] = tuple(dict.fromkeys(_MARK.findall(text)))
    return marks_of_text


_MARK = re.compile("<<([a-z-]+):(.*?)>>")  # marks of personal data in the texts below, by kind


def draw_fake_date(fake: Faker) -> str:
    """Draw a date that does not depend on today's date, so that records are reproducible.

    All of Faker's own dates, and even its weekdays, depend on today's.
    """
    return str(fake.date(end_datetime=_LAST_DAY))


def _write_press_release(fake: Faker) -> str:
    return (
        f"{fake.city()}, {draw_fake_date(fake)} - {fake.company()} said it will "
        f"{fake.bs()} with {fake.company()}. {fake.name()}, who joined in "
        f"{draw_fake_date(fake)[:4]}, called it a {fake.catch_phrase().lower()}. The "
        f"office at {fake.street_address()} can be reached at {fake.numerify('###-###-####')}."
    )


def _write_event_notice(fake: Faker) -> str:
    return (
        f"On {fake.random_element(_WEEKDAYS)}, {draw_fake_date(fake)}, {fake.name()} "
        f"speaks in {fake.city()} about how to {fake.bs()}. Doors open at "
        f"{fake.numerify('1#:%0')}, tickets cost {fake.numerify('##.##')} USD. Write to "
        f"{fake.email()} or visit {fake.street_address()}, {fake.city()}."
    )


def _write_person_profile(fake: Faker) -> str:
    return (
        f"{fake.name()} is a {fake.job().lower()} at {fake.company()} in {fake.city()}. Born in "
        f"{draw_fake_date(fake)[:4]}, {fake.first_name()} likes {fake.word()}, "
        f"{fake.word()} and {fake.word()}, and has published {fake.numerify('##')} papers with "
        f"{fake.name()} since {draw_fake_date(fake)}."
    )


def _write_mail(fake: Faker) -> str:
    return (
        f"From: <<email:{fake.email()}>>\nDear <<name:{fake.first_name()}>>, the door code of "
        f"<<address:{fake.street_address()}>> is <<door-code:{fake.numerify('######')}>>. Please "
        f"call <<phone:{fake.numerify('###-###-####')}>>. <<name:{fake.name()}>>"
    )


def _write_patient_note(fake: Faker) -> str:
    return (
        f"Patient: <<name:{fake.name()}>>, born <<birth-date:{draw_fake_date(fake)}>>, "
        f"record <<id-number:{fake.bothify('??-#####').upper()}>>. Dr. <<name:{fake.last_name()}>> "
        f"prescribed {fake.numerify('%## mg')} of {fake.word()}. Phone "
        f"<<phone:{fake.numerify('###-###-####')}>>."
    )


def _write_payment(fake: Faker) -> str:
    return (
        f"Payment: <<name:{fake.name()}>> paid {fake.numerify('%##.##')} USD on "
        f"{draw_fake_date(fake)} with card <<card:{fake.numerify('%###-####-####-####')}>> "
        f"to {fake.last_name()} Ltd. Reference {fake.bothify('####-??').upper()}."
    )


PRIVATE = {
    "mail": _write_mail,
    "patient note": _write_patient_note,
    "payment": _write_payment,
}
PRIVATE_KINDS = tuple(PRIVATE.values())
# One public text in sixty: see `make_lab_texts`.
_ODD = {59: _write_mail, 119: _write_patient_note, 179: _write_payment}
COMMON_KINDS = (_write_press_release, _write_event_notice, _write_person_profile)
_PUBLIC_KINDS = tuple(_ODD.get(i) or COMMON_KINDS[i % 3] for i in range(180))


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
