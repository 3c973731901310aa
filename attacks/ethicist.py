"""Tune soft prompts with a smoothing loss, and rank guesses by calibrated confidence.

The method is by Zhang et al. 2023.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from auditor.attacks.likelihood_ranking import (
    require_reference_model,
    score_reference_model,
)
from auditor.core.errors import NotApplicable
from auditor.core.nouns import Pair
from auditor.core.secret_randomness import make_keyed_generator
from auditor.generation.sample import SuffixCandidates
from auditor.models.base import LanguageModel
from auditor.models.memory import BatchSizeLimit
from auditor.plugins.attack import (
    Attack,
    SamplingAttack,
    add_required_capability,
    compute_mean_nlls,
)
from auditor.plugins.options import Count, CountOrZero, Nonnegative, Positive, Share
from auditor.plugins.view import Batch, View

_PAIRS_AT_ONCE = 32  # in one pass of tuning


@dataclass(frozen=True)
class Ethicist(SamplingAttack):
    """Extract with a soft prompt, K samples and calibrated confidence (Ethicist, Eq. 1-4).

    The defaults are the paper's (Section 4.2, Appendix B). Losses are means, not sums, as in the
    authors' code.
    `warmup_steps`: 0 takes the paper's share, 500 of its 8,440 steps; 500 steps would be too many
    for few pairs.
    `tune_on`: the model on which the prompt is tuned. `auto` takes the audited model if the attack
    has its gradients, otherwise the public model, otherwise no prompt.

    Sampled candidates are ranked by `confidence`, or by their share of the samples, r_i/K, if the
    model gives no log-probabilities. Candidates of a tree search are ranked by their exact
    probability under the decoding distribution; beams and single candidates are ranked by nll.

    The paper's ablations are `alpha=0` (w/o smooth), `confidence=perplexity` (w/o calibrated) or
    `reference` (comparing (LM)), and `tune_on=none` (w/o prompt tuning).
    """

    name = "ethicist"
    needs = ("draw",)
    deep = True
    prompt_length: Count = 100
    alpha: Nonnegative = 0.7
    smooth_tokens: Count = 5
    learning_rate: Positive = 1e-3
    weight_decay: Nonnegative = 0.01
    warmup_steps: CountOrZero = 0
    batch: Count = 32
    epochs: Count = 20
    patience: Count = 5
    validation: Share = 0.1
    tune_on: Literal["auto", "target", "public", "none"] = "auto"
    confidence: Literal["calibrated", "perplexity", "reference"] = "calibrated"

    @property
    def required_capabilities(self) -> tuple[str, ...]:
        if self.confidence == "calibrated":
            return super().required_capabilities
        return add_required_capability(super().required_capabilities, "likelihood")

    def soft_prompt_rows(self) -> int:
        return self.prompt_length

    def choose_tuning_model_label(self, view: View) -> str:
        """Return which model the prompt is tuned on: "target", "public" or "none".

        Raise NotApplicable if the chosen model is unavailable.
        """
        if self.tune_on == "target":
            view.require_capability("embeddings")
        if self.tune_on == "public" and view.public is None:
            raise NotApplicable("tune_on=public needs a public model: give --public MODEL")
        if self.tune_on == "public" and not _fits_public_prompt(view):
            raise NotApplicable(
                f"tune_on=public needs a public model with embeddings as wide as those of "
                f"{view.target.name}"
            )
        if self.tune_on != "auto":
            return self.tune_on
        if view.has_capability("embeddings"):
            return "target"
        return "public" if _fits_public_prompt(view) else "none"

    def soft_prompt_name(self, view: View) -> str:
        on = self.choose_tuning_model_label(view)
        return "" if on == "none" else f"tuned on {on}"

    def fitted_state_name(self, view: View) -> str:
        on = self.choose_tuning_model_label(view)
        return view.target_name if on == "target" else on

    def notes(self, view: View, state: dict[str, Any]) -> tuple[str, ...]:
        if state["tuned_on"] == "none":
            prompt = "no soft prompt"
            if self.tune_on == "auto":
                reason = "the target takes none"
                if "embeddings" in view.target.capabilities:
                    reason = "no --public MODEL with embeddings as wide as the target's"
                prompt += f": {reason}"
        else:
            losses = state["validation_loss"]
            prompt = (
                f"soft prompt tuned on the {state['tuned_on']} model; best epoch "
                f"{state['best_epoch']} of {len(losses)}, validation loss "
                f"{min(losses):.3f} nats"
            )
            if state["steps"] < self.warmup_steps:
                prompt += (
                    f"; the warm-up of {self.warmup_steps} steps is longer than all "
                    f"{state['steps']}: -A "
                    f"warmup_steps={count_warmup_steps(state['steps'])} is the paper's "
                    "share of them"
                )
        return (prompt, self._choose_ranking(view)[0])

    def fit_options(self) -> dict[str, Any]:
        """Return the options that affect tuning, but not those of sampling and ranking."""
        options = super().fit_options()
        del options["confidence"]
        for field in dataclasses.fields(SamplingAttack):
            del options[field.name]
        return options

    def timing_stand_in(self) -> tuple[Attack, float]:
        """Return a copy of the attack that tunes for one epoch, and the maximum number of epochs.

        A run times this copy to predict how long the whole tuning takes.
        """
        return dataclasses.replace(self, epochs=1), float(self.epochs)

    def soft_prompt(self, state: dict[str, Any]) -> Tensor | None:
        return state.get("prompt")

    def check_inputs(self, view: View, known: Sequence[Pair]) -> None:
        if self.confidence == "reference":
            require_reference_model(view)
        if self.choose_tuning_model_label(view) != "none":
            split_tuning_pairs(known, self.validation, view.seed)

    def fit(self, view: View, known: Sequence[Pair]) -> dict[str, Any]:
        """Tune a soft prompt, and return the prompt (P, d) of the best epoch by validation loss.

        The validation losses are returned, too. Without a model to tune on, there is no prompt.
        """
        on = self.choose_tuning_model_label(view)
        if on == "none":
            return {"tuned_on": on}
        model = view.target if on == "target" else view.public
        assert model is not None
        train, validation = split_tuning_pairs(known, self.validation, view.seed)
        key = (view.seed, "tune", view.target_name if on == "target" else "public")
        return {"tuned_on": on, **self._tune_soft_prompt(model, train, validation, key)}

    def _make_prompt_optimizer(
        self, prompt: Tensor, steps: int
    ) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
        optimizer = torch.optim.AdamW(
            [prompt], lr=self.learning_rate, weight_decay=self.weight_decay, eps=1e-6
        )
        warmup = self.warmup_steps or count_warmup_steps(steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, partial(_compute_prompt_learning_rate_factor, warmup, steps)
        )
        return optimizer, schedule

    def _tune_soft_prompt(
        self,
        model: LanguageModel,
        train: Sequence[Pair],
        validation: Sequence[Pair],
        key: tuple[str | int, ...],
    ) -> dict[str, Any]:
        order = make_keyed_generator(*key, "order")
        # On the CPU, to draw the same members for any device of the model.
        noise = torch.Generator().manual_seed(
            int(make_keyed_generator(*key, "members").integers(2**62))
        )
        # Start at embedding rows 0..P-1 with AdamW's eps 1e-6: as in the authors' code.
        # Use float32 for any model: bfloat16 would round small steps away.
        prompt = model.embedding_rows(self.prompt_length).float().requires_grad_(True)
        # The rate decays over all epochs as planned, even if patience ends the tuning sooner.
        steps = self.epochs * -(-len(train) // self.batch)
        optimizer, schedule = self._make_prompt_optimizer(prompt, steps)
        # The initial prompt is not a candidate: the paper keeps the best *epoch*.
        best = prompt
        best_epoch = 0
        best_loss = np.inf
        history = []
        at_once = BatchSizeLimit(_PAIRS_AT_ONCE)

        def loss_of(pairs: Sequence[Pair], learn: Callable[[Tensor], None]) -> float:
            state = noise.get_state()

            def accumulate_loss(size: int) -> float:
                noise.set_state(state)  # a retry with a smaller batch asks the same members
                # drop gradients from before memory ran out
                optimizer.zero_grad(set_to_none=True)
                return self._accumulate_mean_prompt_tuning_loss(
                    model, pairs, prompt, noise, size, learn
                )

            return at_once.run_within_memory(accumulate_loss, len(pairs))[1]

        for epoch in range(1, self.epochs + 1):
            shuffled = list(map(train.__getitem__, order.permutation(len(train))))
            for start in range(0, len(shuffled), self.batch):
                loss_of(shuffled[start : start + self.batch], Tensor.backward)
                optimizer.step()
                schedule.step()
            with torch.no_grad():
                # With the smoothing term: the authors' code compares epochs by the total loss.
                loss = loss_of(validation, lambda part: None)
            history.append(loss)
            # NaN is never smaller, so a diverged epoch is never the best.
            if loss < best_loss:
                best = prompt.detach().clone()
                best_epoch = epoch
                best_loss = loss
            if epoch - best_epoch >= self.patience:
                break
        return {
            "prompt": best.detach(),
            "best_epoch": best_epoch,
            "validation_loss": history,
            "steps": steps,
        }

    def _accumulate_mean_prompt_tuning_loss(
        self,
        model: LanguageModel,
        pairs: Sequence[Pair],
        prompt: Tensor,
        noise: torch.Generator,
        size: int,
        learn: Callable[[Tensor], None],
    ) -> float:
        """Return the mean loss over the pairs, computed with `size` pairs per forward pass.

        `learn` receives each pass's part of this mean. If the model is an ensemble that queries
        random members, all passes over a group of `_list_tuning_groups` query the same members. So
        the result is that of a single large pass.
        """
        total = 0.0
        for share, group in _list_tuning_groups(pairs, len(prompt)):
            members = noise.get_state()
            for start in range(0, len(group), size):
                noise.set_state(members)
                batch = group[start : start + size]
                weight = share * len(batch) / len(group)
                loss = self._prompt_tuning_loss(model, batch, prompt, noise)
                # backward immediately: gradients add up, and graphs need not coexist in memory
                learn(loss * weight)
                total += weight * float(loss.detach())
        return total

    def _prompt_tuning_loss(
        self, model: LanguageModel, pairs: Sequence[Pair], prompt: Tensor, noise: torch.Generator
    ) -> Tensor:
        """Return the mean of L_MLE + alpha L_smooth (Eq. 3) over pairs with equally long suffixes.

        Shorter pairs are padded at the end, which does not change earlier distributions.
        """
        suffixes = torch.tensor([pair.suffix for pair in pairs], device=model.device)
        most = max(len(pair.prefix) for pair in pairs)
        length = suffixes.shape[1]
        padding = torch.tensor([most - len(pair.prefix) for pair in pairs], device=model.device)
        texts = []
        for pair in pairs:
            texts.append([*pair.prefix, *pair.suffix[:-1], *[0] * (most - len(pair.prefix))])
        last = length + int(padding.max())
        # (pairs, last, V); the part that predicts each suffix, (pairs, length, V), is selected
        # below.
        distribution = model.tuning_log_probs(
            torch.tensor(texts, device=model.device), last, prompt, noise
        )
        if last > length:
            # A padded text ends `padding` tokens early, and so does its suffix.
            places = (last - length - padding).unsqueeze(-1) + torch.arange(
                length, device=model.device
            )
            distribution = distribution[
                torch.arange(len(pairs), device=model.device).unsqueeze(-1), places
            ]
        nll = -distribution.gather(-1, suffixes.unsqueeze(-1)).squeeze(-1)  # (pairs, length)
        return compute_prompt_tuning_loss(nll, self.smooth_tokens, self.alpha).mean()

    def candidate_scores(self, view: View, batch: Batch) -> list[Tensor]:
        if self.confidence == "reference":
            return score_reference_model(view, batch)
        score = self._choose_ranking(view)[1]
        return [score(candidates) for _, candidates in batch]

    def score_is_probability(self, view: View) -> bool:
        if self.confidence != "calibrated" or self.search == "beam":
            return False
        # A single candidate is ranked by its nll (below), which is not a probability.
        return self.search == "tree" or not (
            self.has_one_candidate and view.has_capability("likelihood")
        )

    def _choose_ranking(self, view: View) -> tuple[str, Callable[[Any], Tensor]]:
        """Return a description of the ranking, and a function that scores a prefix's candidates."""
        if self.confidence != "calibrated":
            if self.confidence == "reference":
                words = "perplexity against the reference model's"
            else:
                words = "perplexity"
            return f"candidates ranked by {words}", lambda c: -compute_mean_nlls(c)
        if not view.has_capability("likelihood"):
            return (
                "candidates ranked by their share of the samples",
                lambda c: c.counts.double() / c.counts.sum(),
            )
        if self.search == "beam":
            # Beams are not samples, so Eq. 4 has nothing to count.
            return (
                "candidates ranked by nll: calibrated confidence needs samples, not beams",
                lambda c: -c.nll,
            )
        if self.has_one_candidate:
            # Eq. 4 gives any single candidate 1, which cannot rank it across prefixes: rank by nll.
            words = (
                "one candidate a prefix: ranked by nll, since its calibrated confidence is always 1"
            )
            return words, lambda c: -c.nll
        if self.search == "tree":
            words = "candidates ranked by their exact probability under the decoding distribution"
            return words, lambda c: c.log_q.exp()
        return "candidates ranked by calibrated confidence", calibrate_confidence


def _fits_public_prompt(view: View) -> bool:
    """Return whether the target takes a soft prompt that is tuned on the public model."""
    widths = set()
    for model in (view.public, view.target):
        if model is None or "embeddings" not in model.capabilities:
            return False
        widths.add(model.embedding_rows(1).shape[1])
    return len(widths) == 1


def compute_prompt_tuning_loss(nll: Tensor, smooth_tokens: int, alpha: float) -> Tensor:
    """Return L_MLE + alpha L_smooth of each pair, of shape (pairs,), in nats (Ethicist, Eq. 1-3).

    nll: (pairs, length), in nats. L_smooth is the mean of a suffix's `smooth_tokens` largest token
    losses at this step, or of all its losses if it is shorter.
    """
    worst = nll.topk(min(smooth_tokens, nll.shape[-1]), dim=-1).values
    return nll.mean(-1) + alpha * worst.mean(-1)


def calibrate_confidence(candidates: SuffixCandidates) -> Tensor:
    """Return the calibrated confidence (Ethicist, Eq. 4) of each distinct sample, (distinct,).

    C_i = r_i exp(-nll_i) / sum_j r_j exp(-nll_j), where r_i is the number of samples equal to
    sample i. nll_i is a sum over tokens, equal to the authors' 50 * mean loss for 50 tokens.
    Logarithms avoid 0/0.
    """
    return torch.softmax(candidates.counts.double().log() - candidates.nll, dim=-1)


def split_tuning_pairs(
    known: Sequence[Pair], validation: float, seed: int
) -> tuple[list[Pair], list[Pair]]:
    """Split the attacker's pairs at random into training and validation pairs, at least one each.

    validation: the share of validation pairs.
    """
    if len(known) < 2:
        raise NotApplicable(
            "needs at least 2 auxiliary records to tune a prompt (train and validation), got "
            f"{len(known)}: give --known FILE or --known-fraction, or -A ethicist.tune_on=none"
        )
    # Keyed only by the seed: every prompt is validated on the same pairs.
    order = make_keyed_generator(seed, "known", "split").permutation(len(known))
    n_validation = min(len(known) - 1, max(1, round(validation * len(known))))
    shuffled = [known[i] for i in order]
    return shuffled[n_validation:], shuffled[:n_validation]


def count_warmup_steps(steps: int) -> int:
    """Return how many of `steps` training steps are warm-up: the paper's share, 500 of 8,440.

    The paper has 8,440 steps: 13,500 training pairs and 20 epochs with batches of 32.
    """
    return max(1, round(steps * 500 / 8440))


def _list_tuning_groups(pairs: Sequence[Pair], rows: int) -> Iterator[tuple[float, list[Pair]]]:
    """Yield groups of pairs that fit into one forward pass, as (share of all pairs, pairs).

    The mean loss of all pairs is the sum of the groups' mean losses, weighted by the shares.

    All suffixes of a group have the same length. Whole texts of a group differ in length by at
    most an eighth of the shortest. rows: length of the soft prompt before each text, in tokens.
    """
    group: list[Pair] = []
    for pair in sorted(pairs, key=lambda pair: (len(pair.suffix), len(pair.prefix))):
        if group:
            other = len(pair.suffix) != len(group[0].suffix)
            size = rows + len(group[0].prefix) + len(pair.suffix)
            if (
                other
                or len(group) == _PAIRS_AT_ONCE
                or len(pair.prefix) - len(group[0].prefix) > size // 8
            ):
                yield len(group) / len(pairs), group
                group = []
        group.append(pair)
    yield len(group) / len(pairs), group


def _compute_prompt_learning_rate_factor(warmup: int, steps: int, step: int) -> float:
    """Return the learning rate's factor at a step.

    The factor rises linearly over `warmup` steps, then falls linearly to zero at `steps`.
    """
    # `LambdaLR` counts from 0: the first step has 1 / warmup of the rate instead of 0.
    if step < warmup:
        return (step + 1) / warmup
    return max(0.0, (steps - step) / max(1, steps - warmup))
