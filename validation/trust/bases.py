"""Provide what the checks of this folder train: a lab's public model, and tokenizers of given
texts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from auditor.benchmarks.lab.lab import Lab
from auditor.benchmarks.lab.lab_recipe import LabRecipe
from auditor.benchmarks.lab.real_lab import RealLab
from auditor.benchmarks.lab.smollm2 import find_smollm2_folder
from auditor.cli import run_command_line
from validation.harness import refuse

Name = Literal["small", "smollm2"]
LABS: dict[str, type[Lab]] = {"small": Lab, "smollm2": RealLab}


@dataclass(frozen=True)
class Base:
    """A base model. save: writes the model into a folder; course: training options except
    epochs.
    """

    save: Callable[[Path], object]
    course: tuple[object, ...]


def _small(folder: Path) -> None:
    lab = Lab(LabRecipe())
    shutil.copytree(lab.public_folder(), folder, dirs_exist_ok=True)


def byte_pair_tokenizer(
    texts: Iterable[str], size: int, special: list[str], *before: Any
) -> Tokenizer:
    """Train a byte-pair tokenizer on texts. before: pre-tokenizers that split the texts first."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*before, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    asked: dict[str, Any] = {
        "vocab_size": size,
        "special_tokens": special,
        "initial_alphabet": alphabet,
    }
    made.train_from_iterator(texts, trainers.BpeTrainer(**asked, show_progress=False))
    return made


_LORA = ("--lora", "--lora-rank", 16, "--block", 256, "-D", "batch=3", "-D", "learning_rate=1e-3")
BASES: dict[Name, Base] = {
    "small": Base(_small, ("-D", "learning_rate=2e-3")),
    "smollm2": Base(lambda folder: shutil.copytree(find_smollm2_folder(), folder), _LORA),
}


def audit(*parts: object) -> None:
    """Run an `audit` command, which must succeed."""
    if code := run_command_line([str(part) for part in parts]):
        refuse(f"audit {parts[0]} ended with {code}")
