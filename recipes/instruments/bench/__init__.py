"""Benchmarks: python -m recipes.bench WORD."""
