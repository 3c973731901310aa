"""Return the exposure of each canary of a manifest (`audit canaries score`).

The exposure is measured on a model, or read from a finished run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from auditor.benchmarks.canaries import manifests
from auditor.benchmarks.canaries.exposure_canaries import ExposureCanaryManifest
from auditor.conclusions.leak_readings import CANARIES
from auditor.core.errors import AuditError
from auditor.core.jsonable import read_json_object
from auditor.core.plan_fields import AUTO
from auditor.core.plan_parts import LoadingOptions
from auditor.models.loading import load_causal_lm
from auditor.plugins import registry
from auditor.plugins.options import build_plugin
from auditor.plugins.probe import observe_all_secrets
from auditor.plugins.trainer import read_recorded_prefix
from auditor.plugins.view import WHITE_BOX, View
from auditor.records import aliases, result_file, table
from auditor.records.attacked_secrets import SECRETS
from auditor.reports import phrases
from auditor.runs.plan import parse_one_plugin_options
from auditor.runs.prefix_token import resolve_prefix_token, wrap_prefixed_model
from auditor.runs.reporter import Reporter

_MEASURED = CANARIES.measured_by[0]


@dataclass(frozen=True)
class CanaryScore:
    """Score of a canary.

    Args:
        id: id of the canary.
        count: number of times that the canary was inserted into the training data.
        values: the exposure probe's numbers, keyed by name.
    """

    id: str
    count: int
    values: dict[str, float]


@dataclass(frozen=True)
class TargetScores:
    """Scores of all canaries on a target model.

    Args:
        title: name of the target.
        rows: one score for each canary.
        notes: sentences for the reader.
    """

    title: str
    rows: tuple[CanaryScore, ...]
    notes: tuple[str, ...]


def score_canaries(
    manifest: Path,
    model: str,
    reporter: Reporter,
    *,
    loading: LoadingOptions,
    probe_options: Sequence[str] = (),
    prefix_token: str = AUTO,
    seed: int = 0,
) -> list[TargetScores]:
    """Score the canaries on a model. For a run folder, read the scores of all its targets.

    Args:
        manifest: file of the canaries.
        model: a model, or a run folder.
        reporter: receiver of progress messages.
        loading: options for loading the model.
        probe_options: options of the exposure probe, as OPTION=VALUE.
        prefix_token: prefix token of the model.
        seed: seed of reference texts and draws.

    Raises:
        AuditError: if the run did not measure these canaries, or if the model's tokens cannot spell
            the canaries.
    """
    canary_manifest = manifests.read_exposure_canary_manifest(manifest)
    if (Path(model) / "plan.json").is_file():
        if probe_options or prefix_token != AUTO or seed or loading != LoadingOptions():
            raise AuditError(
                "-A, --prefix-token, --seed and how to load a model go with a model: a run was "
                "measured with options of its own"
            )
        return _read_run_scores(canary_manifest, Path(model))
    name = registry.find_method_name(_MEASURED)
    options = parse_one_plugin_options("-A", probe_options, name)
    probe = build_plugin("probe", registry.list_probes(), name, options)
    target = load_causal_lm(model, loading)
    secrets = manifests.build_manifest_secrets(canary_manifest, target.tokenizer, target.vocab_size)
    longest = max(len(secret.suffix) for secret in secrets)
    prefix = resolve_prefix_token(
        prefix_token,
        target,
        longest=longest,
        canaries=secrets,
        recorded=read_recorded_prefix(Path(model)),
    )
    attacked = wrap_prefixed_model(target, prefix.tokens)
    attacked.check_text_fits(0, longest)
    # A run caches hidden states, too: it scores the canaries in the same batches.
    with reporter.stage(f"exposure of {len(secrets)} canaries"), attacked.cache_hidden_states(True):
        view = View("undefended", attacked, WHITE_BOX, seed, tokenizer=target.tokenizer)
        observations = observe_all_secrets(probe, view, secrets)
    notes = (prefix.said, *target.notes, *probe.notes(secrets, observations))
    rows = tuple(
        CanaryScore(s.id, s.repeats or 0, o.values)
        for s, o in zip(secrets, observations, strict=True)
    )
    return [TargetScores(f"Exposure on {model}", rows, notes)]


def _read_run_scores(manifest: ExposureCanaryManifest, folder: Path) -> list[TargetScores]:
    result = result_file.read_result(folder)
    printable = phrases.make_result_printable(result)
    observations = table.read_probe_observations(folder)
    counts = {entry.id: entry.count for entry in manifest.canaries}
    has_other_texts = _has_other_canary_texts(manifest, folder)
    scores = []
    for finding in result.findings:
        if finding.attack not in result.list_measuring_methods(_MEASURED) or finding.not_applicable:
            continue
        values_by_id = observations.get(finding.cell_key, {})
        if has_other_texts or set(values_by_id) != set(counts):
            raise AuditError(
                f"expected the canaries of this manifest in {str(folder)!r}, but the run measured "
                "others"
            )
        rows = tuple(CanaryScore(id, count, values_by_id[id]) for id, count in counts.items())
        scores.append(
            TargetScores(
                f"Exposure on {phrases.title_row(printable, finding)}", rows, finding.notes
            )
        )
    if not scores:
        probe = registry.find_method_name(_MEASURED)
        raise AuditError(
            f"{str(folder)!r} contains no exposure: run it with --canaries MANIFEST --attack "
            f"{probe}"
        )
    return scores


def _has_other_canary_texts(manifest: ExposureCanaryManifest, folder: Path) -> bool:
    """Return whether the run's canaries differ from those of the manifest, as far as is known.

    A run with a different salt, or of an older version of this program, tells only its ids.
    """
    facts = read_json_object(folder / SECRETS, "the secrets of a run")
    salt = aliases.load_alias_salt()
    if aliases.CANARIES not in facts or facts["salt"] != aliases.salt_fingerprint(salt):
        return False
    texts = {entry.id: entry.text for entry in manifest.canaries}
    return bool(facts[aliases.CANARIES] != aliases.digest_canary_texts(texts, salt))
