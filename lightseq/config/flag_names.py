"""Names of flags: other spellings of ours, and what other programs call them."""

from collections.abc import Mapping
from typing import Final

OLDER_SPELLINGS: Final[Mapping[str, str]] = {"evaluation_strategy": "eval_strategy", "set_seed": "seed"}
# Our flags by the names that other programs use (transformers, TRL, axolotl, LLaMA-Factory), for suggestions.
FLAGS_OF_OTHER_PROGRAMS: Final[Mapping[str, str]] = {
    theirs: ours
    for ours, names in {
        "model_name_or_path": "model model_name model_id base_model",
        "tokenizer": "tokenizer_name tokenizer_name_or_path",
        "data_path": "data dataset datasets dataset_name dataset_path train_file",
        "text_column": "text_field dataset_text_field",
        "model_max_length": "length max_length max_seq_length max_seq_len seq_len sequence_len cutoff_len block_size",
        "packing": "pack sample_packing",
        "output_dir": "output logging_dir",
        "resume_from_checkpoint": "checkpoint resume resume_from",
        "num_train_epochs": "epochs num_epochs",
        "per_device_train_batch_size": "batch_size per_device_batch_size micro_batch_size train_batch_size",
        "optim": "optimizer",
        "learning_rate": "lr",
        "lr_scheduler_type": "scheduler lr_scheduler",
        "bf16": "dtype torch_dtype",
        "seed": "random_seed data_seed",
        "kernel": "attn_implementation attention_implementation flash_attention flash_attn use_flash_attention_2",
        "sequence_parallel_size": "cp_size sp_size context_parallel_size sequence_parallel_degree",
        "expert_parallel_size": "ep_size expert_model_parallel_size expert_parallel_degree ep",
        "ulysses_size": "ulysses",
        "lora_rank": "lora lora_r use_lora use_peft",
        "lora_adapter": "adapter_name_or_path lora_model_dir",
        "lora_target_modules": "lora_target",
        "lora_target_parameters": "target_parameters",
        "offload": "activation_offloading",
        "deepspeed": "deepspeed_config",
        "report_to": "wandb tensorboard",
        "keep_best": "load_best_model_at_end",
        "eval_fraction": "test_size val_set_size val_size validation_split_percentage eval_split",
    }.items()
    for theirs in names.split()
}
WITHOUT_COUNTERPART: Final = ("fsdp_config", "local_rank", "tp_size")  # though their letters are close to a flag's


def normalize_flag(word: str) -> str:
    """Replaces hyphens in a flag's name: --learning-rate=1 becomes --learning_rate=1."""
    flag, *value = word.split("=", 1)
    return "=".join(["--" + flag[2:].replace("-", "_"), *value]) if flag.startswith("--") else word
