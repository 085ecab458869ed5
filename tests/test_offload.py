"""Offloaded activations come back the same, within the budget, and gradients do not change."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from worlds import spawn

from lightseq import hf
from lightseq.config.remat_policies import STORE_LINEARS, STORES_MLP
from lightseq.distributed.environment import (
    ALLOCATOR_SETTINGS,
    has_expandable_segments,
    lock_pages_in_parallel,
    use_expandable_segments,
)
from lightseq.distributed.parallel_dims import local_part
from lightseq.distributed.world import World
from lightseq.memory import offload
from lightseq.memory.offload import HostBufferPool, Offload, OffloadedTensor, device_lifetimes
from lightseq.memory.pinned import PinnedMemory
from lightseq.memory.remat import apply_remat
from lightseq.models import weights
from lightseq.parts.changes import Changes
from lightseq.parts.chosen_experts import build_to_train
from lightseq.parts.mlp import tile_mlps
from lightseq.parts.projections import store_projections
from lightseq.training import errors
from lightseq.training.terminal import Terminal

WIDTH, ROWS, LAYERS = 8, 5, 4
LOCKING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
GROWING = "expandable_segments:True"
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Layer(nn.Module):
    """Saves its input, something of its own, its weight, and a tensor that every layer is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, everyones: Tensor) -> Tensor:
        return x + self.linear(x).sin() * everyones


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor, everyones: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, everyones)
        return x.square().sum()


@pytest.fixture(autouse=True)
def even_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 0)


def make(
    device: str,
    budget: float = float("inf"),
    dtype: torch.dtype = torch.float64,
    layers: int = LAYERS,
    staying: Sequence[int] = (),
) -> tuple[Model, Model, Offload]:
    """The same model twice, the second with wrapped layers; the last layer stays, and so do those in `staying`."""
    torch.manual_seed(0)
    plain, wrapped = Model(layers).to(device, dtype), Model(layers).to(device, dtype)
    wrapped.load_state_dict(plain.state_dict())
    target = torch.device(device, 0) if device == "cuda" else torch.device(device)
    host = Offload(target, HostBufferPool(budget, pinned=device == "cuda"))
    *most, last = wrapped.layers
    host.wrap(most, last, [most[i] for i in staying])
    return plain, wrapped, host


def inputs(device: str, rows: int = ROWS, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x, everyones = (torch.randn(rows, WIDTH, generator=g, dtype=dtype).to(device) for _ in "xe")
    return x.requires_grad_(), everyones


def gradients(model: Model, x: Tensor, everyones: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x, everyones), [x, *model.parameters()]))


@pytest.mark.parametrize(
    ("device", "budget", "staying"),
    [
        *(("cpu", budget, []) for budget in (float("inf"), 1000, 0)),
        *(("cpu", float("inf"), staying) for staying in ([1, 3, 5, 6], [0, 1, 4, 5], [1, 2, 4], [1, 2, 3, 4, 5, 6])),
        pytest.param("cuda", float("inf"), [], marks=pytest.mark.gpu(1)),
    ],
)
def test_gradients_are_the_same_to_the_bit(device: str, budget: float, staying: list[int]) -> None:
    plain, wrapped, host = make(device, budget, layers=8, staying=staying)
    for step in range(3):  # buffers come round again
        x, everyones = inputs(device, ROWS + step % 2)
        assert all(map(torch.equal, gradients(wrapped, x, everyones), gradients(plain, x, everyones)))
    assert host.memory.allocated_bytes <= budget
    if budget > 1000:
        assert [len(layer.stored) for layer in host._layers] == [0 if i in staying else 2 for i in range(7)]


def test_offloaded_layers_are_not_fetched_before_a_staying_layer_runs_backward() -> None:
    plain, wrapped, host = make("cpu", staying=[2])
    x, everyones = inputs("cpu")
    fetching: list[list[bool]] = []
    for layer in wrapped.layers[1:-1]:  # a hook of its input runs when its backward pass has
        note = partial(_when_its_gradient_is_there, lambda _: fetching.append([x.fetching for x in host._layers]))
        layer.register_forward_pre_hook(note)
    loss = wrapped(x, everyones)
    assert [len(layer.stored) for layer in host._layers] == [2, 2, 0] and host.on_device_bytes == 0
    assert all(stored.original is None for layer in host._layers for stored in layer.stored.values())
    got = torch.autograd.grad(loss, [x, *wrapped.parameters()])
    assert fetching == [[False, True, True], [True, True, True]]
    assert all(map(torch.equal, got, gradients(plain, x, everyones)))


def _when_its_gradient_is_there(do: Callable[[Tensor], None], _layer: nn.Module, given: tuple[Tensor, ...]) -> None:
    given[0].register_hook(do)


def test_copies_that_a_failed_backward_pass_began_end_before_their_memory_is_reused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, wrapped, host = make("cpu", staying=[1])
    waited: list[object] = []
    monkeypatch.setattr(Offload, "_event", lambda _: object())  # stands for a CUDA event
    monkeypatch.setattr(offload, "_wait_for", waited.append)
    x, everyones = inputs("cpu")

    def fail(_: Tensor) -> None:
        raise ValueError

    hook = wrapped.layers[2].register_forward_pre_hook(partial(_when_its_gradient_is_there, fail))
    with pytest.raises(ValueError):
        wrapped(x, everyones).backward()
    hook.remove()
    first = host._layers[0]
    assert first.fetch_done is not None and not first.fetched and first.fetch_done not in waited
    assert all(map(torch.equal, gradients(wrapped, x, everyones), gradients(plain, x, everyones)))
    assert first.fetch_done in waited


@pytest.mark.gpu(1)
def test_gradients_are_right_where_copies_take_longer_than_the_host_does() -> None:
    plain, wrapped, _ = make("cuda", dtype=torch.float32)
    x, everyones = inputs("cuda", rows=1 << 18, dtype=torch.float32)
    for _ in range(5):
        for got, want in zip(gradients(wrapped, x, everyones), gradients(plain, x, everyones), strict=True):
            assert torch.equal(got, want)


@pytest.mark.gpu(1)
def test_device_memory_shrinks_by_what_is_offloaded() -> None:
    def peak(model: Model) -> int:
        x, everyones = inputs("cuda", rows=1 << 18, dtype=torch.float32)
        gradients(model, x, everyones)  # the allocator's first pass
        torch.cuda.reset_peak_memory_stats()
        gradients(model, x, everyones)
        return torch.cuda.max_memory_allocated()

    plain, wrapped, host = make("cuda", dtype=torch.float32, layers=12)
    assert peak(plain) - peak(wrapped) > host.offloaded_bytes / 2  # some layers' are leaving, one's is on its way back


def stored(model: Model, host: Offload) -> list[Tensor | OffloadedTensor]:
    """Returns what every layer's saved tensors became, in order."""
    found: list[Tensor | OffloadedTensor] = []
    store: Callable[[Tensor], OffloadedTensor | Tensor] = host.store
    host.store = lambda tensor: found.append(store(tensor)) or found[-1]  # type: ignore[func-returns-value, method-assign]
    model(*inputs("cpu"))
    return found


def test_weights_and_tensors_shared_by_layers_stay_on_the_device() -> None:
    _, wrapped, host = make("cpu")
    stayed = [x for x in stored(wrapped, host) if isinstance(x, Tensor)]
    weights, (_, everyones) = {x.data_ptr() for x in wrapped.parameters()}, inputs("cpu")
    assert stayed and all(x.data_ptr() in weights or torch.equal(x, everyones) for x in stayed)
    assert (
        host.offloaded_bytes == 2 * (LAYERS - 1) * ROWS * WIDTH * 8
    )  # each layer's input, and what the sine was taken of


@pytest.mark.parametrize(
    ("offloaded", "lifetimes"),
    [
        ("xxx.", [2, 2, 2, 0]),
        ("x.x.x...", [3, 0, 3, 0, 3, 0, 0, 0]),
        ("xx..x..", [2, 4, 0, 0, 4, 0, 0]),
        ("x...", [3, 0, 0, 0]),
        ("..x.", [0, 0, 2, 0]),
        (".x..", [0, 2, 0, 0]),
        ("...", [0, 0, 0]),
    ],
)
def test_a_layer_is_on_the_device_up_to_the_next_offloaded_one(offloaded: str, lifetimes: list[int]) -> None:
    leaves = [letter == "x" for letter in offloaded]
    assert device_lifetimes(leaves) == lifetimes
    assert device_lifetimes(leaves, in_flight=1) == [int(leaf) for leaf in leaves]


@pytest.mark.parametrize(
    ("staying", "forward", "backward"),
    [
        ([], [[0], [0, 1], [1, 2], [2, 3], [3, 4], [4]], [[4], [3, 4], [2, 3], [1, 2], [0, 1], [0]]),
        ([1, 3], [[0], [0], [0, 2], [2], [2, 4], [4]], [[4], [2, 4], [2], [0, 2], [0], [0]]),
        ([1, 3, 4], [[0], [0], [0, 2], [2], [2], []], [[], [2], [2], [0, 2], [0], [0]]),
    ],
)
def test_tensors_of_at_most_two_layers_are_on_the_device(
    staying: list[int], forward: list[list[int]], backward: list[list[int]]
) -> None:
    _, wrapped, host = make("cpu", layers=6, staying=staying)

    def there() -> list[int]:
        return [i for i, x in enumerate(host._layers) if any(k.original is not None or k.restored is not None
                                                             for k in x.stored.values())]  # fmt: skip

    seen: list[list[int]] = []
    for layer in wrapped.layers:
        layer.linear.register_forward_hook(lambda *_: seen.append(there()))
        layer.linear.register_full_backward_hook(lambda *_: seen.append(there()))
    gradients(wrapped, *inputs("cpu"))
    assert seen == forward + backward


def test_tensors_beyond_the_budget_stay_on_the_device_and_are_counted() -> None:
    _, wrapped, host = make("cpu", budget=4 * ROWS * WIDTH * 8 + 1)
    wrapped(*inputs("cpu"))
    assert host.offloaded_bytes == 4 * ROWS * WIDTH * 8 and host.on_device_bytes >= ROWS * WIDTH * 8


def test_nothing_is_offloaded_without_gradients() -> None:
    _, wrapped, host = make("cpu")
    with torch.no_grad():
        wrapped(*inputs("cpu"))
    assert host.offloaded_bytes == 0 and host._layers == []


def test_short_batches_reuse_the_buffers_of_long_ones() -> None:
    memory, sizes = HostBufferPool(float("inf"), pinned=False), (4096, 512, 2048, 4096)
    for part in (1, 4, 2, 8, 1):
        taken = [memory.acquire(size // part, torch.float32) for size in (sizes if part % 4 else reversed(sizes))]
        assert [len(x) * part for x in taken if x is not None] == list(sizes if part % 4 else reversed(sizes))
        assert len({x.data_ptr() for x in taken if x is not None}) == len(sizes)
        for buffer in taken:
            assert buffer is not None
            memory.release(buffer)
        assert memory.allocated_bytes == 4 * sum(sizes)


def test_a_second_backward_pass_is_refused() -> None:
    _, wrapped, _ = make("cpu")
    loss = wrapped(*inputs("cpu"))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="use --offload none for a second one"):
        loss.backward()


@pytest.mark.slow
def test_attention_outputs_are_offloaded_too() -> None:
    """Under remat `attention` a layer keeps its input, attention's output and its log-sum-exp, compiled or not; under
    `attention+mlp` what gate and up make besides, and under `attention+linears` what the projections do. Two layers
    are offloaded and two stay."""
    spawn(1, _kept_by_llama)


def _kept_by_llama(rank: int) -> None:
    offload.MIN_BYTES = 0
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    context = hf.enable(model)
    batch = hf.shard_batch(context, torch.randint(64, (1, 24)), torch.randint(64, (1, 24)))
    want = torch.autograd.grad(model(**batch).loss, list(model.parameters()))
    for policy, compiled in product(("attention", *STORES_MLP), (False, True)):
        wrapped = LlamaForCausalLM(config)
        wrapped.load_state_dict(model.state_dict())
        hf.enable(wrapped)
        layers, host = list(wrapped.model.layers), Offload(torch.device("cpu"), HostBufferPool(float("inf"), False))
        store, products = policy in STORES_MLP, policy == STORE_LINEARS
        tile_mlps(layers, Changes(), store=store)
        if products:
            store_projections(layers, Changes())
        apply_remat(layers, policy, compiled, host)
        for layer in layers if compiled else []:
            layer.forward = torch.compile(layer.forward, backend="aot_eager")
        host.wrap(layers[:-1], layers[-1], staying=layers[1:4:2])
        loss = wrapped(**batch).loss
        size, lse, wide = 24 * 32 * 4, 24 * 4 * 4, 24 * 64 * 4
        own = [stored.host.nbytes for layer in host._layers for stored in layer.stored.values()]
        assert {size, lse} <= set(own) and own.count(wide) == 2 * 2 * store, (policy, compiled, own)
        # Of keys and values; compiled layers keep keys as they are once rotated, too.
        assert own.count(24 * 16 * 4) >= 2 * 2 * products, (policy, compiled, own)
        assert host.offloaded_bytes >= 2 * (2 * size + lse), (policy, compiled, host.offloaded_bytes)
        got = torch.autograd.grad(loss, list(wrapped.parameters()))
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", [512, 1000, 3 * 2**20])
def test_pinned_memory_is_locked_to_the_byte_within_the_budget(size: int, locks: "Locks") -> None:
    memory = HostBufferPool(10.5 * size, pinned=True)
    buffers = []
    while (buffer := memory.acquire(size // 2, torch.bfloat16)) is not None:
        buffers.append(buffer.fill_(len(buffers)))
    assert len(buffers) == 10 and memory.allocated_bytes == 10 * size
    assert locks.now == {x.data_ptr(): size for x in buffers}
    assert all(int(x[0]) == i == int(x[-1]) for i, x in enumerate(buffers)), "buffers do not overlap"
    memory.release(buffers[3])
    taken = memory.acquire(size // 2, torch.bfloat16)
    assert taken is not None and taken.data_ptr() == buffers[3].data_ptr()
    del memory
    assert not locks.now, "what goes back to the system is unlocked first"


def test_a_refused_lock_ends_a_step_as_out_of_memory(
    locks: "Locks", monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    locks.refuse = True
    monkeypatch.setattr(errors, "exit_process", sys.exit)
    monkeypatch.setattr(errors, "is_first_to", lambda _: True)
    monkeypatch.setattr(errors, "mark_done", lambda _: None)
    world = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))
    with pytest.raises(SystemExit), errors.exit_on_out_of_memory(world, Terminal(1, 0), lambda: ["to fit: less"]):
        HostBufferPool(float("inf"), pinned=True).acquire(1024, torch.float32)
    assert capsys.readouterr().err.splitlines() == [
        "error: rank 0: host out of memory. 4,096 bytes of host memory cannot be pinned (CUDA error 1)",
        "to fit: less",
    ]


def test_unused_memory_is_unlocked_early_and_the_rest_with_its_owner(locks: "Locks") -> None:
    memory, tensors = PinnedMemory(), [torch.zeros(n) for n in (3, 0, 70)]
    for tensor in tensors:
        memory.lock(tensor)
    assert locks.now == {tensors[0].data_ptr(): 12, tensors[2].data_ptr(): 280}
    memory.retain_only(tensors[:2])
    assert locks.now == {tensors[0].data_ptr(): 12}
    del memory
    assert not locks.now


def test_uninitialized_memory_is_zeroed_before_it_is_locked(locks: "Locks") -> None:
    """Written before: what is there can be locked at once."""
    memory, written = PinnedMemory(), torch.full((300,), 7.0)
    locks.seen = lambda: written.tolist() == [0.0] * 300
    assert memory.lock_new(written) is written and locks.now == {written.data_ptr(): 1200}
    locks.seen = lambda: True
    assert not memory.empty((3, 100), torch.int32).any() and len(locks.now) == 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))])
def test_weights_on_the_host_are_locked_before_fsdp2_copies_them(device: str) -> None:
    """It looks as soon as a weight has memory. Of rows that do not divide it copies the last rank's, which it pads."""
    assert spawn(2, _places_of_host_weights, device, True, device=device) == [set(), {"lm_head", "model.embed_tokens"}]


def test_without_a_lock_fsdp2_copies_every_weight_on_the_host() -> None:
    first, last = spawn(2, _places_of_host_weights, "cpu", False)
    assert len(first) == len(last) == 3 + 9 * 2


def _places_of_host_weights(rank: int, device: str, locks: bool) -> set[str]:
    """The weights that do not lie where they were made."""
    host = Locks()
    if device == "cpu":
        torch.cuda.cudart = lambda: host  # type: ignore[assignment]
        Tensor.is_pinned = lambda self: self.data_ptr() in host.now  # type: ignore[assignment]
        Tensor.pin_memory = Tensor.clone  # type: ignore[method-assign,assignment]
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    model = build_to_train(LlamaConfig(**sizes, num_hidden_layers=2, num_key_value_heads=1))
    place, mesh = CPUOffloadPolicy(pin_memory=True), init_device_mesh(device, (2,))
    root = nn.Sequential(model)
    for unit in (*model.model.layers, root):
        fully_shard(unit, mesh=mesh, offload_policy=place)
    memory = PinnedMemory()
    made: list[Tensor] = []

    def take(local: Tensor) -> None:
        made.append(local)
        if locks:
            memory.lock(local)

    weights.materialize(model, torch.device(device), lambda _: torch.device("cpu"), take, root)
    held = {name.removesuffix(".weight"): local_part(p) for name, p in model.named_parameters()}
    memory.retain_only(held.values())
    if device == "cuda":
        assert all(local.is_pinned() for local in held.values())
    moved = {name for name, local in held.items() if local.data_ptr() not in {x.data_ptr() for x in made}}
    if device == "cpu" and locks:
        assert set(host.now) == {local.data_ptr() for name, local in held.items() if name not in moved}
    return moved


@pytest.mark.gpu(1)
def test_locked_memory_is_pinned_to_torch_and_can_be_locked_again() -> None:
    tensor = torch.zeros(1000, 1001)
    for _ in range(2):
        memory = PinnedMemory()
        memory.lock(tensor)
        assert tensor.is_pinned(), "or FSDP2 would make a copy"
        del memory
        assert not tensor.is_pinned()


class Locks:
    """A stand-in for CUDA that records locked memory by address."""

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        self.refuse = False
        self.seen: Callable[[], bool] = lambda: True

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
        if self.refuse:
            return 1
        assert place not in self.now and flags == 1 and self.seen()
        self.now[place] = size
        return 0

    def cudaHostUnregister(self, place: int) -> int:
        del self.now[place]
        return 0


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Locks:
    found = Locks()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not LARGE_PAGES.exists() or "[never]" in LARGE_PAGES.read_text(), reason="no large pages here")
def test_host_tensors_use_large_pages_by_default() -> None:
    program = (
        "from lightseq.distributed.environment import set_up_process; set_up_process(); import torch\n"
        "x = torch.zeros(1 << 24); print(open('/proc/self/smaps_rollup').read())"
    )
    given = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    for told, asks in (({}, True), ({"THP_MEM_ALLOC_ENABLE": "0"}, False)):
        words = [sys.executable, "-c", program]
        shown = subprocess.run(words, env=given | told, capture_output=True, text=True, check=True).stdout
        large = int(shown.split("AnonHugePages:")[1].split()[0])
        assert (large > 32 * 1024) == (asks or "[always]" in LARGE_PAGES.read_text()), shown


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": f"{LOCKING},{GROWING}"}),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
            {"PYTORCH_ALLOC_CONF": f"expandable_segments:False,{LOCKING}"},
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": f"{LOCKING},{GROWING}"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "pinned_use_background_threads:True"},
            {"PYTORCH_CUDA_ALLOC_CONF": f"pinned_use_background_threads:True,{GROWING}"},
        ),
    ],
)
def test_allocators_are_set_unless_the_user_has_set_them(
    given: dict[str, str], found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    lock_pages_in_parallel()
    use_expandable_segments()
    assert has_expandable_segments() == ("segments:False" not in str(given))
    assert {name: os.environ[name] for name in ALLOCATOR_SETTINGS if name in os.environ} == found
