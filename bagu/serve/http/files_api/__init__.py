"""OpenAI's files and vector stores, and the passages of a request that asks for `file_search`."""
