"""What an op is: spec, signature, cases and layouts, and the check that holds a backend to the reference."""
