// TeX to MathML, for the subset of TeX math that models write. It creates elements and text nodes only: no HTML
// strings, styles or links. For unsupported TeX `toMathML` returns null, and the caller shows the source, which is better than a
// partly wrong formula.

import { COMMANDS, plain } from "./commands.js";
import { Unsupported, fence, m, padded, row, space, table } from "./mathml.js";
import {
  ACCENTS, ALPHABETS, ARROWS, CENTRED, DELIMITERS, FUNCTIONS, INTEGRALS, LARGE, LETTERS, LIMITS, LINES, MATRICES,
  OPERATORS, SPACES, STRETCHED, UNDER, UPRIGHT,
} from "./symbols.js";

const MAX_LENGTH = 10000; // characters of a formula
const MAX_DEPTH = 60; // nested groups: each takes a few stack frames
const BIG = { big: 1.2, Big: 1.8, bigg: 2.4, Bigg: 3 }; // em, as in plain TeX
const FENCES = /^[()[\]|/.<>]$/;
const MAIN = { "-": "−", "*": "∗", "`": "‘" };

// After one of these, "+" and "-" are unary.
const isOperator = (node) => node?.localName === "mo" && !/[)\]}⟩!]/.test(node.textContent);
const has = (map, name) => Object.hasOwn(map, name);

/** A <math> element, or null if `source` uses unsupported TeX. */
export function toMathML(source, display) {
  if (source.length > MAX_LENGTH) return null;
  try {
    const rows = new Parser(source).table([undefined]);
    const body = rows.length === 1 && rows[0].length === 1 ? rows[0][0] : [table(rows, "lines")];
    return m("math", { display: display ? "block" : "inline", alttext: source.trim() }, row(body));
  } catch (error) {
    if (error instanceof Unsupported) return null;
    throw error;
  }
}

class Parser {
  constructor(source) {
    this.source = source;
    this.at = 0;
    this.depth = 0;
  }

  // ---- tokens: a command with its backslash, or one character

  peek() {
    while (/\s/.test(this.source[this.at] ?? "x")) this.at += 1;
    const rest = this.source.slice(this.at, this.at + 40);
    return /^\\(?:operatorname\*|[A-Za-z]+|[^])|^[^]/u.exec(rest)?.[0];
  }

  next() {
    const token = this.peek();
    if (token === undefined) throw new Unsupported("the formula ends early");
    this.at += token.length;
    return token;
  }

  take(token) {
    if (this.peek() !== token) return false;
    this.at += token.length;
    return true;
  }

  /** The source between braces. */
  raw() {
    if (!this.take("{")) throw new Unsupported("a group is missing");
    const start = this.at;
    for (let open = 1; open > 0; this.at += 1) {
      const sign = this.source[this.at];
      if (sign === undefined) throw new Unsupported("a group is not closed");
      if (sign === "\\") this.at += 1;
      else open += { "{": 1, "}": -1 }[sign] ?? 0;
    }
    return this.source.slice(start, this.at - 1);
  }

  /** The source between brackets, or null. */
  optional() {
    if (!this.take("[")) return null;
    const nodes = this.row(["]"]);
    this.next();
    return row(nodes);
  }

  // ---- rows and tables

  row(stops) {
    this.depth += 1;
    if (this.depth > MAX_DEPTH) throw new Unsupported("too deep");
    const nodes = [];
    while (!stops.includes(this.peek())) {
      if (this.peek() === undefined) throw new Unsupported("something is not closed");
      nodes.push(...this.scripted(nodes, stops));
    }
    this.depth -= 1;
    return nodes;
  }

  /** Rows of cells up to one of `stops`. */
  table(stops) {
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(this.row(["&", "\\\\", "\\cr", ...stops]));
      if (this.take("&")) continue;
      if (stops.includes(this.peek())) break;
      this.next();
      if (/^\[-?[\d.]+\s*[a-z]+\]/.test(this.source.slice(this.at))) this.at = this.source.indexOf("]", this.at) + 1;
      rows.push([]);
    }
    const last = rows.at(-1);
    if (rows.length > 1 && last.length === 1 && last[0].length === 0) rows.pop(); // "\\" after the last line
    return rows;
  }

  group() {
    const nodes = this.row(["}"]);
    this.next();
    return row(nodes);
  }

  /** The argument of a command: a group, or one symbol ("\frac12" is a half). */
  argument() {
    const token = this.peek();
    if (token === "{") return (this.next(), this.group());
    if (token === undefined || ["}", "&", "^", "_", "\\\\"].includes(token)) throw new Unsupported("no argument");
    if (/^\d$/.test(token)) return m("mn", {}, this.next());
    this.depth += 1;
    if (this.depth > MAX_DEPTH) throw new Unsupported("too deep");
    const node = row(this.atom([]));
    this.depth -= 1;
    return node;
  }

  // ---- one symbol with its scripts

  scripted(before, stops) {
    const bare = ["^", "_", "'"].includes(this.peek());
    const nodes = bare ? [m("mrow", {})] : this.atom(before, stops);
    const base = nodes.at(-1);
    let limits = base?.getAttribute("movablelimits") === "true" || /limits/.test(base?.getAttribute("class"));
    let [under, over, primes] = [null, null, ""];
    for (let token = this.peek(); ["^", "_", "'", "\\limits", "\\nolimits"].includes(token); token = this.peek()) {
      this.next();
      if (token === "'") primes += "′";
      else if (token === "_" && under === null) under = this.argument();
      else if (token === "^" && over === null) over = this.argument();
      else if (token === "\\limits" || token === "\\nolimits") limits = token === "\\limits";
      else throw new Unsupported("two scripts at one place");
    }
    if (base === undefined && (under || over || primes)) throw new Unsupported("a script without a base");
    if (primes) over = row([m("mo", { lspace: "0", rspace: "0" }, primes), ...(over ? [over] : [])]);
    if (!under && !over) return nodes;
    const tag = limits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    const parts = [under, over].filter(Boolean);
    return [...nodes.slice(0, -1), m(tag[parts.length === 2 ? 2 : under ? 0 : 1], {}, base, ...parts)];
  }

  /** The nodes of the next symbol or command; `before` are the previous nodes of the row. */
  atom(before, stops) {
    const token = this.next();
    if (token[0] === "\\") return this.command(token.slice(1), before, stops);
    if (token === "{") return [this.group()];
    if (token === "~") return [space(SPACES["~"])];
    if (/[\d.]/.test(token)) {
      const number = /^\d*(?:\.\d+)?/.exec(this.source.slice(this.at - 1))[0];
      if (number) this.at += number.length - 1;
      return [number ? m("mn", {}, number) : m("mo", { lspace: "0", rspace: "0" }, token)];
    }
    if (/[()[\]]/.test(token)) return [fence(token)];
    if (token === "|") return [fence(token, { lspace: "0", rspace: "0" })];
    if (token === "/") return [m("mo", { lspace: "0", rspace: "0" }, token)];
    if (/[-+]/.test(token) && isOperator(before.at(-1))) return [m("mo", { form: "prefix" }, MAIN[token] ?? token)];
    if (/[-+*=<>,;:!?@"`%]/.test(token)) return [m("mo", {}, MAIN[token] ?? token)];
    if (/\p{L}/u.test(token)) return [m("mi", {}, token)];
    if (/[^\x00-\x7f]/.test(token)) return [m(/\p{N}/u.test(token) ? "mn" : "mo", {}, token)];
    throw new Unsupported(token);
  }

  // ---- commands

  command(name, before, stops) {
    if (has(LETTERS, name)) return [m("mi", {}, LETTERS[name])];
    if (has(UPRIGHT, name)) return [m("mi", { mathvariant: "normal" }, UPRIGHT[name])];
    if (has(OPERATORS, name)) return [m("mo", { stretchy: "false" }, OPERATORS[name])];
    if (has(LARGE, name)) return [m("mo", { largeop: "true", movablelimits: "true" }, LARGE[name])];
    if (has(INTEGRALS, name)) return [m("mo", { largeop: "true" }, INTEGRALS[name])];
    if (FUNCTIONS.has(name)) return [this.named(name, before, {})];
    if (LIMITS.has(name)) return [this.named(name.replace(/^(lim|arg)(?=.)/, "$1 "), before, { movablelimits: "true" })];
    if (has(SPACES, name)) return [space(SPACES[name])];
    if (has(DELIMITERS, name)) return [fence(DELIMITERS[name])];
    if (has(ACCENTS, name)) return [this.accent("mover", ACCENTS[name], name)];
    if (has(UNDER, name)) return [this.accent("munder", UNDER[name], name)];
    if (has(ARROWS, name)) return [this.arrow(ARROWS[name])];
    if (has(ALPHABETS, name)) return [m("mi", { mathvariant: "normal" }, alphabet(ALPHABETS[name], this.word()))];
    if (/^[%$#&_]$/.test(name)) return [m("mo", { lspace: "0", rspace: "0" }, name)];
    const big = /^(bigg?|Bigg?)[lrm]?$/.exec(name);
    if (big) return [fence(this.delimiter(), { stretchy: "true", minsize: `${BIG[big[1]]}em`, maxsize: `${BIG[big[1]]}em` })];
    if (!has(COMMANDS, name)) throw new Unsupported(`\\${name}`);
    return COMMANDS[name](this, before, stops);
  }

  /** A function's name with TeX's thin spaces. */
  named(text, before, more) {
    const rspace = ["(", "[", "^", "\\left"].includes(this.peek()) ? "0" : "0.167em";
    const last = before.at(-1);
    const lspace = last && last.localName !== "mo" && last.localName !== "mspace" ? "0.167em" : "0";
    return m("mo", { form: "prefix", stretchy: "false", lspace, rspace, ...more }, text.replaceAll(" ", "\u2009"));
  }

  accent(tag, sign, name) {
    const over = tag === "mover" ? { accent: "true" } : { accentunder: "true" };
    return m(tag, over, this.argument(), m("mo", { stretchy: String(STRETCHED.has(name)) }, sign));
  }

  arrow(sign) {
    const below = this.optional();
    const parts = [m("mo", { stretchy: "true" }, sign), ...(below ? [below] : []), padded(this.argument())];
    return m(below ? "munderover" : "mover", {}, ...parts);
  }

  /** The text of an argument that may be a single letter. */
  word() {
    const text = this.peek() === "{" ? this.raw() : this.next();
    return plain(text);
  }

  delimiter() {
    const token = this.next();
    if (FENCES.test(token)) return { ".": "", "<": "⟨", ">": "⟩" }[token] ?? token;
    if (token[0] === "\\" && has(DELIMITERS, token.slice(1))) return DELIMITERS[token.slice(1)];
    throw new Unsupported(token);
  }

  /** \left … \right, with any \middle. */
  fenced() {
    const signs = { stretchy: "true", symmetric: "true" };
    const nodes = [m("mo", { ...signs, fence: "true", form: "prefix" }, this.delimiter())];
    for (;;) {
      nodes.push(...this.row(["\\right", "\\middle"]));
      const form = this.next() === "\\right" ? "postfix" : "infix";
      nodes.push(m("mo", { ...signs, fence: "true", form }, this.delimiter()));
      if (form === "postfix") return m("mrow", {}, ...nodes);
    }
  }

  environment() {
    const whole = this.raw();
    const name = whole.replace(/\*$/, "");
    const columns = /^(array|alignat|alignedat)$/.test(name) ? this.raw().replace(/[^lcr]/g, "") : "";
    const rows = this.table(["\\end"]);
    this.next();
    if (this.raw() !== whole) throw new Unsupported(`\\end of another than ${whole}`);
    if (LINES.has(name)) return table(rows, "lines");
    if (CENTRED.has(name)) return table(rows, "centred");
    if (!has(MATRICES, name)) throw new Unsupported(whole);
    const [left, right] = MATRICES[name];
    const edge = (sign, form) => (sign ? [m("mo", { stretchy: "true", fence: "true", form }, sign)] : []);
    const kind = name.endsWith("cases") ? "cases" : "matrix";
    return row([...edge(left, "prefix"), table(rows, kind, columns), ...edge(right, "postfix")]);
  }

  fraction(attributes = {}) {
    return m("mfrac", attributes, this.argument(), this.argument());
  }

  binomial(attributes = {}) {
    const inner = this.fraction({ linethickness: "0" });
    const signs = { stretchy: "true", fence: "true" };
    return m("mrow", attributes, m("mo", { ...signs, form: "prefix" }, "("), inner, m("mo", { ...signs, form: "postfix" }, ")"));
  }

  /** The rest of the row, in display style or text style. */
  style(displaystyle, stops) {
    return [m("mstyle", { displaystyle: String(displaystyle) }, ...this.row([...stops, "&", "\\\\"]))];
  }
}

function alphabet({ upper, lower, digit, other }, text) {
  const sign = (letter) => {
    if (has(other, letter)) return other[letter];
    if (/[A-Z]/.test(letter)) return String.fromCodePoint(upper + letter.charCodeAt(0) - 65);
    if (/[a-z]/.test(letter)) return String.fromCodePoint(lower + letter.charCodeAt(0) - 97);
    if (digit && /\d/.test(letter)) return String.fromCodePoint(digit + Number(letter));
    return letter;
  };
  return [...text.replace(/\s+/g, "")].map(sign).join("");
}
