"""What a run says of records that a model was to forget, from what its rows found out about each
secret."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from auditor.conclusions.outcomes import RowValuesBySecret, read_row_values_by_secret
from auditor.core.result import AuditResult, GroupRecall, Measurement, Unlearning
from auditor.records.table import read_heldout_losses
from auditor.statistics.frontier import estimate_perplexity_ratios
from auditor.statistics.unlearning import (
    AFTER,
    BEFORE,
    FORGOTTEN,
    NONMEMBERS,
    RETAINED,
    measure_unlearning_group,
)

_GREEDY = "greedy"  # of a row with a bound by ranks: whether greedy decoding gives the secret
_BOUND = "rank_bound"
Columns = Mapping[str, RowValuesBySecret]  # by model


def summarise_unlearning_of_run(
    result: AuditResult, folder: Path, models: Mapping[str, str], forgotten: frozenset[str]
) -> Unlearning:
    """What is left of the forgotten records, measured with white-box access where that was
    measured, else text-only.

    models: name of the target in each role ("before", "after", "retrained", ...). forgotten: ids of
    the secrets that were to be forgotten. The steps, rate and texts of relearning are not known
    here; the caller fills them in.
    """
    setting = "white-box" if any(f.setting == "white-box" for f in result.findings) else "text-only"
    held, target = read_row_values_by_secret(folder), models[AFTER]
    rows = [
        f
        for f in result.findings
        if f.target == target and f.setting == setting and f.main is not None
    ]
    numbers = list[GroupRecall]()
    for finding in rows:
        keys = {model: finding.cell_key._replace(target=name) for model, name in models.items()}
        columns = {model: held[key] for model, key in keys.items() if key in held}
        assert finding.main is not None
        numbers += _group_recall_of_unlearning(
            finding.attack, finding.main.name, columns, forgotten
        )
    own = (seen for key, seen in held.items() if key.target == target)
    mine = max(own, key=lambda seen: len(seen.ids), default=None)
    attacked = (
        []
        if mine is None
        else [id for id, member in zip(mine.ids, mine.member, strict=True) if member]
    )
    lost = sum(id in forgotten for id in attacked)
    return Unlearning(
        target=target,
        models=dict(models),
        setting=setting,
        forgotten=lost,
        retained=len(attacked) - lost,
        numbers=tuple(numbers),
        perplexity=_perplexities_around_unlearning(result, folder, models),
    )


def _group_recall_of_unlearning(
    attack: str, main: str, columns: Columns, forgotten: frozenset[str]
) -> Iterator[GroupRecall]:
    for name in (_GREEDY, main, _BOUND):
        kept = _BOUND if name == _GREEDY else name
        if not all(kept in seen.values for seen in columns.values()) or (
            name == _BOUND and main == _BOUND
        ):
            continue
        for group in (FORGOTTEN, RETAINED, NONMEMBERS):
            held = {
                model: seen.values_by_secret(kept, group != NONMEMBERS)
                for model, seen in columns.items()
            }
            # that all models were asked for
            ids = sorted(set.intersection(*map(set, held.values()))) if held else []
            if group != NONMEMBERS:
                ids = [id for id in ids if (id in forgotten) == (group == FORGOTTEN)]
            found = {model: np.array([own[id] for id in ids]) for model, own in held.items()}
            if name == _GREEDY:
                # prod_t 1 / rank_t = 1 (formulas C3): every true token is the likeliest, as greedy
                # decoding takes it.
                found = {model: (values == 1).astype(float) for model, values in found.items()}
            if ids and all(np.isfinite(values).all() for values in found.values()):
                yield measure_unlearning_group(attack, name, group, found)


def _perplexities_around_unlearning(
    result: AuditResult, folder: Path, models: Mapping[str, str]
) -> dict[str, Measurement]:
    found = {
        model: m
        for model, name in models.items()
        if (m := result.target(name).perplexity) is not None
    }
    held = read_heldout_losses(folder)
    before, after = (held.get(models[model]) for model in (BEFORE, AFTER))
    # `+` joins two lists: the losses of every text, before and after.
    if before and after and np.isfinite(before["perplexity"] + after["perplexity"]).all():
        base, nll, tokens = np.array(
            [before["perplexity"], after["perplexity"], before["tokens"]], dtype=float
        )
        # one model, one seed
        found["ratio"] = estimate_perplexity_ratios(nll[None, None], tokens[None], base[None])[0]
    return found
