"""Sequence parallelism for transformers' Trainer and all trainers made from it, as one mixin.

class MyTrainer(SequenceParallel, Trainer): ...
trainer = MyTrainer(model, arguments, ..., sequence_parallel_size=2)
"""

from collections.abc import Callable
from functools import partial
from inspect import signature, unwrap
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from lightseq.integrations.accelerate import ATTENTION_OPTIONS, enable, share_batches
from lightseq.integrations.image_checks import check_images
from lightseq.integrations.packed_rows import takes_packed_rows
from lightseq.integrations.rollouts import SharedRollouts
from lightseq.integrations.split_model import SplitModel, TrainerBatches, split_model_of
from lightseq.integrations.trl_head import trl_head_of
from lightseq.models.decoder import has_towers, transformers_model
from lightseq.parts.identity import named_in
from lightseq.utils.formatting import check_names
from lightseq.utils.versions import check_version

OLDEST_TRANSFORMERS = "5.16.1"
OLDEST_TRL = dict.fromkeys(("SFTTrainer", "DPOTrainer"), "1.9")
TRL_TRAINERS = (  # tested trainers
    *(*OLDEST_TRL, "KTOTrainer", "ORPOTrainer", "CPOTrainer", "GRPOTrainer", "RLOOTrainer", "RewardTrainer"),
)
OLDEST_OF_OTHERS = {"transformers": "5.19", "trl": "1.16"}


class SequenceParallel(SharedRollouts):
    """Mixin that splits every sequence over neighbouring ranks. It comes before the trainer among the bases.

    `sequence_parallel_size` ranks (default: all) share a batch, as tensor parallel ranks do in Trainer, and all of them
    have its loss; groups of them are data parallel. `gradient_checkpointing` stores attention's output and recomputes
    the rest of each layer. `compile_layers` compiles each layer instead of the whole model (default: with
    `torch_compile`, and on GPUs for packed rows, which are then padded to `max_length`, and in trainers that generate).
    `share_prefixes` computes the prompt of a micro-batch's completions, or of chosen and rejected answers, once.
    `attention_options` are those of `hf.enable`.
    """

    accelerator: Any
    args: Any
    model: Any
    model_wrapped: Any
    is_fsdp_enabled: bool
    own_trl_trainers: tuple[str, ...] = ()  # trainers of TRL that this subclass supports
    _ranks_count_once = True

    def __init__(
        self,
        *args: Any,
        sequence_parallel_size: int | None = None,
        compile_layers: bool | None = None,
        share_prefixes: bool = True,
        attention_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(self, Trainer):
            raise TypeError(f"{type(self).__name__} has no trainer among its bases; {_bases_remedy(type(self))}")
        own = ("sequence_parallel_size", "compile_layers", "share_prefixes", "attention_options")
        if (known := _keywords_after(type(self))) is not None:
            check_names(type(self).__name__, kwargs, [*own, *known])
        check_names("attention_options", attention_options or (), ATTENTION_OPTIONS)
        self._sequence_parallel_size = sequence_parallel_size
        self._compile_layers = compile_layers
        self._share_prefixes = share_prefixes
        self._attention_options = attention_options or {}
        super().__init__(*args, **kwargs)
        loss_function = getattr(self, "compute_loss_func", None)
        if loss_function is not None and self._ranks_per_batch > 1 and not _divides_by_tp_size():
            self.compute_loss_func = partial(self._loss_of_group, loss_function)
        self._enable_models()
        self._set_up_rollouts()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(SequenceParallel)]
        libraries = ("transformers.", "trl.")
        if any(issubclass(kind, Trainer) and f"{kind.__module__}.".startswith(libraries) for kind in before):
            raise TypeError(
                f"class {cls.__name__} has a trainer before SequenceParallel, so that nothing would be split; "
                f"{_bases_remedy(cls)}"
            )

    def create_accelerator_and_postprocess(self) -> None:
        if self.args.ddp_find_unused_parameters is None and _has_encoders(self.model):
            self.args.ddp_find_unused_parameters = True  # a batch of text leaves encoders without gradients
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self._sequence_mesh = share_batches(self.accelerator, self._sequence_parallel_size)
        self._ranks_per_batch = 1 if self._sequence_mesh is None else self._sequence_mesh.size(1)
        self.gather_function = self.accelerator.gather_for_metrics
        if self._ranks_per_batch > 1:
            _check_arguments(self.args)
            _check_trl_trainer(type(self))
            self._set_generation_batch()
            self.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO  # it would compile the hooks, too

    def _enable_models(self) -> None:
        """Splits the sequences of the model and of a reference model, once each."""
        if self._sequence_mesh is None:
            return
        self._refuse_model_init()
        check_images(self)
        length, packs = self._longest_row(), self._packs_documents()
        options = {
            "packed": packs or self._trains_on_rollouts(),
            **({"length": length} if length else {}),
            **self._attention_options,
        }
        models = [x for x in (self.model, getattr(self, "ref_model", None)) if isinstance(x, nn.Module)]
        heads = [trl_head_of(transformers_model(self.accelerator.unwrap_model(model))) for model in models]
        own_head = all(head is not None and head.is_known for head in heads)
        for model in models:
            whole = enable(model, self._sequence_mesh, self.accelerator, **options)
            whole.configure(
                TrainerBatches(
                    keeps_targets=True,
                    pad_to=length if packs and self._compiles() else None,
                    weighs_tokens_equally=self._is_mean_loss(),
                    packs_rows=self._trains_on_rollouts(),
                    shares_prefixes=self._share_prefixes and self._rows_begin_alike(whole),
                    own_head=own_head,
                )
            )

    def _refuse_model_init(self) -> None:
        if getattr(self, "model_init", None) is not None:
            raise ValueError(
                "model_init makes another model for train(), which would not be split, so it does not work with "
                "sequence_parallel_size > 1; pass model instead"
            )

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """Computes log-probabilities of TRL's reference model, while the trainer is made."""
        self._enable_models()
        return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]

    def _split_line(self, whole: SplitModel) -> str:
        """Describes how sequences are split, because nothing else in a trainer's output shows it."""
        ranks, context = self._ranks_per_batch, whole.context
        groups = self.accelerator.num_processes // ranks  # each group trains on other batches
        how = f"schedule {context.schedule.name}, kernel {context.selection.kernel.name}"
        return (
            f"lightseq: {ranks} ranks share each sequence (groups: {groups}); {how}, transport {context.transport.name}"
        )

    def _rows_begin_alike(self, whole: SplitModel) -> bool:
        """Returns whether rows of a micro-batch share prompts, as completions and preferences do."""
        if self._trains_on_rollouts():
            return True
        return _base_of_trl(type(self), "DPOTrainer") is not None and takes_packed_rows(whole.model)

    def _is_mean_loss(self) -> bool:
        """Returns whether TRL's SFTTrainer computes the loss, as the mean over all tokens."""
        base = _base_of_trl(type(self), "SFTTrainer")
        if base is None:
            return False
        trainer: Any = self
        below: Any = super(SharedRollouts, self)
        inherited = (
            type(trainer).compute_loss is SharedRollouts.compute_loss
            and below.compute_loss.__func__ is base.compute_loss
        )
        return (
            inherited
            and trainer.compute_loss_func is None
            and trainer.label_smoother is None
            and self.args.loss_type == "nll"
        )

    def _compiles(self) -> bool:
        if self._compile_layers is not None:
            return self._compile_layers
        packs = self._packs_documents() or self._trains_on_rollouts()
        return bool(self.args.torch_compile) or (packs and self.accelerator.device.type == "cuda")

    def _packs_documents(self) -> bool:
        """Returns whether rows hold several documents, as `packing` says in TRL."""
        return bool(getattr(self.args, "packing", False))

    def _longest_row(self) -> int | None:
        """Returns the most tokens of a row, if the arguments limit them."""
        return getattr(self.args, "max_length", None)

    # ---- ranks that share a batch count once, as tensor parallel ranks do --------------------------------------------

    def get_tp_size(self) -> int:
        size: int = super().get_tp_size()  # type: ignore[misc]
        return size * self._ranks_per_batch if self._ranks_count_once else size

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | int | None:
        # Only a sum over all ranks counts tokens twice, but Trainer from 5.19 on divides its own count, too.
        self._ranks_count_once = self.args.average_tokens_across_devices
        try:
            return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc, no-any-return]
        finally:
            self._ranks_count_once = True

    def _loss_of_group(
        self, loss_function: Callable[..., Tensor], outputs: Any, labels: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Calls a user's loss function for a Trainer that counts tokens, and multiplies losses, once per rank."""
        if num_items_in_batch is None or not self.args.average_tokens_across_devices:
            return loss_function(outputs, labels, num_items_in_batch=num_items_in_batch)
        ranks = self._ranks_per_batch
        return loss_function(outputs, labels, num_items_in_batch=num_items_in_batch / ranks) / ranks

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        state: Any = self.state  # type: ignore[attr-defined]
        before = state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]
        state.num_input_tokens_seen = before + (state.num_input_tokens_seen - before) // self._ranks_per_batch

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        flops: int = super().floating_point_ops(inputs)  # type: ignore[misc]
        return flops // self._ranks_per_batch

    # ---- training and evaluation -------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self._sequence_mesh is not None and self.model_wrapped is self.model and not self.is_fsdp_enabled:
            # An evaluation marks the model as prepared, but without DDP, and Trainer would not prepare it again.
            self.model._is_accelerate_prepared = False
        with_remat = self._sequence_mesh is not None and self.args.gradient_checkpointing
        if (whole := split_model_of(self.model)) is not None:
            self.accelerator.print(self._split_line(whole))
            whole.change_layers(with_remat, self._compiles())
            if self.accelerator.device.type == "cuda":  # ranks hold different tokens, so dropout must differ
                torch.cuda.manual_seed(self.args.seed + self.args.process_index)
        if with_remat:
            _set_checkpointing(self.args, False)  # Trainer's own would compute attention a second time
            _stop_checkpointing(self.model)
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            if with_remat:
                _set_checkpointing(self.args, True)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self._announce("evaluate()")
        return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        self._announce("predict()")
        return super().predict(*args, **kwargs)  # type: ignore[misc]

    def _announce(self, call: str) -> None:
        """Raises ValueError if other ranks do not make this call, before a loader waits for them."""
        whole = split_model_of(self.model)
        if whole is not None and (roll_call := whole.context.forward_pass.roll_call) is not None:
            roll_call.make(f"calls {call}", is_training_step=False)


class SequenceParallelTrainer(SequenceParallel, Trainer):
    """transformers' Trainer with sequences split over ranks."""


def _has_encoders(model: Any) -> bool:
    """Returns whether a model has encoders of images or audio beside its text decoder."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return any(isinstance(module, PreTrainedModel) and has_towers(module.config) for module in modules)


def _divides_by_tp_size() -> bool:
    """Returns whether Trainer counts ranks with the same batch once in its losses, as from transformers 5.19 on."""
    return "get_tp_size" in named_in(unwrap(Trainer.compute_loss))


def _base_of_trl(kind: type, name: str) -> Any:
    """Returns TRL's class of that name among the bases; importing it may fail beside a transformers newer than TRL."""
    return next((c for c in kind.__mro__ if c.__module__.startswith("trl.") and c.__name__ == name), None)


def _bases_remedy(kind: type) -> str:
    trainers = [base.__name__ for base in kind.__bases__ if not issubclass(base, SequenceParallel)]
    return f"write class {kind.__name__}(SequenceParallel, {', '.join(trainers) or 'Trainer'})"


def _keywords_after(kind: type) -> list[str] | None:
    """Returns the arguments of the constructor after the mixin's; None if it takes any, which it may rename."""
    after = kind.__mro__[kind.__mro__.index(SequenceParallel) + 1 :]
    constructor: Any = next(vars(base)["__init__"] for base in after if "__init__" in vars(base))
    parameters = signature(constructor).parameters.values()
    if any(x.kind == x.VAR_KEYWORD for x in parameters):
        return None
    return [x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]


def _check_arguments(arguments: TrainingArguments) -> None:
    """Raises ValueError for arguments that would give ranks of a group different batches or results."""
    check_version("transformers", OLDEST_TRANSFORMERS, "SequenceParallel")
    if arguments.n_gpu > 1:
        raise ValueError("several GPUs in one process are DataParallel; start the script with torchrun")
    if arguments.train_sampling_strategy == "batch_rebalance":
        raise ValueError(
            "train_sampling_strategy='batch_rebalance' gives every rank other rows, so it does not work with "
            "sequence_parallel_size > 1; use 'random', 'sequential' or 'group_by_length'"
        )
    if arguments.neftune_noise_alpha:
        raise ValueError(
            f"neftune_noise_alpha={arguments.neftune_noise_alpha} scales noise by the length of a rank's shard, which "
            "does not work with sequence_parallel_size > 1; leave it out"
        )
    if arguments.eval_use_gather_object:
        raise ValueError("eval_use_gather_object=True does not work with sequence_parallel_size > 1; leave it out")


def _check_trl_trainer(kind: type[SequenceParallel]) -> None:
    """Raises ValueError for TRL's trainers that no test compares with one process."""
    base: Any = next((c for c in kind.__mro__ if c.__module__.startswith("trl.") and issubclass(c, Trainer)), None)
    if base is None:
        return
    name = base.__name__
    if name not in (*TRL_TRAINERS, *kind.own_trl_trainers):
        raise ValueError(f"TRL's {name} does not work with sequence_parallel_size > 1; {', '.join(TRL_TRAINERS)} do")
    part = f"{name} with sequence_parallel_size > 1"
    if (oldest := OLDEST_TRL.get(name)) is not None:
        check_version("trl", oldest, part)
    else:
        for package, oldest in OLDEST_OF_OTHERS.items():
            check_version(package, oldest, part)
    if not _divides_by_tp_size() and "get_tp_size" in named_in(unwrap(base.compute_loss)):
        raise ValueError(f"TRL's {name} scales losses as no transformers before 5.19 does; install 5.19 or newer")


def _stop_checkpointing(model: Any) -> None:
    """Turns off the model's own checkpoints. Newer versions of transformers warn of the older name."""
    name = "activation" if hasattr(model, "is_activation_checkpointing") else "gradient"
    if getattr(model, f"is_{name}_checkpointing"):
        getattr(model, f"{name}_checkpointing_disable")()


def _set_checkpointing(arguments: TrainingArguments, value: bool) -> None:
    """Sets `gradient_checkpointing` under both of its names; Trainer reads the one of its version."""
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        if hasattr(arguments, name):
            setattr(arguments, name, value)
