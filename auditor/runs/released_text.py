"""Audit released text without a model: search for private records, and test membership.

The result is a run folder like any other, for reports, gates, comparisons and attestations. This
module does not import torch.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import numpy as np

from auditor import __version__
from auditor.benchmarks.canaries import manifests
from auditor.benchmarks.canaries.audit_canaries import AuditCanaryManifest
from auditor.benchmarks.data import pii, released_passages
from auditor.benchmarks.data.occurrences import count_text_occurrences
from auditor.benchmarks.data.released_passages import ReleasedRecord, WordIds
from auditor.benchmarks.data.words import is_mostly_unspaced, is_whole_word_somewhere
from auditor.conclusions import secret_details
from auditor.conclusions.outcomes import RowValuesBySecret
from auditor.core.arrays import Floats
from auditor.core.errors import AuditError
from auditor.core.nouns import (
    UNDEFENDED,
    CellKey,
    Guess,
    Guesses,
    Observation,
    Secret,
    select_members,
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
# about 10 words of Chinese, Japanese or Thai, whose characters count as words
CHARACTERS = 20


@dataclass(frozen=True)
class ReleasedText:
    """Inputs of an audit of released text.

    Args:
        plan: plan of the audit.
        words: map from words to word ids.
        records: records to search for, members first.
        texts: released texts as word ids.
        written: released texts as strings.
        manifest: canaries of an epsilon audit; None without.
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
    def usual_passage_length(self) -> int:
        return CHARACTERS if self.is_unspaced else WORDS

    @property
    def secrets(self) -> tuple[Secret, ...]:
        """Records as the secrets of a run."""
        kind = {True: "member", False: "nonmember"}
        secrets = (
            Secret(
                f"{kind[record.member]}-{record.row:06d}",
                (),
                record.tokens,
                record.times,
                record.member,
            )
            for record in self.records
        )
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
        # The third method, epsilon, needs canaries.
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
    if plan.data.canaries is None:
        manifest = None
    else:
        manifest = manifests.read_canary_manifest(Path(plan.data.canaries))
    if manifest is not None and not isinstance(manifest, AuditCanaryManifest):
        raise AuditError(
            f"expected canaries of an audit in {plan.data.canaries!r} (audit canaries make "
            "--audit), got those for exposure, which takes a model's probabilities"
        )
    row_texts = released_passages.read_row_texts("OUT", str(text))[1]
    if manifest:
        canary_texts = [canary.text for canary in manifest.canaries]
    else:
        canary_texts = []
    records, notes = released_passages.read_released_records(data, nonmembers, words, canary_texts)
    counts = Counter(record.member for record in records)
    for member, flag in ((True, "--data"), (False, "--nonmembers")):
        if counts[member] < roc.LEAST:
            raise AuditError(
                f"expected at least {roc.LEAST} different records in {flag}, got {counts[member]}"
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

    n: words of a passage. If None, n is `usual_passage_length`, or the median length of private
    records if that is shorter. Raise AuditError if all members, or all non-members, have fewer than
    n words.
    """
    clock = StageClock(reporter)
    secrets = release.secrets
    rows = _ReleasedTextResults(folder)
    # At least 2: a single word occurs everywhere.
    n = n or max(
        2,
        min(
            release.usual_passage_length,
            int(np.median([len(r.tokens) for r in release.records if r.member])),
        ),
    )
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
    canaries = {canary.id for canary in coins}
    folder.save_secret_facts(
        secret_details.build_fact_columns(
            (*secrets, *coins), aliases.salt_fingerprint(aliases.load_alias_salt()), canaries
        )
    )
    table.write_secrets_table(folder.path, rows.columns)
    private_texts.write_secret_texts(
        folder.path, rows.shown, rows.guesses, release.words.words_of_ids
    )
    members = select_members(secrets)
    record = BenchmarkRecord(
        name="files",
        description=(
            f"{len(release.texts):,} released texts, against {len(members):,} private records"
        ),
        members=len(members),
        nonmembers=len(secrets) - len(members),
        known=0,
        repeats={
            str(times): count
            for times, count in sorted(Counter(secret.repeats or 1 for secret in members).items())
        },
        digest=digest_comparable_secrets(secrets),
        notes=release.notes,
        kinds=kinds,
    )
    return AuditResult(
        name=folder.path.name,
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
        self.folder, self.columns = folder, list[Column]()
        self.shown: tuple[Secret, ...] = ()
        self.guesses: dict[str, dict[str, Guesses]] = {}

    def add_observations(
        self, key: CellKey, secrets: Sequence[Secret], values: Mapping[str, Floats]
    ) -> None:
        """Add numbers of each record, from which the measurements can be recomputed.

        values: (secrets,) values by name.
        """
        rows = (
            {name: float(column[i]) for name, column in values.items()} for i in range(len(secrets))
        )
        self.folder.observations.append(
            key,
            [
                Observation(secret.id, numbers)
                for secret, numbers in zip(secrets, rows, strict=True)
            ],
        )
        ids, member, times = (
            [getattr(s, name) for s in secrets] for name in ("id", "member", "repeats")
        )
        for name, column in values.items():
            self.columns += [
                Column(kind, key, name, ids, column, member, times) for kind in (MEASURED, OBSERVED)
            ]

    def add_guesses(
        self, key: CellKey, secrets: Sequence[Secret], guesses: Sequence[Guesses]
    ) -> None:
        self.folder.guesses.append(key, list(guesses))
        self.shown, self.guesses[str(key)] = (
            tuple(secrets),
            {guess.secret: guess for guess in guesses},
        )


def _build_release_finding(
    attack: str, measurements: Sequence[Measurement], notes: Sequence[str], **more: object
) -> Finding:
    access = ("only the released text",)
    finding = Finding(*_CELLS[attack], {}, access, "as released", None, "it claims nothing")
    return replace(finding, measurements=tuple(measurements), notes=tuple(notes), **more)  # type: ignore[arg-type]


# --- passages and personal data
# -----------------------------------------------------------------------------------------------


def _find_copied_passages(
    release: ReleasedText, n: int, secrets: Sequence[Secret], rows: _ReleasedTextResults
) -> tuple[Finding, dict[str, KindCount]]:
    """Find passages of the records in the released text, verbatim or nearly, and judge them as
    guesses.

    n: words of a passage. Return the finding, then counts of personal data by kind.
    """
    long = [i for i, record in enumerate(release.records) if len(record.tokens) >= n]
    few = []
    for kind in (True, False):
        if not any(release.records[i].member == kind for i in long):
            few.append(kind)
    if few:
        flag = "--data" if few[0] else "--nonmembers"
        unit = "characters" if release.is_unspaced else "words"
        raise AuditError(
            f"expected records of {n} {unit} or more in {flag}, got none (--words sets how many)"
        )
    nearest, coverage, index = released_passages.find_nearest_passages(
        [release.records[i] for i in long], release.texts, n
    )
    # The target of a record is its longest released passage, else its nearest n words, else its
    # first n.
    targets = []
    for i, passage in zip(long, nearest, strict=True):
        targets.append(replace(secrets[i], suffix=passage.record_words))
    guesses = []
    for secret, passage in zip(targets, nearest, strict=True):
        guesses.append(
            Guesses(secret.id, (Guess(passage.released_words, float(passage.length)),), 1, 0)
        )
    outcome = judging.judge_guesses(guesses, {target.id: target for target in targets})
    parts, counts = _measure_personal_data(release, [release.records[i] for i in long])
    by_id = {target.id: i for i, target in enumerate(targets)}
    of_kinds = {kind: [shares[by_id[id]] for id in outcome.ids] for kind, shares in parts.items()}
    judged = RowValuesBySecret.from_judged_guesses(outcome, of_kinds)
    rows.add_guesses(_CELLS[PASSAGES], targets, guesses)
    rows.columns += judged.list_columns(_CELLS[PASSAGES])
    members = outcome.select_secrets(outcome.member)
    finding = _build_release_finding(
        PASSAGES,
        extraction.measure_extraction(outcome),
        tuple(_describe_released_passages(release, n, len(long), coverage, index)),
        by_repeats=extraction.measure_hit_shares(RECALL, members),
        by_kind={kind: m for kind in of_kinds if (m := judged.remeasure_metric(RECALL, kind=kind))},
        by_kind_nonmembers={
            kind: m
            for kind in of_kinds
            if (m := judged.remeasure_metric(name_nonmember_metric(RECALL), kind=kind))
        },
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
    unit = "characters" if release.is_unspaced else "words"
    yield (
        f"extracted: {n} {unit} or more in a row that only one record of --data or --nonmembers "
        f"has; near-verbatim: {n} {unit} with {judging.compute_near_verbatim_limit(n)} "
        f"changed at most, of which {max(1, n // 2)} are adjacent"
    )
    if short := len(release.records) - long:
        yield (
            f"{short:,} records have fewer than {n} {unit}: they are not looked for here (--words)"
        )
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
    """Return the released share of each record's personal data by kind, then counts of items by
    kind.

    A share is NaN for a record without personal data. A string in both members and non-members does
    not count, because its source is ambiguous.
    """
    if pii.has_pii_packages():
        recognisers = pii.PiiRecognisers()
    else:
        recognisers = None
    spans_of_records = [
        pii.find_pii_spans(record.text, record.marks, recognisers) for record in records
    ]
    spans = [
        list(
            dict.fromkeys((span.kind, record.text[span.start : span.end]) for span in record_spans)
        )
        for record, record_spans in zip(records, spans_of_records, strict=True)
    ]
    # A mark that is only part of longer words in its record may match parts elsewhere.
    whole_word_only = {string: True for pairs in spans for _, string in pairs}
    whole_word_only |= {
        string: False
        for pairs, record in zip(spans, records, strict=True)
        for _, string in pairs
        if not is_whole_word_somewhere(string, record.text)
    }
    of_members, of_nonmembers = (
        {
            string: whole_word_only[string]
            for pairs, record in zip(spans, records, strict=True)
            if record.member == side
            for _, string in pairs
        }
        for side in (True, False)
    )
    members, nonmembers = (
        [record.text for record in records if record.member == side] for side in (True, False)
    )
    shared = _find_strings(of_members, nonmembers) | _find_strings(of_nonmembers, members)
    # Search the raw text, not its words: numbers and addresses contain punctuation.
    text_strings = _find_strings(of_members | of_nonmembers, release.written)
    shares_by_kind: dict[str, list[float]] = {}
    counts: dict[str, Counter[str]] = {}
    for i, (pairs, record) in enumerate(zip(spans, records, strict=True)):
        for kind in dict.fromkeys(kind for kind, _ in pairs):
            strings = [string for k, string in pairs if k == kind and string not in shared]
            counts.setdefault(kind, Counter())["members" if record.member else "nonmembers"] += len(
                strings
            )
            if strings:
                shares = shares_by_kind.setdefault(kind, [float("nan")] * len(records))
                shares[i] = sum(string in text_strings for string in strings) / len(strings)
    return dict(sorted(shares_by_kind.items())), {
        kind: KindCount(**numbers) for kind, numbers in sorted(counts.items())
    }


def _find_strings(strings: Mapping[str, bool], texts: Sequence[str]) -> set[str]:
    """Return the strings that the texts contain.

    strings: True for a string that counts only as a whole word.
    """
    return {text for text, count in count_text_occurrences(strings, texts).items() if count}


# --- membership
# -----------------------------------------------------------------------------------------------


def _build_membership_finding(
    release: ReleasedText, secrets: Sequence[Secret], rows: _ReleasedTextResults
) -> Finding:
    """Score each record's membership by its n-grams in the released text.

    The scores compare a record with other records, or are published scores (arXiv 2502.14921).
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
    truth = ScoredRecords(np.array([record.member for record in release.records]), {})
    scores = {}
    for name, values in values_by_score.items():
        scores[name] = CandidateScore(values, OF_TEXT[name])
    widening = compute_simultaneous_widening(list(scores.values()), truth)
    strongest = choose_strongest_score(scores, truth, widening, len(scores))
    rates = [
        tpr
        for name, values in values_by_score.items()
        for rate in FALSE_POSITIVES
        if (
            tpr := roc.estimate_tpr(
                name_tpr_metric(name, rate), values[truth.member], values[~truth.member], rate
            )
        )
    ]
    columns = {}
    for name, values in {"": strongest.values, **values_by_score}.items():
        columns[name_score_column(name)] = values
    rows.add_observations(_CELLS[MEMBERS], secrets, columns)
    notes = [
        f"the membership AUC is of the strongest of {len(scores)} scores; the intervals of "
        "all AUCs hold together; the published scores (2502.14921): "
        + ", ".join([OF_TEXT["bigrams"], OF_TEXT["likeness"]])
    ]
    finding = _build_release_finding(
        MEMBERS, [*strongest.measurements, *strongest.corrected, *rates], notes
    )
    return replace(finding, scores_tried=len(scores))


# --- canaries
# -----------------------------------------------------------------------------------------------


def _build_epsilon_finding(
    release: ReleasedText, manifest: AuditCanaryManifest, rows: _ReleasedTextResults
) -> tuple[Finding, tuple[Secret, ...]]:
    """Bound epsilon by the canaries in the released text. Return the finding, then the canaries as
    secrets.

    The records of --nonmembers are the reference. Those of --data are not, because coins decide
    which canaries --data contains.
    """
    words = WordIds(dict(release.words.ids))  # a copy, as reading adds words
    texts = [words(canary.text) for canary in manifest.canaries]
    prefix_lengths = [len(words(canary.prefix)) for canary in manifest.canaries]
    kinds = len(words.ids) + 1  # after all reads; + 1: any unknown word
    model = NGramCounts.count_ngrams(release.texts, kinds)
    reference = NGramCounts.count_ngrams(
        [record.tokens for record in release.records if not record.member], kinds
    )
    gained = model.log_probs(texts) - reference.log_probs(texts)
    # (words of all canaries,): words of the prefix are public and do not count.
    secret = np.concatenate(
        [np.arange(len(text)) >= cut for text, cut in zip(texts, prefix_lengths, strict=True)]
    )
    scores = average_per_text(np.where(secret, gained, 0.0), texts)
    coins = np.array([canary.included for canary in manifest.canaries])
    # Scores of released text are valid guesses of coins (arXiv 2502.14921): one-run bounds hold.
    audits = audit_epsilon_bounds(scores, coins, DELTA, LEVEL / _SHARES, copies=manifest.times)
    subjects = tuple(
        Secret(
            canary.id,
            (),
            text,
            manifest.times if canary.included else 0,
            canary.included,
            alias=canary.id,
        )
        for canary, text in zip(manifest.canaries, texts, strict=True)
    )
    rows.add_observations(_CELLS[EPSILON], subjects, {"score": scores})
    main = audits[0]
    notes = [
        f"{main.canaries:,} canaries, in or out by a fair coin each; {main.guesses:,} guessed, "
        f"{main.right:,} right",
        f"the bound, at {1 - main.level:.4g}, is on epsilon at delta {main.delta:g}, for the "
        "whole training and release that made this text",
    ]
    return _build_release_finding(
        EPSILON, audit_measurements(audits), notes, audits=audits
    ), subjects
