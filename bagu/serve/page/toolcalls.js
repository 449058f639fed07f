// The tool calls of an answer: shown folded, and a form for their results. The page runs no tools.

import { el } from "./dom.js";
import { t } from "./words.js";

/** Adds the `tool_calls` of a stream's delta to `message`. Arguments arrive in pieces, by the index of the call. */
export function addCalls(message, deltas) {
  for (const { index = 0, id, function: part } of deltas) {
    message.tool_calls ??= [];
    message.tool_calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
    const call = message.tool_calls[index];
    call.id ||= id ?? "";
    call.function.name ||= part?.name ?? "";
    call.function.arguments += part?.arguments ?? "";
  }
}

/** Arguments with an indent, or as they are if they are not complete. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Renders the calls of a message into `root`; a call stays open or folded while it grows. */
export function renderCalls(root, message) {
  message._unfolded_calls ??= new Set();
  (message.tool_calls ?? []).forEach(({ function: call }, at) => {
    if (!root.children[at]) root.append(callElement(message._unfolded_calls, at));
    const [summary, text] = root.children[at].children;
    summary.replaceChildren(t("tool_call"), " ", el("code", {}, call.name));
    text.textContent = pretty(call.arguments);
  });
}

function callElement(unfolded, at) {
  const details = el("details", { class: "fold call", open: unfolded.has(at) });
  details.append(el("summary"), el("pre", { class: "json" }));
  details.addEventListener("toggle", () => unfolded[details.open ? "add" : "delete"](at));
  return details;
}

/** A field for the result of each call; sending them continues the conversation. */
export function resultForm(message, act) {
  const fields = message.tool_calls.map(({ function: { name } }) => {
    const label = t("result_of", { name });
    return el("textarea", { rows: "2", "aria-label": label, placeholder: label });
  });
  const submit = (event) => {
    event.preventDefault();
    act.results(message, fields.map(({ value }) => value));
  };
  const button = el("button", { type: "submit", class: "solid-button" }, t("send_results"));
  return el("form", { class: "results", on: { submit } }, fields, el("div", {}, button));
}
