"""Distillation: a student's loss beside a frozen teacher, whose logits may be stored."""
