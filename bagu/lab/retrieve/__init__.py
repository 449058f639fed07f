"""Labs about retrieval: words against vectors, the size of a passage."""
