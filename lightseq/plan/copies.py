"""Time for which layers wait for copies of their activations between GPU and host."""

from collections.abc import Sequence


def exposed_copies(copies: Sequence[float], lifetimes: Sequence[int], forward: float, backward: float) -> float:
    """Returns the seconds for which layers wait for copies, forward and backward.

    `copies` are each layer's seconds in one direction, `lifetimes` come from `device_lifetimes`. Copies run one after
    another. One to the host begins after the layer's forward pass, and the first layer past the lifetime waits for it.
    One back begins with the backward pass of the lifetime's last layer, and the layer itself waits for it.
    """
    layers, ends = len(copies), {i + lifetime: i for i, lifetime in enumerate(lifetimes) if lifetime}
    copied, now, link = [0.0] * layers, 0.0, 0.0  # ends of each copy, of compute so far, and of all copies so far
    for i in range(layers):
        now = max(now, copied[ends[i]] if i in ends else 0.0) + forward
        if lifetimes[i]:
            copied[i] = link = max(link, now) + copies[i]
    exposed = now - layers * forward
    copied, now, link = [0.0] * layers, 0.0, 0.0
    for i in reversed(range(layers)):
        if i + 1 < layers and i + 1 in ends:  # a layer that is on the GPU during the loss needs no copy
            earlier = ends[i + 1]
            copied[earlier] = link = max(link, now) + copies[earlier]
        now = max(now, copied[i]) + backward
    return max(0.0, exposed + now - layers * backward)
