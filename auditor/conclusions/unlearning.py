"""Summarise how well a model forgot records, from its results by secret."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import compress
from pathlib import Path

import numpy as np

from auditor.conclusions.outcomes import (
    ValuesBySecret,
    align_secret_values,
    read_secret_values,
)
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
Columns = Mapping[str, ValuesBySecret]  # by model


def summarise_unlearning(
    result: AuditResult, folder: Path, models: Mapping[str, str], forgotten: frozenset[str]
) -> Unlearning:
    """Measure the remaining leakage of the forgotten records.

    Use the white-box results if any exist, otherwise the text-only results. The caller adds the
    steps, learning rate and number of texts of relearning, which trains the unlearned model for
    some more steps.

    Args:
        result: result of the run.
        folder: folder of the run.
        models: target name of the unlearned model and its baselines, keyed by role ("before",
            "after", "retrained", ...).
        forgotten: ids of the secrets to forget.
    """
    setting = "text-only"
    if result.select_findings(setting="white-box"):
        setting = "white-box"
    rows_by_cell = read_secret_values(folder)
    target = models[AFTER]
    numbers = list[GroupRecall]()
    for finding in result.select_findings(target, setting):
        if finding.main is None:
            continue
        columns = {}
        for model, name in models.items():
            key = finding.cell_key._replace(target=name)
            if key in rows_by_cell:
                columns[model] = rows_by_cell[key]
        numbers += _measure_group_recall(finding.attack, finding.main.name, columns, forgotten)
    attacked: tuple[str, ...] = ()
    n_largest = 0
    for key, row in rows_by_cell.items():
        if key.target == target and len(row.ids) > n_largest:
            n_largest = len(row.ids)
            attacked = tuple(compress(row.ids, row.member))
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
        if name == main == _BOUND:
            continue
        if not columns or not all(quantity in row.values for row in columns.values()):
            continue
        for group in (FORGOTTEN, RETAINED, NONMEMBERS):
            members = group != NONMEMBERS
            ids, values = align_secret_values(columns.values(), quantity, members)
            if members:
                values = values[:, [(id in forgotten) == (group == FORGOTTEN) for id in ids]]
            if name == _GREEDY:
                # prod_t 1 / rank_t = 1 (formulas C3): every true token is the most probable, as in
                # greedy decoding.
                values = (values == 1).astype(float)
            if values.size and np.isfinite(values).all():
                aligned = dict(zip(columns, values, strict=True))
                yield measure_unlearning_group(attack, name, group, aligned)


def _list_unlearning_perplexities(
    result: AuditResult, folder: Path, models: Mapping[str, str]
) -> dict[str, Measurement]:
    perplexities = {}
    for model, name in models.items():
        m = result.target(name).perplexity
        if m is not None:
            perplexities[model] = m
    losses = read_heldout_losses(folder)
    before = losses.get(models[BEFORE])
    after = losses.get(models[AFTER])
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
