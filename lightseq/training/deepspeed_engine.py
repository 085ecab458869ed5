"""DeepSpeed ZeRO-1, 2 and 3 instead of FSDP2, with our model, loss and learning rate.

DeepSpeed treats every rank as data-parallel and averages gradients over all ranks. A rank's loss is already divided by
the global number of valid tokens, so gradients must be summed: the loss is multiplied by the number of ranks.
"""

import copy
import copyreg
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightseq.checkpoint.checkpoints import STATE
from lightseq.config.train_config import TrainConfig
from lightseq.distributed.agreement import on_all_ranks
from lightseq.distributed.environment import set_deepspeed_environment
from lightseq.distributed.world import World, use_host_cores
from lightseq.memory.recomputation import MemorySettings
from lightseq.models import weights
from lightseq.models.decoder import ties_embeddings
from lightseq.parallelize import apply_techniques, layer_groups
from lightseq.parts.chosen_experts import build_to_train
from lightseq.plan.plan import Plan
from lightseq.training.engine import Update, fill_weights
from lightseq.training.inputs import Inputs
from lightseq.training.optimization import UNKNOWN_PARAMETER, make_optimizer
from lightseq.training.router_flags import make_routers
from lightseq.utils.formatting import first_line
from lightseq.utils.pickles import PICKLE_ERRORS

TAG = "deepspeed"
FROM_FLAGS: Final = ("betas", "eps", "weight_decay")  # settings of a parameter group
PROBE_BYTES = 2**20  # written to a file after a failure, to learn the reason
ALLOWED_CLASSES: Final = frozenset(  # that DeepSpeed saves besides tensors
    [
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    ]
)


class DeepSpeedEngine:
    """DeepSpeed engine that fills float32 master weights from files and exports them."""

    def __init__(self, config: TrainConfig, inputs: Inputs, memory: MemorySettings, plan: Plan | None) -> None:
        assert inputs.deepspeed is not None
        dims, world = inputs.dims, inputs.dims.world
        self._deepspeed = _import(world)
        self._settings, self._world = inputs.deepspeed, world
        self.config, self.dims, self.memory, self.plan = config, dims, memory, plan
        settings = self._settings
        on_all_ranks(world, lambda: self._check_settings(config))
        devices = {part: settings.device_of(part) for part in ("offload_optimizer", "offload_param")}
        offloads = [f"{part} {device}" for part, device in devices.items() if device != "none"]
        if offloads:
            use_host_cores(world)
        self.sharding_description = ", ".join([f"{settings.name} over all ranks", *offloads])
        self.model = build_to_train(inputs.model_config)
        parallel = on_all_ranks(world, lambda: apply_techniques(self.model, config, dims, memory))
        inner, self.context, self.offload = parallel.loss_model, parallel.context, parallel.offload
        self.stopwatch, self.units = inner.stopwatch, parallel.units
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(getattr(torch, config.compute_dtype))
        self._materialize()
        self.routers = on_all_ranks(world, lambda: make_routers(config, self.model, self.context))
        self._engine = on_all_ranks(world, lambda: self._initialize(inner, make_optimizer(self.model, config)))
        self._files = CheckpointFiles(self._engine.checkpoint_engine)
        self._engine.checkpoint_engine = self._files
        copy_script = self._engine._copy_recovery_script
        self._engine._copy_recovery_script = lambda directory: self._files.attempt(
            lambda: copy_script(directory), f"{directory}/zero_to_fp32.py"
        )
        self.loss_model: nn.Module = self._engine
        self.frozen: Mapping[str, nn.Module] = {}  # the checks of flags refuse objectives that need any
        self.optimizer: Any = self._engine.optimizer
        on_all_ranks(world, lambda: fill_weights(self.model, inputs, config.seed, self._fill))

    def _check_settings(self, config: TrainConfig) -> None:
        """Raises ValueError, in one line, for settings that DeepSpeed rejects."""
        from pydantic import ValidationError

        accelerator = self._deepspeed.accelerator.get_accelerator()
        device = accelerator.device_name()
        if config.fp16 and not accelerator.is_fp16_supported():
            raise ValueError(f"--fp16 under --deepspeed does not run on {device}; give --bf16, or neither")
        if config.bf16 and not accelerator.is_bf16_supported():
            raise ValueError(f"--bf16 under --deepspeed does not run on {device}; give --fp16, or neither")
        try:
            self._deepspeed.DeepSpeedConfig(self._settings_copy())
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, (error.title, *first["loc"])))
            raise ValueError(
                f"--deepspeed {self._settings.source}: {key}: {first['msg']}; correct it, or remove it"
            ) from error

    def _materialize(self) -> None:
        """Allocates the weights: in full for ZeRO-1 and 2, sharded unit by unit for ZeRO-3."""
        dtype = getattr(torch, self.config.compute_dtype)
        if self._settings.stage < 3:
            weights.materialize(self.model, self._world.device, dtype=dtype)
            return
        tied = ties_embeddings(self.model)
        for module in (module for unit in self.units for module in unit.modules):
            module.to_empty(device=self._world.device)
            self._deepspeed.zero.Init(module=module, config_dict_or_path=self._settings_copy())
        if tied:  # the weights allocated above are separate
            self.model.get_output_embeddings().weight = self.model.get_input_embeddings().weight
        weights.rebuild_buffers(self.model, self._world.device, dtype)

    def _initialize(self, inner: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        if self._settings.stage == 3:
            # Gathers a layer's weights before its forward and backward pass. Gathering inside a layer would add
            # operators, and recomputation must run the same ones as the forward pass.
            classes = {type(layer) for group in layer_groups(self.units) for layer in group}
            self._deepspeed.utils.set_z3_leaf_modules(self.model, list(classes))
        dtypes = {name: buffer.dtype for name, buffer in inner.named_buffers()}
        engine, *_ = self._deepspeed.initialize(
            model=inner, optimizer=optimizer, config=self._settings_copy(), dist_init_required=False
        )
        cast = [name for name, buffer in inner.named_buffers() if buffer.dtype != dtypes[name]]
        assert not cast, f"RoPE needs float32 frequencies, but DeepSpeed cast {cast}"
        return engine

    def _settings_copy(self) -> dict[str, Any]:
        """Returns a copy of the settings, because DeepSpeed modifies them. Ranks other than 0 log only errors."""
        settings = copy.deepcopy(self._settings.settings)
        return settings if self._world.is_main else settings | {"log_level": "error"}

    def _fill(self, parameter: nn.Parameter, read: Callable[[tuple[slice, ...]], Tensor]) -> None:
        """Fills a weight and its float32 master from a full tensor. DeepSpeed made the master in the compute dtype."""
        shape = weights.global_shape(parameter)
        whole = read(tuple(slice(0, n) for n in shape)).to(parameter.device, torch.float32)
        if self._settings.stage < 3:
            self._deepspeed.utils.safe_set_full_fp32_param(parameter, whole)
            parameter.data.copy_(whole)
            return
        part = len(parameter.ds_tensor)  # type: ignore[attr-defined]  # the same on every rank; the last is padded
        padded = nn.functional.pad(whole.flatten(), (0, part * self._world.size - whole.numel()))
        self._deepspeed.utils.safe_set_local_fp32_param(parameter, padded[part * self._world.rank :][:part])
        with self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(whole)

    def backward(self, share: Tensor, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(share * self._world.size, scale_wrt_gas=False)

    def update(self) -> Update:
        """Steps. DeepSpeed skips a step with a non-finite norm and does not tell which gradient caused it."""
        skipped = self._engine.skipped_steps
        self._engine.step()
        norm, nonfinite = self._engine.get_global_grad_norm(), -1
        if self._engine.skipped_steps > skipped:  # the norm is None or an earlier step's
            norm, nonfinite = float("nan"), UNKNOWN_PARAMETER
        norm = torch.as_tensor(norm, device=self._world.device)
        return Update(norm, torch.full_like(norm, nonfinite, dtype=torch.int64))

    def try_memory(self, loss: Callable[[], Tensor]) -> None:
        """Runs both passes; the optimizer state exists already. The zero gradients stay and do not change a step."""
        self.backward(loss(), last=False)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield name, self._deepspeed.utils.safe_get_full_fp32_param(parameter)
            else:  # for example a router's bias, which DeepSpeed's optimizer does not copy
                with self._deepspeed.zero.GatheredParameters(parameter):
                    whole = parameter.detach().clone()
                yield name, whole

    def tensors(self) -> dict[str, Tensor] | None:
        return None

    def save_state(self, directory: Path) -> None:
        """Writes DeepSpeed's files on every rank. Raises this rank's first failure after all ranks are done."""
        self._files.failure = None
        self._engine.save_checkpoint(str(directory), tag=TAG, save_latest=False)
        if self._files.failure is not None:
            raise self._files.failure
        if self._world.is_main:
            (directory / "latest").write_text(TAG)  # written here because a failure in save_checkpoint hangs the others

    def restore(self, checkpoint_directory: Path) -> None:
        if (checkpoint_directory / STATE / TAG / "offloaded_tensors").is_dir():
            raise ValueError(
                f"--resume_from_checkpoint {checkpoint_directory} was saved with its optimizer state on nvme, which is "
                "not supported; start from its weights with --model_name_or_path"
            )
        check_harmless(checkpoint_directory / STATE)  # DeepSpeed would unpickle any class
        flags = [{name: group[name] for name in FROM_FLAGS if name in group} for group in self.optimizer.param_groups]
        found, _ = self._engine.load_checkpoint(str(checkpoint_directory / STATE), tag=TAG)
        # DeepSpeed replaces the settings of the parameter groups with the checkpoint's.
        for group, values in zip(self.optimizer.param_groups, flags, strict=True):
            group.update(values)
        if found is None:
            raise ValueError(
                f"--resume_from_checkpoint {checkpoint_directory}: {STATE}/ is missing; give another checkpoint"
            )

    def facts(self) -> dict[str, Any]:
        return {"engine": self._settings.name}


def load_restricted(path: str, map_location: Any = None) -> Any:
    """Reads a DeepSpeed file with torch's restricted unpickler. Raises ValueError for classes that are not allowed."""
    allowed = [getattr(import_module(module), name) for module, _, name in (x.rpartition(".") for x in ALLOWED_CLASSES)]
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location=map_location, weights_only=True)
    except (*PICKLE_ERRORS, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read ({first_line(error)}); give another checkpoint") from error


def check_harmless(state: Path) -> None:
    """Raises ValueError if a DeepSpeed file is a link or names a class that DeepSpeed does not save."""
    if links := [path for path in sorted(state.rglob("*")) if path.is_symlink()]:
        raise ValueError(f"{links[0]} is a link; replace it with the file it points to")
    for path in sorted(state.rglob("*.pt")):
        try:
            unexpected = set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - ALLOWED_CLASSES
        except (*PICKLE_ERRORS, RuntimeError) as error:
            raise ValueError(f"{path} cannot be read ({first_line(error)}); give another checkpoint") from error
        if unexpected:
            raise ValueError(
                f"{path} contains {min(unexpected)}, which DeepSpeed does not save; give another checkpoint"
            )


def _import(world: World) -> Any:
    """Imports DeepSpeed for this device. Ranks other than 0 log only errors."""
    set_deepspeed_environment(world.device.type, world.local_rank)
    import deepspeed
    from deepspeed.runtime.zero.config import ZeroStageEnum

    # Some versions of Python, such as 3.11.2, pickle enum members with getattr, which is not allowed in a file.
    copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))

    warnings.filterwarnings("ignore", ".*(all_gather_into|reduce_scatter)_tensor` is deprecated", FutureWarning)
    if not world.is_main:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if world.device.type == "cpu":  # avoids compiling a shared-memory all-reduce; gloo does that
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    return deepspeed


class CheckpointFiles:
    """DeepSpeed's checkpoint engine with restricted reading. Writing remembers its first failure and then does nothing.

    Ranks wait for each other inside `save_checkpoint`, so a rank that raised there would hang the others.
    """

    def __init__(self, files: Any) -> None:
        self._files = files
        self.failure: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.attempt(lambda: self._files.makedirs(path, exist_ok=exist_ok), path)

    def save(self, state_dict: Any, path: str) -> None:
        self.attempt(lambda: self._files.save(state_dict, path), path)

    def load(self, path: str, map_location: Any = None) -> Any:
        return load_restricted(path, map_location)

    def attempt(self, write: Callable[[], object], path: str) -> None:
        """Writes a file, unless an earlier write has failed."""
        if self.failure is not None:
            return
        try:
            write()
        except Exception as failure:
            self.failure = _cause(failure, path)


def _cause(failure: Exception, path: str) -> Exception:
    """Returns the OSError behind a failed write. torch hides it, so a plain write to the same path reproduces it."""
    if isinstance(failure, OSError):
        return failure
    try:
        with Path(path).open("ab") as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        return error
    return failure
