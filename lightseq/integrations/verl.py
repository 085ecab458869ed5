"""A verl engine that splits sequences over ranks, loaded by verl's model.external_lib=lightseq.integrations.verl.

verl's configs of FSDP choose it with three words: `strategy=lightseq`, the `_target_` of `LightseqEngineConfig` and
`ulysses_sequence_parallel_size`, which here is the number of ranks that share a sequence under any schedule.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import apply_fsdp2, fsdp2_load_full_state_dict, get_init_weight_context_manager
from verl.utils.model import extract_multi_modal_inputs, get_hf_auto_model_class
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import EngineConfig, FSDPEngineConfig
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl.workers.engine.fsdp.utils import create_device_mesh
from verl.workers.engine.utils import detach_tree

from lightseq import hf
from lightseq.models.decoder import positions_in_table, transformers_model
from lightseq.utils.formatting import check_names

REQUIRED: Final = ("input_ids", "position_ids", "loss_mask", "temperature")
ATTENTION_OPTIONS: Final = tuple(name for name in hf.ENABLE_OPTIONS if name not in ("device", "dtype"))


@dataclass
class LightseqEngineConfig(FSDPEngineConfig):
    """Settings of verl's FSDP2 engine, and options of `hf.enable`.

    What concerns only FSDP1 or logits, such as `use_orig_params` or `entropy_checkpointing`, changes nothing.
    """

    strategy: str = "lightseq"
    attention_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)  # without the check of FSDPEngineConfig for verl's own strategies
        check_names("attention_options", self.attention_options, ATTENTION_OPTIONS)


@EngineRegistry.register(model_type="language_model", backend="lightseq", device=["cuda", "cpu"])
class LightseqEngine(FSDPEngineWithLMHead):
    """verl's FSDP2 engine with packed rows split over ranks, and a head that never makes logits.

    Optimizer, learning rate, checkpoints, adapters and the export of weights are verl's.
    `ulysses_sequence_parallel_size` neighbouring ranks share rows; groups of them are data parallel.
    """

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        _check_settings(model_config, engine_config)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _init_device_mesh(self) -> None:
        ranks, size = dist.get_world_size(), self.engine_config.ulysses_sequence_parallel_size
        if size < 1 or ranks % size:
            *sizes, last = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
            choice = f"{', '.join(sizes)} or {last}" if sizes else last
            raise ValueError(f"ulysses_sequence_parallel_size {size} does not divide {ranks} ranks; use {choice}")
        self.device_mesh = create_device_mesh(world_size=ranks, fsdp_size=self.engine_config.fsdp_size)
        self.ulysses_sequence_parallel_size = size
        # verl asks this mesh for its data-parallel rank, also where no sequence is split.
        self.ulysses_device_mesh = init_device_mesh(
            get_device_name(), (ranks // size, size), mesh_dim_names=("dp", "sp")
        )
        self.ulysses_parallel_group = None  # nothing of verl's own splits sequences
        self.use_ulysses_sp = False

    def _build_module(self) -> nn.Module:
        """Loads the model without verl's patches of attention and of forward functions."""
        settings, config = self.model_config, self.model_config.hf_config
        dtype = PrecisionType.to_dtype(self.engine_config.model_dtype)
        with_meta = get_init_weight_context_manager(
            use_meta_tensor=not config.tie_word_embeddings, mesh=self.device_mesh
        )
        if settings.trust_remote_code:
            raise ValueError("trust_remote_code=True: lightseq runs no code that ships with a model; set it to False")
        with with_meta(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = get_hf_auto_model_class(config).from_pretrained(
                settings.local_path,
                dtype=dtype,
                config=config,
                attn_implementation="sdpa",  # flash-attention of verl's default need not be installed
                trust_remote_code=False,
            )
        module.to(dtype)
        if settings.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        settings, device = self.engine_config, get_device_name()
        precision = settings.mixed_precision or {}
        param_dtype = PrecisionType.to_dtype(precision.get("param_dtype", "bf16"))
        reduce_dtype = PrecisionType.to_dtype(precision.get("reduce_dtype", "fp32"))
        if param_dtype == torch.float16:
            raise ValueError(
                "mixed_precision.param_dtype is float16, which this engine does not scale; use bf16 or fp32"
            )
        longest = settings.max_token_len_per_gpu or 0
        options = {"packed": True, **settings.attention_options}
        if longest:
            options.setdefault("length", longest * self.ulysses_sequence_parallel_size)
        self._sequence_context = hf.enable(
            module, self.ulysses_device_mesh["sp"], device=torch.device(get_device_id()), dtype=param_dtype, **options
        )
        offload = None
        if settings.offload_policy or (settings.forward_only and device != "cpu"):
            self._is_offload_param = self._is_offload_optimizer = False
            self._uses_fsdp2_cpu_offload_policy = True
            offload = CPUOffloadPolicy(pin_memory=device != "cpu")
        arguments = {
            "mesh": self.device_mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=True),
            "offload_policy": offload,
            "reshard_after_forward": settings.reshard_after_forward,
        }
        weights = module.state_dict()
        apply_fsdp2(module, arguments, settings)
        fsdp2_load_full_state_dict(module, weights, self.device_mesh, offload)
        for unit in module.modules():
            if isinstance(unit, FSDPModule):  # ranks have shares of a gradient, which are summed
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)
        return module

    def forward_backward_batch(self, data: TensorDict, loss_function: Callable, forward_only: bool = False) -> Any:
        self._check_batch(data)
        return super().forward_backward_batch(data, loss_function, forward_only)

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable | None, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """Returns the loss to run backward, and what verl reports: whole rows' values on every rank of a group."""
        micro_batch = micro_batch.to(get_device_id())
        outputs = self._values_of_rows(micro_batch)
        loss, metrics = torch.ones((), device=get_device_id()), dict[str, Any]()
        if loss_function is not None:
            group = self.get_data_parallel_group()
            loss, metrics = loss_function(model_output=outputs, data=micro_batch, dp_group=group)
        reported = {"model_output": detach_tree(outputs), "loss": loss.detach().item(), "metrics": metrics}
        # verl's losses expect an average over groups; gradients are summed over all ranks.
        return loss / self.get_data_parallel_size(), reported

    def _values_of_rows(self, micro_batch: TensorDict) -> dict[str, Tensor]:
        """Returns the log-probabilities, and entropies if verl asks for them, of all rows as nested tensors.

        As in verl, the last token of a row has the value of the next row's first token, which losses leave out.
        """
        rows = micro_batch["input_ids"]
        edges, ids = rows.offsets(), rows.values()[None]
        context = self._sequence_context
        batch = hf.shard_batch(context, ids, shift_labels=ids.roll(-1, 1), cu_seqlens=edges)
        temperature = _temperature(micro_batch["temperature"])
        if tu.get_non_tensor_data(micro_batch, "calculate_entropy", default=False):
            log_probs, entropy = hf.token_log_probs(context, self.module, batch, temperature, with_entropy=True)
            own = {"log_probs": log_probs, "entropy": entropy}
        else:
            own = {"log_probs": hf.token_log_probs(context, self.module, batch, temperature)}
        whole = hf.gather_tokens(context, torch.stack([*own.values()], -1), batch)[0]
        return {
            name: torch.nested.nested_tensor_from_jagged(values, edges)
            for name, values in zip(own, whole.unbind(-1), strict=True)
        }

    def _check_batch(self, data: TensorDict) -> None:
        """Raises ValueError on every rank for a batch that this engine cannot train on, before any model runs."""
        try:
            problem = self._problem(data)
        except ValueError as error:
            problem = str(error)
        except Exception as error:  # else the other ranks would wait for this one
            problem = f"{type(error).__name__}: {error}"
        problems: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        if found := next(((rank, text) for rank, text in enumerate(problems) if text), None):
            raise ValueError(f"rank {found[0]}: {found[1]}")

    def _problem(self, data: TensorDict) -> str | None:
        if missing := [name for name in REQUIRED if name not in data.keys()]:  # noqa: SIM118  a TensorDict
            return f"the batch has no {', '.join(missing)}; give {', '.join(REQUIRED)}"
        rows = data["input_ids"]
        if not rows.is_nested:
            return f"input_ids are a tensor {tuple(rows.shape)}; give nested rows (data.pad_mode=no_padding)"
        for name in ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only"):
            if tu.get_non_tensor_data(data, name, default=False):
                return f"{name} is not supported by strategy=lightseq; turn it off"
        if extract_multi_modal_inputs(data.get("multi_modal_inputs", [])) or data["position_ids"].dim() == 3:
            return "the batch has images or other inputs beside text, which strategy=lightseq does not take in verl"
        lengths = rows.offsets().diff()
        longest, ranks = int(lengths.max()), self.ulysses_sequence_parallel_size
        if tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
            most = tu.get_non_tensor_data(data, "max_token_len_per_gpu", default=None)
            if most is None:
                return "use_dynamic_bsz needs max_token_len_per_gpu; give the tokens of a micro-batch on one rank"
            if longest > most * ranks:
                return (
                    f"a row has {longest} tokens, but a micro-batch holds {most * ranks} (max_token_len_per_gpu {most} "
                    f"on {ranks} sequence ranks); give max_token_len_per_gpu {-(-longest // ranks)} or more"
                )
        table = positions_in_table(transformers_model(self.module))
        if table is not None and longest > table:
            return f"a row has {longest} tokens, but the model has a table for {table} positions; shorten the row"
        starts = rows.offsets()[:-1].repeat_interleave(lengths)
        counted = torch.arange(len(starts), device=starts.device) - starts
        if not torch.equal(data["position_ids"].values().to(counted), counted):
            return "position_ids do not count up from 0 in each row; give those of whole rows"
        _temperature(data["temperature"])
        return None


def _temperature(given: Tensor | float) -> float:
    """Returns the temperature of a batch. Raises ValueError if its rows have different ones."""
    if not isinstance(given, Tensor):
        return float(given)
    if (low := float(given.min())) != (high := float(given.max())):
        raise ValueError(f"rows have temperatures from {low:g} to {high:g}; give all rows of a batch the same")
    return low


def _check_settings(model_config: Any, engine_config: Any) -> None:
    """Raises ValueError for settings of verl that this engine would leave out silently."""
    if not isinstance(engine_config, LightseqEngineConfig):
        raise ValueError(
            f"strategy=lightseq has a {type(engine_config).__name__}; set its _target_ to "
            f"{LightseqEngineConfig.__module__}.{LightseqEngineConfig.__name__}"
        )
    refused = {
        "model.use_liger": model_config.use_liger,
        "model.enable_activation_offload": model_config.enable_activation_offload,
        "model.mtp.enable": model_config.mtp.enable,
        "model.tiled_mlp.enabled": model_config.tiled_mlp.get("enabled", False),
        "qat.enable": engine_config.qat.enable,
        "pad_to_length": engine_config.pad_to_length,
        "router_replay.mode": engine_config.router_replay.mode != "disabled",
    }
    if names := [name for name, is_on in refused.items() if is_on]:
        raise ValueError(f"{names[0]} is not supported by strategy=lightseq; turn it off")
