"""Provide the site of an audit: the undefended model, models related to this model, and the data.

The built-in lab trains models into folders; from there on they are loaded like a user's models.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from auditor.benchmarks.data.files import TableReader
from auditor.benchmarks.lab.lab import Lab
from auditor.benchmarks.lab.second_process import train_in_two_processes
from auditor.core.errors import AuditError
from auditor.core.jsonable import to_json
from auditor.core.secret_randomness import make_keyed_generator
from auditor.models.base import LanguageModel
from auditor.models.ensemble import Ensemble
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.lora import (
    is_adapter_of_base,
    load_adapter_model,
    load_control_adapter,
    load_lora_ensemble,
)
from auditor.models.references import ReferenceModels, load_reference_models
from auditor.models.shards import (
    find_control_adapter,
    read_shard_record_list,
    record_digests,
)
from auditor.models.vocabulary import check_same_vocabulary_size
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.defense import Defense, TrainedModel
from auditor.plugins.trainer import RECORD, Trainer, read_training_summary
from auditor.privacy import gradient_canaries, promises
from auditor.records.aliases import alias_secrets, load_alias_salt
from auditor.runs import text_form
from auditor.runs.loader import (
    LABS,
    SiteModels,
    choose_lab_defaults,
    parse_reference_model_count,
    require_same_vocabulary,
    resolve_attacked_provider,
)
from auditor.runs.own_data import load_own_benchmark
from auditor.runs.per_secret_results import make_token_decoder
from auditor.runs.shown_rows import UnlearningBaseline
from auditor.training.variants import Variant


class Site(SiteModels):
    """Models and data of an audit. Models are loaded or trained on first use.

    Args:
        form_rows: largest number of data rows used to choose the text form. If it is lower than
            usual, only a few known pairs choose the prefix token.
        soft_prompt_rows: number of embedding vectors in the longest soft prompt. Each takes the
            place of a token in the context.
    """

    # most rows for the choice of a text form
    form_rows = text_form.ROWS
    # rows of the longest soft prompt of an attack: they take room in a context
    soft_prompt_rows = 0

    @property
    def default_attack_options(self) -> Mapping[str, Mapping[str, Any]]:
        """Default options of attacks, keyed by name, sized for these models and data."""
        if self.recipe is not None or self.plan.attacks.sizes == "lab":
            return LABS[self.plan.target.lab].attack_defaults
        return {}

    @property
    def default_defense_options(self) -> Mapping[str, Mapping[str, Any]]:
        """Default options of defenses, keyed by name, sized for these models and data.

        With the lab's, trainings include the canaries that the plan's probes need.
        """
        lab = LABS[self.plan.target.lab]
        if self.recipe is not None:
            return choose_lab_defaults(lab, self.recipe, self.plan.attacks.attack)
        if self.plan.attacks.sizes == "lab":
            return lab.defense_defaults
        return {}

    @cached_property
    def subject(self) -> dict[str, Any]:
        """Plan values that decide the attacked model and the secrets, which such runs may share."""
        # A plug-in may need float32, which `auto` then means.
        subject = {**self.plan.model_and_secrets_fields, "dtype": self.loading.dtype}
        if self.recipe is not None:
            # The lab splits its data by its own seed, not by the seed of the run. The recipe
            # depends on the attacks too.
            del subject["seed"]
            subject["lab_recipe"] = to_json(self.recipe)
        return subject

    def train_lab_models(self, defenses: Iterable[Defense]) -> None:
        """Train the target and the defenses' ensembles at once, if a second process may help."""
        counts = set()
        for defense in defenses:
            if "ensemble" in defense.needs:
                counts.add(defense.required_member_count)
        # A mitigation takes all threads.
        if self.recipe is not None and self.mitigation is None:
            train_in_two_processes(self.lab, counts)

    # --- the data ---

    def load_benchmark_shared_by_runs(self) -> Benchmark:
        """Load the secrets, known pairs and held-out texts.

        Runs with the same `subject` share these data.
        """
        if self.recipe is not None:
            return self.lab
        # Omit the limit: the chosen form stays, even if fewer records are attacked.
        form_key = json.dumps(
            [
                to_json(self.plan.target),
                to_json(self.loading),
                to_json(replace(self.plan.data, limit=None)),
            ]
        )
        recorded = None if self.folder is None else self.folder.text_form()
        form = recorded or self.shared.forms.get(form_key)
        key = [self.subject, form and form.digest, self.soft_prompt_rows]
        benchmark = self.shared.get_or_make(
            "data",
            key,
            lambda: load_own_benchmark(
                TableReader(self.plan.data, self.plan.seed, self.table_counting),
                str(self.plan.target.model),
                self.model,
                form,
                self.form_rows,
                self.soft_prompt_rows,
            ),
        )
        if benchmark.text_form is not None:
            self.shared.forms[form_key] = benchmark.text_form
        if self.folder is not None and benchmark.text_form not in (None, recorded):
            self.folder.save_text_form(benchmark.text_form)
        return benchmark

    @cached_property
    def benchmark(self) -> Benchmark:
        """This run's data, with an alias of each secret for use in sentences."""
        # A shallow copy is enough: replacing tuples below does not affect other runs.
        benchmark = copy.copy(self.load_benchmark_shared_by_runs())
        key = load_alias_salt()
        benchmark.notes += self.notes_on_models()
        limit_known_pairs(benchmark, self.plan.data.known_limit, self.plan.seed)
        benchmark.secrets = alias_secrets(benchmark.secrets, key)
        benchmark.canaries = tuple(alias_secrets(benchmark.canaries, key))
        return benchmark

    @property
    def reference_fault_sentence(self) -> str:
        """Sentence that the reference model was trained on private data; "" if it was not."""
        name = (
            self.plan.target.reference or self.plan.target.public or self.attacked_adapter_base_name
        )
        if not name or self.reference_model is None:
            return ""
        folder = Path(name)
        if (record := promises.read_privacy_record(folder)) is not None:
            return (
                f"the reference has seen private data: its privacy.json says that {record.method} "
                "trained it"
            )
        # Digesting the attacked texts takes time: only if the reference has a list.
        names = read_shard_record_list(folder)
        private = names and set(names).intersection(self._attacked_ids_by_text_digest)
        if private:
            return (
                f"the reference has seen private data: its shard.json names {len(private)} of the "
                "attacked records"
            )
        return ""

    def load_site_references(self, spec: str) -> ReferenceModels:
        """Load the reference models that `-A references=` names.

        Raise AuditError if `spec`, the value of this option, names no models. The lab reads it as
        the number of models to train.
        """

        def train(lab: Lab) -> Path:
            return lab.references_folder(parse_reference_model_count(spec))

        folder = Path(str(self.find_model(spec, train)))

        def load_one(folder: str) -> LanguageModel:
            public = self.public_model
            if (
                isinstance(public, HuggingFaceModel)
                and (Path(folder) / "adapter_config.json").is_file()
                and is_adapter_of_base(Path(folder), public.name)
            ):
                return load_adapter_model(public, Path(folder))  # all share the base's weights
            model = self.load_role_model("references", folder)
            check_same_vocabulary_size(
                f"-A references={spec}",
                model.name,
                model.vocab_size,
                "the target's",
                self.model.vocab_size,
            )
            return model

        return self.shared.get_or_make(
            "all references",
            (self.subject, spec),
            lambda: load_reference_models(folder, load_one, self._attacked_ids_by_text_digest),
        )

    @cached_property
    def _attacked_ids_by_text_digest(self) -> Mapping[str, Sequence[str]]:
        """Ids of the attacked records, keyed by the SHA-256 of their text.

        Records with the same text share a key.
        """
        ids_by_digest: dict[str, list[str]] = {}
        decode = make_token_decoder(self.benchmark.tokenizer)
        whole_texts = self.benchmark.whole_texts
        for secret in self.benchmark.secrets:
            wording = secret.wording  # in its original spelling
            if secret.id in whole_texts:
                text = whole_texts[secret.id]
            elif wording is None:
                text = decode(secret.tokens)
            else:
                text = wording.prefix_and_suffix_text
            ids_by_digest.setdefault(record_digests([text])[0], []).append(secret.id)
        return ids_by_digest

    def model_before_or_retrained(self, kind: str) -> LanguageModel:
        """Load a baseline of unlearning, a model with which an unlearned model is compared.

        Raise AuditError for a model of another family or vocabulary, and for the attacked model
        itself.

        Args:
            kind: `before` for the model before unlearning; `retrained` for a model trained without
                the records to forget.
        """
        name = self.find_model(getattr(self.plan.target, kind), lambda lab: lab.retrained_folder())
        target = self.model
        folders = Path(str(name)), Path(self.model_place)
        if all(folder.is_dir() for folder in folders) and folders[0].samefile(folders[1]):
            raise AuditError(f"expected --{kind} as another model than --model, got {name} as both")
        other = self._load_matching_model(kind, name)
        assert other is not None  # a row needs a name
        if other.family != target.family:
            raise AuditError(
                f"expected --{kind} as {target.family}, as --model is, got {other.name}: "
                f"{other.family}"
            )
        return require_same_vocabulary(kind, target, other)

    # --- inputs of defenses ---

    def missing_input_phrase(self, defense: Defense) -> str:
        """Return the names of this defense's missing inputs; "" if nothing is missing."""
        if self.recipe is not None:
            return ""  # the lab trains each input when a row needs it
        ensemble = defense.ensemble_folder
        if {"ensemble", "whole"} & set(defense.needs) and not ensemble:
            return "-D ensemble=DIR, a folder of member adapters"
        if "whole" in defense.needs and find_control_adapter(Path(ensemble)) is None:
            return (
                "an ensemble with its control, as audit train with -D control=true makes it: "
                f"{ensemble!r} has none"
            )
        if "public" in defense.needs and self.plan.target.public is None:
            return (
                "--public MODEL, one that has seen no private data (of an ensemble, the base of "
                "its members)"
            )
        if "trained" in defense.needs and not defense.model_folder:
            return f"-D {defense.name}.model=DIR, a folder made by audit train {defense.name}"
        return ""

    @property
    def has_next_token_distributions(self) -> bool:
        """True if the attacked model returns full next-token distributions."""
        if "model" in self.live:
            return "distribution" in self.live["model"].capabilities
        return resolve_attacked_provider(self.plan.target, self.loading).distribution

    def refuse_unservable_defense(self, defense: Defense) -> None:
        """Raise AuditError if these models and data do not suit the defense with its options."""
        if not self.has_next_token_distributions:
            raise AuditError(
                f"--defense {defense.name} needs a model whose distributions are read here, "
                f"got {self.plan.target.model}, which gives none: serve the defended model, and "
                "audit that"
            )
        if phrase := self.missing_input_phrase(defense):
            raise AuditError(f"--defense {defense.name} outside the lab needs {phrase}")
        check_controls_trained_like_defense(defense)

    def is_control_the_undefended_model(self, control: Defense) -> bool:
        """Return whether the undefended model is the same adapter as this control.

        Such a control is an adapter trained on all records, in the same way as the members of an
        ensemble. The user may choose this adapter as the attacked model.
        """
        if "whole" not in control.needs:
            return False
        if self.recipe is not None:
            return self.recipe.is_target_trained_like_members
        # The user may attack the very adapter that is the control of an ensemble.
        adapter = find_control_adapter(Path(control.ensemble_folder))
        model = Path(str(self.plan.target.model))
        return adapter is not None and model.is_dir() and model.samefile(adapter)

    def ensemble_served_by_defense(self, defense: Defense) -> Ensemble:
        """Load the ensemble of adapters that this defense combines."""
        count = defense.required_member_count
        folder = str(
            self.find_model(defense.ensemble_folder, lambda lab: lab.ensemble_folder(count))
        )
        if folder not in self._ensembles:
            public = self._public_model_for_adapters
            self._ensembles[folder] = load_lora_ensemble(Path(folder), public)
        return self._ensembles[folder]

    def model_trained_by_defense(self, defense: Defense) -> TrainedModel:
        """Load or train the model of this defense."""

        def train(lab: Lab) -> Path:
            assert isinstance(defense, Trainer)  # only trainers need the input "trained"
            return lab.trained_folder(defense)

        return load_trained_defense(
            defense,
            str(self.find_model(defense.model_folder, train)),
            lambda folder: self.load_role_model("trained", folder),
            self.model.vocab_size,
        )

    def control_adapter_of_ensemble(self, defense: Defense) -> LanguageModel:
        """Load the control of an ensemble.

        The control is an adapter trained on all records, in the same way as the ensemble's members.
        """
        folder = self.find_model(defense.ensemble_folder, lambda lab: lab.control_folder())
        return load_control_adapter(Path(str(folder)), self._public_model_for_adapters)

    @property
    def _public_model_for_adapters(self) -> HuggingFaceModel:
        """Return the public model that adapters extend.

        Raise AuditError if this model accepts no adapter.
        """
        public = self.public_model
        if not isinstance(public, HuggingFaceModel):
            raise AuditError(
                "expected --public as a transformers model, which the adapters of an ensemble are "
                f"added to, got {type(public).__name__}"
            )
        return public

    def training_seconds(self, defense: Defense | None, building: float) -> float | None:
        """Return how many seconds the training of a target's models took; None if unknown.

        Args:
            defense: None for the undefended model.
            building: seconds that this run needed to train or load the models.
        """
        if self.recipe is not None and not isinstance(defense, UnlearningBaseline):
            return self.lab.training_seconds(self.mitigation if defense is None else defense)
        return None if defense is None else building


def limit_known_pairs(benchmark: Benchmark, limit: int | None, seed: int) -> None:
    """Limit the attacker's known pairs of the benchmark, in place, to `limit`; None for no limit.

    A known pair is a prefix with its suffix that the attacker knows. For the same seed, a larger
    limit keeps all pairs of a smaller limit.
    """
    known = benchmark.known
    if limit is None or limit >= len(known):
        return
    indices = sorted(
        make_keyed_generator("benchmark", "known limit", seed).permutation(len(known))[:limit]
    )
    benchmark.known = tuple(known[i] for i in indices)
    benchmark.notes += (
        f"--known-limit left the attacker {limit} of {len(known)} auxiliary prefixes and suffixes",
    )


def check_controls_trained_like_defense(defense: Defense) -> None:
    """Raise AuditError if a control was not trained like its defense.

    The message states the difference.
    """
    promise = promises.read_privacy_record(Path(defense.model_folder))
    settings = read_training_summary(Path(defense.model_folder)).settings
    for control in filter(None, (cause.row for cause in defense.cause_chain())):
        folder = control.model_folder
        record = promises.read_privacy_record(Path(folder)) if folder else None
        if promise is None or record is None:
            continue  # `load_trained_defense` refuses a folder of a different training
        control_settings = read_training_summary(Path(folder)).settings
        pairs = [(name, value, control_settings.get(name)) for name, value in settings.items()]
        pairs += promises.list_training_differences(promise, record)
        for setting, expected, other in pairs:
            if expected != other:
                raise AuditError(
                    f"expected the control {folder!r} to be trained as the {defense.name} model "
                    f"was, with {setting} {expected}, got {other}"
                )


def load_trained_defense(
    defense: Defense, folder: str, load: Callable[[str], LanguageModel], vocab_size: int
) -> TrainedModel:
    """Load the model of a trained defense from a folder, such as `-D model=` names.

    Raise AuditError if a different method trained the model.

    Args:
        defense: the defense.
        folder: folder of the model.
        load: function that loads a model from a folder.
        vocab_size: vocabulary size of the attacked model.
    """
    if not Path(folder).is_dir():
        raise AuditError(
            f"expected -D model= of {defense.name} to be a folder that was trained, got {folder!r}"
        )
    record = promises.read_privacy_record(Path(folder))
    summary = read_training_summary(Path(folder))
    # A variant makes no promise, so only its training record identifies it.
    is_variant = isinstance(defense, Variant)
    trainer_record = summary if is_variant else record
    if trainer_record is None or trainer_record.method != defense.name:
        actual = f"no {RECORD if is_variant else promises.FILE}"
        if trainer_record is not None and trainer_record.method:
            actual = f"a model trained by {trainer_record.method}"
        raise AuditError(
            f"expected {folder!r} to be trained by audit train {defense.name}, got {actual}"
        )
    model = load(folder)
    check_same_vocabulary_size(repr(folder), "it", model.vocab_size, "the target's", vocab_size)
    return TrainedModel(
        model,
        record,
        gradient_canaries.read_gradient_canaries(Path(folder)),
        summary.told,
        summary.tokens_after,
    )
