"""Reinforcement learning from rewards: the losses of sampled answers, rewards, and batches that a model makes."""
