"""The planner: textbook bytes, memory and step times of meshes and strategies."""
