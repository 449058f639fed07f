"""Labs about preferences, rewards and rollouts."""
