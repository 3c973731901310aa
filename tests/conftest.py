"""Small real models, made on the spot: shared by the tests of models, sampling, attacks and
defenses."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import pickle
import random
import re
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Of what is imported and collected nothing is garbage; to look for it takes a tenth of the time.
if gc.isenabled():
    gc.disable()

# No test asks the network, which takes twenty seconds to fail. Read where the hub's library is
# imported, so here.
os.environ["HF_HUB_OFFLINE"] = "1"

import auditor

if (
    _why := auditor.explain_mixed_checkout()
):  # before anything of it is imported: a green run on other code is worse than none
    pytest.exit(_why, returncode=2)

import numpy as np
import torch
from hypothesis import register_random, settings
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from auditor.benchmarks.data.files import Files, TableReader
from auditor.benchmarks.data.large_tables import TableCounting
from auditor.benchmarks.data.lm_extraction import LMExtraction
from auditor.benchmarks.data.tokenised import Tokenised
from auditor.cli import run_command_line
from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.plan_parts import DataPlan
from auditor.models import self_check
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins import registry
from auditor.privacy import gaussian
from auditor.reports import html, plot_files, plots
from auditor.reports.blocks import Figure
from auditor.reports.schema import PATH
from auditor.statistics import metrics
from auditor.testing import make_tiny_random_model as tiny

# What is compiled is kept, here and by what a test starts, whatever the environment says: to
# compile the program and to rewrite the tests' assertions anew takes ten seconds a worker, and one
# more each time that a test starts the command.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Properties are about values, not about how busy the machine is, and the same ones on every
# machine; `--hypothesis-profile=search` looks for new ones.
settings.register_profile("audit", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("audit")


def seed_torch(value: int) -> torch.Generator:
    """`torch.manual_seed`, but that no call is put by, with a traceback of its own, for a GPU that
    is never used."""
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    return torch.default_generator.manual_seed(value)


class TorchRandom:
    """torch's global generator as hypothesis keeps one, so that an example that is tried again
    draws the same."""

    seed, getstate, setstate = map(
        staticmethod, (seed_torch, torch.get_rng_state, torch.set_rng_state)
    )


if not torch.cuda.is_available():
    torch.manual_seed = seed_torch
TORCH = TorchRandom()
register_random(TORCH)  # by a weak reference; it knows `random` and NumPy itself

# One thread unless asked for more, here and in whatever a test starts: workers are one a processor,
# and beside other work threads that wait for each other take forty times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
THREADS = int(os.environ["OMP_NUM_THREADS"])
torch.set_num_threads(THREADS)

# No test cuts the power: that a file is on disk before it counts is asked by those that put another
# fsync here.
os.fsync = lambda handle: None
CONNECT = sqlite3.connect


def unsynced(*given: Any, **named: Any) -> sqlite3.Connection:
    """As `sqlite3.connect`, but that nothing waits for the disk."""
    connection = CONNECT(*given, **named)
    connection.execute("pragma synchronous = off")
    return connection


sqlite3.connect = unsynced

# Every defense that can be made here: two forms are made by bitsandbytes, which development does
# without.
_LACKING = () if find_spec("bitsandbytes") else ("nf4", "fp4")
DEFENSES = {name: kind for name, kind in registry.list_defenses().items() if name not in _LACKING}

os.environ["AUDIT_SALT"] = "of these tests only"  # what a user has of their own is not touched
SHARED = Path(__file__).resolve().parents[2] / "shared"


def methods() -> dict[str, str]:
    """What a run records of the attacks and probes there are."""
    return {name: kind.measures for name, kind in registry.list_methods().items()}


def seed() -> None:
    """The global generators, for what takes no seed of its own: PEFT's adapters, modules without a
    maker, dropout."""
    random.seed(0)
    np.random.seed(0)
    seed_torch(0)


@contextmanager
def refuses(*facts: str, error: type[Exception] = AuditError) -> Iterator[None]:
    """That this is refused in one line that holds these facts: options, names, numbers. Its words
    are not looked at."""
    with pytest.raises(error) as caught:
        yield
    said = str(caught.value)
    assert states([said], *facts) and "\n" not in said, f"{facts} in {said!r}"


def states(said: Iterable[str], *facts: str) -> bool:
    """Whether one of these sentences holds all of these facts."""
    patterns = [rf"(?<![\w.]){re.escape(fact)}(?!\w)" for fact in facts]
    return any(all(re.search(pattern, one) for pattern in patterns) for one in said)


SAVE = plot_files.save_frontier_plot
PICTURES: dict[bytes, str] = {}


def drawn_once(block: Figure) -> str:
    """`plots.svg`, which draws the same plot of the same result once for all tests."""
    key = pickle.dumps(block)
    if key not in PICTURES:
        PICTURES[key] = plots.render_plot_svg(block)
    return PICTURES[key]


def framed(block: Figure) -> str:
    """A plot with nothing in it."""
    return plots._format_inline_svg('<svg viewBox="0 0 1 1"></svg>', block)


def unpainted(paths: Sequence[Path], blocks: Sequence[Figure], alt: str) -> None:
    """A picture's files with its text alone."""
    for path in paths:
        disk.replace_atomically(path, alt)


# What is imported and collected stays: looking through it for garbage again and again takes a tenth
# of the time.
@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 20)


ASKED = (
    "_rows_agree_after",
    "_shared_prefix_is_exact",
    "_joined_rows_are_exact",
    "_records_are_exact",
)
QUESTIONS = {name: getattr(self_check._SelfCheckTrial, name) for name in ASKED}
ANSWERS: dict[Any, bool] = {}


def answered_once(name: str) -> Callable[..., bool]:
    """A question of a model's self-check, which is asked once of the same weights: it is a sixth of
    a small audit."""

    def asked(trial: self_check._SelfCheckTrial, *given: Any, **named: Any) -> bool:
        weights = [*trial.model.model.parameters()]
        if sum(map(torch.numel, weights)) > 10**7:  # takes longer to know again than the question
            return QUESTIONS[name](trial, *given, **named)
        code = (
            type(trial.model.model).forward,
            vars(trial.model.model).get("forward"),
            trial.model.served,
        )
        read = hashlib.blake2b(trial.model.model.config.to_json_string().encode())
        for weight in weights:
            read.update(f"{weight.dtype} {weight.shape}".encode())
            read.update(weight.detach().contiguous().view(torch.uint8).numpy())
        key = (
            name,
            given,
            *named.items(),
            code,
            trial.room,
            trial.model.capabilities,
            read.digest(),
        )
        if key not in ANSWERS:
            ANSWERS[key] = QUESTIONS[name](trial, *given, **named)
        return ANSWERS[key]

    return asked


# Drawing a page takes longer than a small audit: `tests/reports` draws, and modules that are marked
# `drawn`. Whole modules, as what one of them has made once must not depend on which test came
# first.
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, question in QUESTIONS.items():
        itself = {"models", "zoo", "providers"} & {*item.path.parts}
        setattr(self_check._SelfCheckTrial, name, question if itself else answered_once(name))
    drawn = "reports" in item.path.parts or item.get_closest_marker("drawn")
    html.render_plot_svg, plot_files.save_frontier_plot = (
        (drawn_once, SAVE) if drawn else (framed, unpainted)
    )
    _account("privacy" in item.path.parts or item.get_closest_marker("accounted") is not None)


PLD_TO = gaussian._PLD_TO


# The tight accountant takes longer than a small private training: `tests/privacy` asks it, and
# modules that are marked `accounted`; all others have Renyi's bound, in milliseconds.
def _account(tightly: bool) -> None:
    most = PLD_TO if tightly else 0.0
    if most != gaussian._PLD_TO:
        gaussian._PLD_TO = most
        gaussian.find_noise_multiplier.cache_clear()


# Each fixture and each test starts from the seed, so none depends on what ran before it or first
# asked for a fixture. (An autouse fixture would come after those of a module, and before plug-ins
# that seed a test's call themselves.)
@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    seed()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    seed()


@pytest.fixture(autouse=True, scope="session")
def empty_working_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Relative names lead nowhere: where the README's first command was run, `runs/latest` is a
    real run."""
    with contextlib.chdir(tmp_path_factory.mktemp("working")):
        yield
        assert not os.listdir(), f"a test left this in the working folder: {os.listdir()}"


@pytest.fixture(autouse=True)
def threads_of_the_test() -> Iterator[None]:
    """Every later test of a worker would take many times as long."""
    yield
    found = torch.get_num_threads()
    torch.set_num_threads(min(found, THREADS))
    assert found <= THREADS, f"the test left torch with {found} threads"


# `--plugin` files live as long as the process does: what a module or a test has loaded is forgotten
# behind it.
@pytest.fixture(autouse=True, scope="module")
def plugins_of_the_module() -> Iterator[None]:
    yield from _plugins_forgotten()


@pytest.fixture(autouse=True)
def plugins_of_the_test(plugins_of_the_module: None) -> Iterator[None]:
    yield from _plugins_forgotten()


def _plugins_forgotten() -> Iterator[None]:
    before, titles = dict(registry._extra), dict(metrics._DECLARED)
    yield
    registry._extra.clear()
    registry._extra.update(before)
    metrics._DECLARED.clear()
    metrics.register_plugin_titles(titles)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The project's shared papers and data; tests that need them skip where they are absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"needs the shared data in {SHARED}, which is not here")
    return SHARED


def save_tiny(folder: Path, kind: str = "neox") -> None:
    """A tiny random model with a tokenizer of single bytes, as `--model` and `audit train` take
    it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate(["<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    tiny(len(vocabulary), kind=kind).model.save_pretrained(folder)


@pytest.fixture(scope="session")
def make_tiny() -> Callable[..., HuggingFaceModel]:
    return tiny


def fits_schema(folder: Path) -> bool:
    """Whether the result of this run folder is what `reports/schema.json` says it is; raises where
    it is not."""
    schema = json.loads(PATH.read_text(encoding="utf-8"))
    Draft202012Validator(schema).validate(
        json.loads((folder / "result.json").read_text(encoding="utf-8"))
    )
    return True


@pytest.fixture(scope="session")
def neox() -> HuggingFaceModel:
    return tiny()


def check_command(*words: object, code: int = 0) -> None:
    """Run `audit` with these words in this process, and check that it exits with the code."""
    assert run_command_line([str(word) for word in words]) == code, words


# --- benchmarks of a user's data ---


def read_files(
    data: str, tokenizer: Any, *, seed: int = 0, counting: TableCounting | None = None, **given: Any
) -> Files:
    """Read `data` with these fields of a plan and options of `Files`."""
    options = {name: given.pop(name) for name in ("form", "trained", "room") if name in given}
    reader = TableReader(DataPlan(data=data, **given), seed, counting or TableCounting())
    return Files(reader, tokenizer, **options)


def read_tokenised(data: str, vocab_size: int, **given: Any) -> Tokenised:
    names = ("model", "trained", "room", "end_of_text")
    options = {name: given.pop(name) for name in names if name in given}
    return Tokenised(DataPlan(data=data, **given), vocab_size, **options)


def read_arrays(data: str, vocab_size: int, seed: int = 0, **given: Any) -> LMExtraction:
    return LMExtraction(DataPlan(data=data, **given), vocab_size, seed)
