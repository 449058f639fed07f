"""Labs: a textbook claim, the code that measures it on the real parts, and a verdict computed from the numbers."""
