"""Plant faults in our own trainers, one at a time, and list which audit detects each, or why none
can.

    python -m validation.trust.planted_faults [-o DIR] [--only NAME] [--epsilon 1] [--small]  (15 CPU minutes)

Every row is a real training of a small lab's model by one of our trainers, with one thing broken
from outside; its claim is what it wrote into `privacy.json`. It is audited as a user would: by
gradient canaries (white box, `gradient-audit`), and by texts that coins included (black box,
`epsilon-audit`). Controls have no fault: a finding against one is a false alarm, and the program
exits with 1.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.attacks.claim_check import ClaimCheck
from auditor.attacks.epsilon_audit import EpsilonAudit
from auditor.attacks.gradient_audit import GradientAudit
from auditor.attacks.prediction_audit import PredictionAudit
from auditor.benchmarks.data.fixed_distributions import build_fixed_ensemble
from auditor.benchmarks.lab.lab import Lab
from auditor.benchmarks.lab.lab_recipe import LabRecipe
from auditor.core import threads
from auditor.core.nouns import Secret
from auditor.core.result import Audited
from auditor.core.secret_randomness import make_keyed_generator
from auditor.defenses import private_training
from auditor.defenses.adp import Adp, AdpSound
from auditor.defenses.pmixed import PMixed
from auditor.defenses.private_training import DpSgd, PrivateTraining
from auditor.models.ensemble import Ensemble
from auditor.models.loading import load_causal_lm
from auditor.plugins.defense import Scenario, TrainedModel
from auditor.plugins.probe import DELTA, observe_all_secrets
from auditor.plugins.view import WHITE_BOX, View
from auditor.privacy.gradient_canaries import read_gradient_canaries
from auditor.privacy.promises import read_privacy_record
from auditor.runs.prefix_token import wrap_prefixed_model
from auditor.training import dp_loop
from auditor.training.clipping import add_clipped_gradients
from auditor.training.dp_loop import PoissonSampler, PrivateModel, ScaledOptimizer
from auditor.training.noise import NoiseStream, add_gaussian_noise
from validation.harness import Page, run


@dataclass(frozen=True)
class PlantedSize:
    """The size of a study: the lab's recipe, epochs, batch size and canaries."""

    recipe: LabRecipe
    epochs: int
    batch: int
    canaries: int


REPEATS = ((1, 60, 4), (4, 12, 2), (16, 4, 1))
USUAL = PlantedSize(
    LabRecipe(
        vocab_size=512,
        layers=1,
        hidden=64,
        heads=2,
        block=64,
        repeats=REPEATS,
        others=0,
        nonmembers=4,
        public_records=200,
        public_epochs=2,
        private_rank=8,
        private_alpha=16,
        audit_canaries=200,
    ),
    epochs=4,
    batch=32,
    canaries=1000,
)
SMALL = PlantedSize(
    dataclasses.replace(
        USUAL.recipe,
        hidden=32,
        repeats=((1, 8, 2), (2, 4, 1)),
        others=0,
        nonmembers=4,
        public_records=20,
        public_epochs=1,
        private_rank=2,
        private_alpha=16,
        audit_canaries=60,
    ),
    epochs=4,
    batch=12,
    canaries=400,
)


# --- the faults ---


@dataclass(frozen=True)
class PlantedFault:
    """A fault: its name and description, the trainer, and `plant`, a context that breaks the
    trainer.

    before: how our code refuses or reports the fault before an audit. unseen: why an audit cannot
    detect the fault. sound: whether nothing is broken.
    """

    name: str
    what: str
    trainer: type = DpSgd
    plant: Callable[[], AbstractContextManager[Any]] = nullcontext
    before: str = ""
    unseen: str = ""
    sound: bool = False


def noise_off() -> AbstractContextManager[Any]:
    def add(optimizer: Any) -> None:
        for p in optimizer.params:
            p.grad = p.summed_grad.to(p)

    return patch.object(ScaledOptimizer, "add_noise", add)


@contextmanager
def noise_before_clipping() -> Iterator[None]:
    """Add noise to the sum of unclipped gradients, then clip the mean of the batch to C."""

    def add(optimizer: Any) -> None:
        deviation = optimizer.noise_multiplier * optimizer.max_grad_norm
        for p in optimizer.params:
            p.grad = add_gaussian_noise(p.summed_grad, deviation, optimizer.stream).to(p)
        norm = (
            torch.stack([p.grad.norm() for p in optimizer.params]).norm()
            / optimizer.expected_batch_size
        )
        for p in optimizer.params:
            p.grad *= (optimizer.max_grad_norm / norm).clamp(max=1.0)

    def keep(optimizer: Any, shares: Tensor) -> Tensor:
        return _add_weighted(optimizer, torch.ones(len(shares)))

    with (
        patch.object(ScaledOptimizer, "add_clipped_samples", keep),
        patch.object(ScaledOptimizer, "add_noise", add),
    ):
        yield


def batch_clipped() -> AbstractContextManager[Any]:
    """Clip the batch's mean gradient to C, as `clip_grad_norm_` does, instead of each record's."""

    def clip(optimizer: Any, shares: Tensor) -> Tensor:
        mean = torch.stack([sample.mean(0).norm() for sample in optimizer.grad_samples]).norm()
        return _add_weighted(
            optimizer, (optimizer.max_grad_norm / mean).clamp(max=1.0).expand(len(shares))
        )

    return patch.object(ScaledOptimizer, "add_clipped_samples", clip)


def _add_weighted(optimizer: Any, factors: Tensor) -> Tensor:
    for p in optimizer.params:
        sample = optimizer._get_flat_grad_sample(p)
        p.summed_grad = add_clipped_gradients(p.summed_grad, sample, factors.double(), math.inf)
        p.grad_sample = None
    return factors


def shuffled() -> AbstractContextManager[Any]:
    def batch(sampler: PoissonSampler, step: int) -> NDArray[np.int64]:
        parts = round(1 / sampler.rate)
        epoch, part = divmod(step, parts)
        order = make_keyed_generator("shuffled", sampler.key, epoch).permutation(sampler.size)
        return np.sort(np.array_split(order, parts)[part])

    return patch.object(PoissonSampler, "draw_batch_units", batch)


@contextmanager
def half_the_steps() -> Iterator[None]:
    """Solve the noise for half of the steps, and account for half of them."""
    solve, promise = private_training.find_noise_multiplier, PrivateTraining.make_privacy_record

    def solved(epsilon: float, delta: float, q: float, steps: int) -> float:
        return solve(epsilon, delta, q, steps // 2)

    def promised(self: Any, trained: PrivateModel, *rest: Any) -> Any:
        return promise(self, dataclasses.replace(trained, steps=trained.steps // 2), *rest)

    halved = patch.object(PrivateTraining, "make_privacy_record", promised)
    with patch.object(private_training, "find_noise_multiplier", solved), halved:
        yield


class Killed(Exception):
    """An interruption in the middle of a training."""


@contextmanager
def key_reused() -> Iterator[None]:
    """Resume a training with the old key but with noise steps counted from 0 again."""
    fit = dp_loop.fit_privately

    def killed_and_resumed(
        model: Any, examples: Any, sampler: Any, recipe: Any, **more: Any
    ) -> PrivateModel:
        middle, show = recipe.steps // 2, more.pop("progress")
        fresh = [{name: p.detach().clone() for name, p in model.named_parameters()}]

        def kill(done: int, loss: float) -> None:
            show(done, loss)
            if done == middle:
                raise Killed

        try:
            fit(model, examples, sampler, recipe, progress=kill, seconds_between=0.0, **more)
        except Killed:
            model.load_state_dict(fresh.pop(), strict=False)

        def from_zero(key: str, step: int) -> NoiseStream:
            return NoiseStream(key, step - middle)

        with patch.object(dp_loop, "NoiseStream", from_zero):
            return fit(model, examples, sampler, recipe, progress=show, **more)

    with patch.object(dp_loop, "fit_privately", killed_and_resumed):
        yield


_FINISHED = "too little of a text that a few steps saw is left in it"
_WEAK = (
    "the true ε is less than twice the claim, and so many canaries prove a fraction of what is true"
)
FAULTS = (
    PlantedFault("none: dp-sgd", "nothing: the control", sound=True),
    PlantedFault(
        "none: adp-sound",
        "nothing: the control of records that are clipped to shares",
        AdpSound,
        sound=True,
    ),
    PlantedFault("noise-off", "no noise is added", plant=noise_off),
    PlantedFault(
        "noise-before-clipping",
        "noise on sums of whole gradients, then the batch is clipped",
        plant=noise_before_clipping,
    ),
    PlantedFault(
        "batch-clipped",
        "the batch's mean gradient is clipped, not each record's",
        plant=batch_clipped,
    ),
    PlantedFault(
        "shuffled",
        "shuffled batches, accounted for as Poisson's",
        plant=shuffled,
        before="a loader that is no PoissonSampler, and sampling=shuffled, are refused",
        unseen="a unit in one batch of each epoch is no easier to see than one in as many on "
        "average",
    ),
    PlantedFault(
        "half-the-steps",
        "noise and ε are those of half the steps",
        plant=half_the_steps,
        unseen=_WEAK,
    ),
    PlantedFault(
        "key-reused",
        "a resumed training draws the noise of its first half again",
        plant=key_reused,
        before="key, step and weights come from one checkpoint, and noise is a function of key "
        "and step",
        unseen="a score that adds up steps does not subtract those of equal noise",
    ),
    PlantedFault(
        "adp-nominal",
        "ADP as published; its nominal ε taken as a claim",
        Adp,
        before="privacy.json has no epsilon: the nominal one is called that",
        unseen="along one coordinate the nominal ε is nearly right at its mean noise, and with "
        "so few of them the "
        "size of all the noise does not yet say who is in the batch",
    ),
)


@dataclass(frozen=True)
class Service:
    """A private prediction service: its defense and ensemble. Other fields are as in
    `PlantedFault`.
    """

    name: str
    what: str
    defense: PMixed
    ensemble: Callable[[], Ensemble]
    before: str = ""
    unseen: str = ""
    sound: bool = False


def one_member() -> Ensemble:
    """Return an ensemble of one certain member and an uncertain public model."""
    return build_fixed_ensemble((0.145, 0.855), (1.0, 0.0))


def overlapping() -> Ensemble:
    """Return an ensemble with record "a" in two of three shards."""
    held = build_fixed_ensemble((0.5, 0.5), (0.9, 0.1), (0.8, 0.2), (0.4, 0.6))
    held.unit, held.shards = "record", [["a", "b"], ["a", "c"], ["d"]]
    return held


_SERVED = {"q": 0.03, "alpha": 3}
SERVICES = (
    Service("none: pmixed", "nothing: the control", PMixed(**_SERVED), one_member, sound=True),
    Service(
        "pmixed-published",
        "PMixED as published, of one member",
        PMixed(**_SERVED, accounting="published"),
        one_member,
        before="its status is `claim; proof has gaps`",
        unseen="the true ε of this context is 9.8, of which 768 games prove a part",
    ),
    Service(
        "duplicates",
        "a record in two shards",
        PMixed(**_SERVED),
        overlapping,
        before="nothing is promised for a record that shards share, and `audit train pmixed` "
        "puts copies in one",
        unseen="the games take one shard in or out, and no claim is left to hold them to",
    ),
)


# --- results ---


@dataclass(frozen=True)
class TrainingFaultAudit:
    """The result of one audit of one fault.

    bound, best: the proved and the provable lower bound on epsilon, nats; NaN if none. seen:
    sentences on violations found besides the bound. unseen: why the audit cannot find more.
    """

    fault: PlantedFault | Service
    audit: str
    claimed: float
    bound: float
    best: float
    canaries: int
    minutes: float
    seen: tuple[str, ...]
    unseen: str = ""

    @property
    def caught(self) -> bool:
        return bool(self.seen) or self.bound > self.claimed

    @property
    def verdict(self) -> str:
        if self.fault.sound:
            return "FALSE ALARM" if self.caught else "consistent"
        if not self.caught:
            return "not caught"
        return "caught" + (" by its bound" if self.bound > self.claimed else " by what it saw")


def trained(trainer: PrivateTraining, lab: Lab) -> TrainedModel:
    """Train on the lab's texts, and load the result as a run does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lab.train_by_trainer(trainer, folder)
        return TrainedModel(
            load_causal_lm(name), read_privacy_record(folder), read_gradient_canaries(folder)
        )


def rows_of(
    fault: PlantedFault, lab: Lab, size: PlantedSize, epsilon: float
) -> Iterator[TrainingFaultAudit]:
    """Train with the fault, and yield the audits of the model.

    A physical batch has the whole batch, so a fault that clips batches clips each batch as a
    whole.
    """
    recipe = {
        "epochs": size.epochs,
        "batch": size.batch,
        "physical_batch": 10**6,
        "gradient_canaries": size.canaries,
    }
    trainer = fault.trainer(epsilon=epsilon, learning_rate=2e-3, **recipe)
    start = time.perf_counter()
    with fault.plant():
        made = trained(trainer, lab)
    minutes = (time.perf_counter() - start) / 60
    assert made.privacy is not None
    claimed = (
        made.privacy.epsilon if made.privacy.epsilon is not None else made.privacy.nominal_epsilon
    )
    for audit, (audits, seen) in audited(made, lab).items():
        first, unseen = audits[0], fault.unseen if audit == GradientAudit.name else _FINISHED
        numbers = (
            math.inf if claimed is None else claimed,
            first.epsilon,
            first.best,
            first.canaries,
        )
        yield TrainingFaultAudit(fault, audit, *numbers, minutes, seen, unseen)


def served(service: Service, queries: int = 1024) -> Iterator[TrainingFaultAudit]:
    """Yield the exact check on one context without draws, and games over the tokens of the
    claim.
    """
    held = service.ensemble()
    scenario = Scenario(held.public, held.public, held, queries, 1)
    claim = service.defense.claim(scenario, queries)
    model, secrets = (
        service.defense.protect(scenario),
        [Secret("context", (0,), (0,), 1, alias="the context")],
    )
    view = View("target", model, WHITE_BOX, seed=0, public=held.public, claim=claim)
    for probe in (ClaimCheck(), PredictionAudit()):
        start = time.perf_counter()
        observed = observe_all_secrets(probe, view, secrets)
        audits, seen = (
            probe.epsilon_lower_bounds(secrets, observed),
            probe.claim_violations(secrets, observed),
        )
        numbers = (
            (audits[0].epsilon, audits[0].best, audits[0].canaries)
            if audits
            else (math.nan, math.nan, 0)
        )
        minutes, unseen = (
            (time.perf_counter() - start) / 60,
            "" if isinstance(probe, ClaimCheck) else service.unseen,
        )
        yield TrainingFaultAudit(
            service, probe.name, claim.epsilon[claim.relation], *numbers, minutes, seen, unseen
        )


def audited(made: TrainedModel, lab: Lab) -> dict[str, tuple[tuple[Audited, ...], tuple[str, ...]]]:
    """Return each audit's bounds and other findings. Texts are scored after an end of text, as
    trained.
    """
    before = (int(lab.tokenizer.eos_token_id),)
    public, own = (
        wrap_prefixed_model(load_causal_lm(str(lab.public_folder())), before),
        wrap_prefixed_model(made.model, before),
    )
    white, black = GradientAudit(), EpsilonAudit(delta=DELTA)
    view = View(
        "target",
        own,
        WHITE_BOX,
        seed=0,
        reference=public,
        tokenizer=lab.tokenizer,
        training=made.canaries,
    )
    coined = tuple(
        one for one in lab.canaries if one.canary is not None and one.canary.coin is not None
    )
    told = {}
    for probe, secrets in ((white, white.textless_subjects(view)), (black, coined)):
        found = observe_all_secrets(probe, view, secrets)
        told[probe.name] = (
            probe.epsilon_lower_bounds(secrets, found),
            probe.claim_violations(secrets, found),
        )
    return told


# --- the table ---


def cells(own: Sequence[TrainingFaultAudit]) -> tuple[str, ...]:
    """Return the table cells of one fault: its audits, each with bound / best provable bound."""
    fault, minutes = own[0].fault, max(row.minutes for row in own)
    what = f"**{fault.name}**: {fault.what}"
    return what, _number(own[0].claimed), "; ".join(map(_said, own)), f"{minutes:.1f}", fault.before


def _said(row: TrainingFaultAudit) -> str:
    numbers = f" {_number(row.bound)} / {_number(row.best)}" if math.isfinite(row.bound) else ""
    how = "; ".join(row.seen) or ("" if row.caught or row.fault.sound else row.unseen)
    return f"`{row.audit}`{numbers}, {row.verdict}" + (f": {how}" if how else "")


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "–"


def main(
    out: Annotated[Path | None, "a folder for planted_faults.md and planted_faults.json"] = None,
    only: Annotated[tuple[str, ...], [fault.name for fault in (*FAULTS, *SERVICES)]] = (),
    epsilon: float = 1.0,
    small: Annotated[bool, "seconds a row: for tests"] = False,
) -> int:
    threads.set_thread_count()
    size = SMALL if small else USUAL
    lab, rows, page = (
        Lab(size.recipe),
        list[TrainingFaultAudit](),
        Page(out and out / "planted_faults.md"),
    )
    page.head(
        "fault",
        "claimed ε",
        "audits: bound / best provable, and what they saw",
        "minutes",
        "beforehand",
    )
    for fault in (*FAULTS, *SERVICES):
        if only and fault.name not in only:
            continue
        own = list(
            served(fault) if isinstance(fault, Service) else rows_of(fault, lab, size, epsilon)
        )
        page.row(*cells(own))
        rows += own
    if out:
        told = [{**vars(row), "fault": row.fault.name, "verdict": row.verdict} for row in rows]
        (out / "planted_faults.json").write_text(json.dumps(told, indent=1))
    return int(any(row.fault.sound and row.caught for row in rows))


if __name__ == "__main__":
    raise SystemExit(run(main))
