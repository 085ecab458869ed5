"""Operations and parameters, counted by hand and by torch."""

import pytest
from transformers import LlamaConfig, MistralConfig

from lightseq.architecture.flops import (
    attention_forward_flops,
    mfu,
    model_flops,
    peak_flops_per_second,
    recompute_flops,
)
from lightseq.architecture.inspection import inspect_architecture
from lightseq.memory.placement import KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_OFFLOAD, Placement
from lightseq.training.step_stats import FlopCounter


def small_config(**fields: object) -> LlamaConfig:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 6, "vocab_size": 10, "max_position_embeddings": 64}
    return LlamaConfig(**sizes | {"use_cache": False} | fields)


def test_step_flops_by_hand() -> None:
    # attention, forward, a layer: 2·16²·2·6 = 6144
    assert attention_forward_flops(small_config(), 16) == 2 * 6144
    assert model_flops(small_config(), 16, 3) == 3 * (6 * 1232 * 16 + 3 * 2 * 6144)
    share = (12**2 + 4**2) / 16**2  # two documents, of 12 tokens and 4
    assert model_flops(small_config(), 16, 3, attention_share=share) == 3 * (
        6 * 1232 * 16 + 3 * 2 * 2 * (12**2 + 4**2) * 2 * 6
    )


def test_recompute_by_hand() -> None:
    linears = 2 * 2 * (576 - 96) * 16  # all of a layer's but the down projection
    assert recompute_flops(small_config(), 16, 3, "none") == 0
    assert recompute_flops(small_config(), 16, 3, "attention") == 3 * linears
    assert recompute_flops(small_config(), 16, 3, "full") == 3 * (linears + 2 * 6144)
    kept = 2 * 2 * 2 * small_config().hidden_size * small_config().intermediate_size * 16
    assert recompute_flops(small_config(), 16, 3, "attention+mlp") == 3 * (linears - kept)
    assert recompute_flops(small_config(), 16, 3, "attention+linears") == 0
    forward = 2 * 2 * 576 * 16 + 2 * 6144
    forward -= 2 * 3 * small_config().hidden_size * small_config().intermediate_size * 16  # of two layers, the last MLP
    assert recompute_flops(small_config(), 16, 3, "attention", group=2) == 3 * (linears + forward)
    assert recompute_flops(small_config(), 16, 3, "full", group=2) == 3 * (linears + forward + 6144)  # nor attention
    mixed = FlopCounter(
        small_config(),
        "attention",
        recomputed_layers=Placement((RECOMPUTE, KEEP, RECOMPUTE_OFFLOAD, OFFLOAD)).recomputed_share,
    )
    assert mixed.recomputed(3 * 16, 3 * 16**2) == 3 * (linears + 2 * 6144 / 2)


def test_a_step_counts_windows_within_each_document() -> None:
    config = MistralConfig(**{**small_config().to_dict(), "model_type": "mistral", "sliding_window": 8})
    work, area = FlopCounter(config, "full"), inspect_architecture(config).attention_area
    assert area([12, 4]) == 8 * (2 * 12 - 8) + 4**2
    assert work.flops(3 * 16, area([16] * 3)) == 3 * model_flops(config, 16, 1)
    assert work.flops(12 + 4, area([12, 4])) == model_flops(config, 12, 1) + model_flops(config, 4, 1)
    assert work.recomputed(3 * 16, area([16] * 3)) == 3 * recompute_flops(config, 16, 1, "full")


@pytest.mark.parametrize(
    ("device", "bf16", "fp8"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 1979e12),
        ("NVIDIA H100 PCIe", 756e12, 1513e12),
        ("NVIDIA H100 NVL", 835e12, 1671e12),
        ("NVIDIA H200", 989e12, 1979e12),
        ("NVIDIA H200 NVL", 835e12, 1671e12),
        ("NVIDIA GH200 480GB", 989e12, 1979e12),
        ("NVIDIA B200", 2250e12, 4500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, None),
        ("NVIDIA A100 80GB PCIe", 312e12, None),
        ("NVIDIA A10", 125e12, None),
        ("NVIDIA A10G", None, None),
        ("NVIDIA L40S", 362e12, 733e12),
        ("NVIDIA L40", None, None),
        ("Tesla V100-SXM2-16GB", 125e12, None),
        ("NVIDIA GeForce RTX 4090", 165e12, 330e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("cpu", None, None),
    ],
)
def test_a_devices_peaks_are_found_by_its_whole_name(device: str, bf16: float | None, fp8: float | None) -> None:
    assert peak_flops_per_second(device) == bf16
    assert peak_flops_per_second(device, fp8=True) == fp8


def test_utilisation_is_flops_over_the_joint_peak_of_all_gpus() -> None:
    assert mfu(4e12, step_seconds=2.0, gpus=4, peak_flops_per_second=1e12) == 0.5
    assert mfu(4e12, step_seconds=2.0, gpus=4, peak_flops_per_second=None) is None
