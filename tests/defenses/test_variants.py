"""Fine-tuning with one thing changed: what each variant drops, freezes or keeps, against cases
solved by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.defenses.dropped_records import Dedup, _choose_lsh_bands, drop_near_duplicate_texts
from auditor.defenses.early_stop import EarlyStop
from auditor.defenses.fine_tuning import FreezeEmbeddings
from auditor.defenses.goldfish import Goldfish
from auditor.plugins.trainer import (
    TrainerCheckpoint,
    TrainingJob,
    TrainingRecord,
    read_training_summary,
)
from auditor.runs import training
from auditor.runs.training import TrainingRequest
from auditor.training import loss_masks
from auditor.training.finetune import compute_causal_loss
from auditor.training.variants import Variant
from tests.conftest import check_command, refuses, save_tiny, states, tiny

ROWS = [{"text": f"The code of door {i} is {i * i * 7}.", "who": i % 4} for i in range(16)]
Said = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("variants")
    save_tiny(folder / "neox")
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS + ROWS[:3]))
    return folder


def make_request(inputs: Path, out: Path, method: str, **more: Any) -> TrainingRequest:
    options = {"epochs": 2, "batch": 2, **more.pop("options", {})}
    given: dict[str, Any] = {
        "method": method,
        "model": str(inputs / "neox"),
        "data": str(inputs / "data.jsonl"),
    }
    return TrainingRequest(**{**given, "out": out, "block": 48, "options": options, **more})


def silent(what: str, done: int, total: int) -> None:
    pass


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return state


def job(
    texts: Sequence[str], out: Path, whose: Sequence[str] | None = None, **more: Any
) -> TrainingJob:
    """Of texts whose tokens are their bytes; `whose`: a user for each."""
    own = [
        TrainingRecord(text, tuple(1 + byte % 60 for byte in text.encode()), who)
        for text, who in zip(texts, whose or texts, strict=True)
    ]
    return TrainingJob(
        **{
            "base": "tiny",
            "load": lambda: tiny().model.requires_grad_(True).train(),
            "tokenizer": None,
            "end": 0,
            "block": 24,
            "records": tuple(own),
            "users": whose is not None,
            "public": tiny(),
            "out": out,
            "checkpoint": TrainerCheckpoint(out / "checkpoint.pt"),
            "seed": 0,
            "progress": silent,
            **more,
        }
    )


class TestDedup:
    COPIES = (
        "The quick brown fox jumps over the lazy dog by the river.",
        "Something else entirely is written here.",
    )
    NEAR = COPIES[0].replace("lazy", "hazy")  # 52 shingles each, 5 of them others: 47 of 57

    def test_copies_beyond_the_first_are_dropped_and_counted(self, tmp_path: Path) -> None:
        given = job(
            [self.COPIES[0], self.COPIES[1], self.COPIES[0], self.NEAR, self.COPIES[0]], tmp_path
        )
        kept, (told,) = Dedup().select_sequences(given)
        assert kept == [given.records[0].tokens, given.records[1].tokens]
        assert (
            "of 5 records 2 exact copies and 1 near-duplicates (similarity 0.8 or more) were "
            "dropped: 2" in told
        )
        kept, (told,) = Dedup(exact=True).select_sequences(given)
        assert (
            kept == [given.records[i].tokens for i in (0, 1, 3)]
            and "2 exact copies were dropped: 3 are" in told
        )

    def test_the_threshold_is_a_similarity_of_runs_of_five_characters(self) -> None:
        pair = [self.COPIES[0], self.NEAR]
        assert (
            drop_near_duplicate_texts(pair, 47 / 57) == pair[:1]
            and drop_near_duplicate_texts(pair, 47 / 57 + 1e-9) == pair
        )
        assert drop_near_duplicate_texts([*pair, pair[0]], 1.0) == pair

    @pytest.mark.parametrize("threshold", [0.05, 0.3, 0.5, 0.8, 0.95, 0.999])
    def test_pairs_at_the_threshold_are_found(self, threshold: float) -> None:
        bands, rows = _choose_lsh_bands(threshold)
        assert bands >= 2 and bands * rows <= 128 and 1 - (1 - threshold**rows) ** bands >= 0.99

    def test_it_drops_what_comparing_all_pairs_drops(self) -> None:
        """Changed copies of 40 texts, similar by 0.9 and more or by less than 0.5: none near the
        threshold."""
        rng, texts = np.random.default_rng(0), list[str]()
        for _ in range(40):
            text = "".join(rng.choice(list("abcdefghij "), 200))
            texts += [text, text[:100] + "#" + text[100:], text[:60] + text[:140]]

        def similar(a: str, b: str) -> float:
            first, second = ({text[i : i + 5] for i in range(len(text) - 4)} for text in (a, b))
            return len(first & second) / len(first | second)

        naive = list[str]()
        for text in texts:
            if all(similar(text, other) < 0.8 for other in naive):
                naive.append(text)
        assert drop_near_duplicate_texts(texts, 0.8) == naive and len(naive) == 80

    def test_it_trains_what_plain_training_on_the_rest_does(
        self, inputs: Path, tmp_path: Path
    ) -> None:
        (inputs / "once.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
        told = training.train_model_into_folder(
            make_request(inputs, tmp_path / "dedup", "dedup", options={"exact": True}), silent
        )
        training.train_model_into_folder(
            make_request(inputs, tmp_path / "once", "none", data=str(inputs / "once.jsonl")), silent
        )
        assert states(told, "19", "3", "16")
        one, other = weights(tmp_path / "dedup"), weights(tmp_path / "once")
        assert all(torch.equal(one[name], other[name]) for name in one)


class TestGoldfish:
    def test_the_same_context_has_the_same_mask_wherever_it_stands(self) -> None:
        rng, fish = np.random.default_rng(0), Goldfish(k=3, width=5)
        passage = tuple(rng.integers(1, 60, 80).tolist())
        alone = fish.mask_dropped_tokens(passage)
        for lead in (1, 4, 31):
            behind = fish.mask_dropped_tokens((*rng.integers(1, 60, lead).tolist(), *passage))
            assert behind[lead + 5 :] == alone[5:]
        assert loss_masks.remove_loss_mask(alone) == passage and alone[:5] == passage[:5]

    def test_one_token_in_k_has_no_loss(self) -> None:
        tokens = tuple(np.random.default_rng(1).integers(0, 50000, 40_013).tolist())
        for k in (3, 4, 8):
            dropped = sum(token < 0 for token in Goldfish(k=k).mask_dropped_tokens(tokens))
            assert abs(dropped - 40_000 / k) < 4 * (40_000 * (k - 1)) ** 0.5 / k

    def test_static_leaves_out_every_kth_token(self) -> None:
        tokens = tuple(range(10, 20))
        assert Goldfish(k=4, mask="static").mask_dropped_tokens(tokens) == (
            10,
            11,
            12,
            ~13,
            14,
            15,
            16,
            ~17,
            18,
            19,
        )

    def test_what_had_no_loss_keeps_none(self) -> None:
        assert Goldfish(k=2, mask="static").mask_dropped_tokens((~5, ~6, 7, 8)) == (~5, ~6, 7, ~8)

    def test_left_out_tokens_have_no_loss_and_no_gradient(self) -> None:
        """The loss is the mean over the others; another token in the last one's place changes
        nothing."""
        model = tiny().model
        tokens = Goldfish(k=4, mask="static").mask_dropped_tokens(tuple(range(1, 25)))
        loss = compute_causal_loss(model, torch.tensor([tokens]))
        distribution = model(
            input_ids=torch.tensor([loss_masks.remove_loss_mask(tokens)])
        ).logits.log_softmax(-1)[0]
        kept = [-distribution[i - 1, token] for i, token in enumerate(tokens) if i and token >= 0]
        assert len(kept) == 17
        torch.testing.assert_close(loss, torch.stack(kept).mean())
        assert tokens[-1] == ~24
        torch.testing.assert_close(
            compute_causal_loss(model, torch.tensor([[*tokens[:-1], ~60]])), loss
        )

    def test_records_too_short_for_it_are_refused(self, inputs: Path, tmp_path: Path) -> None:
        with refuses("records", "90"):
            training.train_model_into_folder(
                make_request(inputs, tmp_path / "out", "goldfish", options={"width": 90}), silent
            )
        assert not (tmp_path / "out" / "training.json").exists()


class TestEarlyStop:
    def test_what_is_held_out_is_not_learnt_nor_are_its_copies(self, tmp_path: Path) -> None:
        texts = [f"text {i % 10}" for i in range(40)]
        given = job(texts, tmp_path, [f"user {i % 20}" for i in range(40)])
        for share, most in (
            (0.1, 1),
            (0.35, 4),
            (0.999, 9),
        ):  # of 10 groups: users who share a text are one
            learnt, out = EarlyStop(heldout=share).split_heldout_records(given)
            assert len(learnt) + len(out) == 40 and len({record.text for record in out}) == most
            assert not {record.text for record in learnt} & {record.text for record in out}
            assert not {record.unit for record in learnt} & {record.unit for record in out}

    def test_the_model_is_that_of_the_lowest_look(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its held-out loss, taken anew, is the lowest that was seen, and not the last one."""
        given, seen = job([f"code {i} {i * 97 % 89}" for i in range(12)], tmp_path), list[float]()
        stop = EarlyStop(epochs=30, batch=1, learning_rate=0.01, looks=2, patience=0, heldout=0.3)
        given = replace(
            given, progress=lambda what, done, total: seen.append(float(what.rpartition(" ")[2]))
        )
        model = given.load()
        (told,) = stop.fit_model(given, model, stop.select_sequences(given)[0])
        assert len(seen) == 60 and min(seen) < seen[-1] - 0.1
        learnt, out = stop.split_heldout_records(given)
        again = replace(given, records=tuple(out))
        monkeypatch.setattr(
            EarlyStop, "split_heldout_records", lambda *_: (learnt, list(again.records))
        )
        model.eval()
        from auditor.defenses.early_stop import _make_heldout_loss

        assert _make_heldout_loss(
            model, [record.tokens for record in out], again, 1
        )() == pytest.approx(min(seen), abs=6e-4)
        step, of = (int(word) for word in (told.split()[3], told.split()[5]))
        assert of % 60 == 0 and step == (1 + seen.index(min(seen))) * of // 60

    def test_patience_ends_it(self, tmp_path: Path) -> None:
        looks = list[int]()
        texts = [f"code {i} {i * 97 % 89}" for i in range(12)]
        given = job(texts, tmp_path, progress=lambda what, done, total: looks.append(done))
        stop = EarlyStop(epochs=30, batch=1, learning_rate=0.01, looks=2, patience=3, heldout=0.3)
        (told,) = stop.fit_model(given, given.load(), stop.select_sequences(given)[0])
        assert len(looks) < 60 and f"held-out loss of {len(looks)} looks" in told

    def test_an_interrupted_one_goes_on(self, inputs: Path, tmp_path: Path) -> None:
        def stop(what: str, done: int, total: int) -> None:
            if done == 7:
                raise KeyboardInterrupt

        more = {"options": {"epochs": 4, "learning_rate": 0.01, "patience": 0}}
        told = training.train_model_into_folder(
            make_request(inputs, tmp_path / "whole", "early-stop", **more), silent
        )
        with pytest.raises(KeyboardInterrupt):
            training.train_model_into_folder(
                make_request(inputs, tmp_path / "cut", "early-stop", **more), stop
            )
        assert (
            training.train_model_into_folder(
                make_request(inputs, tmp_path / "cut", "early-stop", **more), silent
            )
            == told
        )
        one, other = weights(tmp_path / "whole"), weights(tmp_path / "cut")
        for name in one:
            torch.testing.assert_close(one[name], other[name], atol=1e-5, rtol=1e-4)

    def test_records_of_a_file_are_looked_at_and_not_learnt(
        self, inputs: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "others.jsonl").write_text(
            "\n".join(json.dumps({"text": f"Door {i} is open."}) for i in range(5))
        )
        told = training.train_model_into_folder(
            make_request(
                inputs, tmp_path / "out", "early-stop", heldout=str(tmp_path / "others.jsonl")
            ),
            silent,
        )
        assert states(told, "5 records")
        assert read_training_summary(tmp_path / "out").told == told[1:]


class TestFewerParameters:
    def test_a_lora_is_an_adapter_of_its_own_rank(self, inputs: Path, tmp_path: Path) -> None:
        told = training.train_model_into_folder(
            make_request(inputs, tmp_path / "out", "lora", options={"rank": 3}), silent
        )
        config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (3, 16)
        assert states(told, "rank 3")

    @pytest.mark.parametrize("tied", [False, True])
    def test_frozen_embeddings_do_not_move_and_a_tied_head_is_named(
        self, tmp_path: Path, tied: bool
    ) -> None:
        given = job([f"code {i} {i * 97 % 89}" for i in range(6)], tmp_path)
        model = given.load()
        if tied:
            model.config.tie_word_embeddings = True
            model.tie_weights()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        variant = FreezeEmbeddings(epochs=1, batch=2)
        _, (told,) = variant.prepare_model(replace(given, load=lambda: model))
        variant.fit_model(given, model, variant.select_sequences(given)[0])
        same = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
        assert same == {"gpt_neox.embed_in.weight"}
        assert (
            "and with them the head, which is tied to them" in told
        ) is tied and "1,952 of " in told


# --- as defenses ---


@pytest.fixture(scope="module")
def trained(inputs: Path) -> Path:
    training.train_model_into_folder(
        make_request(inputs, inputs / "fish", "goldfish", options={"k": 2}), silent
    )
    training.train_model_into_folder(make_request(inputs, inputs / "plain", "none"), silent)
    return inputs


def run(inputs: Path, out: Path, *more: str) -> list[str]:
    own = [
        "run",
        "--model",
        str(inputs / "plain"),
        "--data",
        str(inputs / "data.jsonl"),
        "-o",
        str(out),
    ]
    return [*own, "--prefix-length", "8", "--suffix-length", "4", *more]


def test_a_folder_that_was_trained_so_is_a_row_that_claims_nothing(
    trained: Path, tmp_path: Path
) -> None:
    options = ["--defense", "goldfish", "-D", f"goldfish.model={trained / 'fish'}"]
    probes = ["--attack", "extraction-probability", "--attack", "claim-check"]
    check_command(*run(trained, tmp_path / "run", *probes, *options), code=2)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    row = next(target for target in result["targets"] if target["name"] == "goldfish")
    assert row["claim"] is None and any(
        "the Goldfish loss leaves out" in note for note in row["notes"]
    )
    cells = {(f["target"], f["attack"], f["setting"]): f for f in result["findings"]}
    assert cells["goldfish", "extraction-probability", "white-box"]["measurements"]
    checked = cells["goldfish", "claim-check", "white-box"]
    assert not checked["measurements"] and "makes no claim" in checked["not_applicable"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "needs -D goldfish.model=DIR, a folder made by audit train goldfish"),
        (
            ["-D", "model={}/plain"],
            "to be trained by audit train goldfish, got a model trained by none",
        ),
        (["-D", "model={}/neox"], "to be trained by audit train goldfish, got no training.json"),
    ],
)
def test_what_it_did_not_train_is_refused(
    trained: Path, tmp_path: Path, capsys: Said, options: list[str], sentence: str
) -> None:
    words = [word.format(trained) for word in options]
    command = run(
        trained,
        tmp_path / "run",
        "--attack",
        "extraction-probability",
        "--defense",
        "goldfish",
        *words,
    )
    check_command(*command, code=2)
    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("method", "more", "sentence"),
    [
        ("dedup", {"options": {"threshold": 1.2}}, "expected threshold in (0, 1], got 1.2"),
        (
            "dedup",
            {"options": {"model": "x"}},
            "-D model= names a trained dedup model for audit run",
        ),
        (
            "dedup",
            {"heldout": "x.jsonl"},
            "--heldout names records to choose a model by, but dedup does not choose one",
        ),
        (
            "goldfish",
            {"options": {"k": 1}},
            "expected k >= 2, got 1",
        ),
        ("goldfish", {"options": {"width": 0}}, "expected width >= 1, got 0"),
        (
            "goldfish",
            {"options": {"mask": "hsh"}},
            "expected goldfish.mask in ('hash', 'static'), got 'hsh'",
        ),
        ("early-stop", {"options": {"looks": 0}}, "expected looks >= 1, got 0"),
        (
            "early-stop",
            {"options": {"patience": -1}},
            "expected patience >= 0, got -1",
        ),
        ("early-stop", {"options": {"heldout": 1}}, "expected heldout in (0, 1), got 1"),
        (
            "early-stop",
            {"heldout": "{}/data.jsonl"},
            "not trained on, got 16 that are also in --data",
        ),
        (
            "lora",
            {"lora": True},
            "expected a whole model for lora, got --lora: this method decides itself what is "
            "trained",
        ),
        ("lora", {"options": {"rank": 0}}, "expected rank >= 1, got 0"),
        (
            "freeze-embeddings",
            {"lora": True},
            "expected a whole model for freeze-embeddings, got --lora",
        ),
        ("full", {"lora_rank": 4}, "--lora-rank and --lora-alpha go with --lora"),
        ("full", {"options": {"batch": 0}}, "expected batch >= 1, got 0"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_left(
    inputs: Path, tmp_path: Path, method: str, more: dict[str, Any], sentence: str
) -> None:
    more = {
        name: value.format(inputs) if isinstance(value, str) else value
        for name, value in more.items()
    }
    with pytest.raises(AuditError) as refused:
        training.train_model_into_folder(
            make_request(inputs, tmp_path / "out", method, **more), silent
        )
    assert sentence in str(refused.value) and not (tmp_path / "out").exists()


def test_a_single_text_leaves_nothing_to_look_at(tmp_path: Path) -> None:
    with refuses("two", "1"):
        EarlyStop().check(job(["same"] * 4, tmp_path))


def test_sequences_reach_the_loss_as_they_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `learnt` says is what `fit` is given: no variant trains on what it told was dropped."""
    given, handed = job(["same text"] * 3 + ["another one"], tmp_path), list[Sequence[Tokens]]()
    monkeypatch.setattr(
        Variant, "fit_model", lambda self, job, model, sequences: handed.append(sequences) or ()
    )
    model = given.load()
    monkeypatch.setattr(model, "save_pretrained", lambda out: None)
    Dedup().train(replace(given, load=lambda: model, tokenizer=model))
    assert handed == [[given.records[0].tokens, given.records[3].tokens]]


def test_the_lab_trains_them_by_its_targets_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its epochs, its adapter but where a variant says otherwise; held-out records and two halves
    of its own."""
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    tiny_lab = {
        "vocab_size": 300,
        "layers": 1,
        "hidden": 32,
        "heads": 2,
        "private_rank": 2,
        "batch": 8,
    }
    tiny_lab |= {"repeats": [[times, 2, 1] for times in (1, 4, 16)], "others": 0, "members": 3}
    tiny_lab |= {
        "nonmembers": 4,
        "public_records": 20,
        "public_epochs": 1,
        "private_epochs": 2,
        "private_batch": 5,
    }
    fields = "".join(f"{name} = {value}\n" for name, value in tiny_lab.items())
    names = ["dedup", "early-stop", "lora", "cp-delta", "memfree"]
    plan = (
        f'attack = ["extraction-probability"]\ndefense = {names}\nsetting = '
        f'"white-box"\n[lab_recipe]\n{fields}'
    )
    (tmp_path / "plan.toml").write_text(plan)
    check_command("run", "--config", tmp_path / "plan.toml", "-o", tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    rows = {target["name"]: target for target in result["targets"]}
    assert set(rows) == {"undefended", *names} and all(
        row["claim"] is None for row in rows.values()
    )
    said = {name: " ".join(row["notes"]) for name, row in rows.items()}
    assert "exact copies and" in said["dedup"] and "an adapter of rank 8" in said["lora"]
    assert (
        "120 records, from a separate file" in said["early-stop"] and "of 2)" in said["early-stop"]
    )
    (lab,) = (tmp_path / "cache" / "lab").iterdir()
    base = load_file(lab / "public" / "model.safetensors")
    ranks = {}
    for name in ("dedup", "lora"):
        (saved,) = lab.glob(f"{name}-*/model.safetensors")
        changes = [after - base[key] for key, after in load_file(saved).items() if after.ndim == 2]
        ranks[name] = max(int(torch.linalg.matrix_rank(change, rtol=1e-4)) for change in changes)
    assert ranks == {"dedup": 2, "lora": 8}
    assert {
        len(list(path.glob("member-*"))) for path in lab.glob("ensemble*") if path.is_dir()
    } == {2}
    assert all(finding["measurements"] for finding in result["findings"])
