"""One training run on one rank: its steps, what they are measured by, and when it evaluates and saves."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from lightseq.checkpoint import checkpoints
from lightseq.checkpoint.checkpoints import Found
from lightseq.config.train_config import TrainConfig
from lightseq.data.batches import Batch, padding
from lightseq.data.buckets import bucket_lengths, shorten
from lightseq.data.progress import with_bar
from lightseq.distributed.environment import launcher_note, launcher_patience, secrets
from lightseq.distributed.mesh import Meshes, World, agree, make_deterministic, make_meshes
from lightseq.distributed.preemption import StopRequest
from lightseq.distributed.watchdog import Watchdog
from lightseq.memory.planner.breakdown import Breakdown, kept_activations, loss_bytes, state_bytes
from lightseq.memory.planner.of_this_run import (
    auto_notes,
    faster_notes,
    host_memory_for_layers,
    out_of_memory,
    plan_of_layers,
    planned,
)
from lightseq.models.adapters import adapter_parameters
from lightseq.modules.fp8 import MULTIPLE
from lightseq.parallelize import techniques_of
from lightseq.schedule.documents import local_tokens
from lightseq.training.deepspeed import DeepSpeedEngine
from lightseq.training.engine import Engine, FsdpEngine
from lightseq.training.errors import explained_data, explained_out_of_memory
from lightseq.training.evaluation import Perplexity, Shard, measure
from lightseq.training.gc_control import collected_together
from lightseq.training.journal import Journal
from lightseq.training.metrics import MIRRORS, MetricsFile, scalar, write_run
from lightseq.training.optimization import LearningRate
from lightseq.training.output_directory import begin, clear, continues, is_as_found, lock, set_earlier_aside
from lightseq.training.profiler import StepProfile
from lightseq.training.run_facts import describe, facts
from lightseq.training.saving import Saving
from lightseq.training.setup import Inputs
from lightseq.training.sharding import Sharding
from lightseq.training.step_stats import StepResult, Window, Work
from lightseq.training.terminal import Terminal


class Trainer:
    """One run on one rank. Without a command, which is for evaluations, it says nothing and leaves no files."""

    def __init__(
        self,
        config: TrainConfig,
        inputs: Inputs,
        world: World,
        command: str | None,
        rehearses: bool = False,
        stands_for: int | None = None,  # the length of a longer run, whose schedule and tiles are taken
        watchdog: Watchdog | None = None,  # None: nobody waits for its steps
        look_again: Callable[[], Inputs] | None = None,  # finds the inputs anew
    ) -> None:
        self.config, self.inputs, self.world = config, inputs, world
        self.output_dir = Path(config.output_dir)
        self.dtype = getattr(torch, config.compute_dtype)
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        if config.deterministic:
            make_deterministic()
        self.meshes: Meshes = agree(world, lambda: make_meshes(world, inputs.sequence_size, config.fsdp_mode))
        plan = plan_of_layers(config, inputs.model_config, world)
        self.placement = plan.placement if plan else None
        placed = self.placement.layers if self.placement else None
        run = plan.run if plan else planned(config, inputs.model_config, world)
        self._planned, self._rehearses = run, rehearses
        host = host_memory_for_layers(run, world, rehearses, inputs.deepspeed)
        self.state_on_host, self.state_stays = run.state_on_host, run.state_stays
        where = (placed, self.state_on_host, self.state_stays, host)
        techniques = techniques_of(config, *where, world.local_size, rehearses, stands_for)
        parts = (config, inputs, world, self.meshes, techniques)
        self.terminal = Terminal(inputs.total_steps, 0)
        self._measured: Callable[[], Breakdown | None] = lambda: None
        with self.explained_out_of_memory():
            self.engine: Engine = DeepSpeedEngine(*parts, inputs.deepspeed) if inputs.deepspeed else FsdpEngine(*parts)
        self.model, self.loss_model, self.context = self.engine.model, self.engine.loss_model, self.engine.context
        self.shard = Sharding(self.context, world.device)
        self.adapter_parameters = adapter_parameters(inputs.lora, inputs.model_config)
        self._measured = self.memory_parts
        with self.explained_out_of_memory():
            agree(world, self._resume)
        self._lock = agree(world, self._take_directory) if command is not None else None
        if look_again is not None and self._others_wrote():
            self.inputs = inputs = look_again()
            with self.explained_out_of_memory():
                agree(world, self._resume)
        self.notes = (*inputs.notes, *(auto_notes(plan) if plan else ()))
        self.lengths = self._lengths()
        self.learning_rate = LearningRate(config, inputs.total_steps)
        self.first_step = inputs.stream.first_step
        self.terminal = Terminal(inputs.total_steps, self.first_step)
        self.metrics = agree(world, lambda: self._open_output(command)) if command is not None else None
        saves = command is not None and config.save_strategy != "no"
        self.saving = Saving(config, inputs, world, self.engine, self.terminal) if saves else None
        trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
        self.journal = Journal(
            self.metrics, self.terminal, world, self.output_dir, trained, config.fp16, inputs.total_steps,
            names_packing=len(self.lengths) > 1, patience_seconds=launcher_patience() if saves else None,
        )  # fmt: skip
        self._watchdog = watchdog
        if watchdog is not None:
            watchdog.follow(lambda: self.context.progress.passes)
        self._stop: StopRequest | None = None  # while it trains

    def _lengths(self) -> tuple[int, ...]:
        """Returns the lengths that batches are padded to. Packed sequences are full and have one."""
        longest = self.config.model_max_length
        if self.config.packing != "none":
            return (longest,)
        if self.model.length_dependent_rope:
            self.notes += (
                "all batches are padded to --model_max_length, for the model's RoPE scales with their length",
            )
            return (longest,)
        # A rank's part is then a multiple of what FP8 takes.
        multiple = math.lcm(MULTIPLE * self.inputs.sequence_size, self.context.layout.chunk_count)
        return bucket_lengths(longest, multiple)

    def _resume(self) -> None:
        if self.inputs.resume_from is not None:
            self.engine.restore(self.inputs.resume_from)
            checkpoints.restore_randomness(self.inputs.resume_from, self.world)

    def _take_directory(self) -> TextIO | None:
        return lock(self.output_dir, self.world) if self.world.is_main else None

    def _others_wrote(self) -> bool:
        """Returns whether another run wrote here before this one held the lock; the same on all ranks."""
        found = Found(self.inputs.resume_from, tuple((path, "") for path in self.inputs.passed_over))
        wrote = [self._lock is not None and not is_as_found(self.output_dir, self.config, found, self.world)]
        dist.broadcast_object_list(wrote)
        return bool(wrote[0])

    def _open_output(self, command: str) -> MetricsFile | None:
        if self._lock is None:
            return None
        goes_on = continues(self.inputs.resume_from, self.output_dir)
        if not goes_on:
            self.notes += (clear if self.config.overwrite_output_dir else set_earlier_aside)(self.output_dir)
        begin(self._lock, self.output_dir, self.world)
        checkpoints.sweep(self.output_dir, checkpoints.PARTIAL)
        for broken in self.inputs.passed_over:
            checkpoints.set_aside(broken, checkpoints.BROKEN)
        sinks = (MIRRORS[self.config.report_to](self.output_dir),) if self.config.report_to != "none" else ()
        metrics = MetricsFile(self.output_dir, self.first_step, sinks, goes_on)
        self.notes += metrics.notes + self._hints()
        self.notes += launcher_note() if self.config.save_strategy != "no" else ()
        write_run(self.output_dir, facts(self, command), secrets())
        self.terminal.header(describe(self), self.notes)
        return metrics

    def _hints(self) -> tuple[str, ...]:
        if self._rehearses or self.inputs.deepspeed:  # too short to gain from it; an engine that the plan does not know
            return ()
        return tuple(faster_notes(self._planned, self.world, self.inputs.total_steps - self.first_step))

    def train(self) -> None:
        """Runs to the last step, or to the one after which a signal ends it."""
        around = self.saving.around() if self.saving is not None else nullcontext()
        with StopRequest() as self._stop, self.explained_out_of_memory(), around, collected_together() as collect:
            try:
                saved, stopped_by = self._run_steps(self._stop, collect)
            finally:
                self._mark(None, "saving")
        self.terminal.close()
        if self.metrics is not None:
            best = checkpoints.best(self.output_dir) if self.config.keep_best else None
            self.terminal.summary(saved, self.metrics.path, self.journal.losses, best, stopped_by)
        if self._lock is not None:
            self._lock.close()

    def _run_steps(self, stop: StopRequest, collect: Callable[[int], None]) -> tuple[Path | None, str | None]:
        """Steps, logging, evaluating and saving on the way; the newest checkpoint, and the signal that ended it."""
        saved, last = self.inputs.resume_from, self.inputs.total_steps
        if self.first_step < last:
            self._try_longest()
        profile = StepProfile(self.config, self.output_dir, self.world, self.memory_parts)
        window, closed, stopped_by = self._window(), None, None
        for done in range(self.first_step + 1, last + 1):
            profile.before(done)
            with record_function(f"step {done}"):
                window.results.append(self._step(done - 1))
            profile.after(done)
            collect(done)
            stopped_by, save_failed = stop.agreed()
            ends = done == last or stopped_by is not None
            if done % self.config.logging_steps == 0 or ends:
                self.journal.record(closed)  # a step late: the device is busy with this one while the host reads
                own_seconds = self.engine.stopwatch.seconds()
                closed = window.close(done, self._work(), self.context.rank == 0, own_seconds)
                window = self._window()
            evaluates = self._due(done, self.config.eval_strategy, self.config.eval_steps)
            saves = self._due(done, self.config.save_strategy, self.config.save_steps)
            saves |= ends and self.saving is not None
            evaluates |= saves and self.config.keep_best
            if evaluates or ends:
                self.journal.record(closed)
                closed = None
            if self.saving is not None and save_failed:
                self.saving.fail()
            if self.saving is not None and self.saving.can_prepare:
                with window.paused():
                    self.saving.prepare()
            found = self._evaluated(done, window) if evaluates else None
            if saves and self.saving is not None:
                self._mark(done, "saving")
                with window.paused(saves=True):
                    saved = self.saving.save(done, found.loss if found is not None else None)
                self.journal.record(closed)  # only now: the device knows its copies, and has not waited for them
                closed = None
            if ends:
                break
        profile.close()
        return saved, stopped_by

    def _evaluated(self, done: int, window: Window) -> Perplexity:
        with window.paused():
            found = self.evaluate()
            self.journal.log({"step": done, "eval_loss": found.loss, "eval_perplexity": found.value})
        return found

    @property
    def local_tokens(self) -> int:
        """Tokens of a forward pass on one rank."""
        c = self.config
        tokens = local_tokens(self.context.schedule, c.model_max_length, c.packing != "none")
        return tokens * c.per_device_train_batch_size

    def memory_parts(self, taken_by_forward: int | None = None) -> Breakdown:
        """What the peak so far was made of. `taken_by_forward` is what a forward pass left taken, where measured."""
        c, model, device = self.config, self.inputs.model_config, self.world.device
        states = state_bytes(self.model, c, self.state_on_host)
        logits, gradients = loss_bytes(model, c, self.local_tokens)
        kept = kept_activations(model, c, self.local_tokens)
        if taken_by_forward is not None:
            kept = max(0, taken_by_forward - gradients)
        elif self.engine.offload is not None:
            kept = max(0, kept - self.engine.offload.memory.allocated_bytes)
        transport = self.context.transport
        buffers, held = transport.buffer_bytes, transport.buffer_bytes + transport.recorded_bytes
        peak = torch.cuda.max_memory_allocated(device) + held if device.type == "cuda" else 0
        working = max(0, peak - sum(states) - kept - logits - gradients - buffers)
        return Breakdown(*states, kept, logits + gradients, buffers, working)

    def explained_out_of_memory(self) -> AbstractContextManager[None]:
        model = self.inputs.model_config

        def explain() -> list[str]:
            return out_of_memory(self.config, model, self.world, self._measured())

        return explained_out_of_memory(self.world, self.terminal, explain)

    def _window(self) -> Window:
        return Window(self.world, self.context.transport, self.engine.offload)

    def _work(self) -> Work:
        c = self.config
        on_fp8_cores = c.fp8 is not None and not c.fp8_emulate
        again = self.placement.again if self.placement else 0.0
        remat = (c.remat_policy, c.layers_per_checkpoint, c.tile_layers)
        return Work(self.inputs.model_config, *remat, self.adapter_parameters, on_fp8_cores, again)

    def _try_longest(self) -> None:
        """Takes the memory of the longest batch once before the first step, unless that step has such a batch.

        A run that does not fit ends here, and no buffer grows later.
        """
        self._mark(self.first_step, "data")  # a step before the first one
        if self.lengths[-1] not in {batch.length for batch in self._batches(self.first_step)}:
            self._mark(self.first_step, "forward")
            blank = padding(self.config.per_device_train_batch_size, self.lengths[-1])
            self.engine.try_memory(lambda: self.loss_model(*self.shard(blank)))

    def _batches(self, step: int) -> list[Batch]:
        """This rank's batches of a step, as long as those of the other data ranks."""
        with explained_data(self.world, self.terminal):
            batches = [
                self.inputs.stream.batch(step, a, self.inputs.data_rank)
                for a in range(self.config.gradient_accumulation_steps)
            ]
        return shorten(batches, self.lengths, self.meshes.data_ranks)

    def _step(self, step: int) -> StepResult:
        """Optimizer step `step`, counted from 0. Waits for the device under float16 and with an optimizer not fused."""
        begin = time.perf_counter()
        self._mark(step + 1, "data")
        batches = self._batches(step)
        data_seconds = time.perf_counter() - begin
        valid = sum(batch.valid_tokens for batch in batches)
        targets = self._over_data_ranks(valid)
        divisor = targets.clamp_min(1)
        loss, imbalance = torch.zeros((), dtype=torch.float32, device=self.world.device), 0.0
        for batch in batches:
            with self._phase(step, "forward"):
                mine = self.shard(batch)
                imbalance = max(imbalance, 1 / mine.documents.balance if mine.documents else 0.0)
                share = self.loss_model(*mine) / divisor
            with self._phase(step, "backward"):
                self.engine.backward(share, last=batch is batches[-1])
            loss += share.detach()
        rate = self.learning_rate.apply(self.engine.optimizer, step)
        with self._phase(step, "update"):
            if self.saving is not None:
                self.saving.before_overwriting()
            if self._stop is not None:  # the ranks agree while the host launches the update
                self._stop.ask(self.saving is not None and self.saving.failed)
            norm, sick = self.engine.update()
        return StepResult(
            loss,
            norm,
            sick,
            rate,
            valid_tokens=valid,
            targets=targets,
            positions=sum(batch.input_ids.numel() for batch in batches),
            tokens=sum(sum(batch.sizes) for batch in batches),
            squares=sum(batch.squares for batch in batches),
            imbalance=imbalance,
            data_seconds=data_seconds,
        )

    @contextmanager
    def _phase(self, step: int, name: str) -> Iterator[None]:
        """For the trace of a profile, and for whoever looks for a rank that does not go on."""
        self._mark(step + 1, name)
        with record_function(name):
            yield

    def _mark(self, step: int | None, phase: str) -> None:
        if self._watchdog is not None:
            self._watchdog.mark(step, phase)

    def evaluate(self, bin_starts: Sequence[int] = (0,), shows_progress: bool = False) -> Perplexity:
        """Mean loss over every valid token of the evaluation data, whole and by position."""
        stream, data_rank = self.inputs.eval_stream, self.inputs.data_rank
        assert stream is not None, "evaluation was refused without data"

        def shards() -> Iterator[Shard]:
            for step in with_bar(range(stream.steps), None, shows_progress and self.world.is_main, "evaluating"):
                self._mark(None, "evaluation")
                yield self.shard(*shorten([stream.batch(step, 0, data_rank)], self.lengths, stream.data_ranks))

        return measure(self.loss_model, shards(), bin_starts, stream.length, self.world.device)

    def _over_data_ranks(self, count: int) -> Tensor:
        """A count of one sequence-parallel group summed over all of them, on the device."""
        if self.meshes.data_ranks == 1:
            return scalar(count, torch.int64, self.world.device)
        total = scalar(count if self.context.rank == 0 else 0, torch.int64, self.world.device)
        dist.all_reduce(total)
        return total

    def _due(self, done: int, strategy: str, every: int) -> bool:
        """Whether something happens after `done` steps; an epoch ends with the step that reads its last example."""
        if strategy == "steps":
            return done % every == 0
        epochs = self.inputs.stream.epochs_after
        return strategy == "epoch" and int(epochs(done)) > int(epochs(done - 1))
