"""Parts of a model that training knows: how each is found, what it costs, and how it is replaced and undone."""
