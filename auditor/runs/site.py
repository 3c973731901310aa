"""Where an audit takes place: the model without a defense, what stands around it, and the data.

Knows no attack. One class for each place (`own_site.py`, `lab_site.py`); nothing else asks which of
them it is.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from auditor.benchmarks.data.large_tables import TableCounting
from auditor.core.plan_parts import DataPlan
from auditor.core.secret_randomness import keyed_random_generator
from auditor.models.base import LanguageModel
from auditor.models.ensemble import Ensemble
from auditor.models.references import ReferenceModels
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.defense import Defense, TrainedModel
from auditor.records.aliases import load_alias_salt, secrets_with_aliases
from auditor.records.folder import RunFolder
from auditor.runs.reporter import Reporter
from auditor.runs.sweep_cache import SweepCache


class DefenseParts(ABC):
    """What the defenses of a place are made of: their options that are sized to it, and the models
    that they hold."""

    @property
    @abstractmethod
    def default_defense_options(self) -> Mapping[str, Mapping[str, Any]]:
        """Options of defenses by name, where they are sized to this place."""

    def missing_input_phrase(self, defense: Defense) -> str:
        """What this defense would have to be given here; "" where it needs nothing more."""
        return ""

    def refuse_unservable_defense(self, defense: Defense) -> None:  # noqa: B027 - the lab refuses none
        """Refuses a defense that cannot stand here as it was asked for. Raises AuditError."""

    @abstractmethod
    def is_control_the_undefended_model(self, control: Defense) -> bool:
        """Whether the model without a defense is this control: trained by the recipe of the
        members, on all data."""

    @abstractmethod
    def ensemble_served_by_defense(self, defense: Defense) -> Ensemble:
        """The adapters that this defense serves."""

    @abstractmethod
    def model_trained_by_defense(self, defense: Defense) -> TrainedModel:
        """The model that this defense trains."""

    @abstractmethod
    def control_adapter_of_ensemble(self, defense: Defense) -> LanguageModel:
        """One adapter on all the records of the ensemble, by its members' recipe."""

    @abstractmethod
    def training_seconds(self, defense: Defense | None, building: float) -> float | None:
        """Seconds that the models behind a row took to train, as far as known; building: what it
        took just now.

        defense: None for the model without one.
        """


class Site(ABC):
    """The place of one audit. To make one costs nothing: each model is loaded, or trained, when it
    is asked for.

    subject: all of a plan that decides which model is attacked for which secrets: runs that agree
    in it share both.
    trains_on_demand: whether what a defense needs is made when its turn comes; else it is there
    before, and what the defense promises can be refused before hours are spent.
    """

    trains_on_demand: ClassVar[bool]
    hurried = False  # whether a prefix token is chosen by as few known pairs as a check can afford
    # rows that the choice of a text form looks at, at most; None: its own number
    form_rows: int | None = None
    # of the longest soft prompt that an attack puts before the texts: they take room in a context
    soft_prompt_rows = 0
    relearn_rate: ClassVar[float] = 5e-5  # of `--relearn`, unless the plan says another

    def __init__(
        self,
        data_plan: DataPlan,
        seed: int,
        subject: dict[str, Any],
        reporter: Reporter,
        shared: SweepCache,
    ) -> None:
        self.data_plan, self.seed, self.subject = data_plan, seed, subject
        self.reporter, self.shared = reporter, shared
        self.table_counting = TableCounting()

    # --- what can be said before anything is loaded ---

    @property
    @abstractmethod
    def default_attack_options(self) -> Mapping[str, Mapping[str, Any]]:
        """Options of attacks by name, where they are sized to this place."""

    @property
    def is_model_asked_over_network(self) -> bool:
        """Whether the model is asked over a network: its budget and its answers have one owner."""
        return False

    @property
    def attacked_adapter_base_name(self) -> str:
        """The base of an attacked adapter; "" for a whole model."""
        return ""

    @property
    def names_reference_model(self) -> bool:
        """Whether there is to be a reference model, as far as is known before anything is
        loaded."""
        return True

    def check_plan_model_is_obtainable(self, given: Sequence[str]) -> None:  # noqa: B027 - most places have one of their own
        """Refuses a model that cannot be had as the plan says, before anything is loaded. Raises
        AuditError.

        given: fields of the plan that say how models are had.
        """

    def read_auto_dtype_as_float32(self) -> None:  # noqa: B027 - the lab is in no other
        """Called before anything is loaded: `--dtype auto` is float32, for methods that are right
        in it alone."""

    def digests_of_models_in_no_file(self) -> dict[str, str]:
        """`role/...` -> digest of the models that are read from no file, as far as they are at
        hand."""
        return {}

    def forbid_training(self) -> None:  # noqa: B027 - most places make nothing
        """From now on nothing is made here: what is not there is refused when it is asked for."""

    def attach_run_folder(self, folder: RunFolder) -> None:  # noqa: B027 - most places have nothing to do with it
        """Told which run it serves, before anything is loaded."""

    # --- what is loaded ---

    @property
    @abstractmethod
    def model(self) -> LanguageModel:
        """What is attacked, without a defense."""

    @property
    @abstractmethod
    def undefended_model_description(self) -> str:
        """What the undefended model is: a sentence without its full stop."""

    @property
    @abstractmethod
    def public_model(self) -> LanguageModel | None:
        """One that has seen no private data; None where there is none."""

    @property
    @abstractmethod
    def reference_model(self) -> LanguageModel | None:
        """What attacks hold likelihoods against; None where there is none."""

    @property
    def reference_fault_sentence(self) -> str:
        """Why the reference model cannot serve as one, as it was trained on private data; "" where
        it can."""
        return ""

    @abstractmethod
    def load_reference_models_of_site(self, asked: str) -> ReferenceModels:
        """The reference models that `-A references=` names. Raises AuditError where that names
        none."""

    @property
    @abstractmethod
    def undefended_trained_model(self) -> TrainedModel:
        """The undefended model, with what its training promised and kept, as far as known (what it
        told: `notes`)."""

    @abstractmethod
    def load_benchmark_shared_by_runs(self) -> Benchmark:
        """The secrets, the known pairs and the held-out texts, as runs on the same subject share
        them."""

    def notes_on_models(self) -> tuple[str, ...]:
        """What a reader must know of the models beside the data: sentences."""
        return ()

    @cached_property
    def benchmark(self) -> Benchmark:
        """The data as this run sees them, every secret with the alias that sentences name it by."""
        # A shallow copy is enough: below, tuples are replaced and never changed, which other runs
        # do not see.
        benchmark, key = copy.copy(self.load_benchmark_shared_by_runs()), load_alias_salt()
        benchmark.notes += self.notes_on_models()
        limit_known_pairs(benchmark, self.data_plan.known_limit, self.seed)
        benchmark.secrets = secrets_with_aliases(benchmark.secrets, key)
        benchmark.canaries = secrets_with_aliases(benchmark.canaries, key)
        return benchmark

    def narrow_benchmark(self, benchmark: Benchmark) -> None:
        """Puts a part of the benchmark in its place: from now on the run is about these secrets."""
        self.__dict__["benchmark"] = benchmark  # where the cached property looks first

    @property
    @abstractmethod
    def defense_parts(self) -> DefenseParts:
        """What defenses are made of here."""

    # --- what stands beside a model that was to forget ---

    def model_before_or_retrained(self, kind: str) -> LanguageModel:
        """`before`: the model before it was to forget; `retrained`: the same, without what was to
        be forgotten."""
        raise NotImplementedError


def limit_known_pairs(benchmark: Benchmark, limit: int | None, seed: int) -> None:
    """Leaves the attacker so many of the known pairs; a larger number, same seed, keeps all of a
    smaller one."""
    known = benchmark.known
    if limit is None or limit >= len(known):
        return
    kept = sorted(
        keyed_random_generator("benchmark", "known limit", seed).permutation(len(known))[:limit]
    )
    benchmark.known = tuple(known[i] for i in kept)
    benchmark.notes += (
        f"--known-limit left the attacker {limit} of {len(known)} auxiliary records",
    )
