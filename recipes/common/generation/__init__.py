"""Generation: a cache, sampling, and weights stored in int8."""
