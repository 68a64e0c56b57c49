"""Anchors, losses, the train step and checkpoints."""
