// Answers from documents: which vector store a conversation searches.

import * as client from "./client.js";
import { keep } from "./keep.js";
import { state } from "./state.js";
import { loadKey } from "./store.js";
import { t } from "./words.js";

const $ = (id) => document.getElementById(id);
const UPLOADED = /^vs_[0-9a-f]{24}$/; // the others are indexes that the server was started with

/** The store that a conversation searches: its choice, or the server's first index; "" for none. */
export function chosenStore(chat) {
  if (chat.store && state.stores.some(({ id }) => id === chat.store)) return chat.store;
  return chat.store === "" ? "" : (state.stores.find(({ id }) => !UPLOADED.test(id))?.id ?? "");
}

export async function findStores() {
  try {
    state.stores = await client.stores(loadKey());
  } catch {
    state.stores = []; // an encoder's server, or one behind a proxy that has no such route
  }
  showStores();
}

export function showStores() {
  const options = state.stores.map(({ id, name }) => new Option(name || id, id));
  $("documents").replaceChildren(new Option(t("no_documents"), ""), ...options);
  $("documents").value = chosenStore(state.chat);
  $("documents-field").hidden = state.stores.length === 0;
}

export function startDocuments() {
  $("documents").addEventListener("change", () => {
    state.chat.store = $("documents").value;
    keep(state.chat);
  });
}
