// Conversations and settings, stored only in this browser's localStorage.
//
// Every conversation has its own key, so two tabs that write different ones do not overwrite each other. All of them
// together may have LIMIT characters. Token probabilities are large and stay in memory: fields whose names begin with
// "_" are not stored.

import { newId, withIds } from "./tree.js";

const CHAT = "bagu.chat.";
const SETTINGS = "bagu.sampling";
const LOOK = "bagu.look";
export const LIMIT = 4_000_000; // characters; browsers allow about 5 million for all keys of a site

/** The conversation does not fit into the browser's storage. */
export class StorageFull extends Error {}

const isChat = (key) => key.startsWith(CHAT);

function read(key, fallback) {
  try {
    return { ...fallback, ...JSON.parse(localStorage.getItem(key) ?? "{}") };
  } catch {
    return { ...fallback }; // not JSON: written by something else, or truncated
  }
}

function encode(value) {
  return JSON.stringify(value, (name, part) => (name.startsWith("_") ? undefined : part));
}

const write = (key, value) => localStorage.setItem(key, encode(value));

export function newChat() {
  const now = Date.now();
  const texts = { title: "", system: "", schema: "", tools: "" };
  return { id: newId(), ...texts, created: now, updated: now, messages: [], leaf: null };
}

/** All conversations, most recently changed first. */
export function loadChats() {
  const stored = Object.keys(localStorage).filter(isChat).map((key) => read(key, {}));
  const chats = stored.filter((chat) => chat.id && Array.isArray(chat.messages));
  return chats.map((chat) => withIds({ ...newChat(), ...chat })).sort((a, b) => b.updated - a.updated);
}

/** The characters that the conversations take; `except` is the key of one that is not counted. */
export function usage(except = null) {
  const keys = Object.keys(localStorage).filter((key) => isChat(key) && key !== except);
  return keys.reduce((sum, key) => sum + localStorage.getItem(key).length, 0);
}

/** Throws StorageFull if the conversation does not fit. */
export function saveChat(chat) {
  const [key, text] = [CHAT + chat.id, encode(chat)];
  if (usage(key) + text.length > LIMIT) throw new StorageFull();
  try {
    localStorage.setItem(key, text);
  } catch (error) {
    throw new StorageFull(error.message); // other pages of this site use the rest
  }
}

export function deleteChat(chat) {
  localStorage.removeItem(CHAT + chat.id);
}

export const isChatKey = (key) => key === null || isChat(key);

// Only the fields that the user has set, by the API's names; null is a cleared field.
export const loadSettings = () => read(SETTINGS, {});
export const saveSettings = (settings) => write(SETTINGS, settings);

const LOOKS = { theme: null, language: null, probabilities: false, panel: null, sidebar: true };
export const loadLook = () => read(LOOK, { ...LOOKS, compare: false, model: null, second: null });
export const saveLook = (look) => write(LOOK, look);

// The API key is kept until the tab is closed.
export const loadKey = () => sessionStorage.getItem("bagu.key") ?? "";
export const saveKey = (key) => sessionStorage.setItem("bagu.key", key);
