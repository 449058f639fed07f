"""Images in prompts: what a request carries of them, their vectors in the engine, and URLs that are fetched."""
