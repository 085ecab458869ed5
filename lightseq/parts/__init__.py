"""Parts of a model that training knows: how each is found, what it costs, how its computation is replaced and undone."""
