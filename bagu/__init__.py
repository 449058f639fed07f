"""bagu (八股): the canon of LLM infrastructure as one package."""

__version__ = "0.1.0.dev0"
