"""What later rows need is trained by another process: the same weights, and nothing is left
running."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from auditor.core import threads
from auditor.core.plan import Plan
from auditor.runs import train_ahead
from auditor.runs.lab_site import LabSite
from auditor.runs.selection import PluginSelection, select_and_check_plugins
from auditor.runs.sites import make_site

TINY = {
    "layers": 1,
    "hidden": 32,
    "heads": 2,
    "public_records": 20,
    "public_epochs": 1,
    "vocab_size": 300,
}
TINY |= {
    "private_epochs": 1,
    "lora_epochs": 1,
    "lora_rank": 2,
    "private_rank": 2,
    "members": 2,
    "nonmembers": 4,
}
PLAN = Plan().with_fields(
    lab_recipe={**TINY, "repeats": [[1, 3, 2], [4, 3, 2]], "others": 2}, defense=["pmixed"]
)
_PATIENCE = 300  # seconds until a process counts as hung, on however busy a machine


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """This process seems to have two; what it sets."""
    told = list[int]()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(threads, "usable_processor_count", lambda: 2)
    return told


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    found, begin = list[subprocess.Popen[bytes]](), subprocess.Popen

    def popen(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        found.append(begin(*args, **options))
        return found[-1]

    monkeypatch.setattr(train_ahead.subprocess, "Popen", popen)
    return found


def asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LabSite, PluginSelection]:
    monkeypatch.setenv("AUDIT_CACHE", str(cache))
    site = make_site(PLAN)
    assert isinstance(site, LabSite)
    return site, select_and_check_plugins(PLAN, site)


def weights(site: LabSite) -> list[bytes]:
    return [
        path.read_bytes()
        for path in sorted(site.lab.ensemble_folder.glob("member-*/*.safetensors"))
    ]


def test_another_process_trains_what_this_one_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_threads: list[int]
) -> None:
    site, selection = asked(tmp_path / "beside", monkeypatch)
    with train_ahead.later_models_trained_in_background(PLAN, site, selection) as settle:
        assert two_threads[-1] == 1
        deadline = time.monotonic() + _PATIENCE
        while not site.lab.ensemble_folder.is_dir() and time.monotonic() < deadline:
            time.sleep(0.1)
        while two_threads[-1] == 1 and time.monotonic() < deadline:  # until it has ended
            settle()
    assert not site.models_to_train(
        selection.defenses_by_row_name, selection.reference_models_asked_by_probes
    )
    alone, _ = asked(tmp_path / "alone", monkeypatch)
    alone.lab.ensemble()
    assert weights(site) == weights(alone) and len(weights(site)) == 2


@pytest.mark.parametrize("why", ["one thread", "one processor", "nothing to train"])
def test_it_is_done_where_there_is_room_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begun: list[Any],
    two_threads: list[int],
    why: str,
) -> None:
    site, selection = asked(tmp_path, monkeypatch)
    if why == "one thread":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    elif why == "one processor":
        monkeypatch.setattr(threads, "usable_processor_count", lambda: 1)
    else:
        monkeypatch.setattr(LabSite, "models_to_train", lambda *given: ())
    with train_ahead.later_models_trained_in_background(PLAN, site, selection):
        assert not begun and not two_threads


def test_it_ends_with_a_run_that_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    begun: list[subprocess.Popen[bytes]],
    two_threads: list[int],
) -> None:
    site, selection = asked(tmp_path, monkeypatch)
    with (
        pytest.raises(ZeroDivisionError),
        train_ahead.later_models_trained_in_background(PLAN, site, selection),
    ):
        assert begun[0].poll() is None
        raise ZeroDivisionError
    assert begun[0].returncode is not None and two_threads[-1] == 2


def test_it_ends_with_a_run_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whom nothing is left but the end of a pipe."""
    there = (
        "import pickle, sys; from auditor.runs import train_ahead; train_ahead._end_with_the_run()"
    )
    with subprocess.Popen(
        [train_ahead.sys.executable, "-c", there], stdin=subprocess.PIPE
    ) as other:
        assert other.stdin is not None
        other.stdin.close()
        assert other.wait(_PATIENCE) == 1
