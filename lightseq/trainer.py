"""Trains a model across ranks: from the words of a command line to a saved model and its metrics."""

import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.profiler import record_function

from lightseq import checkpoint, weights
from lightseq.config import TrainConfig, help_text, parse
from lightseq.data import Batch, track
from lightseq.family import Family
from lightseq.flops import total_parameters
from lightseq.hf import local_positions
from lightseq.layout import shard
from lightseq.loss import IGNORE_INDEX
from lightseq.memory import Breakdown, advice, kept_activations, loss_bytes, state_bytes
from lightseq.mesh import (
    Meshes,
    World,
    agree,
    first_to,
    free_host_memory,
    is_main_process,
    leave,
    make_deterministic,
    make_meshes,
    start,
)  # fmt: skip
from lightseq.metrics import MIRRORS, MetricsFile, hardware, scalar, write_run
from lightseq.optimization import LearningRate, LossScaler, clip, global_norm, local_gradients, make_optimizer
from lightseq.parallelize import Techniques, parallelize
from lightseq.perplexity import Perplexity, measure
from lightseq.prepare import Inputs, clear, continues, prepare
from lightseq.profiling import StepProfile
from lightseq.terminal import Terminal
from lightseq.tokens import first_line
from lightseq.window import Closed, StepResult, Window, Work

CPU = torch.device("cpu")


def main(family: Family, argv: Sequence[str] | None = None) -> None:
    """The program behind llama2/train.py and llama3/train.py. Exits 2, with one line, on input that it refuses."""
    words = list(sys.argv[1:] if argv is None else argv)
    program = f"{family.name}/train.py"
    if {"-h", "--help"} & set(words):
        if is_main_process():
            print(help_text(program))
        return
    with start(_timeout(words, program)) as world:
        config = agree(world, lambda: parse(words, program))
        inputs = agree(world, lambda: prepare(config, family, world))
        command = f"{program} {shlex.join(words)}"
        Trainer(config, inputs, world, command).train()


def _timeout(words: list[str], program: str) -> float:
    """Needed before the ranks can agree on anything; what is wrong with the words is said once they can."""
    try:
        return parse(words, program).step_timeout
    except ValueError:
        return TrainConfig.step_timeout


class Trainer:
    """One run on one rank. Without a command, which is for evaluations, it says nothing and leaves no files."""

    def __init__(
        self, config: TrainConfig, inputs: Inputs, world: World, command: str | None, rehearses: bool = False
    ) -> None:
        self.config, self.inputs, self.world = config, inputs, world
        self.output_dir = Path(config.output_dir)
        self.dtype = getattr(torch, config.compute_dtype)
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        if config.deterministic:
            make_deterministic()
        self.meshes: Meshes = make_meshes(world, inputs.sequence_size, config.fsdp_mode)
        self.model = weights.build_on_meta(inputs.model_config)
        techniques = Techniques(
            length=config.model_max_length,
            schedule=config.schedule,
            kernel=config.kernel,
            transport=config.transport,
            ulysses_size=config.ulysses_size,
            remat=config.remat_policy,
            layers_per_checkpoint=config.layers_per_checkpoint,
            offload=config.offload,
            host_memory_bytes=self._host_memory_bytes(),
            compute_dtype=self.dtype,
            compile=config.torch_compile,
            deterministic=config.deterministic,
            gpus_per_host=world.local_size,
            rehearses=rehearses,
        )
        self.loss_model, self.context = agree(
            world, lambda: parallelize(self.model, self.meshes, world.device, techniques)
        )
        weights.materialize(self.model, world.device, CPU if config.offload in ("optimizer", "both") else None)
        agree(world, self._fill_weights)
        self.optimizer = make_optimizer(self.model, config)
        self.learning_rate = LearningRate(config, inputs.total_steps)
        self.scaler = LossScaler() if config.fp16 else None
        self.first_step = agree(world, self._resume)
        self.terminal = Terminal(inputs.total_steps, self.first_step)
        self.metrics = agree(world, lambda: self._open_output(command)) if command is not None else None
        self.losses: list[float] = []  # logged
        self._positions: dict[int, Tensor] = {}  # of this rank's tokens, by length

    def _host_memory_bytes(self) -> float:
        budget = self.config.host_memory_budget
        return free_host_memory(self.world) if budget is None else budget * 2**30

    def _fill_weights(self) -> None:
        if self.inputs.resume_from is not None:
            return  # the checkpoint's follow
        if self.inputs.weights is None:
            weights.initialize(self.model, self.config.seed, self.world.device)
            return
        try:
            weights.load(self.model, self.inputs.weights)
        except (SafetensorError, json.JSONDecodeError, KeyError) as error:
            raise ValueError(
                f"--model_name_or_path {self.inputs.weights}: its weights cannot be read ({first_line(error)}); "
                "copy or download them again"
            ) from error

    def _resume(self) -> int:
        """Steps done before this run."""
        if self.inputs.resume_from is None:
            return 0
        checkpoint.restore(self.inputs.resume_from, self.model, self.optimizer)
        facts = checkpoint.read_facts(self.inputs.resume_from)
        if self.scaler is not None and facts.get("scaler"):
            self.scaler = LossScaler(**facts["scaler"])
        return int(facts["step"])

    def _open_output(self, command: str) -> MetricsFile | None:
        if not self.world.is_main:
            return None
        if self.config.overwrite_output_dir and not continues(self.inputs.resume_from, self.output_dir):
            clear(self.output_dir)
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"--output_dir {self.output_dir} cannot be made ({error.strerror}); name another"
            ) from error
        write_run(self.output_dir, self._facts(command))
        self.terminal.header(self.describe(), self.inputs.notes)
        sinks = (MIRRORS[self.config.report_to](self.output_dir),) if self.config.report_to != "none" else ()
        return MetricsFile(self.output_dir, self.first_step, sinks)

    def _facts(self, command: str) -> dict[str, Any]:
        """run.json: what it takes to run this again, and to judge its figures."""
        return {
            "command": command,
            "schedule": self.context.schedule.name,
            "kernel": self.context.selection.kernel.name,
            "kernels_passed_over": dict(self.context.selection.passed_over),
            "transport": self.context.transport.name,
            "transport_passed_over": self.context.transport.passed_over,
            "head_groups": self.context.schedule.turns,
            "ulysses_size": self.context.schedule.ulysses_size,
            "remat": self.config.remat_policy,
            "layers_per_checkpoint": self.config.layers_per_checkpoint,
            "host_memory_bytes": self.loss_model.offload.memory.limit_bytes if self.loss_model.offload else None,
            "world_size": self.world.size,
            "data_ranks": self.meshes.data_ranks,
            "sequence_ranks": self.inputs.sequence_size,
            "total_steps": self.inputs.total_steps,
            "resumed_from": str(self.inputs.resume_from) if self.inputs.resume_from else None,
            "notes": list(self.inputs.notes),
            "hardware": hardware(self.world.device),
            "config": self.config.to_json(),
            "model_config": self.inputs.model_config.to_dict(),
        }

    def describe(self) -> dict[str, Any]:
        """What was chosen, in the order in which a reader asks."""
        c, m = self.config, self.inputs.model_config
        passed_over = self.context.transport.passed_over
        start_weights = self.inputs.resume_from or self.inputs.weights or f"random, seed {c.seed}"
        return {
            "model": f"{c.model_name_or_path}, {total_parameters(m):,} parameters, {start_weights}",
            "data": f"{c.data_path}, {len(self.inputs.stream.examples):,} examples",
            "ranks": f"{self.world.size} ({self.meshes.data_ranks} data x {self.inputs.sequence_size} sequence) on "
            f"{hardware(self.world.device)['device']}",
            "sequence": f"{c.model_max_length:,} tokens, {self.inputs.stream.sequences_per_step} a step",
            "precision": f"{c.compute_dtype} compute, float32 master weights",
            "schedule": str(self.context.schedule),
            "kernel": str(self.context.selection),
            "transport": self.context.transport.name + (f" ({passed_over})" if passed_over else ""),
            "remat": c.remat_policy
            + (f", {c.layers_per_checkpoint} layers a checkpoint" if c.layers_per_checkpoint > 1 else "")
            + (f", {c.offload} in host memory" if c.offload != "none" else ""),
            "parameters": {"full_shard": "FSDP2 over all ranks", "hybrid_shard": "FSDP2 inside a host, copies across",
                           "ddp": "a copy on every rank"}[c.fsdp_mode],
        }  # fmt: skip

    def train(self) -> None:
        """Runs to the last step, logging, evaluating and saving on the way."""
        profile = StepProfile(self.config.profile_steps, self.output_dir, self.world)
        saved, last = self.inputs.resume_from, self.inputs.total_steps
        window, closed = self._window(), None
        for done in range(self.first_step + 1, last + 1):
            profile.before(done)
            with self.explained_out_of_memory(), record_function(f"step {done}"):
                window.results.append(self._step(done - 1))
            profile.after(done)
            if done % self.config.logging_steps == 0 or done == last:
                self._record(closed)  # a step late: the device is busy with this one while the host reads
                closed, window = window.close(done, self._work(), self.context.rank == 0), self._window()
            evaluates = self._due(done, self.config.eval_strategy, self.config.eval_steps)
            saves = self._due(done, self.config.save_strategy, self.config.save_steps)
            saves |= done == last and self.config.save_strategy != "no"
            evaluates |= saves and self.config.keep_best
            if evaluates or saves or done == last:
                self._record(closed)
                closed = None
            with window.paused():
                found = self.evaluate() if evaluates else None
                if found is not None:
                    self._log({"step": done, "eval_loss": found.loss, "eval_perplexity": found.value})
                if saves:
                    saved = self._save(done, found.loss if found is not None else None)
        profile.close()
        self.terminal.close()
        if self.metrics is not None:
            best = checkpoint.best(self.output_dir) if self.config.keep_best else None
            self.terminal.summary(saved, self.metrics.path, self.losses, best)

    @property
    def local_tokens(self) -> int:
        """Tokens of a forward pass on one rank."""
        layout = self.context.layout
        length = layout.padded_length(self.config.model_max_length) // layout.world
        return length * self.config.per_device_train_batch_size

    def memory_parts(self, taken_by_forward: int | None = None) -> Breakdown:
        """What the peak so far was made of. `taken_by_forward` is what a forward pass left taken, where measured."""
        c, model, device = self.config, self.inputs.model_config, self.world.device
        on_host = c.offload in ("optimizer", "both")
        states = (0, 0, 0) if on_host else state_bytes(self.model, self.optimizer)
        logits, gradients = loss_bytes(model, c, self.local_tokens)
        kept = kept_activations(model, c, self.local_tokens)
        if taken_by_forward is not None:
            kept = max(0, taken_by_forward - gradients)
        elif self.loss_model.offload is not None:
            kept = max(0, kept - self.loss_model.offload.memory.allocated_bytes)
        buffers = self.context.transport.buffer_bytes
        peak = torch.cuda.max_memory_allocated(device) + buffers if device.type == "cuda" else 0
        working = max(0, peak - sum(states) - kept - logits - gradients - buffers)
        return Breakdown(*states, kept, logits + gradients, buffers, working)

    @contextmanager
    def explained_out_of_memory(self) -> Iterator[None]:
        """Says once what the memory was for and what to turn, and ends this process; the launcher ends the others."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.terminal.close()
            if first_to("explain"):
                parts = self.memory_parts()
                what = ". ".join(str(error).split(". ")[:2])  # what happened, and for how many bytes
                lines = [*parts.lines(), f"error: rank {self.world.rank}: {what}"]
                print("\n".join([*lines, f"to fit: {advice(parts, self.config)}"]), file=sys.stderr, flush=True)
            leave(1)

    def _window(self) -> Window:
        return Window(self.world, self.context.transport, self.loss_model.offload)

    def _work(self) -> Work:
        c = self.config
        sequences, grouped = self.inputs.stream.sequences_per_step, c.layers_per_checkpoint > 1
        return Work(self.inputs.model_config, c.model_max_length, sequences, c.remat_policy, grouped)

    def _step(self, step: int) -> StepResult:
        """Optimizer step `step`, counted from 0. Waits for the device only under float16."""
        begin = time.perf_counter()
        batches = [
            self.inputs.stream.batch(step, a, self.inputs.data_rank)
            for a in range(self.config.gradient_accumulation_steps)
        ]
        data_seconds = time.perf_counter() - begin
        valid = sum(batch.valid_tokens for batch in batches)
        divisor = self._over_data_ranks(valid).clamp_min(1)
        scale = self.scaler.scale if self.scaler else 1.0
        loss = torch.zeros((), dtype=torch.float32, device=self.world.device)
        for batch in batches:
            with record_function("forward"):
                share = self.loss_model(*self.shard(batch)) / divisor
            with record_function("backward"):
                (share * scale).backward()
            loss += share.detach()
        rate = self.learning_rate.apply(self.optimizer, step)
        with record_function("update"):
            norm = self._update()
        return StepResult(loss, norm, rate, valid, data_seconds)

    def _update(self) -> Tensor:
        """Clips, steps and clears; returns the gradients' global norm before clipping."""
        grads = local_gradients(self.model.parameters())
        norm = global_norm(grads, self.meshes.parameters["shard"].get_group())  # on the gradients' device
        take = True
        if self.scaler is not None:
            norm, take = self.scaler.unscale(grads, norm)
        if take:
            clip(grads, norm, self.config.max_grad_norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def shard(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's ids, positions and labels of a whole batch, on its device."""
        layout, rank, length = self.context.layout, self.context.rank, batch.input_ids.shape[1]
        ids = shard(batch.input_ids, layout, rank)
        labels = shard(batch.labels, layout, rank, fill=IGNORE_INDEX)
        if length not in self._positions:
            self._positions[length] = local_positions(self.context, length, self.world.device)
        return self._on_device(ids), self._positions[length].expand(len(ids), -1), self._on_device(labels)

    def _on_device(self, x: Tensor) -> Tensor:
        """A copy that the host does not wait for: from pinned memory where there is a GPU."""
        return x.pin_memory().to(self.world.device, non_blocking=True) if self.world.device.type == "cuda" else x

    def evaluate(self, bin_starts: Sequence[int] = (0,), shows_progress: bool = False) -> Perplexity:
        """Mean loss over every valid token of the evaluation data, whole and by position."""
        stream, data_rank = self.inputs.eval_stream, self.inputs.data_rank
        assert stream is not None, "evaluation was refused without data"
        steps = track(range(stream.steps), "evaluating", shows_progress and self.world.is_main)
        shards = (self.shard(stream.batch(step, 0, data_rank)) for step in steps)
        return measure(self.loss_model, shards, bin_starts, stream.length, self.world.device)

    def _over_data_ranks(self, count: int) -> Tensor:
        """A count of one sequence-parallel group summed over all of them, on the device."""
        if self.meshes.data_ranks == 1:
            return scalar(count, torch.int64, self.world.device)
        total = scalar(count if self.context.rank == 0 else 0, torch.int64, self.world.device)
        dist.all_reduce(total)
        return total

    def _record(self, closed: Closed | None) -> None:
        if closed is not None:
            record = closed.record()
            self.losses.append(record.loss)
            self._log(asdict(record))

    def _log(self, record: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(record)
            self.terminal.show(record)

    def _due(self, done: int, strategy: str, every: int) -> bool:
        """Whether something happens after `done` steps; an epoch ends with the step that reads its last example."""
        if strategy == "steps":
            return done % every == 0
        epochs = self.inputs.stream.epochs_after
        return strategy == "epoch" and int(epochs(done)) > int(epochs(done - 1))

    def _save(self, step: int, eval_loss: float | None) -> Path:
        facts = {"scaler": vars(self.scaler) if self.scaler else None, "config": self.config.to_json()}
        tokenizer_from = self.inputs.weights
        return checkpoint.save(
            self.output_dir, step, self.model, self.optimizer, {**facts, checkpoint.LOSS: eval_loss}, self.dtype,
            self.config.save_total_limit, tokenizer_from, self.config.keep_best,
        )  # fmt: skip
