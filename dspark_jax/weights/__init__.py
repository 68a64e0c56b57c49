"""Weights in and out: names, safetensors, the bundled target, where a target is found."""
