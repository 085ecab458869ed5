"""What a layer keeps for the backward pass: on the device, in host memory, or computed again."""
