"""Grids: which points a plan has, what each of them runs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from auditor.core.errors import AuditError
from auditor.runs.plan import (
    expand_plan_grid,
    merge_raw_plans,
    parse_seed_ranges,
    parse_sweep_flags,
    refuse_flags_without_effect,
)


def test_a_plan_without_a_grid_is_one_point() -> None:
    (point,) = expand_plan_grid({"attack": ["zlib"], "seed": 3})
    assert (point.variant, point.at, point.seed, point.plan) == (
        "",
        {},
        3,
        {"attack": ["zlib"], "seed": 3},
    )


def test_the_product_of_sweeps_variants_and_seeds_seeds_outermost() -> None:
    raw = {
        "seeds": [0, 7],
        "sweep": {"ethicist.samples": [1, 10], "limit": [5, 6]},
        "variant": [{"name": "a"}, {"name": "b", "setting": "white-box"}],
    }
    points = expand_plan_grid(raw)
    assert [point.seed for point in points] == [0] * 8 + [7] * 8
    assert [point.variant for point in points[:8]] == ["a"] * 4 + ["b"] * 4
    assert [tuple(point.at.values()) for point in points[:4]] == [(1, 5), (1, 6), (10, 5), (10, 6)]
    last = points[-1].plan
    assert last == {
        "attack": ["ethicist"],
        "setting": "white-box",
        "limit": 6,
        "seed": 7,
        "attack_options": {"ethicist": {"samples": 10}},
    }
    assert len({point.run_folder_name for point in points}) == 16
    assert points[-1].name == "b, ethicist.samples=10, limit=6, seed 7"
    assert points[-1].run_folder_name == "b_ethicist.samples=10_limit=6_seed-7"


def test_a_variant_may_sweep_what_is_its_own() -> None:
    """One line a defense over its own knob: no product of all knobs."""
    raw = {
        "attack": ["perplexity"],
        "sweep": {"limit": [5]},
        "variant": [
            {
                "name": "a",
                "defense": ["uniform-mixing"],
                "sweep": {"uniform-mixing.weight": [0.9, 0.5]},
            },
            {"name": "b", "defense": ["pmixed"], "sweep": {"pmixed.epsilon": [2], "limit": [7]}},
            {"name": "c"},
        ],
    }
    points = expand_plan_grid(raw)
    assert [(p.variant, p.at) for p in points] == [
        ("a", {"limit": 5, "uniform-mixing.weight": 0.9}),
        ("a", {"limit": 5, "uniform-mixing.weight": 0.5}),
        ("b", {"limit": 7, "pmixed.epsilon": 2}),
        ("c", {"limit": 5}),
    ]
    assert [p.plan.get("defense_options") for p in points[:3]] == [
        {"uniform-mixing": {"weight": 0.9}},
        {"uniform-mixing": {"weight": 0.5}},
        {"pmixed": {"epsilon": 2}},
    ]
    assert all("sweep" not in p.plan for p in points)
    with pytest.raises(AuditError, match=r"a list of values for 'pmixed.epsilon'"):
        expand_plan_grid(
            {"variant": [{"name": "b", "defense": ["pmixed"], "sweep": {"pmixed.epsilon": 2}}]}
        )


def test_keys_go_where_they_belong() -> None:
    raw = {
        "attack": ["reference", "zlib"],
        "defense": ["pmixed"],
        "sweep": {
            "reference.form": ["ratio"],  # the attack of that name, not the plan field
            "pmixed.q": [0.1],
            "lab_recipe.hidden": [64],
            "defense": ["pmixed"],
        },
    }
    (point,) = expand_plan_grid(raw)
    assert point.plan["attack_options"] == {"reference": {"form": "ratio"}}
    assert point.plan["defense_options"] == {"pmixed": {"q": 0.1}}
    assert point.plan["lab_recipe"] == {"hidden": 64} and point.plan["defense"] == ["pmixed"]


def test_common_options_reach_the_variants_that_use_them() -> None:
    raw = {
        "attack_options": {"ethicist": {"epochs": 3, "alpha": 0.5}, "": {"samples": 4}},
        "variant": [
            {"name": "a", "attack": ["ethicist"], "attack_options": {"ethicist": {"alpha": 0}}},
            {"name": "b", "attack": ["zlib"]},
        ],
    }
    a, b = (point.plan["attack_options"] for point in expand_plan_grid(raw))
    assert a == {"ethicist": {"epochs": 3, "alpha": 0}, "": {"samples": 4}} and b == {
        "": {"samples": 4}
    }
    assert raw["attack_options"]["ethicist"]["alpha"] == 0.5  # type: ignore[index]


def test_tables_are_merged_and_lists_replaced() -> None:
    base = {"a": {"x": 1, "y": [1, 2]}, "b": 1}
    assert merge_raw_plans(base, {"a": {"y": [3]}, "c": 2}) == {
        "a": {"x": 1, "y": [3]},
        "b": 1,
        "c": 2,
    }
    assert base == {"a": {"x": 1, "y": [1, 2]}, "b": 1}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"sweep": {"limt": [1]}}, "did you mean 'limit'"),
        ({"sweep": {"seed": [1]}}, "unknown plan field in the sweep: 'seed'"),
        (
            {"sweep": {"zlib.samples": [1]}},
            r"an attack or defense of the plan \(ethicist\), got 'zlib.samples'",
        ),
        ({"sweep": {"limit": []}}, "a list of values for 'limit'"),
        ({"sweep": {"limit": 3}}, "a list of values for 'limit'"),
        ({"sweep": {"limit": [3, 3]}}, "values that differ"),
        ({"seeds": []}, "seeds to be a list of whole numbers"),
        ({"seeds": [1, 1]}, "seeds that differ"),
        ({"seeds": [True]}, "whole numbers"),
        ({"seeds": [1], "seed": 2}, "seed or seeds, got both"),
        ({"variant": [{"attack": ["zlib"]}]}, "a table with a name"),
        ({"variant": [{"name": "a"}, {"name": "a"}]}, "two variants are called 'a'"),
        ({"variant": [{"name": "a", "atack": ["zlib"]}]}, "did you mean 'attack'"),
        (
            {"attack_options": {"zlob": {}}, "variant": [{"name": "a", "attack": ["zlib"]}]},
            "did you mean 'zlib'",
        ),
    ],
)
def test_nothing_is_ignored_in_silence(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(AuditError, match=message):
        expand_plan_grid(raw)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"samples": 5}, "samples"),
        ({"limit": 3}, "limit"),
        ({"attack_options": {"ethicist": {"alpha": 1.0}}}, "ethicist.alpha"),
        ({"model_args": {"attn": "eager"}}, "model_args.attn"),
        ({"attack_options": {"ethicist": {"epochs": 1}}}, ""),
        ({"known_limit": 5, "model_args": {"other": "x"}}, ""),
    ],
)
def test_a_flag_that_a_grid_replaces_is_refused(flags: dict[str, Any], name: str) -> None:
    file = {
        "sweep": {"samples": [1, 10]},
        "variant": [
            {"name": "a", "attack_options": {"ethicist": {"alpha": 0}}},
            {"name": "b", "limit": 20, "sweep": {"model_args.attn": ["x", "y"]}},
        ],
    }
    if not name:
        refuse_flags_without_effect(file, flags)
        return
    with pytest.raises(AuditError, match=f"expected no flag for {name}, which a sweep"):
        refuse_flags_without_effect(file, flags)


def test_long_and_colliding_names_keep_folders_of_their_own() -> None:
    names = ["w/o smooth", "w o smooth", "w?o smooth", "x" * 200, "x" * 201, ".."]
    folders = {
        point.run_folder_name
        for point in expand_plan_grid({"variant": [{"name": name} for name in names]})
    }
    assert len(folders) == len(names)
    assert all("/" not in name and len(name) < 100 and not name.startswith(".") for name in folders)


def test_flags() -> None:
    assert parse_sweep_flags(["ethicist.samples=1,10", "model=a/b,c", "top_p=0.5", "x=true"]) == {
        "ethicist.samples": [1, 10],
        "model": ["a/b", "c"],
        "top_p": [0.5],
        "x": [True],
    }
    ranges = parse_sweep_flags(
        ["weight=0.1:1.0:0.1", "k=1:7:2,40", "down=1:0:-0.5", "odd=0:1:0.3", "model=a:b:c"]
    )
    # 0.3, not 0.30000000000000004
    assert ranges["weight"] == [
        0.1,
        0.2,
        0.3,
        0.4,
        0.5,
        0.6,
        0.7,
        0.8,
        0.9,
        1.0,
    ]
    assert ranges["k"] == [1, 3, 5, 7, 40] and all(type(value) is int for value in ranges["k"])
    assert (
        ranges["down"] == [1.0, 0.5, 0.0]
        and ranges["odd"] == [0.0, 0.3, 0.6, 0.9]
        and ranges["model"] == ["a:b:c"]
    )
    for bad in ("x=0:1:0", "x=1:0:0.1", "x=0:1:-0.1", "x=0:1:0.00001"):
        with pytest.raises(AuditError, match="expected start:stop:step"):
            parse_sweep_flags([bad])
    assert parse_seed_ranges("0-3") == [0, 1, 2, 3] and parse_seed_ranges("5,7-8") == [5, 7, 8]
    for bad in ("", "a", "3-1", "1;2"):
        with pytest.raises(AuditError, match="expected --seeds like"):
            parse_seed_ranges(bad)
    for bad in ("samples", "=1", "samples="):
        with pytest.raises(AuditError, match="expected --sweep key=value"):
            parse_sweep_flags([bad])
