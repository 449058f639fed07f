"""Objectives that learn from preferred and rejected answers: dpo.py (DPO, IPO, SimPO, KTO) and reward.py."""
