"""Layers that carry a state along the positions of a row."""
