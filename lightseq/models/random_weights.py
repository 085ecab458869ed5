"""Random initial weights: the model's own initialization, with values that do not depend on the number of ranks."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from lightseq.models.build import build_on_meta, constructed_parameters
from lightseq.models.decoder import decoder_layers, has_known_parts, module_name
from lightseq.models.weights import FillParameter, base_parameters, fill


def initialize(
    model: PreTrainedModel, seed: int, fill: FillParameter = fill, device: torch.device | None = None
) -> None:
    """Draws random weights as the model's `_init_weights` says.

    It runs layer by layer on whole parameters, on `device` (default: the parameters' own), of which each rank takes its
    part. Each parameter has its own generator. So the weights do not depend on the number of ranks.
    """
    twin, parameters = build_on_meta(model.config), base_parameters(model)
    layers = decoder_layers(twin) if has_known_parts(twin) else ()
    done: set[nn.Module] = set()
    constructed: dict[str, Tensor] = {}
    for unit in (*layers, twin):  # the rest comes last
        prefix = "" if unit is twin else f"{module_name(twin, unit)}."
        place = device or next(parameter.device for name, parameter in parameters.items() if name.startswith(prefix))
        with _whole(unit, done, place):
            drawn = {f"{prefix}{name}": whole for name, whole in unit.named_parameters() if not whole.is_meta}
            left = _initialize(twin, unit, drawn, seed, done)
            if unset := sorted(left & parameters.keys()):
                constructed = constructed or _constructed(model, seed)
                for name in unset:
                    drawn[name].detach().copy_(constructed[name])
            for name in [*parameters]:  # in an order that all ranks share
                if name in drawn:  # only one of a tied pair is a parameter
                    fill(parameters.pop(name), drawn[name].detach().__getitem__)
        done |= {*unit.modules()}
    assert not parameters, f"{min(parameters)} was not drawn"


@contextmanager
def _whole(unit: nn.Module, done: set[nn.Module], device: torch.device) -> Iterator[None]:
    """Gives the tensors of a unit memory on a device for a while, except in modules that are done."""
    modules = [module for module in unit.modules() if module not in done]
    for module in modules:
        module.to_empty(device=device, recurse=False)
    yield
    for module in modules:
        module.to_empty(device=torch.device("meta"), recurse=False)


def _initialize(
    twin: PreTrainedModel, unit: nn.Module, drawn: dict[str, Tensor], seed: int, done: set[nn.Module]
) -> set[str]:
    """Runs the initialization of a unit, as transformers' `initialize_weights` does for a whole model.

    Returns the names of parameters that it does not set, because their constructor does.
    """
    owners: dict[nn.Module, PreTrainedModel] = {}
    for module in twin.modules():  # parents come first
        owner = module if isinstance(module, PreTrainedModel) else owners.get(module, twin)
        owners |= dict.fromkeys(module.children(), owner)
    devices = [*{whole.device for whole in drawn.values() if whole.is_cuda}]

    def run(module: nn.Module) -> None:
        for child in module.children():
            if child not in done:
                run(child)
        owner = module if isinstance(module, PreTrainedModel) else owners[module]
        owner._init_weights(module)

    generators = _Generators(drawn, seed)
    with torch.no_grad(), torch.random.fork_rng(devices=devices), guard_torch_init_functions(), generators:
        torch.manual_seed(_hashed(seed, min(drawn)))  # seed of draws outside parameters
        run(unit)
    return {name for name, whole in drawn.items() if whole.numel()} - generators.written  # nothing writes empty ones


def _constructed(model: PreTrainedModel, seed: int) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return constructed_parameters(model.config)


class _Generators(TorchDispatchMode):
    """Mode that seeds each random operation on a parameter by the parameter's name."""

    def __init__(self, parameters: dict[str, Tensor], seed: int) -> None:
        super().__init__()
        self._names = {whole.untyped_storage().data_ptr(): name for name, whole in parameters.items()}
        self._seed = seed
        self.written = set[str]()  # names of parameters that an operation changed

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = self._names.get(args[0].untyped_storage().data_ptr()) if op._schema.is_mutable else None
        if name is not None:
            self.written.add(name)
            if any(argument.name == "generator" for argument in op._schema.arguments):
                kwargs = kwargs | {"generator": named_generator(name, self._seed, args[0].device)}
        return op(*args, **kwargs)


def named_generator(name: str, seed: int, device: torch.device) -> torch.Generator:
    """Returns a random generator for one parameter."""
    return torch.Generator(device).manual_seed(_hashed(seed, name))


def _hashed(seed: int, name: str) -> int:
    # CPU generators ignore the upper half of a 64-bit seed, so seed and name are hashed to 32 bits.
    return zlib.crc32(f"{seed} {name}".encode())
