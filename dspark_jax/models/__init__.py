"""The target, the drafters and what they share: cache, layers, heads."""
