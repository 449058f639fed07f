"""How the messages of one request are parsed."""

from dataclasses import dataclass

from bagu.serve.message.forms import ToolForm
from bagu.serve.message.parser import END_THINK, THINK, MessageParser

REASONING_PARSERS = ("auto", "none", "think")


def finds_reasoning(template: str, parser: str = "auto") -> bool:
    """Whether messages begin with reasoning in <think> tags: "think" always, "none" never, "auto" if the chat template
    mentions the tags."""
    return parser == "think" or (parser == "auto" and END_THINK in template)


@dataclass(frozen=True, kw_only=True)
class MessageFormat:
    """The form of tool calls (None if no tools are offered), the names of the tools, and whether the model thinks.

    `live`: a grammar makes all calls valid, so their arguments are sent while they are generated. `required`: it allows
    nothing else. `thinking`: the prompt ends with <think>.
    """

    form: ToolForm | None = None
    names: tuple[str, ...] = ()
    live: bool = False
    required: bool = False
    max_calls: int | None = None
    thinks: bool = False
    thinking: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parser must see, also if they are control tokens, which have no text otherwise."""
        return (*(self.form.markers if self.form else ()), *((THINK, END_THINK) if self.thinks else ()))

    def parser(self) -> MessageParser:
        return MessageParser(
            self.form.parse if self.form else None,
            self.names,
            live=self.live,
            required=self.required,
            max_calls=self.max_calls,
            thinks=self.thinks,
            thinking=self.thinking,
        )
