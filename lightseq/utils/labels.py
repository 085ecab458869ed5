"""The label of tokens without a target."""

IGNORE_INDEX = -100  # as in torch.nn.functional.cross_entropy
