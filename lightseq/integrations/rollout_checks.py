"""Joins what ranks have generated, and checks it: lengths, experts, rewards, numbers of rows, a server's weights."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import Any, Final

import torch
from torch import Tensor

from lightseq.parts.router_replay import OWN_CHOICE, ROUTED_EXPERTS

logger = logging.getLogger(__name__)

# Mean differences, over sampled tokens, between log-probabilities of a server and of the trainer. Rounding to bfloat16
# gives about 0.01 to 0.05, other experts or 8-bit weights up to some tenths, a foreign model more than 1.
UNUSUAL_DIFFERENCE: Final = 0.2
LARGEST_DIFFERENCE: Final = 1.0

OPTIONAL: Final = ("logprobs", "env_mask")  # fields of a rollout that may be None


def checked_rollout(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a `rollout_func` to refuse a result that TRL cannot read, on the rank that has it."""

    @wraps(function)
    def checked(prompts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        found = function(prompts, *args, **kwargs)
        _check_fields(found, len(prompts))
        return found

    return checked


def _check_fields(found: Any, prompts: int) -> None:
    """Raises ValueError unless a rollout has a row for each prompt, and each row has token ids."""
    if not isinstance(found, Mapping):
        raise ValueError(
            f"rollout_func returned a {type(found).__name__}; return a dict of prompt_ids, completion_ids and logprobs"
        )
    for name in ("completion_ids", "prompt_ids", "logprobs", "env_mask"):
        rows = found.get(name)
        if rows is None:
            if name in OPTIONAL or name not in found:  # TRL names a missing field
                continue
            raise ValueError(f"rollout_func returned None as {name}; return a list of token ids for each prompt")
        if len(rows) != prompts:
            what = "completions were returned" if name == "completion_ids" else f"{name} were returned"
            raise ValueError(f"{len(rows)} {what} for {prompts} prompts; return one for each, in order")
        if name not in OPTIONAL:
            for index, ids in enumerate(rows):
                _check_ids(f"{name} {index} of a rollout", ids)


def _check_ids(name: str, ids: Any) -> None:
    """Raises ValueError unless ids are whole numbers from 0, at least one."""
    if not len(ids):
        raise ValueError(f"{name} have no tokens; give at least one, such as the end of the sequence")
    try:
        given = torch.as_tensor(ids)
        are_ids = given.ndim == 1 and not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
    except (TypeError, ValueError, RuntimeError):  # strings, rows of several lengths, numbers beyond 64 bits
        are_ids = False
    if not are_ids:
        raise ValueError(f"{name} are not whole numbers; give a list of token ids")
    if (lowest := int(given.min())) < 0:
        raise ValueError(f"{name} have token id {lowest}; give ids from 0")


def check_prompts(prompts: Sequence[Any], ids_of_prompts: Sequence[Any]) -> None:
    """Raises ValueError for a prompt without tokens."""
    for prompt, ids in zip(prompts, ids_of_prompts, strict=True):
        if not len(ids):
            raise ValueError(f"the prompt {prompt!r} has no tokens; remove its row, or begin prompts with a BOS token")


def check_rollout(rollout: Mapping[str, Any]) -> None:
    """Raises ValueError for log-probabilities, masks or experts that are not one for each token of a completion."""
    given = {"logprobs": "log-probabilities", "tool_mask": "entries in its mask (env_mask)"}
    for name, values_of_tokens in given.items():
        for row, (ids, values) in enumerate(zip(rollout["completion_ids"], rollout[name] or (), strict=False)):
            if values is None:
                raise ValueError(f"completion {row} has no {values_of_tokens}, but others have; give all or none")
            if len(values) != len(ids):
                raise ValueError(
                    f"completion {row} has {len(ids)} tokens, but {len(values)} {values_of_tokens}; give one a token"
                )
    routes = rollout["extra_fields"].get(ROUTED_EXPERTS)
    _check_routes(rollout, () if routes is None else routes)


def _check_routes(rollout: Mapping[str, Any], routes: Sequence[Any]) -> None:
    """Raises ValueError unless each completion has experts for its tokens, in the same layers."""
    first: tuple[int, ...] | None = None
    rows = zip(rollout["prompt_ids"], rollout["completion_ids"], routes, strict=False)
    for row, (prompt, completion, chosen) in enumerate(rows):
        tokens, name = len(prompt) + len(completion), f"{ROUTED_EXPERTS} of completion {row}"
        if chosen is None:
            raise ValueError(f"{name} are missing, but others are there; give all completions theirs, or none")
        if len(chosen) not in (tokens, tokens - 1):  # the last token is not an input of the server's model
            raise ValueError(
                f"{name} are for {len(chosen)} tokens, but prompt and completion have {tokens}; give one for each, or "
                "for all but the last"
            )
        try:
            experts = torch.as_tensor(chosen)
        except (TypeError, ValueError, RuntimeError):  # rows of several lengths
            raise ValueError(f"{name} are no array; give one (tokens, layers, experts of a token)") from None
        if experts.ndim != 3 or experts.is_floating_point():
            raise ValueError(
                f"{name} are {tuple(experts.shape)} of {experts.dtype}; give whole numbers (tokens, layers, experts of "
                "a token)"
            )
        first = first or tuple(experts.shape[1:])
        if experts.shape[1:] != first:
            raise ValueError(
                f"{name} are (layers, experts of a token) {tuple(experts.shape[1:])}, but of completion 0 {first}; "
                "give all completions the same"
            )
        ordered = experts.sort(-1).values
        if (twice := (ordered.diff(dim=-1) == 0) & (ordered[..., 1:] != OWN_CHOICE)).any():
            raise ValueError(
                f"{name} name expert {int(ordered[..., 1:][twice][0])} twice for a token; give different experts, or "
                f"{OWN_CHOICE} to leave the choice to the layer"
            )


def routes_of_rows(routes: Sequence[Any], attention_mask: Tensor) -> Tensor:
    """Returns the experts of rows (tokens, layers, experts of a token) in the places of a padded batch."""
    rows = [torch.as_tensor(row) for row in routes]
    largest = torch.iinfo(torch.int16).max
    fits = all(row.numel() == 0 or int(row.abs().max()) <= largest for row in rows)  # else the model refuses them
    dtype = torch.int16 if fits else torch.int64
    padded = torch.full((*attention_mask.shape, *rows[0].shape[1:]), OWN_CHOICE, dtype=dtype)
    starts = (attention_mask != 0).int().argmax(1).tolist()
    for row, start, chosen in zip(padded, starts, rows, strict=True):
        room = len(row) - start
        row[start : start + len(chosen)] = chosen[:room]
    return padded.to(attention_mask.device)


def check_scores(names: Sequence[str], of_models: Sequence[bool], rewards: Tensor) -> None:
    """Raises ValueError for a score (completions, functions) of a reward model that is NaN or infinite."""
    for name, is_model, scores in zip(names, of_models, rewards.T, strict=True):
        wrong = (~scores.isfinite()).nonzero().flatten().tolist()
        if is_model and wrong:
            raise ValueError(
                f"reward model {name} returned {float(scores[wrong[0]])} for completion {wrong[0]}; check its weights "
                "and dtype"
            )


def without_nan(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a reward function to refuse NaN and infinity. None means that a completion has no reward."""
    name = getattr(function, "__name__", type(function).__name__)
    if _is_async(function):

        async def checked_later(*args: Any, **kwargs: Any) -> Any:
            return _finite(name, await function(*args, **kwargs))

        return checked_later

    def checked(*args: Any, **kwargs: Any) -> Any:
        return _finite(name, function(*args, **kwargs))

    return checked


def _is_async(function: Any) -> bool:
    """Returns whether a call must be awaited, as TRL decides it: also for objects and partials."""
    while isinstance(function, partial):
        function = function.func
    return iscoroutinefunction(function) or iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _finite(name: str, rewards: Any) -> list[Any]:
    if not isinstance(rewards, Iterable):
        raise ValueError(f"reward function {name} returned {rewards!r}; return a list with a number per completion")
    rewards = list(rewards)  # it may be a generator
    for index, reward in enumerate(rewards):
        if reward is not None and not _is_finite(reward):
            raise ValueError(
                f"reward function {name} returned {_shown(reward)} for completion {index}; return a finite number, or "
                "None for a completion that it does not score"
            )
    return rewards


def _is_finite(reward: Any) -> bool:
    try:
        return -float("inf") < float(reward) < float("inf")
    except (TypeError, ValueError):
        return False


def _shown(reward: Any) -> str:
    try:
        return str(float(reward))
    except (TypeError, ValueError):
        return repr(reward)


def check_divides(name: str, own: int, groups: int, generations: int) -> None:
    if own * groups % generations:
        raise ValueError(
            f"{name} ({own}) times the groups of ranks that share sequences ({groups}) is {own * groups}, which "
            f"num_generations ({generations}) does not divide; give {name} a multiple of it"
        )


def check_server_weights(trainer: Any) -> None:
    """Raises ValueError if a vLLM server's log-probabilities are far from the trainer's. Warns once if unusually far.

    All ranks read the same number, which TRL has gathered for its logs.
    """
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    name = "sampling/sampling_logp_difference"
    if not metrics.get(f"{name}/mean"):  # without a server, or without importance sampling
        return
    mean, largest = metrics[f"{name}/mean"][-1], metrics[f"{name}/max"][-1]
    if mean <= UNUSUAL_DIFFERENCE:
        return
    line = (
        f"the log-probabilities that vLLM returned differ from the trainer's by {mean:.2f} on average (at most "
        f"{largest:.1f}), as if vLLM had other weights"
    )
    if mean > LARGEST_DIFFERENCE and _samples_all_tokens(trainer):
        raise ValueError(
            f"{line}; serve the model that is trained, to this trainer alone, with --logprobs-mode processed_logprobs, "
            "or set vllm_importance_sampling_correction=False to train on what it returns"
        )
    if not getattr(trainer, "_warned_of_server", False) and trainer.accelerator.is_main_process:
        logger.warning("%s (0.01 to 0.05 is usual in bfloat16); see sampling/ in the logs", line)
    trainer._warned_of_server = True


def _samples_all_tokens(trainer: Any) -> bool:
    """Returns whether a server samples from the whole distribution, whose log-probabilities the trainer computes."""
    generation = trainer.vllm_generation
    return (
        generation.top_p == 1
        and (generation.top_k or 0) <= 0
        and not generation.min_p
        and generation.repetition_penalty == 1
        and not generation.generation_kwargs
        and generation.structured_outputs_regex is None
    )


def merged(parts: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Joins what ranks have generated for their parts of a batch: values with an item for each prompt."""
    return tuple(_merged_lists(values, parts) for values in zip(*parts, strict=True))


def _merged_lists(values: Sequence[Any], parts: Sequence[Any]) -> Any:
    if all(value is None for value in values):
        return None
    if isinstance(values[0], Mapping):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _merged_field(name, [value.get(name) for value in values], parts) for name in names}
    # A part without images, for example, has None for all its prompts; prompts come first in what a trainer generates.
    filled = [
        [None] * len(part[0]) if value is None else list(value) for value, part in zip(values, parts, strict=True)
    ]
    return [item for value in filled for item in value]


def _merged_field(name: str, values: Sequence[Any], parts: Sequence[Any]) -> Any:
    """Joins a field of a rollout. Lists have an item per completion; other values hold for all completions."""
    given = [value for value in values if value is not None]
    if name != ROUTED_EXPERTS and not any(isinstance(value, list) for value in given):
        return given[0] if given else None
    for value, part in zip(values, parts, strict=True):
        if value is not None and len(value) != len(part[0]):
            raise ValueError(f"rollout_func returned {len(value)} {name} for {len(part[0])} completions; give one each")
    return _merged_lists(values, parts)
