"""Where a trainer's batches come from; what they hold is one dataclass whatever the source."""
