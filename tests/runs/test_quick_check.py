"""How many records fit into minutes: from what a few take, held against what a run then asks of the model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from auditor.attacks.likelihood_ranking import PerplexityRanking
from auditor.core.errors import AuditError
from auditor.models import self_check
from auditor.models.huggingface import HuggingFaceModel, traffic
from auditor.plugins import registry
from auditor.records.folder import RunFolder
from auditor.runs import quick_check, text_form
from auditor.runs.quick_check import measure_seconds_per_text
from auditor.runs.reporter import SilentReporter
from auditor.runs.run import check_plan_and_select_plugins, run_audit
from auditor.runs.sites import make_site
from auditor.runs.sweep_cache import SweepCache
from tests.conftest import save_tiny, tiny

MEMBERS, OTHERS = 30, 20
TEXT, SUFFIX = len("ward 0 bed 00 code 000") - 1, len("code 000")  # tokens that are read of a record: the last is not


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quick")
    save_tiny(folder / "model")
    for name, first, count in (("private", 0, MEMBERS), ("fresh", 100, OTHERS)):
        codes = (f"ward {i % 7} bed {i * 37 % 97:02d} code {i * 7919 % 997:03d}" for i in range(first, first + count))
        rows = (json.dumps({"prefix": text[:14], "suffix": text[14:]}) + "\n" for text in codes)
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return folder


def fitted(
    given: Path, seconds: float = 1e6, nonmembers: bool = True, shared: SweepCache | None = None
) -> tuple[quick_check.Plan, quick_check.Limits]:
    fresh = str(given / "fresh.jsonl") if nonmembers else None
    plan = quick_check.quick_plan(str(given / "model"), str(given / "private.jsonl"), fresh, 0)
    return quick_check.limit_plan_to_time(plan, SilentReporter(), shared or SweepCache(), seconds, time.perf_counter())


class Slow:
    """A clock that only work moves: so many seconds for each text, and beside that for each time it is asked."""

    def __init__(self, each: float, fixed: float) -> None:
        self.now, self.each, self.fixed = 0.0, each, fixed

    def work(self, n: int) -> None:
        self.now += self.each * n + self.fixed


def test_what_a_text_takes_is_told_by_many_and_by_few_where_they_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Slow(each=0.5, fixed=3.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    assert measure_seconds_per_text(clock.work, 1, 6, 1000.0) == pytest.approx(0.5 + 3.0 / 6)
    begun = clock.now
    assert measure_seconds_per_text(clock.work, 1, 6, 1.0) == pytest.approx(3.5) == clock.now - begun


@pytest.mark.parametrize(("each", "rows"), [(1e-6, text_form.ROWS), (0.1, 15), (3.0, quick_check.FEWEST)])
def test_a_text_form_is_chosen_by_fewer_rows_of_a_slow_model(
    each: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, model = Slow(each, fixed=0.0), tiny(1)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(model, "log_probs", lambda texts, last: clock.work(len(texts)))
    assert quick_check._count_of_rows_readable_in_time(model, 6.0) == pytest.approx(rows, abs=1)


@pytest.mark.parametrize("nonmembers", [True, False])
def test_each_record_is_read_once_and_completed_once(
    given: Path, tmp_path: Path, nonmembers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SweepCache()
    plan, _ = fitted(given, nonmembers=nonmembers, shared=shared)
    assert plan.data.limit is None
    monkeypatch.setattr(
        self_check, "check_and_configure_serving", lambda model, reach, records: ()
    )  # asks as much of few as of many
    before = traffic.tokens
    run_audit(plan, make_site(plan, shared=shared), RunFolder.create(tmp_path / "run", "quick", plan.to_json()))
    known = round(quick_check.KNOWN * MEMBERS)
    completed = (MEMBERS - known + nonmembers * OTHERS) * (TEXT + SUFFIX - 1)  # what was read is not read again for it
    assert 0.9 < (traffic.tokens - before) / (completed + quick_check._PREFIX_TOKENS * known * TEXT) < 1.1


def test_the_speed_that_rows_are_chosen_by_is_of_texts_that_are_read(
    given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that remembers what it read answers again at once, however slow it is."""
    asked, rows = list[int](), quick_check._count_of_rows_readable_in_time

    def counted(model: HuggingFaceModel, seconds: float) -> int:
        before = traffic.tokens
        found = rows(model, seconds)
        asked.append(traffic.tokens - before)
        return found

    monkeypatch.setattr(quick_check, "_count_of_rows_readable_in_time", counted)
    fitted(given)
    assert asked == [3 * quick_check._FORM_TOKENS]


def test_what_was_read_before_changes_no_number(given: Path, tmp_path: Path) -> None:
    shared = SweepCache()
    plan, _ = fitted(given, shared=shared)
    found = [
        run_audit(plan, make_site(plan, shared=on), RunFolder.create(tmp_path / name, "quick", plan.to_json()))
        for name, on in (("remembered", shared), ("anew", SweepCache()))
    ]
    ours, fresh = ([m for f in one.findings for m in f.measurements] for one in found)
    assert [m.name for m in ours] == [m.name for m in fresh] and len(ours) > 20
    assert [m.value for m in ours] == pytest.approx([m.value for m in fresh], abs=1e-4, rel=1e-4, nan_ok=True)
    assert found[0].benchmark.greedy_recall == found[1].benchmark.greedy_recall


def test_a_plug_in_says_itself_that_a_check_uses_it(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(PerplexityRanking):
        name: ClassVar[str] = "mine"
        quick: ClassVar[Mapping[str, Any]] = {"samples": 2}
        least_nonmembers: ClassVar[int] = OTHERS + 1

    known = registry.attacks_and_probes_by_name()
    monkeypatch.setattr(registry, "attacks_and_probes_by_name", lambda: {**known, "mine": Mine})
    asked = quick_check.quick_plan(str(given / "model"), str(given / "private.jsonl"), str(given / "fresh.jsonl"), 0)
    assert asked.attacks.attack[-1] == "mine" and asked.attacks.attack_options["mine"] == {"samples": 2}
    plan, limits = fitted(given)
    assert plan.attacks.attack == ("perplexity", "extraction-probability", "membership")
    assert limits == (f"Mine takes {OTHERS + 1} members and {OTHERS + 1} non-members, got 27 and {OTHERS}.",)
    Mine.least_nonmembers = OTHERS
    assert fitted(given)[0].attacks.attack[-1] == "mine"


@pytest.fixture
def text_takes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Whatever the machine, a text takes so many seconds."""

    def set_to(each: float) -> None:
        monkeypatch.setattr(quick_check, "measure_seconds_per_text", lambda *given: each)

    return set_to


@pytest.mark.parametrize("held", [True, False])
def test_as_many_records_are_taken_as_fit(
    given: Path, text_takes: Callable[[float], None], held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_takes(100.0)  # so that what loading takes does not matter
    monkeypatch.setattr(HuggingFaceModel, "keeps_read_texts", lambda self, tokens: held and tokens < 10**4)
    steps = (TEXT - 13) / quick_check._STEPS  # the suffix, by what is timed of it
    read = 24 + 3 * 3 + (0 if held else 24 * 13 / TEXT)  # each, known pairs behind three prefix tokens, prefixes again
    seconds = 100 * (read + 24 + 2 * 24 + steps * 24) / (1 - quick_check._AFTER) + 90  # and not a record more
    plan, (limit,) = fitted(given, seconds)
    known = round(quick_check.KNOWN * MEMBERS)
    assert plan.data.limit == 12 and limit.startswith(
        f"12 of {MEMBERS - known} records checked ({known} more are auxiliary data)"
    )
    more, (limit,) = fitted(given, 1.5 * seconds)
    assert more.data.limit is not None and more.data.limit > 12
    assert fitted(given, 10 * seconds)[1] == ()


def test_a_model_that_is_too_slow_is_refused_with_the_minutes_that_it_takes(
    given: Path, text_takes: Callable[[float], None]
) -> None:
    text_takes(60.0)
    with pytest.raises(AuditError, match=r"2 min.*10 records.*--minutes (\d+)") as refused:
        fitted(given, 120)
    minutes = float(str(refused.value).rpartition(" ")[2])
    plan, _ = fitted(given, 60 * minutes)
    assert plan.data.limit is not None and plan.data.limit >= quick_check.FEWEST


def test_a_deep_check_is_the_usual_audit_of_the_same_records(given: Path) -> None:
    shallow = quick_check.quick_plan(str(given / "model"), str(given / "private.jsonl"), str(given / "fresh.jsonl"), 7)
    plan = quick_check.plan_of_slow_attacks(shallow)
    methods = check_plan_and_select_plugins(plan).methods_by_name
    assert "ethicist" in methods and {"membership", "extraction-probability", "near-verbatim"} <= set(methods)
    assert methods["ethicist"].samples > 1  # type: ignore[union-attr]
    changed = {
        name for name, value in plan.values_by_field_name().items() if value != shallow.values_by_field_name()[name]
    }
    assert changed == {"attack", "attack_options", "setting", "known_fraction", "known_limit"}
    usual = quick_check.Plan().values_by_field_name()
    assert all(
        plan.values_by_field_name()[name] == usual[name]
        for name in ("setting", "known_fraction", "known_limit", "limit")
    )
