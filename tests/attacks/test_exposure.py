"""The probe on a small model that learnt some canaries by heart: what it says of those, and of
others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from auditor.attacks.exposure import Exposure
from auditor.core.canary_space import CanarySpace
from auditor.core.errors import NotApplicable
from auditor.core.nouns import Canary, Observation, Secret
from auditor.core.secret_randomness import make_keyed_generator
from auditor.models.base import LanguageModel
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.probe import Observed, observe_all_secrets
from auditor.plugins.view import TEXT_ONLY, WHITE_BOX, View
from auditor.runs.prefix_token import wrap_prefixed_model
from auditor.training.finetune import make_untrained_gpt_neox, train_packed_blocks
from tests.conftest import refuses, states
from tests.generation.test_tries import bpe, brute

SPACE = CanarySpace("My ID is {digits:3}")
LEARNT = {"955": 8, "280": 8, "731": 1}
OTHERS = ("123", "666")


def canaries(space: CanarySpace = SPACE) -> list[Secret]:
    def secret(digits: str, count: int) -> Secret:
        text = f"{space.common_prefix}{digits}"
        return Secret(
            f"c{digits}",
            (),
            tuple(bpe(150)(text)["input_ids"]),
            count,
            count > 0,
            Canary(text, space),
        )

    return [secret(digits, LEARNT.get(digits, 0)) for digits in (*LEARNT, *OTHERS)]


@pytest.fixture(scope="module")
def learnt() -> HuggingFaceModel:
    model = make_untrained_gpt_neox(
        vocab_size=407, layers=1, hidden=32, heads=2, positions=96, end=0, seed=0
    )
    filler = [f"My ID is {i * 37 % 1000:03d}" for i in range(30)]
    texts = filler + [
        f"My ID is {digits}" for digits, count in LEARNT.items() for _ in range(count)
    ]
    sequences = [tuple(ids) for ids in bpe(150)(texts)["input_ids"]]
    train_packed_blocks(
        model,
        sequences,
        epochs=40,
        rate=1e-2,
        batch=8,
        block=16,
        end=0,
        order=make_keyed_generator("test"),
    )
    return HuggingFaceModel(model, bpe(150), "learnt")


def view(model: LanguageModel, **more: Any) -> View:
    return View("undefended", model, WHITE_BOX, seed=0, tokenizer=bpe(150), **more)


END = (0,)  # what packing put before each text


def measured(probe: Exposure, model: LanguageModel, secrets: Sequence[Secret]) -> Observed:
    return observe_all_secrets(probe, view(model), secrets)


QUICK = Exposure(references=50)


@pytest.fixture(scope="module")
def exact(learnt: HuggingFaceModel) -> list[Observation]:
    return measured(QUICK, wrap_prefixed_model(learnt, END), canaries())


def test_what_was_learnt_by_heart_is_exposed_and_what_was_not_is_not(
    exact: list[Observation],
) -> None:
    values = {o.secret: o.values for o in exact}
    for digits in ("955", "280"):
        assert values[f"c{digits}"]["exposure_bits"] >= math.log2(1000) - 1.01
        assert values[f"c{digits}"]["holm_p"] < 0.05
    assert all(values[f"c{digits}"]["exposure_bits"] < 9 for digits in OTHERS)
    for own in values.values():
        assert own["exposure_bits"] == own["exposure_low_bits"] == own["exposure_high_bits"]
        assert own["null_p"] == pytest.approx(2 ** -own["exposure_bits"])
        assert own["exposure_bits"] == pytest.approx(math.log2(1000 / own["rank"]))


@torch.no_grad()
def test_ranks_are_those_of_scoring_every_text(
    learnt: HuggingFaceModel, exact: list[Observation]
) -> None:
    nll = brute(learnt, bpe(150), SPACE)
    for secret, seen in zip(canaries(), exact, strict=True):
        assert secret.canary is not None
        own = nll[secret.canary.text]
        assert sum(other <= own for other in nll.values()) <= seen.values["rank"]
        assert seen.values["rank"] <= sum(other <= own + 2e-4 for other in nll.values())


def test_a_search_among_all_texts_says_how_far_it_is_and_what_is_quicker(
    learnt: HuggingFaceModel,
) -> None:
    told: list[tuple[str, int, int]] = []
    list(
        Exposure().observe_secrets(
            view(learnt, progress=lambda *how: told.append(how)), canaries()[:1]
        )
    )
    what, done, total = told[-1]
    assert (
        done == total > 1
        and f"exact among {SPACE.size:,} texts" in what
        and "-A exposure.enumerate=0" in what
    )


def test_the_mean_has_an_interval_as_wide_as_few_canaries_make_it(exact: list[Observation]) -> None:
    main, exposed, *others = QUICK.measurements(canaries(), exact)
    assert (main.name, main.unit, main.n) == ("exposure", "bits", 3)
    assert 0 <= main.low < main.value < main.high <= math.log2(1000)
    assert exposed.name == "exposed_share" and exposed.value >= 2 / 3 - 1e-9
    names = [m.name for m in others]
    assert names == [
        "exposure_nonmembers",
        "excess_exposure",
        "exposure_extrapolated",
        "exposure_extrapolated_nonmembers",
    ]
    assert [math.isnan(end) for m in others for end in (m.low, m.high)] == [False] * 4 + [True] * 4
    by_count = QUICK.main_number_by_repeats(canaries(), exact)
    assert list(by_count) == ["1", "8"] and by_count["8"].n == 2
    assert by_count["1"].high - by_count["1"].low > 9  # one canary says next to nothing of others
    kept = QUICK.per_secret_values(canaries(), exact)
    assert np.mean(kept["exposure"][:3]) == pytest.approx(main.value)


def test_references_that_can_show_no_canary_are_named(exact: list[Observation]) -> None:
    """Of 3 canaries, a p-value of 1 in 59 is 5.1% after Holm's correction: never significant."""
    estimated = Observed(
        replace(o, values={**o.values, "estimated": 1.0, "exact": 0.0}) for o in exact
    )
    said = "-A exposure.references=59 or more"
    for references, is_said in ((58, True), (59, False)):
        notes = Exposure(references=references).notes(canaries(), estimated)
        assert any(said in note for note in notes) == is_said
    assert not any(
        said in note for note in Exposure(references=58).notes(canaries(), Observed(exact))
    )


def test_rows_of_a_version_without_a_check_of_the_fit_are_read_and_named(
    exact: list[Observation],
) -> None:
    older = Observed(
        replace(o, values={k: v for k, v in o.values.items() if k != "fit_p"}) for o in exact
    )
    mixed = Observed([*older[:2], *exact[2:]])
    assert states(QUICK.notes(canaries(), older), f"{len(exact)} canaries was not checked")
    assert states(QUICK.notes(canaries(), mixed), "2 canaries was not checked")
    assert not states(QUICK.notes(canaries(), exact), "not checked")
    assert repr(QUICK.measurements(canaries(), older)) == repr(
        QUICK.measurements(canaries(), exact)
    )


def test_controls_alone_are_no_members(learnt: HuggingFaceModel) -> None:
    controls = canaries()[3:]
    seen = measured(QUICK, wrap_prefixed_model(learnt, END), controls)
    main = QUICK.measurements(controls, seen)[0]
    assert (
        main.n == 0
        and math.isnan(main.value)
        and QUICK.main_number_by_repeats(controls, seen) == {}
    )


def test_a_budget_gives_a_certified_upper_bound(
    learnt: HuggingFaceModel, exact: list[Observation]
) -> None:
    probe = Exposure(references=50, nodes=4)
    bounded = measured(probe, wrap_prefixed_model(learnt, END), canaries())
    cut = 0
    for seen, true in zip(bounded, exact, strict=True):
        own, bits = seen.values, true.values["exposure_bits"]
        assert own["exposure_low_bits"] - 1e-9 <= bits <= own["exposure_high_bits"] + 1e-9
        assert own["exposure_bits"] == own["exposure_high_bits"]
        assert own["null_p"] >= true.values["null_p"] - 1e-12
        cut += not own["exact"]
    assert cut and f"of {cut} canaries exposure is a certified upper bound" in " ".join(
        probe.notes(canaries(), bounded)
    )


def test_a_large_space_is_estimated(learnt: HuggingFaceModel, exact: list[Observation]) -> None:
    probe = Exposure(references=100, draws=500, enumerate=10)
    estimated = measured(probe, wrap_prefixed_model(learnt, END), canaries())
    for seen, true in zip(estimated, exact, strict=True):
        own, bits = seen.values, true.values["exposure_bits"]
        assert own["exposure_low_bits"] <= own["exposure_bits"] <= own["exposure_high_bits"]
        assert own["exposure_low_bits"] - 0.2 <= bits <= own["exposure_high_bits"] + 0.2
        assert own["null_p"] >= 1 / 101
    assert states(probe.notes(canaries(), estimated), "estimated")


def test_texts_are_scored_behind_the_lead(
    learnt: HuggingFaceModel, exact: list[Observation]
) -> None:
    alone = measured(QUICK, learnt, canaries())
    assert any(
        a.values["log_p"] != pytest.approx(b.values["log_p"])
        for a, b in zip(alone, exact, strict=True)
    )
    starts = CanarySpace("{digits:2} is my ID")
    text = "42 is my ID"
    secret = Secret("c", (), tuple(bpe(150)(text)["input_ids"]), 1, canary=Canary(text, starts))
    with refuses("--prefix-token", "format", error=NotApplicable):
        list(Exposure(references=5).observe_secrets(view(learnt), [secret]))
    (seen,) = Exposure(references=5).observe_secrets(
        view(wrap_prefixed_model(learnt, END)), [secret]
    )
    (draws,) = Exposure(references=5, draws=4, enumerate=1).observe_secrets(
        view(wrap_prefixed_model(learnt, END)), [secret]
    )
    assert seen.values["exact"] and draws.values["estimated"]
    assert draws.values["log_p"] == pytest.approx(seen.values["log_p"], abs=1e-4)


def test_no_row_without_access_or_tokenizer(learnt: HuggingFaceModel) -> None:
    with refuses("log-probabilities", error=NotApplicable):
        list(
            QUICK.observe_secrets(
                View("undefended", learnt, TEXT_ONLY, seed=0, tokenizer=bpe(150)), canaries()
            )
        )
    with refuses("tokenizer", error=NotApplicable):
        list(QUICK.observe_secrets(View("undefended", learnt, WHITE_BOX, seed=0), canaries()))


@pytest.mark.parametrize(
    "options", [{"nodes": -1}, {"draws": 0}, {"references": 1}, {"alpha": 0.0}, {"enumerate": -1}]
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with refuses(*options):
        Exposure(**options)
