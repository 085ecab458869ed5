"""Checkpoints with the names of published ones: loaded, trained for a step, saved, and loaded by plain transformers.

A file of `published_names` lists a family's names of tensors, with `{}` for layers and experts, and their source.
`config` has fields that decide which tensors exist. `renamed` are prefixes that transformers writes differently, unless
it has read the published ones, and `left_out` are tensors that no class of transformers loads.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_composites import IDS, loaded, logits
from torch import Tensor
from transformers import CONFIG_MAPPING

from benchmarks.command_line import NEEDED
from benchmarks.tiny_models import plain_model, tiny_config
from lightseq.architecture.inspection import inspect_architecture
from lightseq.config.command_line import parse
from lightseq.models import weight_files, weights
from lightseq.training.setup_checks import check_layers

FOLDER = Path(__file__).parent / "published_names"
QUICK = ("gemma3", "phi3", "qwen3_moe")
FAMILIES = [
    pytest.param(path.stem, marks=[] if path.stem in QUICK else [pytest.mark.slow])
    for path in sorted(FOLDER.glob("*.json"))
]


def published(family: dict[str, Any], folder: Path) -> Any:
    """Writes a tiny checkpoint as published. Returns the model as plain transformers loads it."""
    changes = family.get("config", {})
    default = CONFIG_MAPPING[family["model_type"]]()
    # Parts of the model: those without a default, such as an encoder, and those of another class than the default.
    absent = [name for name, change in changes.items() if getattr(default, name) is None or "model_type" in str(change)]
    tiny = tiny_config(family["model_type"], **{name: changes[name] for name in absent})
    for name, value in changes.items():
        if name not in absent:
            setattr(tiny, name, value) if not isinstance(value, dict) else vars(getattr(tiny, name)).update(value)
    new = plain_model(tiny)
    new.save_pretrained(folder / "new")
    kind = type(new)  # a model that was loaded is saved with the names that it was loaded with
    kind.from_pretrained(folder / "new").save_pretrained(folder / "published")
    file = folder / "published" / weight_files.WEIGHTS
    tensors = {name: torch.full((3,), float(len(name))) for name in family.get("left_out", [])}
    for name, tensor in load_file(file).items():
        prefix = next((prefix for prefix in family.get("renamed", {}) if name.startswith(prefix)), "")
        tensors[family.get("renamed", {}).get(prefix, "") + name.removeprefix(prefix)] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    model, report = kind.from_pretrained(folder / "published", output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"], report
    return model.eval()


def trains(model: Any) -> bool:
    """Returns whether `lightseq train` takes a model."""
    try:
        check_layers(parse(NEEDED, ""), inspect_architecture(model.config))
    except ValueError:
        return False
    return True


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Compares logits of equal weights, whose rounding depends on where they lie in memory."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_checkpoint_keeps_its_names(name: str, tmp_path: Path, alone: None) -> None:
    family = json.loads((FOLDER / f"{name}.json").read_text())
    plain = published(family, tmp_path)
    source, target = tmp_path / "published", tmp_path / "saved"
    before = load_file(source / weight_files.WEIGHTS)
    left_out = family.get("left_out", [])
    assert {re.sub(r"(?<=\.)\d+(?=\.)", "{}", x) for x in before if x not in left_out} == set(family["names"])

    (source / "preprocessor_config.json").write_text("{}")  # of images
    model = loaded(source)
    assert_same(logits(model), logits(plain))
    if trains(model):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert not torch.equal(logits(model), logits(plain))
    weights.save_pretrained(model, target, torch.float32, trained_from=source)

    after = load_file(target / weight_files.WEIGHTS)
    assert before.keys() == after.keys()
    same = {x for x in before if torch.equal(before[x], after[x])}
    towers = {x for x in before if re.search(r"vision|visual|multi_modal", x)}
    assert same >= towers | {*left_out}
    # Experts that no token chose stay as they are.
    changes = [x for x in before.keys() - towers - {*left_out} if x.endswith("_proj.weight") and ".experts." not in x]
    assert trains(model) == all(x not in same for x in changes)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, target)]
    assert configs[0] == configs[1]
    assert (target / "preprocessor_config.json").read_text() == "{}"
    reloaded, report = type(plain).from_pretrained(target, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"], report
    assert_same(logits(reloaded.eval()), logits(model))
