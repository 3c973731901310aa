"""`privacy.json`: what it promises, and what its notes say."""

from dataclasses import replace
from pathlib import Path

from auditor.privacy import promises
from auditor.privacy.promises import PrivacyRecord

RECORD = PrivacyRecord(
    method="dp-sgd",
    epsilon=3.0,
    delta=1e-5,
    status="sound",
    noise_multiplier=1.0,
    clip=1.0,
    sampling_rate=0.1,
    steps=10,
    unit="record",
    noise="secret",
    sound=True,
)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    promises.write_privacy_record(tmp_path, RECORD)
    assert promises.read_privacy_record(tmp_path) == RECORD


def test_a_claim_says_in_fields_what_it_says_in_words() -> None:
    claim = RECORD.claim()
    assert claim is not None and claim.sound and claim.any_access and not claim.shard
    doubtful = replace(RECORD, sound=False).claim()
    assert doubtful is not None and not doubtful.sound


def test_a_claim_and_its_notes_say_what_else_is_known() -> None:
    """And nothing of what is not: an older record has neither its units nor epsilon by the other
    accountant."""
    claim, more = (
        RECORD.claim(),
        replace(RECORD, units=1200, epsilon_rdp=3.4, epsilon_twice=4.5).claim(),
    )
    assert claim is not None and more is not None
    bare = {"noise_multiplier": 1.0, "clip": 1.0, "sampling_rate": 0.1, "steps": 10.0}
    assert claim.details == bare
    assert more.details == {
        **bare,
        "units": 1200.0,
        "epsilon_by_rdp": 3.4,
        "epsilon_with_another_like_it": 4.5,
    }
    assert (
        claim.epsilon == more.epsilon == {"add_remove": 3.0}
        and "public number of records" in more.theorem
    )


def test_notes_say_whose_number_of_units_it_is() -> None:
    assert len(RECORD.notes()) == 1 and "protected at the group size k only" in RECORD.notes()[0]
    (_, given), (_, found) = (
        replace(RECORD, units=1200, units_given=own).notes() for own in (True, False)
    )
    assert (
        "1,200 records, a number given as public" in given
        and "the number of records, 1,200, is taken as" in found
    )
