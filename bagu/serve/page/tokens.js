// The probability view of an answer: every token is coloured by its probability; hovering (or the arrow keys, or a tap)
// shows the probability and the most likely alternatives.

import { el } from "./dom.js";
import { t } from "./words.js";

/** A token of the API's `logprobs.content`, in the page's format. `text` is the text of its chunk; it is shown for a
 * token that is part of a character if the server does not send `bytes`. */
export function readToken({ token, bytes, logprob, top_logprobs: top = [] }, text) {
  const alternatives = top.map((other) => ({ token: other.token, bytes: other.bytes, p: Math.exp(other.logprob) }));
  return { token, bytes, text, p: Math.exp(logprob), logprob, alternatives };
}

/** A colour index from 0 (nearly certain) to 5; each step is a factor of about three in probability. */
export function surprise(p) {
  const limits = [0.9, 0.5, 0.2, 0.05, 0.01];
  const step = limits.findIndex((limit) => p >= limit);
  return step < 0 ? limits.length : step;
}

/** Spaces and newlines as visible symbols; bytes of an incomplete character as numbers. */
export function visible(token, bytes) {
  if (token.includes("\ufffd") && bytes) return bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
  return token.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}

/** Renders `tokens` into `root`. Tokens are only appended, so rendered ones are kept. */
export function renderTokens(root, tokens) {
  if (!root._decoder) {
    root._decoder = new TextDecoder(); // a character may span several tokens: it is shown with the last one
    root._shown = 0;
    root.setAttribute("tabindex", "0");
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", t("token_keys"));
  }
  for (const token of tokens.slice(root._shown)) {
    const text = token.bytes ? root._decoder.decode(Uint8Array.from(token.bytes), { stream: true }) : token.text;
    const span = el("span", { class: `token s${surprise(token.p)}` });
    if (text === "") span.classList.add("piece");
    span.append(text || (token.token ? "⋅" : "∎")); // part of a character, or the token that ends the answer
    span._token = token;
    root.append(span);
  }
  root._shown = tokens.length;
}

function percent(p) {
  const digits = p >= 0.9995 || p < 0.0005 ? 2 : 1;
  return p > 0 && p < 0.00005 ? "< 0.01 %" : `${(100 * p).toFixed(digits)} %`;
}

function row({ token, bytes, p }, chosen) {
  const filled = el("i");
  filled.style.width = `${100 * p}%`;
  const bar = el("span", { class: "bar", "aria-hidden": "true" }, filled);
  const cells = [el("code", {}, visible(token, bytes)), bar, percent(p)].map((cell) => el("td", {}, cell));
  return el("tr", { class: chosen ? "chosen" : null }, cells);
}

/** The card that follows the pointer over tokens under `root`. */
export class TokenCard {
  constructor(root) {
    this.card = el("div", { class: "token-card", role: "status", hidden: true });
    document.body.append(this.card);
    this.current = null;
    const over = (event) => this.show(event.target.closest?.(".token"));
    root.addEventListener("pointerover", over);
    root.addEventListener("click", over);
    root.addEventListener("pointerleave", () => this.show(null));
    root.addEventListener("scroll", () => this.show(null), { passive: true });
    root.addEventListener("keydown", (event) => this.move(event));
    root.addEventListener("focusout", () => this.show(null));
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !event.target.classList?.contains("tokens")) return;
    event.preventDefault();
    const spans = [...event.target.children];
    const at = spans.indexOf(this.current);
    this.show(spans[Math.min(Math.max(at + step, 0), spans.length - 1)]);
  }

  show(span) {
    this.current?.classList.remove("current");
    this.current = span ?? null;
    this.card.hidden = !span;
    if (!span) return;
    span.classList.add("current");
    const { token, bytes, p, logprob, alternatives } = span._token;
    const name = el("code", {}, visible(token, bytes));
    const numbers = [el("strong", {}, percent(p)), el("span", {}, `log p ${logprob.toFixed(3)}`)];
    const isThis = (other) => other.token === token && String(other.bytes) === String(bytes);
    const rows = alternatives.map((other) => row(other, isThis(other)));
    this.card.replaceChildren(el("div", { class: "token-head" }, name, numbers), el("table", {}, rows));
    this.place(span.getClientRects()[0] ?? span.getBoundingClientRect());
  }

  place(box) {
    const { offsetWidth: width, offsetHeight: height } = this.card;
    const left = Math.min(Math.max(8, box.left), window.innerWidth - width - 8);
    const below = box.bottom + 6 + height < window.innerHeight - 8;
    this.card.style.left = `${left}px`;
    this.card.style.top = `${below ? box.bottom + 6 : box.top - height - 6}px`;
  }
}
