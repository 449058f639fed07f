// Renders the state of the page. The user's actions on what is rendered are those given to `startRender`.

import { showChats } from "./list.js";
import * as messages from "./messages.js";
import { look } from "./shell.js";
import { isRunning, state } from "./state.js";
import { openPair } from "./tree.js";
import { t } from "./words.js";

const $ = (id) => document.getElementById(id);
const ANNOUNCED = 1000; // characters of an answer that are read out
let act = null;

export function startRender(actions) {
  act = actions;
}

export const refreshChats = () => showChats(state, act);

export function refresh() {
  const { chat } = state;
  refreshChats();
  messages.showMessages(chat, look, act);
  $("send").hidden = isRunning();
  $("stop").hidden = !isRunning();
  refreshSend();
  $("title").textContent = chat.messages.length ? chat.title || t("untitled") : "";
  document.title = chat.title ? `${chat.title} · bagu` : "bagu";
}

export function refreshSend() {
  const ready = state.models.length > 0 && openPair(state.chat).length === 0;
  $("send").disabled = !$("input").value.trim() || !ready;
}

/** Renders a message that is streaming. */
export const updateMessage = (message) => messages.updateMessage(state.chat, message, look, act);

/** Tells screen readers that the answers are complete. Reading tokens as they arrive would never end a sentence. */
export function announce(answers) {
  const texts = answers.map((message) => message.error ?? `${t("finished")} ${messages.textOf(message)}`);
  $("announce").textContent = texts.join(" ").slice(0, ANNOUNCED);
}

const scroll = $("scroll");
export const atBottom = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
export const bottom = () => (scroll.scrollTop = scroll.scrollHeight);
