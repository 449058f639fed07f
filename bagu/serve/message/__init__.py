"""The text of an assistant's message, parsed while it is generated: reasoning, content and tool calls."""
