// A block of code: its language, a copy button, and highlighting by one small tokenizer for all languages.
//
// Comments, strings, numbers and keywords are matched by regular expressions. This is wrong in rare cases (a regular
// expression literal, a heredoc) but takes only 60 lines; the text itself never changes.

import { copy, el } from "./dom.js";
import { t } from "./words.js";

const words = (text) => new Set(text.trim().split(/\s+/));
const C_LIKE = words(`
  abstract as async await bool boolean break case catch char class const constexpr continue default defer delete
  do double else enum export extends extern false final finally float fn for func function go if impl implements
  import in inline instanceof int interface let long loop match mod mut namespace new nil null nullptr of
  operator override package private protected pub public range return self short sizeof static struct super
  switch template this throw trait true try type typedef typename typeof undefined union unsafe unsigned use
  using var virtual void volatile where while yield
`);
const PYTHON = words(`
  and as assert async await break case class continue def del elif else except False finally for from global if
  import in is lambda match None nonlocal not or pass raise return self True try while with yield
`);
const SHELL = words(`
  case cd do done echo elif else esac exit export fi for function if in local return set then unset while
`);
const SQL = words(`
  add all alter and as asc between by case create delete desc distinct drop else end exists from full group
  having in inner insert into is join key left like limit not null on or order outer primary right select set
  table then union update values when where with
`);

const HASH = /#[^\n]*/;
const SLASHES = /\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)/;
const LANGUAGES = [
  { names: words("python py python3 pycon"), keywords: PYTHON, comment: HASH },
  { names: words("bash sh shell zsh console"), keywords: SHELL, comment: HASH },
  { names: words("yaml yml toml ini dockerfile makefile r ruby rb"), keywords: PYTHON, comment: HASH },
  { names: words("sql"), keywords: SQL, comment: /--[^\n]*/, ignoreCase: true },
  { names: words("html xml svg"), keywords: new Set(), comment: /<!--[^]*?(?:-->|$)/ },
  { names: words("text txt plain plaintext markdown md"), keywords: null },
];
const OTHER = { keywords: C_LIKE, comment: SLASHES };

const STRING = /"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`/;
const NUMBER = /\b(?:0[xob][\da-f_]+|\d[\d_]*(?:\.\d+)?(?:e[+-]?\d+)?)\b/;
const NAME = /[A-Za-z_]\w*/;

/** The nodes of `source`: text, and spans of class comment, string, number, keyword or call. */
export function highlight(source, language) {
  const { keywords, comment, ignoreCase } = LANGUAGES.find(({ names }) => names.has(language)) ?? OTHER;
  if (!keywords || !language) return [source];
  const parts = new RegExp(`(${comment.source})|(${STRING.source})|(${NUMBER.source})|(${NAME.source})`, "gi");
  const nodes = [];
  let at = 0;
  for (const found of source.matchAll(parts)) {
    const [text, isComment, isString, isNumber] = found;
    const name = ignoreCase ? text.toLowerCase() : text;
    const call = source[found.index + text.length] === "(";
    const word = keywords.has(name) ? "keyword" : call ? "call" : null;
    const kind = isComment ? "comment" : isString ? "string" : isNumber ? "number" : word;
    if (!kind) continue;
    nodes.push(source.slice(at, found.index), el("span", { class: kind }, text));
    at = found.index + text.length;
  }
  nodes.push(source.slice(at));
  return nodes;
}

export function codeBlock(source, language) {
  const button = el("button", { type: "button", class: "copy-code" }, t("copy"));
  button.addEventListener("click", async () => {
    await copy(source);
    button.textContent = t("copied");
    setTimeout(() => (button.textContent = t("copy")), 1500);
  });
  const bar = el("div", { class: "code-bar" }, el("span", {}, language), button);
  return el("div", { class: "code" }, bar, el("pre", { tabindex: "0" }, el("code", {}, highlight(source, language))));
}
