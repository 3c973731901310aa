"""Check whether a run covered what its policy requires: attacks, at an access, on enough secrets
and non-members.

The coverage is read from the outcomes of each secret, not from the counts that the result reports.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from auditor.conclusions.outcomes import RunOutcomes
from auditor.core.nouns import CellKey
from auditor.gate.policy import Required
from auditor.gate.rulings import Ruling, make_ruling

_ANY = ""  # attack: whichever has looked at most


def judge_required_attacks(
    run: RunOutcomes, required: Required, targets: Collection[str]
) -> Iterator[Ruling]:
    """A ruling, held or failed, for each target and required attack; no ruling where nothing is
    required."""
    if not (required.attacks or required.access or required.secrets or required.nonmembers):
        return
    for target in targets:
        for attack in required.attacks or (_ANY,):
            yield _judge_required_attack(run, required, target, attack)


def _judge_required_attack(
    run: RunOutcomes, required: Required, target: str, attack: str
) -> Ruling:
    row = CellKey(target, required.access or "", attack)
    where = f" at {required.access} access" if required.access else ""
    least = f"{required.secrets} secrets and {required.nonmembers} non-members"
    rule = f"{attack or 'an attack'} ran{where}, on at least {least}"
    applied = [
        finding.cell_key
        for finding in run.result.findings
        if finding.target == target
        and finding.attack == (attack or finding.attack)
        and finding.setting == (required.access or finding.setting)
        and not finding.not_applicable
        and finding.measurements
    ]
    if not applied:
        why = f"required, but {attack or 'no attack'} {'did not run' if attack else 'ran'}{where}"
        return make_ruling(why, rule, row=row)
    enough = (required.secrets, required.nonmembers)
    counts = [_count_attacked_secrets(run, key) for key in applied]
    # one row has to have enough of both: counts of several rows do not add up
    members, others = next(
        (c for c in counts if c[0] >= enough[0] and c[1] >= enough[1]), max(counts)
    )
    said = f"{attack or 'an attack'} ran{where} on {members} secrets and {others} non-members"
    if members < required.secrets or others < required.nonmembers:
        why = f"{said}; required are {required.secrets} and {required.nonmembers}"
        return make_ruling(why, rule, row=row)
    return make_ruling(said, rule, "held", row)


def _count_attacked_secrets(run: RunOutcomes, key: CellKey) -> tuple[int, int]:
    """How many members and non-members the row holds outcomes of."""
    own = run.outcomes.get(key)
    # by id: a secret that stands there twice is one
    asked = (
        set()
        if own is None
        else {(name, bool(member)) for name, member in zip(own.ids, own.member, strict=True)}
    )
    members = sum(member for _, member in asked)
    return members, len(asked) - members
