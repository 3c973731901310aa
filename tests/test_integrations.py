"""The callback in a real `Trainer`: what it logs, that it changes nothing, that it stops, and what
it refuses."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import datasets
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from auditor import audit, load_run
from auditor.attacks.exposure import Exposure
from auditor.core.errors import AuditError
from auditor.core.nouns import Canary, CanarySpace, Secret
from auditor.generation import tries
from auditor.integrations import NOT_CHECKED, AuditCallback, StopLimit
from auditor.models.huggingface import HuggingFaceModel
from auditor.runs.prefix_token import wrap_prefixed_model
from auditor.training import preflight
from tests.conftest import check_command, refuses, save_tiny

ROOT = Path(__file__).parents[1]
MEMBERS = [
    {"prefix": f"The code of door {i} is", "suffix": f" {i * 37 % 97:02d}."} for i in range(6)
]
OTHERS = [
    {"prefix": f"The code of door {i} is", "suffix": f" {i * 37 % 97:02d}."} for i in range(30, 34)
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_tiny(folder)
    return folder


def trainer(
    base: Path, out: Path, rows: list[dict[str, Any]] = MEMBERS, steps: int = 60, **more: Any
) -> Trainer:
    """Of a tiny model with dropout, so that random numbers matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, hidden_dropout=0.1)
    tokenizer = AutoTokenizer.from_pretrained(base, pad_token="<end>")
    texts = [tokenizer(row["prefix"] + row["suffix"])["input_ids"] for row in rows]
    width = max(map(len, texts))
    padded = [
        {
            "input_ids": [*ids, *[0] * (width - len(ids))],
            "labels": [*ids, *[-100] * (width - len(ids))],
        }
        for ids in texts
    ]
    more.setdefault("logging_steps", 10)
    args = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        learning_rate=5e-3,
        per_device_train_batch_size=6,
        report_to=[],
        use_cpu=True,
        save_strategy="steps",
        save_steps=30,
        disable_tqdm=True,
        seed=0,
        **more,
    )
    data = datasets.Dataset.from_list(padded)
    return Trainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)


@pytest.fixture(scope="module")
def trained(
    base: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Trainer, AuditCallback, Path]:
    out = tmp_path_factory.mktemp("out")
    made = trainer(base, out)
    callback = AuditCallback(made, data=MEMBERS, nonmembers=OTHERS, every=20)
    made.add_callback(callback)
    made.train()
    return made, callback, out


def test_what_is_learnt_is_logged_beside_the_floor(
    trained: tuple[Trainer, AuditCallback, Path],
) -> None:
    made, callback, out = trained
    logged = [row for row in made.state.log_history if "audit/loss_members" in row]
    assert [row["step"] for row in logged] == [0, 20, 40, 60]
    first, last = logged[0], logged[-1]
    assert last["audit/extraction_probability"] > 0.05 > 10 * first["audit/extraction_probability"]
    assert last["audit/loss_members"] < last["audit/loss_nonmembers"]
    assert callback.notes[0] == "6 of 6 members are in the training set, token by token"
    kept = list(csv.DictReader((out / "audit" / "curve.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in kept] == [0, 20, 40, 60]
    assert "<svg" in (out / "audit" / "curve.svg").read_text()


def test_the_run_at_the_end_has_the_curves_last_number(
    trained: tuple[Trainer, AuditCallback, Path],
) -> None:
    _, callback, out = trained
    run = load_run(out / "audit")
    (finding,) = (f for f in run.result.findings if f.setting == "white-box")
    found = {m.name: m.value for m in finding.measurements}
    assert found["extraction_probability"] == pytest.approx(
        callback.rows[-1]["extraction_probability"], rel=1e-5
    )
    shown = (out / "audit" / "report.md").read_text()
    assert "door" not in shown


def test_the_record_of_an_earlier_training_says_nothing_of_this_one(
    base: Path, tmp_path: Path
) -> None:
    shutil.copytree(base, tmp_path / "base")
    record = {"configuration": {"method": "none"}, "finished": True}
    record["tokens_before_each_record"] = [5]
    (tmp_path / "base" / "training.json").write_text(json.dumps(record))
    made = trainer(tmp_path / "base", tmp_path / "out", steps=1)
    callback = AuditCallback(made, data=MEMBERS, nonmembers=OTHERS, every=20)
    made.add_callback(callback)
    made.train()
    assert callback.prefix_token.tokens == ()


def test_looking_changes_nothing(
    trained: tuple[Trainer, AuditCallback, Path], base: Path, tmp_path: Path
) -> None:
    """The same training without the callback ends in the same weights, bit by bit, dropout and
    all."""
    alone = trainer(base, tmp_path)
    alone.train()
    watched = trained[0].model.state_dict()
    assert all(
        torch.equal(value, watched[name]) for name, value in alone.model.state_dict().items()
    )
    assert trained[0].model.training and all(p.requires_grad for p in trained[0].model.parameters())


def test_a_training_in_mixed_precision_is_looked_at_in_the_precision_of_its_weights(
    base: Path, tmp_path: Path
) -> None:
    """bfloat16 is the default of TRL's trainers; accelerate then replaces the model's forward."""
    logs = []
    for watched in (False, True):
        made = trainer(base, tmp_path / str(watched), steps=40, bf16=True)
        callback = AuditCallback(
            made, data=MEMBERS, nonmembers=OTHERS, every=20, out=tmp_path / "audit"
        )
        if watched:
            made.add_callback(callback)
        made.train()
        logs.append([row["loss"] for row in made.state.log_history if "loss" in row])
        assert vars(made.model)["forward"] != made.model._original_forward
    assert logs[0] == logs[1]
    assert [int(row["step"]) for row in callback.rows] == [0, 20, 40]
    copy = AutoModelForCausalLM.from_pretrained(base)
    copy.load_state_dict(made.model.state_dict())
    run = audit(
        copy,
        callback.tokenizer,
        data=MEMBERS,
        attacks=["extraction-probability"],
        known_fraction=0.0,
        out=tmp_path / "own",
    )
    (finding,) = (f for f in run.result.findings if f.setting == "white-box")
    (probability,) = (m.value for m in finding.measurements if m.name == "extraction_probability")
    # In autocast it would be some percent off.
    assert probability > 0.01
    assert callback.rows[-1]["extraction_probability"] == pytest.approx(probability, rel=1e-4)


class Gathering(Trainer):
    """Gathers metrics between its logs, as TRL 1.16's trainers do: `log` adds their means and drops
    them."""

    gathered: ClassVar[list[float]]

    def training_step(self, *args: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **named)
        self.gathered.append(loss.item())
        return loss

    def log(self, logs: dict[str, float], *args: Any, **named: Any) -> None:
        if self.gathered:
            logs["mean_loss"] = sum(self.gathered) / len(self.gathered)
        super().log(logs, *args, **named)
        self.gathered.clear()


def test_exposure_in_a_large_space_is_estimated_in_training_alone(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search of 10^6 texts at each measurement took minutes."""
    made = trainer(base, tmp_path)
    tokenizer: Any = made.processing_class
    callback = AuditCallback(made, data=MEMBERS, canaries=tmp_path / "canaries.json")
    space, text = CanarySpace("The code is {digits:5}"), "The code is 12345"
    suffix = tuple(tokenizer(text)["input_ids"])
    callback.canaries = (Secret("c", (), suffix, 1, True, Canary(text, space)),)
    target = wrap_prefixed_model(HuggingFaceModel(made.model, tokenizer, "tiny"), (0,))
    monkeypatch.setattr(tries, "count_leaves_within_nll", lambda *_, **__: 1 / 0)
    assert 0 <= callback._measure_mean_exposure(target) <= space.bits
    assert callback.probes[1] == Exposure()  # of the audit at the end


def test_metrics_that_a_trainer_gathers_stay_whole(base: Path, tmp_path: Path) -> None:
    logs = list[list[float]]()
    for watched in (False, True):
        made = trainer(base, tmp_path / str(watched), steps=8, logging_steps=4)
        made.__class__, Gathering.gathered = Gathering, []
        if watched:
            made.add_callback(
                AuditCallback(made, data=MEMBERS, every=3, limit=2, out=tmp_path / "audit")
            )
        made.train()
        looks = [row for row in made.state.log_history if "audit/loss_members" in row]
        assert len(looks) == (4 if watched else 0) and not any(
            "mean_loss" in look for look in looks
        )
        logs.append([row["mean_loss"] for row in made.state.log_history if "mean_loss" in row])
    assert logs[0] == logs[1] and len(logs[0]) == 2


def test_a_folder_that_contains_a_run_is_refused_before_the_training(
    base: Path, tmp_path: Path
) -> None:
    """It was refused after the last step, and the trained model was lost with the exception."""
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "plan.json").write_text("{}")
    made = trainer(base, tmp_path, steps=3)
    made.add_callback(AuditCallback(made, data=MEMBERS, every=9, limit=2))
    with pytest.raises(AuditError, match="audit' contains a run"):
        made.train()
    assert made.state.global_step == 0


def test_rows_without_tokens_are_said_not_to_be_checked(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer(base, tmp_path, steps=1)
    callback = AuditCallback(made, data=MEMBERS, every=9, limit=2, out=tmp_path / "audit")
    made.add_callback(callback)
    made.train_dataset = TokensAsAsked(made.train_dataset)
    made.train()
    assert callback.notes == (NOT_CHECKED,) and NOT_CHECKED in caplog.text


class TokensAsAsked(IterableDataset[Any]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


@pytest.mark.parametrize("every", [1, 4])
def test_the_trainers_own_log_is_the_same_with_and_without_looking(
    base: Path, tmp_path: Path, every: int
) -> None:
    timing = {"train_runtime", "train_samples_per_second", "train_steps_per_second"}

    def read_log(out: Path, watched: bool) -> list[dict[str, float]]:
        made = trainer(base, out, steps=9, logging_first_step=True, logging_steps=4)
        if watched:
            made.add_callback(
                AuditCallback(made, data=MEMBERS, every=every, limit=2, out=out / "audit")
            )
        made.train()
        rows = [row for row in made.state.log_history if "audit/loss_members" not in row]
        return [{name: row[name] for name in row.keys() - timing} for row in rows]

    unwatched = read_log(tmp_path / "unwatched", watched=False)
    assert [row["step"] for row in unwatched if "loss" in row] == [1, 4, 8]
    assert read_log(tmp_path / "watched", watched=True) == unwatched


def test_checkpoints_are_a_sweep_with_a_picture(
    trained: tuple[Trainer, AuditCallback, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By their steps, not their names; the later one gives more away."""
    _, _, out = trained
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, MEMBERS)))
    command = [
        "run",
        "--checkpoints",
        str(out),
        "--data",
        str(data),
        "--attack",
        "extraction-probability",
    ]
    command += ["--setting", "white-box", "--known-fraction", "0", "--prefix-token", "none"]
    check_command(*command, "-o", tmp_path / "line")
    with (tmp_path / "line" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["model"]).name for row in rows] == ["checkpoint-30", "checkpoint-60"]
    early, late = (float(row["extraction_probability"]) for row in rows)
    assert early < late
    page = (tmp_path / "line" / "history.html").read_text()
    assert "Runs by checkpoint" in page and page.count("<svg") == 1
    capsys.readouterr()
    check_command("advise", tmp_path / "line", "--max", "extraction_probability=0.99")
    assert "checkpoint-60" in (said := capsys.readouterr().out) and "none is beyond it" in said
    check_command("advise", tmp_path / "line", "--max", f"extraction_probability={early / 1e6}")
    assert "no checkpoint is below" in capsys.readouterr().out
    for bad in ([], ["--max", "recall"], ["--max", "exposure=1"]):
        check_command("advise", tmp_path / "line", *bad, code=2)
    check_command(*command, "--model", "x", "-o", tmp_path / "no", code=2)
    check_command("run", "--checkpoints", tmp_path, "--data", data, "-o", tmp_path / "no", code=2)
    assert not (tmp_path / "no").exists()


def test_the_page_says_what_runs(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/how-to/while-training.md, word for word."""
    monkeypatch.chdir(tmp_path)
    for name, given in (("private", MEMBERS), ("fresh", OTHERS)):
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, given)))
    (block,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "how-to" / "while-training.md").read_text(), re.S
    )
    exec(
        compile(block, "while-training.md", "exec"),
        {"trainer": (made := trainer(base, tmp_path / "out"))},
    )
    assert (
        made.state.global_step in (20, 40)
        and (tmp_path / "out" / "audit" / "report.html").is_file()
    )


def test_an_outsider_with_the_system_turn_alone_is_watched_too(base: Path, tmp_path: Path) -> None:
    """What he knows does not stand right before the answer in the training set; the answer does."""
    tokenizer = AutoTokenizer.from_pretrained(base, pad_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    said = [("system", "Be kind."), ("user", "Who?"), ("assistant", "Zelda 4711.")]
    messages = [{"role": role, "content": content} for role, content in said]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    made = trainer(base, tmp_path, [{"prefix": text, "suffix": ""}], steps=2)
    made.add_callback(
        AuditCallback(
            made, data=[{"messages": messages}], tokenizer=tokenizer, every=5, knows="system"
        )
    )
    made.train()
    assert [row["step"] for row in made.state.log_history if "audit/loss_members" in row] == [0, 2]


def test_it_stops_where_it_is_told_to(base: Path, tmp_path: Path) -> None:
    made = trainer(base, tmp_path)
    callback = AuditCallback(
        made, data=MEMBERS, every=5, stop_at="extraction_probability > 1e-3", out=tmp_path / "run"
    )
    made.add_callback(callback)
    made.train()
    assert callback.stopped_at == made.state.global_step < 60
    assert (
        callback.rows[-1]["extraction_probability"]
        > 0.001
        >= callback.rows[-2]["extraction_probability"]
    )
    assert json.loads((tmp_path / "run" / "result.json").read_text())["findings"]


def test_a_curve_of_nothing_is_refused_before_the_first_step(base: Path, tmp_path: Path) -> None:
    cases = [
        ({"data": OTHERS}, "none of its 6 rows contains their tokens"),
        ({"data": MEMBERS[:4], "nonmembers": MEMBERS[4:]}, "2 of 2 are in the training set"),
    ]
    for asked, why in cases:
        made = trainer(base, tmp_path)
        made.add_callback(AuditCallback(made, **asked))
        with pytest.raises(AuditError, match=why):
            made.train()
        assert made.state.global_step == 0
    masked = trainer(base, tmp_path)
    masked.train_dataset = masked.train_dataset.map(
        lambda row: {"labels": [-100] * len(row["input_ids"])}
    )
    masked.add_callback(AuditCallback(masked, data=MEMBERS))
    with pytest.raises(AuditError, match="it is masked for all 6 members in the training set"):
        masked.train()


def test_bad_arguments(base: Path, tmp_path: Path) -> None:
    made = trainer(base, tmp_path)
    for bad in (
        "recall > 0.1",
        "extraction_probability = 1",
        "loss_members > x",
        "loss_members >",
        "loss_members > nan",
    ):
        with pytest.raises(AuditError, match="expected stop_at as NAME > NUMBER"):
            StopLimit.parse_sentence(bad)
    with pytest.raises(AuditError, match="expected every >= 1, got 0"):
        AuditCallback(made, data=MEMBERS, every=0)
    made.is_fsdp_enabled = True
    with pytest.raises(AuditError, match="got fsdp, which shards it"):
        AuditCallback(made, data=MEMBERS)


def test_a_training_set_is_searched_within_rows() -> None:
    """Copies are counted, packed rows searched, and nothing is found across two rows."""
    rows = [
        {"input_ids": [1, 2, 3, 4, 5, 6]},
        {"input_ids": [7, 8, 9], "assistant_masks": [0, 0, 1]},
    ]
    found = preflight.read_training_set([*rows, rows[0]])
    assert found is not None and (found.rows, found.copies) == (3, 1)
    text = found.ids.tobytes()
    assert (
        preflight._find_token_positions(text, (3, 4)) == [2, 13]
        and preflight._find_token_positions(text, (6, 7)) == []
    )
    assert found.has_loss.tolist() == [
        *[True] * 6,
        False,
        False,
        False,
        True,
        False,
        *[True] * 6,
        False,
    ]
    assert (
        preflight.read_training_set([{"text": "x"}]) is None
        and preflight.read_training_set(iter(rows)) is None
    )


def test_a_stop_in_one_of_several_processes_is_refused(base: Path, tmp_path: Path) -> None:
    """The flag would be set in the first alone, and the others wait for it."""
    made = trainer(base, tmp_path)
    callback = AuditCallback(
        made, data=MEMBERS, stop_at="extraction_probability > 1e-3", out=tmp_path / "run"
    )
    several: Any = SimpleNamespace(world_size=2)
    with refuses("stop_at", "2"):
        callback.on_train_begin(several, made.state, made.control)
