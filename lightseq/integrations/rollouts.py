"""Trainers of TRL that generate: each rank of a group generates a part of the completions, and all train on all."""

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from accelerate.utils import gather_object, set_seed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightseq.integrations.accelerate import DATA, SEQUENCE, random_states, set_random_states
from lightseq.integrations.group_accelerator import GroupAccelerator, own_accelerator
from lightseq.integrations.regrouped_rows import micro_batches_of_update, shuffle_in_groups
from lightseq.integrations.rollout_checks import (
    check_divides,
    check_prompts,
    check_rollout,
    check_scores,
    check_server_weights,
    checked_rollout,
    merged,
    routes_of_rows,
    without_nan,
)
from lightseq.integrations.rollout_failures import CheckedClient, RankAccelerator, raise_on_all_ranks
from lightseq.integrations.split_model import split_model_of
from lightseq.parts.router_replay import ROUTED_EXPERTS
from lightseq.sequence.shared_prefixes import LEAST_SAVED

# Names of the values that GRPO's `_generate` returns.
ROLLOUT: Final = (
    *("prompt_ids", "completion_ids", "tool_mask", "completions", "logprobs", "extra_fields", "images", "tool_images"),
)


class SharedRollouts:
    """Mixin for trainers that generate completions and score them, such as TRL's GRPOTrainer.

    Each rank of a group generates a part of the group's completions, on the model as it is without lightseq. The first
    rank of a group scores all of them. Losses, advantages and metrics are computed as if a group were one process.
    """

    accelerator: Any
    args: Any
    is_fsdp_enabled: bool
    model: Any
    reward_func_names: list[str]
    state: Any
    vllm_generation: Any
    _sequence_mesh: DeviceMesh | None
    _generations = 0  # calls so far, which sample from different seeds
    _routes: Any = None  # experts chosen by the current rollout, or by its micro-batch

    def _set_up_rollouts(self) -> None:
        """Adapts a trainer that generates to groups of ranks, after its constructor. Does nothing for others."""
        if self._sequence_mesh is None or not generates(type(self)):
            return
        if getattr(self, "environment_factories", None) is not None:
            raise ValueError(
                "environment_factory does not work with sequence_parallel_size > 1, because the states of environments "
                "lie on one rank; use tools, or rollout_func"
            )
        asks_model = not getattr(self, "use_vllm", False) and getattr(self, "rollout_func", None) is None
        if asks_model and getattr(self, "tools", None) and self.is_fsdp_enabled:
            raise ValueError(
                "tools with FSDP2: a rank whose completions call tools generates more often, and would wait for the "
                "weights of others forever; use DDP, or use_vllm=True"
            )
        # Ranks of a group shuffle completions alike, as one process would.
        set_seed(self.args.seed + self._sequence_mesh.get_local_rank(DATA))
        if functions := getattr(self, "reward_funcs", None):
            self.reward_funcs = [x if isinstance(x, nn.Module) else without_nan(x) for x in functions]
        if (rollout := getattr(self, "rollout_func", None)) is not None:
            self.rollout_func = checked_rollout(rollout)
        if (client := self._vllm_client()) is not None:
            self.vllm_generation.vllm_client = CheckedClient(client, self.args.ddp_timeout)

    def _vllm_client(self) -> Any:
        """Returns the client of a vLLM server, which the first of all ranks has."""
        return getattr(getattr(self, "vllm_generation", None), "vllm_client", None)

    def _set_generation_batch(self) -> None:
        """Counts a generation batch in groups of ranks. Raises ValueError if prompts would be split between batches."""
        arguments, mesh = self.args, self._sequence_mesh
        if mesh is None or getattr(arguments, "generation_batch_size", None) is None:
            return
        groups, own = mesh[DATA].size(), arguments.per_device_train_batch_size * arguments.steps_per_generation
        arguments.generation_batch_size = own * groups
        check_divides("per_device_train_batch_size x steps_per_generation", own, groups, arguments.num_generations)
        if arguments.do_eval and arguments.eval_strategy != "no":
            generations = arguments.num_generations_eval or arguments.num_generations
            check_divides("per_device_eval_batch_size", arguments.per_device_eval_batch_size, groups, generations)

    # ---- as if a group of ranks were one process ---------------------------------------------------------------------

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        with self._as_groups():
            return super()._get_train_sampler(*args, **kwargs)  # type: ignore[misc]

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Runs with groups as processes, for subclasses that score completions. Groups rows by prompt."""
        with self._as_groups(), self._grouping_rows():
            return super()._prepare_inputs(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _grouping_rows(self) -> Iterator[None]:
        """Makes the trainer group the rows of an update by prompt, if prompts are shared."""
        split = None if self._sequence_mesh is None else split_model_of(self.model)
        if split is None or not generates(type(self)) or not split.shares_prefixes:
            yield
            return
        module = vars(_module_of(type(self)))
        shuffle, rows = module["shuffle_sequence_dict"], self.args.per_device_train_batch_size
        grouping = shuffle_in_groups(shuffle, rows, micro_batches_of_update(self), LEAST_SAVED)
        with replaced(module, shuffle_sequence_dict=grouping):
            yield

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        with self._as_groups():
            found: dict[str, Any] = super()._generate_and_score_completions(*args, **kwargs)  # type: ignore[misc]
        if self._sequence_mesh is not None:
            check_server_weights(self)
        routes, self._routes = self._routes, None
        if routes is not None:
            mask = torch.cat([found["prompt_mask"], found["completion_mask"]], 1)
            found[ROUTED_EXPERTS] = routes_of_rows(routes, mask)
        return found

    def _compute_loss(self, model: nn.Module, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        self._routes = inputs.get(ROUTED_EXPERTS)
        try:
            with self._as_groups():  # also for a compute_loss of the user that calls this
                return super()._compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._routes = None

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Replays the rollout's experts in the trained model."""
        split = split_model_of(self.model)
        call: Any = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        if self._routes is None or split is None or split_model_of(model) is not split:
            return call(model, input_ids, attention_mask, *args, **kwargs)
        given = self._routes
        routes = given if isinstance(given, Tensor) else routes_of_rows(given, attention_mask)
        with split.replaying(routes):
            return call(model, input_ids, attention_mask, *args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self._as_groups():
            return super().compute_loss(*args, **kwargs)  # type: ignore[misc]

    def _trains_on_rollouts(self) -> bool:
        """Returns whether rows are prompts with completions, which are packed, and of many lengths."""
        return generates(type(self))

    @contextmanager
    def _as_groups(self) -> Iterator[None]:
        """Replaces a rollout trainer's accelerator by its view of groups inside the block."""
        if (
            self._sequence_mesh is None
            or not self._trains_on_rollouts()
            or isinstance(self.accelerator, GroupAccelerator)  # in a call around this one
        ):
            yield
            return
        groups = GroupAccelerator(self.accelerator, self._sequence_mesh)
        functions = vars(_module_of(type(self))) if generates(type(self)) else {}
        with replaced(vars(self), accelerator=groups):
            with replaced(functions, gather=groups.gather, gather_object=groups.gather_object):
                yield

    # ---- completions and rewards -------------------------------------------------------------------------------------

    def _generate(self, prompts: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Generates completions of a group's prompts, each once, and returns them all on every rank of the group."""
        mesh, whole = self._sequence_mesh, split_model_of(self.model)
        if mesh is None or whole is None:
            return self._without_routes(super()._generate(prompts, *args, **kwargs))  # type: ignore[misc]
        rank, ranks, group = mesh.get_local_rank(SEQUENCE), mesh[SEQUENCE].size(), mesh.get_group(SEQUENCE)
        # vLLM's clients cut what several ranks generate into equal parts.
        uses_vllm, of_vllm = getattr(self, "use_vllm", False), vars(self)
        cuts_evenly = uses_vllm and (of_vllm["vllm_mode"] == "server" or of_vllm["vllm_tensor_parallel_size"] > 1)
        if len(prompts) < ranks or (cuts_evenly and len(prompts) % ranks):
            return self._generate_alike(prompts, *args, **kwargs)
        part = slice(len(prompts) * rank // ranks, len(prompts) * (rank + 1) // ranks)
        own_prompts, module = prompts[part], _module_of(type(self))
        asks_server = uses_vllm and of_vllm["vllm_mode"] == "server" and of_vllm.get("rollout_func") is None
        ranks_apart = RankAccelerator(
            own_accelerator(self.accelerator), len(own_prompts), self._vllm_client(), asks_server=asks_server
        )
        with whole.paused(), self._samples(rank), replaced(vars(self), accelerator=ranks_apart):
            with replaced(vars(module), gather_object=gather_object):
                try:
                    own = super()._generate(own_prompts, *args, **kwargs)  # type: ignore[misc]
                except (Exception, SystemExit) as error:  # a user's function may raise anything
                    ranks_apart.fail(error)
        parts: list[Any] = [None] * ranks
        dist.all_gather_object(parts, own, group=group)
        return self._checked(parts)

    def _tokenize_prompts(self, prompts: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Tokenizes prompts. Raises ValueError for one without tokens, whose completion has no first prediction."""
        found = super()._tokenize_prompts(prompts, *args, **kwargs)  # type: ignore[misc]
        if self._sequence_mesh is not None:
            check_prompts(prompts, found[0] if isinstance(found, tuple) else found)
        return found

    def _generate_alike(self, prompts: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Generates all completions on every rank of a group. Returns the first rank's.

        A server is asked once for each group, because its client sees the group as one process.
        """
        mesh, whole = self._sequence_mesh, split_model_of(self.model)
        assert mesh is not None and whole is not None
        if getattr(self, "rollout_func", None) is not None:
            raise ValueError(
                f"rollout_func would be called for {len(prompts)} prompts on each of {mesh[SEQUENCE].size()} ranks; "
                "raise per_device_train_batch_size or steps_per_generation to a multiple of sequence_parallel_size"
            )
        client: Any = getattr(self, "vllm_generation", None)
        groups, ours = self.accelerator, {} if client is None else vars(client)
        theirs = {} if client is None else vars(sys.modules[type(client).__module__])
        with whole.paused(), self._samples(0), replaced(ours, accelerator=groups):
            with replaced(theirs, gather_object=groups.gather_object):
                found = [super()._generate(prompts, *args, **kwargs)]  # type: ignore[misc]
        dist.broadcast_object_list(found, group=mesh.get_group(SEQUENCE), group_src=0)
        return self._checked(found)

    def _checked(self, parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Joins and checks what a group has generated, and stores the experts that a rollout of GRPO has chosen.

        Raises ValueError, on the ranks of all groups, for a rollout whose values have other lengths than its
        completions.
        """
        if len(parts[0]) != len(ROLLOUT):
            return merged(parts)
        found, error = None, None
        try:
            found = merged(parts)
            rollout = dict(zip(ROLLOUT, found, strict=True))
            self._routes = rollout["extra_fields"].get(ROUTED_EXPERTS)
            check_rollout(rollout)
        except ValueError as raised:
            error = raised
        raise_on_all_ranks(error)
        assert found is not None
        return found

    def _without_routes(self, found: tuple[Any, ...]) -> tuple[Any, ...]:
        """Raises ValueError for a rollout with experts, because replay needs sequences split over ranks."""
        if len(found) == len(ROLLOUT) and ROUTED_EXPERTS in dict(zip(ROLLOUT, found, strict=True))["extra_fields"]:
            raise ValueError(
                f"rollout_func returned {ROUTED_EXPERTS}, which needs sequence_parallel_size > 1; leave them out"
            )
        return found

    def _samples(self, rank: int) -> AbstractContextManager[None]:
        """Seeds sampling for one rank of this group, with a new seed in every generation."""
        assert self._sequence_mesh is not None
        self._generations += 1
        group, step = self._sequence_mesh.get_local_rank(DATA), int(self.state.global_step)
        return _drawing(self.args.seed, step, self._generations, group, rank)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the rewards (completions, functions) of all groups, which the first rank of each group computes.

        Reward models run on all ranks, because their weights may be sharded. An error is raised on every rank. Ranks of
        a group go on with the random states of the first, from which its reward functions may have drawn.
        """
        if self._sequence_mesh is None:
            return super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc, no-any-return]
        functions: list[Any] = self.reward_funcs
        scores = self._sequence_mesh.get_local_rank(SEQUENCE) == 0 or any(isinstance(x, nn.Module) for x in functions)
        own, error = None, None
        if scores:
            try:
                with replaced(vars(_module_of(type(self))), gather=lambda x: x):
                    own = super()._calculate_rewards(*args, **kwargs).cpu()  # type: ignore[misc]
                check_scores(self.reward_func_names, [isinstance(x, nn.Module) for x in functions], own)
            except (Exception, SystemExit) as raised:  # a user's function may raise anything
                error = raised
        text = None if error is None else f"{type(error).__name__}: {error}"
        found = gather_object([(own, text, random_states())])
        if error is not None:
            raise error
        if errors := [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(found) if text is not None]:
            raise RuntimeError(f"a reward function failed on {errors[0]}")
        ranks = self._sequence_mesh[SEQUENCE].size()
        set_random_states(found[self._sequence_mesh.get_local_rank(DATA) * ranks][2])
        return torch.cat([rows for rows, _, _ in found[::ranks]]).to(self.accelerator.device)


def generates(kind: type) -> bool:
    """Returns whether a trainer generates completions and scores them."""
    return bool(_generating_classes(kind))


def _generating_classes(kind: type) -> list[type]:
    return [c for c in kind.__mro__ if c is not SharedRollouts and "_generate_and_score_completions" in vars(c)]


def _module_of(kind: type) -> Any:
    """Returns the module of the trainer that generates, whose functions gather over all ranks."""
    return sys.modules[_generating_classes(kind)[-1].__module__]


@contextmanager
def replaced(names: dict[str, Any], **values: Any) -> Iterator[None]:
    """Replaces attributes of a module or an object inside the block. Ignores names that it lacks."""
    before = {name: names[name] for name in values if name in names}
    names.update({name: values[name] for name in before})
    try:
        yield
    finally:
        names.update(before)


@contextmanager
def _drawing(*key: int) -> Iterator[None]:
    """Seeds the random generators from the key inside the block, and restores their states afterwards.

    A rollout function may draw from Python's and NumPy's generators, too.
    """
    before = random_states()
    set_seed(random.Random(repr(key)).getrandbits(32))
    try:
        yield
    finally:
        set_random_states(before)  # GPU states differ between ranks anyway
