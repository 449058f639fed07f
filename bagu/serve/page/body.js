// The body of an answer: thoughts folded, Markdown or JSON or tokens, tool calls folded, and whether JSON is valid.

import { el } from "./dom.js";
import { jsonError } from "./formats.js";
import { render } from "./markdown.js";
import { sourcesElement } from "./sources.js";
import { messageParts } from "./think.js";
import { renderTokens } from "./tokens.js";
import { renderCalls } from "./toolcalls.js";
import { t } from "./words.js";

const JSON_FENCE = "````````json\n";

/** An answer has probabilities only if it was requested with them since the page was loaded. */
export const showsTokens = (message, look) => look.probabilities && message._tokens?.length > 0;

/** Renders into `body`; elements are kept while the answer grows. */
export function fillAnswer(body, message, look) {
  const calls = message.tool_calls?.length > 0;
  const text = showsTokens(message, look) ? "tokens" : message.content || message.reasoning ? "markdown" : "empty";
  const mode = `${text}${calls ? " calls" : ""}`;
  if (body._mode !== mode) {
    body._mode = mode;
    const tokens = text === "tokens" && el("div", { class: "tokens" });
    body.replaceChildren(el("div", { class: "text" }, tokens), calls ? el("div", { class: "calls" }) : "");
  }
  while (body.children.length > (calls ? 2 : 1)) body.lastChild.remove(); // added below, or by the caller
  const [root] = body.children;
  if (text === "markdown") renderParts(root, message);
  if (text === "tokens") renderTokens(root.firstChild, message._tokens);
  if (text === "empty") root.replaceChildren(message._streaming && !calls ? waiting() : "");
  if (calls) renderCalls(body.children[1], message);
  if (message.sources && !message._streaming && !message.error) body.append(sourcesElement(message));
  if (message.json && !message._streaming && message.content && !message.error) body.append(verdict(message.content));
}

const waiting = () => el("span", { class: "waiting", role: "status", "aria-label": t("thinking") });

function verdict(content) {
  const why = jsonError(content);
  return el("p", { class: `verdict ${why ? "bad" : "good"}` }, why ? t("not_json", { why }) : t("json_valid"));
}

/** Renders Markdown, and thoughts folded. An answer that must be JSON is shown as a code block. */
function renderParts(root, message) {
  const busy = message._streaming;
  root.querySelector(".caret")?.remove();
  const found = messageParts(message, busy);
  found.forEach((part, at) => {
    const kind = part.thought === null ? "markdown" : "thought";
    const made = () => (part.thought === null ? el("div", { class: kind }) : thoughtElement(message, part.thought));
    if (!root.children[at]) root.append(made());
    else if (!root.children[at].classList.contains(kind)) root.children[at].replaceWith(made());
    const element = root.children[at];
    if (part.thought !== null) nameThought(element, part, message.thoughts_ms?.[part.thought], busy);
    const asCode = message.json && part.thought === null;
    render(part.thought === null ? element : element.lastChild, asCode ? JSON_FENCE + part.text : part.text);
  });
  while (root.children.length > found.length) root.lastChild.remove();
  if (busy && found.at(-1)?.thought === null) addCaret(root.lastChild);
}

/** A thought stays open or folded, as the reader left it, when the messages are rendered again. */
function thoughtElement(message, thought) {
  message._unfolded ??= new Set();
  const details = el("details", { class: "thought fold", open: message._unfolded.has(thought) });
  details.append(el("summary"), el("div", { class: "markdown" }));
  details.addEventListener("toggle", () => message._unfolded[details.open ? "add" : "delete"](thought));
  return details;
}

function nameThought(details, { open }, ms, busy) {
  const time = ms === undefined || ms === null ? null : duration(ms / 1000);
  const streaming = Boolean(open && busy);
  details.classList.toggle("streaming", streaming);
  const past = time ? t("thought", { time }) : t("thought_untimed");
  const name = streaming ? t("thought_open", { time: time ?? "" }) : past;
  if (details.firstChild.textContent !== name) details.firstChild.textContent = name;
}

function duration(seconds) {
  if (seconds < 10) return t("seconds", { n: seconds.toFixed(1) });
  const whole = Math.round(seconds);
  return whole < 60 ? t("seconds", { n: whole }) : t("minutes", { m: Math.floor(whole / 60), n: whole % 60 });
}

const BLOCKS = "p, ul, ol, li, blockquote, div, pre, pre > code, table, tbody, tr, td, th, h2, h3, h4, h5, h6";

/** Puts a caret after the last letter of `root`, in its innermost last block. */
function addCaret(root) {
  let block = root;
  while (block.lastElementChild?.matches(BLOCKS)) block = block.lastElementChild;
  block.append(el("span", { class: "caret", "aria-hidden": "true" }));
}
