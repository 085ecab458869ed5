"""The breakdown of memory by purpose, against numbers by hand."""

import pytest

from lightseq.architecture.family import preset_config
from lightseq.cli import BOTH
from lightseq.config.command_line import parse
from lightseq.config.train_config import TrainConfig
from lightseq.plan.breakdown import loss_bytes
from lightseq.plan.hardware import Hardware
from lightseq.plan.memory import stored_activations
from lightseq.plan.rates import CHIPS
from lightseq.plan.run import PlannedRun


def given(words: str = "") -> TrainConfig:
    return parse(f"--model_name_or_path m --data_path d --output_dir o {words}".split(), "")


@pytest.mark.slow
def test_stored_activations_of_layers_by_hand() -> None:
    model = preset_config(BOTH, "llama3-8b")  # 32 layers, hidden 4096, 32 heads of 128
    layer_input, out, lse = 4096 * 2, 4096 * 2, 32 * 4

    def stored(words: str) -> int:
        hardware = Hardware(CHIPS["h200"], 1, 1, 1e12, 1e12)
        return stored_activations(PlannedRun(model, given(f"--bf16 --model_max_length 10 {words}"), hardware))

    assert stored("--remat full") == 10 * 32 * layer_input
    assert stored("") == 10 * 32 * (layer_input + out + lse)
    products = 2 * 14336 * 2
    assert stored("--remat attention+mlp") == 10 * 32 * (layer_input + out + lse + products)
    assert stored("--layers_per_checkpoint 5") == 10 * (7 * layer_input + 5 * (layer_input + out + lse))
    logits, gradients = loss_bytes(model, given("--bf16"), 10_000)
    assert (logits, gradients) == (2048 * 128256 * 2, 128256 * 4096 * 4 + 10_000 * 4096 * 2)
