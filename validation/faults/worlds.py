"""Define the commands of the fault table, and make their tiny models and data.

Every case runs in a folder of its own, with the same relative names, so equal results have equal
files.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from auditor.defenses import private_training
from auditor.training import dp_loop, members
from tests.conftest import save_tiny
from validation.faults.forks import Ended, Moment, Running, warm
from validation.harness import write_rows

_KEY = "5" * 64


@dataclass(frozen=True)
class CommandPhase:
    """A phase of a command, recognised by files in its folder.

    begins, ends: globs of files that appear; "" for the command's start or end.
    """

    name: str
    begins: str
    ends: str

    def begun(self, stand: Path) -> bool:
        return not self.begins or any(stand.glob(self.begins))

    def over(self, stand: Path) -> bool:
        return bool(self.ends) and any(stand.glob(self.ends))

    def moment(
        self, stand: Path, seconds: float = 0.0, sent: signal.Signals = signal.SIGKILL
    ) -> Moment:
        """Return the moment `seconds` of processor time after the phase begins, with its signal."""
        return Moment(lambda: self.begun(stand), seconds, sent)


@dataclass(frozen=True)
class FaultCommand:
    """A command to disturb. told: its name in the table.

    made: files and folders to compare; needs: commands whose results must exist before.
    """

    name: str
    told: str
    words: tuple[str, ...]
    made: tuple[str, ...]
    phases: tuple[CommandPhase, ...]
    needs: tuple[FaultCommand, ...] = ()
    resume: tuple[str, ...] = ()  # replaces the words once there is something to resume
    resumable: str = ""  # a file whose existence means that the command can be resumed
    api: bool = False  # needs the server

    def again(self, stand: Path) -> tuple[str, ...]:
        """Return the arguments that continue the command: --resume if a run had begun, else the
        same.
        """
        return self.resume if self.resume and (stand / self.resumable).exists() else self.words

    def how(self, stand: Path) -> str:
        """Return how the command is continued, in words."""
        return "--resume" if self.again(stand) is self.resume else "the same command"


def a_run(*words: str, out: str = "run") -> dict[str, tuple[str, ...] | str]:
    return {
        "words": ("run", *words, "-o", out),
        "made": (out,),
        "resume": (
            "run",
            "--resume",
            out,
            *(("--base-url", "URL") if "--base-url" in words else ()),
        ),
        "resumable": f"{out}/plan.json",
    }


_OWN = (
    "--model",
    "model",
    "--data",
    "data.jsonl",
    "--nonmembers",
    "fresh.jsonl",
    "--known",
    "known.jsonl",
)
_ETHICIST = (
    "--attack",
    "ethicist",
    *(f"-Aethicist.{o}" for o in ("prompt_length=3", "epochs=12", "patience=12")),
)
_PROBES = (
    "--attack",
    "extraction-probability",
    "--attack",
    "near-verbatim",
    "--attack",
    "membership",
)
_SMALL = ("-A", "samples=8", "--batch-size", "8")

MEMBERS = FaultCommand(
    "members",
    "`audit train pmixed`",
    (
        *("train", "pmixed", "--model", "model", "--data", "data.jsonl", "-o", "ensemble"),
        *("-D", "members=3", "-D", "epochs=4", "-D", "rank=2", "-D", "together=1", "-D", "batch=2"),
    ),
    ("ensemble",),
    (CommandPhase("training of members", "ensemble/training.json", ""),),
)
PRIVATE = FaultCommand(
    "dp",
    "`audit train dp-sgd`",
    (
        *("train", "dp-sgd", "--model", "model", "--data", "data.jsonl", "-o", "private"),
        *("-D", "epochs=4", "-D", "batch=8", "-D", "noise_multiplier=1"),
    ),
    ("private",),
    (CommandPhase("DP training", "private/checkpoint.pt", ""),),
)
OWN = FaultCommand(
    "run",
    "`audit run`: ethicist and three probes",
    phases=(
        CommandPhase("soft-prompt tuning", "run/tokens.jsonl", "run/state/*.pt"),
        CommandPhase("sampling", "run/state/*.pt", "run/observations.jsonl"),
        CommandPhase("probes", "run/observations.jsonl", "run/texts.jsonl"),
        CommandPhase("report writing", "run/texts.jsonl", ""),
    ),
    **a_run(
        *_OWN, *_ETHICIST, *_PROBES, *_SMALL, "-Anear-verbatim.beams=2", "--setting", "white-box"
    ),  # type: ignore[arg-type]
)
CLAIM = FaultCommand(
    "claim",
    "`audit run`: PMixED, a budget that ends within a row",
    phases=(CommandPhase("sampling inside a claim", "run/prefix_token.json", ""),),
    needs=(MEMBERS,),
    **a_run(  # type: ignore[arg-type]
        *(
            *_OWN,
            "--attack",
            "perplexity",
            "--attack",
            "ethicist",
            "-Aethicist.prompt_length=3",
            "-Aethicist.epochs=1",
        ),
        *(
            "--defense",
            "pmixed",
            "--public",
            "model",
            "-D",
            "ensemble=ensemble",
            "-D",
            "q=0.5",
            *_SMALL,
        ),
        *("-D", "pmixed.queries=500", "-D", "pmixed.on_exhaustion=public"),
    ),
)
SWEEP = FaultCommand(
    "sweep",
    "`audit run --sweep --seeds`",
    (
        *(
            "run",
            *_OWN,
            "--attack",
            "perplexity",
            "--sweep",
            "perplexity.temperature=0.5,1",
            "--seeds",
            "0-1",
        ),
        *(*_SMALL, "--setting", "white-box", "-o", "sweep"),
    ),
    ("sweep",),
    (CommandPhase("a sweep", "sweep/sweep.json", ""),),
    resume=("run", "--resume", "sweep"),
    resumable="sweep/sweep.json",
)
REPRODUCE = FaultCommand(
    "reproduce",
    "`audit reproduce`",
    ("reproduce", "paper", *_OWN, "--batch-size", "8", "-o", "ledger"),
    ("ledger",),
    (CommandPhase("a reproduction", "ledger", ""),),
)
REPORT = FaultCommand(
    "report",
    "`audit report --reveal`",
    ("report", "run", "--reveal"),
    ("run",),
    (CommandPhase("report writing anew", "", ""),),
    needs=(OWN,),
)
LAB = FaultCommand(
    "lab",
    "`audit run` on the lab: target, ensemble and DP-SGD are trained",
    phases=(
        CommandPhase("the lab's training", "cache/*", "run/prefix_token.json"),
        CommandPhase("its audit", "run/prefix_token.json", ""),
    ),
    **a_run("--config", "lab.toml"),  # type: ignore[arg-type]
)
API = FaultCommand(
    "api",
    "`audit run --model openai:`",
    phases=(CommandPhase("API calls", "run/plan.json", ""),),
    api=True,
    **a_run(  # type: ignore[arg-type]
        *("--model", "openai:tiny", "--base-url", "URL", "--tokenizer", "served", *_OWN[2:]),
        *(
            "--attack",
            "perplexity",
            "--attack",
            "extraction-probability",
            "-A",
            "temperature=1",
            "-A",
            "top_p=1",
        ),
        *("--samples", "4", "--prefix-length", "8", "--suffix-length", "4"),
    ),
)
RAY = FaultCommand(
    "ray",
    "`audit run --engine ray --workers 2`",
    phases=(CommandPhase("Ray: the driver", "run/guesses.jsonl", "run/texts.jsonl"),),
    **a_run(  # type: ignore[arg-type]
        *(
            *_OWN,
            "--attack",
            "perplexity",
            "--attack",
            "extraction-probability",
            "-A",
            "samples=200",
        ),
        *("--batch-size", "2", "--setting", "white-box", "--engine", "ray", "--workers", "2"),
    ),
)
CASES = (MEMBERS, PRIVATE, OWN, CLAIM, REPORT, SWEEP, REPRODUCE, LAB)

_LAB = """
attack = ["perplexity"]
defense = ["pmixed", "dp-sgd"]
samples = 3

[defense_options]
"dp-sgd" = { epochs = 1, batch = 8 }

[lab_recipe]
vocab_size = 300
layers = 1
hidden = 32
heads = 2
repeats = [[1, 4, 2], [4, 2, 2], [16, 2, 1]]
others = 2
nonmembers = 4
public_records = 20
public_epochs = 2
private_epochs = 2
private_rank = 2
members = 2
lora_rank = 2
lora_epochs = 2
batch = 8
canaries = [["955320", 1]]
"""
_PAPER = """
title = "A paper"
[scale.lab]
seeds = [0, 1]
"""
_TABLE = """
title = "Table 1"
attack = ["perplexity"]
setting = "white-box"
samples = 3
[[variant]]
name = "warm"
[[variant]]
name = "cold"
attack_options = { perplexity = { temperature = 0.05 } }
[[claim]]
id = "less"
text = "Cold sampling extracts no less"
paper = "?"
metric = "recall"
of = { variant = "cold" }
minus = { variant = "warm" }
expect = "> -0.5"
"""


@dataclass
class World:
    """The models, records and plans for all cases, and the results of each undisturbed command."""

    folder: Path
    url: str = ""
    _whole: dict[str, tuple[Path, Ended, dict[str, float]]] = field(default_factory=dict)
    _count: int = 0

    def stand(self, case: FaultCommand) -> Path:
        """Make and return a new folder in which to run the case."""
        self._count += 1
        stand = self.folder / f"{case.name}-{self._count}"
        (stand / "cache").mkdir(parents=True)
        for given in (self.folder / "given").iterdir():
            (stand / given.name).symlink_to(given)
        for before in case.needs:
            whole, _ = self.whole(before)
            for made in before.made:
                shutil.copytree(whole / made, stand / made)
        return stand

    def start(
        self,
        case: FaultCommand,
        stand: Path,
        words: Sequence[str] = (),
        before: Callable[[], object] = lambda: None,
    ) -> Running:
        """Start the case's command, or `words`, in its folder.

        before: a further function that the child calls first.
        """
        own = [self.url if word == "URL" else word for word in words or case.words]
        return Running(
            own, stand, {"AUDIT_CACHE": str(stand / "cache")}, lambda: (repeatable(), before())
        )

    def run(
        self,
        case: FaultCommand,
        stand: Path,
        words: Sequence[str] = (),
        moment: Moment | None = None,
    ) -> Ended:
        return self.start(case, stand, words).ended(moment)

    def whole(self, case: FaultCommand) -> tuple[Path, Ended]:
        """Return the folder and the end of the undisturbed command, which is run only once."""
        return self._undisturbed(case)[:2]

    def lasting(self, case: FaultCommand) -> dict[str, float]:
        """Return how many seconds of processor time each phase of the undisturbed command takes."""
        return self._undisturbed(case)[2]

    def _undisturbed(self, case: FaultCommand) -> tuple[Path, Ended, dict[str, float]]:
        if case.name not in self._whole:
            stand = self.stand(case)
            running = self.start(case, stand)
            lasting = {}
            for phase in case.phases:
                running.until(partial(phase.begun, stand))
                begun = running.seconds
                running.until(partial(phase.over, stand))
                lasting[phase.name] = running.seconds - begun
            ended = running.ended()
            assert ended.code == 0, f"{case.name}, undisturbed: {ended.said}"
            self._whole[case.name] = stand, ended, lasting
        return self._whole[case.name]


def repeatable() -> None:
    """Make trainings in the child repeatable and easy to interrupt.

    DP-SGD gets a known key instead of a secret one, so that trainings can be compared, and a
    checkpoint is written at every step instead of every minute.
    """
    private_training.secrets.token_hex = lambda _: _KEY  # type: ignore[attr-defined]
    for function in (dp_loop.fit_privately, members.train_private_members):
        assert function.__kwdefaults__ is not None
        function.__kwdefaults__["seconds_between"] = 0.0


def make(folder: Path) -> World:
    warm()
    given = folder / "given"
    for name in ("model", "public"):
        save_tiny(given / name, kind="gpt2" if name == "public" else "neox")
    for name, first, count in (("data", 0, 24), ("fresh", 400, 6), ("known", 800, 12)):
        numbers = ((i * 37 % 997, i * 7919 % 997) for i in range(first, first + count))
        rows = ({"prefix": f"bed {bed:03d} is", "suffix": f" {code:03d}"} for bed, code in numbers)
        write_rows(given / f"{name}.jsonl", rows)
    (given / "lab.toml").write_text(_LAB)
    (given / "paper").mkdir()
    (given / "paper" / "paper.toml").write_text(_PAPER)
    (given / "paper" / "table1.toml").write_text(_TABLE)
    return World(folder)
