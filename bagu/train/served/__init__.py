"""Training with a parameter server (bagu/parallel/server): the worker's steps, and the update on the servers."""
