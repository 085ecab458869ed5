"""Several sources in one --data_path, each with a weight."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from programs import alone
from small import words, write_inputs

from lightseq.data.content import hash_content
from lightseq.data.held_out import hold_out
from lightseq.data.mixture import JoinedExamples, WeightedPath, mix, paths_of, weighted_paths
from lightseq.data.open_examples import open_examples
from lightseq.data.packing import open_windows_to_pack, pack
from lightseq.training.metrics import read_records


def rows(path: Path, first: int, count: int, size: int = 6) -> Path:
    """Writes rows whose first token names them."""
    lines = [json.dumps({"input_ids": [first + n, *range(1, size)]}) for n in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    return rows(tmp_path / "a.jsonl", 100, 10), rows(tmp_path / "b.jsonl", 200, 4)


def opened(path: Path) -> object:
    return open_examples(path, 8, 300)


def names(examples: object) -> Counter[int]:
    """Counts the first tokens of all examples."""
    return Counter(int(examples[i].input_ids[0]) for i in range(len(examples)))  # type: ignore[index, arg-type]


def test_a_weight_is_the_number_of_passes_over_a_source(sources: tuple[Path, Path]) -> None:
    given = [WeightedPath(str(sources[0]), 0.5), WeightedPath(str(sources[1]), 2.25)]
    found = mix([opened(path) for path in sources], given, seed=0)  # type: ignore[misc]
    assert len(found) == 5 + 9
    counted = names(found)
    assert sum(count for name, count in counted.items() if name < 200) == 5 and max(counted.values()) == 3
    assert sorted(counted[200 + n] for n in range(4)) == [2, 2, 2, 3]
    again, other = (mix([opened(path) for path in sources], given, seed) for seed in (0, 1))  # type: ignore[misc]
    assert names(again) == counted != names(other)
    assert hash_content(again) == hash_content(found) != hash_content(other)


def test_documents_of_several_windows_stay_whole(tmp_path: Path) -> None:
    path = rows(tmp_path / "long.jsonl", 100, 4, size=20)
    found = mix([opened(path)], [WeightedPath(str(path), 1.5)], seed=0)  # type: ignore[list-item]
    assert len(found) == 6 * 3  # windows of 8, 8 and 3 tokens


def test_a_mixture_is_packed_and_held_out_by_source(sources: tuple[Path, Path]) -> None:
    given = [WeightedPath(str(path), 2) for path in sources]
    windows = [open_windows_to_pack(path, 16, 300) for path in sources]
    split = [hold_out(each, 0.25, 0, "rows") for each in windows]
    packed = pack("both", mix([trained for trained, _ in split], given, 0))  # type: ignore[arg-type]
    assert isinstance(packed.windows, JoinedExamples)
    documents = [int(packed[i].input_ids[0]) for i in range(len(packed))]
    held = names(mix([held for _, held in split], [WeightedPath("a"), WeightedPath("b")], 0))
    assert sum(held.values()) == 3 + 1 and set(held).isdisjoint(documents)
    assert sum(len(packed[i].boundaries or ()) - 1 for i in range(len(packed))) == 2 * (7 + 3)


def test_a_run_trains_on_a_mixture_and_resumes(tmp_path: Path) -> None:
    folder = write_inputs(tmp_path)
    flags = words(folder, "out", "--packing best_fit --eval_fraction 0.2 --max_steps 2 --save_steps 1")
    [data] = [word for word, flag in zip(flags.split()[1:], flags.split(), strict=False) if flag == "--data_path"]
    more = rows(tmp_path / "more.jsonl", 5, 6)
    mixed = flags.replace(f"--data_path {data}", f"--data_path {data},{more}=3")
    end = alone(mixed)
    assert end.status == 0, end.err
    assert f"{more}: " in end.out and "3 times its" in end.out
    again = alone(mixed.replace("--max_steps 2", "--max_steps 3 --resume_from_checkpoint True"))
    assert again.status == 0, again.err
    assert [r["step"] for r in read_records(folder / "out" / "metrics.jsonl") if "tokens" in r] == [1, 2, 3]


def test_a_path_that_exists_is_one_source(tmp_path: Path) -> None:
    path = rows(tmp_path / "a=2,b.jsonl", 100, 2)
    assert weighted_paths(str(path)) == (WeightedPath(str(path), 1.0),)
    assert paths_of("hf:me/books:train=0.5,x.jsonl") == ["hf:me/books:train", "x.jsonl"] and paths_of("") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{a}=none,{b}", "none is no weight; give a positive number"),
        ("{a}=0,{b}", "0 is no weight"),
        ("{a},,{b}", "has an empty path; separate paths by single commas"),
        ("{a},{a}", "twice; give it once, with a weight such as"),
    ],
)
def test_weights_and_paths_that_mean_nothing_are_refused(sources: tuple[Path, Path], text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        weighted_paths(text.format(a=sources[0], b=sources[1]))


def test_weights_that_cannot_be_honoured_are_refused(sources: tuple[Path, Path], tmp_path: Path) -> None:
    few = [WeightedPath(str(sources[1]), 0.1)]
    with pytest.raises(ValueError, match="leaves none of 4 rows; give more"):
        mix([opened(sources[1])], few, seed=0)  # type: ignore[list-item]
    flags = f"--eval_strategy steps --eval_data_path {sources[0]}=2 --max_steps 1"
    end = alone(words(write_inputs(tmp_path), "out", flags))
    assert end.status == 2 and "has weights, but evaluation reads every row once; leave them out" in end.err
