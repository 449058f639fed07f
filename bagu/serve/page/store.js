// Conversations and settings, stored only in this browser's localStorage.
//
// Every conversation has its own key, so two tabs that write different ones do not overwrite each other. Token
// probabilities are large and stay in memory: fields whose names begin with "_" are not stored.

const CHAT = "bagu.chat.";
const SETTINGS = "bagu.sampling";
const LOOK = "bagu.look";

function read(key, fallback) {
  try {
    return { ...fallback, ...JSON.parse(localStorage.getItem(key) ?? "{}") };
  } catch {
    return { ...fallback }; // not JSON: written by something else, or truncated
  }
}

function write(key, value) {
  localStorage.setItem(key, JSON.stringify(value, (name, part) => (name.startsWith("_") ? undefined : part)));
}

export function newChat(system = "") {
  const now = Date.now();
  const id = `${now.toString(36)}${Math.random().toString(36).slice(2, 8)}`;
  return { id, title: "", system, created: now, updated: now, messages: [] };
}

/** All conversations, most recently changed first. */
export function loadChats() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(CHAT));
  const chats = keys.map((key) => read(key, {})).filter((chat) => chat.id && Array.isArray(chat.messages));
  return chats.sort((a, b) => b.updated - a.updated);
}

/** Throws if the browser's storage is full. */
export function saveChat(chat) {
  write(CHAT + chat.id, chat);
}

export function deleteChat(chat) {
  localStorage.removeItem(CHAT + chat.id);
}

export const isChatKey = (key) => key === null || key.startsWith(CHAT);

// Only the fields that the user has set, by the API's names; null is a cleared field.
export const loadSettings = () => read(SETTINGS, {});
export const saveSettings = (settings) => write(SETTINGS, settings);

export const loadLook = () =>
  read(LOOK, { theme: null, language: null, probabilities: false, panel: null, sidebar: true });
export const saveLook = (look) => write(LOOK, look);

// The API key is kept until the tab is closed.
export const loadKey = () => sessionStorage.getItem("bagu.key") ?? "";
export const saveKey = (key) => sessionStorage.setItem("bagu.key", key);
