"""Other implementations of whole training steps; worker.py runs one of them in separate processes for step.py."""

OURS = "lightseq"
PEERS = ("plain", "rows", "accelerate", "deepspeed", "deepspeed-offload", "trl", "lightseq-sft", "unsloth")
IMPLEMENTATIONS = (OURS, *PEERS)
