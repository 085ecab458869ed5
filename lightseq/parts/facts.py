"""Facts about the decoder layers of a model. Nothing here assumes that layers are alike."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import ArrayLike
from transformers import PreTrainedConfig

from lightseq.models.decoder import text_config
from lightseq.schedule.cost import AttentionShape
from lightseq.schedule.reach import Reach

SCAN_PEAK_SHARE: Final = 0.027  # gated delta rule with its convolution, 32 heads of 128 x 128 (traces, H100)


@dataclass(frozen=True)
class Heads:
    """Attention heads of a layer: query heads, key/value heads, and their dimensions."""

    query: int
    key_value: int
    dim: int  # elements of queries and keys
    value_dim: int


@dataclass(frozen=True)
class Attention:
    """Softmax attention, one of the mixers of a layer."""

    heads: Heads
    reach: Reach | None  # None: full attention

    @property
    def width(self) -> int:
        """Returns the elements per token of the queries."""
        return self.heads.query * self.heads.dim

    @property
    def key_width(self) -> int:
        """Returns the elements per token of the keys."""
        return self.heads.key_value * self.heads.dim

    @property
    def value_width(self) -> int:
        """Returns the elements per token of the values."""
        return self.heads.key_value * self.heads.value_dim

    @property
    def pair_flops(self) -> int:
        """Returns the FLOPs of one visible (query, key) pair in the forward pass: a row of QKᵀ and one of PV."""
        return 2 * self.heads.query * (self.heads.dim + self.heads.value_dim)

    def area(self, sizes: ArrayLike) -> float:
        """Returns twice the visible (query, key) pairs in documents of these sizes, without half of the diagonal.

        With full attention that is the sum of the squared sizes.
        """
        if self.reach is not None:
            return self.reach.area(sizes)
        return float(np.square(np.asarray(sizes, dtype=np.float64)).sum())


@dataclass(frozen=True)
class LinearMixer:
    """A mixer whose work grows with the tokens, such as a recurrence or a short convolution."""

    kind: str  # the class of its module
    token_flops: int  # forward FLOPs of a token, beside the layer's linears
    token_elements: int = 0  # temporary elements of a token in its kernel's backward pass
    scan_heads: int = 0  # heads of values in its scan; 0: it has no scan, or an unknown one
    is_stored: bool = False  # checkpoints store its results as they do attention's
    peak_share: float = SCAN_PEAK_SHARE  # share of a chip's peak that its kernels reach in both passes


Mixer = Attention | LinearMixer  # mixes tokens


@dataclass(frozen=True)
class Experts:
    """Experts of a layer. A router chooses some for every token."""

    count: int
    per_token: int
    first_product: int  # weights of one expert's first product, gate and up together
    last_product: int

    @property
    def weights(self) -> int:
        """Returns the weights of all experts."""
        return self.count * (self.first_product + self.last_product)

    @property
    def active(self) -> int:
        """Returns the weights that a token is multiplied by."""
        return self.per_token * (self.first_product + self.last_product)


@dataclass(frozen=True)
class Layer:
    """Facts about one decoder layer. Counts are of weights."""

    kind: str  # the class of its module
    mixers: tuple[Mixer, ...]  # in the order in which they run; none if the layer is only an MLP
    mixes_tokens: bool  # False only if it is known to work on each token alone
    hidden: int  # elements per token of its input and output
    intermediate: int  # elements per token between the linears of its MLP; 0 without an MLP
    parameters: int
    active: int  # weights that a token is multiplied by: linears, and the experts that it chooses
    linears: int  # weights of its linears, without stacked experts
    last_product: int  # part of `active`: the product that runs last, if a recomputation leaves it out
    gated_mlp: bool  # down(act(gate) * up) of plain linears, with an activation of parts/mlp.py
    mlp_is_last: bool  # only the residual sum follows the MLP, so no backward pass needs its output
    plain_projections: bool  # attention has four linears without bias
    linear_inputs: int  # elements per token that its linears read
    linear_outputs: int  # elements per token that they write
    last_linear_input: int  # part of `linear_inputs`: that of the product that runs last, if it is left out
    experts: Experts | None
    place: int = field(compare=False)  # place of the first layer like it in the model

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Returns the mixers that are softmax attention."""
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, Attention))

    @property
    def linear_mixers(self) -> tuple[LinearMixer, ...]:
        """Returns the mixers that are not softmax attention."""
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, LinearMixer))

    @property
    def linear_mixer_flops(self) -> int:
        """Returns the FLOPs per token of the other mixers in the forward pass."""
        return sum(mixer.token_flops for mixer in self.linear_mixers)

    @property
    def can_store_mlp(self) -> bool:
        """Returns whether a checkpoint can store gate and up of its MLP or experts, whose products then run once."""
        return self.experts is not None or self.gated_mlp

    @property
    def stored_products(self) -> int:
        """Returns the weights of the products whose results `--remat attention+mlp` stores."""
        if self.experts is not None:
            return self.experts.per_token * self.experts.first_product
        return 2 * self.hidden * self.intermediate

    @property
    def attention_width(self) -> int:
        """Returns the elements per token of attention's result."""
        return sum(x.heads.query * x.heads.value_dim for x in self.attentions)

    @property
    def projections(self) -> int:
        """Returns the weights of the q, k and v projections."""
        return self.hidden * sum(x.width + x.key_width + x.value_width for x in self.attentions)


def distinct(layers: Iterable[Layer]) -> list[Layer]:
    """Returns one of each kind of layers, in order of first appearance. Equal layers of a model are one object."""
    return list({id(layer): layer for layer in layers}.values())


def names_of_kinds(layers: Iterable[Layer]) -> list[str]:
    """Returns the classes of layers, each once, in order of first appearance."""
    return list(dict.fromkeys(layer.kind for layer in distinct(layers)))


def heads_of(config: PreTrainedConfig) -> Heads:
    """Returns the heads of the layers as the config says. Raises ValueError if it has no number for all layers.

    `Architecture.attentions` knows the heads of each layer; this is for models without those facts.
    """
    text = text_config(config)
    try:
        query = text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // query
        return Heads(query, getattr(text, "num_key_value_heads", None) or query, dim, dim)
    except (AttributeError, RuntimeError) as error:  # RuntimeError: the config has one number per layer
        raise ValueError(f"{config.model_type} has no single number of attention heads for all layers") from error


def attention_shape(mixers: Sequence[Attention], length: int, batch: int = 1, element_bytes: int = 2) -> AttentionShape:
    """Returns the shape of the attention that takes most FLOPs. Other kinds of heads are listed in it."""
    flops = Counter[Heads]()
    for mixer in mixers:
        flops[mixer.heads] += round(mixer.pair_flops * mixer.area(length))
    shapes = [
        AttentionShape(length, heads.query, heads.key_value, heads.dim, batch, element_bytes, heads.value_dim)
        for heads, _ in flops.most_common()
    ]
    return replace(shapes[0], other_layers=tuple(shapes[1:]))
