"""What measures and shows: the planner, proofs, the explorer, benchmarks, evaluation tasks. No run needs it."""
