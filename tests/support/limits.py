"""Limits that the operating system enforces."""

import resource


def limit_files(size: int) -> None:
    """Keeps files of this process from growing beyond `size` bytes, so that real writes fail."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
