"""Leaf operations: tensors in, tensors out; nothing here imports the rest of RedKnot."""
