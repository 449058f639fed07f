// Answers from documents: which vector store is searched, and the sources under an answer.

import * as client from "./client.js";
import { el } from "./dom.js";
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

/** Reads the sources and citations of the last chunk. */
export function addSources(message, { sources, annotations }) {
  if (sources) message.sources = sources;
  if (annotations) message.annotations = annotations.map(({ number, verified, why }) => ({ number, verified, why }));
}

/** The sources of an answer, or that nothing was found. Text of documents becomes text nodes. */
export function sourcesElement(message) {
  const { sources, annotations = [] } = message;
  if (sources.length === 0) return el("p", { class: "sources none" }, t("no_passages"));
  const items = sources.map((source) => {
    const marks = annotations.filter(({ number }) => number === source.number);
    const wrong = marks.find(({ verified }) => !verified);
    const kind = marks.length === 0 ? "unused" : wrong ? "bad" : "good";
    const note = marks.length === 0 ? t("read_only") : wrong ? t("unverified", { why: wrong.why }) : t("verified");
    const open = el("button", { type: "button", on: { click: () => openFile(source) } });
    open.append(`[${source.number}] ${source.filename}:${source.line}`);
    const passage = el("span", { class: "passage", role: "tooltip" }, source.text);
    return el("li", { class: kind }, open, el("small", {}, note), passage);
  });
  return el("ol", { class: "sources", "aria-label": t("sources") }, items);
}

/** Shows the file of a source in a dialog, at the passage. */
async function openFile(source) {
  const pieces = await client.fileContent(source, loadKey()).catch((error) => [{ text: error.message, line: 0 }]);
  $("document-title").textContent = `${source.filename}:${source.line}`;
  const shown = pieces.map(({ text, line }) => {
    const here = line === source.line && text === source.text;
    return el("pre", { class: here ? "here" : "", "data-line": String(line) }, text);
  });
  $("document-text").replaceChildren(...shown);
  $("document").showModal();
  $("document-text").querySelector(".here")?.scrollIntoView({ block: "center" });
}
