// The chat page: its state and the user's actions. A conversation may stream an answer while another one is shown, so
// answers belong to conversations; the engine batches several answers.

import { newAnswer, receive } from "./answer.js";
import * as client from "./client.js";
import { download } from "./dom.js";
import { EnginePanel } from "./panel.js";
import { openId, restorePlace, savePlace, setOpen } from "./place.js";
import { request, showControls, UNSET } from "./settings.js";
import { change, closeOverlay, look, narrow, openPanel, showSidebar, startShell } from "./shell.js";
import * as store from "./store.js";
import { TokenCard } from "./tokens.js";
import * as view from "./view.js";
import { setLanguage, t, translate } from "./words.js";

const $ = (id) => document.getElementById(id);
const TITLE_LENGTH = 60; // characters of the first message
const MODELS_EVERY_MS = 2000; // until the server answers

const settings = store.loadSettings();
let chats = store.loadChats();
let chat = chats.find(({ id }) => id === openId()) ?? store.newChat();
let renaming = null;
let model = null;
let defaults = {}; // the server's default of each sampling field
const running = new Map(); // id of a conversation: the AbortController of its answer
const panel = new EnginePanel($("engine"), store.loadKey);

// ---- answers

async function answer(here) {
  const message = newAnswer();
  const whole = here.messages.filter(({ error, content }) => content && !error);
  const messages = whole.map(({ role, content }) => ({ role, content }));
  const system = here.system.trim() ? [{ role: "system", content: here.system.trim() }] : [];
  const body = { model, messages: [...system, ...messages], ...request(settings) };
  if (look.probabilities) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  const controller = new AbortController();
  running.set(here.id, controller);
  here.messages.push(message);
  refresh();
  bottom();
  try {
    const chunks = client.chat(body, { key: store.loadKey(), signal: controller.signal });
    await receive(message, chunks, () => grown(here, message));
  } catch (error) {
    if (controller.signal.aborted) message.finish = "abort";
    else message.error = error instanceof client.ApiError ? error.message : t("unreachable");
    if (error.status === 401) (openPanel("settings"), showEngine());
  } finally {
    running.delete(here.id);
    keep(here);
    refresh();
    if (here === chat) $("announce").textContent = message.error ?? t("finished");
  }
}

function grown(here, message) {
  if (here !== chat || !running.has(here.id)) return;
  const stick = atBottom();
  view.updateMessage(here, message, look, true, act);
  if (stick) bottom();
}

const stop = () => running.get(chat.id)?.abort();

// ---- actions

function send(text) {
  if (!text || running.has(chat.id) || model === null) return;
  if (!chat.title) chat.title = titleOf(text);
  if (!chats.includes(chat)) chats.unshift(chat);
  setOpen(chat.id, { replace: true });
  chat.messages.push({ role: "user", content: text });
  keep(chat);
  answer(chat);
}

/** The beginning of a message, cut at a space if there is one. */
function titleOf(text) {
  const line = text.replace(/\s+/g, " ");
  return line.length <= TITLE_LENGTH ? line : `${line.slice(0, TITLE_LENGTH).replace(/ [^ ]*$/, "")}…`;
}

/** Removes `message` and everything after it; false while an answer is streaming. */
function cut(message) {
  if (running.has(chat.id)) return false;
  chat.messages.splice(chat.messages.indexOf(message));
  return true;
}

const act = {
  open(other) {
    setOpen(other.id);
    show(other);
  },
  rename(other) {
    renaming = other;
    refreshChats();
  },
  renamed(other, title) {
    if (renaming !== other) return;
    renaming = null;
    other.title = title.trim() || other.title;
    keep(other);
    refresh();
  },
  export(other) {
    const messages = other.messages.map(({ role, content }) => ({ role, content }));
    const system = other.system ? [{ role: "system", content: other.system }] : [];
    const created = new Date(other.created).toISOString();
    const whole = { title: other.title, created, messages: [...system, ...messages] };
    const name = (other.title || "chat").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
    download(`${name}.json`, `${JSON.stringify(whole, null, 2)}\n`, "application/json");
  },
  delete(other) {
    running.get(other.id)?.abort();
    chats = chats.filter((one) => one !== other);
    store.deleteChat(other);
    if (chat === other) {
      chat = chats[0] ?? store.newChat();
      setOpen(chats[0]?.id ?? null, { replace: true });
    }
    refresh();
    const undo = () => {
      chats.unshift(other);
      keep(other);
      act.open(other);
    };
    view.toast(t("deleted", { title: other.title || t("untitled") }), { name: t("undo"), press: undo });
  },
  regenerate(message) {
    if (cut(message)) answer(chat);
  },
  edit(message, text) {
    if (text && cut(message)) send(text);
  },
  cancelEdit() {
    refresh();
    $("input").focus();
  },
};

function newChat() {
  setOpen(null);
  show(store.newChat());
}

function show(other) {
  chat = other;
  if (narrow()) showSidebar(false);
  refresh();
  bottom();
  $("input").focus();
}

/** The page is closed or reloaded: saves the answers so far and the scroll position. */
function leave() {
  savePlace(chat.id, scroll, $("messages"));
  for (const one of chats.filter(({ id }) => running.has(id))) {
    one.messages.at(-1).finish ??= "abort";
    keep(one);
  }
}

function keep(one) {
  if (!chats.includes(one)) return; // deleted while its answer streamed
  one.updated = Date.now();
  try {
    store.saveChat(one);
  } catch {
    view.toast(t("storage_full"));
  }
}

// ---- rendering

function refreshChats() {
  view.showChats(chats, chat, running, renaming, act);
}

function refresh() {
  const busy = running.has(chat.id);
  refreshChats();
  view.showMessages(chat, look, busy, act);
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("send").disabled = !$("input").value.trim() || model === null;
  if ($("system").value !== chat.system) $("system").value = chat.system;
  document.title = chat.title ? `${chat.title} · bagu` : "bagu";
}

const scroll = $("scroll");
const atBottom = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
const bottom = () => (scroll.scrollTop = scroll.scrollHeight);
function applyLook() {
  const language = look.language ?? (navigator.language.startsWith("zh") ? "zh" : "en");
  setLanguage(language);
  translate();
  if (look.theme) document.documentElement.dataset.theme = look.theme;
  $("probabilities").setAttribute("aria-pressed", look.probabilities);
  showSampling();
  panel.draw();
  refresh();
}

const showSampling = () => showControls($("sampling"), settings, defaults, setSettings);

function setSettings(next) {
  Object.assign(settings, next);
  store.saveSettings(settings);
}

const showEngine = () => panel.show(look.panel === "engine");

async function findModels() {
  const banner = $("banner");
  try {
    const found = await client.models(store.loadKey());
    const ids = found.map(({ id }) => id);
    defaults = found[0].default_sampling ?? {}; // all names are of the same model
    showSampling();
    model = ids.includes(model) ? model : ids[0];
    $("model").replaceChildren(...ids.map((id) => new Option(id, id)));
    $("model").hidden = ids.length < 2;
    $("model-name").textContent = ids.length < 2 ? model : "";
    banner.hidden = true;
    refresh();
  } catch (error) {
    banner.textContent = error.status === 401 ? t("need_key") : t("server_gone");
    banner.hidden = false;
    if (error.status !== 401) setTimeout(findModels, MODELS_EVERY_MS);
  }
}

// ---- the page's own controls

function grow() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  $("send").disabled = !input.value.trim() || model === null;
}

function submit() {
  const text = $("input").value.trim();
  if (!text || running.has(chat.id) || model === null) return;
  $("input").value = "";
  grow();
  send(text);
}

function keys(event) {
  if (event.isComposing) return; // in an input method, Enter selects a character
  if (event.key === "Escape") {
    if (running.has(chat.id)) stop();
    else if (closeOverlay()) showEngine();
  } else if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
    event.preventDefault();
    newChat();
  }
}

function inputKeys(event) {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    submit();
  } else if (event.key === "ArrowUp" && $("input").value === "" && !running.has(chat.id)) {
    event.preventDefault();
    view.editLast();
  }
}

function listen() {
  const click = (id, listener) => $(id).addEventListener("click", listener);
  $("composer").addEventListener("submit", (event) => (event.preventDefault(), submit()));
  $("input").addEventListener("input", grow);
  $("input").addEventListener("keydown", inputKeys);
  document.addEventListener("keydown", keys);
  scroll.addEventListener("scroll", () => ($("latest").hidden = atBottom()), { passive: true });
  click("latest", bottom);
  click("stop", stop);
  click("new", newChat);
  click("examples", (event) => event.target.dataset.t && send(event.target.textContent));
  click("probabilities", () => (change({ probabilities: !look.probabilities }), applyLook()));
  click("language", () => (change({ language: document.documentElement.lang === "zh" ? "en" : "zh" }), applyLook()));
  click("theme", () => {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    change({ theme: (look.theme ?? (dark ? "dark" : "light")) === "dark" ? "light" : "dark" });
    applyLook();
  });
  click("reset", () => (setSettings(UNSET), showSampling()));
  $("model").addEventListener("change", () => (model = $("model").value));
  $("system").addEventListener("input", () => ((chat.system = $("system").value), keep(chat)));
  $("key").addEventListener("change", () => (store.saveKey($("key").value.trim()), findModels()));
  window.addEventListener("popstate", () => show(chats.find(({ id }) => id === openId()) ?? store.newChat()));
  window.addEventListener("pagehide", leave);
  window.addEventListener("storage", (event) => {
    if (!store.isChatKey(event.key) || running.size) return; // another tab wrote; not while an answer streams
    chats = store.loadChats();
    chat = chats.find(({ id }) => id === chat.id) ?? chat;
    refresh();
  });
}

new TokenCard($("scroll"));
listen();
applyLook();
startShell(showEngine);
setOpen(chats.includes(chat) ? chat.id : null, { replace: true }); // the URL may contain a deleted one
restorePlace(chat.id, scroll, $("messages"));
$("key").value = store.loadKey();
$("input").focus();
findModels();
