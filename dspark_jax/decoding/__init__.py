"""Drawing tokens, verifying drafts, speculative rounds, schedulers, calibration, the engine."""
