"""One module per lab. Each exposes `LAB`; adding a lab is adding its file."""
