"""Which rows a run shows: the defenses, and behind each the controls of its chain, each once."""

from __future__ import annotations

from dataclasses import dataclass

from auditor.defenses.control_rows import PublicModelControl
from auditor.defenses.pmixed import PMixed, UnmixedEnsemble
from auditor.plugins.defense import Cause, Defense
from auditor.runs.shown_rows import list_defense_rows, name_defense_row


@dataclass(frozen=True)
class Control(Defense):
    """A control with an option."""

    name = "control"
    title = "Control"
    strength: int = 1


@dataclass(frozen=True)
class First(Defense):
    """A defense with a control of its strength."""

    name = "first"
    title = "First"
    strength: int = 1

    def cause_chain(self) -> tuple[Cause, ...]:
        return (Cause("one", "its control", Control(self.strength)), Cause("other", "itself"))


@dataclass(frozen=True)
class Second(First):
    """Another one."""

    name = "second"
    title = "Second"


def rows(*defenses: Defense, without: tuple[str, ...] = ()) -> list[tuple[str, str, bool]]:
    return [
        (r.name, r.title, r.companion)
        for r in list_defense_rows(defenses, lambda control: control.name not in without, others=())
    ]


def test_the_controls_of_pmixed_come_in_the_order_of_its_chain() -> None:
    assert [name for name, _, _ in rows(PMixed())] == [
        "pmixed",
        "one-adapter",
        "ensemble-unmixed",
        "public",
    ]
    assert [name for name, _, _ in rows(PMixed(), without=("one-adapter",))] == [
        "pmixed",
        "ensemble-unmixed",
        "public",
    ]
    assert not any(companion for name, _, companion in rows(PMixed()) if name == "pmixed")


def test_what_was_asked_for_by_name_is_no_companion() -> None:
    both = {
        name: companion
        for name, _, companion in rows(PMixed(), PublicModelControl(), UnmixedEnsemble())
    }
    assert both == {
        "pmixed": False,
        "one-adapter": True,
        "public": False,
        "ensemble-unmixed": False,
    }


def test_equal_controls_are_one_row_and_others_have_names_of_their_own() -> None:
    assert rows(First(), Second()) == [
        ("first", "First", False),
        ("control", "Control", True),
        ("second", "Second", False),
    ]
    apart = [First(), Second(2)]
    assert rows(*apart)[2:] == [
        ("second", "Second", False),
        ("control-of-second", "Control (of Second)", True),
    ]
    asked = [First(), Control(3)]
    assert rows(*asked) == [
        ("first", "First", False),
        ("control-of-first", "Control (of First)", True),
        ("control", "Control", False),
    ]
    held = list_defense_rows(asked, lambda control: True, others=())
    assert (
        name_defense_row(held, Control(1)) == "control-of-first"
        and name_defense_row(held, Control(4)) == ""
    )
