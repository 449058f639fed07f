// Markdown to DOM nodes, for the subset that models write. No HTML strings are used, so nothing needs escaping: "<b>" in
// the source is the text "<b>". Images become links, since loading one would reveal the reader to its host.
//
// While an answer streams, only the blocks whose source changed are rendered again (`render` keeps the others).

import { el } from "./dom.js";
import { codeBlock } from "./code.js";
import { displayEnd, formula, formulaAt } from "./math.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const TOO_DEEP = /^(>\s?){9,}/; // nested quotes: each level is a recursive call
const SAFE_LINK = /^(https?:|mailto:)/i;

/** Renders `source` into `root`. */
export function render(root, source) {
  const blocks = split(source);
  const old = root._blocks ?? [];
  let same = 0;
  while (same < blocks.length && same < old.length && blocks[same].join("\n") === old[same]) same += 1;
  while (root.childNodes.length > same) root.lastChild.remove();
  for (const lines of blocks.slice(same)) root.append(block(lines));
  root._blocks = blocks.map((lines) => lines.join("\n"));
}

/** The lines of each block. A fence that is not closed yet runs to the end. */
export function split(source) {
  const lines = source.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) at += 1;
    else {
      const end = blockEnd(lines, at);
      blocks.push(lines.slice(at, end));
      at = end;
    }
  }
  return blocks;
}

function blockEnd(lines, start) {
  const fence = FENCE.exec(lines[start]);
  if (fence) return fenceEnd(lines, start, fence[1]);
  const display = displayEnd(lines, start);
  if (display > 0) return display;
  if (HEADING.test(lines[start]) || RULE.test(lines[start])) return start + 1;
  if (ITEM.test(lines[start])) return listEnd(lines, start);
  const quote = lines[start].startsWith(">");
  let end = start + 1;
  while (end < lines.length && lines[end].trim()) {
    if (quote !== lines[end].startsWith(">")) break;
    if (FENCE.test(lines[end]) || HEADING.test(lines[end]) || RULE.test(lines[end]) || ITEM.test(lines[end])) break;
    if (displayEnd(lines, end) > 0) break; // its lines may begin with "+" or "-" without being list items
    end += 1;
  }
  return end;
}

function fenceEnd(lines, start, mark) {
  for (let end = start + 1; end < lines.length; end += 1) {
    if (closes(lines[end], mark)) return end + 1;
  }
  return lines.length;
}

function closes(line, mark) {
  const found = line.trim();
  return found.length >= mark.length && found === mark[0].repeat(found.length);
}

/** A list continues over indented lines, and over one blank line before an item or an indented line. */
function listEnd(lines, start) {
  const belongs = (line) => line !== undefined && (ITEM.test(line) || /^\s{2,}\S/.test(line));
  let end = start + 1;
  while (end < lines.length) {
    if (lines[end].trim() ? belongs(lines[end]) && !RULE.test(lines[end]) : belongs(lines[end + 1])) end += 1;
    else break;
  }
  return end;
}

function block(lines) {
  const fence = FENCE.exec(lines[0]);
  if (fence) {
    const closed = lines.length > 1 && closes(lines.at(-1), fence[1]);
    return codeBlock(lines.slice(1, closed ? -1 : undefined).join("\n"), fence[2].toLowerCase());
  }
  const heading = HEADING.exec(lines[0]);
  if (heading) return el(`h${Math.min(heading[1].length + 1, 6)}`, {}, inline(heading[2])); // the page has its own h1
  if (RULE.test(lines[0])) return el("hr");
  if (ITEM.test(lines[0])) return list(lines);
  if (lines[0].startsWith(">") && !TOO_DEEP.test(lines[0])) {
    const quote = el("blockquote");
    render(quote, lines.map((line) => line.replace(/^>\s?/, "")).join("\n"));
    return quote;
  }
  if (lines.length > 1 && lines[0].includes("|") && TABLE_RULE.test(lines[1])) return table(lines);
  return el("p", {}, inline(lines.join("\n")));
}

function list(lines) {
  const [, , first] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(first);
  const indent = ITEM.exec(lines[0])[1].length;
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent + 1) items.push([item[3]]);
    else items.at(-1).push(outdent(line, indent + (ordered ? 3 : 2)));
  }
  const start = ordered ? Number.parseInt(first, 10) : 1;
  return el(ordered ? "ol" : "ul", { start: start === 1 ? null : start }, items.map(listItem));
}

/** A line of an item without the indentation of the item. */
function outdent(line, by) {
  const space = line.length - line.trimStart().length;
  return line.slice(Math.min(space, by));
}

function listItem(lines) {
  const begins = (line, at) => !line.trim() || ITEM.test(line) || FENCE.test(line) || displayEnd(lines, at) > 0;
  const end = lines.findIndex((line, at) => at > 0 && begins(line, at));
  const task = /^\[([ xX])\]\s+(.*)$/.exec(lines[0]);
  const text = [task ? task[2] : lines[0], ...lines.slice(1, end < 0 ? undefined : end)].map((line) => line.trim());
  const box = task && el("input", { type: "checkbox", disabled: true, checked: task[1] !== " " });
  const item = el("li", {}, box, inline(text.join("\n")));
  if (end > 0) for (const part of split(lines.slice(end).join("\n"))) item.append(block(part));
  return item;
}

const side = (left, right) => (right ? (left ? "center" : "right") : null);

function cells(line) {
  const parts = line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/);
  return parts.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(lines) {
  const sides = cells(lines[1]).map((rule) => /^(:?)-+(:?)$/.exec(rule)).map((rule) => rule && side(rule[1], rule[2]));
  const row = (line, tag) => el("tr", {}, cells(line).map((cell, at) => el(tag, { class: sides[at] }, inline(cell))));
  const body = lines.slice(2).map((line) => row(line, "td"));
  return el("div", { class: "table" }, el("table", {}, el("thead", {}, row(lines[0], "th")), el("tbody", {}, body)));
}

// One alternative per syntax. A run of backticks matches as a whole, so that a long run is not tried at every length.
const INLINE = new RegExp(
  [
    /\\([\\`*_{}\])#+.!|~<>$-])/, // an escaped sign
    /(?<!`)(`+)(?!`)([^]*?[^`])\2(?!`)/, // code
    /!?\[([^\]\n]{0,1000})\]\(\s*<?([^\s)>]{0,2000})>?(?:\s+"[^"\n]{0,1000}")?\s*\)/, // a link or an image
    /(https?:\/\/[^\s<>"'）。，]*[^\s<>"'.,;:!?)\]）。，*_`])/, // an address
    /(\*\*|~~|\*|_)(?=\S)/, // the beginning of emphasis
    /(\$\$?|\\[([])/, // the beginning of a formula, or "(" or "[" escaped
  ]
    .map(({ source }) => source)
    .join("|"),
  "g",
);

/** The nodes of inline text: code, links, emphasis, formulas; a newline is a line break. Double underscores are part of
 * names like __init__, not bold: models write ** for bold. */
export function inline(text) {
  const nodes = [];
  let at = 0;
  const plain = (end) => {
    text.slice(at, end).split("\n").forEach((line, n) => nodes.push(...(n ? [el("br")] : []), line));
  };
  const unclosed = new Set(); // marks that nothing closes any more: each search for one would read all of the rest
  INLINE.lastIndex = 0;
  for (let found = INLINE.exec(text); found; found = INLINE.exec(text)) {
    const [whole, escaped, , code, label, target, url, mark, open] = found;
    const math = open ? formulaAt(text, found.index, open) : null;
    const end = math?.end ?? (mark ? closing(text, found.index, mark, unclosed) : found.index + whole.length);
    if (end < 0) continue;
    plain(found.index);
    if (escaped) nodes.push(escaped);
    else if (open) nodes.push(math ? formula(math, text.slice(found.index, end)) : open.replace("\\", ""));
    else if (code) nodes.push(el("code", {}, code.replace(/^ (.*) $/s, "$1")));
    else if (mark) nodes.push(emphasis(mark, inline(text.slice(found.index + mark.length, end - mark.length))));
    else nodes.push(link(url ?? target, url ? [url] : inline(label || target), whole));
    at = end;
    INLINE.lastIndex = end; // `inline` above has moved it
  }
  plain(text.length);
  return nodes.filter((node) => node !== "");
}

/** The end of the emphasis that begins at `start`, or -1. An underscore inside a word is a letter. */
function closing(text, start, mark, unclosed) {
  if (unclosed.has(mark)) return -1;
  const letter = /[\p{L}\p{N}]/u;
  if (mark[0] === "_" && letter.test(text[start - 1] ?? " ")) return -1;
  for (let at = text.indexOf(mark, start + mark.length + 1); at > 0; at = text.indexOf(mark, at + 1)) {
    const after = text[at + mark.length] ?? " ";
    const longer = mark.length === 1 && (after === mark || text[at - 1] === mark);
    if (!/\s/.test(text[at - 1]) && !longer && !(mark[0] === "_" && letter.test(after))) return at + mark.length;
  }
  unclosed.add(mark);
  return -1;
}

function emphasis(mark, nodes) {
  return el(mark === "~~" ? "s" : mark.length === 2 ? "strong" : "em", {}, nodes);
}

function link(target, nodes, whole) {
  if (!SAFE_LINK.test(target)) return whole; // javascript:, data: and the like stay text
  return el("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, nodes);
}
