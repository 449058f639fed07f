"""Objectives that sample answers and learn from their rewards: grpo.py and ppo.py are where to start reading."""
