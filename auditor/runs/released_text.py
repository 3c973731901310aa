"""Audit released text without a model: search for private records, and test membership.

The result is a usual run folder, for reports, gates, comparisons and attestations. This
module does not import torch.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import compress
from pathlib import Path

import numpy as np

from auditor import __version__
from auditor.benchmarks.canaries import manifests
from auditor.benchmarks.canaries.audit_canaries import AuditCanaryManifest
from auditor.benchmarks.data import pii, released_passages
from auditor.benchmarks.data.columns import read_data_table
from auditor.benchmarks.data.released_passages import ReleasedRecord, WordIds
from auditor.benchmarks.data.words import (
    count_text_occurrences,
    is_mostly_unspaced,
    is_whole_word_somewhere,
)
from auditor.conclusions import secret_details
from auditor.conclusions.outcomes import ValuesBySecret, list_secret_attributes
from auditor.core.arrays import Floats
from auditor.core.errors import AuditError
from auditor.core.nouns import (
    UNDEFENDED,
    CellKey,
    Guess,
    Guesses,
    Observation,
    Secret,
)
from auditor.core.plan import Plan
from auditor.core.result import (
    RELEASED_TEXT,
    AuditResult,
    BenchmarkRecord,
    Finding,
    KindCount,
    Measurement,
    TargetRecord,
)
from auditor.core.secret_table import SecretTable, select_members
from auditor.gate.comparability import digest_comparable_secrets
from auditor.records import aliases, private_texts, table
from auditor.records.folder import RunFolder
from auditor.records.table import MEASURED, OBSERVED, Column
from auditor.runs import plan_weights
from auditor.runs.reporter import Reporter, StageClock
from auditor.statistics import extraction, judging, memorised, roc
from auditor.statistics.audited import audit_epsilon_bounds, audit_measurements
from auditor.statistics.bounds import LEVEL
from auditor.statistics.membership import FALSE_POSITIVES
from auditor.statistics.metrics import (
    OF_TEXT,
    RECALL,
    name_nonmember_metric,
    name_score_column,
    name_tpr_metric,
)
from auditor.statistics.ngram_scores import (
    NGramCounts,
    average_per_text,
    measure_jaccard_similarity,
    score_against_other_records,
)
from auditor.statistics.strongest_score import (
    CandidateScore,
    ScoredRecords,
    choose_strongest_score,
    compute_simultaneous_widening,
)

SETTING = "text-only"
PASSAGES = "passages"
MEMBERS = "membership"
EPSILON = "canaries"
METHODS = {PASSAGES: "verbatim", MEMBERS: "membership", EPSILON: "epsilon"}
_CELLS = {attack: CellKey(UNDEFENDED, SETTING, attack) for attack in METHODS}
DELTA = 1e-5
_SHARES = 10  # shares of the level: one for each bound of epsilon, the rest for other signals
WORDS = 10
# characters that make about 10 words of Chinese, Japanese or Thai, whose characters count as words
CHARACTERS = 20
_SIDES = {True: "members", False: "nonmembers"}  # fields of `KindCount`


@dataclass(frozen=True)
class ReleasedText:
    """Inputs of an audit of released text.

    Args:
        plan: plan of the audit.
        words: map from words to word ids.
        records: records to search for, members first.
        texts: released texts as word ids.
        written: released texts as strings.
        manifest: canaries of an epsilon audit; None if no canaries were given.
        notes: sentences for the reader.
    """

    plan: Plan
    words: WordIds
    records: tuple[ReleasedRecord, ...]
    texts: tuple[tuple[int, ...], ...]
    written: tuple[str, ...]
    manifest: AuditCanaryManifest | None
    notes: tuple[str, ...]

    @cached_property
    def is_unspaced(self) -> bool:
        return is_mostly_unspaced(record.text for record in self.records if record.member)

    @property
    def unit(self) -> str:
        return "characters" if self.is_unspaced else "words"

    @property
    def usual_passage_length(self) -> int:
        return CHARACTERS if self.is_unspaced else WORDS

    @property
    def secrets(self) -> SecretTable:
        """The records, as secrets of a run."""
        secrets = []
        for record in self.records:
            id = f"{'member' if record.member else 'nonmember'}-{record.row:06d}"
            secrets.append(Secret(id, (), record.tokens, record.times, record.member))
        return aliases.alias_secrets(tuple(secrets), aliases.load_alias_salt())


def build_release_plan(
    text: Path, data: str, nonmembers: str, canaries: str | None, seed: int, command: str
) -> Plan:
    return Plan.from_fields(
        model=f"{plan_weights.RELEASED}:{text}",
        data=data,
        nonmembers=nonmembers,
        canaries=canaries,
        setting=SETTING,
        # The third method, epsilon, runs only with canaries.
        attack=tuple(METHODS)[: 2 + (canaries is not None)],
        seed=seed,
        command=command,
    )


def read_released_text(plan: Plan, text: Path) -> ReleasedText:
    """Read all files before anything is measured.

    Raise AuditError for too few records, or if the canaries are not those of an epsilon audit.
    """
    data = plan.data.data
    nonmembers = plan.data.nonmembers
    words = WordIds()
    assert data is not None and nonmembers is not None  # the command requires both
    manifest: AuditCanaryManifest | None = None
    canary_texts = []
    if plan.data.canaries is not None:
        canary_manifest = manifests.read_canary_manifest(Path(plan.data.canaries))
        if not isinstance(canary_manifest, AuditCanaryManifest):
            raise AuditError(
                f"expected canaries of an audit in {plan.data.canaries!r} (audit canaries make "
                "--audit), got those for exposure, which takes a model's probabilities"
            )
        manifest = canary_manifest
        canary_texts = [canary.text for canary in manifest.canaries]
    row_texts = read_data_table("OUT", str(text)).list_shown_texts()
    records, notes = released_passages.read_released_records(data, nonmembers, words, canary_texts)
    n_members = sum(record.member for record in records)
    for count, flag in ((n_members, "--data"), (len(records) - n_members, "--nonmembers")):
        if count < roc.LEAST:
            raise AuditError(
                f"expected at least {roc.LEAST} different records in {flag}, got {count}"
            )
    return ReleasedText(
        plan,
        words,
        tuple(records),
        tuple(map(words, row_texts)),
        tuple(row_texts),
        manifest,
        tuple(notes),
    )


def audit_released_text(
    release: ReleasedText, n: int | None, folder: RunFolder, reporter: Reporter
) -> AuditResult:
    """Audit the released text.

    Raise AuditError if all members, or all non-members, have fewer than n words.

    Args:
        release: inputs of the audit.
        n: number of words in a passage. If n is None, use `usual_passage_length`, or the median
            length of private records if this is shorter.
        folder: folder of the run.
        reporter: receiver of progress messages.
    """
    clock = StageClock(reporter)
    secrets = release.secrets
    rows = _ReleasedTextResults(folder)
    median = int(np.median([len(secret.suffix) for secret in select_members(secrets)]))
    # At least 2: a single word occurs everywhere.
    n = n or max(2, min(release.usual_passage_length, median))
    folder.pin_secrets(digest_comparable_secrets(secrets))
    with clock.timed_stage("passages of the records"):
        passages, kinds = _find_copied_passages(release, n, secrets, rows)
    with clock.timed_stage("membership"):
        findings = [passages, _build_membership_finding(release, secrets, rows)]
    coins: tuple[Secret, ...] = ()
    if release.manifest is not None:
        with clock.timed_stage("canaries"):
            finding, coins = _build_epsilon_finding(release, release.manifest, rows)
            findings.append(finding)
    facts = secret_details.build_attribute_columns(
        (*secrets, *coins),
        aliases.salt_fingerprint(aliases.load_alias_salt()),
        {canary.id for canary in coins},
    )
    folder.save_secret_attributes(facts)
    table.write_secrets_table(folder.path, rows.columns)
    private_texts.write_secret_texts(
        folder.path, rows.shown, rows.guesses, release.words.words_of_ids
    )
    return _build_release_result(release, folder.path.name, secrets, kinds, findings, clock)


def _build_release_result(
    release: ReleasedText,
    name: str,
    secrets: Sequence[Secret],
    kinds: dict[str, KindCount],
    findings: Sequence[Finding],
    clock: StageClock,
) -> AuditResult:
    """Return the record of a finished audit.

    Args:
        name: name of the run.
        kinds: counts of personal data, keyed by kind.
    """
    members = select_members(secrets)
    repeats = Counter(secret.repeats or 1 for secret in members)
    record = BenchmarkRecord(
        name="files",
        description=(
            f"{len(release.texts):,} released texts, against {len(members):,} private records"
        ),
        members=len(members),
        nonmembers=len(secrets) - len(members),
        known=0,
        repeats={str(times): count for times, count in sorted(repeats.items())},
        digest=digest_comparable_secrets(secrets),
        notes=release.notes,
        kinds=kinds,
    )
    return AuditResult(
        name=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=__version__,
        command=release.plan.output.command,
        plan=release.plan.to_json(),
        benchmark=record,
        targets=(
            TargetRecord(
                UNDEFENDED, "Released text", f"{len(release.texts):,} texts; no model was asked"
            ),
        ),
        findings=tuple(findings),
        environment={"python": platform.python_version(), "numpy": np.__version__},
        timings=clock.seconds,
        seed=release.plan.seed,
        family=RELEASED_TEXT,
        weights=plan_weights.digest_plan_files(release.plan),
        methods=METHODS,
    )


class _ReleasedTextResults:
    """Collector of the guesses and numbers to write to the run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.columns: list[Column] = []
        self.shown: Sequence[Secret] = ()
        self.guesses: dict[str, dict[str, Guesses]] = {}

    def add_observations(
        self, key: CellKey, secrets: Sequence[Secret], values: Mapping[str, Floats]
    ) -> None:
        """Add numbers about each record, from which the measurements can be recomputed.

        Args:
            key: target, setting and method.
            secrets: the records.
            values: arrays of shape (secrets,), keyed by name.
        """
        ids, member, times = list_secret_attributes(secrets)
        observations = []
        for id, row in zip(ids, np.transpose([*values.values()]).tolist(), strict=True):
            observations.append(Observation(id, dict(zip(values, row, strict=True))))
        self.folder.observations.append(key, observations)
        for name, column in values.items():
            for kind in (MEASURED, OBSERVED):
                self.columns.append(Column(kind, key, name, ids, column, member, times))

    def add_guesses(
        self, key: CellKey, secrets: Sequence[Secret], guesses: Sequence[Guesses]
    ) -> None:
        self.folder.guesses.append(key, list(guesses))
        self.shown = tuple(secrets)
        self.guesses[str(key)] = {guess.secret: guess for guess in guesses}


def _build_release_finding(
    attack: str, measurements: Sequence[Measurement], notes: Sequence[str], **more: object
) -> Finding:
    access = ("only the released text",)
    finding = Finding(*_CELLS[attack], {}, access, "as released", None, "it claims nothing")
    return replace(finding, measurements=tuple(measurements), notes=tuple(notes), **more)  # type: ignore[arg-type]


# --- passages and personal data ---


def _find_copied_passages(
    release: ReleasedText, n: int, secrets: Sequence[Secret], rows: _ReleasedTextResults
) -> tuple[Finding, dict[str, KindCount]]:
    """Find passages of the records in the released text, verbatim or nearly so.

    The passages are judged like an attack's guesses.

    Args:
        release: inputs of the audit.
        n: number of words in a passage.
        secrets: the records as secrets.
        rows: collector of the guesses and numbers.

    Returns:
        The finding.
        Counts of personal data, keyed by kind.
    """
    is_long = [len(record.tokens) >= n for record in release.records]
    long = list(compress(release.records, is_long))
    for flag, kind in (("--data", True), ("--nonmembers", False)):
        if kind not in {record.member for record in long}:
            raise AuditError(
                f"expected records of {n} {release.unit} or more in {flag}, got none (--words sets "
                "how many)"
            )
    nearest, coverage, index = released_passages.find_nearest_passages(long, release.texts, n)
    # The target of a record is its longest released passage, else its nearest n words, else its
    # first n.
    targets = {}
    guesses = []
    for secret, passage in zip(compress(secrets, is_long), nearest, strict=True):
        targets[secret.id] = replace(secret, suffix=passage.record_words)
        guess = Guess(passage.released_words, float(passage.length))
        guesses.append(Guesses(secret.id, (guess,), 1, 0))
    outcome = judging.judge_guesses(guesses, targets)
    parts, counts = _measure_personal_data(release, long)
    places = {id: place for place, id in enumerate(targets)}
    order = [places[id] for id in outcome.ids]
    of_kinds = {kind: np.array(shares)[order] for kind, shares in parts.items()}
    judged = ValuesBySecret.from_judged_guesses(outcome, of_kinds)
    rows.add_guesses(_CELLS[PASSAGES], [*targets.values()], guesses)
    rows.columns += judged.list_columns(_CELLS[PASSAGES])
    members = outcome.select_secrets(outcome.member)
    finding = _build_release_finding(
        PASSAGES,
        extraction.measure_extraction(outcome),
        tuple(_describe_released_passages(release, n, len(long), coverage, index)),
        by_repeats=extraction.measure_hit_shares(RECALL, members),
        by_kind=judged.remeasure_kinds(RECALL, of_kinds),
        by_kind_nonmembers=judged.remeasure_kinds(name_nonmember_metric(RECALL), of_kinds),
        curve=extraction.compute_recall_error_curve(members),
        options={"words": n},
    )
    return finding, counts


def _describe_released_passages(
    release: ReleasedText,
    n: int,
    long: int,
    memorised_tokens: Sequence[memorised.MemorisedTokens],
    index: released_passages.NGramIndex,
) -> Iterator[str]:
    unit = release.unit
    yield (
        f"extracted: {n} {unit} or more in a row that only one record of --data or --nonmembers "
        f"has; near-verbatim: {n} {unit} with {judging.compute_near_verbatim_limit(n)} "
        f"changed at most, of which {max(1, n // 2)} are adjacent"
    )
    if short := len(release.records) - long:
        yield f"{short:,} records have fewer than {n} {unit}: they are not searched for (--words)"
    holding = sum(tokens.memorised > 0 for tokens in memorised_tokens)
    trained, heldout = index.ngram_place_counts(n)
    # Assume that private n-grams occur by chance as often as held-out n-grams do.
    floor = sum(tokens.heldout > 0 for tokens in memorised_tokens) * trained / max(heldout, 1)
    yield (
        f"{holding:,} of {len(memorised_tokens):,} released texts contain {n} {unit} in a row from "
        "the private data and from no non-member; judging by non-members, "
        f"{floor:,.0f} would by chance"
    )
    if not pii.has_pii_packages():
        yield (
            f"personal data: only values marked in the data are searched for ({pii.INSTALL} to "
            "recognise the rest)"
        )


def _measure_personal_data(
    release: ReleasedText, records: Sequence[ReleasedRecord]
) -> tuple[dict[str, list[float]], dict[str, KindCount]]:
    """Measure how much personal data of each record the released text contains.

    An item that occurs in both members and non-members does not count, because its source is
    ambiguous.

    Returns:
        For each kind of personal data, the share of each record's items that the released text
            contains; NaN for a record without such items.
        For each kind, the number of items in members and in non-members.
    """
    recognisers = pii.PiiRecognisers() if pii.has_pii_packages() else None
    # An item that is only a part of longer words in its record may match parts elsewhere.
    whole_word_only: dict[str, bool] = {}
    items: dict[tuple[int, str, str], None] = {}  # (record, kind, text)
    for i, record in enumerate(records):
        for span in pii.find_pii_spans(record.text, record.marks, recognisers):
            string = record.text[span.start : span.end]
            items[i, span.kind, string] = None
            is_word = is_whole_word_somewhere(string, record.text)
            whole_word_only[string] = is_word and whole_word_only.get(string, True)
    shared = set()
    for side in (True, False):
        strings = dict[str, bool]()
        for i, _, string in items:
            if records[i].member == side:
                strings[string] = whole_word_only[string]
        shared |= _find_strings(strings, [r.text for r in records if r.member != side])
    # Search the raw text, not its words: numbers and addresses contain punctuation.
    text_strings = _find_strings(whole_word_only, release.written)
    counts: dict[str, Counter[str]] = {}
    hits: dict[tuple[str, int], list[bool]] = {}
    for i, kind, string in items:
        counts.setdefault(kind, Counter())[_SIDES[records[i].member]] += string not in shared
        if string not in shared:
            hits.setdefault((kind, i), []).append(string in text_strings)
    shares_by_kind: dict[str, list[float]] = {}
    for (kind, i), is_found in hits.items():
        shares = shares_by_kind.setdefault(kind, [float("nan")] * len(records))
        shares[i] = sum(is_found) / len(is_found)
    return dict(sorted(shares_by_kind.items())), {
        kind: KindCount(**numbers) for kind, numbers in sorted(counts.items())
    }


def _find_strings(strings: Mapping[str, bool], texts: Sequence[str]) -> set[str]:
    """Return the strings that the texts contain.

    Args:
        strings: maps a string to True if it counts only as a whole word.
    """
    return {text for text, count in count_text_occurrences(strings, texts).items() if count}


# --- membership ---


def _build_membership_finding(
    release: ReleasedText, secrets: Sequence[Secret], rows: _ReleasedTextResults
) -> Finding:
    """Score each record's membership by its n-grams in the released text.

    Some scores compare a record with the other records. Others were published (arXiv 2502.14921).
    """
    # + 1: any unknown word.
    records = [record.tokens for record in release.records]
    kinds = len(release.words.ids) + 1
    model = NGramCounts.count_ngrams(release.texts, kinds)
    values_by_score = {
        "ngrams": score_against_other_records(model, records, release.plan.seed),
        "bigrams": model.average_laplace_log_prob(records),
        "likeness": measure_jaccard_similarity(records, release.texts, kinds),
    }
    truth = ScoredRecords(np.array([secret.member for secret in secrets]), {})
    scores = {}
    for name, values in values_by_score.items():
        scores[name] = CandidateScore(values, OF_TEXT[name])
    widening = compute_simultaneous_widening(list(scores.values()), truth)
    strongest = choose_strongest_score(scores, truth, widening, len(scores))
    rates = []
    columns = {name_score_column(""): strongest.values}
    for name, values in values_by_score.items():
        columns[name_score_column(name)] = values
        for rate in FALSE_POSITIVES:
            sides = values[truth.member], values[~truth.member]
            rates.append(roc.estimate_tpr(name_tpr_metric(name, rate), *sides, rate))
    rows.add_observations(_CELLS[MEMBERS], secrets, columns)
    notes = [
        f"the membership AUC is of the strongest of {len(scores)} scores; the intervals of "
        "all AUCs hold together; the published scores (2502.14921): "
        + ", ".join([OF_TEXT["bigrams"], OF_TEXT["likeness"]])
    ]
    return _build_release_finding(
        MEMBERS,
        [*strongest.measurements, *strongest.corrected, *filter(None, rates)],
        notes,
        scores_tried=len(scores),
    )


# --- canaries ---


def _build_epsilon_finding(
    release: ReleasedText, manifest: AuditCanaryManifest, rows: _ReleasedTextResults
) -> tuple[Finding, tuple[Secret, ...]]:
    """Bound epsilon by the canaries in the released text.

    A canary's score is its log-likelihood under the n-grams of the released text, minus that under
    the n-grams of --nonmembers. The records of --data are no part of this reference, because coins
    decided which canaries they contain.

    Args:
        release: inputs of the audit.
        manifest: the canaries, with the coin that decided each insertion.
        rows: collector of the guesses and numbers.

    Returns:
        The finding.
        The canaries as secrets.
    """
    words = WordIds(dict(release.words.ids))  # a copy, as reading adds words
    texts = []
    is_secret = []
    subjects = []
    for canary in manifest.canaries:
        text = words(canary.text)
        texts.append(text)
        # Words of the prefix are public and do not count.
        is_secret.append(np.arange(len(text)) >= len(words(canary.prefix)))
        times = manifest.times * canary.included
        subjects.append(Secret(canary.id, (), text, times, canary.included, alias=canary.id))
    kinds = len(words.ids) + 1  # after all reads; + 1: any unknown word
    model = NGramCounts.count_ngrams(release.texts, kinds)
    reference = NGramCounts.count_ngrams(
        [record.tokens for record in release.records if not record.member], kinds
    )
    gained = model.log_probs(texts) - reference.log_probs(texts)
    # Both (words of all canaries,).
    scores = average_per_text(np.where(np.concatenate(is_secret), gained, 0.0), texts)
    # Scores of released text are valid guesses of coins (arXiv 2502.14921): one-run bounds hold.
    coins = np.array([subject.member for subject in subjects])
    audits = audit_epsilon_bounds(scores, coins, DELTA, LEVEL / _SHARES, copies=manifest.times)
    rows.add_observations(_CELLS[EPSILON], subjects, {"score": scores})
    main = audits[0]
    notes = [
        f"{main.canaries:,} canaries, in or out by a fair coin each; {main.guesses:,} guessed, "
        f"{main.right:,} right",
        f"the bound, at {1 - main.level:.4g}, is on epsilon at delta {main.delta:g}, for the "
        "whole training and release that made this text",
    ]
    return _build_release_finding(EPSILON, audit_measurements(audits), notes, audits=audits), tuple(
        subjects
    )
