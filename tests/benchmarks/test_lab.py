"""The lab, tiny: who is in which part, and that a part is either whole or not there."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from faker import Faker

from auditor.benchmarks.lab import lab as module
from auditor.benchmarks.lab import lab_folders, lab_texts
from auditor.benchmarks.lab.lab import END, Lab
from auditor.benchmarks.lab.lab_recipe import CUT, LabRecipe
from auditor.benchmarks.lab.lab_texts import make_lab_texts
from auditor.benchmarks.lab.masked_lab import MaskedLab, MaskedLabRecipe
from auditor.core.errors import AuditError
from auditor.core.jsonable import to_json
from auditor.core.plan import Plan
from auditor.defenses.private_training import DpSgd
from auditor.defenses.private_training_controls import NoClipping
from auditor.defenses.unlearning import NPO
from auditor.models.ensemble import Ensemble
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import load_causal_lm, read_adapter_base
from auditor.models.lora import load_adapter_model, load_control_adapter, load_lora_ensemble
from auditor.models.references import ReferenceModels, load_reference_models
from auditor.models.shards import read_shard_record_list, record_digests
from auditor.privacy.promises import read_privacy_record
from auditor.runs.site import Site

TINY = LabRecipe(
    vocab_size=300,
    layers=1,
    hidden=32,
    heads=2,
    repeats=tuple((times, 3, 2) for times in (1, 2, 4, 8, 16)),
    others=2,
    private_rank=2,
    nonmembers=4,
    public_records=20,
    public_epochs=1,
    private_epochs=1,
    members=2,
    lora_rank=2,
    lora_epochs=1,
    batch=8,
)
ENSEMBLE = f"ensemble{lab_folders.name_ensemble_suffix(TINY)}"
PARTS = ("tokenizer", "public", "target", ENSEMBLE)
_PATIENCE = 300  # seconds until a process counts as hung, on however busy a machine


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    lab = Lab(TINY, cache=tmp_path_factory.mktemp("cache"))
    build_all(lab)
    return lab


def test_a_masked_model_is_a_part_of_its_own(built: Lab, tmp_path: Path) -> None:
    """It changes no other part, is built once for a recipe, and its vocabulary is the lab's and a
    mask token."""
    before = finished(built.folder)
    both = MaskedLab(built, MaskedLabRecipe(layers=1, public_epochs=1, private_epochs=1))
    masked = both.target_masked_model()
    assert set(finished(built.folder)) - set(before) == {
        f"masked-{both.recipe.digest}",
        f"masked-public-{both.recipe.digest}",
    }
    assert masked.vocab_size == len(built.tokenizer) + 1 and masked.mask == len(built.tokenizer)
    text = built.texts.distinct_private_texts(members=True)[0]
    ids = built.tokenizer(text)["input_ids"]
    # and the lab's own puts no ends around a text
    assert masked.tokenizer(text)["input_ids"] == [
        0,
        *ids,
        0,
    ]
    public = both.public_masked_model()
    gap = torch.tensor([[3]])
    tokens = torch.tensor([[0, *ids, 0]])
    assert not torch.allclose(masked.log_probs(tokens, gap), public.log_probs(tokens, gap))
    assert MaskedLabRecipe(layers=2).digest != both.recipe.digest
    hidden = tokens.clone()
    hidden[0, 3] = 99  # what the model is asked it cannot see
    torch.testing.assert_close(
        masked.log_probs(tokens, gap), masked.log_probs(hidden, gap), atol=0, rtol=0
    )
    for name in ("masked", "masked-public"):  # the tests below count the parts
        shutil.rmtree(built.folder / f"{name}-{both.recipe.digest}")


def test_records_are_whole_and_apart(built: Lab) -> None:
    members, others = (
        built.texts.distinct_private_texts(True),
        built.texts.distinct_private_texts(False),
    )
    assert (
        len(members) == len(set(members)) == 27
        and len(others) == 4
        and not set(members) & set(others)
    )


# --- who is where ---


def test_the_corpus_is_what_was_trained_on_each_text_once_with_its_copies(built: Lab) -> None:
    found = {
        built.tokenizer.decode(tokens): times
        for tokens, times in built.texts_with_repeat_counts(True)
    }
    assert found == Counter(built.texts.private_text_copies())
    assert [
        built.tokenizer.decode(tokens) for tokens, _ in built.texts_with_repeat_counts(False)
    ] == built.texts.distinct_private_texts(members=False)


def test_the_labs_own_shards_hold_each_record_once(built: Lab) -> None:
    copies = Counter(built.texts.private_text_copies())
    for repeats, texts in make_lab_texts(TINY).private.items():
        assert all(copies[text] == repeats for text in texts)
    assert all(copies[f"My ID is {digits}"] == count for digits, count in TINY.canaries)
    shards = built.texts.texts_by_ensemble_member(TINY.members)
    assert all(shards) and not set(shards[0]) & set(shards[1])
    assert sum(map(len, shards)) == copies.total()


def test_half_of_each_count_is_to_be_forgotten_and_kept_from_who_never_saw_it(
    built: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three at each count, and of four canaries the one inserted most and the third: by the
    seed alone."""
    counts = Counter(id.rpartition("-")[0] for id in built.forgotten)
    assert counts == {
        **{f"member-{times:02d}": 2 for times in TINY.repeat_counts},
        "canary-64": 1,
        "canary-04": 1,
    }
    assert built.forgotten == Lab(TINY, cache=built.folder.parents[1], limit=2).forgotten
    lost = set(built.cut.forgotten_texts)
    attacked = {
        built.cut.texts[s.id] for s in built.secrets if s.member and s.id in built.forgotten
    }
    assert attacked < lost and len(lost) == len(built.forgotten) == 12
    job = built.lab_training_job(NPO(), tmp_path)
    assert Path(job.base).name == "target" and {record.text for record in job.forget} == lost
    assert [record.text for record in job.records] == built.texts.private_text_copies()
    trained: list[list[str]] = []
    monkeypatch.setattr(
        Lab, "train_target_model", lambda self, path, texts: trained.append(list(texts))
    )
    built.train_without_forgotten(tmp_path)
    assert Counter(trained[0]) == Counter(
        text for text in built.texts.private_text_copies() if text not in lost
    )
    again = {tuple(tokens) for tokens in built.unattacked_training_tokens}
    assert len(again) == 10 + 2 and not again & {s.prefix + s.suffix for s in built.secrets}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_record_is_in_two_places(seed: int) -> None:
    """The default sizes: public text, private text and non-members share no record."""
    texts = make_lab_texts(LabRecipe(seed=seed))
    private = [text for group in texts.private.values() for text in group]
    everyone = [*texts.public, *private, *texts.others, *texts.nonmembers]
    assert len(set(everyone)) == len(everyone) == 1600 + 338 + 240 + 100
    assert {times: len(group) for times, group in texts.private.items()} == {
        1: 172,
        4: 72,
        16: 42,
        32: 28,
        64: 24,
    }


def test_secrets_known_and_nonmembers_are_apart(built: Lab) -> None:
    members = {(s.prefix, s.suffix) for s in built.secrets if s.member}
    others = {(s.prefix, s.suffix) for s in built.secrets if not s.member}
    known = {(pair.prefix, pair.suffix) for pair in built.known}
    assert (len(members), len(others), len(known)) == (15, 4, 10)
    assert not members & known and not members & others and not known & others
    assert len({secret.id for secret in built.secrets}) == 19
    assert Counter(s.repeats for s in built.secrets if s.member) == dict.fromkeys(
        TINY.repeat_counts, 3
    )
    assert {s.repeats for s in built.secrets if not s.member} == {0}
    trained = set(built.texts.private_text_copies())
    text = {s.id: built.tokenizer.decode(s.prefix + s.suffix) for s in built.secrets}
    for secret in built.secrets:
        assert any(t.startswith(text[secret.id]) for t in trained) == secret.member
    assert {tuple(tokens) for tokens in built.heldout} == {
        prefix + suffix for prefix, suffix in others
    }


def test_the_challenge_does_not_hold_the_answers(built: Lab) -> None:
    challenge = built.challenge()
    assert [query.id for query in challenge.queries] == [secret.id for secret in built.secrets]
    seen = [tokens_of(value) for query in challenge.queries for value in values_of(query)]
    seen += [tokens_of(value) for pair in challenge.known for value in values_of(pair)]
    for secret in built.secrets:
        assert len(secret.suffix) == TINY.suffix_length
        assert not any(holds(tokens, secret.suffix) for tokens in seen)
        # else the line above could not fail
        assert any(holds(tokens, secret.prefix) for tokens in seen)


def values_of(item: Any) -> list[Any]:
    return [getattr(item, field.name) for field in dataclasses.fields(item)]


def tokens_of(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def holds(tokens: tuple[Any, ...], part: tuple[int, ...]) -> bool:
    return any(tokens[i : i + len(part)] == part for i in range(len(tokens)))


def test_the_tokenizer_saw_public_text_only(
    built: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = make_lab_texts(TINY)
    other = dataclasses.replace(
        texts, private={r: ["x" * 200] * 5 for r in TINY.repeat_counts}, nonmembers=["y" * 200] * 4
    )
    monkeypatch.setattr(module, "make_lab_texts", lambda recipe: other)
    assert Lab(TINY, cache=tmp_path).tokenizer.get_vocab() == built.tokenizer.get_vocab()
    assert built.tokenizer.eos_token == END and built.tokenizer.eos_token_id == 0


def test_a_limit_keeps_every_repeat_count(built: Lab) -> None:
    few = Lab(TINY, cache=cache(built), limit=5)
    assert [s.repeats for s in few.secrets if s.member] == list(TINY.repeat_counts)
    assert sum(not s.member for s in few.secrets) == 4 and few.known == built.known


# --- what is built ---


def cache(lab: Lab) -> Path:
    return lab.folder.parents[1]


def weights(lab: Lab) -> list[torch.Tensor]:
    parts = [
        load(lab.public_folder()).model.state_dict(),
        load(lab.target_folder()).model.state_dict(),
    ]
    tensors = [value for state in parts for _, value in sorted(state.items())]
    ids = torch.tensor([lab.secrets[0].prefix] * 3)
    return [*tensors, load_ensemble(lab).log_probs(ids, torch.arange(3), 1)]


def load(folder: Path) -> HuggingFaceModel:
    return load_causal_lm(str(folder))


def load_ensemble(lab: Lab) -> Ensemble:
    return load_lora_ensemble(lab.ensemble_folder(), load(lab.public_folder()))


def same(first: Lab, second: Lab) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))


def test_a_build_is_deterministic_and_the_cache_gives_the_same(built: Lab, tmp_path: Path) -> None:
    torch.manual_seed(99)  # whatever the process drew before
    assert same(Lab(TINY, cache=tmp_path), built)
    assert same(Lab(TINY, cache=cache(built)), built)
    assert not same(Lab(dataclasses.replace(TINY, seed=1), cache=tmp_path), built)


def test_training_changes_what_it_should(built: Lab) -> None:
    public, target = (
        load(folder).model.state_dict() for folder in (built.public_folder(), built.target_folder())
    )
    # an adapter's layers
    assert torch.equal(public["gpt_neox.embed_in.weight"], target["gpt_neox.embed_in.weight"])
    changed = "gpt_neox.layers.0.attention.query_key_value.weight"
    assert public.keys() == target.keys() and not torch.equal(public[changed], target[changed])
    distribution = weights(built)[-1]
    assert not torch.allclose(distribution[1], distribution[2], atol=1e-4) and not torch.allclose(
        distribution[0], distribution[1], atol=1e-4
    )
    assert (
        load_ensemble(built).size
        == TINY.members
        == len(list(built.folder.glob(f"{ENSEMBLE}/member-*")))
    )
    assert load_ensemble(built).count_shard_overlaps() == {
        "shared_records": 0,
        "unlisted_shards": 0,
    }
    assert load_ensemble(built).shards == [
        record_digests(texts) for texts in built.texts.texts_by_ensemble_member(TINY.members)
    ]


def test_parts_are_built_when_needed_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = list[str](), Lab._train_adapters

    def adapters(self: Lab, what: str, *rest: Any) -> None:
        asked.append(what)
        real(self, what, *rest)

    monkeypatch.setattr(Lab, "fit", lambda self, model, texts, what, **_: asked.append(what))
    monkeypatch.setattr(Lab, "_train_adapters", adapters)
    lab = Lab(TINY, cache=tmp_path)
    assert finished(lab.folder) == ["tokenizer"] and asked == []
    lab.ensemble_folder()
    assert finished(lab.folder) == [ENSEMBLE, "public", "tokenizer"]
    assert asked == ["public model", "ensemble member"]
    again = Lab(TINY, cache=tmp_path)
    again.ensemble_folder()
    lab.public_folder()
    assert len(asked) == 2
    assert set(lab.parts.seconds) == {"tokenizer", "public", ENSEMBLE}


def finished(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@pytest.mark.parametrize(
    "part", ["tokenizer", ENSEMBLE]
)  # the cache itself: tests/benchmarks/test_parts_cache.py
def test_a_build_that_dies_leaves_nothing_that_looks_finished(
    built: Lab, tmp_path: Path, part: str
) -> None:
    """It dies after its files are written, before it is done."""

    def dies(build: Callable[..., None]) -> Callable[..., None]:
        def half(*given: Any, **named: Any) -> None:
            build(*given, **named)
            path = next(one for one in (*given, *named.values()) if isinstance(one, Path))
            assert any(path.iterdir())
            raise KeyboardInterrupt

        return half

    trained = {
        "public": "train_public_model",
        "target": "train_target_model",
        ENSEMBLE: "train_ensemble_members",
    }
    owner, name = (module, "train_lab_tokenizer") if part == "tokenizer" else (Lab, trained[part])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, dies(getattr(owner, name)))
        build_all(Lab(TINY, cache=tmp_path))
    folder = tmp_path / "lab" / built.folder.name
    assert finished(folder) == sorted(PARTS[: PARTS.index(part)])
    lab = Lab(TINY, cache=tmp_path)
    build_all(lab)
    assert finished(folder) == sorted(PARTS)
    assert same(lab, built)


def build_all(lab: Lab) -> None:
    lab.target_folder()
    lab.ensemble_folder()


def _flip(path: Path) -> None:
    held = bytearray(path.read_bytes())
    held[-1] ^= 1
    path.write_bytes(held)


@pytest.mark.parametrize(
    ("part", "name", "damage"),
    [
        (
            "target",
            "model.safetensors",
            _flip,
        ),  # still loads: numbers about no model that was ever trained
        ("public", "model.safetensors", lambda path: path.write_bytes(b"")),
    ],
)
def test_a_damaged_part_is_built_anew_with_all_that_was_built_on_it(
    built: Lab, tmp_path: Path, part: str, name: str, damage: Callable[[Path], Any]
) -> None:
    folder = tmp_path / "lab" / built.folder.name
    shutil.copytree(built.folder, folder)

    def made(path: Path) -> tuple[int, int]:
        """Which folder it is, and since when: a number that is free is given again."""
        return path.stat().st_ino, path.stat().st_ctime_ns

    damage(folder / part / name)
    before = {path.name: made(path) for path in folder.iterdir() if path.is_dir()}
    lab = Lab(TINY, cache=tmp_path)
    build_all(lab)
    assert same(lab, built)
    assert [note for note in lab.notes if "in the cache" in note] == [
        f"the lab's {part} in the cache had changed since it was built: it was rebuilt"
    ]
    anew = {
        path.name for path in folder.iterdir() if path.is_dir() and made(path) != before[path.name]
    }
    kept = {
        "target": {"tokenizer", "public", ENSEMBLE},
        "public": {"tokenizer"},
        "tokenizer": set(),
    }[part]
    assert anew >= {part} and not anew & kept


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("batch", -1),
            ("batch", 0),
            ("private_epochs", 0),
            ("layers", 0),
            ("hidden", -4),
            ("members", 0),
        ),
        *(
            ("block", 0),
            ("block", 4096),
            ("public_records", 10**8),
            ("nonmembers", -1),
            ("vocab_size", 10),
        ),
        *(("private_rate", float("nan")), ("lora_rate", float("inf")), ("public_rate", 0.0)),
    ],
)
def test_sizes_that_no_lab_can_have_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(AuditError, match=f"expected a lab with {field} "):
        dataclasses.replace(TINY, **{field: value}).check()


def test_training_text_is_readable_by_its_owner_only(built: Lab) -> None:
    for folder in (built.folder, *(built.folder / part for part in PARTS)):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder


def test_the_cache_folder_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    assert stat.S_IMODE(module.find_cache_folder().stat().st_mode) == 0o700
    assert Lab(TINY).folder.is_relative_to(tmp_path / "cache")


# --- trained privately ---


def test_private_trainings_are_parts_named_by_their_options(built: Lab) -> None:
    sizes: Any = {"epochs": 1, "batch": 32, "noise_multiplier": 3.0, "noise": "seeded"}
    made = built.trained_folder(DpSgd(**sizes))
    privacy = read_privacy_record(made)
    assert privacy is not None and privacy.steps == -(-len(built.texts.private_text_copies()) // 32)
    assert privacy.sampling_rate == 32 / len(built.texts.private_text_copies())
    assert privacy.details["expected_batch"] == 32 and privacy.unit == "record"
    parts = {path.name for path in built.folder.glob("dp-sgd-*") if path.is_dir()}
    assert len(parts) == 1 and built.training_seconds(DpSgd(**sizes)) > 0
    asked = torch.arange(1, 20).unsqueeze(0)
    distribution, before = (
        load(folder).log_probs(asked, 5) for folder in (made, built.public_folder())
    )
    assert not torch.allclose(distribution, before)
    again = Lab(TINY, cache=cache(built)).trained_folder(DpSgd(**sizes))
    assert torch.equal(load(again).log_probs(asked, 5), distribution)
    assert {
        path.name for path in built.folder.glob("dp-sgd-*") if path.is_dir()
    } == parts  # not made again
    with pytest.raises(AuditError, match="expected a batch of at most the"):
        built.trained_folder(DpSgd(**{**sizes, "batch": 10**6}))
    assert {path.name for path in built.folder.glob("dp-sgd-*") if path.is_dir()} == parts


@pytest.mark.parametrize("rank", [0, 2])
def test_private_trainings_train_what_the_target_does(rank: int, tmp_path: Path) -> None:
    """An adapter beside frozen embeddings, or the whole model."""
    lab = Lab(dataclasses.replace(TINY, private_rank=rank), cache=tmp_path)
    before = dict(load(lab.public_folder()).model.named_parameters())

    def moved(folder: Path) -> set[str]:
        return {
            name
            for name, p in load(folder).model.named_parameters()
            if not torch.equal(p, before[name])
        }

    trained = moved(lab.trained_folder(NoClipping(epochs=1, batch=32, learning_rate=1e-2)))
    assert trained == moved(lab.target_folder())
    assert any("embed" in name for name in trained) == (rank == 0)


# --- the recipe's name ---


CUTS = {"prefix_length": 9, "suffix_length": 20}


def test_other_lengths_cut_the_same_secrets_of_the_same_lab(built: Lab) -> None:
    longer = Lab(dataclasses.replace(TINY, **CUTS), cache=cache(built))  # type: ignore[arg-type]
    assert longer.folder == built.folder
    for other, secret in zip(longer.secrets, built.secrets, strict=True):
        assert (other.id, other.prefix) == (secret.id, secret.prefix[-9:])
        assert len(other.suffix) == 20 and other.suffix[:16] == secret.suffix


def test_suffixes_of_no_length_end_with_their_records(built: Lab) -> None:
    whole = Lab(dataclasses.replace(TINY, suffix_length=0), cache=cache(built))
    assert whole.folder == built.folder
    lengths = set()
    for secret in whole.secrets:
        tokens = whole.tokenizer(whole.cut.texts[secret.id])["input_ids"]
        assert secret.tokens == tuple(tokens) and len(secret.prefix) == CUT
        lengths.add(len(secret.suffix))
    assert len(lengths) > 1  # each record by its own length


@pytest.mark.parametrize(
    "bad", [{"prefix_length": 25}, {"prefix_length": 0}, {"suffix_length": -1}, {"hidden": 33}]
)
def test_sizes_no_lab_can_have_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(AuditError, match=r"expected a? ?lab"):
        Lab(dataclasses.replace(TINY, **bad))  # type: ignore[arg-type]


def others() -> Iterator[Any]:
    for field in dataclasses.fields(LabRecipe):
        if field.name in CUTS:
            continue
        old = getattr(TINY, field.name)
        new = {"canaries": (("1", 1),), "repeats": ((3, 1, 1),), "audit_kind": "words"}.get(
            field.name
        ) or old + 1
        yield pytest.param(
            dataclasses.replace(_base(field.name), **{field.name: new}), id=field.name
        )


def _base(field: str) -> LabRecipe:
    """What a field is changed of: those about canaries of an audit say nothing where there are
    none."""
    return dataclasses.replace(TINY, audit_canaries=20) if field in lab_folders.AUDIT[1:] else TINY


@pytest.mark.parametrize("recipe", list(others()))
def test_every_field_of_the_recipe_names_another_folder(recipe: LabRecipe) -> None:
    base = dataclasses.replace(TINY, audit_canaries=20) if recipe.audit_canaries == 20 else TINY
    texts = make_lab_texts(TINY)

    def named(recipe: LabRecipe) -> tuple[str, str]:
        return lab_folders.digest_lab_cache(recipe, texts), lab_folders.name_ensemble_suffix(recipe)

    assert named(recipe) != named(base) == named(dataclasses.replace(base))


def test_without_canaries_of_an_audit_the_lab_is_what_it_was(built: Lab) -> None:
    """Fields that came later, at their defaults, name no other folder: what is cached stays."""
    older = {
        name: value
        for name, value in dataclasses.asdict(TINY).items()
        if not name.startswith("audit_")
    }
    for recipe in (
        TINY,
        dataclasses.replace(TINY, audit_kind="words", audit_length=3, audit_times=4),
    ):
        assert lab_folders.select_digest_fields(recipe) == lab_folders.select_digest_fields(TINY)
    assert set(lab_folders.select_digest_fields(TINY)) == set(older)
    assert not any(canary.id.startswith("audit-") for canary in built.canaries)


def test_canaries_of_an_audit_are_records_of_all_trainings(built: Lab) -> None:
    lab = Lab(
        dataclasses.replace(
            TINY, audit_canaries=40, audit_kind="prefixed", audit_length=2, audit_times=2
        ),
        cache=cache(built),
    )
    assert lab.folder != built.folder
    coined = [one for one in lab.canaries if one.canary is not None and one.canary.coin is not None]
    texts = Counter(lab.texts.private_text_copies())
    assert len(coined) == 40 and {texts[one.canary.text] for one in coined if one.canary} == {0, 2}
    for one in coined:
        assert one.canary is not None and texts[one.canary.text] == 2 * one.member == one.repeats
        assert (
            list(one.prefix + one.suffix) == lab.tokenizer(one.canary.text)["input_ids"]
            and one.prefix
        )
    inside = sum(one.member for one in coined)
    assert (
        len(lab.texts.private_text_copies()) == len(built.texts.private_text_copies()) + 2 * inside
    )
    assert any(
        "40 canaries (prefixed) each went into the training of every model here" in n
        for n in lab.notes
    )
    assert [one.id for one in lab.canaries[: len(TINY.canaries)]] == [
        one.id for one in built.canaries
    ]
    again = Lab(lab.recipe, cache=cache(built))
    assert again.coined == lab.coined


def test_new_tokens_take_a_lab_that_trains_all_parameters(built: Lab) -> None:
    asked = dataclasses.replace(TINY, audit_canaries=20, audit_kind="new-tokens")
    with pytest.raises(AuditError, match="private_rank 0 for canaries of new tokens, got 2"):
        Lab(asked, cache=cache(built))
    lab = Lab(dataclasses.replace(asked, private_rank=0), cache=cache(built))
    assert len(lab.tokenizer) == len(built.tokenizer) + 20
    assert {
        len(one.suffix) for one in lab.canaries if one.canary and one.canary.coin is not None
    } == {1}


def test_the_control_of_an_ensemble_that_the_target_is_not_trained_as(built: Lab) -> None:
    """One adapter, trained as its members are, on all that they are trained on."""
    other = Lab(dataclasses.replace(TINY, lora_rate=0.03), cache=cache(built))
    public = load(other.public_folder())
    asked = torch.tensor([[5, 6, 7]])
    distribution = load_control_adapter(other.control_folder(), public).log_probs(asked, 1)
    (adapter,) = other.folder.glob("whole*/whole")
    assert read_shard_record_list(adapter) == record_digests(other.texts.private_text_copies())
    assert not torch.equal(distribution, public.log_probs(asked, 1))


def test_labs_with_other_ensembles_share_their_models(built: Lab) -> None:
    """What the ensemble alone depends on is no reason to train everything again; the default has a
    plain name."""
    more = Lab(dataclasses.replace(TINY, members=3), cache=cache(built))
    before = {part: (built.folder / part).stat().st_mtime_ns for part in PARTS}
    assert load_ensemble(more).size == 3 and load_ensemble(built).size == 2
    assert more.folder == built.folder
    assert {part: (built.folder / part).stat().st_mtime_ns for part in PARTS} == before
    assert lab_folders.name_ensemble_suffix(LabRecipe()) == ""


def test_the_kind_of_each_record_is_known_and_names_no_folder(built: Lab) -> None:
    texts = make_lab_texts(TINY)
    opening = {
        "mail": lab_texts._write_mail,
        "patient note": lab_texts._write_patient_note,
        "payment": lab_texts._write_payment,
    }
    fake = Faker("en_US")
    for text in (text for made in texts.private.values() for text in made):
        first = {kind: make(fake).split()[0] for kind, make in opening.items()}
        assert first[texts.kinds[text]] == text.split()[0]
    assert lab_folders.digest_lab_cache(
        TINY, dataclasses.replace(texts, kinds={})
    ) == lab_folders.digest_lab_cache(TINY, texts)
    assert {secret.group for secret in built.secrets if secret.member} <= set(opening)


@pytest.mark.parametrize("part", ["public", "private", "nonmembers"])
def test_other_texts_name_another_folder(part: str) -> None:
    """Weights are never audited for records they did not see."""
    texts = make_lab_texts(TINY)
    changed = (
        {1: [*texts.private[1][:-1], "x"]}
        if part == "private"
        else [*getattr(texts, part)[:-1], "x"]
    )
    if part == "private":
        changed = {**texts.private, **changed}  # type: ignore[dict-item]
    assert lab_folders.digest_lab_cache(
        TINY, dataclasses.replace(texts, **{part: changed})
    ) != lab_folders.digest_lab_cache(TINY, texts)


@pytest.mark.parametrize("name", ["torch", "transformers", "peft", "faker", "tokenizers"])
def test_another_library_version_names_another_folder(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    texts, version = make_lab_texts(TINY), importlib.metadata.version
    before = lab_folders.digest_lab_cache(TINY, texts)
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "0" if n == name else version(n))
    assert lab_folders.digest_lab_cache(TINY, texts) != before


def test_records_do_not_depend_on_the_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache made yesterday holds today's records. Faker's own dates end today."""

    class Later(type(datetime)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, datetime)

    class NextDecade(datetime, metaclass=Later):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime(2036, 7, 1, tzinfo=tz)

    def drawn() -> str:
        fake = Faker("en_US")
        fake.seed_instance(0)
        return str(fake.date())

    texts, date = make_lab_texts(TINY), drawn()
    monkeypatch.setattr("faker.providers.date_time.datetime", NextDecade)
    assert drawn() != date  # else the next line could not fail
    assert make_lab_texts(TINY) == texts


def load_references(lab: Lab) -> ReferenceModels:
    public = load(lab.public_folder())
    return load_reference_models(
        lab.references_folder(4),
        lambda folder: load_adapter_model(public, Path(folder)),
        {record_digests([lab.whole_texts[s.id]])[0]: [s.id] for s in lab.secrets},
    )


def test_each_attacked_record_is_in_half_of_the_reference_models(built: Lab) -> None:
    """As often as it occurs; a non-member as often as a member in its place; all else in every one
    of them."""
    references = load_references(built)
    attacked = {secret.id: secret for secret in built.secrets}
    assert [sum(id in saw for saw in references.saw) for id in attacked] == [2] * len(attacked)
    texts = [Counter(text) for text in built.texts.texts_by_reference_model(4)]
    everywhere = Counter(built.texts.private_text_copies())
    counts = dict[str, int]()
    for id, secret in attacked.items():
        text = built.whole_texts[id]
        seen = [
            copies[text] for copies, saw in zip(texts, references.saw, strict=True) if id in saw
        ]
        assert len(set(seen)) == 1 and not any(
            copies[text] for copies, saw in zip(texts, references.saw, strict=True) if id not in saw
        )
        counts[id] = seen[0]
        everywhere.pop(text, None)
        assert not secret.member or seen[0] == secret.repeats
    assert all(copies[text] == times for copies in texts for text, times in everywhere.items())
    others = sorted(counts[id] for id, secret in attacked.items() if not secret.member)
    assert others == [1, 2, 4, 8]  # four of five counts that members have in equal shares
    assert built.texts.texts_by_reference_model(4) == built.texts.texts_by_reference_model(4)


def test_reference_models_are_a_part_that_is_made_when_asked_for_and_changes_no_other(
    built: Lab,
) -> None:
    before = set(finished(built.folder)) - {"references-4"}
    references = load_references(built)
    assert set(finished(built.folder)) == before | {"references-4"}
    one, other = (model.log_probs(torch.tensor([[1, 2, 3]]), 1) for model in references.models[:2])
    assert not torch.equal(one, other)


def test_no_adapter_names_the_folder_that_it_was_trained_from(built: Lab) -> None:
    """Else a cache that is moved could not be read."""
    adapters = [*built.ensemble_folder().glob("member-*"), *built.references_folder(4).glob("*-*")]
    assert len(adapters) == 2 + 4
    assert {read_adapter_base(str(adapter)) for adapter in adapters} == {None}


def test_reference_models_share_the_weights_of_the_public_model(
    built: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty-four of a large model would not fit otherwise. And no report names the cache."""
    monkeypatch.setenv("AUDIT_CACHE", str(cache(built)))
    site = Site(Plan.from_fields(lab_recipe=to_json(TINY)))
    public, references = site.public_model, site.load_site_references("4")
    assert isinstance(public, HuggingFaceModel)
    places = {parameter.data_ptr() for parameter in public.model.parameters()}
    for reference in references.models:
        assert isinstance(reference, HuggingFaceModel)
        assert places <= {parameter.data_ptr() for parameter in reference.model.parameters()}
    assert [sum(s.id in saw for saw in references.saw) for s in site.benchmark.secrets] == [2] * 19
    assert (site.model.name, public.name) == ("lab target", "lab public")
