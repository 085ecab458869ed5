"""Trains a step where it is imported, so that processes forked from there need not prepare what torch does once."""

import gc
import os
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from programs import alone
from small import words, write_inputs
from transformers import AutoConfig, LlamaForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from lightseq.training import train


def warm_up() -> None:
    """Runs one step of a program and of a model with adapters. Random state and environment stay as they were."""
    environment, state, init_distributed = dict(os.environ), torch.get_rng_state(), train.init_distributed
    get_checkpoint_conversion_mapping("llama")
    with tempfile.TemporaryDirectory() as folder:
        files = write_inputs(Path(folder))
        end = alone(words(files, "out", "--max_steps 1"))
        assert end.status == 0, end.err
        model = LlamaForCausalLM(AutoConfig.from_pretrained(files / "model"))
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    ids = torch.arange(8)[None]
    adapted(input_ids=ids, labels=ids).loss.backward()
    torch.set_rng_state(state)
    train.init_distributed = init_distributed  # which `alone` replaces for good
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()  # process groups have threads here, which a fork lacks: freed there, they would wait for them


warm_up()
