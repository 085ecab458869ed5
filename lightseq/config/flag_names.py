"""Names of flags: other spellings of ours, and what other programs call them."""

from collections.abc import Mapping
from typing import Final

OLDER_SPELLINGS: Final[Mapping[str, str]] = {"evaluation_strategy": "eval_strategy", "set_seed": "seed"}
# Flags by their names in other programs, for suggestions: transformers, TRL, axolotl, LLaMA-Factory, torchtitan.
FLAGS_OF_OTHER_PROGRAMS: Final[Mapping[str, str]] = {
    theirs: ours
    for ours, names in {
        "model_name_or_path": (
            "model model_name model_id base_model pretrained_model_name_or_path hf_assets_path initial_load_path"
        ),
        "tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_config",
        "data_path": "data dataset datasets dataset_name dataset_path train_file",
        "text_column": "text_field dataset_text_field",
        "model_max_length": (
            "length max_length max_seq_length max_seq_len seq_len sequence_len cutoff_len block_size seq_length "
            "max_packed_sequence_len"
        ),
        "packing": "pack sample_packing",
        "output_dir": "output logging_dir dump_folder",
        "resume_from_checkpoint": "checkpoint resume resume_from",
        "num_train_epochs": "epochs num_epochs",
        "per_device_train_batch_size": (
            "batch_size per_device_batch_size micro_batch_size train_batch_size local_batch_size"
        ),
        "optim": "optimizer",
        "learning_rate": "lr",
        "lr_scheduler_type": "scheduler lr_scheduler",
        "bf16": "dtype torch_dtype bfloat16",
        "seed": "random_seed data_seed",
        "kernel": (
            "attn_implementation attention_implementation flash_attention flash_attn use_flash_attention_2 "
            "sdp_attention xformers_attention s2_attention flex_attention eager_attention"
        ),
        "sequence_parallel_size": (
            "cp_size sp_size context_parallel_size sequence_parallel_degree context_parallel_degree"
        ),
        "expert_parallel_size": "ep_size expert_model_parallel_size expert_parallel_degree ep",
        "ulysses_size": "ulysses",
        "lora_rank": "lora lora_r use_lora use_peft finetuning_type r",
        "load_in_4bit": "qlora",
        "lora_adapter": "adapter_name_or_path lora_model_dir",
        "lora_target_modules": "lora_target target_modules",
        "lora_target_parameters": "target_parameters",
        "use_rslora": "peft_use_rslora",
        "loraplus_lr_ratio": "loraplus_ratio",
        "offload": "activation_offloading",
        "deepspeed": "deepspeed_config",
        "report_to": "wandb tensorboard use_wandb use_tensorboard mlflow comet",
        "keep_best": "load_best_model_at_end",
        "eval_fraction": "test_size val_set_size val_size validation_split_percentage eval_split",
        "data_cache": "dataset_prepared_path cache_dir",
        "eval_data_path": "test_datasets eval_dataset validation_file",
        "max_steps": "steps num_steps train_steps total_steps train_iters",
        "per_device_eval_batch_size": "eval_batch_size",
        "gradient_accumulation_steps": "grad_accum_steps accumulation_steps",
        "adam_beta1": "beta1 betas",
        "adam_beta2": "beta2",
        "adam_epsilon": "eps epsilon",
        "weight_decay": "wd",
        "max_grad_norm": "clip_grad gradient_clipping grad_clip max_norm",
        "logging_steps": "log_freq",
        "save_total_limit": "keep_latest_k",
        "warmup_steps": "warmup num_warmup_steps",
        "fp16": "float16",
        "deterministic": "full_determinism use_deterministic_algorithms",
        "gradient_checkpointing": "activation_checkpointing",
        "remat": "gradient_checkpointing_kwargs activation_checkpointing_kwargs",
        "step_timeout": "ddp_timeout",
        "transport": "ddp_backend",
        "fsdp": "fsdp_config fsdp_version",
        "ignore_columns": "remove_unused_columns",
        "chat_template": "chat_template_path chat_template_jinja template",
        "early_stopping_patience": "early_stopping",
        "torch_compile": "compile",
        "rope_scaling": "overrides_of_model_config",
    }.items()
    for theirs in names.split()
}
# Flags of other programs that lightseq lacks, with the remedy.
REMEDIES: Final[Mapping[str, str]] = {
    theirs: remedy
    for remedy, names in {
        "benchmarks/plan_attention.py of the repository plans one attention layer": "attention",
        "--push_to_hub True --hub_model_id NAME uploads a checkpoint when the run ends; leave it out": (
            "hub_strategy hub_always_push hub_revision push_to_hub_model_id push_to_hub_organization"
        ),
        "`hf auth login` or HF_TOKEN gives the hub's token": (
            "token hf_token use_auth_token hf_use_auth_token hub_token push_to_hub_token"
        ),
        "--load_in_4bit True --lora_rank 16 trains adapters on weights in four bits (NF4 with double quantization)": (
            "load_in_8bit quantization quantization_config quantization_bit quantization_method "
            "bnb_config bnb_config_kwargs use_bnb gptq"
        ),
        "--load_in_4bit True is NF4 with double quantization, computed in the dtype of the run; leave it out": (
            "bnb_4bit_quant_type bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_use_double_quant "
            "use_bnb_nested_quant quant_type double_quant double_quantization use_double_quant "
            "llm_int8_skip_modules llm_int8_threshold llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight"
        ),
        "adapters have no dropout; leave it out": "lora_dropout",
        "adapters are plain LoRA, with --use_rslora True rank-stabilized; leave it out": (
            "use_dora peft_use_dora lora_bias init_lora_weights peft_init_lora_weights lora_fan_in_fan_out "
            "fan_in_fan_out lora_task_type loftq_config rank_pattern alpha_pattern pissa_init"
        ),
        "--lora_rank trains adapters, and --lora_adapter DIR continues one": "adapter peft peft_type peft_config",
        "adapters go to what --lora_target_modules and --lora_target_parameters name, by default all linear layers": (
            "lora_target_linear"
        ),
        "give --lora_target_modules a regular expression for the whole names of the layers to adapt": (
            "exclude_modules layers_to_transform layers_pattern lora_layers_to_transform peft_layers_to_transform"
        ),
        "beside adapters, embeddings and head stay frozen; without --lora_rank all weights train": (
            "lora_modules_to_save modules_to_save additional_target loraplus_lr_embedding"
        ),
        "all weights train, or with --lora_rank adapters only": "unfrozen_parameters freeze_layers freeze_vision_tower",
        "evaluation computes in the dtype of training; give --bf16 or --fp16": "bf16_full_eval fp16_full_eval",
        "the loss decides, and --keep_best retains the checkpoint with the lowest": (
            "metric_for_best_model greater_is_better compute_metrics include_for_metrics"
        ),
        "evaluate before training with `lightseq evaluate`": "eval_on_start eval_delay",
        "give steps: --eval_steps N, --save_steps N": "evals_per_epoch saves_per_epoch",
        "--logging_steps N logs every N steps": "logging_strategy logging_first_step",
        "`lightseq train` trains and `lightseq evaluate` evaluates; leave it out": "do_train do_eval do_predict",
        "the tracker's run is named after --output_dir": "run_name wandb_run_name wandb_name",
        "give --report_to wandb; WANDB_PROJECT and WANDB_ENTITY name the project": (
            "project wandb_project wandb_entity wandb_mode wandb_watch wandb_log_model"
        ),
        "`lightseq analyze DIR` draws a run's curves": "plot_loss",
        "the model's own config and transformers' classes decide; code from the hub never runs; leave it out": (
            "trust_remote_code model_type tokenizer_type is_llama_derived_model model_init_kwargs"
        ),
        "fetch it with `hf download NAME --revision REVISION --local-dir DIR`, and give DIR as --model_name_or_path": (
            "model_revision revision revision_of_model"
        ),
        "give several sources with weights: --data_path a.jsonl=2,b.jsonl=0.5": (
            "interleave_probs mix_strategy interleave_prob stopping_strategy dataset_mixer dataset_mixture"
        ),
        "name the split in the path: --data_path hf:NAME:CONFIG:SPLIT": (
            "dataset_config dataset_config_name dataset_train_split dataset_test_split dataset_split train_split split"
        ),
        "the columns decide how rows are read (docs/data.md); leave it out": (
            "dataset_kwargs dataset_num_proc dataset_processes preprocessing_num_workers dataset_streaming streaming "
            "dataset_dir skip_prepare_dataset formatting_func label_names"
        ),
        "answers of chats and completions are the targets, and all tokens of a text; leave it out": (
            "completion_only_loss assistant_only_loss train_on_inputs train_on_prompt roles_to_train train_on_eos "
            "mask_history"
        ),
        "set it in the tokenizer's files": "eos_token pad_token bos_token special_tokens added_tokens_overrides",
        "batches are read in an order that --seed decides; leave it out": (
            "shuffle shuffle_dataset shuffle_merged_datasets dataloader_drop_last dataloader_num_workers "
            "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor ignore_data_skip "
            "dataloader_multiprocessing_context dataloader_in_order"
        ),
        "--packing best_fit packs examples of any length; without it, batches are padded as far as needed": (
            "group_by_length length_column_name train_sampling_strategy packing_strategy padding_free multipack "
            "padding multipack_real_batches eval_packing eval_sample_packing pad_to_multiple_of pad_to_sequence_len "
            "neat_packing"
        ),
        "longer rows are cut into pieces of --model_max_length, and every token is predicted; leave it out": (
            "truncation_mode excess_length_strategy truncation"
        ),
        "training never holds the logits of a whole sequence, and its kernels are fused where they can; leave it out": (
            "use_liger_kernel use_liger liger_kernel_config liger_fused_linear_cross_entropy liger_rope "
            "liger_rms_norm liger_glu_activation cut_cross_entropy eval_accumulation_steps unsloth use_unsloth "
            "use_cache"
        ),
        "the loss is cross-entropy alone; leave it out, or use SequenceParallelTrainer (docs/trainers.md)": (
            "label_smoothing_factor label_smoothing neftune_noise_alpha"
        ),
        "--objective dpo has TRL's sigmoid loss; for others use TRL's trainers (docs/trainers.md)": (
            "loss_type loss_weights f_divergence_type ld_alpha use_weighting"
        ),
        "the reference of --objective dpo is the model as it was before training; leave it out": (
            "reference_model ref_model ref_model_name_or_path sync_ref_model precompute_ref_log_probs "
            "precompute_ref_batch_size reference_free"
        ),
        "`lightseq train` has --objective next_token, dpo, distill; for others use TRL's trainers (docs/trainers.md)": (
            "rl stage reward_model rlhf"
        ),
        "--torch_compile True or False decides, and inductor compiles": "torch_compile_backend torch_compile_mode",
        "give --lr_scheduler_type cosine_with_min_lr and --lr_scheduler_kwargs": (
            "min_lr lr_min min_lr_rate cosine_min_lr_ratio cosine_constant_lr_ratio"
        ),
        "give --adam_beta1, --adam_beta2 and --adam_epsilon": "optim_args optimizer_args optim_target_modules",
        "the loss is averaged over all targets of all ranks; leave it out": "average_tokens_across_devices",
        "CUDA_VISIBLE_DEVICES= hides the GPUs": "use_cpu no_cuda",
        "the launcher sets ranks; leave it out": "local_rank rank world_size",
        "`lightseq train` and torch.distributed.run start ranks; give it to them": (
            "nproc_per_node max_restarts nnodes node_rank master_addr master_port num_processes num_gpus n_gpu gpus"
        ),
        "ranks are divided by --sequence_parallel_size and --expert_parallel_size, the rest hold other data": (
            "tp_size tensor_parallel_size tensor_model_parallel_size pp_size pipeline_parallel_size "
            "parallelism_config pipeline_model_parallel_size dp_size data_parallel_size dp_shard_size "
            "dp_replicate_size accelerator_config tensor_parallel_degree pipeline_parallel_degree "
            "data_parallel_shard_degree data_parallel_replicate_degree"
        ),
        "FSDP2 gathers and reduces weights; leave it out": (
            "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph"
        ),
        "--per_device_train_batch_size, --gradient_accumulation_steps and the ranks decide": (
            "global_batch_size auto_find_batch_size"
        ),
        "checkpoints hold the model and what resuming needs; --save_total_limit N bounds them": (
            "save_only_model save_on_each_node save_safetensors"
        ),
        "leave it out": (
            "disable_tqdm log_level log_level_replica log_on_each_node logging_nan_inf_filter skip_memory_metrics "
            "debug torch_empty_cache_steps include_num_input_tokens_seen prediction_loss_only strict plugins "
            "trackio_space_id trackio_bucket_id trackio_static_space_id eval_do_concat_batches eval_use_gather_object "
            "batch_eval_metrics enable_jit_checkpoint restore_callback_states_from_checkpoint ignore_bias_buffers"
        ),
    }.items()
    for theirs in names.split()
}


def normalize_flag(word: str) -> str:
    """Replaces hyphens in a flag's name: --learning-rate=1 becomes --learning_rate=1."""
    flag, *value = word.split("=", 1)
    return "=".join(["--" + flag[2:].replace("-", "_"), *value]) if flag.startswith("--") else word
