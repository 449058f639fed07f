"""OpenAI's Responses API, `/v1/responses`: a chat whose input and output are lists of items."""
