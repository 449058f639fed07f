"""Several engine processes of one model: which of them gets a request, and how many of them there are."""
