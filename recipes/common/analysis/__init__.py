"""Analysis of layouts and compiled steps: reports, FLOPs, collectives, pictures."""
