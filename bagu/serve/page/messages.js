// Renders the messages of a conversation. It only shows state; the user's actions are passed to `act`.

import { fillAnswer, showsTokens } from "./body.js";
import { copy, el, iconButton } from "./dom.js";
import { resultForm } from "./toolcalls.js";
import { spoken } from "./think.js";
import { branches, openPair, shown } from "./tree.js";
import { t } from "./words.js";

const $ = (id) => document.getElementById(id);
const NAMES = { user: "you", assistant: "assistant", tool: "tool_result" };

/** Renders all shown messages again. */
export function showMessages(chat, look, act) {
  const path = shown(chat);
  const pair = openPair(chat);
  const single = pair.length ? path.slice(0, -1) : path;
  const elements = single.map((message) => messageElement(chat, message, look, act));
  if (pair.length) elements.push(el("div", { class: "pair" }, pair.map((one) => messageElement(chat, one, look, act))));
  $("empty").hidden = path.length > 0;
  $("messages").replaceChildren(...elements);
}

function messageElement(chat, message, look, act) {
  const article = el("article", { class: `message ${message.role}`, "aria-label": t(NAMES[message.role]) });
  article._message = message;
  if (message.pair) article.append(el("h3", { class: "who" }, message.model));
  article.append(el("div", { class: "body" }), el("div", { class: "foot" }));
  fill(article, chat, look, act);
  return article;
}

/** Renders a message that is streaming. */
export function updateMessage(chat, message, look, act) {
  const article = [...$("messages").querySelectorAll(".message")].find((one) => one._message === message);
  if (article) fill(article, chat, look, act);
}

function fill(article, chat, look, act) {
  const message = article._message;
  const [body, foot] = [article.querySelector(".body"), article.querySelector(".foot")];
  article.setAttribute("aria-busy", Boolean(message._streaming));
  if (message.role === "user") fillUser(article, body, foot, chat, act);
  else if (message.role === "tool") fillTool(body, message);
  else {
    fillAnswer(body, message, look);
    if (message.error) body.append(errorElement(message, act));
    else if (message.id === chat.leaf && message.tool_calls && !message._streaming && !message.pair) {
      body.append(resultForm(message, act));
    }
    foot.replaceChildren(...(message._streaming ? [] : footOf(chat, message, look, act)));
  }
}

function fillUser(article, body, foot, chat, act) {
  const message = article._message;
  const image = (src, at) => el("img", { src, alt: t("image_number", { n: at + 1 }) });
  body.replaceChildren(...(message.images ?? []).map(image), message.content);
  const copyIt = iconButton("copy", t("copy"), () => copy(message.content));
  const edit = iconButton("edit", t("edit"), () => editor(article, message, act), { class: "icon-button edit" });
  foot.replaceChildren(switcher(chat, message, act), copyIt, edit);
}

function fillTool(body, { name, content }) {
  const summary = el("summary", {}, t("tool_result"), " ", el("code", {}, name ?? ""));
  body.replaceChildren(el("details", { class: "fold" }, summary, el("pre", { class: "json" }, content)));
}

function errorElement(message, act) {
  const retry = el("button", { type: "button", on: { click: () => act.regenerate(message) } }, t("retry"));
  return el("div", { class: "error", role: "alert" }, message.error, message.pair ? "" : retry);
}

function footOf(chat, message, look, act) {
  const measured = [meta(message), showsTokens(message, look) ? scale() : ""];
  const copyIt = iconButton("copy", t("copy"), () => copy(textOf(message) || message.content));
  if (message.pair) {
    const name = t("use_this");
    const choose = el("button", { type: "button", class: "solid-button", on: { click: () => act.choose(message) } }, name);
    return [...measured, copyIt, choose];
  }
  const again = iconButton("retry", t("regenerate"), () => act.regenerate(message));
  return [switcher(chat, message, act), ...measured, copyIt, again];
}

/** The text of an answer without its thoughts. */
export const textOf = (message) => spoken(message.content);

/** ‹ 2/3 ›: changes between the branches at a message; "" if there is one. */
function switcher(chat, message, act) {
  const all = branches(chat, message);
  if (all.length < 2) return "";
  const at = all.indexOf(message);
  const turn = (step, name, label) => {
    const props = { disabled: !all[at + step], "data-step": String(step) };
    return iconButton(name, t(label), () => act.showBranch(all[at + step], step), props);
  };
  const count = el("span", { "aria-hidden": "true" }, `${at + 1}/${all.length}`);
  const label = t("branch", { n: at + 1, total: all.length });
  const buttons = [turn(-1, "left", "previous_branch"), count, turn(1, "right", "next_branch")];
  return el("span", { class: "branches meta", role: "group", "aria-label": label }, buttons);
}

/** Gives the focus to the switcher of the message with this id, after it was rendered again. */
export function focusSwitcher(id, step) {
  const article = [...$("messages").querySelectorAll(".message")].find((one) => one._message.id === id);
  const buttons = [...(article?.querySelectorAll(".branches button:enabled") ?? [])];
  (buttons.find((button) => button.dataset.step === String(step)) ?? buttons[0])?.focus();
}

/** The speed of an answer, and why it ended if it was cut or stopped; "" if nothing is known. */
function meta({ tokens, tokens_per_s: rate, ttft_ms: ttft, finish, model }) {
  const parts = [];
  if (tokens) parts.push(t("meta_tokens", { n: tokens }));
  if (rate) parts.push(t("meta_speed", { n: rate < 100 ? rate.toFixed(1) : Math.round(rate) }));
  if (ttft !== undefined && ttft !== null) parts.push(t("meta_ttft", { n: Math.round(ttft) }));
  if (finish === "length" || finish === "abort") parts.push(t(`finish_${finish}`));
  return parts.length ? el("span", { class: "meta", title: model }, parts.join(" · ")) : "";
}

function scale() {
  const steps = [0, 1, 2, 3, 4, 5].map((step) => el("i", { class: `token s${step}` }));
  return el("span", { class: "scale meta" }, el("span", {}, t("likely")), ...steps, el("span", {}, t("surprising")));
}

/** The editor of a user's message; sending it adds a branch. */
function editor(article, message, act) {
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
  [...$("messages").querySelectorAll(".message.user .edit")].at(-1)?.click();
}
