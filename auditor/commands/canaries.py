"""`audit canaries make | insert | score | ...`: random texts in training data and their leakage."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from auditor.commands import console, options
from auditor.commands.options import Many
from auditor.core.counts import format_count
from auditor.core.errors import AuditError

if TYPE_CHECKING:
    from auditor.reports.tables import RowTable
    from auditor.runs.canary_scores import CanaryScore, TargetScores

app = typer.Typer(
    help="Make canaries, insert them into training data, and score their exposure in the trained "
    "model.",
)


@dataclass(frozen=True, kw_only=True)
class ExposureFlags:
    """Flags of canaries for exposure, which are texts with slots.

    format: Text with slots: {digits:6}, {letters:4}, {upper:2}, {alnum:8}, {hex:16}, {words:3},
        {name:2} of a --list; repeatable. [default: My ID is {digits:6}]
    each: Number of canaries for each format and each count. [default: 8]
    controls: Canaries of each format that are never inserted: the non-member baseline. [default: 0]
    list_ (--list NAME=FILE): Words for the slot {NAME}, one per line; repeatable.
    """

    panel: ClassVar[str] = "exposure"

    format: Many = None
    each: int | None = None
    controls: int | None = None
    list_: Many = None


@dataclass(frozen=True, kw_only=True)
class AuditFlags:
    """Flags of canaries for an epsilon audit. A coin decides whether each canary is inserted.

    audit: Make N canaries for epsilon-audit instead; each is included with probability 1/2.
    for_epsilon: Make enough canaries to prove a lower bound of this epsilon; without -o, print only
        their number.
    delta: Delta of --for-epsilon. [default: 1e-5]
    kind (words|prefixed|sampled|rare-tokens|new-tokens): What canaries are made of. [default:
        words]
    length: Words per canary; a sampled canary has three tokens per word. [default: 8]
    data: Training data; prefixed, rare-tokens and new-tokens canaries begin with its texts.
    model: Public or base model, for sampled and rare-tokens canaries.
    temperature: Temperature of sampled canaries, at least 0.8. [default: 1]
    """

    panel: ClassVar[str] = "epsilon audit"

    audit: int | None = None
    for_epsilon: float | None = None
    delta: float | None = None
    kind: str | None = None
    length: int | None = None
    data: str | None = None
    model: str | None = None
    temperature: float | None = None


def make(
    *,
    exposure: ExposureFlags,
    coins: AuditFlags,
    out: Path | None = None,
    counts: str | None = None,
    seed: int | None = None,
) -> None:
    """Draw canaries and write their manifest: to measure exposure, or to audit epsilon (--audit).

    A gate on the mean exposure of a count, such as `exposure(count=1) <= 10`, needs about 6
    canaries of that count.

    Args:
        out (-o, --out MANIFEST): Manifest to write. Keep it: it contains the answers.
        counts (1,4,16): How often to insert each canary. [default: 1,2,4,8,16; with --audit 1]
        seed: Seed of the canaries and of their coins. [default: a random one]

    Examples:
        audit canaries make --each 8 --counts 1,4,16 -o canaries.json
        audit canaries make --audit 400 -o canaries.json
    """
    from auditor.benchmarks.canaries import audit_canaries, exposure_canaries, manifests

    sizes = options.list_given_flags(exposure)
    audit_given = options.list_given_flags(coins)
    if audit_given and sizes:
        raise AuditError(
            f"expected {_format_typed_flags(sizes)} without "
            f"{_format_typed_flags(audit_given)}: a canary serves only one of them"
        )
    if audit_given:
        times = _parse_insertion_counts_flag("1" if counts is None else counts)
        _write_audit_canaries(audit_given, out, times, seed)
        return
    if out is None:
        raise AuditError("expected -o, a manifest to write, got none")
    if exposure.each is not None:
        sizes["per_count"] = sizes.pop("each")
    if seed is None:
        # A fixed seed would draw canaries, or controls, that other data sets already contain.
        seed = audit_canaries.draw_canary_seed()
    manifest = exposure_canaries.make_exposure_canary_manifest(
        sizes.pop("format", ["My ID is {digits:6}"]),
        _parse_insertion_counts_flag("1,2,4,8,16" if counts is None else counts),
        lists=dict(map(_read_named_word_list_flag, sizes.pop("list_", []))),
        seed=seed,
        **sizes,
    )
    manifests.write_canary_manifest(out, manifest)
    copies = len(manifest.list_inserted_copies())
    canaries_text = format_count(len(manifest.canaries), "canary", "canaries")
    typer.echo(
        f"manifest: {out} ({canaries_text}, {format_count(copies, 'copy', 'copies')} to insert)"
    )


def _write_audit_canaries(
    values: options.Values, out: Path | None, counts: list[int], seed: int | None
) -> None:
    """Write a manifest of canaries for an epsilon audit, or print their number.

    values: the given flags of `AuditFlags`.
    """
    from auditor.benchmarks.canaries import making_audit_canaries, manifests
    from auditor.statistics import audited

    if ("audit" in values) == ("for_epsilon" in values):
        raise AuditError(
            f"expected --audit N or --for-epsilon, one of them, with {_format_typed_flags(values)}"
        )
    if len(counts) != 1:
        raise AuditError(
            f"expected one of --counts for an audit, got {len(counts)}: an audit inserts every "
            "canary equally often"
        )
    if "delta" in values and "audit" in values:
        raise AuditError("--delta needs --for-epsilon; the audit takes its own, -A delta=")
    count = values.pop("audit", None)
    epsilon = values.pop("for_epsilon", None)
    delta = values.pop("delta", 1e-5)
    if count is None:
        count = audited.count_needed_canaries(epsilon, delta, copies=counts[0])
        typer.echo(
            f"{count:,} canaries can prove, if every guess is right, ε {epsilon:g} at δ {delta:g}"
        )
        if out is None:
            return
    if out is None:
        raise AuditError("expected -o, a manifest to write, got none")
    console.silence_libraries()
    # Without --seed, draw a secret seed: the bound requires coins that the training does not know.
    manifest = making_audit_canaries.make_audit_canaries(count, counts[0], seed, **values)
    manifests.write_canary_manifest(out, manifest)
    inside = sum(canary.included for canary in manifest.canaries)
    seed_phrase = "a fresh secret seed"
    if seed is not None:
        seed_phrase = f"--seed {seed}: anyone who knows this seed knows which canaries are included"
    typer.echo(
        f"manifest: {out} ({count} canaries, {inside} included; coin flips from {seed_phrase})"
    )


def _format_typed_flags(names: Iterable[str]) -> str:
    # `list_` is --list, because `list` is a built-in name.
    return ", ".join(f"--{name.strip('_').replace('_', '-')}" for name in names)


def extend(manifest: Path, model: str, *, out: Path) -> None:
    """Add a manifest's new tokens to a base model, which must then be trained in full (adapters
    learn no tokens).

    Args:
        model: Causal LM to be trained: Hugging Face id or folder.
        out (-o, --out): New folder for the model with the new tokens.

    Examples:
        audit canaries extend canaries.json ./base -o base-with-tokens
    """
    console.silence_libraries()
    from auditor.benchmarks.canaries import making_audit_canaries

    typer.echo(
        f"model: {out} ({making_audit_canaries.write_token_extended_model(manifest, model, out):,} "
        "tokens more)"
    )


def insert(
    manifest: Path,
    data: str,
    *,
    out: Path,
    column: str = "text",
    group: str = "",
    seed: int = 0,
) -> None:
    """Write a copy of the data with each canary inserted as often as the manifest says.

    Each insertion adds a row.

    Args:
        data: JSONL, CSV or Parquet file, or a Hugging Face data set.
        out (-o, --out): New file, or folder of a data set; DATA stays as it is.
        column: Column of the texts.
        group: Column that names the person of a row; each canary gets its own. [default: none]
        seed: Seed of the positions of inserted copies.

    Examples:
        audit canaries insert canaries.json train.jsonl -o train-with-canaries.jsonl
        audit canaries insert canaries.json train.jsonl --group patient -o train-with-canaries.jsonl
    """
    console.silence_libraries()
    from auditor.benchmarks.canaries import insertion, manifests

    copies = insertion.write_canary_data(
        insertion.CanaryInsertionPlan(
            manifests.read_canary_manifest(manifest), column, group, seed
        ),
        data,
        out,
    )
    typer.echo(f"data: {out} ({copies} copies of canaries inserted)")


@dataclass(frozen=True, kw_only=True)
class ScoreFlags:
    """Flags for scoring canaries on a model. A finished run does not need these flags.

    probe_options (-A OPTION=VALUE): Option of the probe, see `audit list exposure`; repeatable.
    prefix_token (auto|none|bos|eos|TEXT): Token before each text; auto: as training.json says,
        else the most likely.
    seed: Seed of reference texts and draws.
    """

    probe_options: Many = None
    prefix_token: str = "auto"
    seed: int = 0


def score(
    manifest: Path,
    model: str,
    *,
    flags: ScoreFlags,
    loading: Annotated[options.Values, options.PlanFlags(options.LOADING)],
    as_json: bool = False,
) -> None:
    """Show the exposure of every canary in a model, or as a run measured it. No text is shown.

    `audit run --model MODEL --canaries MANIFEST --attack exposure` also writes a report that a gate
    can judge.

    Args:
        model (MODEL|RUN): Causal LM or adapter, or the folder of a finished run.

    Examples:
        audit canaries score canaries.json ./my-model
        audit canaries score canaries.json runs/latest --json
    """
    console.silence_libraries()
    from auditor.core.jsonable import encode_json
    from auditor.core.plan_parts import LoadingOptions
    from auditor.runs import canary_scores

    with console.open_progress_terminal() as reporter:
        loading_options = LoadingOptions(**loading)
        scores = canary_scores.score_canaries(
            manifest, model, reporter, loading=loading_options, **options.list_given_flags(flags)
        )
    if as_json:
        typer.echo(encode_json(scores), nl=False)
        return
    for target_scores in scores:
        console.print_table(_build_exposure_table(target_scores))


for command in (make, insert, extend, score):
    options.add_command(app, command)


def _build_exposure_table(score: TargetScores) -> RowTable:
    from auditor.reports import phrases
    from auditor.reports.tables import RowTable

    def cells(row: CanaryScore) -> tuple[str, ...]:
        values = row.values
        # If the rank was not counted in the whole space, exposure is an estimate between bounds.
        exposure, low, high = (values[f"exposure_{prefix}bits"] for prefix in ("", "low_", "high_"))
        between = "" if values["exact"] else f" [{low:.1f}–{high:.1f}]"
        bits = f"{exposure:.1f}{between} of {values['space_bits']:.1f}"
        p_value = phrases.NOTHING
        if "holm_p" in values:
            p_value = phrases.format_number(values["holm_p"])
        return row.id, f"{row.count}", bits, phrases.format_number(values["rank"]), p_value

    head = ("canary", "inserted", "exposure, bits", "rank", "p, Holm")
    return RowTable(
        score.title, head, tuple(cells(row) for row in score.rows), "; ".join(score.notes)
    )


def _parse_insertion_counts_flag(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    # Not isdigit(), which accepts ² as well; int() raises ValueError above 4,300 digits.
    if not all(re.fullmatch("[0-9]{1,12}", part) for part in parts):
        raise AuditError(
            f"expected --counts as whole numbers with commas between them, got {text!r}"
        )
    return [int(part) for part in parts]


def _read_named_word_list_flag(item: str) -> tuple[str, tuple[str, ...]]:
    name, separator, path = item.partition("=")
    if not (separator and name.isidentifier()):
        raise AuditError(f"expected --list NAME=FILE, got {item!r}")
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AuditError(f"cannot read the words of --list {name}: {error}") from error
    # Drop repeated words: the maximum exposure is log2 of the space, in which a repeated word would
    # count twice.
    words = tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not words:
        raise AuditError(f"expected words in --list {name}, but {path!r} has none")
    return name, words
