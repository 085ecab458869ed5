"""Commands that look at a run from outside: plan, verify, evaluate, merge, schedule."""
