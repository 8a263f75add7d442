"""Predicts the speed of a pair on a machine: measured profiles, the grid of settings, break-even points."""
