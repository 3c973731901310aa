"""Where an audit takes place: live objects stand in for what a plan names. And what one run
computes once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from auditor.attacks.membership import Membership
from auditor.core.nouns import CellKey, Claim, Pair, Secret
from auditor.core.plan import Plan
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.defense import Defense, Scenario
from auditor.records.folder import RunFolder
from auditor.runs import plan_weights
from auditor.runs.audit import Target
from auditor.runs.plan import make_plan
from auditor.runs.run import plan_audit, run_audit
from auditor.runs.selection import select_plugins
from auditor.runs.site import Site
from auditor.runs.sweep_cache import SweepCache
from tests.conftest import save_tiny, tiny


class Held(Benchmark):
    """Records that lie in memory."""

    name = "held"

    def __init__(self) -> None:
        drawn = torch.randint(1, 61, (12, 10), generator=torch.Generator().manual_seed(0)).tolist()
        texts = [(tuple(row[:6]), tuple(row[6:])) for row in drawn]
        self.secrets = tuple(
            Secret(f"r{i}", *text, member=i % 2 == 0) for i, text in enumerate(texts[:8])
        )
        self.known = tuple(Pair(*text) for text in texts[8:])
        self.heldout = ()


class Live(Site):
    """A model and records that no folder holds."""

    @property
    def model(self) -> HuggingFaceModel:  # type: ignore[override]
        made: HuggingFaceModel = self.shared.get_or_make("model", "live", lambda: tiny(scale=8.0))
        return made

    def load_benchmark_shared_by_runs(self) -> Benchmark:
        return Held()


def plan(**fields: object) -> Plan:
    return make_plan(
        {"model": "live", "data": "in memory", "attack": ["perplexity"], "samples": 3, **fields}, {}
    )


@pytest.mark.parametrize(
    ("fields", "score"),
    [
        ({}, "min_k_plus"),
        ({"reference": "none"}, "min_k_plus"),
        ({"reference": "other"}, "ez_mia"),
        ({"public": "other"}, "ez_mia"),
        ({"attack_options": {"membership": {"score": "loss"}}}, "loss"),
    ],
    ids=str,
)
def test_membership_without_a_reference_scores_by_what_needs_none(
    fields: dict[str, Any], score: str
) -> None:
    """As `audit check` does: before, the row was "not applicable" and the run ended without it."""
    asked = make_plan(
        {"model": "live", "data": "in memory", "attack": ["membership"], **fields}, {}
    )
    site = Site(asked)
    site.check_plan_model_is_obtainable = lambda given: None  # type: ignore[method-assign]
    (method,) = select_plugins(site).methods
    assert isinstance(method, Membership) and method.score == score


def test_an_adapter_is_held_against_its_base_unless_told_otherwise(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
        )
    ).save_pretrained(base)
    whole = LlamaForCausalLM.from_pretrained(base)
    get_peft_model(
        whole, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    ).save_pretrained(folder)

    def site(**given: str) -> Site:
        return Site(asked(**given))

    def asked(**given: str) -> Plan:
        return make_plan({"model": str(folder), "data": "in memory", **given}, {})

    held = site()
    assert (
        held.reference_model is not None
        and held.reference_model.name == str(base)
        and not held.reference_fault_sentence
    )
    tokens = torch.tensor([[4, 5, 6]])
    assert (
        float(
            (held.reference_model.log_probs(tokens, 1) - held.model.log_probs(tokens, 1))
            .abs()
            .max()
        )
        > 1e-3
    )
    (said,) = (
        note for note in held.notes_on_models() if note.startswith("reference: the adapter's base")
    )
    assert "saw no private data only if nothing but the adapter was trained on them" in said
    none = site(reference="none")
    assert (
        none.reference_model is None
        and not none.reference_fault_sentence
        and not none.notes_on_models()
    )
    digests = [
        plan_weights.digest_plan_files(asked(**given)) for given in ({"reference": "none"}, {})
    ]
    assert set(digests[0]) <= set(digests[1])  # no model is called so
    assert site(model=str(base)).reference_model is None


def test_live_objects_are_audited_by_the_same_walk(tmp_path: Path) -> None:
    asked, shared = (
        plan(attack=["perplexity", "extraction-probability"], defense=["uniform-mixing"]),
        SweepCache(),
    )
    folder = RunFolder.create(tmp_path / "run", "live", asked.to_json())
    site = Live(asked, shared=shared)
    result = run_audit(plan_audit(site), folder)
    assert [finding.cell_key for finding in result.findings] == plan_audit(
        Site(asked)
    ).selection.list_cell_keys()
    assert (
        result.benchmark.members == 4 and result.benchmark.nonmembers == 4 and result.weights == {}
    )
    held = folder.guesses.finished_secrets(CellKey("undefended", "white-box", "perplexity"))
    assert sorted(held) == sorted(secret.id for secret in Held().secrets)


class InFewBits(Live):
    @property
    def model(self) -> HuggingFaceModel:  # type: ignore[override]
        made: HuggingFaceModel = self.shared.get_or_make(
            "model", "few", lambda: HuggingFaceModel(tiny(scale=8.0).model.to(torch.bfloat16))
        )
        return made


def test_a_run_says_what_fewer_bits_change(tmp_path: Path) -> None:
    asked = plan()
    folder = RunFolder.create(tmp_path / "run", "few", asked.to_json())
    result = run_audit(plan_audit(InFewBits(asked)), folder)
    assert any(
        "runs in bfloat16: against float32, on 32 tokens" in note for note in result.benchmark.notes
    )


class Counting(Defense):
    """Counts how often its promise is computed."""

    name = "counting"
    asked: list[int] = []  # noqa: RUF012

    def claim(self, scenario: Scenario, spent: int) -> Claim:
        self.asked.append(spent)
        return Claim({}, 0.0, "", "", 100, "", "", spent_queries=spent)


def test_a_promise_is_computed_once_for_what_is_spent(neox: HuggingFaceModel) -> None:
    target = Target("counting", "Counting", neox, "", Counting(), Scenario(neox, None, None, 0, 0))
    Counting.asked.clear()
    for spent in (0, 40):
        target.spending.spent = {("recipe", "s"): spent}
        claims = [target.claim for _ in range(3)]
        assert all(claim is not None and claim.spent_queries == spent for claim in claims)
    assert Counting.asked == [0, 40]


@pytest.mark.parametrize("text", ["a/b", "a/b/c/d", ""])
def test_a_cell_is_written_and_read_in_one_form(text: str) -> None:
    key = CellKey("pmixed", "text-only", "ethicist")
    assert str(key) == "pmixed/text-only/ethicist" and CellKey.parse_cell_key(str(key)) == key
    with pytest.raises(ValueError, match="unpack"):
        CellKey.parse_cell_key(text)


def test_models_of_one_audit_run_in_one_precision_and_in_float32_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
    model.save_pretrained(tmp_path / "exact")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "few")

    def dtypes(**given: Any) -> list[torch.dtype]:
        asked = make_plan({"data": "in memory", "attack": ["perplexity"], **given}, {})
        site = Site(asked)
        select_plugins(site)
        return [
            one.model.dtype
            for one in (site.model, site.reference_model)
            if isinstance(one, HuggingFaceModel)
        ]

    few, exact = str(tmp_path / "few"), str(tmp_path / "exact")
    assert dtypes(model=few, reference=exact) == [torch.bfloat16] * 2
    assert dtypes(model=exact, reference=few) == [torch.float32] * 2
    assert dtypes(model=few, defense=["int8"]) == [torch.float32]


def test_runs_of_a_sweep_share_no_numbers_of_another_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    save_tiny(tmp_path / "model")
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    exact.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    for name in ("data", "nonmembers"):
        rows = [{"prefix": f"{name} {i} of ", "suffix": f"{i * 7} 8"} for i in range(12)]
        pd.DataFrame(rows).to_json(tmp_path / f"{name}.jsonl", orient="records", lines=True)

    def perplexity(shared: SweepCache, name: str, *defenses: str) -> Any:
        files = {key: f"{tmp_path}/{key}.jsonl" for key in ("data", "nonmembers")}
        asked = plan(model=f"{tmp_path}/model", defense=list(defenses), **files)
        folder = RunFolder.create(tmp_path / name, name, asked.to_json())
        return run_audit(plan_audit(Site(asked, shared=shared)), folder).targets[0].perplexity

    shared = SweepCache()
    perplexity(shared, "bfloat16")
    again = perplexity(shared, "float32", "int8")
    assert again == perplexity(SweepCache(), "alone", "int8")
