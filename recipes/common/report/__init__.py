"""What every run reports: sharding tables, FLOPs, collectives, pictures."""
