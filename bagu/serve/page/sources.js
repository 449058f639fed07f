// The sources of an answer from documents: their list under it, and the file of one.

import { fileContent } from "./client.js";
import { el } from "./dom.js";
import { loadKey } from "./store.js";
import { t } from "./words.js";

const $ = (id) => document.getElementById(id);

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
  const pieces = await fileContent(source, loadKey()).catch((error) => [{ text: error.message, line: 0 }]);
  $("document-title").textContent = `${source.filename}:${source.line}`;
  const shown = pieces.map(({ text, line }) => {
    const here = line === source.line && text === source.text;
    return el("pre", { class: here ? "here" : "", "data-line": String(line) }, text);
  });
  $("document-text").replaceChildren(...shown);
  $("document").showModal();
  $("document-text").querySelector(".here")?.scrollIntoView({ block: "center" });
}
