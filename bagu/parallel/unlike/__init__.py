"""Workers of unlike speed: what each is, how fast it is, and how much of the work it gets."""
