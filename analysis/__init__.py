"""Tables and plots of training runs and benchmarks. Needs neither torch nor a GPU."""
