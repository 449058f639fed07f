"""A model repository: several models with versions behind one HTTP server."""
