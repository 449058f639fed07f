// A model's thoughts: the text between <think> and </think>, or the reasoning that the server has separated.

const OPEN = "<think>";
const CLOSE = "</think>";
const BEGINS = /^[ \t]*<think>/gm;
const ONLY_CLOSED = /^[ \t]*<\/think>/m; // the chat template wrote <think>, so the answer has only </think>
const FENCE = /^ {0,3}(`{3,}|~{3,})/;

/** The parts of an answer in order: `{thought, text, open}`. `thought` is the number of a thought, or null for the
 * answer itself; `open` is true for a thought without an end. Tags are recognized at the beginning of a line and outside code
 * blocks. With `streaming`, an incomplete tag at the end is left out. */
export function parts(content, streaming = false) {
  const found = [];
  let count = 0;
  let rest = streaming ? withoutHalfTag(content) : content;
  const closed = ONLY_CLOSED.exec(rest);
  if (closed && !opensBefore(rest, closed.index) && !inFence(rest, closed.index)) {
    found.push({ thought: count++, text: rest.slice(0, closed.index), open: false });
    rest = rest.slice(closed.index).replace(CLOSE, "");
  }
  for (let start = thoughtStart(rest); start >= 0; start = thoughtStart(rest)) {
    found.push({ thought: null, text: rest.slice(0, start), open: false });
    const inner = rest.slice(rest.indexOf(OPEN, start) + OPEN.length);
    const end = inner.indexOf(CLOSE);
    found.push({ thought: count++, text: end < 0 ? inner : inner.slice(0, end), open: end < 0 });
    rest = end < 0 ? "" : inner.slice(end + CLOSE.length);
  }
  found.push({ thought: null, text: rest, open: false });
  return found.filter(({ text, open }) => open || text.trim());
}

/** The parts of a message: its `reasoning`, which the server has separated from the content, and those of the content.
 * The reasoning is open until the content or a tool call begins. */
export function messageParts({ content, reasoning, tool_calls: calls }, streaming = false) {
  const rest = parts(content, streaming);
  if (!reasoning) return rest;
  const first = { thought: 0, text: reasoning, open: !content && !calls };
  return [first, ...rest.map((part) => ({ ...part, thought: part.thought === null ? null : part.thought + 1 }))];
}

/** An answer without its thoughts. */
export function spoken(content) {
  const answers = parts(content).filter(({ thought }) => thought === null);
  return answers.map(({ text }) => text.trim()).join("\n\n");
}

const opensBefore = (text, end) => text.slice(0, end).includes(OPEN);

function thoughtStart(text) {
  for (const { index } of text.matchAll(BEGINS)) if (!inFence(text, index)) return index;
  return -1;
}

function inFence(text, end) {
  let mark = null;
  for (const line of text.slice(0, end).split("\n")) {
    const fence = FENCE.exec(line)?.[1];
    if (mark === null) mark = fence ?? null;
    else if (fence?.startsWith(mark)) mark = null;
  }
  return mark !== null;
}

function withoutHalfTag(text) {
  const start = text.lastIndexOf("<");
  const tail = text.slice(start);
  const half = start >= 0 && !tail.endsWith(">") && (OPEN.startsWith(tail) || CLOSE.startsWith(tail));
  return half ? text.slice(0, start) : text;
}
