// The TeX commands with arguments: each is a function of the parser that returns MathML nodes.

import { Unsupported, fence, m, space, table } from "./mathml.js";

/** Plain text with TeX escapes resolved; throws Unsupported for other commands. */
export function plain(text) {
  const read = text.replace(/\\([%$#&_{} ])/g, "$1").replaceAll("\\,", "\u2009").replaceAll("~", "\u00a0");
  if (/\\/.test(read) || /(?<!\\)[${}]/.test(text)) throw new Unsupported(text); // a formula or a command inside
  return read;
}

function words(text, style) {
  return m("mtext", { class: style }, plain(text).replace(/^\s+|\s+$/g, "\u00a0"));
}

const mstyle = (name) => (parser) => [m("mrow", { class: name }, parser.argument())];
const text = (style) => (parser) => [words(parser.raw(), style)];

/** One word in a letter style, or a formula whose letters all get the style. */
const letters = (style) => (parser) => {
  const start = parser.at;
  const word = parser.peek() === "{" ? parser.raw() : parser.next();
  if (/^[\w\s,.-]*$/.test(word)) return [m("mi", { mathvariant: "normal", class: style }, word.trim())];
  parser.at = start;
  return [m("mrow", { class: style }, parser.argument())];
};

const over = (tag) => (parser) => {
  const script = parser.argument();
  return [m(tag, {}, parser.argument(), script)];
};

const nothing = () => [];
const modulo = (brackets) => (parser) => {
  const inner = [m("mo", { lspace: "0", rspace: "0.333em" }, "mod"), parser.argument()];
  return [space(0.5), ...(brackets ? [fence("("), ...inner, fence(")")] : inner)];
};

/** By name: functions (parser, the previous nodes of the row, the tokens that end the row) => nodes. */
export const COMMANDS = {
  frac: (parser) => [parser.fraction()],
  dfrac: (parser) => [m("mstyle", { displaystyle: "true" }, parser.fraction())],
  tfrac: (parser) => [m("mstyle", { displaystyle: "false" }, parser.fraction())],
  binom: (parser) => [parser.binomial()],
  sqrt: (parser) => {
    const index = parser.optional();
    return [index ? m("mroot", {}, parser.argument(), index) : m("msqrt", {}, parser.argument())];
  },
  left: (parser) => [parser.fenced()],
  begin: (parser) => [parser.environment()],
  overset: over("mover"),
  underset: over("munder"),
  not: (parser) => {
    const [node] = parser.atom([]);
    if (node?.localName !== "mo") throw new Unsupported("\\not");
    node.textContent = `${node.textContent}\u0338`.normalize("NFC");
    return [node];
  },
  substack: (parser) => {
    if (!parser.take("{")) throw new Unsupported("\\substack without a group");
    const rows = parser.table(["}"]);
    parser.next();
    return [table(rows, "centred")];
  },
  operatorname: (parser, before) => [parser.named(plain(parser.raw()), before, {})],
  "operatorname*": (parser, before) => [parser.named(plain(parser.raw()), before, { movablelimits: "true" })],
  bmod: () => [m("mo", { lspace: "0.222em", rspace: "0.222em" }, "mod")],
  pmod: modulo(true),
  mod: modulo(false),
  tag: (parser) => [space(2), words(`(${parser.raw()})`, "")],
  overline: mstyle("overline"),
  overbrace: mstyle("overbrace limits"), // drawn with CSS: few systems have a font with stretchable braces
  underbrace: mstyle("underbrace limits"),
  underline: mstyle("underline"),
  boxed: mstyle("boxed"),
  text: text(""),
  textbf: text("bold"),
  textit: text("italic"),
  texttt: text("typewriter"),
  mathrm: letters(""),
  mathbf: letters("bold"),
  boldsymbol: mstyle("bold"),
  mathtt: letters("typewriter"),
  mathit: letters("italic"),
  mathop: mstyle("limits"),
  mathbin: mstyle(""),
  displaystyle: (parser, before, stops) => parser.style(true, stops ?? [undefined]),
  textstyle: (parser, before, stops) => parser.style(false, stops ?? [undefined]),
  nonumber: nothing,
  hline: nothing,
};

// Aliases.
const SAME = {
  cfrac: "dfrac", dbinom: "binom", tbinom: "binom", stackrel: "overset", textrm: "text", textsf: "text", mbox: "text",
  textnormal: "text", mathsf: "mathrm", mathnormal: "mathit", bm: "boldsymbol", pmb: "boldsymbol", mathrel: "mathbin",
  mathord: "mathbin", mathopen: "mathbin", mathclose: "mathbin", mathpunct: "mathbin", notag: "nonumber",
  scriptstyle: "textstyle",
};
for (const [name, same] of Object.entries(SAME)) COMMANDS[name] = COMMANDS[same];
