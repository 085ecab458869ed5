"""Models from before Llama, whose parts have other names: GPT-NeoX, GPT-J, Phi, OPT, StarCoder, Persimmon, CodeGen."""

from pathlib import Path

import pytest
from test_architectures import sweep

from benchmarks.command_line import NEEDED
from benchmarks.tiny_models import tiny_config
from lightseq.architecture.family import apply_rope
from lightseq.architecture.inspection import inspect_architecture
from lightseq.config.command_line import parse
from lightseq.training.setup_checks import check_layers

OLDER = ("codegen", "gpt_bigcode", "gptj", "gpt_neox", "opt", "persimmon", "phi")
WITH_TABLE = ("codegen", "gpt_bigcode", "gptj", "opt")  # of positions, 256 at this size


@pytest.mark.parametrize("model_type", OLDER)
def test_sequences_end_with_the_table_of_positions(model_type: str) -> None:
    found = inspect_architecture(tiny_config(model_type))
    check_layers(parse([*NEEDED, "--model_max_length", "256"], ""), found)
    longer = parse([*NEEDED, "--model_max_length", "257"], "")
    if model_type in WITH_TABLE:
        with pytest.raises(ValueError, match=f"257 exceeds the 256 positions that {found.name} has a table for"):
            check_layers(longer, found)
    else:
        check_layers(longer, found)


def test_models_without_rope_refuse_its_settings() -> None:
    with pytest.raises(ValueError, match="opt has no RoPE parameters; leave --rope_theta and --rope_scaling out"):
        apply_rope(tiny_config("opt"), rope_theta=1e6)


def test_a_model_with_other_linears_is_sent_to_its_own_loop() -> None:
    with pytest.raises(ValueError, match=r"c_attn.weight\); use your own loop around hf.enable \(examples/README.md\)"):
        check_layers(parse(NEEDED, ""), inspect_architecture(tiny_config("gpt2")))


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("ranks", [2, 3])
def test_older_families_train_exactly(ranks: int, tmp_path: Path) -> None:
    done, found = sweep(tmp_path, "--only", ",".join((*OLDER, "gpt2")), seconds=400, ranks=ranks)
    assert done.returncode == 0, done.stderr
    for name in OLDER:
        kinds = {outcome.way: outcome.kind for outcome in found if outcome.model_type == name}
        assert kinds["train"] == kinds["train packed"] == kinds["loop"] == kinds["loop packed"] == "exact", (
            name,
            kinds,
        )
    gpt2 = {outcome.way: outcome.kind for outcome in found if outcome.model_type == "gpt2"}
    assert gpt2 == {"loop": "exact", "loop packed": "exact", "loop checkpointed": "exact", "train": "refused"}
