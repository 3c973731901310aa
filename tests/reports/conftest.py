"""A realistic result of a lab run, and a browser over the DevTools pipe, for the tests of the
reports."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import beta

from auditor.conclusions.outcomes import ValuesBySecret
from auditor.conclusions.secret_details import SecretDetails
from auditor.core.nouns import Claim
from auditor.core.result import (
    AuditResult,
    BenchmarkRecord,
    Chain,
    ChainStep,
    Finding,
    Measurement,
    TargetRecord,
)
from auditor.records.attacked_secrets import SecretAttributes
from auditor.reports import html
from auditor.statistics import judging
from tests.conftest import methods
from tests.rows import judge_columns, pack_suffixes

MEMBERS, NONMEMBERS, PER_COUNT = 320, 160, 64
REPEATS = ("1", "2", "4", "8", "16")
DECODING = {"text-only": "ancestral", "white-box": "top-p 0.7, temperature 0.8"}
# members completed, by target, setting and attack, at 1, 2, 4, 8 and 16 repeats; None: not
# applicable
HITS: dict[tuple[str, str, str], tuple[int, ...] | None] = {
    ("undefended", "text-only", "ethicist"): (0, 2, 21, 58, 64),
    ("undefended", "text-only", "perplexity"): (0, 1, 17, 55, 64),
    ("undefended", "white-box", "ethicist"): (0, 4, 36, 62, 64),
    ("undefended", "white-box", "perplexity"): (0, 2, 27, 60, 64),
    ("pmixed", "text-only", "ethicist"): (0, 0, 0, 0, 1),
    ("pmixed", "text-only", "perplexity"): None,
    ("pmixed", "white-box", "ethicist"): (0, 0, 0, 1, 3),
    ("pmixed", "white-box", "perplexity"): (0, 0, 0, 0, 2),
    ("ensemble-unmixed", "text-only", "ethicist"): (0, 0, 0, 2, 7),
    ("ensemble-unmixed", "text-only", "perplexity"): (0, 0, 0, 1, 6),
    ("ensemble-unmixed", "white-box", "ethicist"): (0, 0, 1, 4, 12),
    ("ensemble-unmixed", "white-box", "perplexity"): (0, 0, 0, 3, 9),
    ("uniform-mixing", "text-only", "ethicist"): (0, 1, 12, 45, 60),
    ("uniform-mixing", "text-only", "perplexity"): (0, 0, 9, 41, 59),
    ("uniform-mixing", "white-box", "ethicist"): (0, 4, 36, 62, 64),
    ("uniform-mixing", "white-box", "perplexity"): (0, 2, 27, 60, 64),
}


@cache  # hundreds of tests build the lab's result, of two hundred intervals each
def share(name: str, hits: int, n: int, note: str = "") -> Measurement:
    """A share with its Clopper-Pearson interval."""
    low = beta.ppf(0.025, hits, n - hits + 1) if hits else 0.0
    high = beta.ppf(0.975, hits + 1, n - hits) if hits < n else 1.0
    return Measurement(name, hits / n, float(low), float(high), n, note=note)


def difference(name: str, value: float, spread: float) -> Measurement:
    return Measurement(name, value, max(-1.0, value - spread), min(1.0, value + spread), MEMBERS)


def finding(target: str, setting: str, attack: str) -> Finding:
    hits = HITS[target, setting, attack]
    claims = target in ("pmixed", "uniform-mixing")
    access = (
        ("draw",)
        if setting == "text-only"
        else ("draw", "distribution") + ("embeddings",) * (attack == "ethicist")
    )
    cell = Finding(
        target=target,
        setting=setting,
        attack=attack,
        options={
            "samples": 10,
            **(
                {"tune_on": "public" if setting == "text-only" else "target"}
                if attack == "ethicist"
                else {}
            ),
        },
        access=access,
        decoding=DECODING[setting],
        claim_applies=setting == "text-only" if claims else None,
        claim_reason=""
        if not claims
        else "sampled tokens, ancestral"
        if setting == "text-only"
        else "log-probabilities, top-p 0.7",
        seconds=11.3,
        drawn=MEMBERS * 10 * 24,
    )
    if hits is None:
        return replace(
            cell,
            not_applicable="perplexity ranks by log-probabilities, which this access does not give",
            drawn=0,
        )
    return replace(
        cell, **measured(target, setting, attack, hits), chain=chain(target, setting, attack)
    )


def chain(target: str, setting: str, attack: str) -> Chain | None:
    """Outside the lab, without the control of its recipe and without a public model's row."""
    rows = [HITS[name, setting, attack] for name in ("undefended", "ensemble-unmixed", "pmixed")]
    if target != "pmixed" or setting != "white-box" or None in rows:
        return None
    start, unmixed, own = (sum(hits or ()) / MEMBERS for hits in rows)
    moved = [
        difference("recall_difference", after - before, 0.03)
        for before, after in pairwise((start, unmixed, own))
    ]
    joint = {
        "training configuration": "one adapter, all data",
        "splitting": "each adapter sees one shard only",
    }
    apart = "not separated without 'One adapter, all data' (train it)"
    mixing, floor = (
        {"mixing": "each distribution is mixed with the public one"},
        {"no private data": "the public model alone"},
    )
    return Chain(
        (
            ChainStep(joint, "undefended", "ensemble-unmixed", moved[0], apart),
            ChainStep(mixing, "ensemble-unmixed", "pmixed", moved[1]),
            ChainStep(
                floor,
                "pmixed",
                "",
                None,
                "not measured without 'Public model' (--public MODEL)",
            ),
        ),
        difference("recall_difference", own - start, 0.04),
    )


def measured(target: str, setting: str, attack: str, hits: tuple[int, ...]) -> dict[str, Any]:
    total = sum(hits)
    recall = total / MEMBERS
    note = "" if MEMBERS - total >= 100 else "fewer than 100 errors: equals recall"
    measurements = [
        share("recall", total, MEMBERS),
        share("recall_nonmembers", 0, NONMEMBERS),
        difference("excess_recall", recall, 0.02 + 0.04 * math.sqrt(recall)),
        share("any_of_k", min(MEMBERS, total + 9), MEMBERS),
        share("recall_at_100_errors", total - total // 20, MEMBERS, note),
        share("recall_at_10pct_errors", total - total // 8, MEMBERS),
    ]
    reference = HITS["undefended", setting, attack]
    if target != "undefended" and reference is not None:
        change = recall - sum(reference) / MEMBERS
        measurements.append(
            difference("recall_difference", change, 0.004 + 0.06 * math.sqrt(abs(change)))
        )
    errors = MEMBERS - total
    return {
        "measurements": tuple(measurements),
        "by_repeats": {
            name: share("recall", k, PER_COUNT) for name, k in zip(REPEATS, hits, strict=True)
        },
        "curve": (
            *((e, recall * (1 - math.exp(-(e + 6) / 14))) for e in range(errors)),
            (errors, recall),
        ),
        "notes": ("3 draws within 1e-6 of a CDF boundary",),
    }


def probability(name: str, value: float, n: int, note: str = "") -> Measurement:
    return Measurement(
        name, value, max(0.0, value - 0.04), min(1.0, value + 0.04), n, "probability", note
    )


def probed(target: str, p: float) -> Finding:
    """A row of the probe: exact numbers, no recall."""
    name = "extraction_probability"
    any_of = [
        probability(f"expected_any_of_{n}{whose}", 1 - (1 - value) ** n, MEMBERS)
        for n in (1, 10, 100)
        for whose, value in (("", p), ("_nonmembers", p / 50))
    ]
    excess = replace(difference(f"excess_{name}", p, 0.05), unit="probability")
    main = [
        probability(name, p, MEMBERS),
        probability(f"{name}_nonmembers", 3.1e-7, NONMEMBERS, "baseline"),
        excess,
    ]
    return replace(
        finding(target, "white-box", "ethicist"),
        attack="extraction-probability",
        measurements=(*main, *any_of, share("discoverable_10_0.9", 40, MEMBERS)),
        by_repeats={r: probability(name, p * k / 5, PER_COUNT) for k, r in enumerate(REPEATS)},
        curve=(),
        notes=("no soft prompt",),
        drawn=0,
    )


def claims() -> dict[str, Claim]:
    pmixed = Claim(
        epsilon={"add_remove": 8.0, "zero_out": 7.12, "replace": 12.94},
        delta=1e-5,
        relation="add_remove",
        unit="shard",
        queries=115_200,
        theorem="PMixED, fixed radius and cap (Flemings et al. 2024, mended)",
        status="sound",
        sound=True,
        shard=True,
        spent_queries=115_200,
        spent_epsilon={"add_remove": 8.0, "zero_out": 7.12, "replace": 12.94},
        details={"radius": 0.0312, "cap_on_lambda": 0.03, "members": 8.0},
    )
    mixing = Claim(
        epsilon={"replace": math.inf},
        delta=0.0,
        relation="replace",
        unit="any two models",
        queries=115_200,
        theorem="uniform mixing, pure composition",
        status="sound",
        sound=True,
        spent_queries=115_200,
        spent_epsilon={"replace": math.inf},
        details={"weight": 1.0},
    )
    return {"pmixed": pmixed, "uniform-mixing": mixing}


def target(
    name: str, title: str, text: str, ppl: float, ms: float, mb: float, seconds: float
) -> TargetRecord:
    perplexity = Measurement("perplexity", ppl, ppl * 0.97, ppl * 1.03, 4096, unit="perplexity")
    companion = name == "ensemble-unmixed"
    return TargetRecord(
        name, title, text, perplexity, ms, mb, seconds, claims().get(name), companion=companion
    )


@pytest.fixture
def result() -> AuditResult:
    return lab_run()


@pytest.fixture(scope="session")
def lab() -> AuditResult:
    return lab_run()


def lab_run() -> AuditResult:
    """The lab, undefended and under PMixED and uniform mixing, each attack in both settings."""
    targets = (
        target(
            "undefended",
            "Undefended",
            "The fine-tuned lab model as it stands.",
            11.2,
            0.41,
            212,
            74.0,
        ),
        target(
            "pmixed",
            "PMixED (sound)",
            "8 members, each trained on one shard, mixed into the public model.",
            21.3,
            3.6,
            1240,
            96.5,
        ),
        target(
            "ensemble-unmixed",
            "Ensemble, unmixed",
            "The same 8 members, one answering each query.",
            17.8,
            2.9,
            1190,
            96.5,
        ),
        target(
            "uniform-mixing",
            "Uniform mixing",
            "The target mixed with the uniform distribution.",
            13.0,
            0.42,
            214,
            74.0,
        ),
    )
    benchmark = BenchmarkRecord(
        name="lab",
        description="A GPT-NeoX-style model of 0.9M parameters, fine-tuned on synthetic mails and "
        "payment records.",
        members=MEMBERS,
        nonmembers=NONMEMBERS,
        known=96,
        repeats=dict.fromkeys(REPEATS, PER_COUNT),
        greedy_recall={
            name: share("greedy", k, PER_COUNT)
            for name, k in zip(REPEATS, (0, 3, 24, 59, 64), strict=True)
        },
        notes=("All copies of a record went to one shard of the ensemble.",),
    )
    return AuditResult(
        name="lab-ethicist-pmixed",
        created="2025-11-21T09:14:03Z",
        tool_version="0.1.0",
        command="audit run --attack ethicist --attack perplexity --defense pmixed --defense "
        "uniform-mixing",
        plan={
            "attacks": ["ethicist", "perplexity"],
            "defenses": ["pmixed", "uniform-mixing"],
            "samples": 10,
            "seed": 0,
        },
        benchmark=benchmark,
        targets=targets,
        findings=tuple(finding(*cell) for cell in HITS),
        environment={
            "python": "3.11.9",
            "torch": "2.13.0+cpu",
            "transformers": "5.23.1",
            "platform": "Linux x86_64, 2 cores",
        },
        timings={"lab": 142.0, "ensemble": 96.5, "attacks": 61.7, "measure": 2.4, "render": 1.9},
        seed=0,
        methods=methods(),
    )


@pytest.fixture
def with_probe(result: AuditResult) -> AuditResult:
    """The same run with the probe asked for too."""
    return replace(
        result, findings=(*result.findings, probed("undefended", 0.31), probed("pmixed", 0.02))
    )


@pytest.fixture
def probe_only(with_probe: AuditResult) -> AuditResult:
    return replace(with_probe, findings=with_probe.findings[-2:])


# --- secret by secret ---

HOSTILE = "</script><script>alert(1)</script><!-- \u202e\x00\x1b[31m & \u2028 =cmd()"
TRAITS = ("rank", "count", "min_log_prob", "passed_over", "lead")


def detailed_run(
    result: AuditResult, n: int, length: int = 50, name: str = "row-{:06d}", group: str = "group {}"
) -> SecretDetails:
    """n secrets, a fifth of them non-members, as every measured row of the result saw them, with
    their tokens."""
    rng = np.random.default_rng(0)
    member = np.arange(n) % 5 != 4
    told = tuple(
        SecretAttributes(
            f"id-{i}",
            name.format(i),
            bool(member[i]),
            2 ** (i % 5) if member[i] else 0,
            length,
            group.format(i % 7),
        )
        for i in range(n)
    )
    ids = tuple(secret.id for secret in told)
    rows = {}
    for finding in result.findings:
        lead = rng.integers(0, length + 1, n).astype(float)
        hit = lead == length
        traits = {name: lead if name == "lead" else rng.random(n) for name in TRAITS}
        distance = (length - lead).astype(np.int64)
        repeats, tolerance = (
            tuple(s.repeats for s in told),
            np.full(n, judging.compute_near_verbatim_limit(length)),
        )
        outcome = judge_columns(
            ids, hit, hit, rng.random(n), repeats, member, distance, tolerance, traits
        )
        rows[finding.cell_key] = ValuesBySecret.from_judged_guesses(
            outcome, score_is_probability=True
        )
    distributions = np.log(rng.random((len(result.targets), n, length)))
    tokens = {
        target.name: pack_suffixes(
            {s.id: tuple(distribution[i].tolist()) for i, s in enumerate(told) if s.member}
        )
        for target, distribution in zip(result.targets, distributions, strict=True)
    }
    return SecretDetails(told, rows, tokens)


@pytest.fixture
def secret_by_secret() -> Callable[..., SecretDetails]:
    return detailed_run


@pytest.fixture(scope="session")
def detailed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SecretDetails]:
    """A page of 200 secrets, and what it should show."""
    details = detailed_run(lab_run(), 200, length=12)
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html.render_html_report(lab_run(), details), encoding="utf-8")
    return path, details


@pytest.fixture(scope="session")
def ten_thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of 10,000 secrets."""
    path = tmp_path_factory.mktemp("large") / "report.html"
    path.write_text(
        html.render_html_report(lab_run(), detailed_run(lab_run(), 10_000)), encoding="utf-8"
    )
    return path


@pytest.fixture
def hostile_text() -> str:
    return HOSTILE


# --- a browser ---


class Browser:
    """Headless Chromium over `--remote-debugging-pipe`: JSON, NUL-terminated, on file descriptors 3
    and 4."""

    def __init__(self, program: str, profile: Path) -> None:
        from_us, self._write = os.pipe()
        self._read, to_us = os.pipe()
        flags = (
            "headless no-sandbox disable-gpu disable-quic no-first-run "
            "disable-background-networking"
        )
        flags += " disable-component-update disable-sync remote-debugging-pipe"
        command = [
            program,
            *(f"--{flag}" for flag in flags.split()),
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        joined = f'exec "$@" 3<&{from_us} 4>&{to_us}'
        self.process = subprocess.Popen(
            ["bash", "-c", joined, "bash", *command],
            pass_fds=(from_us, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        self._buffer, self._id, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        message = {
            "id": self._id,
            "method": method,
            "params": params,
            **({"sessionId": self._session} if self._session else {}),
        }
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (reply := self._receive()).get("id") != self._id:
            self.events.append(reply)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']}")
        answer: dict[str, Any] = reply["result"]
        return answer

    def open(self, path: Path, width: int, height: int = 900, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = "dark" if dark else "light"
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)[
            "result"
        ].get("value")

    def press(self, key: str) -> None:
        code, text = {"Tab": (9, ""), "Enter": (13, "\r")}[key]
        pressed: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", **pressed, **({"text": text} if text else {})
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def troubles(self) -> list[str]:
        """What the page logged, threw, or asked for beyond itself."""
        named = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        logged = [json.dumps(event) for event in self.events if event.get("method") in named]
        urls = [
            e["params"]["request"]["url"]
            for e in self.events
            if e.get("method") == "Network.requestWillBeSent"
        ]
        return logged + urls[1:]

    def close(self) -> None:
        self.call("Browser.close")
        self.process.wait(timeout=120)
        os.close(self._write)
        os.close(self._read)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._read, 1 << 20)
            if not read:
                raise RuntimeError("the browser went away")
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no chromium on this machine")
    opened = Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()
