"""Commands that look at a run from outside: plan, rehearse, verify, evaluate, merge, schedule."""
