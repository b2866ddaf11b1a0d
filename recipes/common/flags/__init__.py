"""Flags that several recipes share: those of a model's Config, and of pictures."""
