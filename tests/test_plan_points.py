"""The points that the plan is held to: each measured once, what failed again, in processes of their own."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan_points
from benchmarks.plan_points import Point, line, main, take
from benchmarks.training.records import Machine

HERE = Machine(False, {"device": "cpu"}, {})


def test_a_point_is_measured_once_and_what_failed_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def taken(point: Point, *_: Any) -> dict[str, Any]:
        failed = len(asked) == 1
        asked.append(point.name)
        return {"point": point.name, "skipped": "out of memory" if failed else None, "step_seconds": 1.0,
                "length": point.length, "gpus": point.gpus}  # fmt: skip

    asked: list[str] = []
    monkeypatch.setattr(plan_points, "take", taken)
    monkeypatch.setattr(plan_points, "look_at_machine", lambda: HERE)
    words = ["--output", str(tmp_path / "new" / "points.jsonl"), "--gpus", "1"]
    assert main(words) == main(words) == 0
    alone = [point.name for point in plan_points.POINTS if point.gpus == 1]
    assert asked == [*alone, alone[1]]
    assert len({point.name for point in plan_points.POINTS}) == len(plan_points.POINTS)


@pytest.mark.slow
def test_a_measured_point_has_its_seconds_and_its_parts() -> None:
    point = Point("tiny", 2, "tiny-llama3", 512, "--gradient_accumulation_steps 2", layers=2, warmup=1, steps=2)
    record = json.loads(json.dumps(take(point, HERE, 120)))
    assert record["skipped"] is None and "s a step" in line(record)
    assert len(record["all_step_seconds"]) == 2 and record["tokens"] == 1024
    assert set(record["phase_seconds"]) == {"forward", "backward", "update"}
    assert sum(record["phase_seconds"].values()) <= 1.5 * max(record["all_step_seconds"])
    assert record["parts"]["optimizer"] == 2 * record["parts"]["parameters"] > 0
    assert take(Point("bad", 1, "tiny-llama3", 512, "--remat sometimes"), HERE, 120)["skipped"].startswith("--remat")
