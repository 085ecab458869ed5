"""Facts about a whole model, read by building it on the meta device and running it there."""
