"""Trainer: takes optimizer steps and evaluates."""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import record_function

from lightseq.architecture.flops import count_adapter_parameters
from lightseq.architecture.inspection import inspect_architecture
from lightseq.attention.context import SequenceContext, area_balance
from lightseq.config.train_config import TrainConfig
from lightseq.data.batches import Batch, bucket_lengths, padding_batch, trim_padding
from lightseq.data.mixture import longest_example
from lightseq.data.shared_rows import even_lengths, least_saved_share, with_shared_prefixes
from lightseq.distributed.watchdog import Watchdog
from lightseq.distributed.world import World
from lightseq.hf.shard_batch import counted_tokens, local_batch
from lightseq.objectives.objective import Evaluation, Models, Shard
from lightseq.objectives.registry import objective_of
from lightseq.objectives.router_loss import RouterLoss
from lightseq.parts.attention import length_dependent_ropes
from lightseq.parts.fp8 import MULTIPLE
from lightseq.plan.advice import plan_notes
from lightseq.plan.breakdown import Breakdown
from lightseq.plan.document_lengths import area_of_nodes
from lightseq.sequence.documents import Documents
from lightseq.training.device_memory import memory_parts, out_of_memory_handler
from lightseq.training.engine import Engine
from lightseq.training.errors import exit_on_data_error
from lightseq.training.inputs import Inputs
from lightseq.training.optimization import LearningRate
from lightseq.training.step_stats import StepResult
from lightseq.training.terminal import Terminal
from lightseq.utils.progress import progress_bar
from lightseq.utils.tensors import upload


class Trainer:
    """Optimizer steps and evaluation on one rank. Prints nothing and writes no files."""

    def __init__(
        self, config: TrainConfig, inputs: Inputs, world: World, engine: Engine, watchdog: Watchdog | None = None
    ) -> None:
        """Prepares the trainer. `watchdog`, if given, is notified of every phase of a step."""
        self.config, self.inputs, self.world, self.engine = config, inputs, world, engine
        self.model, self.context = engine.model, engine.context
        self.objective = objective_of(config)
        self.models = Models(engine.loss_model, engine.context.sequence, engine.frozen)
        self.router_loss = RouterLoss(engine.routers, world.device)
        self.output_dir = Path(config.output_dir)
        self.first_step = inputs.stream.first_step
        # Every rank's part of a batch has to be a multiple of the tokens that FP8 needs.
        multiple = math.lcm(MULTIPLE * inputs.dims.sequence, engine.context.layout.chunk_count)
        self._lengths = bucket_lengths(config.model_max_length, multiple)
        self._least_saved = least_saved_share(config)
        if self._least_saved is None:
            self.batch_lengths, length_notes = _choose_batch_lengths(config, self._lengths, engine)
        else:
            self.batch_lengths, length_notes = even_lengths(config.model_max_length, multiple), ()
        self.notes = (*inputs.notes, *(plan_notes(engine.plan) if engine.plan else ()), *length_notes)
        self.shard = Sharding(self.context, world.device)
        self.adapter_parameters = count_adapter_parameters(inputs.lora, inputs.model_config)
        self._architecture = inspect_architecture(inputs.model_config)
        self.learning_rate = LearningRate(config, inputs.total_steps)
        self.terminal = Terminal(inputs.total_steps, self.first_step)
        self.before_update: list[Callable[[], None]] = []  # called between the backward pass and the update
        self._watchdog = watchdog
        if watchdog is not None:
            watchdog.follow_progress(lambda: self.context.progress.passes)

    def step(self, step: int) -> StepResult:
        """Takes optimizer step `step`, counted from 0.

        Waits for the device only with float16 or an optimizer that is not fused.
        """
        begin = time.perf_counter()
        self.mark(step + 1, "data")
        batches = self._batches(step)
        data_seconds = time.perf_counter() - begin
        counted = self.engine.dims.sum_over_batches(sum(map(self.objective.count, batches)))
        divisor = counted.clamp_min(1)
        loss, imbalance = torch.zeros((), dtype=torch.float32, device=self.world.device), 0.0
        metrics = loss.new_zeros(len(self.objective.metrics))
        for batch in batches:
            with self.phase(step, "forward"):
                shard = self.shard(batch)
                if shard.documents is not None:
                    imbalance = max(imbalance, 1 / area_balance(self.context, shard.documents))
                self.router_loss.begin(partial(self.shard.counted, batch, shard.documents))
                found = self.objective.share(self.models, shard)
                share = found.loss / divisor
                loss += share.detach()
                metrics += found.metrics / divisor
                share = self.router_loss.add(share, len(batches) * self.engine.dims.data_ranks)
            with self.phase(step, "backward"):
                self.engine.backward(share, last=batch is batches[-1])
        rate = self.learning_rate.apply(self.engine.optimizer, step)
        with self.phase(step, "update"):
            for call in self.before_update:
                call()
            update = self.engine.update()
            router_loss = self.router_loss.finish(update.nonfinite)
        return StepResult(
            loss=loss,
            metrics=metrics,
            router_loss=router_loss,
            grad_norm=update.norm,
            nonfinite=update.nonfinite,
            learning_rate=rate,
            valid_tokens=sum(batch.valid_tokens for batch in batches),
            counted=counted,
            positions=sum(batch.input_ids.numel() for batch in batches),
            tokens=sum(sum(batch.sizes) for batch in batches),
            attention_area=sum(map(self._area_of, batches)),
            imbalance=imbalance,
            data_seconds=data_seconds,
        )

    def try_longest(self) -> None:
        """Runs the longest batch once before the first step, unless the first step begins with one.

        A run that does not fit in memory fails here, and no buffer grows later.
        """
        self.mark(self.first_step, "data")
        longest = self._longest_batch()
        if self._batches(self.first_step)[0].length < longest:
            self.mark(self.first_step, "forward")
            rows, packed = self.config.per_device_train_batch_size, self.config.packing != "none"
            blank = padding_batch(rows, longest, packed)
            buffers = [buffer for unit in self.engine.units for buffer in unit.buffers]
            before = [buffer.clone() for buffer in buffers]
            self.engine.try_memory(lambda: self.objective.share(self.models, self.shard(blank)).loss)
            for buffer, value in zip(buffers, before, strict=True):  # a layer may count its passes, for example
                buffer.copy_(value)

    def _longest_batch(self) -> int:
        """Returns the length of the longest batch of training and evaluation data, or an upper bound."""
        streams = [stream for stream in (self.inputs.stream, self.inputs.eval_stream) if stream is not None]
        longest = [longest_example(stream.examples) for stream in streams]
        known = [size for size in longest if size is not None]
        if len(known) < len(longest):
            return self.batch_lengths[-1]
        return self.batch_lengths[bisect_left(self.batch_lengths[:-1], max(known))]

    def evaluate(self) -> Evaluation:
        """Returns the objective's loss over all evaluation data, and its other means."""
        return self.objective.evaluate(self.models, self.evaluation_shards())

    def evaluation_shards(self, shows_progress: bool = False) -> Iterator[Shard]:
        """Yields this rank's part of each batch of the evaluation data."""
        stream, data_rank = self.inputs.eval_stream, self.inputs.dims.data_rank
        assert stream is not None, "checked with the flags"
        for step in progress_bar(range(stream.steps), None, shows_progress and self.world.is_main, "evaluating"):
            self.mark(None, "evaluation")
            with exit_on_data_error(self.world, self.terminal):
                batch = self._with_shared_prefixes(stream.batch(step, 0, data_rank))
            yield self.shard(*trim_padding([batch], self.batch_lengths, stream.data_ranks))

    def shortest_length(self, tokens: int) -> int:
        """Returns the shortest of few lengths that holds a sequence of `tokens` tokens."""
        return self._lengths[bisect_left(self._lengths, tokens)]

    def mark(self, step: int | None, phase: str) -> None:
        """Tells the watchdog, if any, that this rank enters a phase."""
        if self._watchdog is not None:
            self._watchdog.mark(step, phase)

    @contextmanager
    def phase(self, step: int, name: str) -> Iterator[None]:
        """Names a phase of a step for the watchdog and in profiler traces."""
        self.mark(step + 1, name)
        with record_function(name):
            yield

    def memory_parts(self) -> Breakdown:
        """Returns the breakdown of the peak memory of a GPU so far."""
        return memory_parts(self.engine, self.world)

    def out_of_memory_handler(self) -> AbstractContextManager[None]:
        """Returns a context that starts the run over, or explains, when memory runs out."""
        plan = self.engine.plan
        return out_of_memory_handler(self.config, self.inputs, self.world, plan, self._watchdog, self.terminal)

    def _batches(self, step: int) -> list[Batch]:
        """Returns this rank's batches of a step, padded to the same lengths as on other data ranks."""
        with exit_on_data_error(self.world, self.terminal):
            batches = [
                self._with_shared_prefixes(self.inputs.stream.batch(step, a, self.inputs.dims.data_rank))
                for a in range(self.config.gradient_accumulation_steps)
            ]
        return trim_padding(batches, self.batch_lengths, self.engine.dims.data_ranks)

    def _with_shared_prefixes(self, batch: Batch) -> Batch:
        return batch if self._least_saved is None else with_shared_prefixes(batch, self._least_saved)

    def _area_of(self, batch: Batch) -> float:
        """Returns the attention area of a batch's documents, or of the nodes of its trees."""
        if batch.nodes is None or batch.rows is None:
            return self._architecture.attention_area(batch.document_sizes)
        return area_of_nodes(batch.nodes, self._architecture)


def _choose_batch_lengths(
    config: TrainConfig, lengths: tuple[int, ...], engine: Engine
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the lengths that batches may be padded to, in rising order, and notes about them."""
    longest = config.model_max_length
    if config.packing != "none":  # packed sequences are full
        return (longest,), ()
    if length_dependent_ropes(engine.model):
        note = "all batches are padded to --model_max_length, because the model's RoPE depends on the length"
        return (longest,), (note,)
    return lengths, ()


class Sharding:
    """Slicing of a batch into this rank's part, copied to the device without blocking the host."""

    def __init__(self, context: SequenceContext, device: torch.device) -> None:
        self._context, self._device = context, device
        self._positions: dict[int, Tensor] = {}  # by length; the same for every batch that is not packed

    def __call__(self, batch: Batch) -> Shard:
        ids, labels, documents = local_batch(self._context.sequence, batch.input_ids, batch.labels, batch.nodes)
        if documents is not None:
            if (rows := batch.rows) is not None:
                weights = documents.shard(rows.target_counts(batch.length), self._context.rank)
                documents = replace(documents, rows=replace(rows, weights=self._to_device(weights)))
            positions = self._to_device(documents.positions(self._context.rank))
        else:
            positions = self._global_positions(batch.input_ids.shape[1]).expand(len(ids), -1)
        return Shard(self._to_device(ids), positions, self._to_device(labels), documents)

    def counted(self, batch: Batch, documents: Documents | None) -> Tensor | None:
        """Returns True for this rank's tokens except padding, (batch, local); None if there is no padding.

        In trees it returns how many rows hold each token.
        """
        if batch.rows is not None and documents is not None:
            return self._to_device(documents.shard(batch.rows.row_counts(batch.length), self._context.rank))
        sizes, length = torch.tensor(batch.sizes), batch.length
        mask = torch.arange(length) < sizes.unsqueeze(1)
        counted = counted_tokens(self._context.sequence, batch.input_ids, None if mask.all() else mask, documents)
        return None if counted is None else self._to_device(counted)

    def _global_positions(self, length: int) -> Tensor:
        if length not in self._positions:
            self._positions[length] = self._context.sequence.positions(length, self._device)
        return self._positions[length]

    def _to_device(self, x: Tensor) -> Tensor:
        return upload(x, self._device)
