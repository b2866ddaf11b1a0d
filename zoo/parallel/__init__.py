"""What needs several devices: rows split along their positions, layers split into stages."""
