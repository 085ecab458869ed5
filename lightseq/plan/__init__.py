"""Whether a run fits and how long a step takes: predicted without a GPU, or rehearsed on one."""
