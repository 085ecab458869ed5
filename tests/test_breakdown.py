"""The memory of layers and of the loss, against numbers by hand."""

import pytest

from lightseq.architecture.family import preset_config
from lightseq.cli import BOTH
from lightseq.config.command_line import parse
from lightseq.memory.placement import KEEP, Placement
from lightseq.plan.hardware import Hardware
from lightseq.plan.memory import loss_bytes, offloaded_by_rerun, saved_by_groups
from lightseq.plan.rates import CHIPS
from lightseq.plan.run import PlannedRun

MODEL = preset_config(BOTH, "llama3-8b")  # 32 layers, hidden 4096, 32 heads of 128


def run(words: str) -> PlannedRun:
    config = parse(f"--model_name_or_path m --data_path d --output_dir o --bf16 {words}".split(), "")
    return PlannedRun(MODEL, config, Hardware(CHIPS["h200"], 1, 1, 1e12, 1e12))


@pytest.mark.slow
def test_activations_of_layers_and_the_loss_by_hand() -> None:
    layer_input, out, lse = 4096 * 2, 4096 * 2, 32 * 4

    def stored(words: str) -> float:
        return sum(saved_by_groups(run(f"--model_max_length 10 {words}"), Placement((KEEP,) * 32)))

    assert stored("--remat full") == 10 * 32 * layer_input
    assert stored("") == 10 * 32 * (layer_input + out + lse)
    products = 2 * 14336 * 2
    assert stored("--remat attention+mlp") == 10 * 32 * (layer_input + out + lse + products)
    grouped = "--model_max_length 10 --layers_per_checkpoint 5"
    assert stored(grouped) == 10 * 7 * layer_input
    assert offloaded_by_rerun(run(grouped), KEEP) == 10 * 4 * (layer_input + out + lse)
    logits, gradients = 2048 * 128256 * 2, 128256 * 4096 * 4 + 10_000 * 4096 * 2
    assert loss_bytes(run("--model_max_length 10000")) == logits + gradients
