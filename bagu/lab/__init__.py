"""Labs: a textbook claim, code that measures it with bagu's parts, and a verdict computed from the numbers."""
