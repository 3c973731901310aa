"""Make canaries for measuring exposure: random texts in known formats, listed in a manifest.

The manifest is written once, before training, and lists the texts to insert and their numbers of
copies. It works with any tokenizer, model and training pipeline. `audit_canaries.py` makes canaries
for audits of epsilon; `manifests.py` reads and writes both kinds; `insertion.py` inserts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from auditor.core.canary_space import CanarySpace, parse_canary_format
from auditor.core.errors import AuditError
from auditor.core.nouns import Canary, Secret
from auditor.core.secret_randomness import make_keyed_generator

MANIFEST_VERSION = 1
COUNTS = (1, 2, 4, 8, 16)
# More would be a data set of canaries with some other text.
MOST_CANARIES = 100_000
MOST_COPIES = 1_000_000
WORDS = "words"  # a list that every format may draw from


@dataclass(frozen=True)
class CanaryFormat:
    """Hold a format of canary texts, and the word lists that fill it, keyed by name."""

    format: str
    lists: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def canary_text_space(self) -> CanarySpace:
        return CanarySpace(self.format, tuple(sorted(self.lists.items())))


@dataclass(frozen=True)
class ManifestEntry:
    """Hold a canary of a manifest.

    space: index of its format in the manifest; count: number of copies to insert, 0 for a control.
    """

    id: str
    text: str
    space: int
    count: int


@dataclass(frozen=True)
class ExposureCanaryManifest:
    """List the canaries that measure exposure.

    Raise AuditError for an unknown version, duplicate ids, or a canary that does not fit its
    format.
    """

    schema_version: int
    seed: int
    formats: tuple[CanaryFormat, ...]
    canaries: tuple[ManifestEntry, ...]

    def __post_init__(self) -> None:
        if self.schema_version != MANIFEST_VERSION:
            raise AuditError(
                f"expected a manifest of version {MANIFEST_VERSION}, or 2 with coins, got "
                f"{self.schema_version}"
            )
        if not self.canaries:
            raise AuditError("expected at least one canary in the manifest, got none")
        check_canary_counts(len(self.canaries), sum(entry.count for entry in self.canaries))
        try:
            spaces = self.canary_spaces
        except (
            AuditError
        ):  # its message quotes the format, and a damaged manifest may hold a canary there
            raise AuditError(
                "expected formats in the manifest that several texts fit, got one that is not a "
                "format"
            ) from None
        ids: set[str] = set()
        texts: set[str] = set()
        for entry in self.canaries:
            if entry.id in ids:
                raise AuditError(
                    f"expected every canary once in the manifest, got {entry.id} twice"
                )
            if entry.text in texts:
                raise AuditError(
                    f"expected every canary's own text, got the text of {entry.id} twice: copies "
                    "of equal canaries add up"
                )
            ids.add(entry.id)
            texts.add(entry.text)
            if entry.count < 0:
                raise AuditError(
                    f"expected a count of at least 0 for {entry.id}, got {entry.count}"
                )
            if not 0 <= entry.space < len(self.formats):
                raise AuditError(
                    f"expected a space below {len(self.formats)} for {entry.id}, got {entry.space}"
                )
            if entry.text not in spaces[entry.space]:
                raise AuditError(
                    f"{entry.id} is not in its own space: no text of its format is written like it"
                )

    @cached_property
    def canary_spaces(self) -> tuple[CanarySpace, ...]:
        return tuple(known.canary_text_space() for known in self.formats)

    def list_inserted_copies(self) -> list[ManifestEntry]:
        """List each canary `count` times; raise AuditError if all counts are zero."""
        copies = list[ManifestEntry]()
        for entry in self.canaries:
            copies += [entry] * entry.count
        if not copies:
            raise AuditError(
                "expected canaries to insert, but every one in the manifest has zero insertions"
            )
        return copies


def check_canary_counts(canaries: int, copies: int) -> None:
    """Raise AuditError if these counts of canaries and copies would exhaust memory."""
    if canaries > MOST_CANARIES or copies > MOST_COPIES:
        raise AuditError(
            f"expected at most {MOST_CANARIES:,} canaries and {MOST_COPIES:,} copies of them, got "
            f"{canaries:,} and {copies:,}"
        )


def make_exposure_canary_manifest(
    formats: Sequence[str],
    counts: Sequence[int] = COUNTS,
    per_count: int = 8,
    controls: int = 0,
    lists: Mapping[str, tuple[str, ...]] | None = None,
    seed: int = 0,
) -> ExposureCanaryManifest:
    """Draw canaries from formats and return their manifest.

    For every format and each number of copies in `counts`, draw `per_count` canaries; also draw
    `controls` canaries that are never inserted. Draws are uniform and without repetition. lists:
    word lists keyed by name.

    Raise AuditError if nothing would be inserted, or if a format is invalid or has too few texts.
    """
    if not counts or min(counts) < 1:
        raise AuditError(
            f"expected counts of at least 1, got {', '.join(map(str, counts)) or 'none'}; "
            "--controls makes canaries that are never inserted"
        )
    if twice := [text for text, times in Counter(formats).items() if times > 1]:
        raise AuditError(
            f"expected each format once, got {twice[0]!r} again: its canaries would be the same "
            "texts"
        )
    if per_count < 1 or controls < 0:
        raise AuditError(
            f"expected --each >= 1 and --controls >= 0, got {per_count} and {controls}"
        )
    levels = sorted(set(counts))
    check_canary_counts(
        len(formats) * (len(levels) * per_count + controls),
        len(formats) * sum(levels) * per_count,
    )
    known = {WORDS: list_prefix_free_canary_words(), **(lists or {})}
    chosen = []
    for text in formats:
        slots = set()
        for _, slot in parse_canary_format(text):
            slots.add(slot.partition(":")[0])
        chosen.append(
            CanaryFormat(text, {name: words for name, words in known.items() if name in slots})
        )
    plan = [(count, i) for count in levels for i in range(per_count)] + [
        (0, i) for i in range(controls)
    ]
    entries = []
    for index, canary_format in enumerate(chosen):
        texts = _draw_distinct_canary_texts(canary_format.canary_text_space(), len(plan), seed)
        label = f"{index}-" if len(chosen) > 1 else ""
        entries += [
            ManifestEntry(
                f"{'canary' if count else 'control'}-{label}{count:04d}-{i:03d}", text, index, count
            )
            for (count, i), text in zip(plan, texts, strict=True)
        ]
    return ExposureCanaryManifest(MANIFEST_VERSION, seed, tuple(chosen), tuple(entries))


def _draw_distinct_canary_texts(space: CanarySpace, count: int, seed: int) -> list[str]:
    # At most half of the space, so that rejecting duplicates stays quick.
    if 2 * count > space.size:
        raise AuditError(
            f"expected a space of at least {2 * count} texts for {count} canaries, but "
            f"{space.format!r} has {space.size}"
        )
    noise = make_keyed_generator("canaries", seed, space.format)
    texts = dict[str, None]()
    while len(texts) < count:
        texts[space.draw(noise)] = None
    return list(texts)


def list_prefix_free_canary_words() -> tuple[str, ...]:
    """Return English words; no word in the list is a prefix of a longer word in the list."""
    # late: `audit canaries --help` does not need it
    from faker.providers.lorem.en_US import Provider

    words_without_prefixes: list[str] = []
    for word in sorted(
        {word.lower() for word in Provider.word_list if word.isascii() and word.isalpha()}
    ):
        # In alphabetical order, words that begin with a kept word follow it directly, so compare
        # only the last.
        if len(word) > 3 and not (
            words_without_prefixes and word.startswith(words_without_prefixes[-1])
        ):
            words_without_prefixes.append(word)
    return tuple(words_without_prefixes)


def build_exposure_secrets(
    manifest: ExposureCanaryManifest, rows: Sequence[Sequence[int]]
) -> Iterator[Secret]:
    """Yield the canaries as secrets; rows: the tokens of each text, which are all secret."""
    for entry, row in zip(manifest.canaries, rows, strict=True):
        canary = Canary(entry.text, manifest.canary_spaces[entry.space])
        yield Secret(
            entry.id, (), tuple(row), repeats=entry.count, member=entry.count > 0, canary=canary
        )
