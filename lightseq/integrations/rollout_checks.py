"""Checks of what a rollout returns: lengths, experts, rewards and numbers of completions."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

import torch
from torch import Tensor

from lightseq.parts.router_replay import OWN_CHOICE, ROUTED_EXPERTS


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
    """Lets a reward function refuse NaN and infinity. None stands for no reward."""
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
    rewards = list(rewards)  # of a generator
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
