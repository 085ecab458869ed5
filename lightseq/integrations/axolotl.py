"""Plugin of axolotl that splits every sequence over ranks.

plugins: [lightseq.integrations.axolotl.LightseqPlugin]
lightseq_sequence_parallel_size: 4

axolotl joins the training arguments of all plugins when its trainers are first imported, so this file imports none.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, Field

PLUGIN: Final = f"{__name__}.LightseqPlugin"
TRAINERS: Final = "lightseq.integrations.axolotl_trainers"
PREFERENCES: Final[Mapping[Any, str]] = dict.fromkeys(("dpo", "ipo"), f"{TRAINERS}.LightseqDPOTrainer")  # keys: `rl`
LORA_KERNELS: Final = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
ATTENTIONS: Final = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


class LightseqArgs(BaseModel):
    """Keys of the YAML file that belong to the plugin."""

    lightseq_sequence_parallel_size: int | None = Field(
        default=None, ge=1, description="Neighbouring ranks that share a sequence (default: all ranks)."
    )
    lightseq_schedule: str | None = Field(
        default=None, description="Order in which ranks attend to each other's tokens (default: auto)."
    )
    lightseq_compile_layers: bool | None = Field(
        default=None, description="Compiles each layer (default: with torch_compile, and for packed samples on GPUs)."
    )


def _above_one(size: Any) -> bool:
    return size is not None and int(size) > 1


def _is_other(*known: Any) -> Callable[[Any], bool]:
    return lambda value: value not in known


# Unsupported keys and values, and what to write instead.
REFUSED: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "context_parallel_size": (_above_one, "use lightseq_sequence_parallel_size in its place"),
    "sequence_parallel_degree": (_above_one, "use lightseq_sequence_parallel_size in its place"),
    "tensor_parallel_size": (_above_one, "leave it out; FSDP2 shards weights (fsdp_version: 2)"),
    "expert_parallel_size": (_above_one, "leave it out; FSDP2 shards weights (fsdp_version: 2)"),
    "deepspeed": (bool, "use DDP or FSDP2 (fsdp_version: 2)"),
    "rl": (_is_other(None, *PREFERENCES), f"use {' or '.join(PREFERENCES)}, or TRL's trainers with lightseq"),
    "reward_model": (bool, "use lightseq's SequenceParallelRewardTrainer"),
    "process_reward_model": (bool, "leave it out"),
    "attn_implementation": (_is_other(*ATTENTIONS), "use sdpa; lightseq chooses its own kernels"),
    "xformers_attention": (bool, "use attn_implementation: sdpa; lightseq chooses its own kernels"),
    "sage_attention": (bool, "use attn_implementation: sdpa; lightseq chooses its own kernels"),
    "fused_attn_kernel": (bool, "leave it out; lightseq chooses its own kernels"),
    "cut_cross_entropy": (bool, "set it to false; lightseq's loss never makes whole logits"),
    "liger_fused_linear_cross_entropy": (bool, "set it to false; lightseq's loss never makes whole logits"),
    "chunked_cross_entropy": (bool, "set it to false; lightseq's loss never makes whole logits"),
    **{name: (bool, "set it to false, or lightseq_compile_layers: true to fuse layers") for name in LORA_KERNELS},
    "activation_offloading": (bool, "use gradient_checkpointing: true"),
    "layer_offloading": (bool, "use gradient_checkpointing: true, and FSDP2 (fsdp_version: 2)"),
    "tiled_mlp": (bool, "let more ranks share a sequence (lightseq_sequence_parallel_size)"),
    "generate_samples": (bool, "generate with a saved checkpoint"),
    "eval_table_size": (bool, "generate with a saved checkpoint"),
    "do_causal_lm_eval": (bool, "evaluate a saved checkpoint"),
    "do_bench_eval": (bool, "evaluate a saved checkpoint"),
}


class LightseqPlugin(BasePlugin):  # type: ignore[misc]
    """Plugin with trainers that split every sequence over ranks, and count a group of ranks as one."""

    def get_input_args(self) -> str:
        return f"{__name__}.LightseqArgs"

    def register(self, cfg: Any) -> None:
        """Refuses keys that do not work over ranks, before axolotl reads them. Raises ValueError."""
        if PLUGIN not in (cfg.get("plugins") or ()):
            return  # axolotl calls all plugins that it has ever loaded
        _check_keys(cfg)
        if cfg.get("adapter"):
            for name in LORA_KERNELS:  # axolotl would enable them
                cfg[name] = False
        if (trainer := PREFERENCES.get(cfg.get("rl"))) is not None:
            cfg["trainer_cls"] = trainer  # axolotl passes no model to a class that `get_trainer_cls` returns here

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """Corrects the rows of an update, from which axolotl computes the number of steps."""
        if not preprocess:
            ranks = cfg.world_size or 1
            groups = max(1, ranks // (cfg.lightseq_sequence_parallel_size or ranks))
            cfg.batch_size = cfg.micro_batch_size * cfg.gradient_accumulation_steps * groups

    def pre_model_load(self, cfg: Any) -> None:
        """Refuses keys again, with the defaults of other plugins (`cut_cross_entropy`). Raises ValueError."""
        _check_keys(cfg)

    def get_trainer_cls(self, cfg: Any) -> type | None:
        from lightseq.integrations.axolotl_trainers import LightseqTrainer

        return None if cfg.rl else LightseqTrainer

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Raises ValueError if another plugin's trainer would train whole sequences."""
        from lightseq.integrations.trainer import SequenceParallel

        if not isinstance(trainer, SequenceParallel):
            raise ValueError(
                f"another plugin's trainer, {type(trainer).__name__}, would not split sequences; take that "
                f"plugin out of plugins, or {PLUGIN}"
            )


def _check_keys(cfg: Mapping[str, Any]) -> None:
    """Raises ValueError for keys of the YAML file that do not work over ranks, and for unknown keys of ours."""
    own = LightseqArgs.model_fields
    for name in cfg:
        if name.startswith("lightseq_") and name not in own:
            raise ValueError(f"{name} is no key of {PLUGIN}; use {', '.join(own)}")
    for name, (is_refused, remedy) in REFUSED.items():
        if is_refused(value := cfg.get(name)):
            raise ValueError(f"{name}: {value} does not work with {PLUGIN}; {remedy}")
    if (cfg.get("fsdp") or cfg.get("fsdp_config")) and str(_fsdp_version(cfg)) != "2":
        raise ValueError(f"FSDP1 does not work with {PLUGIN}; set fsdp_version: 2")
    if (trainer := cfg.get("trainer_cls")) and trainer != PREFERENCES.get(cfg.get("rl")):
        raise ValueError(f"trainer_cls: {trainer} does not work with {PLUGIN}; leave it out")


def _fsdp_version(cfg: Mapping[str, Any]) -> Any:
    return cfg.get("fsdp_version") or (cfg.get("fsdp_config") or {}).get("fsdp_version")
