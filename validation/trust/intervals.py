"""Simulate how often printed intervals contain the truth, and how often a gate at the truth is
wrong.

    python -m validation.trust.intervals [--audits 1000] [--only tpr ...] [-o FILE.md]    (some minutes)

Each case draws records from a distribution with a known value, measures the value by the function
that reports and gates use, and counts three errors of at most 5% each: the 95% interval misses the
truth; a gate whose limit is the truth fails the run; such a gate holds. Exits with 1 if the
Clopper-Pearson interval of one of these shares is above 5%. Bounds on epsilon have one end and
separate mechanisms (coverage.py). Sizes are those of the lab, the README and the examples.
"""  # noqa: E501

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from validation.harness import Page, refuse, run, share
from validation.trust.interval_case import IntervalCase, IntervalErrors, simulated
from validation.trust.interval_extraction import of_attacks, of_generations, of_unlearning
from validation.trust.interval_membership import of_epsilon, of_membership
from validation.trust.interval_models import of_models


def cases() -> list[IntervalCase]:
    parts = (of_attacks, of_generations, of_unlearning, of_membership, of_epsilon, of_models)
    return [case for part in parts for case in part()]


def cells(row: IntervalErrors) -> tuple[str, ...]:
    case = row.case
    one_end = case.quantity.startswith(("ε", "frontier"))  # all three counts are equal
    shares = [share(wrong, row.audits) for wrong in (row.wrong[:1] if one_end else row.wrong)]
    shares += [""] * (3 - len(shares))
    return case.quantity, case.distribution, case.size, f"{row.audits:,}", *shares, row.verdict


def main(
    audits: Annotated[int, "of each case; fewer of the slow ones"] = 1000,
    only: Annotated[tuple[str, ...], "quantities that begin so"] = (),
    seed: int = 0,
    out: Annotated[Path | None, "file for the table"] = None,
) -> int:
    chosen = [case for case in cases() if not only or case.quantity.startswith(only)]
    if not chosen:
        refuse(f"expected a quantity that begins with {' or '.join(only)}, there is none")
    page, failed = Page(out), False
    errors = "the 95% interval misses", "a gate at the truth fails", "holds"
    page.head("quantity", "distribution", "size", "audits", *errors, "verdict")
    for case in chosen:
        row = simulated(case, audits, seed)
        page.row(*cells(row))
        failed |= row.failed
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(run(main))
