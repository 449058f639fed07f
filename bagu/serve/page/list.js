// The list of conversations, and what the search finds in it.

import { el, iconButton } from "./dom.js";
import { search } from "./search.js";
import { isRunning } from "./state.js";
import { t } from "./words.js";

const $ = (id) => document.getElementById(id);

export function showChats({ chats, chat, query, renaming }, act) {
  const found = search(chats, query);
  const rows = found.map(({ chat: one, snippet }) =>
    one === renaming ? el("li", {}, renameField(one, act)) : row(one, one === chat, query ? snippet : null, act),
  );
  const none = el("li", { class: "none" }, t(chats.length ? "nothing_found" : "no_chats"));
  $("chats").replaceChildren(...(rows.length ? rows : [none]));
  $("chats").querySelector("input")?.select();
  $("found").textContent = query ? t("found", { n: found.length }) : "";
}

function row(chat, isCurrent, snippet, act) {
  const on = { click: () => act.open(chat), dblclick: () => act.rename(chat) };
  const current = { "aria-current": isCurrent ? "true" : null };
  const name = el("span", { class: "name" }, chat.title || t("untitled"));
  const state = [isCurrent && "current", isRunning(chat) && "running"].filter(Boolean).join(" ");
  return el(
    "li",
    { class: state },
    el("button", { type: "button", class: "open", on, ...current }, name, snippet && el("small", {}, snippet)),
    iconButton("edit", t("rename"), () => act.rename(chat)),
    iconButton("export", t("export"), () => act.export(chat)),
    iconButton("trash", t("delete"), () => act.delete(chat)),
  );
}

function renameField(chat, act) {
  const field = el("input", { value: chat.title, "aria-label": t("rename") });
  field.addEventListener("blur", () => act.renamed(chat, field.value));
  field.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Escape") field.value = chat.title;
    if (event.key === "Enter" || event.key === "Escape") field.blur();
    event.stopPropagation();
  });
  return field;
}
