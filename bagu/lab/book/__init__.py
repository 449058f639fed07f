"""The book: every claim with its verdict, in English and 中文, as a folder of pages that needs no server."""
