"""`piebridge plan` and strategy=auto, as README has them: the real measurements, on few images."""

import json
import sys

import pytest
from test_scripts_end_to_end import run

STRATEGIES = ["plain", "pixels", "features", "proxy features", "views", "hybrid", "proxies"]


def test_a_plan_and_a_run_by_it(checkout):
    (checkout / "datasets" / "Clipart10").rename(checkout / "photos")
    python = [sys.executable, "-m", "piebridge"]
    out = run(python + ["plan", "efficientnet_lite0/Clipart10/ours", "data=photos", "plan.seconds=1"], cwd=checkout)
    header, *rows, _, choice = out.splitlines()
    assert header.split()[:2] == ["strategy", "seconds"] and len(rows) == len(STRATEGIES)
    assert all(row.startswith(name) for row, name in zip(rows, STRATEGIES))
    assert choice.startswith("chosen: ") and not (checkout / "res" / "photos_auto").exists()
    run(python + ["train", "efficientnet_lite0/Clipart10/ours", "data=photos", "output=res/photos_auto", "strategy=auto", "epochs=2"],
        cwd=checkout)
    record = json.loads((checkout / "res" / "photos_auto" / "run.json").read_text())
    plan = record["plan"]["strategy"]
    assert record["status"] == "success" and [each["name"] for each in plan["strategies"]] == STRATEGIES
    assert plan["measured_seconds"] == pytest.approx(record["results"]["train_seconds"], abs=0.01) and plan["predicted_seconds"] > 0


def test_what_trains_before_the_head_is_planned_without_residuals(checkout):
    """ours routes by residuals, which only the head's features have; the plan has to leave that strategy out, not to choose it."""
    out = run([sys.executable, "-m", "piebridge", "plan", "efficientnet_lite0/Clipart10/ours", "pet.kind=adapter", "pet.blocks=last:2",
               "step=eager", "loader.augment=crop_flip", "plan.seconds=1"], cwd=checkout)
    assert "(not here: router.kind=residual goes by features at the head's tap)" in out
