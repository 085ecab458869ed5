"""Presets of other families than Llama: their shapes, and resolution by name and by hub id without a hub."""

import pytest
import torch
from cases import slow_except
from transformers import PreTrainedConfig

from lightseq.architecture.family import check_config, preset_config, resolve
from lightseq.cli import BOTH, main
from lightseq.config.command_line import parse
from lightseq.models.build import model_class
from lightseq.models.decoder import text_config
from lightseq.models.presets import OTHERS
from lightseq.models.published_configs import published_parameters
from lightseq.tools.plan.command import split_flags

NAMES = sorted(OTHERS.presets)


def test_there_are_twenty_shapes_each_with_a_hub_id_of_its_own() -> None:
    assert len(NAMES) >= 20 and set(OTHERS.aliases.values()) == set(NAMES)


@pytest.mark.compat("5.22")
@pytest.mark.parametrize("name", slow_except(["qwen3-8b", "gpt-oss-20b", "qwen3.5-4b"], NAMES))
def test_a_preset_has_the_parameters_that_the_hub_counts(name: str) -> None:
    config = resolve(BOTH, name, random_init=True).config
    check_config(config, name)
    rope = text_config(config).rope_parameters
    assert len({isinstance(value, dict) for value in rope.values()}) == 1, "of the model, or of each type of layer"
    with torch.device("meta"):
        model = model_class(config)._from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == published_parameters(name)


def test_a_preset_says_in_which_form_the_hub_stores_its_weights() -> None:
    source = resolve(BOTH, "openai/gpt-oss-20b", random_init=True)
    assert source.stored_form == "mxfp4" and not hasattr(source.config, "quantization_config")


def test_changing_a_config_does_not_change_its_preset() -> None:
    def text() -> PreTrainedConfig:
        return preset_config(BOTH, "gemma3-4b").get_text_config()

    text().rope_parameters["full_attention"]["factor"] = 1.0
    assert text().rope_parameters["full_attention"]["factor"] == 8.0


def test_a_type_of_model_that_transformers_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OTHERS.presets, "new-1b", {"model_type": "new"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"new-1b is a new, which transformers .* does not have; install a newer"):
        resolve(OTHERS, "new-1b", random_init=True)


def test_plan_takes_a_model_as_its_first_word(capsys: pytest.CaptureFixture[str]) -> None:
    own, training = split_flags(["qwen3-8b", "--bf16", "--gpus", "2"])
    assert own.gpus == 2 and parse(training, "test", ()).model_name == "qwen3-8b"
    assert main(["plan", "Qwen3-8C", "--bf16", "--gpus", "1"]) == 2
    assert "did you mean qwen3-8b or qwen3-4b or qwen3-32b?" in capsys.readouterr().err
