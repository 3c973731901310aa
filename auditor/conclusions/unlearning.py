"""Summarise how well a model forgot records, from its results by secret."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from auditor.conclusions.outcomes import RowValuesBySecret, read_row_values
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

_GREEDY = "greedy"  # whether greedy decoding extracts the secret, in rows with a rank bound
_BOUND = "rank_bound"
Columns = Mapping[str, RowValuesBySecret]  # by model


def summarise_unlearning(
    result: AuditResult, folder: Path, models: Mapping[str, str], forgotten: frozenset[str]
) -> Unlearning:
    """Measure the remaining leakage of the forgotten records.

    The white-box results count if there are any, otherwise the text-only results. models: target
    name by role ("before", "after", "retrained", ...). forgotten: ids of the secrets to forget. The
    caller adds the steps, rate and texts of relearning.
    """
    if any(f.setting == "white-box" for f in result.findings):
        setting = "white-box"
    else:
        setting = "text-only"
    rows_by_cell = read_row_values(folder)
    target = models[AFTER]
    rows = []
    for f in result.findings:
        if f.target == target and f.setting == setting and f.main is not None:
            rows.append(f)
    numbers = list[GroupRecall]()
    for finding in rows:
        keys = {model: finding.cell_key._replace(target=name) for model, name in models.items()}
        columns = {model: rows_by_cell[key] for model, key in keys.items() if key in rows_by_cell}
        assert finding.main is not None
        numbers += _measure_group_recall(finding.attack, finding.main.name, columns, forgotten)
    target_rows = (row for key, row in rows_by_cell.items() if key.target == target)
    largest = max(target_rows, key=lambda row: len(row.ids), default=None)
    if largest is None:
        attacked = []
    else:
        attacked = [id for id, member in zip(largest.ids, largest.member, strict=True) if member]
    n_forgotten = sum(id in forgotten for id in attacked)
    return Unlearning(
        target=target,
        models=dict(models),
        setting=setting,
        forgotten=n_forgotten,
        retained=len(attacked) - n_forgotten,
        numbers=tuple(numbers),
        perplexity=_list_unlearning_perplexities(result, folder, models),
    )


def _measure_group_recall(
    attack: str, main: str, columns: Columns, forgotten: frozenset[str]
) -> Iterator[GroupRecall]:
    for name in (_GREEDY, main, _BOUND):
        quantity = _BOUND if name == _GREEDY else name
        if not all(quantity in row.values for row in columns.values()) or (
            name == _BOUND and main == _BOUND
        ):
            continue
        for group in (FORGOTTEN, RETAINED, NONMEMBERS):
            values_by_model = {}
            for model, row in columns.items():
                values_by_model[model] = row.values_by_secret(quantity, group != NONMEMBERS)
            # ids in every model's row
            if values_by_model:
                ids = sorted(set.intersection(*map(set, values_by_model.values())))
            else:
                ids = []
            if group != NONMEMBERS:
                ids = [id for id in ids if (id in forgotten) == (group == FORGOTTEN)]
            aligned = {}
            for model, values_by_id in values_by_model.items():
                aligned[model] = np.array([values_by_id[id] for id in ids])
            if name == _GREEDY:
                # prod_t 1 / rank_t = 1 (formulas C3): every true token is the most probable, as in
                # greedy decoding.
                aligned = {model: (values == 1).astype(float) for model, values in aligned.items()}
            if ids and all(np.isfinite(values).all() for values in aligned.values()):
                yield measure_unlearning_group(attack, name, group, aligned)


def _list_unlearning_perplexities(
    result: AuditResult, folder: Path, models: Mapping[str, str]
) -> dict[str, Measurement]:
    perplexities = {
        model: m
        for model, name in models.items()
        if (m := result.target(name).perplexity) is not None
    }
    losses = read_heldout_losses(folder)
    before, after = (losses.get(models[model]) for model in (BEFORE, AFTER))
    # `+` joins two lists: the losses of every text, before and after.
    if before and after and np.isfinite(before["perplexity"] + after["perplexity"]).all():
        base, nll, tokens = np.array(
            [before["perplexity"], after["perplexity"], before["tokens"]], dtype=float
        )
        # one model, one seed
        perplexities["ratio"] = estimate_perplexity_ratios(
            nll[None, None], tokens[None], base[None]
        )[0]
    return perplexities
