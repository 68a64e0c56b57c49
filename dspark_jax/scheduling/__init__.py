"""How much of a draft to verify: calibrated confidence, what a step costs, schedulers, a policy."""
