"""Evaluation: tasks, scores with intervals, paired comparisons. `score.evaluate` is the architecture."""
