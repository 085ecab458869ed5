"""Joins what ranks have generated, and checks it: lengths, experts, rewards, numbers of rows, a server's weights."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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


def check_rollout(rollout: Mapping[str, Any]) -> None:
    """Raises ValueError for log-probabilities, masks or experts that are not one for each token of a completion."""
    for name in ("logprobs", "tool_mask"):
        for row, (ids, values) in enumerate(zip(rollout["completion_ids"], rollout[name] or (), strict=False)):
            if len(values) != len(ids):
                given = {"logprobs": "log-probabilities", "tool_mask": "entries in its mask (env_mask)"}[name]
                raise ValueError(f"completion {row} has {len(ids)} tokens, but {len(values)} {given}; give one a token")
    routes = rollout["extra_fields"].get(ROUTED_EXPERTS) or ()
    rows = zip(rollout["prompt_ids"], rollout["completion_ids"], routes, strict=False)
    for row, (prompt, completion, chosen) in enumerate(rows):
        tokens = len(prompt) + len(completion)
        if len(chosen) not in (tokens, tokens - 1):  # the last token is not an input of the server's model
            raise ValueError(
                f"{ROUTED_EXPERTS} of completion {row} are for {len(chosen)} tokens, but prompt and completion have "
                f"{tokens}; give one for each, or for all but the last"
            )


def routes_of_rows(routes: Sequence[Any], attention_mask: Tensor) -> Tensor:
    """Returns the experts of rows (tokens, layers, experts of a token) in the places of a padded batch."""
    rows = [torch.as_tensor(row) for row in routes]
    padded = torch.full((*attention_mask.shape, *rows[0].shape[1:]), OWN_CHOICE, dtype=torch.int16)
    starts = (attention_mask != 0).int().argmax(1).tolist()
    for row, start, chosen in zip(padded, starts, rows, strict=True):
        room = len(row) - start
        row[start : start + len(chosen)] = chosen[:room]
    return padded.to(attention_mask.device)


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
    rewards = list(rewards)  # it may be a generator
    for index, reward in enumerate(rewards):
        if reward is not None and not -float("inf") < float(reward) < float("inf"):
            raise ValueError(
                f"reward function {name} returned {float(reward)} for completion {index}; return a finite number, or "
                "None for a completion that it does not score"
            )
    return rewards


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
