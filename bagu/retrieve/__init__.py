"""Documents to passages to hits: reading, splitting, terms, one SQLite file, ranks that are joined, citations.

`core.search` is the whole of it in one function. Nothing here imports torch: the HTTP process has none.
"""
