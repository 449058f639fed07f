// Renders the list of conversations and the messages of one. It only shows state; the user's actions are passed to
// `act`.

import { copy, el, iconButton } from "./dom.js";
import { render } from "./markdown.js";
import { parts, spoken } from "./think.js";
import { renderTokens } from "./tokens.js";
import { t } from "./words.js";

const $ = (id) => document.getElementById(id);

/** Shows the conversations, with `current` marked. The title of `renaming` is being edited. */
export function showChats(chats, current, running, renaming, act) {
  const rows = chats.map((chat) => {
    const name = chat.title || t("untitled");
    const state = [chat === current && "current", running.has(chat.id) && "running"].filter(Boolean).join(" ");
    if (chat === renaming) return el("li", {}, renameField(chat, act));
    const on = { click: () => act.open(chat), dblclick: () => act.rename(chat) };
    const marked = { "aria-current": chat === current ? "true" : null };
    return el(
      "li",
      { class: state },
      el("button", { type: "button", class: "open", on, ...marked }, name),
      iconButton("edit", t("rename"), () => act.rename(chat)),
      iconButton("export", t("export"), () => act.export(chat)),
      iconButton("trash", t("delete"), () => act.delete(chat)),
    );
  });
  $("chats").replaceChildren(...(rows.length ? rows : [el("li", { class: "none" }, t("no_chats"))]));
  $("chats").querySelector("input")?.select();
}

function renameField(chat, act) {
  const field = el("input", { value: chat.title, "aria-label": t("rename") });
  field.addEventListener("blur", () => act.renamed(chat, field.value));
  field.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Escape") field.value = chat.title;
    if (event.key === "Enter" || event.key === "Escape") field.blur();
    event.stopPropagation();
  });
  return field;
}

/** Renders all messages of a conversation again. */
export function showMessages(chat, look, running, act) {
  const empty = chat.messages.length === 0;
  $("empty").hidden = !empty;
  $("title").textContent = empty ? "" : chat.title || t("untitled");
  const articles = chat.messages.map((message, at) => messageElement(chat, message, at, look, running, act));
  $("messages").replaceChildren(...articles);
}

function messageElement(chat, message, at, look, running, act) {
  const user = message.role === "user";
  const article = el("article", { class: `message ${message.role}`, "aria-label": t(user ? "you" : "assistant") });
  article._message = message;
  article.append(el("div", { class: "body" }), el("div", { class: "foot" }));
  fill(article, chat, at, look, running, act);
  return article;
}

/** Updates a message that is streaming. */
export function updateMessage(chat, message, look, running, act) {
  const article = [...$("messages").children].find((child) => child._message === message);
  if (article) fill(article, chat, chat.messages.indexOf(message), look, running, act);
}

function fill(article, chat, at, look, running, act) {
  const message = article._message;
  const [body, foot] = article.children;
  const busy = running && at === chat.messages.length - 1 && message.role === "assistant";
  article.setAttribute("aria-busy", busy);
  if (message.role === "user") {
    body.textContent = message.content;
    const edit = iconButton("edit", t("edit"), () => edited(article, message, act));
    foot.replaceChildren(iconButton("copy", t("copy"), () => copy(message.content)), edit);
    return;
  }
  fillAnswer(body, message, look, busy);
  const again = () => act.regenerate(message);
  if (message.error) {
    const retry = el("button", { type: "button", on: { click: again } }, t("retry"));
    body.append(el("div", { class: "error", role: "alert" }, message.error, retry));
  }
  if (busy) foot.replaceChildren();
  else {
    const copyIt = iconButton("copy", t("copy"), () => copy(spoken(message.content) || message.content));
    const retry = iconButton("retry", t("regenerate"), again);
    foot.replaceChildren(meta(message), showsTokens(message, look) ? scale() : "", copyIt, retry);
  }
}

/** An answer has probabilities only if it was requested with them since the page was loaded. */
const showsTokens = (message, look) => look.probabilities && message._tokens?.length > 0;

function fillAnswer(body, message, look, busy) {
  body.querySelector(":scope > .error")?.remove();
  const mode = showsTokens(message, look) ? "tokens" : message.content ? "markdown" : "empty";
  if (body._mode !== mode) {
    body._mode = mode;
    const wait = busy ? el("span", { class: "waiting", role: "status", "aria-label": t("thinking") }) : "";
    body.replaceChildren(...{ empty: [wait], tokens: [el("div", { class: "tokens" })], markdown: [] }[mode]);
  }
  if (mode === "markdown") renderParts(body, message, busy);
  if (mode === "tokens") renderTokens(body.firstChild, message._tokens);
  if (mode === "empty" && !busy) body.replaceChildren();
}

/** Renders the answer as Markdown and thoughts folded; elements are kept while their part grows. */
function renderParts(body, message, busy) {
  body.querySelector(".caret")?.remove();
  const found = parts(message.content, busy);
  found.forEach((part, at) => {
    const kind = part.thought === null ? "markdown" : "thought";
    const made = () => (part.thought === null ? el("div", { class: kind }) : thoughtElement(message, part.thought));
    if (!body.children[at]) body.append(made());
    else if (!body.children[at].classList.contains(kind)) body.children[at].replaceWith(made());
    const element = body.children[at];
    if (part.thought !== null) nameThought(element, part, message.thoughts_ms?.[part.thought], busy);
    render(part.thought === null ? element : element.lastChild, part.text);
  });
  while (body.children.length > found.length) body.lastChild.remove();
  if (busy && found.at(-1)?.thought === null) addCaret(body.lastChild);
}

/** A thought stays open or folded, as the reader left it, when the messages are rendered again. */
function thoughtElement(message, thought) {
  message._unfolded ??= new Set();
  const details = el("details", { class: "thought", open: message._unfolded.has(thought) });
  details.append(el("summary"), el("div", { class: "markdown" }));
  details.addEventListener("toggle", () => message._unfolded[details.open ? "add" : "delete"](thought));
  return details;
}

function nameThought(details, { open }, ms, busy) {
  const time = ms === undefined || ms === null ? null : duration(ms / 1000);
  const streaming = open && busy;
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

/** The speed of an answer, and why it ended if it was cut or stopped. */
function meta({ tokens, tokens_per_s: rate, ttft_ms: ttft, finish }) {
  const parts = [];
  if (tokens) parts.push(t("meta_tokens", { n: tokens }));
  if (rate) parts.push(t("meta_speed", { n: rate < 100 ? rate.toFixed(1) : Math.round(rate) }));
  if (ttft !== undefined && ttft !== null) parts.push(t("meta_ttft", { n: Math.round(ttft) }));
  if (finish === "length" || finish === "abort") parts.push(t(`finish_${finish}`));
  return el("span", { class: "meta" }, parts.join(" · "));
}

function scale() {
  const steps = [0, 1, 2, 3, 4, 5].map((step) => el("i", { class: `token s${step}` }));
  return el("span", { class: "scale meta" }, el("span", {}, t("likely")), ...steps, el("span", {}, t("surprising")));
}

/** The editor of a user's message; sending it removes the messages after it. */
function edited(article, message, act) {
  const area = el("textarea", { value: message.content, "aria-label": t("edit") });
  const done = () => act.edit(message, area.value.trim());
  area.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      done();
    } else if (event.key === "Escape") act.cancelEdit();
    event.stopPropagation();
  });
  const cancel = el("button", { type: "button", class: "text-button", on: { click: act.cancelEdit } }, t("cancel"));
  const send = el("button", { type: "button", class: "solid-button", on: { click: done } }, t("save_send"));
  article.replaceChildren(el("div", { class: "editor" }, area, el("div", {}, cancel, send)));
  area.focus();
}

/** Opens the editor of the user's last message, if there is one. */
export function editLast() {
  const own = $("messages").querySelectorAll(".message.user");
  own[own.length - 1]?.querySelector(".foot .icon-button:last-child")?.click();
}

let toastTimer;

/** Shows a notice at the bottom for five seconds, with a button if `action` is given. */
export function toast(text, action) {
  const box = $("toast");
  const click = () => {
    box.hidden = true;
    action.press();
  };
  const press = action && el("button", { type: "button", on: { click } }, action.name);
  box.replaceChildren(el("span", {}, text), press || "");
  box.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => (box.hidden = true), 5000);
}

