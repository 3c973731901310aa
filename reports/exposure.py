"""Report the canaries' exposure next to the exposure expected of a model that memorised nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from auditor.conclusions import secret_details as detailed
from auditor.conclusions.secret_details import SecretDetails
from auditor.core.result import AuditResult, Finding
from auditor.reports import phrases
from auditor.reports.blocks import Block, Figure, Figures, Group, PlotPoint, Series
from auditor.reports.topics import CHECK, ReportMaterial, Topic, title_attack_row
from auditor.statistics.exposure import bound_null_exposure_tail


def _build_exposure_tail_blocks(material: ReportMaterial) -> list[Block]:
    result = material.result
    exposures = list(_list_member_exposures(result, material.details))
    if not exposures:
        return []
    n = min(len(values) for _, values in exposures)  # fewer canaries widen the band
    series = []
    groups = []
    titles_above = []
    longest = -math.inf
    for f, values in exposures:
        points = [PlotPoint(x, y) for x, y in detailed.compute_survival_function(values)]
        longest = max(longest, *values)
        series.append(Series(phrases.title_target(result, f.target), points, f.setting))
        groups.append(Group(title_attack_row(result, f), _tabulate_exposure_tail(points, n)))
        if any(point.y > bound_null_exposure_tail(point.x, n) for point in points):
            titles_above.append(phrases.title_row(result, f))
    title = "Exposure of the canaries and its null distribution"
    text = (
        "Share of canaries with at least this many bits of exposure. Without memorisation, a "
        "canary's rank among its alternatives would be uniform and the share 2^-x on average "
        "(dotted), and the whole line would stay below the top of the shaded band with 95% "
        f"probability (Dvoretzky–Kiefer–Wolfowitz, {n:,} canaries; approximately if ranks are "
        "estimated). A line above the band shows that some canaries were memorised, but not "
        "which; a line below it shows nothing either way. Above it: "
        f"{', '.join(titles_above) or 'none'}."
    )
    head = ("Bits", "Canaries with at least this many", "Without memorisation", "The band ends at")
    axes = ("Exposure (bits)", "Share with at least as much")
    null = []
    for x in np.linspace(0, longest, 41):
        null.append(PlotPoint(x, 2**-x, 2**-x, bound_null_exposure_tail(x, n)))
    figure = Figure(
        "exposure-plot",
        "exposure",
        title,
        text,
        head,
        groups,
        series=series,
        axes=axes,
        null=Series("", null),
    )
    return [Figures([figure])]


def _tabulate_exposure_tail(points: Sequence[PlotPoint], n: int) -> list[tuple[str, ...]]:
    """Return a row per point: bits, share, share without memorisation, and the end of the band."""
    rows = []
    for point in points:
        row = [phrases.format_number(point.x)]
        for share in (point.y, 2**-point.x, bound_null_exposure_tail(point.x, n)):
            row.append(f"{phrases.format_percent(share)}%")
        rows.append(tuple(row))
    return rows


def _list_member_exposures(
    result: AuditResult, details: SecretDetails
) -> Iterator[tuple[Finding, list[float]]]:
    """Yield each finding with the finite exposures of its members, in bits."""
    if not details.exposure:
        return
    members = {secret.id for secret in details.secrets if secret.member}
    for f in phrases.sort_findings(result):
        values = []
        for id, bits in details.exposure.get(f.cell_key, {}).items():
            if id in members and math.isfinite(bits):
                values.append(bits)
        if values:
            yield f, values


TOPICS = (Topic("exposure", "Exposure", _build_exposure_tail_blocks, CHECK, 4),)
