// What the user does with conversations and messages.

import { answer } from "./answers.js";
import { parsedSchema, parsedTools } from "./formats.js";
import { keep } from "./keep.js";
import { focusSwitcher } from "./messages.js";
import { chosenModels } from "./models.js";
import { showOptions } from "./options.js";
import { setOpen } from "./place.js";
import { bottom, refresh, refreshChats } from "./render.js";
import { narrow, openPanel, showSidebar } from "./shell.js";
import { isRunning, state } from "./state.js";
import * as store from "./store.js";
import { toast } from "./toast.js";
import * as tree from "./tree.js";
import { t } from "./words.js";

const $ = (id) => document.getElementById(id);
const TITLE_LENGTH = 60; // characters of the first message

/** Whether a message can be sent now; says why if the user can change it. */
export function canSend() {
  if (isRunning() || !state.models.length) return false;
  if (tree.openPair(state.chat).length) return (toast(t("choose_first")), false);
  const error = parsedSchema(state.chat.schema).error ?? parsedTools(state.chat.tools).error;
  if (error) (openPanel("settings"), toast(error));
  return !error;
}

export function send(text, parent = tree.shown(state.chat).at(-1), images = []) {
  if (!text || !canSend()) return;
  const { chat } = state;
  if (!chat.title) chat.title = titleOf(text);
  if (!state.chats.includes(chat)) state.chats.unshift(chat);
  setOpen(chat.id, { replace: true });
  const message = tree.append(chat, parent, { role: "user", content: text, ...(images.length ? { images } : {}) });
  keep(chat);
  answer(chat, message, chosenModels());
}

/** The beginning of a message, cut at a space if there is one. */
function titleOf(text) {
  const line = text.replace(/\s+/g, " ");
  return line.length <= TITLE_LENGTH ? line : `${line.slice(0, TITLE_LENGTH).replace(/ [^ ]*$/, "")}…`;
}

export function show(chat) {
  state.chat = chat;
  if (narrow()) showSidebar(false);
  showOptions();
  refresh();
  bottom();
  $("input").focus();
}

export function newChat() {
  setOpen(null);
  show(store.newChat());
}

export function addChats(chats) {
  state.chats.unshift(...chats);
  chats.forEach((chat) => keep(chat));
  if (chats.length) act.open(chats[0]);
}

/** The actions of the rendered elements. */
export const act = {
  open(chat) {
    setOpen(chat.id);
    show(chat);
  },
  rename(chat) {
    state.renaming = chat;
    refreshChats();
  },
  renamed(chat, title) {
    if (state.renaming !== chat) return;
    state.renaming = null;
    chat.title = title.trim() || chat.title;
    keep(chat);
    refresh();
  },
  export(chat) {
    $("export")._chat = chat;
    $("export").showModal();
  },
  delete(chat) {
    state.running.get(chat.id)?.abort();
    state.chats = state.chats.filter((one) => one !== chat);
    store.deleteChat(chat);
    if (state.chat === chat) {
      setOpen(state.chats[0]?.id ?? null, { replace: true });
      show(state.chats[0] ?? store.newChat());
    } else refresh();
    const press = () => addChats([chat]);
    toast(t("deleted", { title: chat.title || t("untitled") }), { name: t("undo"), press });
  },
  regenerate(message) {
    if (!canSend()) return;
    const { chat } = state;
    const parent = tree.byId(chat, message.parent);
    if (message.error) tree.remove(chat, message); // a failed answer is not worth a branch
    answer(chat, parent, chosenModels().slice(0, 1));
  },
  edit(message, text) {
    if (text) send(text, tree.byId(state.chat, message.parent), message.images);
  },
  cancelEdit() {
    refresh();
    $("input").focus();
  },
  showBranch(message, step) {
    if (isRunning()) return;
    tree.showBranch(state.chat, message);
    keep(state.chat);
    refresh();
    focusSwitcher(message.id, step);
  },
  choose(message) {
    if (isRunning()) return;
    tree.choose(state.chat, message);
    keep(state.chat);
    refresh();
    $("input").focus();
  },
  results(message, contents) {
    if (!canSend()) return;
    let last = message;
    message.tool_calls.forEach(({ id, function: { name } }, at) => {
      last = tree.append(state.chat, last, { role: "tool", content: contents[at] || "null", tool_call_id: id, name });
    });
    answer(state.chat, last, chosenModels());
  },
};
