"""Encode the secrets of a run as compact JSON for the page's script.

The JSON has at most `BUDGET` bytes and `LISTED` secrets; notes count omitted secrets. A token
probability is one character (`CODES`), which is precise enough for a bar of a few pixels. Token
text is included only if the caller passes texts; otherwise the JSON has only ids and numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.conclusions.outcomes import ValuesBySecret
from auditor.conclusions.secret_details import SecretDetails
from auditor.core.arrays import Floats
from auditor.core.nouns import UNDEFENDED
from auditor.core.result import AuditResult, Finding
from auditor.records.private_texts import SecretText
from auditor.reports import escaping, phrases
from auditor.reports.blocks import Secrets
from auditor.reports.verdict import find_strongest_attack_row

BUDGET = 2_000_000
_ROWS = 1_300_000  # of the maximum, the part for rows; tokens get the rest
LISTED = 20_000  # secrets
_ID = 60  # characters
# Printable ASCII that neither JSON nor HTML escapes (0x22 is the quote): a byte a token.
CODES = "".join(chr(c) for c in range(0x23, 0x7F) if chr(c) not in "<>&\\")
_POWER = 6  # the rounded root of p; the script raises to it
OUTCOMES = {
    "3": "extracted verbatim",
    "2": "another guess was right",
    "1": "extracted near-verbatim",
    "0": "not extracted",
    ".": "measured by a probe",
}


def encode_page_log_probs(log_probs: Sequence[float]) -> str:
    """Encode each token's probability as one character.

    The probabilities of neighbouring characters differ by less than 0.07, and by less near 0. The
    last character means a probability below 1e-11.
    """
    # 1 - p^(1/6): the first code is p = 1, the last p = 0. log 0 is -inf, whose `exp` is 0: the
    # last code, and no error.
    steps = np.rint((1 - np.exp(np.asarray(log_probs, dtype=float) / _POWER)) * (len(CODES) - 1))
    codes = np.array(list(CODES))
    return "".join(codes[steps.astype(int).clip(0, len(CODES) - 1)])


def build_secret_list(
    result: AuditResult, details: SecretDetails, texts: Mapping[str, SecretText] | None
) -> Secrets | None:
    """Return the secrets with the results of each attack; None if the run stored no secret.

    texts: private text to show, keyed by secret id.
    """
    measured = _list_measured_rows(result, details)
    if not details.secrets or not measured:
        return None
    best = find_strongest_attack_row(result, UNDEFENDED) or measured[0]
    rows = []
    notes = []
    if len(details.secrets) > LISTED:
        notes.append(
            f"This list shows the {LISTED:,} of {len(details.secrets):,} secrets that "
            f"{best.attack} extracts best; secrets.parquet has all."
        )
        details = _select_worst_secrets(details, details.values_by_cell[best.cell_key])
    facts = _build_page_columns(details)
    budget = _ROWS - _count_page_json_bytes(facts)
    for finding in measured:
        row = _build_page_row(result, details, finding)
        if (budget := budget - _count_page_json_bytes(row)) < 0:
            break
        rows.append(row)
    if len(rows) < len(measured):
        notes.append(
            f"{len(measured) - len(rows)} of {len(measured)} rows are left out of this list to "
            "keep the page small; secrets.parquet has them."
        )
    tokens, n_shown, n_known = _build_page_token_views(
        result, details, texts or {}, BUDGET - _count_page_json_bytes([facts, rows])
    )
    if n_shown < n_known:
        notes.append(
            f"The token view shows the {n_shown:,} secrets that the first model gives away most, "
            f"of {n_known:,}; secrets.parquet has all."
        )
    first = 0
    if best in measured[: len(rows)]:
        first = measured.index(best)
    data = {
        **facts,
        "rows": rows,
        "first": first,
        "outcomes": OUTCOMES,
        "codes": CODES,
        "power": _POWER,
        **tokens,
    }
    return Secrets(data, tuple(notes))


def _list_measured_rows(result: AuditResult, details: SecretDetails) -> list[Finding]:
    """Return the findings with results by secret, unlike attacks that draw texts freely."""
    secret_ids = {secret.id for secret in details.secrets}
    measured = []
    for f in phrases.sort_findings(result):
        row = details.values_by_cell.get(f.cell_key)
        if row is not None and not secret_ids.isdisjoint(row.ids):
            measured.append(f)
    return measured


def _select_worst_secrets(details: SecretDetails, row: ValuesBySecret) -> SecretDetails:
    """Keep the `LISTED` secrets that leak most in this attack result, in their original order.

    Members are kept before non-members.
    """
    codes, scores = _list_row_results(row)
    ranks = np.where(codes == ".", "0", codes).astype(int)
    order = np.lexsort((-np.nan_to_num(scores, nan=-np.inf), -ranks, ~row.member))
    worst = {row.ids[place] for place in order[:LISTED]}
    return replace(details, secrets=tuple(s for s in details.secrets if s.id in worst))


def _list_row_results(row: ValuesBySecret) -> tuple[NDArray[np.str_], Floats]:
    """Return each secret's outcome code (`OUTCOMES`) and score, both of shape (secrets,)."""
    if not row.is_judged:
        return np.full(len(row.ids), "."), next(iter(row.values.values()))
    # The first match wins: a hit is one of any_hit, and may be near as well.
    codes = np.select([row.hit, row.any_hit, row.is_near_verbatim], ["3", "2", "1"], "0")
    return codes, row.score


def _count_page_json_bytes(value: Any) -> int:
    # a lone surrogate has no UTF-8
    return len(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def _build_page_columns(details: SecretDetails) -> dict[str, Any]:
    ids = []
    members = ""
    repeats = []
    lengths = []
    group_indices = []
    groups: dict[str, int] = {}
    for s in details.secrets:
        ids.append(phrases.shorten(escaping.make_printable_line(s.alias), _ID))
        members += "1" if s.member else "0"
        repeats.append(s.repeats)
        lengths.append(s.length)
        group = None
        if s.group is not None:
            group = groups.setdefault(escaping.make_printable_line(s.group), len(groups))
        group_indices.append(group)
    return {
        "ids": ids,
        "members": members,
        "repeats": repeats,
        "lengths": lengths,
        "groups": [phrases.shorten(name, _ID) for name in groups],
        "group": group_indices if groups else [],
    }


def _build_page_row(
    result: AuditResult, details: SecretDetails, finding: Finding
) -> dict[str, Any]:
    values = details.values_by_cell[finding.cell_key]
    codes, scores = _list_row_results(values)
    # number of correct leading tokens of the suffix
    leads = None
    if values.is_judged:
        leads = values.columns.get("lead")
    page_ids = {secret.id for secret in details.secrets}
    place = {id: i for i, id in enumerate(values.ids) if id in page_ids}
    outcome = ""
    score = []
    lead = []
    for secret in details.secrets:
        i = place.get(secret.id)
        outcome += "-" if i is None else str(codes[i])
        score.append(None if i is None else _round_page_number(float(scores[i])))
        if leads is not None:
            lead.append(None if i is None else int(leads[i]))
    return {
        "target": phrases.title_target(result, finding.target),
        "setting": finding.setting,
        "attack": finding.attack,
        "outcome": outcome,
        "score": score,
        "lead": lead,
    }


def _round_page_number(value: float) -> float | int | None:
    """Return a number rounded to three significant digits; None if JSON cannot express the
    number.
    """
    if not math.isfinite(value):
        return None
    short = float(f"{value:.3g}")
    return int(short) if short.is_integer() else short


def _build_page_token_views(
    result: AuditResult, details: SecretDetails, texts: Mapping[str, SecretText], budget: int
) -> tuple[dict[str, Any], int, int]:
    """Return the page's token data, and the numbers of shown and of measured suffixes.

    For each model and suffix, the token data have a character for each token
    (`encode_page_log_probs`) and -log2 of the suffix's probability. They also have the text of the
    suffix if `texts` is given. If not all fit into `budget` bytes, keep the suffixes that are most
    likely under the first, undefended model.
    """
    targets = [t for t in result.targets if t.name in details.tokens]
    if not targets:
        return {"tokens": []}, 0, 0
    distributions = [details.tokens[t.name] for t in targets]
    ids = []
    for s in details.secrets:
        if any(s.id in distribution for distribution in distributions):
            ids.append(s.id)
    # Log-probabilities add up to the suffix's; the most likely first, unmeasured secrets last.
    ranked = sorted(ids, key=lambda id: -sum(distributions[0].get(id, (-math.inf,))))
    page_ids = set()
    for id in ranked:
        # A character a token; 12 more for quotes, comma and the bits.
        for distribution in distributions:
            budget -= len(distribution.get(id, ())) + 12
        if texts:
            budget -= _count_page_json_bytes(_list_visible_suffix_tokens(texts, id))
        if budget < 0:
            break
        page_ids.add(id)
    order = [s.id if s.id in page_ids else "" for s in details.secrets]
    columns = []
    for target, nats_by_id in zip(targets, distributions, strict=True):
        codes = []
        bits = []
        for id in order:
            nats = nats_by_id.get(id)
            codes.append("" if nats is None else encode_page_log_probs(nats))
            # Nats of the tokens add up to the suffix's; over ln 2 they are bits.
            bits.append(
                None if nats is None else _round_page_number(round(-sum(nats) / math.log(2), 1))
            )
        columns.append({"target": target.title, "codes": codes, "bits": bits})
    pieces = [_list_visible_suffix_tokens(texts, id) for id in order] if texts else []
    return {"tokens": columns, "texts": pieces}, len(page_ids), len(ids)


def _list_visible_suffix_tokens(texts: Mapping[str, SecretText], id: str) -> list[str]:
    """Return the text of each token of a suffix, with every character visible."""
    pieces = texts[id].pieces if id in texts else ()
    return [phrases.shorten(escaping.show_invisible_characters(piece), _ID) for piece in pieces]
