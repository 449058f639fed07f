"""The bodies of requests: their fields, their checks, and the jobs that they become."""
