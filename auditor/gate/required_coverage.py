"""Check that a run covered its policy's required attacks, access, secrets and non-members.

The coverage is counted from the results of each secret, not read from the result file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import compress

from auditor.conclusions.outcomes import RunOutcomes
from auditor.core.nouns import CellKey
from auditor.gate.policy import Required
from auditor.gate.rulings import Ruling, make_gate_ruling

_ANY = ""  # any attack; the one with the most secrets counts


def judge_required_attacks(
    run: RunOutcomes, required: Required, targets: Collection[str]
) -> Iterator[Ruling]:
    """Yield a held or failed ruling for each pair of target and required attack.

    Args:
        run: the run.
        required: what the policy requires of the run.
        targets: names of the judged targets.
    """
    if not (required.attacks or required.access or required.secrets or required.nonmembers):
        return
    for target in targets:
        for attack in required.attacks or (_ANY,):
            yield _judge_required_attack(run, required, target, attack)


def _judge_required_attack(
    run: RunOutcomes, required: Required, target: str, attack: str
) -> Ruling:
    cell = CellKey(target, required.access or "", attack)
    place = ""
    if required.access:
        place = f" at {required.access} access"
    least = f"{required.secrets} secrets and {required.nonmembers} non-members"
    rule = f"{attack or 'an attack'} ran{place}, on at least {least}"
    applied = []
    for finding in run.result.select_findings(target, required.access, attack or None):
        if finding.measurements and not finding.not_applicable:
            applied.append(finding.cell_key)
    if not applied:
        reason = (
            f"required, but {attack or 'no attack'} {'did not run' if attack else 'ran'}{place}"
        )
        return make_gate_ruling(reason, rule, cell=cell)
    enough = (required.secrets, required.nonmembers)
    counts = [_count_attacked_secrets(run, key) for key in applied]
    # A single attack needs enough members and non-members: counts of several attacks do not add up.
    members, nonmembers = next(
        (c for c in counts if c[0] >= enough[0] and c[1] >= enough[1]), max(counts)
    )
    coverage = (
        f"{attack or 'an attack'} ran{place} on {members} secrets and {nonmembers} non-members"
    )
    if members < required.secrets or nonmembers < required.nonmembers:
        reason = f"{coverage}; required are {required.secrets} and {required.nonmembers}"
        return make_gate_ruling(reason, rule, cell=cell)
    return make_gate_ruling(coverage, rule, "held", cell)


def _count_attacked_secrets(run: RunOutcomes, key: CellKey) -> tuple[int, int]:
    """Return how many members, then how many non-members, have results.

    Args:
        key: target, setting and attack.
    """
    row_values = run.outcomes.get(key)
    if row_values is None:
        return 0, 0
    # by id: a repeated secret counts once
    members = set(compress(row_values.ids, row_values.member))
    nonmembers = set(compress(row_values.ids, ~row_values.member))
    return len(members), len(nonmembers)
