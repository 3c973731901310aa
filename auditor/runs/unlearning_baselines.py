"""Load or train the baselines of an unlearned model.

These are the model before unlearning, a model retrained without the records to forget, and
relearned models.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from auditor.core.errors import AuditError
from auditor.core.nouns import Tokens
from auditor.core.plan_parts import DefensePlan
from auditor.models.base import LanguageModel
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.defense import Defense
from auditor.runs.forms import NamedForm
from auditor.runs.site import Site
from auditor.runs.unlearning import (
    BeforeUnlearning,
    RelearnedBaseline,
    RetrainedBaseline,
    UnlearningBaseline,
)
from auditor.training.unlearning import train_relearned_copy


class UnlearningBaselines:
    """Provider of the baselines of unlearned models. Each is loaded or trained once.

    `steps` and `rate` are the number of steps and the learning rate of relearning.
    """

    def __init__(self, site: Site, plan: DefensePlan, seed: int) -> None:
        self.site = site
        self.steps = plan.relearn
        self.seed = seed
        self.rate = plan.relearn_rate or site.relearn_rate
        self._made: dict[UnlearningBaseline, LanguageModel] = {}

    def load_row_baseline(self, defense: Defense) -> LanguageModel:
        """Return the model of this baseline. Raise AuditError if the model is unavailable."""
        assert isinstance(defense, UnlearningBaseline)  # only they need "beside"
        if defense not in self._made:
            self._made[defense] = self._load_or_train_model(defense)
        return self._made[defense]

    def refuse_unobtainable_baseline(self, defense: Defense) -> None:
        """Raise AuditError early, without training, if the model of this baseline is
        unavailable.
        """
        if isinstance(defense, RelearnedBaseline) or (
            isinstance(defense, RetrainedBaseline) and defense.relearned
        ):
            self._choose_relearning_texts()
        # Loading is the check, and the row reuses the loaded model.
        if isinstance(defense, BeforeUnlearning | NamedForm):
            self.load_row_baseline(defense)
        elif isinstance(defense, RetrainedBaseline):
            self.load_row_baseline(RetrainedBaseline())

    def _load_or_train_model(self, baseline: UnlearningBaseline) -> LanguageModel:
        if isinstance(baseline, NamedForm):
            return self.site.load_deployed_form(baseline.place)
        if isinstance(baseline, BeforeUnlearning):
            return self.site.model_before_or_retrained("before")
        if isinstance(baseline, RetrainedBaseline):
            other = self.site.model_before_or_retrained("retrained")
            if baseline.relearned:
                return self._relearn_model(other)
            return other
        assert isinstance(baseline, RelearnedBaseline)
        return self._relearn_model(
            self.site.model
            if baseline.of is None
            else self.site.model_trained_by_defense(baseline.of).model
        )

    def _choose_relearning_texts(self) -> Sequence[Tokens]:
        """Return training records that are neither attacked nor to be forgotten.

        Raise AuditError if there are none.
        """
        if not (texts := self.site.benchmark.unattacked_training_tokens):
            raise AuditError(
                "expected auxiliary data to relearn on (--known or --known-fraction), got none"
            )
        return texts

    def _relearn_model(self, model: LanguageModel) -> LanguageModel:
        steps, seed = self.steps, self.seed
        assert steps is not None  # its row requires steps
        if not isinstance(model, HuggingFaceModel):
            raise AuditError(
                f"expected a transformers model to relearn, which can be trained, got {model.name}"
            )
        progress, texts = (
            partial(self.site.reporter.progress, f"relearning of {model.name}"),
            self._choose_relearning_texts(),
        )
        return train_relearned_copy(
            model,
            texts,
            steps=steps,
            rate=self.rate,
            seed=seed,
            progress=lambda n_done: progress(n_done, steps),
        )
