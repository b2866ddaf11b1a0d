"""Preference tuning: the losses of pairs of answers, and the reference they are compared with."""
