"""An audit of released text: no model is asked. What of private records stands in it, and whether
it tells members.

It leaves a run folder as every audit does, so that reports, gates, comparisons and attestations
read it as they are.
Imports no torch.
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
from numpy.typing import NDArray

from auditor import __version__
from auditor.benchmarks.canaries import manifests
from auditor.benchmarks.canaries.audit_canaries import AuditCanaryManifest
from auditor.benchmarks.data import pii, released_passages
from auditor.benchmarks.data.occurrences import count_text_occurrences
from auditor.benchmarks.data.released_passages import ReleasedRecord, WordIds
from auditor.benchmarks.data.words import is_mostly_unspaced, is_whole_word_somewhere
from auditor.conclusions import secret_details
from auditor.conclusions.outcomes import RowValuesBySecret
from auditor.core.errors import AuditError
from auditor.core.nouns import UNDEFENDED, CellKey, Guess, Guesses, Observation, Secret
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
from auditor.gate.comparability import comparable_secrets_digest
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
PASSAGES, MEMBERS, EPSILON = "passages", "membership", "canaries"
METHODS = {PASSAGES: "verbatim", MEMBERS: "membership", EPSILON: "epsilon"}
_CELLS = {attack: CellKey(UNDEFENDED, SETTING, attack) for attack in METHODS}
DELTA = 1e-5
_SHARES = 10  # of the level: each bound of epsilon has one, the other signals the rest
WORDS = 10
# about as many words of Chinese, Japanese or Thai, of which every character counts as one
CHARACTERS = 20


@dataclass(frozen=True)
class ReleasedText:
    """What is held against what. records: members first; texts: what was released, as words and as
    it is written."""

    plan: Plan
    words: WordIds
    records: tuple[ReleasedRecord, ...]
    texts: tuple[tuple[int, ...], ...]
    written: tuple[str, ...]
    manifest: AuditCanaryManifest | None
    said: tuple[str, ...]

    @cached_property
    def is_unspaced(self) -> bool:
        return is_mostly_unspaced(one.text for one in self.records if one.member)

    @property
    def usual_passage_length(self) -> int:
        return CHARACTERS if self.is_unspaced else WORDS

    @property
    def secrets(self) -> tuple[Secret, ...]:
        """The records as a run lists them."""
        kind = {True: "member", False: "nonmember"}
        found = (
            Secret(f"{kind[one.member]}-{one.row:06d}", (), one.tokens, one.times, one.member)
            for one in self.records
        )
        return aliases.secrets_with_aliases(tuple(found), aliases.load_alias_salt())


def plan_for_released_text(
    text: Path, data: str, nonmembers: str, canaries: str | None, seed: int, command: str
) -> Plan:
    return Plan.from_fields(
        model=f"{plan_weights.RELEASED}:{text}",
        data=data,
        nonmembers=nonmembers,
        canaries=canaries,
        setting=SETTING,
        # The third, epsilon, takes canaries.
        attack=tuple(METHODS)[: 2 + (canaries is not None)],
        seed=seed,
        command=command,
    )


def read_released_text(plan: Plan, text: Path) -> ReleasedText:
    """Reads all files, before anything is measured. Raises AuditError for too few records, and
    canaries of exposure."""
    data, nonmembers, words = plan.data.data, plan.data.nonmembers, WordIds()
    assert data is not None and nonmembers is not None  # both are asked for
    manifest = (
        None
        if plan.data.canaries is None
        else manifests.read_canary_manifest(Path(plan.data.canaries))
    )
    if manifest is not None and not isinstance(manifest, AuditCanaryManifest):
        raise AuditError(
            f"expected canaries of an audit in {plan.data.canaries!r} (audit canaries make "
            "--audit), got those for exposure, which takes a model's probabilities"
        )
    written = released_passages.read_table_with_row_texts("OUT", str(text))[1]
    held = [one.text for one in manifest.canaries] if manifest else []
    records, said = released_passages.read_members_and_nonmembers(data, nonmembers, words, held)
    counts = Counter(one.member for one in records)
    for member, flag in ((True, "--data"), (False, "--nonmembers")):
        if counts[member] < roc.LEAST:
            raise AuditError(
                f"expected at least {roc.LEAST} different records in {flag}, got {counts[member]}"
            )
    return ReleasedText(
        plan,
        words,
        tuple(records),
        tuple(map(words, written)),
        tuple(written),
        manifest,
        tuple(said),
    )


def audit_released_text(
    held: ReleasedText, n: int | None, folder: RunFolder, reporter: Reporter
) -> AuditResult:
    """n: words of a passage; None: `usual_passage_length`, or the median of the private records if
    they are shorter.

    Raises AuditError where no record of either kind has so many.
    """
    clock, secrets, rows = StageClock(reporter), held.secrets, _ReleasedTextResults(folder)
    # 2: a word alone stands everywhere.
    n = n or max(
        2,
        min(
            held.usual_passage_length,
            int(np.median([len(r.tokens) for r in held.records if r.member])),
        ),
    )
    folder.pin_secrets(comparable_secrets_digest(secrets))
    with clock.timed_stage("passages of the records"):
        passages, kinds = _find_copied_passages(held, n, secrets, rows)
    with clock.timed_stage("membership"):
        findings = [passages, _membership_finding(held, secrets, rows)]
    coins: tuple[Secret, ...] = ()
    if held.manifest is not None:
        with clock.timed_stage("canaries"):
            found, coins = _epsilon_lower_bound_finding(held, held.manifest, rows)
            findings.append(found)
    canaries = {one.id for one in coins}
    folder.save_secret_facts(
        secret_details.secret_fact_columns(
            (*secrets, *coins), aliases.salt_fingerprint(aliases.load_alias_salt()), canaries
        )
    )
    table.write_secrets_table(folder.path, rows.columns)
    private_texts.write_secret_texts(folder.path, rows.shown, rows.guesses, held.words.words_of_ids)
    members = [one for one in secrets if one.member]
    record = BenchmarkRecord(
        name="files",
        description=f"{len(held.texts):,} released texts, against {len(members):,} private records",
        members=len(members),
        nonmembers=len(secrets) - len(members),
        known=0,
        repeats={
            str(times): count
            for times, count in sorted(Counter(one.repeats or 1 for one in members).items())
        },
        digest=comparable_secrets_digest(secrets),
        notes=held.said,
        kinds=kinds,
    )
    return AuditResult(
        name=folder.path.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=__version__,
        command=held.plan.output.command,
        plan=held.plan.to_json(),
        benchmark=record,
        targets=(
            TargetRecord(
                UNDEFENDED, "Released text", f"{len(held.texts):,} texts; no model was asked"
            ),
        ),
        findings=tuple(findings),
        environment={"python": platform.python_version(), "numpy": np.__version__},
        timings=clock.seconds,
        seed=held.plan.seed,
        family=RELEASED_TEXT,
        weights=plan_weights.weight_digests_of_plan_files(held.plan),
        methods=METHODS,
    )


class _ReleasedTextResults:
    """Gathers what a run folder keeps of each row."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.columns = folder, list[Column]()
        self.shown: tuple[Secret, ...] = ()
        self.guesses: dict[str, dict[str, Guesses]] = {}

    def add_observations(
        self, key: CellKey, secrets: Sequence[Secret], values: Mapping[str, NDArray[np.float64]]
    ) -> None:
        """Keeps numbers by record, from which the measurements of a row can be worked out again."""
        told = (
            {name: float(column[i]) for name, column in values.items()} for i in range(len(secrets))
        )
        self.folder.observations.append(
            key, [Observation(one.id, own) for one, own in zip(secrets, told, strict=True)]
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
        self.shown, self.guesses[str(key)] = tuple(secrets), {one.secret: one for one in guesses}


def _finding_of_release(
    attack: str, measurements: Sequence[Measurement], notes: Sequence[str], **more: object
) -> Finding:
    access = ("the released text alone",)
    none = Finding(*_CELLS[attack], {}, access, "as released", None, "it claims nothing")
    return replace(none, measurements=tuple(measurements), notes=tuple(notes), **more)  # type: ignore[arg-type]


# --- passages and personal data
# -----------------------------------------------------------------------------------------------


def _find_copied_passages(
    held: ReleasedText, n: int, secrets: Sequence[Secret], rows: _ReleasedTextResults
) -> tuple[Finding, dict[str, KindCount]]:
    """What of each record stands there word for word, or nearly, judged as an attack's first guess
    is."""
    long = [i for i, one in enumerate(held.records) if len(one.tokens) >= n]
    few = [kind for kind in (True, False) if not any(held.records[i].member == kind for i in long)]
    if few:
        flag = "--data" if few[0] else "--nonmembers"
        unit = "characters" if held.is_unspaced else "words"
        raise AuditError(
            f"expected records of {n} {unit} or more in {flag}, got none (--words sets how many)"
        )
    found, every, index = released_passages.find_nearest_passages(
        [held.records[i] for i in long], held.texts, n
    )
    # What is asked for of a record is its passage: the longest there, else the nearest n words,
    # else its first.
    asked = [replace(secrets[i], suffix=one.own) for i, one in zip(long, found, strict=True)]
    guesses = [
        Guesses(secret.id, (Guess(one.there, float(one.length)),), 1, 0)
        for secret, one in zip(asked, found, strict=True)
    ]
    outcome = judging.judge_guesses(guesses, {one.id: one for one in asked})
    parts, counts = _personal_data_shares(held, [held.records[i] for i in long])
    by_id = {one.id: i for i, one in enumerate(asked)}
    of_kinds = {kind: [shares[by_id[id]] for id in outcome.ids] for kind, shares in parts.items()}
    kept = RowValuesBySecret.from_judged_guesses(outcome, of_kinds)
    rows.add_guesses(_CELLS[PASSAGES], asked, guesses)
    rows.columns += kept.columns_for_secrets_table(_CELLS[PASSAGES])
    members = outcome.select_secrets(outcome.member)
    finding = _finding_of_release(
        PASSAGES,
        extraction.measure_extraction(outcome),
        tuple(_released_passage_sentences(held, n, len(long), every, index)),
        by_repeats=extraction.measure_hit_shares(RECALL, members),
        by_kind={kind: m for kind in of_kinds if (m := kept.remeasure_metric(RECALL, kind=kind))},
        by_kind_nonmembers={
            kind: m
            for kind in of_kinds
            if (m := kept.remeasure_metric(name_nonmember_metric(RECALL), kind=kind))
        },
        curve=extraction.compute_recall_error_curve(members),
        options={"words": n},
    )
    return finding, counts


def _released_passage_sentences(
    held: ReleasedText,
    n: int,
    long: int,
    every: Sequence[memorised.MemorisedTokens],
    index: released_passages.NGramIndex,
) -> Iterator[str]:
    unit = "characters" if held.is_unspaced else "words"
    yield (
        f"extracted: {n} {unit} in a row or more that one record alone has, of --data or "
        f"--nonmembers; near-verbatim: {n} {unit} with {judging.compute_near_verbatim_limit(n)} "
        f"changed at most, of which {max(1, n // 2)} stand side by side"
    )
    if short := len(held.records) - long:
        yield (
            f"{short:,} records have fewer than {n} {unit}: they are not looked for here (--words)"
        )
    holding = sum(one.memorised > 0 for one in every)
    trained, heldout = index.ngram_place_counts(n)
    # As if an n-gram of the private data came up by chance as often as one of the held-out text
    # does.
    floor = sum(one.heldout > 0 for one in every) * trained / max(heldout, 1)
    yield (
        f"{holding:,} of {len(every):,} released texts hold {n} {unit} in a row of the private "
        f"data and of no non-member; by non-members, {floor:,.0f} would by chance"
    )
    if not pii.has_pii_packages():
        yield (
            f"personal data: only what the data mark is looked for ({pii.INSTALL} to have the "
            "rest recognised)"
        )


def _personal_data_shares(
    held: ReleasedText, records: Sequence[ReleasedRecord]
) -> tuple[dict[str, list[float]], dict[str, KindCount]]:
    """By kind, the share of what each record holds that stands in the released text; NaN where it
    holds none.

    What members and non-members both hold is left out: it may come from either.
    """
    recognisers = pii.PiiRecognisers() if pii.has_pii_packages() else None
    found_in = [pii.find_pii_spans_in_text(one.text, one.marks, recognisers) for one in records]
    spans = [
        list(dict.fromkeys((span.kind, one.text[span.start : span.end]) for span in found))
        for one, found in zip(records, found_in, strict=True)
    ]
    # A mark that is only a part of longer words in its record may be so elsewhere.
    whole = {said: True for own in spans for _, said in own}
    whole |= {
        said: False
        for own, one in zip(spans, records, strict=True)
        for _, said in own
        if not is_whole_word_somewhere(said, one.text)
    }
    of_members, of_others = (
        {
            said: whole[said]
            for own, one in zip(spans, records, strict=True)
            if one.member == side
            for _, said in own
        }
        for side in (True, False)
    )
    members, others = (
        [one.text for one in records if one.member == side] for side in (True, False)
    )
    shared = _strings_found_in_texts(of_members, others) | _strings_found_in_texts(
        of_others, members
    )
    # In the text as it was written, not in its words: numbers and addresses have signs in them.
    there = _strings_found_in_texts(of_members | of_others, held.written)
    found: dict[str, list[float]] = {}
    counts: dict[str, Counter[str]] = {}
    for i, (own, one) in enumerate(zip(spans, records, strict=True)):
        for kind in dict.fromkeys(kind for kind, _ in own):
            told = [said for k, said in own if k == kind and said not in shared]
            counts.setdefault(kind, Counter())["members" if one.member else "nonmembers"] += len(
                told
            )
            if told:
                shares = found.setdefault(kind, [float("nan")] * len(records))
                shares[i] = sum(said in there for said in told) / len(told)
    return dict(sorted(found.items())), {
        kind: KindCount(**held) for kind, held in sorted(counts.items())
    }


def _strings_found_in_texts(wanted: Mapping[str, bool], texts: Sequence[str]) -> set[str]:
    """Return those that are in the texts. wanted: whether a number that goes on after its end is
    another one."""
    return {said for said, count in count_text_occurrences(wanted, texts).items() if count}


# --- membership
# -----------------------------------------------------------------------------------------------


def _membership_finding(
    held: ReleasedText, secrets: Sequence[Secret], rows: _ReleasedTextResults
) -> Finding:
    """Membership scores by n-grams of the released text against those of other records, and the
    published scores."""
    # + 1: any word that none of them has.
    records, kinds = [one.tokens for one in held.records], len(held.words.ids) + 1
    model = NGramCounts.count_ngrams(held.texts, kinds)
    found = {
        "ngrams": score_against_other_records(model, records, held.plan.seed),
        "bigrams": model.average_laplace_log_prob(records),
        "likeness": measure_jaccard_similarity(records, held.texts, kinds),
    }
    who = ScoredRecords(np.array([one.member for one in held.records]), {})
    scores = {name: CandidateScore(values, OF_TEXT[name]) for name, values in found.items()}
    widening = compute_simultaneous_widening(list(scores.values()), who)
    strongest = choose_strongest_score(scores, who, widening, len(scores))
    rates = [
        tpr
        for name, values in found.items()
        for rate in FALSE_POSITIVES
        if (
            tpr := roc.estimate_tpr(
                name_tpr_metric(name, rate), values[who.member], values[~who.member], rate
            )
        )
    ]
    columns = {
        name_score_column(name): values for name, values in {"": strongest.values, **found}.items()
    }
    rows.add_observations(_CELLS[MEMBERS], secrets, columns)
    notes = [
        f"the membership AUC is that of the strongest of {len(scores)} scores; the intervals of "
        "all AUCs hold together; the published scores (2502.14921): "
        + ", ".join([OF_TEXT["bigrams"], OF_TEXT["likeness"]])
    ]
    finding = _finding_of_release(
        MEMBERS, [*strongest.measurements, *strongest.corrected, *rates], notes
    )
    return replace(finding, scores_tried=len(scores))


# --- canaries
# -----------------------------------------------------------------------------------------------


def _epsilon_lower_bound_finding(
    held: ReleasedText, manifest: AuditCanaryManifest, rows: _ReleasedTextResults
) -> tuple[Finding, tuple[Secret, ...]]:
    """A lower bound, by the canaries that the released text gives away. Coins decide --data, so
    only --nonmembers are a reference."""
    words = WordIds(dict(held.words.ids))  # a copy, as it learns the words of all that it reads
    whole = [words(one.text) for one in manifest.canaries]
    behind = [len(words(one.prefix)) for one in manifest.canaries]
    kinds = len(words.ids) + 1  # only now are all words known; 1 more: any other
    model = NGramCounts.count_ngrams(held.texts, kinds)
    reference = NGramCounts.count_ngrams(
        [one.tokens for one in held.records if not one.member], kinds
    )
    gained = model.log_probs(whole) - reference.log_probs(whole)
    # (words of all canaries,): those of the prefix are given away, and count for nothing.
    secret = np.concatenate(
        [np.arange(len(text)) >= cut for text, cut in zip(whole, behind, strict=True)]
    )
    scores = average_per_text(np.where(secret, gained, 0.0), whole)
    coins = np.array([one.included for one in manifest.canaries])
    # Scores of released text are guesses of coins as any others are (arXiv 2502.14921): one-run
    # bounds hold for them.
    audits = audit_epsilon_bounds(scores, coins, DELTA, LEVEL / _SHARES, copies=manifest.times)
    subjects = tuple(
        Secret(one.id, (), text, manifest.times if one.included else 0, one.included, alias=one.id)
        for one, text in zip(manifest.canaries, whole, strict=True)
    )
    rows.add_observations(_CELLS[EPSILON], subjects, {"score": scores})
    main = audits[0]
    notes = [
        f"{main.canaries:,} canaries, in or out by a fair coin each; {main.guesses:,} guessed, "
        f"{main.right:,} right",
        f"the bound, at {1 - main.level:.4g}, is of epsilon at delta {main.delta:g}, of whatever "
        "training and release made this text",
    ]
    return _finding_of_release(EPSILON, audit_measurements(audits), notes, audits=audits), subjects
