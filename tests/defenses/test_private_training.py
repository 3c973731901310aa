"""DP-SGD, ADP and its sound variant, from records to `privacy.json`: what they promise, and what
they refuse."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from auditor.core.errors import AuditError
from auditor.core.plan_parts import LoadingOptions
from auditor.defenses.adp import Adp, AdpSound
from auditor.defenses.private_training import DpSgd
from auditor.defenses.private_training_controls import NoClipping, NoNoise
from auditor.models.loading import load_causal_lm
from auditor.plugins import registry
from auditor.privacy import gradient_canaries
from auditor.privacy.gaussian import (
    compute_pld_epsilon,
    compute_quick_rdp_epsilon,
    compute_rdp_epsilon,
    compute_tightest_epsilon,
    find_noise_multiplier,
)
from auditor.privacy.gradient_canaries import GradientCanaries
from auditor.privacy.promises import PrivacyRecord, read_privacy_record
from auditor.runs import training
from auditor.runs.site import check_controls_trained_like_defense
from auditor.runs.training import TrainingRequest
from auditor.studies import sweep
from auditor.training import dp_loop as loops
from auditor.training.poisson import MechanismTerms, NonPrivateControl
from auditor.training.rarity import (
    compute_log_perplexities,
    scale_perplexities_within_bounds,
    scale_perplexities_within_data,
)
from tests.conftest import check_command, refuses, save_tiny, states, tiny

ROWS = [{"text": f"The code of door {i} is {i * i * 7}.", "who": i % 4} for i in range(16)]
SIGMA = {"noise_multiplier": 3.0, "epochs": 2, "batch": 4, "learning_rate": 0.01}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("private")
    for kind in ("neox", "gpt2"):
        save_tiny(folder / kind, kind)
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    asked = [{"instruction": row["text"], "output": "Yes."} for row in ROWS]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, asked)))
    return folder


def make_request(inputs: Path, out: Path, method: str = "dp-sgd", **more: Any) -> TrainingRequest:
    options = (
        {**SIGMA, **more.pop("options", {})}
        if more.get("options", {}) is not None
        else more.pop("options") or {}
    )
    given: dict[str, Any] = {
        "method": method,
        "model": str(inputs / "neox"),
        "data": str(inputs / "data.jsonl"),
    }
    return TrainingRequest(**{**given, "out": out, "block": 48, "options": options, **more})


def silent(what: str, done: int, total: int) -> None:
    pass


def promised(folder: Path) -> PrivacyRecord:
    record = read_privacy_record(folder)
    assert record is not None
    return record


@pytest.mark.accounted
def test_the_record_says_what_was_done_and_what_it_is_worth(inputs: Path, tmp_path: Path) -> None:
    told = training.train_model_into_folder(make_request(inputs, tmp_path / "out"), silent)
    record = promised(tmp_path / "out")
    assert (record.method, record.sampling, record.adjacency, record.unit) == (
        "dp-sgd",
        "poisson",
        "add_remove",
        "record",
    )
    assert (record.noise_multiplier, record.clip, record.sampling_rate, record.steps) == (
        3.0,
        1.0,
        0.25,
        8,
    )
    assert record.epsilon == pytest.approx(compute_pld_epsilon(3.0, 0.25, 8, 1e-5))
    assert (
        record.epsilon_rdp == pytest.approx(compute_rdp_epsilon(3.0, 0.25, 8, 1e-5))
        and record.epsilon_rdp > record.epsilon
    )
    assert (
        record.accountant == "dp-accounting PLD"
        and record.noise == "secret"
        and record.status == "sound"
    )
    assert set(record.versions) == {"opacus", "dp-accounting", "torch"}
    assert states(told, f"ε {record.epsilon:.3f}", "δ 1e-05")
    assert states(told, "group size k")
    claim = record.claim()
    assert (
        claim is not None
        and claim.queries is None
        and claim.epsilon == {"add_remove": record.epsilon}
    )


def test_nothing_of_the_data_is_kept_beside_the_weights(inputs: Path, tmp_path: Path) -> None:
    """Not even a digest, which differs between data sets that the promise says cannot be told
    apart."""
    training.train_model_into_folder(make_request(inputs, tmp_path / "out"), silent)
    assert (
        "data" not in json.loads((tmp_path / "out" / "training.json").read_text())["configuration"]
    )
    (told,) = training.train_model_into_folder(make_request(inputs, tmp_path / "out"), silent)
    assert "already trained with this configuration (its records are unknown)" in told
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {name for name in names if not name.startswith("tokenizer")} == {
        *(
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "privacy.json",
            "training.json",
            ".lock",
        )
    }


def test_gradient_canaries_change_no_claim_and_are_told_of(inputs: Path, tmp_path: Path) -> None:
    """Noise, rate and steps are those of the training without them; what was read of them is for
    its owner only."""
    told = training.train_model_into_folder(
        make_request(inputs, tmp_path / "out", options={"gradient_canaries": 40}), silent
    )
    training.train_model_into_folder(make_request(inputs, tmp_path / "plain"), silent)
    own, plain = promised(tmp_path / "out"), promised(tmp_path / "plain")
    assert own.details.pop("gradient_canaries") == 40 and own == plain
    assert sum("trained with 40 gradient canaries" in sentence for sentence in told) == 1
    kept = gradient_canaries.read_gradient_canaries(tmp_path / "out")
    assert kept is not None and 5 < sum(kept.included) < 35
    assert len(kept.included) == len(kept.scores) == len(kept.sums) == 40
    mechanism = (kept.noise_multiplier, kept.sampling_rate, kept.steps, kept.clip, kept.delta)
    assert mechanism == (own.noise_multiplier, own.sampling_rate, own.steps, own.clip, own.delta)
    assert (tmp_path / "out" / gradient_canaries.FILE).stat().st_mode & 0o777 == 0o600
    assert gradient_canaries.read_gradient_canaries(tmp_path / "plain") is None


def test_folders_made_before_there_were_gradient_canaries_are_still_known(
    inputs: Path, tmp_path: Path
) -> None:
    """An option that came later, and was not given, is no other configuration, and no other part of
    the lab."""
    training.train_model_into_folder(make_request(inputs, tmp_path / "out"), silent)
    assert (
        "gradient_canaries"
        not in json.loads((tmp_path / "out" / "training.json").read_text())["configuration"][
            "options"
        ]
    )
    assert (
        "gradient_canaries" not in DpSgd().options()
        and DpSgd(gradient_canaries=9).options()["gradient_canaries"] == 9
    )
    with refuses("gradient_canaries", "None", "9"):
        training.train_model_into_folder(
            make_request(inputs, tmp_path / "out", options={"gradient_canaries": 9}), silent
        )
    controls = [
        cause.row
        for cause in DpSgd(gradient_canaries=9).cause_chain()
        if isinstance(cause.row, NonPrivateControl)
    ]
    assert len(controls) == 2 and not any(control.gradient_canaries for control in controls)
    with refuses("gradient_canaries=0", "no-clipping", "9"):
        NoClipping(gradient_canaries=9)


def test_a_canary_file_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / gradient_canaries.FILE).write_text("[]")
    with refuses("object", "list"):
        gradient_canaries.read_gradient_canaries(tmp_path)
    one = GradientCanaries(
        (True,), (1.0, 2.0), (1.0,), 1.0, 0.1, 3, 1.0, 1e-5, "record", 3, 1, 0.0, 3, 1.0, 0.1
    )
    gradient_canaries.write_gradient_canaries(tmp_path, one)
    with refuses("1, 2, 1"):
        gradient_canaries.read_gradient_canaries(tmp_path)


def test_a_users_records_are_one_unit(inputs: Path, tmp_path: Path) -> None:
    options = {"unit": "user", "batch": 2}
    training.train_model_into_folder(
        make_request(inputs, tmp_path / "out", options=options, user_column="who", block=96), silent
    )
    record = promised(tmp_path / "out")
    assert record.unit == "user" and record.sampling_rate == 0.5  # 2 of 4 users


@pytest.mark.accounted
def test_the_noise_is_solved_for_its_epsilon(inputs: Path, tmp_path: Path) -> None:
    training.train_model_into_folder(
        make_request(
            inputs, tmp_path / "out", options={"noise_multiplier": 0.0, "epsilon": 2.0, "batch": 8}
        ),
        silent,
    )
    assert promised(tmp_path / "out").epsilon == pytest.approx(2.0, rel=2e-3)
    assert float(promised(tmp_path / "out").epsilon or 9) <= 2.0


def test_no_epsilon_where_no_parameter_moved(inputs: Path, tmp_path: Path) -> None:
    for method in ("dp-sgd", "adp", "adp-sound"):
        training.train_model_into_folder(
            make_request(inputs, tmp_path / method, method, options={"learning_rate": 1e-60}),
            silent,
        )
        record = promised(tmp_path / method)
        assert record.epsilon is None and record.claim() is None and not record.nominal
        assert "no parameter moved" in record.status


class _Killed(Exception):
    pass


@pytest.mark.parametrize("kind", ["neox", "gpt2"])
def test_killed_and_resumed_counts_every_step(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The key survives in the checkpoint alone; the steps of the record are those of the whole
    training."""
    out, taken = tmp_path / "out", []
    real = loops.fit_privately
    monkeypatch.setattr(loops, "fit_privately", lambda *a, **k: real(*a, **k, seconds_between=0.0))

    def kill(what: str, done: int, total: int) -> None:
        taken.append(done)
        if done == 3:
            raise _Killed

    lora = kind == "gpt2"
    with pytest.raises(_Killed):
        training.train_model_into_folder(
            make_request(inputs, out, model=str(inputs / kind), lora=lora), kill
        )
    assert read_privacy_record(out) is None and (out / "checkpoint.pt").is_file()
    assert not json.loads((out / "training.json").read_text())["finished"]
    training.train_model_into_folder(
        make_request(inputs, out, model=str(inputs / kind), lora=lora),
        lambda what, done, total: taken.append(done),
    )
    assert [n for n in taken if n] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert promised(out).steps == 8 and not (out / "checkpoint.pt").exists()
    with refuses("clip", "1.0", "2.0"):
        training.train_model_into_folder(
            make_request(inputs, out, model=str(inputs / kind), lora=lora, options={"clip": 2.0}),
            silent,
        )


def test_secret_noise_differs_from_run_to_run_and_seeded_does_not(
    inputs: Path, tmp_path: Path
) -> None:
    rows: dict[str, Any] = {}
    for name, noise in (("a", "secret"), ("b", "secret"), ("c", "seeded"), ("d", "seeded")):
        training.train_model_into_folder(
            make_request(inputs, tmp_path / name, options={"noise": noise}), silent
        )
        rows[name] = load_causal_lm(str(tmp_path / name)).embedding_rows(40).numpy()
    assert not np.allclose(rows["a"], rows["b"], atol=1e-4)
    assert np.allclose(rows["c"], rows["d"], atol=1e-4)


@pytest.mark.parametrize("method", ["dp-sgd", "adp-sound", "adp"])
def test_seeded_noise_has_a_nominal_epsilon_and_no_claim(
    inputs: Path, tmp_path: Path, method: str
) -> None:
    """Two models of one seed share noise and batches: their difference is that of their clipped
    gradients."""
    told = training.train_model_into_folder(
        make_request(inputs, tmp_path / "out", method, options={"noise": "seeded"}), silent
    )
    record = promised(tmp_path / "out")
    assert record.epsilon is record.epsilon_rdp is record.epsilon_twice is record.claim() is None
    assert (
        record.nominal_epsilon == pytest.approx(compute_tightest_epsilon(3.0, 0.25, 8, 1e-5)[0])
        or method == "adp"
    )
    assert any(
        "no guarantee" in sentence and "nominal, no guarantee" in sentence for sentence in told
    )
    assert "sound" not in record.status


def test_two_models_of_one_seed_differ_by_their_clipped_gradients(
    inputs: Path, tmp_path: Path
) -> None:
    """Why: the noise of a step cancels. At noise of 3 clips a step, what is left is the record that
    was exchanged."""
    rows = [*ROWS[:-1], {"text": "Something else altogether, behind this door.", "who": 3}]
    (tmp_path / "other.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = {}
    for noise in ("seeded", "secret"):
        options = {"noise": noise, "optimizer": "sgd", "epochs": 1, "batch": 16}
        for name, data in (("one", inputs / "data.jsonl"), ("other", tmp_path / "other.jsonl")):
            out = tmp_path / f"{noise}-{name}"
            training.train_model_into_folder(
                make_request(inputs, out, data=str(data), options=options), silent
            )
            found[noise, name] = load_causal_lm(str(out)).embedding_rows(40).double()
    seeded, secret = (
        (found[noise, "one"] - found[noise, "other"]).norm() for noise in ("seeded", "secret")
    )
    assert float(seeded) < 0.02 * float(secret)


def test_users_are_claimed_where_the_data_name_them_only(inputs: Path, tmp_path: Path) -> None:
    """16 records of 4 people, no column: the claim would be for a text, and called one for a
    user."""
    for method in ("dp-sgd", "adp", "adp-sound"):
        with refuses("unit=user", "--user-column"):
            training.train_model_into_folder(
                make_request(inputs, tmp_path / "out", method, options={"unit": "user"}), silent
            )
        assert not (tmp_path / "out").exists()


def test_the_number_of_units_is_public_or_given(inputs: Path, tmp_path: Path) -> None:
    """With `units`, nothing that is written depends on how many records there are."""
    training.train_model_into_folder(make_request(inputs, tmp_path / "counted"), silent)
    record = promised(tmp_path / "counted")
    assert (record.units, record.units_given) == (16, False)
    assert states(record.notes(), "16", "public")
    claim = record.claim()
    assert (
        claim is not None
        and "on a public number of records" in claim.theorem
        and claim.details["units"] == 16
    )
    (tmp_path / "less.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS[:-1]))
    held = []
    for name, data in (("all", inputs / "data.jsonl"), ("less", tmp_path / "less.jsonl")):
        training.train_model_into_folder(
            make_request(inputs, tmp_path / name, data=str(data), options={"units": 20}), silent
        )
        held.append(promised(tmp_path / name))
    assert held[0] == held[1] and (held[0].units, held[0].sampling_rate, held[0].steps) == (
        20,
        0.2,
        10,
    )
    assert states(held[0].notes(), "20", "public")


def test_what_two_trainings_promise_together_is_said(inputs: Path, tmp_path: Path) -> None:
    """Beside any training; and of a base that was trained privately, as its own epsilon."""
    told = training.train_model_into_folder(make_request(inputs, tmp_path / "once"), silent)
    once = promised(tmp_path / "once")
    together, _ = compute_tightest_epsilon(3.0, 0.25, 16, 1e-5)
    assert once.epsilon_twice == pytest.approx(together) and once.epsilon_twice > (
        once.epsilon or 9
    )
    assert states(told, f"ε {together:.3g}")
    training.train_model_into_folder(
        make_request(inputs, tmp_path / "twice", model=str(tmp_path / "once")), silent
    )
    twice = promised(tmp_path / "twice")
    assert twice.epsilon == pytest.approx(together, rel=1e-3) and len(twice.earlier) == 1
    assert states(twice.notes(), "2 trainings")
    training.train_model_into_folder(
        make_request(inputs, tmp_path / "nominal", options={"noise": "seeded"}), silent
    )
    training.train_model_into_folder(
        make_request(inputs, tmp_path / "on-nominal", model=str(tmp_path / "nominal")), silent
    )
    assert promised(tmp_path / "on-nominal").claim() is None
    training.train_model_into_folder(
        make_request(inputs, tmp_path / "plain", "none", options=None), silent
    )
    with refuses("base", "privacy"):
        training.train_model_into_folder(
            make_request(inputs, tmp_path / "on-plain", model=str(tmp_path / "plain")), silent
        )


@pytest.mark.parametrize("moment", ["written", "recorded"])
def test_killed_at_the_end_it_is_not_trained_again(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Between privacy.json and the word that it is finished; between that and the end of the
    checkpoint."""
    out = tmp_path / "out"

    def kill(*_: Any) -> None:
        raise _Killed

    with monkeypatch.context() as patch, pytest.raises(_Killed):
        if moment == "written":
            patch.setattr("auditor.training.poisson._write_privacy_notes", kill)
        else:
            patch.setattr("auditor.plugins.trainer.TrainerCheckpoint.clear", kill)
        training.train_model_into_folder(make_request(inputs, out), silent)
    promise, weights = promised(out), (out / "model.safetensors").read_bytes()
    assert (out / "checkpoint.pt").is_file()
    monkeypatch.setattr(loops, "fit_privately", kill)
    training.train_model_into_folder(make_request(inputs, out), silent)
    assert promised(out) == promise and (out / "model.safetensors").read_bytes() == weights
    assert (
        json.loads((out / "training.json").read_text())["finished"]
        and not (out / "checkpoint.pt").exists()
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "batch": (
        {"options": {"batch": 17}},
        "expected a batch of at most the 16 records of the data, got 17",
    ),
    "users": (
        {"options": {"batch": 5, "unit": "user"}, "user_column": "who"},
        "expected a batch of at most the 4 users of the data, got 5",
    ),
    "shuffled": (
        {"options": {"sampling": "shuffled"}},
        "expected sampling=poisson, got shuffled",
    ),
    "half precision": (
        {"loading": LoadingOptions(dtype="bfloat16")},
        "expected --dtype float32: noise rounded to torch.bfloat16",
    ),
    "delta": ({"options": {"delta": 0}}, "expected delta in (0, 1), got 0"),
    "epsilon": ({"options": {"epsilon": -1}}, "expected epsilon > 0 and at most 1,000, got -1"),
    "no protection": (
        {"options": {"epsilon": 1e12}},
        "expected epsilon > 0 and at most 1,000, got 1,000,000,000,000",
    ),
    "infinite rate": (
        {"options": {"learning_rate": math.inf}},
        "learning_rate to be a finite number, got inf",
    ),
    "no clip": ({"options": {"clip": math.nan}}, "clip to be a finite number, got nan"),
    "noise": (
        {"options": {"noise_multiplier": 1e300}},
        "expected noise_multiplier >= 0 and at most 1,000,000",
    ),
    "endless": (
        {"options": {"units": 10**12}},
        "expected at most 10,000,000 steps, got 500,000,000,000: lower epochs",
    ),
    "less than one unit": (
        {"options": {"units": -1}},
        "expected units >= 0, got -1",
    ),
    "batch of units": (
        {"options": {"units": 3}},
        "expected a batch of at most the 3 records of units, got 4",
    ),
    "diverged": (
        {"options": {"learning_rate": 1e6, "optimizer": "sgd", "clip": 1e6}},
        "its weights are not finite",
    ),
    "canaries": (
        {"options": {"gradient_canaries": 10**9}},
        "trained parameters, got 1,000,000,000",
    ),
    "fewer canaries than none": (
        {"options": {"gradient_canaries": -1}},
        "expected gradient_canaries >= 0, got -1",
    ),
    "model": ({"options": {"model": "x"}}, "for audit run: audit train makes it"),
    "cut answers": (
        {"data": "asked.jsonl"},
        "expected --block to reach an answer, got 48 tokens, of which none has a loss",
    ),
    "kappa": (
        {"method": "adp-sound", "options": {"kappa_least": 0}},
        "expected kappa_least in (0, 1], got 0",
    ),
    "constants": (
        {"method": "adp-sound", "options": {"lowest_perplexity": 9, "highest_perplexity": 9}},
        "expected perplexities 1 <= lowest < highest, got 9 and 9",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_refusal_is_one_sentence_and_leaves_nothing(
    inputs: Path, tmp_path: Path, case: tuple[dict[str, Any], str]
) -> None:
    more, sentence = case
    more = more | {name: str(inputs / more[name]) for name in ("model", "data") if name in more}
    with pytest.raises(AuditError) as error:
        training.train_model_into_folder(make_request(inputs, tmp_path / "out", **more), silent)
    assert sentence in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_batches_of_one_are_the_smallest() -> None:
    assert DpSgd(batch=1, physical_batch=1).batch == 1
    for option in ("batch", "physical_batch"):
        with refuses(option, "1", "0"):
            DpSgd(**{option: 0})


# --- ADP ---

EXAMPLES = [(0, *range(1, 4 + i), 0) for i in range(6)]


def test_perplexity_is_that_of_equation_3() -> None:
    model = tiny()
    for example, log_p in zip(EXAMPLES, compute_log_perplexities(model, EXAMPLES), strict=True):
        tokens = model.model.dummy_inputs["input_ids"].new_tensor([example])
        assert float(model.model(input_ids=tokens, labels=tokens).loss) == pytest.approx(
            float(log_p), abs=1e-5
        )


def test_normalisations() -> None:
    p = np.array([1.0, 3.0, 2.0, 5.0])
    assert scale_perplexities_within_data(np.log(p), "min-max") == pytest.approx([0, 0.5, 0.25, 1])
    assert scale_perplexities_within_data(np.log(p), "rank") == pytest.approx([0, 2 / 3, 1 / 3, 1])
    assert scale_perplexities_within_data(np.array([0.0, 1, 1, 2]), "rank") == pytest.approx(
        [0, 0.5, 0.5, 1]
    )
    # no overflow
    assert scale_perplexities_within_data(np.array([1000.0, 2000.0]), "min-max") == pytest.approx(
        [0, 1]
    )
    # nothing tells them apart: full noise
    assert scale_perplexities_within_data(np.array([2.0, 2.0]), "min-max") == pytest.approx([1, 1])
    assert scale_perplexities_within_bounds(
        np.log([1.0, 10.0, 100.0, 1000.0]), 1, 100
    ) == pytest.approx([0, 0.5, 1, 1])


@pytest.mark.parametrize("how", ["min-max", "rank"])
def test_adps_probabilities_depend_on_everyone_and_the_sound_ones_do_not(how: Any) -> None:
    """Eq. 5 of Wu et al. (2022): one odd record moves all others' noise. A record's own clip is its
    own business."""
    p = np.log([3.0, 4.0, 6.0])
    odd = np.append(p, np.log(600.0))
    assert not np.allclose(
        scale_perplexities_within_data(odd, how)[:3], scale_perplexities_within_data(p, how)
    )
    assert scale_perplexities_within_bounds(odd, 1, 1000)[:3] == pytest.approx(
        scale_perplexities_within_bounds(p, 1, 1000)
    )


class _Job:
    public = tiny()


def test_gamma_is_the_mean_probability_of_the_batch() -> None:
    """Equation 5; and Equation 6 multiplies the noise by it (the naive twin is in
    test_private_training of auditor)."""
    job: Any = _Job()
    rho = scale_perplexities_within_data(compute_log_perplexities(job.public, EXAMPLES), "rank")
    treatment = Adp(normalise="rank").choose_unit_treatment(job, EXAMPLES)
    assert treatment.shares is None and treatment.noise_scale is not None
    assert treatment.noise_scale(np.array([], dtype=int)) == 1.0
    for units in ([0], [1, 4], [0, 2, 3, 5]):
        assert treatment.noise_scale(np.array(units)) == pytest.approx(
            sum(rho[i] for i in units) / len(units)
        )


def test_the_sound_variant_scales_clips_not_noise() -> None:
    job: Any = _Job()
    treatment = AdpSound(
        kappa_least=0.2, lowest_perplexity=2, highest_perplexity=500
    ).choose_unit_treatment(job, EXAMPLES)
    rho = ((compute_log_perplexities(job.public, EXAMPLES) - math.log(2)) / math.log(250)).clip(
        0, 1
    )
    assert treatment.noise_scale is None
    assert treatment.shares == pytest.approx([1 - 0.8 * r for r in rho])
    assert all(0.2 - 1e-9 <= share <= 1 for share in treatment.shares or ())


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_adp_promises_nothing_and_says_why(inputs: Path, tmp_path: Path, optimizer: str) -> None:
    told = training.train_model_into_folder(
        make_request(inputs, tmp_path / "out", "adp", options={"optimizer": optimizer}), silent
    )
    record = promised(tmp_path / "out")
    assert record.epsilon is None and record.epsilon_rdp is None and record.claim() is None
    assert "no guarantee at any epsilon: the noise scale depends on which records" in told[-1]
    gamma = record.details["gamma_mean"]
    # 0: a batch of the most common record alone, which real sampling draws in some runs (8% of
    # these)
    assert 0 <= record.details["gamma_least"] <= gamma < 1 and gamma > 0
    flat, mean, least = record.nominal.values()
    assert (
        flat == pytest.approx(compute_tightest_epsilon(3.0, 0.25, 8, 1e-5)[0])
        and flat < mean <= least
    )


def test_a_scale_that_never_changes_has_the_epsilon_of_none(inputs: Path, tmp_path: Path) -> None:
    """All records are alike, so gamma is 1 in every step."""
    (tmp_path / "alike.jsonl").write_text((json.dumps({"text": "The same."}) + "\n") * 8)
    request = make_request(inputs, tmp_path / "out", "adp", data=str(tmp_path / "alike.jsonl"))
    training.train_model_into_folder(request, silent)
    flat, mean, least = promised(tmp_path / "out").nominal.values()
    assert flat == mean == least


def test_the_sound_variant_promises_what_dp_sgd_does(inputs: Path, tmp_path: Path) -> None:
    for method in ("dp-sgd", "adp-sound"):
        training.train_model_into_folder(make_request(inputs, tmp_path / method, method), silent)
    assert (
        promised(tmp_path / "adp-sound").epsilon
        == promised(tmp_path / "dp-sgd").epsilon
        is not None
    )


# --- as defenses ---


def test_trainers_are_defenses() -> None:
    for kind in (DpSgd, Adp, AdpSound):
        assert registry.list_trainers()[kind.name] is kind is registry.list_defenses()[kind.name]


@pytest.fixture(scope="module")
def trained(inputs: Path) -> Path:
    for method in ("dp-sgd", "adp"):
        training.train_model_into_folder(make_request(inputs, inputs / method, method), silent)
    return inputs


def run(inputs: Path, out: Path, *more: str) -> list[str]:
    data = ["--data", str(inputs / "data.jsonl"), "--prefix-length", "16", "--suffix-length", "6"]
    return ["run", *data, "--attack", "perplexity", "--samples", "2", "-o", str(out), *more]


@pytest.mark.accounted
def test_while_it_trains_no_epsilon_is_said_above_the_one_asked_for() -> None:
    """The noise is solved by a closer bound than the quick one of the progress line."""
    said: list[str] = []
    told = SimpleNamespace(progress=lambda what, *_: said.append(what))
    sigma = find_noise_multiplier(2.0, 1e-5, 0.1, 10)
    terms = MechanismTerms(sigma, 1.0, 0.1, 10, 100, 1e-5)
    assert compute_quick_rdp_epsilon(sigma, 0.1, 10, 1e-5) > 2.005
    for trainer in (DpSgd(epsilon=2.0), DpSgd(epsilon=2.0, noise_multiplier=sigma)):
        trainer.make_private_training_progress(told, terms)(10, 1.0)  # type: ignore[arg-type]
    assert said[0].endswith("ε ≤ 2.00") and float(said[1].split()[-1]) > 2.005


def test_while_it_trains_the_steps_of_its_base_count_too(trained: Path) -> None:
    said: list[str] = []
    told: Any = SimpleNamespace(progress=lambda what, *_: said.append(what))
    alone = MechanismTerms(1.0, 1.0, 0.1, 50, 100, 1e-5)
    for base in (None, promised(trained / "dp-sgd")):  # which is one of records, as these steps are
        terms = dataclasses.replace(alone, base=base)
        DpSgd(epsilon=2.0, noise_multiplier=1.0).make_private_training_progress(told, terms)(
            50, 1.0
        )
        DpSgd(epsilon=2.0).make_private_training_progress(told, terms)(50, 1.0)
    of_steps, at_most, of_both, unbounded = (float(one.split()[-1]) for one in said)
    assert at_most == 2.0 < of_steps < of_both == unbounded


def test_a_private_model_shows_its_claim(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_command(*run(trained, tmp_path / "run", "--model", str(trained / "dp-sgd")))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    claim = result["targets"][0]["claim"]
    assert (
        claim["epsilon"]["add_remove"] == promised(trained / "dp-sgd").epsilon
        and claim["queries"] is None
    )
    assert all(f["claim_applies"] for f in result["findings"]) and {
        f["setting"] for f in result["findings"]
    } == {
        "text-only",
        "white-box",
    }
    report = (tmp_path / "run" / "report.md").read_text()
    assert "any access, the weights included" in report and "group size k only" in report
    assert "| record | any number | sound |" in report


def test_a_nominal_epsilon_is_no_claim(trained: Path, tmp_path: Path) -> None:
    check_command(*run(trained, tmp_path / "run", "--model", str(trained / "adp")))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["targets"][0]["claim"] is None and result["targets"][0]["nominal_epsilon"] > 0
    assert all(f["claim_applies"] is None for f in result["findings"])
    report = (tmp_path / "run" / "report.md").read_text()
    assert (
        "nominal ε" in report
        and "which is no claim" in report
        and "no guarantee at any epsilon" in report
    )


def test_a_trained_folder_is_a_defense_of_the_model_it_stands_beside(
    trained: Path, tmp_path: Path
) -> None:
    more = [
        "--model",
        str(trained / "neox"),
        "--defense",
        "dp-sgd",
        "-D",
        f"model={trained / 'dp-sgd'}",
    ]
    check_command(*run(trained, tmp_path / "run", *more))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [t["name"] for t in result["targets"]] == ["undefended", "dp-sgd"]
    assert (
        result["targets"][0]["claim"] is None and result["targets"][1]["claim"]["unit"] == "record"
    )
    assert chain_of(result, "dp-sgd") == [
        (["training configuration", "clipping", "noise"], "undefended", "dp-sgd"),
        (["no private data"], "dp-sgd", ""),
    ]
    report = (tmp_path / "run" / "report.md").read_text()
    assert "training configuration, clipping and noise" in report
    assert "not separated without 'No clipping, no noise'" in report
    page = html.unescape((tmp_path / "run" / "report.html").read_text())
    assert "audit train no-noise makes it, -D dp-sgd.no_noise=DIR names it" in page


def chain_of(result: dict[str, Any], target: str) -> list[tuple[list[str], str, str]]:
    (row,) = (f for f in result["findings"] if f["target"] == target and f["chain"])
    return [(list(step["causes"]), step["before"], step["after"]) for step in row["chain"]["steps"]]


@pytest.fixture(scope="module")
def controls(trained: Path) -> Path:
    """no-noise/, no-clipping/, as long as dp-sgd/; shorter/: an epoch less."""
    recipe = {name: value for name, value in SIGMA.items() if name != "noise_multiplier"}
    data = {"model": str(trained / "neox"), "data": str(trained / "data.jsonl"), "block": 48}
    for name, method, epochs in (
        ("no-noise",) * 2 + (2,),
        ("no-clipping",) * 2 + (2,),
        ("shorter", "no-noise", 1),
    ):
        options = {**recipe, "epochs": epochs}
        told = training.train_model_into_folder(
            TrainingRequest(method=method, out=trained / name, options=options, **data), silent
        )
        assert any("no guarantee: trained without noise" in sentence for sentence in told)
    return trained


def test_a_control_says_that_it_promises_nothing(controls: Path) -> None:
    for name, clip in (("no-noise", 1.0), ("no-clipping", math.inf)):
        record = promised(controls / name)
        assert (record.method, record.noise, record.noise_multiplier, record.clip) == (
            name,
            "none",
            0.0,
            clip,
        )
        assert (
            record.epsilon is record.epsilon_rdp is record.nominal_epsilon is record.claim() is None
        )
        assert (record.steps, record.sampling_rate) == (8, 0.25)  # those of the private training
    weights = {
        name: (controls / name / "model.safetensors").read_bytes()
        for name in ("no-noise", "no-clipping")
    }
    assert weights["no-noise"] != weights["no-clipping"]


def test_controls_tell_the_recipe_clipping_and_noise_apart(controls: Path, tmp_path: Path) -> None:
    named = [
        f"dp-sgd.{option.replace('-', '_')}={controls / option}"
        for option in ("no-noise", "no-clipping")
    ]
    options = [
        word for option in (f"model={controls / 'dp-sgd'}", *named) for word in ("-D", option)
    ]
    more = [
        "--model",
        str(controls / "neox"),
        "--public",
        str(controls / "gpt2"),
        "--defense",
        "dp-sgd",
        *options,
    ]
    check_command(*run(controls, tmp_path / "run", *more))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert chain_of(result, "dp-sgd") == [
        (["training configuration"], "undefended", "no-clipping"),
        (["clipping"], "no-clipping", "no-noise"),
        (["noise"], "no-noise", "dp-sgd"),
        (["no private data"], "dp-sgd", "public"),
    ]
    assert {
        t["name"]: t["claim"] is None for t in result["targets"] if t["companion"]
    } == dict.fromkeys(("no-clipping", "no-noise", "public"), True)


def test_a_control_of_another_recipe_is_refused(
    controls: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "-D",
        f"model={controls / 'dp-sgd'}",
        "-D",
        f"dp-sgd.no_noise={controls / 'shorter'}",
    ]
    more = ["--model", str(controls / "neox"), "--defense", "dp-sgd", *options]
    check_command(*run(controls, tmp_path / "run", *more), code=2)
    sentence = "to be trained as the dp-sgd model was, with steps 8, got 4"
    assert sentence in " ".join(capsys.readouterr().err.split())
    swapped = [*more[:-1], f"dp-sgd.no_noise={controls / 'no-clipping'}"]
    check_command(*run(controls, tmp_path / "run", *swapped), code=2)
    assert "to be trained by audit train no-noise, got" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("file", "part", "value", "name"),
    [
        ("training.json", "configuration", {"lora": [8, 16]}, "LoRA"),
        ("training.json", "configuration", {"block": 8}, "block"),
        ("training.json", "configuration", {"weights": {"model/config.json": "other"}}, "weights"),
        ("privacy.json", "details", {"highest_perplexity": 3.0}, "highest_perplexity"),
    ],
)
def test_a_control_of_another_base_adapter_block_or_clipping_is_refused(
    controls: Path, tmp_path: Path, file: str, part: str, value: dict[str, Any], name: str
) -> None:
    shutil.copytree(controls / "no-noise", tmp_path / "control")
    defense = DpSgd(model=str(controls / "dp-sgd"), no_noise=str(tmp_path / "control"))
    check_controls_trained_like_defense(defense)
    record = json.loads((tmp_path / "control" / file).read_text())
    record[part] |= value
    (tmp_path / "control" / file).write_text(json.dumps(record))
    with refuses(name):
        check_controls_trained_like_defense(defense)


def test_the_controls_are_of_the_defenses_own_recipe() -> None:
    """Equal ones are one row; ADP without noise is DP-SGD without it; the sound variant clips in
    its own way."""
    rest = {
        "epochs": 7,
        "batch": 9,
        "learning_rate": 0.5,
        "optimizer": "sgd",
        "unit": "user",
        "units": 100,
    }
    made = [kind(**rest, clip=0.3, epsilon=2.0) for kind in (DpSgd, Adp)]  # type: ignore[arg-type]
    assert len({tuple(cause.row for cause in defense.cause_chain()) for defense in made}) == 1
    unclipped, unnoised = (cause.row for cause in made[0].cause_chain()[:2])
    assert unclipped == NoClipping(**rest) and unnoised == NoNoise(**rest, clip=0.3)  # type: ignore[arg-type]
    sound = AdpSound(kappa_least=0.2, lowest_perplexity=2, highest_perplexity=500)
    clipped = sound.make_no_noise_control()
    job: Any = _Job()
    assert (
        clipped.choose_unit_treatment(job, EXAMPLES).shares
        == sound.choose_unit_treatment(job, EXAMPLES).shares
    )
    assert NoNoise().choose_unit_treatment(job, EXAMPLES).shares is None and clipped != NoNoise()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--defense", "dp-sgd"], "needs -D dp-sgd.model=DIR, a folder made by audit train dp-sgd"),
        (
            ["--defense", "dp-sgd", "-D", "model={}/neox"],
            "to be trained by audit train dp-sgd, got no privacy.json",
        ),
        (
            ["--defense", "dp-sgd", "-D", "model={}/adp"],
            "audit train dp-sgd, got a model trained by adp",
        ),
        (
            ["--defense", "dp-sgd", "-D", "model=/nowhere"],
            "to be a folder that was trained, got '/nowhere'",
        ),
    ],
)
def test_what_is_no_trained_folder_is_refused(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    sentence: str,
) -> None:
    words = [word.format(trained) for word in more]
    check_command(*run(trained, tmp_path / "run", "--model", str(trained / "neox"), *words), code=2)
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_the_lab_trains_its_defenses_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dp-sgd is covered in both settings, ADP claims nothing; a ledger finds perplexities and
    epsilons of both."""
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    tiny_lab = {
        "vocab_size": 300,
        "layers": 1,
        "hidden": 32,
        "heads": 2,
        "private_rank": 2,
        "batch": 8,
    }
    tiny_lab |= {"repeats": [[times, 2, 1] for times in (1, 2, 4, 8, 16)], "others": 0}
    tiny_lab |= {"nonmembers": 4, "public_records": 20, "public_epochs": 1, "private_epochs": 1}
    fields = "".join(f"{name} = {value}\n" for name, value in tiny_lab.items())
    options = 'attack = ["extraction-probability"]\ndefense = ["dp-sgd", "adp"]\nseeds = [0]\n'
    options += '[defense_options.""]\nepochs = 1\nbatch = 16\nnoise_multiplier = 3.0\n'
    (tmp_path / "plan.toml").write_text(f"{options}[lab_recipe]\n{fields}")
    out = tmp_path / "sweep"
    check_command("run", "--config", tmp_path / "plan.toml", "-o", out)
    (place,) = sweep.read_study_points(out)
    cells = {(cell.target, cell.setting): cell for cell in place.cells if cell.measured}
    assert {target for target, _ in cells} == {
        "undefended",
        "dp-sgd",
        "no-clipping",
        "no-noise",
        "public",
        "adp",
    }
    private, nominal = (cells[target, "white-box"].measured[0] for target in ("dp-sgd", "adp"))
    assert (
        private["epsilon"].value > 0
        and "nominal_epsilon" not in private
        and private["perplexity"].value > 1
    )
    assert nominal["nominal_epsilon"].value > private["epsilon"].value and "epsilon" not in nominal
    (run_folder,) = (path.parent for path in out.glob("*/result.json"))
    result = json.loads((run_folder / "result.json").read_text())
    applies = {(f["target"], f["setting"]): f["claim_applies"] for f in result["findings"]}
    assert applies["dp-sgd", "text-only"] is applies["dp-sgd", "white-box"] is True
    assert applies["adp", "white-box"] is None
    assert next(t for t in result["targets"] if t["name"] == "dp-sgd")["training_seconds"] > 0
    for target in ("dp-sgd", "adp"):  # which share their controls
        shared = [step[1:] for step in chain_of(result, target)[:2]]
        assert shared == [("undefended", "no-clipping"), ("no-clipping", "no-noise")]
