"""Trains future-token heads on a model's own rollouts, measures them, and keeps them with what they fit."""
