"""Flags of routers: their loss, and the biases that balance experts."""

from transformers import PreTrainedConfig, PreTrainedModel

from lightseq.attention.context import SequenceContext
from lightseq.config.train_config import TrainConfig
from lightseq.models.decoder import text_config, text_decoder
from lightseq.parts.changes import changes_of
from lightseq.parts.router_loss import asks_for_router_logits
from lightseq.parts.routers import Routers, has_router_loss


def router_coefficient(config: TrainConfig, model_config: PreTrainedConfig) -> float:
    """Returns the coefficient of the router loss: the flag's, or the model's own if its config turns the loss on."""
    if config.router_aux_loss_coef is not None:
        return config.router_aux_loss_coef
    text = text_config(model_config)
    return float(getattr(text, "router_aux_loss_coef", 0.0)) if asks_for_router_logits(model_config, {}) else 0.0


def make_routers(config: TrainConfig, model: PreTrainedModel, context: SequenceContext) -> Routers | None:
    """Observes the routers of a model that is on this context's ranks; None if no flag needs that.

    Raises ValueError if the model does not have what a flag needs.
    """
    coefficient, rate = router_coefficient(config, model.config), config.router_bias_update_rate
    if not coefficient and not rate:
        return None
    if rate and config.lora_rank is not None:
        raise ValueError(
            f"--router_bias_update_rate {rate} moves biases of the model, which adapters do not save; leave it out, or "
            "--lora_rank"
        )
    if coefficient and not has_router_loss(model):
        raise ValueError(
            f"--router_aux_loss_coef {coefficient}: {type(model).__name__} has no router loss in transformers; leave "
            "it out"
        )
    owners = (model, text_config(model.config))
    top_k = next((int(found) for x in owners if (found := getattr(x, "num_experts_per_tok", None))), 0)
    return Routers(model, text_decoder(model), context.sequence, changes_of(model), top_k, coefficient, rate)
