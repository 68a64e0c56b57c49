"""What every other part stands on: config, sharding, how commands end, and what a run leaves."""
