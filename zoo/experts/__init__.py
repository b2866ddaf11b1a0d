"""Mixtures of experts: routing, the exchange of rows between devices, grouped matmuls."""
