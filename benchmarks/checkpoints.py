"""Plans published checkpoints on one and two GPUs and prints a table of them.

python3 -m benchmarks.checkpoints [--only qwen3] [--csv docs/checkpoints.csv]

`CHECKPOINTS` has the fields of each config.json that decide memory and time; others are defaults of transformers'
class. They are from the checkpoints' own config.json, as copied in the repositories of litgpt (litgpt/config.py),
aiconfigurator, tt-metal, slime and Megatron-Bridge, or are the defaults of the class. The number of parameters that
follows from them is in the table. Nothing is downloaded, and no GPU is needed.
"""

import argparse
import csv
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from benchmarks.class_table import short_reason, write_csv
from benchmarks.command_line import NEEDED
from benchmarks.tiny_models import empty_timm_towers
from lightseq import hf
from lightseq.architecture.family import check_config, resolve
from lightseq.architecture.inspection import inspect_architecture
from lightseq.attention.context import release
from lightseq.cli import BOTH
from lightseq.config.command_line import parse
from lightseq.models.decoder import positions_in_table
from lightseq.parts.chosen_experts import build_to_train
from lightseq.plan.breakdown import GIB
from lightseq.plan.hardware import Hardware
from lightseq.plan.make_plan import make_plan
from lightseq.plan.plan import Plan
from lightseq.plan.rates import chip_named
from lightseq.plan.run import PlannedRun
from lightseq.training.setup_checks import check_layers

LENGTH, CHIP, HOST_GIB = "32K", "h100-80gb", 400
LOOP_LENGTH = 1024  # of a model that `lightseq train` refuses and `hf.enable` may take
IN_FP8 = ("mistralai/Devstral-Small-2-24B-Instruct-2512", "deepseek-ai/DeepSeek-V3")  # which `lightseq train` refuses
WAYS: Final[Mapping[str, tuple[int, tuple[str, ...]]]] = {
    "full, 1 GPU": (1, ()),
    "full, 2 GPUs": (2, ()),
    "LoRA, 1 GPU": (1, ("--lora_rank", "16")),
    "LoRA, 2 GPUs": (2, ("--lora_rank", "16")),
}


def sizes(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **others: Any
) -> dict[str, Any]:
    """Returns fields of a config by the names of config.json."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    } | others


TIED: Final = {"tie_word_embeddings": True}
UNTIED: Final = {"tie_word_embeddings": False}
D128: Final = {"head_dim": 128}
QWEN2, QWEN3, GEMMA3, MISTRAL = 152064, 151936, 262208, 131072  # vocabularies
MROPE: Final = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
M_3_1: Final = {"model_type": "mistral", **D128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e9}}


def gemma3(*numbers: int, window: int = 1024, head_dim: int = 256) -> dict[str, Any]:
    text = sizes(*numbers, GEMMA3, head_dim=head_dim, sliding_window=window)  # type: ignore[call-arg]
    return {"text_config": {"model_type": "gemma3_text", **text}}


def qwen3_vl(*numbers: int, **others: Any) -> dict[str, Any]:
    text = sizes(*numbers, QWEN3, **D128, rope_parameters=MROPE)  # type: ignore[call-arg]
    return {"text_config": {"model_type": "qwen3_vl_text", **text, **others}} | others


def mistral3(*numbers: int, **others: Any) -> dict[str, Any]:
    text = {"model_type": "ministral3", **sizes(*numbers, MISTRAL, **D128)}  # type: ignore[call-arg]
    return {"text_config": text | UNTIED | others} | UNTIED | others


# Type of model and fields by hub id; a string is one of our presets.
CHECKPOINTS: Final[Mapping[str, str | tuple[str, dict[str, Any]]]] = {
    "meta-llama/Llama-3.2-1B": "llama3.2-1b",
    "meta-llama/Llama-3.2-3B": "llama3.2-3b",
    "meta-llama/Llama-3.1-8B": "llama3.1-8b",
    "meta-llama/Llama-3.3-70B-Instruct": "llama3-70b",
    "Qwen/Qwen2.5-7B": ("qwen2", sizes(3584, 18944, 28, 28, 4, QWEN2)),
    "Qwen/Qwen2.5-32B": ("qwen2", sizes(5120, 27648, 64, 40, 8, QWEN2)),
    "Qwen/Qwen2.5-72B": ("qwen2", sizes(8192, 29568, 80, 64, 8, QWEN2)),
    "Qwen/Qwen3-0.6B": "qwen3-0.6b",
    "Qwen/Qwen3-1.7B": "qwen3-1.7b",
    "Qwen/Qwen3-4B": "qwen3-4b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-14B": "qwen3-14b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-VL-2B-Instruct": ("qwen3_vl", qwen3_vl(2048, 6144, 28, 16, 8, **TIED)),
    "Qwen/Qwen3-VL-4B-Instruct": ("qwen3_vl", qwen3_vl(2560, 9728, 36, 32, 8, **TIED)),
    "Qwen/Qwen3-VL-8B-Instruct": ("qwen3_vl", qwen3_vl(4096, 12288, 36, 32, 8, **UNTIED)),
    "Qwen/Qwen3-VL-32B-Instruct": ("qwen3_vl", qwen3_vl(5120, 25600, 64, 64, 8, **UNTIED)),
    "google/gemma-2-9b": ("gemma2", sizes(3584, 14336, 42, 16, 8, 256000, head_dim=256)),
    "google/gemma-3-270m": ("gemma3_text", sizes(640, 2048, 18, 4, 1, 262144, head_dim=256, sliding_window=512)),
    "google/gemma-3-1b-pt": ("gemma3_text", sizes(1152, 6912, 26, 4, 1, 262144, head_dim=256, sliding_window=512)),
    "google/gemma-3-4b-pt": ("gemma3", gemma3(2560, 10240, 34, 8, 4)),
    "google/gemma-3-12b-pt": ("gemma3", gemma3(3840, 15360, 48, 16, 8)),
    "google/gemma-3-27b-pt": ("gemma3", gemma3(5376, 21504, 62, 32, 16, head_dim=128)),
    "mistralai/Mistral-7B-v0.3": "mistral-7b",
    "mistralai/Ministral-3-3B-Base-2512": ("mistral3", mistral3(3072, 9216, 26, 32, 8, **TIED)),
    "mistralai/Ministral-3-8B-Base-2512": ("mistral3", mistral3(4096, 14336, 34, 32, 8)),
    "mistralai/Ministral-3-14B-Base-2512": ("mistral3", mistral3(5120, 16384, 40, 32, 8)),
    "mistralai/Mistral-Small-3.1-24B-Base-2503": (
        "mistral3", {"text_config": sizes(5120, 32768, 40, 32, 8, MISTRAL, sliding_window=None, **M_3_1), **UNTIED},
    ),
    "mistralai/Devstral-Small-2-24B-Instruct-2512": ("mistral3", mistral3(5120, 32768, 40, 32, 8)),
    "microsoft/Phi-4-mini-instruct": (
        "phi3", sizes(3072, 8192, 32, 24, 8, 200064, rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}, **TIED),
    ),
    "microsoft/phi-4": "phi-4",
    "allenai/Olmo-3-1025-7B": "olmo3-7b",
    "allenai/Olmo-3-1125-32B": ("olmo3", sizes(5120, 27648, 64, 40, 8, 100278)),
    "ibm-granite/granite-3.3-2b-base": ("granite", sizes(2048, 8192, 40, 32, 8, 49159, **TIED)),
    "ibm-granite/granite-3.3-8b-base": ("granite", sizes(4096, 12800, 40, 32, 8, 49159, **TIED)),
    "HuggingFaceTB/SmolLM2-1.7B": ("llama", sizes(2048, 8192, 24, 32, 32, 49152, **TIED)),
    "HuggingFaceTB/SmolLM3-3B": "smollm3-3b",
    "swiss-ai/Apertus-8B-2509": ("apertus", sizes(4096, 21504, 32, 32, 8, 131072)),
    "arcee-ai/AFM-4.5B-Base": ("arcee", sizes(2560, 18432, 36, 20, 4, 128005, **D128)),
    "tiiuae/Falcon3-7B-Base": ("llama", sizes(3072, 23040, 28, 12, 4, 131072, head_dim=256)),
    "zai-org/GLM-4-9B-0414": ("glm4", {}),
    "zai-org/GLM-4-32B-0414": ("glm4", sizes(6144, 23040, 61, 48, 2, 151552, **D128)),
    "OpenGVLab/InternVL3_5-8B-HF": (
        "internvl", {"text_config": {"model_type": "qwen3", **sizes(4096, 12288, 36, 32, 8, QWEN3, **D128)}, **UNTIED},
    ),
    "ByteDance-Seed/Seed-OSS-36B-Base": (
        "seed_oss", sizes(5120, 27648, 64, 80, 8, 155136, **D128, attention_dropout=0.0, residual_dropout=0.0)
    ),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": (
        "exaone4", sizes(2048, 4096, 30, 32, 8, 102400, sliding_window=None, layer_types=["full_attention"] * 30,
                         **TIED),
    ),
    "LGAI-EXAONE/EXAONE-4.0-32B": (
        "exaone4", sizes(5120, 27392, 64, 40, 8, 102400, sliding_window=4096, sliding_window_pattern=4, **D128),
    ),
    "CohereLabs/c4ai-command-r7b-12-2024": ("cohere2", sizes(4096, 14336, 32, 32, 8, 256000, **D128)),
    "CohereLabs/c4ai-command-a-03-2025": ("cohere2", sizes(12288, 36864, 64, 96, 8, 256000, **D128)),
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen3.5-4B": "qwen3.5-4b",
    "Qwen/Qwen3.5-9B": "qwen3.5-9b",
    "Qwen/Qwen3.5-35B-A3B": ("qwen3_5_moe", {}),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ("qwen3_next", {}),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": ("kimi_linear", {}),
    "allenai/Olmo-Hybrid-7B": ("olmo_hybrid", {}),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (
        "nemotron_h", {
            "hidden_size": 2688, "intermediate_size": 1856, "num_attention_heads": 32, "num_key_value_heads": 2,
            "head_dim": 128, "vocab_size": 131072, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128,
            "n_groups": 8, "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        },
    ),
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "deepseek-ai/DeepSeek-V3": ("deepseek_v3", {}),
    "meta-llama/Llama-4-Scout-17B-16E": ("llama4", {}),
    "google/gemma-4-31B": (
        "gemma4", {"text_config": sizes(5376, 21504, 60, 32, 16, 262144, head_dim=256, global_head_dim=512,
                                        num_global_key_value_heads=4, attention_k_eq_v=True, num_kv_shared_layers=0,
                                        hidden_size_per_layer_input=0, sliding_window=1024)},
    ),
    "google/gemma-3n-E4B": ("gemma3n", {}),
    "meta-models/Muse-Glimmer-30B": ("muse_glimmer", {}),
    "mistralai/Mistral-Small-4-119B-2603": ("mistral4", {}),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (
        "qwen3_vl_moe", {
            "text_config": sizes(2048, 6144, 48, 32, 4, QWEN3, **D128, num_experts=128, moe_intermediate_size=768),
        },
    ),
    "baidu/ERNIE-4.5-21B-A3B-PT": ("ernie4_5_moe", {}),
    "tencent/Youtu-LLM-2B": ("youtu", {}),
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "openbmb/MiniCPM3-4B": ("minicpm3", {}),
    "LiquidAI/LFM2-1.2B": (
        "lfm2", {"hidden_size": 2048, "num_hidden_layers": 16, "layer_types": [
            "full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)]}
    ),
    "openai-community/gpt2-xl": (
        "gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    ),
    "facebook/opt-6.7b": ("opt", {"hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32,
                                  "num_attention_heads": 32, "word_embed_proj_dim": 4096, "dropout": 0.0}),
    "EleutherAI/pythia-6.9b": ("gpt_neox", sizes(4096, 16384, 32, 32, 32, 50432)),
}  # fmt: skip


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the hub ids to plan (default: all)")
    parser.add_argument("--csv", type=Path, help="table to write, a row for each checkpoint")
    asked = parser.parse_args(words)
    if asked.only and asked.csv is not None:
        parser.error("--csv takes all checkpoints; leave --only out")
    empty_timm_towers()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    names = [name for name in CHECKPOINTS if asked.only.lower() in name.lower()]
    rows = list(table(names))
    csv.writer(sys.stdout, lineterminator="\n").writerows(rows)
    if asked.csv is not None:
        write_csv(asked.csv, rows)
    dist.destroy_process_group()
    return 0


def config_of(name: str) -> PreTrainedConfig:
    """Returns the config of a checkpoint."""
    known = CHECKPOINTS[name]
    if isinstance(known, str):
        return resolve(BOTH, known, random_init=True).config
    model_type, fields = known
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**fields)
    return config


def planned(config: PreTrainedConfig, gpus: int, flags: Sequence[str]) -> Plan:
    """Returns the plan of a run. Raises ValueError if `lightseq train` refuses the model."""
    run = parse([*NEEDED, "--bf16", "--model_max_length", LENGTH, *flags], "")
    check_layers(run, inspect_architecture(config))
    chip = chip_named(CHIP)
    return make_plan(PlannedRun(config, run, Hardware(chip, gpus, 8, chip.memory_bytes, HOST_GIB * GIB)))


def table(names: Sequence[str]) -> Iterator[list[str]]:
    """Yields a heading and a row for each checkpoint: what its config.json needs, its plans, or why it is refused."""
    yield ["checkpoint", "change", "parameters", *WAYS, "not in lightseq train"]
    for name in names:
        config = config_of(name)
        try:
            check_config(config, name)
            cells = [cell(planned(config, gpus, flags)) for gpus, flags in WAYS.values()]
            yield [name, change(name), billions(inspect_architecture(config).total), *cells, ""]
        except ValueError as error:
            yield [name, change(name), "", *[""] * len(WAYS), refusal(config, str(error).removeprefix(f"{name}: "))]


def change(name: str) -> str:
    """Returns the change that a checkpoint needs before training."""
    known = CHECKPOINTS[name]
    has_dropout = not isinstance(known, str) and any("drop" in key for key in known[1])
    return "dropout set to 0" if has_dropout else "converted from FP8" if name in IN_FP8 else ""


def cell(plan: Plan) -> str:
    return f"{plan.tokens_per_second:,.0f} ({plan.parts.total / GIB:.0f})" if plan.fits else "–"


def billions(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count < 10e9 else f"{count / 1e9:.1f}B"


def refusal(config: PreTrainedConfig, line: str) -> str:
    """Returns the reason in a few words, and whether the model trains in a loop of one's own."""
    model = build_to_train(config)
    try:
        release(hf.enable(model, length=LOOP_LENGTH, device=torch.device("cpu")))
    except ValueError as error:
        return short_reason(str(error))
    if "that a plan cannot run" in line:  # the model's own code fails, and may in a loop too
        return short_reason(line)
    positions, reason = positions_in_table(model), short_reason(line)
    if reason == f"{positions} positions":
        return f"{reason}, in your own loop too"
    up_to = "" if positions is None else f" up to {positions} positions"
    return f"{reason}; your own loop takes it{up_to}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
