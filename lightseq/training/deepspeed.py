"""DeepSpeed's ZeRO-1, 2 and 3 in place of FSDP2: its engine around our model, our loss, our learning rate.

DeepSpeed takes every rank for a data-parallel one and averages gradients over them. Each rank's share of the loss is
divided by the global number of valid tokens already, so that gradients must add up: a share is multiplied by the ranks.
"""

import copy
import copyreg
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightseq.checkpoint.checkpoints import STATE
from lightseq.config.train_config import TrainConfig
from lightseq.data.pickles import PICKLE_ERRORS
from lightseq.distributed.mesh import Meshes, World, on_all_ranks, set_deepspeed_environment, use_host_cores
from lightseq.models import weights
from lightseq.parallelize import MemoryPlan, transform
from lightseq.training.engine import Update, fill_weights
from lightseq.training.metrics import UNNAMED
from lightseq.training.optimization import make_optimizer
from lightseq.training.setup import Inputs
from lightseq.utils.formatting import first_line

TAG = "deepspeed"
PROBE_BYTES = 2**20  # written to a file that failed, to learn why
DEEPSPEEDS_OWN: Final = frozenset(  # what its files build besides tensors
    [
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    ]
)


class DeepSpeedEngine:
    """A DeepSpeed engine, with what it does not do itself: float32 masters from the weights' precision, exports."""

    def __init__(self, config: TrainConfig, inputs: Inputs, world: World, meshes: Meshes, memory: MemoryPlan) -> None:
        assert inputs.deepspeed is not None
        self._deepspeed = _import(world)
        self._settings, self._world = inputs.deepspeed, world
        self.meshes, self.memory = meshes, memory
        settings = self._settings
        on_all_ranks(world, lambda: self._check(config))
        devices = {part: settings.device_of(part) for part in ("offload_optimizer", "offload_param")}
        offloads = [f"{part} {device}" for part, device in devices.items() if device != "none"]
        if offloads:
            use_host_cores(world)
        self.parameters = ", ".join([f"{settings.name} over all ranks", *offloads])
        self.model = weights.build_on_meta(inputs.model_config)
        inner, self.context = on_all_ranks(world, lambda: transform(self.model, config, world, meshes, memory))
        self.offload, self.stopwatch = inner.offload, inner.stopwatch
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(getattr(torch, config.compute_dtype))
        self._materialize()
        self._engine = on_all_ranks(world, lambda: self._initialize(inner, make_optimizer(self.model, config)))
        self.loss_model: nn.Module = self._engine
        self.optimizer: Any = self._engine.optimizer
        on_all_ranks(world, lambda: fill_weights(self.model, inputs, config.seed, self._fill))

    def _check(self, config: TrainConfig) -> None:
        """Raises ValueError for what DeepSpeed would refuse in words of its own."""
        from pydantic import ValidationError

        accelerator = self._deepspeed.accelerator.get_accelerator()
        device = accelerator.device_name()
        if config.fp16 and not accelerator.is_fp16_supported():
            raise ValueError(f"--fp16 under --deepspeed does not run on {device}; give --bf16, or neither")
        if config.bf16 and not accelerator.is_bf16_supported():
            raise ValueError(f"--bf16 under --deepspeed does not run on {device}; give --fp16, or neither")
        try:
            self._deepspeed.DeepSpeedConfig(self._told())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, (error.title, *first["loc"])))
            raise ValueError(
                f"--deepspeed {self._settings.source}: {where}: {first['msg']}; correct it, or remove it"
            ) from error

    def _materialize(self) -> None:
        """Makes memory for the model: whole under ZeRO-1 and 2, under ZeRO-3 split layer by layer as it is made."""
        if self._settings.stage < 3:
            weights.materialize(self.model, self._world.device)
            return
        ends: list[Any] = [self.model.get_input_embeddings(), self.model.get_output_embeddings()]
        tied = self.model.config.tie_word_embeddings
        for unit in [ends[0], *self.model.model.layers, self.model.model.norm, *([] if tied else ends[1:])]:
            unit.to_empty(device=self._world.device)
            self._deepspeed.zero.Init(module=unit, config_dict_or_path=self._told())
        if tied:
            ends[1].weight = ends[0].weight
        weights.rebuild_buffers(self.model, self._world.device)

    def _initialize(self, inner: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        if self._settings.stage == 3:
            # Gathered by layer, before its forward and before its backward: never within, where what is recomputed
            # must be the operators of the forward pass again.
            self._deepspeed.utils.set_z3_leaf_modules(self.model, [type(self.model.model.layers[0])])
        engine, *_ = self._deepspeed.initialize(
            model=inner, optimizer=optimizer, config=self._told(), dist_init_required=False
        )
        kept = [name for name, buffer in inner.named_buffers() if buffer.dtype != torch.float32]
        assert not kept, f"positions are computed from float32 frequencies, DeepSpeed made others of {kept}"
        return engine

    def _told(self) -> dict[str, Any]:
        """Returns a copy of the settings: DeepSpeed writes into them. Only rank 0 speaks."""
        told = copy.deepcopy(self._settings.settings)
        return told if self._world.is_main else told | {"log_level": "error"}

    def _fill(self, parameter: nn.Parameter, read: Callable[[tuple[slice, ...]], Tensor]) -> None:
        """Fills a weight and its float32 master, which DeepSpeed made from the compute dtype, from a whole tensor."""
        shape = weights.global_shape(parameter)
        whole = read(tuple(slice(0, n) for n in shape)).to(parameter.device, torch.float32)
        if self._settings.stage < 3:
            self._deepspeed.utils.safe_set_full_fp32_param(parameter, whole)
            parameter.data.copy_(whole)
            return
        part = len(parameter.ds_tensor)  # type: ignore[attr-defined]  # of every rank, the last one's padded
        padded = nn.functional.pad(whole.flatten(), (0, part * self._world.size - whole.numel()))
        self._deepspeed.utils.safe_set_local_fp32_param(parameter, padded[part * self._world.rank :][:part])
        with self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(whole)

    def backward(self, share: Tensor, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(share * self._world.size, scale_wrt_gas=False)

    def update(self) -> Update:
        """Steps. DeepSpeed skips a step whose norm is not finite, and does not say whose gradient it was."""
        skipped = self._engine.skipped_steps
        self._engine.step()
        norm, nonfinite = self._engine.get_global_grad_norm(), -1
        if self._engine.skipped_steps > skipped:  # that norm is of a step before, or none
            norm, nonfinite = float("nan"), UNNAMED
        norm = torch.as_tensor(norm, device=self._world.device)
        return Update(norm, torch.full_like(norm, nonfinite, dtype=torch.int64))

    def try_memory(self, loss: Callable[[], Tensor]) -> None:
        """Runs both passes: the state is there already. The zeros stay, and the first step adds its gradients."""
        self.backward(loss(), last=False)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, self._deepspeed.utils.safe_get_full_fp32_param(parameter)

    def tensors(self) -> dict[str, Tensor] | None:
        return None

    def save_state(self, directory: Path) -> None:
        save_together(self._engine, directory, TAG)

    def restore(self, checkpoint_directory: Path) -> None:
        if (checkpoint_directory / STATE / TAG / "offloaded_tensors").is_dir():
            raise ValueError(
                f"--resume_from_checkpoint {checkpoint_directory} was saved with its optimizer state on nvme, which is "
                "not supported; start from its weights with --model_name_or_path"
            )
        check_harmless(checkpoint_directory / STATE)  # DeepSpeed would run what its files ask for
        self._engine.checkpoint_engine.load = load_restricted
        found, _ = self._engine.load_checkpoint(str(checkpoint_directory / STATE), tag=TAG)
        if found is None:
            raise ValueError(
                f"--resume_from_checkpoint {checkpoint_directory} has lost its {STATE}/; name another checkpoint"
            )

    def facts(self) -> dict[str, Any]:
        return {"engine": self._settings.name}


def load_restricted(path: str, map_location: Any = None) -> Any:
    """Reads a file of DeepSpeed's as DeepSpeed does, with torch's restricted unpickler: no state is set on a class."""
    allowed = [getattr(import_module(module), name) for module, _, name in (x.rpartition(".") for x in DEEPSPEEDS_OWN)]
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location=map_location, weights_only=True)
    except (*PICKLE_ERRORS, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read ({first_line(error)}); name another checkpoint") from error


def check_harmless(state: Path) -> None:
    """Raises ValueError if a file of DeepSpeed's would build anything but what DeepSpeed puts there, or is a link."""
    if links := [path for path in sorted(state.rglob("*")) if path.is_symlink()]:
        raise ValueError(f"{links[0]} is a link; put what it leads to in its place")
    for path in sorted(state.rglob("*.pt")):
        try:
            strange = set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - DEEPSPEEDS_OWN
        except (*PICKLE_ERRORS, RuntimeError) as error:
            raise ValueError(f"{path} cannot be read ({first_line(error)}); name another checkpoint") from error
        if strange:
            raise ValueError(f"{path} asks to build {min(strange)}, which DeepSpeed's files do not; name another")


def _import(world: World) -> Any:
    """Imports DeepSpeed for this device, speaking on rank 0 alone."""
    set_deepspeed_environment(world)
    import deepspeed
    from deepspeed.runtime.zero.config import ZeroStageEnum

    # Some versions of Python (3.11.2 is one) would name it by getattr, which no file may ask for.
    copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))

    warnings.filterwarnings("ignore", ".*(all_gather_into|reduce_scatter)_tensor` is deprecated", FutureWarning)
    if not world.is_main:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if world.device.type == "cpu":  # it would compile sums of its own through shared memory, where gloo has them
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    return deepspeed


def save_together(engine: Any, directory: Path, tag: str) -> None:
    """Writes DeepSpeed's checkpoint on every rank; raises what this rank could not write once all are through.

    Inside `save_checkpoint` ranks wait for each other: one that left it with an error would leave the others there.
    """
    failures: list[Exception] = []
    files, scripts = engine.checkpoint_engine, "_copy_recovery_script"
    parts = ((files, "makedirs"), (files, "save"), (engine, scripts), (shutil, "copytree"))
    with ExitStack() as stack:
        for owner, name in parts:
            stack.enter_context(_failing_later(owner, name, failures))
        engine.save_checkpoint(str(directory), tag=tag, save_latest=False)
    if failures:
        raise failures[0]
    if engine.global_rank == 0:
        (directory / "latest").write_text(tag)  # DeepSpeed would write it while the others wait


@contextmanager
def _failing_later(owner: Any, name: str, failures: list[Exception]) -> Iterator[None]:
    """Makes a method leave its failure in a list instead of raising it, and do nothing once there is one."""
    method = getattr(owner, name)

    def attempt(*arguments: Any, **named: Any) -> None:
        if failures:
            return
        try:
            method(*arguments, **named)
        except Exception as failure:
            paths = [x for x in (*arguments, *named.values()) if isinstance(x, str | Path)]
            failures.append(_cause(failure, paths[-1]))

    its_own = name in vars(owner)  # or its class's
    setattr(owner, name, attempt)
    try:
        yield
    finally:
        if its_own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)


def _cause(failure: Exception, path: Any) -> Exception:
    """Returns why a file was not written: torch does not say, a write in Python does."""
    if isinstance(failure, shutil.Error):  # of several files, each with its reason
        return OSError(failure.args[0][0][-1])
    if isinstance(failure, OSError):
        return failure
    try:
        with Path(path).open("ab") as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        return error
    return failure
