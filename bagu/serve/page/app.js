// The chat page: starts its parts, and connects the page's own controls and keys to the user's actions.

import { act, newChat, send, canSend, show } from "./actions.js";
import { stop } from "./answers.js";
import { keep } from "./keep.js";
import { showImages, startImages, takeImages } from "./images.js";
import { editLast } from "./messages.js";
import { startModels } from "./models.js";
import { showOptions, showSampling, startOptions } from "./options.js";
import { EnginePanel } from "./panel.js";
import { openId, restorePlace, savePlace, setOpen } from "./place.js";
import { atBottom, bottom, refresh, refreshChats, refreshSend, startRender } from "./render.js";
import { change, closeOverlay, look, showSidebar, startShell } from "./shell.js";
import { isRunning, state } from "./state.js";
import * as store from "./store.js";
import { TokenCard } from "./tokens.js";
import { startTransfer } from "./files.js";
import { setLanguage, translate } from "./words.js";

const $ = (id) => document.getElementById(id);
const scroll = $("scroll");
const panel = new EnginePanel($("engine"), store.loadKey);

function applyLook() {
  setLanguage(look.language ?? (navigator.language.startsWith("zh") ? "zh" : "en"));
  translate();
  if (look.theme) document.documentElement.dataset.theme = look.theme;
  $("probabilities").setAttribute("aria-pressed", look.probabilities);
  showSampling();
  showOptions();
  panel.draw();
  refresh();
}

/** The page is closed or reloaded: saves the answers so far and the scroll position. */
function leave() {
  savePlace(state.chat.id, scroll, $("messages"));
  for (const chat of state.chats.filter(isRunning)) {
    for (const message of chat.messages.filter(({ _streaming }) => _streaming)) message.finish ??= "abort";
    keep(chat);
  }
}

// ---- the composer

function grow() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  refreshSend();
}

function submitInput() {
  const text = $("input").value.trim();
  if (!text || !canSend()) return;
  $("input").value = "";
  grow();
  submit(text);
}

/** Sends a text with the images that wait. */
function submit(text) {
  if (!text || !canSend()) return;
  send(text, undefined, takeImages());
}

function inputKeys(event) {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    submitInput();
  } else if (event.key === "ArrowUp" && $("input").value === "" && !isRunning()) {
    event.preventDefault();
    editLast();
  }
}

// ---- the keyboard

const isField = (node) => node.matches?.("input, textarea, select, [contenteditable]");

function search() {
  showSidebar(true);
  $("search").focus();
}

function keys(event) {
  if (event.isComposing || document.querySelector("dialog[open]")) return; // an input method, or a dialog's own keys
  const command = event.ctrlKey || event.metaKey;
  const plain = !command && !event.altKey && !isField(event.target);
  const press = (action) => (event.preventDefault(), action());
  if (event.key === "Escape") isRunning() ? stop() : closeOverlay();
  else if (command && event.key.toLowerCase() === "k") press(newChat);
  else if (command && event.key === "/") press(() => $("shortcuts").showModal());
  else if (plain && event.key === "?") press(() => $("shortcuts").showModal());
  else if (plain && event.key === "/") press(search);
}

function searchKeys(event) {
  if (event.isComposing || event.key !== "Escape") return;
  $("search").value = "";
  find();
  $("input").focus();
  event.stopPropagation();
}

function find() {
  state.query = $("search").value;
  refreshChats();
}

// ---- start

function listen() {
  const click = (id, listener) => $(id).addEventListener("click", listener);
  $("composer").addEventListener("submit", (event) => (event.preventDefault(), submitInput()));
  $("input").addEventListener("input", grow);
  $("input").addEventListener("keydown", inputKeys);
  $("search").addEventListener("input", find);
  $("search").addEventListener("keydown", searchKeys);
  document.addEventListener("keydown", keys);
  scroll.addEventListener("scroll", () => ($("latest").hidden = atBottom()), { passive: true });
  click("skip", () => $("input").focus());
  click("latest", bottom);
  click("stop", stop);
  click("new", newChat);
  click("help", () => $("shortcuts").showModal());
  click("examples", (event) => event.target.matches("button") && submit(event.target.textContent));
  click("probabilities", () => (change({ probabilities: !look.probabilities }), applyLook()));
  click("language", () => (change({ language: document.documentElement.lang === "zh" ? "en" : "zh" }), applyLook()));
  click("theme", () => {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    change({ theme: (look.theme ?? (dark ? "dark" : "light")) === "dark" ? "light" : "dark" });
    applyLook();
  });
  window.addEventListener("popstate", () => show(state.chats.find(({ id }) => id === openId()) ?? store.newChat()));
  window.addEventListener("pagehide", leave);
  window.addEventListener("storage", (event) => {
    if (!store.isChatKey(event.key) || state.running.size) return; // another tab wrote; not while an answer streams
    state.chats = store.loadChats();
    state.chat = state.chats.find(({ id }) => id === state.chat.id) ?? state.chat;
    refresh();
  });
}

new TokenCard(scroll);
startRender(act);
listen();
applyLook();
startShell((open) => panel.show(open === "engine"));
startOptions();
startTransfer();
setOpen(state.chats.includes(state.chat) ? state.chat.id : null, { replace: true }); // the URL may contain a deleted one
restorePlace(state.chat.id, scroll, $("messages"));
$("input").focus();
startImages();
startModels(() => (showSampling(), showImages()));
