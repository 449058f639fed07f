// Formulas in a text: finds where they begin and end, and renders them. `tex.js` makes the MathML.

import { el } from "./dom.js";
import { toMathML } from "./tex.js";

const CLOSING = { $: "$", $$: "$$", "\\(": "\\)", "\\[": "\\]" };
const LONGEST = 10000; // characters searched for the end
const MOST_LINES = 100;
const SENTENCE = /(?<![\\A-Za-z])[A-Za-z]{3,} +[A-Za-z]{2,}/; // two words: prose between two prices
const NAMED = /\\(?:text\w*|mathrm|operatorname\*?|mbox|begin|end)\s*\{[^{}]*\}/g;

let searched = { text: "", ends: {} }; // the last text, and by closing sign: the first after a place, or -1

/** Where `close` stands at or after `from`, or -1. A text of openings only is searched once, not once for each. */
function nextAt(text, from, close) {
  if (searched.text !== text) searched = { text, ends: {} };
  const known = searched.ends[close];
  if (known && known.from <= from && (known.at < 0 || known.at >= from)) return known.at;
  const at = text.indexOf(close, from);
  searched.ends[close] = { from, at };
  return at;
}

/** The formula that begins with `open` at `start`: its TeX and its end; null if there is none. */
export function formulaAt(text, start, open) {
  const from = start + open.length;
  const close = CLOSING[open];
  const found = text.slice(from, from + LONGEST);
  const length = open === "$" ? dollarEnd(text, start, found) : nextAt(text, from, close) - from;
  const tex = length > 0 && length <= LONGEST ? found.slice(0, length) : "";
  if (!tex.trim() || /\n\s*\n/.test(tex)) return null;
  return { tex, display: open === "$$" || open === "\\[", end: from + length + close.length };
}

/** The end of `$…$`, or -1 if the dollar sign is a price or a shell variable. A formula has no space inside its dollar
 * signs, no letter or digit directly outside them (except "$n$th"), and is not a sentence. */
function dollarEnd(text, start, found) {
  const length = /^(?!\s)(?:\\[^\n]|[^$`\\\n])+?(?<!\s)(?=\$)/.exec(found)?.[0].length ?? -1;
  const after = found.slice(length + 1);
  if (length < 0 || /[\p{L}\p{N}$]$/u.test(text.slice(Math.max(0, start - 2), start))) return -1;
  if (/^[\p{Script=Latin}\p{N}$]/u.test(after) && !/^(?:th|st|nd|rd|s)(?!\p{L})/u.test(after)) return -1;
  return SENTENCE.test(found.slice(0, length).replace(NAMED, "")) ? -1 : length;
}

/** The end of the displayed formula that begins at line `start`, or -1. */
export function displayEnd(lines, start) {
  const open = /^\s*(\$\$|\\\[)/.exec(lines[start])?.[1];
  if (!open) return -1;
  for (let end = start; end < start + MOST_LINES && lines[end]?.trim(); end += 1) {
    const line = end === start ? lines[end].trim().slice(2) : lines[end].trim();
    const at = line.indexOf(CLOSING[open]);
    if (at >= 0) return at === line.length - 2 ? end + 1 : -1;
  }
  return -1;
}

/** MathML, or the source if it uses unsupported TeX. */
export function formula({ tex, display }, source) {
  const math = toMathML(tex, display);
  if (math === null) return el("code", { class: "tex" }, source);
  return display ? el("span", { class: "display-math" }, math) : math;
}
