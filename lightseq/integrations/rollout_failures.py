"""Failures while completions are generated, of one rank or of the server that it asks: every rank raises them."""

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

REQUIRED: Final = ("prompt_ids", "completion_ids", "logprobs")  # fields of a server's answer
FIELDS: Final = (*REQUIRED, "logprob_token_ids")


class SharedError(RuntimeError):
    """An error of one rank, as all ranks raise it."""


@dataclass(frozen=True)
class Failure:
    """Error that replaces the values of a rank or server. Every rank that reads it raises the error."""

    text: str

    def __iter__(self) -> NoReturn:
        raise SharedError(self.text)


class RankAccelerator:
    """View of an accelerator for ranks that generate a part of the completions each.

    It gathers different numbers of rows of each rank. A rank that fails puts its failure in the place of the rows that
    the others wait for, so that all raise the same line without another collective.
    """

    def __init__(self, accelerator: Accelerator, prompts: int, client: Any, asks_server: bool) -> None:
        self._accelerator = accelerator
        self._prompts = prompts
        self._client = client
        self._asks_server = asks_server  # through TRL's collectives, in which other ranks may wait
        self._raised: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns the rows of all ranks."""
        if (error := getattr(self._client, "error", None)) is not None:  # a rollout_func may have its own client
            self._share(error)
        if tensor.dim() and len(tensor) != self._prompts:
            counts = f"{len(tensor)} completions were returned for {self._prompts} prompts"
            self._share(ValueError(f"{counts}; return one for each, in order"))
        return torch.cat(self._gathered(torch.atleast_1d(tensor).cpu())).to(tensor.device)

    def fail(self, error: BaseException) -> NoReturn:
        """Raises the error of this rank on all ranks, if these wait in `gather` or failed too.

        Where a server is asked, they may wait in another collective. Then this rank alone raises, and the launcher ends
        the others.
        """
        if error is self._raised or (self._asks_server and not isinstance(error, SharedError)):
            raise error
        self._share(error)

    def _share(self, error: BaseException) -> NoReturn:
        text = f"generation failed on rank {self._accelerator.process_index}: {type(error).__name__}: {error}"
        try:
            self._gathered(Failure(str(error) if isinstance(error, SharedError) else text))
        except SharedError as shared:
            raise shared from error
        raise AssertionError("a gathered failure is raised")

    def _gathered(self, item: Any) -> list[Any]:
        items: list[Any] = gather_object([item])
        if failures := [x for x in items if isinstance(x, Failure)]:
            self._raised = SharedError(failures[0].text)
            raise self._raised
        return items


def raise_on_all_ranks(error: ValueError | None) -> None:
    """Raises the first rank's error on every rank, all of which call this."""
    texts: list[Any] = gather_object([None if error is None else str(error)])
    if first := next((text for text in texts if text is not None), None):
        raise ValueError(first) from error


class CheckedClient:
    """Client of a vLLM server whose errors reach all ranks.

    One rank talks to the server, and the others wait for what it received. Instead of raising an error, it hands them a
    `Failure`. A request may take nine tenths of the time that they wait.
    """

    def __init__(self, client: Any, ddp_timeout: float) -> None:
        self._client = client
        self._ddp_timeout = ddp_timeout
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def update_named_params(self, metadata: Any, named_params: Iterable[Any]) -> None:
        """Sends weights to the server."""
        self._attempt(self._client.update_named_params, metadata, named_params)
        for _ in named_params:  # the other ranks gather sharded weights along with this one
            pass

    def reset_prefix_cache(self) -> None:
        """Clears the server's cache of results with older weights."""
        self._attempt(self._client.reset_prefix_cache)

    def image_features(self, images: Sequence[Any], **options: Any) -> Any:
        """Returns the server's features of images."""
        return self._attempt(self._client.image_features, images, **options) or [None] * len(images)

    def generate(self, prompts: Sequence[Any], n: int = 1, **options: Any) -> Any:
        """Returns n completions of each prompt. After a failure, each field is a `Failure`."""
        found = self._attempt(self._generate, prompts=prompts, n=n, **options)
        if self.error is None:
            return found
        failure, self.error = Failure(f"{type(self.error).__name__}: {self.error}"), None
        return dict.fromkeys(FIELDS, failure)

    def _attempt(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.error is None:
            try:
                return function(*args, **kwargs)
            except Exception as error:  # requests and TRL's client raise many kinds
                self.error = error
        return None

    def _generate(self, prompts: Sequence[Any], n: int, **options: Any) -> Any:
        url, limit = getattr(self._client, "base_url", ""), 0.9 * self._ddp_timeout
        try:
            found = _within(limit, self._client.generate, prompts=prompts, n=n, **options)
        except queue.Empty:
            raise TimeoutError(
                f"the vLLM server {url} has not answered within {limit:.0f} s; other ranks wait for ddp_timeout "
                f"({self._ddp_timeout:.0f} s) at most: raise it, or ask for fewer or shorter completions"
            ) from None
        if missing := [name for name in REQUIRED if name not in found or found[name] is None]:
            raise ValueError(f"the vLLM server {url} returned no {missing[0]}; TRL needs {', '.join(REQUIRED)}")
        if (count := len(found["completion_ids"])) != n * len(prompts):
            raise ValueError(
                f"the vLLM server {url} returned {count} completions for {len(prompts)} prompts x num_generations {n}; "
                f"{n * len(prompts)} are needed"
            )
        if (rows := len(found["logprobs"])) != count:
            raise ValueError(
                f"the vLLM server {url} returned {rows} rows of logprobs for {count} completions; see its log"
            )
        for index, (ids, values) in enumerate(zip(found["completion_ids"], found["logprobs"], strict=True)):
            if not ids or len(values) != len(ids):
                raise ValueError(
                    f"the vLLM server {url} returned completion {index} with {len(ids)} tokens and {len(values)} "
                    "log-probabilities; each needs a token, and each token a log-probability; see the server's log"
                )
        return found


def _within(seconds: float, function: Callable[..., Any], **options: Any) -> Any:
    """Calls a function in the background. Raises queue.Empty if it takes longer; it is not ended then."""
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            results.put((function(**options), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=call, daemon=True).start()
    found, error = results.get(timeout=seconds)
    if error is not None:
        raise error
    return found
