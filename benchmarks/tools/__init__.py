"""What maintainers run: the tables of the documents, and the tuning store that ships with the package."""
