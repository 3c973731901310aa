"""`audit train pmixed`: what it writes is what `--defense pmixed` serves; members side by side,
each trained once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from auditor.defenses.pmixed_training import PMixedTrainer
from auditor.models.loading import load_causal_lm
from auditor.models.lora import LoraEnsemble, load_lora_ensemble
from auditor.models.shards import (
    find_control_adapter,
    read_ensemble_metadata,
    read_shard_record_list,
    record_digests,
)
from auditor.runs import training
from auditor.runs.training import TrainingRequest
from auditor.training import members as members_module
from auditor.training.members import MemberToTrain
from tests.conftest import check_command, refuses, save_tiny

Patch = pytest.MonkeyPatch
# Record 0 stands there three times, twice with user 0 and once with user 1, who thereby belong
# together.
TEXTS = [f"The code of door {i} is {i}{i}{i}." for i in range(8)] + [
    "The code of door 0 is 000."
] * 2
USERS = [f"user {i % 4}" for i in range(8)] + ["user 0", "user 1"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """neox/, gpt2/: tiny models with a tokenizer; data.jsonl; pairs.jsonl, to attack."""
    folder = tmp_path_factory.mktemp("inputs")
    for kind in ("neox", "gpt2"):
        save_tiny(folder / kind, kind)
    rows = [{"text": text, "who": who} for text, who in zip(TEXTS, USERS, strict=True)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = [{"prefix": f"The code of door {i} is", "suffix": f" {i}{i}{i}."} for i in range(8)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return folder


def make_request(inputs: Path, out: Path, **more: Any) -> TrainingRequest:
    options = {
        "members": 3,
        "epochs": 2,
        "batch": 2,
        "learning_rate": 0.01,
        **more.pop("options", {}),
    }
    return TrainingRequest(
        **{
            "method": "pmixed",
            "model": str(inputs / "neox"),
            "data": str(inputs / "data.jsonl"),
            "out": out,
            "block": 32,
            "options": options,
            **more,
        }
    )


def silent(what: str, done: int, total: int) -> None:
    pass


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "adapter_model.safetensors"))


def test_defaults_are_the_papers() -> None:
    """Table 1 and Table 2 (WikiText-103)."""
    trainer = PMixedTrainer()
    assert (trainer.members, trainer.epochs, trainer.learning_rate) == (80, 15, 2e-4)
    assert (trainer.rank, trainer.alpha, trainer.layers) == (4, 32, "attention")


@pytest.mark.parametrize("kind", ["neox", "gpt2"])
def test_train_serve_and_attack(
    inputs: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, base = tmp_path / "ensemble", str(inputs / kind)
    options = [
        item
        for o in ("members=3", "epochs=2", "batch=2", "learning_rate=0.01")
        for item in ("-D", o)
    ]
    data = ["--data", str(inputs / "data.jsonl"), "--block", "32"]
    check_command("train", "pmixed", "--model", base, *data, *options, "-o", out)
    assert (
        "each record is whole in one of 3 shards: the unit of protection is the shard"
        in capsys.readouterr().out
    )
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == [
        "member-000",
        "member-001",
        "member-002",
    ]
    ensemble = load_lora_ensemble(out, load_causal_lm(base))
    assert isinstance(ensemble, LoraEnsemble) and ensemble.unit == "record"
    context = torch.tensor([[40, 41, 42]])
    distributions = ensemble.log_probs(context.repeat(4, 1), torch.arange(4), 1)[:, 0]
    filled = [0] + [1 + i for i, names in enumerate(ensemble.shards or []) if names]
    # each learnt something
    assert all(float((distributions[i] - distributions[0]).abs().max()) > 1e-3 for i in filled[1:])
    run = [
        "run",
        "--model",
        base,
        "--public",
        base,
        "--data",
        str(inputs / "pairs.jsonl"),
        "-A",
        "samples=2",
    ]
    attack = [
        "--attack",
        "ethicist",
        "-A",
        "tune_on=none",
        "-A",
        "prompt_length=1",
        "--attack",
        "claim-check",
    ]
    served = ["--defense", "pmixed", "-D", f"ensemble={out}", "-D", "q=0.5", "-D", "queries=50"]
    check_command(*run, *attack, *served, "-o", tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    claim = next(target["claim"] for target in result["targets"] if target["name"] == "pmixed")
    assert claim["unit"] == "shard of whole records"
    worst = [
        f for f in result["findings"] if (f["attack"], f["setting"]) == ("claim-check", "white-box")
    ]
    checked = next(finding for finding in worst if finding["target"] == "pmixed")
    assert checked["measurements"][0]["value"] == 0
    assert not any("do not say what they were trained on" in note for note in checked["notes"])
    assert "shard of whole records" in (tmp_path / "run" / "report.md").read_text()


def test_copies_and_users_lie_in_one_shard(inputs: Path, tmp_path: Path) -> None:
    training.train_model_into_folder(
        make_request(inputs, tmp_path / "by-record", options={"members": 4}), silent
    )
    told = training.train_model_into_folder(
        make_request(inputs, tmp_path / "by-user", user_column="who", options={"members": 3}),
        silent,
    )
    assert "users who share a record are protected together: 4 are 3 groups" in told
    assert any("empty" in line for line in told) == ([] in shards(tmp_path / "by-user", 3))
    for name, unit, members in (("by-record", "record", 4), ("by-user", "user", 3)):
        assert read_ensemble_metadata(tmp_path / name) == (unit, members)
        held = Counter(record for names in shards(tmp_path / name, members) for record in names)
        assert held == Counter(record_digests(TEXTS))  # each once, in one shard
    for names in shards(tmp_path / "by-user", 3):
        users = {
            user
            for text, user in zip(TEXTS, USERS, strict=True)
            if record_digests([text])[0] in names
        }
        others = {
            user
            for text, user in zip(TEXTS, USERS, strict=True)
            if record_digests([text])[0] not in names
        }
        assert not users & others


def shards(ensemble: Path, members: int) -> list[list[str]]:
    paths = [ensemble / f"member-{index:03d}" / "shard.json" for index in range(members)]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in paths)
    return [json.loads(path.read_text())["records"] for path in paths]


@pytest.mark.parametrize("together", [1, 3])
def test_a_killed_run_keeps_what_is_finished(
    inputs: Path, tmp_path: Path, monkeypatch: Patch, together: int
) -> None:
    """And ends as it would have, however many adapters are trained at once from then on."""
    whole, cut, options = tmp_path / "whole", tmp_path / "cut", {"members": 2, "control": True}
    training.train_model_into_folder(make_request(inputs, whole, options=options), silent)

    def kill(what: str, done: int, total: int) -> None:
        assert (what, total) == ("3 adapters", 22)  # steps
        if done == 21:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.train_model_into_folder(
            make_request(inputs, cut, options={**options, "together": together}), kill
        )
    finished = {path.name for path in cut.iterdir() if path.is_dir()}
    assert {"member-000"} < finished < {"whole", "member-000", "member-001"}
    if "member-001" not in finished:
        with refuses("2", "1", "ensemble.json"):
            load_lora_ensemble(cut, load_causal_lm(str(inputs / "neox")))
    begun: list[str] = []
    real = members_module._MemberTraining

    def begins(member: MemberToTrain, *more: Any) -> Any:
        begun.append(member.folder.name)
        return real(member, *more)

    monkeypatch.setattr(members_module, "_MemberTraining", begins)
    training.train_model_into_folder(
        make_request(inputs, cut, options={**options, "together": 4 - together}), silent
    )
    assert begun == [name for name in ("whole", "member-000", "member-001") if name not in finished]
    for name in ("whole", "member-000", "member-001"):
        first, second = weights(whole / name), weights(cut / name)
        assert first.keys() == second.keys()
        for key in first:
            torch.testing.assert_close(first[key], second[key], atol=1e-5, rtol=1e-4)
    with refuses("epochs", "2", "3"):
        training.train_model_into_folder(
            make_request(inputs, cut, options={**options, "epochs": 3}), silent
        )
    assert (
        "already trained"
        in training.train_model_into_folder(make_request(inputs, cut, options=options), silent)[0]
    )


@pytest.mark.parametrize("kind", ["neox", "gpt2"])
def test_the_control_is_one_adapter_on_all_records(inputs: Path, tmp_path: Path, kind: str) -> None:
    """Beside members that it changes nothing of; it is none of them."""
    plain, controlled, base = tmp_path / "plain", tmp_path / "controlled", str(inputs / kind)
    told = training.train_model_into_folder(make_request(inputs, plain, model=base), silent)
    training.train_model_into_folder(
        make_request(inputs, controlled, model=base, options={"control": True}), silent
    )
    assert "adapters were trained 3 at a time" in told
    assert any("dropout was off" in line for line in told) == (kind == "gpt2")
    assert find_control_adapter(plain) is None
    control = find_control_adapter(controlled)
    assert control == controlled / "whole"
    assert read_shard_record_list(control) == record_digests(TEXTS)
    public = load_causal_lm(base)
    ensemble = load_lora_ensemble(controlled, public)
    assert ensemble.size == 3
    for name in ("member-000", "member-001", "member-002"):
        for key, found in weights(plain / name).items():
            torch.testing.assert_close(found, weights(controlled / name)[key], atol=1e-5, rtol=1e-4)
    context = torch.tensor([public.tokenizer("The code of door 3 is")["input_ids"]])  # type: ignore[misc]
    learnt = load_causal_lm(str(control)).log_probs(context, 1)
    assert float((learnt - public.log_probs(context, 1)).abs().max()) > 0.01


def test_members_differ_from_each_other_by_more_than_their_records(
    inputs: Path, tmp_path: Path
) -> None:
    training.train_model_into_folder(make_request(inputs, tmp_path / "out"), silent)
    first, second = (weights(tmp_path / "out" / f"member-00{i}") for i in (0, 1))
    assert any(not torch.equal(first[key], second[key]) for key in first if "lora_A" in key)


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        ({"options": {"members": 9}}, ("members", "9", "8")),
        ({"options": {"members": 4}, "user_column": "who"}, ("members", "4", "3")),
        ({"options": {"members": 0}}, ("members", "1", "0")),
        ({"options": {"together": -1}}, ("together", "0", "-1")),
        ({"options": {"learning_rate": 0}}, ("learning_rate", "0")),
        ({"options": {"layers": "some"}}, ("pmixed.layers", "'attention'", "'all'", "'some'")),
        ({"lora": True}, ("pmixed", "--lora")),
    ],
    ids=[
        "fewer records than members",
        "fewer users than members",
        "members",
        "together",
        "rate",
        "layers",
        "lora",
    ],
)
def test_a_refusal_leaves_nothing_behind(
    inputs: Path, tmp_path: Path, more: dict[str, Any], facts: tuple[str, ...]
) -> None:
    with refuses(*facts):
        training.train_model_into_folder(make_request(inputs, tmp_path / "out", **more), silent)
    assert not (tmp_path / "out").exists()


def test_half_written_members_are_not_served(inputs: Path, tmp_path: Path) -> None:
    training.train_model_into_folder(
        make_request(inputs, tmp_path / "out", options={"members": 2}), silent
    )
    (tmp_path / "out" / "member-001").rename(tmp_path / "out" / ".member-001")
    (tmp_path / "out" / "ensemble.json").unlink()
    assert load_lora_ensemble(tmp_path / "out", load_causal_lm(str(inputs / "neox"))).size == 1


@pytest.mark.parametrize(
    "text",
    ["{", '{"unit": "cat", "members": 2}', '{"unit": "user"}', '{"unit": "user", "members": "2"}'],
)
def test_a_broken_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "ensemble.json").write_text(text)
    with refuses("ensemble.json"):
        read_ensemble_metadata(tmp_path)


def test_members_of_another_base_are_refused(inputs: Path, tmp_path: Path) -> None:
    training.train_model_into_folder(make_request(inputs, tmp_path / "out"), silent)
    with refuses("--public", "member-000"):
        load_lora_ensemble(tmp_path / "out", load_causal_lm(str(inputs / "gpt2")))


def test_a_member_alone_is_a_peft_model(inputs: Path, tmp_path: Path) -> None:
    """Nothing of ours is needed to read one."""
    training.train_model_into_folder(make_request(inputs, tmp_path / "out"), silent)
    base = load_causal_lm(str(inputs / "neox")).model
    assert (
        PeftModel.from_pretrained(base, str(tmp_path / "out" / "member-000"))
        .peft_config["default"]
        .lora_alpha
        == 32
    )
