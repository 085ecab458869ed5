"""Tables and pictures of training runs and benchmarks; needs neither torch nor the machines they ran on."""
