"""What a run learns: shares of a loss, their divisor, metrics, evaluation, and the models they need."""
